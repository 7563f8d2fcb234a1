"""Versions that a worker has read, and ages of its samples for the trainer.

This module imports neither pytest nor a private name.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiosync
from aiosync import LastRead, VersionSpan
from tests.contract.bench import Bench, refuses, small, until
from tests.schemes._harness import read_elsewhere


def epoch_of(scheme: Any) -> str:
    """Return the epoch of a scheme in the form that spans have."""
    return f"{scheme.epoch:016x}"


async def check_version_of_a_block(bench: Bench) -> None:
    """A ``reading()`` block has one version from begin to end, even if an update waits for it."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        scheme, epoch = worker.scheme, epoch_of(crew.sender)
        reading = scheme.reading()
        with reading as read:
            assert read is reading
            assert (read.version, read.span) == (1, None)
            handle = crew.send_nowait(2.0)
            await asyncio.sleep(0.05)
            assert read.version == 1
            with scheme.reading() as inner:
                assert (inner.version, worker.model()) == (1, (1.0, 1.0))
            assert inner.span == VersionSpan(1, 1, epoch)
        assert read.span == VersionSpan(1, 1, epoch)
        await handle
        async with scheme.reading() as read:
            assert (read.version, worker.model()) == (2, (2.0, 2.0))
            handle = crew.send_nowait(3.0)
            await asyncio.sleep(0.05)
            async with scheme.reading() as inner:
                assert inner.version == 2
        assert (read.span, inner.span) == (VersionSpan(2, 2, epoch),) * 2
        await handle
        with scheme.reading() as read:
            pass
        assert read.span == VersionSpan(3, 3, epoch)


async def check_spans(bench: Bench) -> None:
    """span() gives the versions of the reads since the last call, without nested reads."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        scheme, epoch = worker.scheme, epoch_of(crew.sender)
        # The first call starts the count.
        assert scheme.span() is None
        assert scheme.span() is None
        for number in (1.0, 2.0, 3.0):
            if number > 1:
                await crew.send(number)
            worker.model()
            with scheme.reading():
                assert worker.model() == (number, number)
                with scheme.reading():
                    worker.model()
        assert scheme.span() == VersionSpan(1, 3, epoch, ((1, 2), (2, 2), (3, 2)))
        assert scheme.span() is None
        guarded = scheme.guarded(worker.model)
        async with scheme.reading():
            assert guarded() == (3.0, 3.0)
            # The read around this call has not ended.
            assert scheme.span() is None
        assert scheme.span() == VersionSpan(3, 3, epoch, ((3, 1),))
        assert guarded() == (3.0, 3.0)
        assert scheme.span() == VersionSpan(3, 3, epoch, ((3, 1),))
        # Without calls of span() the memory for the runs is bounded.
        for number in range(4, 304):
            await crew.send(float(number))
            worker.model()
        span = scheme.span()
        assert (span.first, span.last, sum(count for _, count in span.runs)) == (4, 303, 300)
        assert 100 < len(span.runs) < 300
        # Weights that were never sent have no version.
        scheme.model = None
        with scheme.reading() as read:
            assert read.version == 0
        assert read.span == VersionSpan(0, 0)
        assert crew.sender.staleness(scheme.span()) is None


async def check_spans_of_tasks_and_threads(bench: Bench) -> None:
    """Each thread and each task has its own spans."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        scheme, epoch = worker.scheme, epoch_of(crew.sender)
        scheme.span()

        async def act(number: int) -> VersionSpan | None:
            for _ in range(number):
                async with scheme.reading():
                    await asyncio.sleep(0)
                    worker.model()
                worker.model()
                await asyncio.sleep(0)
            found: VersionSpan | None = scheme.span()
            return found

        def compute() -> VersionSpan | None:
            worker.model()
            found: VersionSpan | None = scheme.span()
            return found

        spans = await asyncio.gather(*(act(number) for number in (0, 1, 3)))
        assert spans == [None, *(VersionSpan(1, 1, epoch, ((1, 2 * n),)) for n in (1, 3))]
        assert await asyncio.to_thread(compute) == VersionSpan(1, 1, epoch, ((1, 1),))
        assert scheme.span() is None


async def check_last_read(bench: Bench) -> None:
    """last_read has the version of the thread's or task's last read, whatever came since then."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        scheme, model = worker.scheme, worker.model
        await crew.send(2.0)
        # state_dict() computes nothing, so it is not a read.
        model.state_dict()
        assert (crew.sender.last_read, scheme.last_read) == (None, None)
        assert model() == (2.0, 2.0)
        assert scheme.last_read == LastRead(scheme.epoch, 2)
        await crew.send(3.0)
        await worker.wait(3)
        model.state_dict()
        assert (await worker.version(), scheme.last_read.version) == (3, 2)
        async with scheme.reading():
            assert scheme.last_read.version == 3
            sending = asyncio.create_task(crew.send(4.0))
            await asyncio.sleep(0.05)
            assert (model(), scheme.last_read.version) == ((3.0, 3.0), 3)
        await sending
        await worker.wait(4)
        assert scheme.last_read.version == 3
        # Weights that were never sent have no version.
        scheme.model = None
        with scheme.reading():
            assert scheme.last_read == LastRead(0, 0)
    # Nor has a model that was chosen during a read, until it gets the weights as that ends.
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        scheme, first, other = worker.scheme, worker.model, small()
        with read_elsewhere(scheme):
            with scheme.reading() as read:
                scheme.model = other
                assert (other(), scheme.last_read.version, read.version) == ((-1.0, -1.0), 0, 0)
            assert read.span == VersionSpan(0, 0)
        await until(lambda: other() == (1.0, 1.0))
        assert scheme.last_read == LastRead(scheme.epoch, 1)
        with read_elsewhere(scheme):
            scheme.model = first
            scheme.model = other
        await until(lambda: other() == (1.0, 1.0) and scheme.last_read.version == 1)
        await crew.send(2.0)
        assert await worker.version() == 2
        assert (other(), scheme.last_read.version) == ((2.0, 2.0), 2)


async def check_weights_by_hand(bench: Bench) -> None:
    """Reads of weights that the trainer never sent have version 0 until the next update."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        scheme, model = worker.scheme, worker.model
        state = small(9.0).state_dict()
        puts = (
            lambda: scheme.apply_weights(state),
            lambda: scheme.apply_weights(state, inplace=False),
            lambda: model.load_state_dict(state),
        )
        for number, put in enumerate(puts, 2):
            assert (await crew.send(float(number))).acked == {0}
            # Neither of these changes any weights.
            refuses(aiosync.ManifestMismatch, lambda: scheme.apply_weights({}))
            model.to(model.layers[0].dtype)
            scheme.span()
            assert (model(), scheme.last_read.version) == ((number, number), number)
            put()
            assert (model(), scheme.last_read) == ((9.0, 9.0), LastRead(0, 0))
            with scheme.reading() as read:
                assert read.version == 0
            assert (read.span, scheme.span().first) == (VersionSpan(0, 0), 0)
            assert scheme.version == number
        # Nor has the model that takes the place of this one a version, once it gets the weights.
        other = small()
        with read_elsewhere(scheme):
            scheme.model = other
        await until(lambda: other() != (-1.0, -1.0))
        assert scheme.last_read.version == 0
        await crew.send(7.0)
        await worker.wait(5)
        assert (other(), scheme.last_read.version) == ((7.0, 7.0), 5)


async def check_last_read_of_tasks_and_threads(bench: Bench) -> None:
    """Each thread and each task has its own last_read, which is that of its last forward."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        scheme, model = worker.scheme, worker.model
        model()
        sent = asyncio.Event()

        async def act(waits: bool) -> tuple[Any, ...]:
            before = scheme.last_read
            model()
            between = scheme.last_read.version
            await sent.wait()
            if not waits:
                model()
            await asyncio.sleep(0.01)
            return before, between, scheme.last_read.version

        both_run = threading.Barrier(2)

        def compute() -> None:
            # Without this, one thread of the pool may make both calls, one after the other.
            both_run.wait(30.0)
            assert scheme.last_read is None
            for _ in range(300):
                found = model()
                assert found == (scheme.last_read.version,) * 2

        tasks = [asyncio.create_task(act(waits)) for waits in (True, False, True)]
        await asyncio.sleep(0.01)
        await crew.send(2.0)
        await worker.wait(2)
        sent.set()
        assert await asyncio.gather(*tasks) == [(None, 1, 1), (None, 1, 2), (None, 1, 1)]
        assert scheme.last_read.version == 1
        threads = [asyncio.create_task(asyncio.to_thread(compute)) for _ in range(2)]
        number = 2
        while not all(each.done() for each in threads):
            number += 1
            await crew.send(float(number))
        await asyncio.gather(*threads)

        async def act_once() -> Any:
            before = scheme.last_read
            model()
            return before, scheme.last_read.version

        def run_loops() -> None:
            # One loop after the other in one thread, and code of that thread without a loop.
            for _ in range(2):
                assert asyncio.run(act_once()) == (None, number)
            assert scheme.last_read is None
            model()
            assert scheme.last_read.version == number
            assert asyncio.run(act_once()) == (None, number)

        with ThreadPoolExecutor(1) as pool:
            await asyncio.get_running_loop().run_in_executor(pool, run_loops)


async def check_first_version(bench: Bench) -> None:
    """A trainer with first_version= goes on counting, so samples of the run before have an age."""
    target, spans = small(), []
    for first_version in (1, 4, 1):
        init = {"num_workers": None}
        async with bench.crew(small(1.0), [target], init=init, first_version=first_version) as crew:
            [worker] = crew.workers
            await worker.wait(first_version)
            assert crew.sender.version == await worker.version() == first_version
            assert (await crew.send(2.0)).version == first_version + 1
            assert await crew.values() == [2.0]
            with worker.scheme.reading() as read:
                pass
            spans.append(read.span)
            assert (
                crew.sender.staleness(read.span) == crew.sender.staleness(read.span, "token") == 0
            )
            assert crew.sender.staleness(None) is None
            late = await crew.join(small())
            assert (await late.version(), await late.value()) == (first_version + 1, 2.0)
            await crew.send(3.0)
            # The second run continues after version 2 of the first run; the third run starts anew.
            ages = [crew.sender.staleness(span) for span in spans]
            assert ages == {1: [1.0], 4: [4.0, 1.0]}[first_version] or ages == [None, None, 1.0]
            refuses(aiosync.LocalProtocolError, lambda end=worker: end.scheme.staleness(None))
            refuses(aiosync.ConfigError, lambda end=crew: end.sender.staleness(None, "mean"))
    assert len({span.epoch for span in spans}) == 3
    refuses(aiosync.ConfigError, lambda: bench.make(first_version=0))


CHECKS = (
    check_version_of_a_block,
    check_spans,
    check_spans_of_tasks_and_threads,
    check_first_version,
    check_last_read,
    check_weights_by_hand,
    check_last_read_of_tasks_and_threads,
)
