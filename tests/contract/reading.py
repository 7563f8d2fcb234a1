"""Waits of a worker for updates, and the moment when they are applied.

This module imports neither pytest nor a private name.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiosync
from tests.contract.bench import (
    PATIENCE,
    Bench,
    background,
    needs,
    raises,
    refuses,
    small,
    until,
)
from tests.schemes._harness import read_elsewhere


async def check_receive(bench: Bench) -> None:
    """receive() returns the newest applied update, each once, and None if none came in time."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        # The initial weights do not count as a new update.
        assert await worker.scheme.receive(timeout=0) is None
        assert await worker.scheme.receive(timeout=0.01) is None
        async with background(worker.scheme.receive()) as [waiting]:
            report = await crew.send(2.0)
            update = await asyncio.wait_for(waiting, PATIENCE)
        assert (update.epoch, update.version) == (report.epoch, report.version)
        assert (update.model_id, update.weights["layers"]["0"].unique().tolist()) == (
            "policy",
            [2.0],
        )
        await crew.send(3.0)
        await crew.send(4.0)
        assert (await worker.scheme.receive()).version == 4
        assert await worker.scheme.receive(timeout=0) is None


async def check_wait_for_version(bench: Bench) -> None:
    """wait_for_version() takes past and future versions on both sides, and times out."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        worker = crew.workers[0].scheme
        assert worker.ready.is_set() and crew.sender.ready
        assert await worker.wait_for_version(1) == await crew.sender.wait_for_version(1) == 1
        async with background(worker.wait_for_version(3), crew.sender.wait_for_version(3)) as tasks:
            await crew.send(2.0)
            assert not any(task.done() for task in tasks)
            handle = crew.send_nowait(3.0)
            assert await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE) == [3, 3]
            assert (await handle).acked == {0, 1}
        assert await worker.wait_for_version(2) == 3
        for scheme in (worker, crew.sender):
            error = await raises(aiosync.RecvTimeout, scheme.wait_for_version(9, timeout=0.01))
            assert "9" in str(error)
        assert crew.sender.worker_versions == {0: 3, 1: 3}


async def check_manual_apply(bench: Bench) -> None:
    """With apply="manual" an update waits for apply_pending(), or a call that waits for it."""
    async with bench.crew(small(1.0), [small()], apply="manual") as crew:
        [worker] = crew.workers
        # connect() waits for the initial weights, so it applies them.
        assert await worker.value() == 1.0
        assert worker.scheme.apply_pending() is None
        worker.scheme.span()
        handles = [crew.send_nowait(2.0), crew.send_nowait(3.0)]
        await worker.scheme.wait_staged(3)
        assert (await worker.version(), await worker.value(), worker.scheme.lag) == (1, 1.0, 2)
        assert worker.scheme.span().last == 1
        with worker.scheme.reading():
            refuses(aiosync.LocalProtocolError, worker.scheme.apply_pending)
        assert worker.scheme.apply_pending() == 3
        assert (await worker.version(), await worker.value(), worker.scheme.lag) == (3, 3.0, 0)
        assert worker.scheme.span().last == 3
        reports = [await handle for handle in handles]
        assert [report.acked for report in reports] == [set(), {0}]
        assert reports[0].skipped == {0: 3}
        # receive() returns the update that apply_pending() has applied.
        assert (await worker.scheme.receive()).version == 3
        async with background(crew.send(4.0)) as [sending]:
            assert (await worker.scheme.receive()).version == 4
            assert (await asyncio.wait_for(sending, PATIENCE)).acked == {0}
        assert await worker.value() == 4.0


async def check_refused_by_manual_apply(bench: Bench) -> None:
    """With apply="manual" apply_pending() raises ApplyError for a version that does not fit."""
    async with bench.crew(small(1.0), [small()], apply="manual") as crew:
        [worker] = crew.workers
        async with background(
            raises(aiosync.PartialSyncError, crew.sender.send({"layers.0": small().layers[0]}))
        ) as [sending]:
            await worker.scheme.wait_staged(2)
            error = refuses(aiosync.ApplyError, worker.scheme.apply_pending)
            assert (error.version, error.remote_type) == (2, "ManifestMismatch")
            await asyncio.wait_for(sending, PATIENCE)
        assert (await worker.version(), await worker.value()) == (1, 1.0)


async def check_apply_weights(bench: Bench) -> None:
    """apply_weights() copies the given weights, in a worker only; updates go on."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        given = small(9.0).state_dict()
        worker.scheme.apply_weights(given)
        given["layers.0"].zero_()
        assert await worker.value() == 9.0
        worker.scheme.apply_weights(small(8.0).state_dict(), inplace=False)
        assert await worker.value() == 8.0
        refuses(aiosync.ManifestMismatch, lambda: worker.scheme.apply_weights({}))
        refuses(aiosync.LocalProtocolError, lambda: crew.sender.apply_weights(given))
        await crew.send(3.0)
        assert await worker.value() == 3.0
        # The model has what receive() returns, or what a wait of receive() did not bring.
        while (update := await worker.scheme.receive(timeout=0.0)) is not None:
            worker.scheme.apply_weights(update)
            worker.scheme.apply_weights(update, inplace=False)
        worker.scheme.apply_weights(None)
        with worker.scheme.reading() as read:
            assert read.version == await worker.version() == 2
        assert await worker.value() == 3.0


async def check_apply_weights_of_another_worker(bench: Bench) -> None:
    """apply_weights() copies the weights of an update that another worker's model has."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        one, other = crew.workers
        await crew.send(2.0)
        update = await one.scheme.receive(timeout=PATIENCE)
        other.scheme.apply_weights(small(9.0).state_dict())
        other.scheme.apply_weights(update)
        assert await other.value() == 2.0


async def check_calls_that_give_up(bench: Bench) -> None:
    """A call that was cancelled or timed out applies no update afterwards."""
    async with bench.crew(small(1.0), [small()], apply="manual") as crew:
        scheme = crew.workers[0].scheme
        handle = crew.send_nowait(2.0)
        await scheme.wait_staged(2)
        with read_elsewhere(scheme):
            assert await scheme.receive(timeout=0.02) is None
            await raises(aiosync.RecvTimeout, scheme.wait_for_version(2, timeout=0.02))
            await raises(aiosync.RecvTimeout, scheme.pull(min_version=2, timeout=0.02))
            # The end of the block cancels the call.
            async with background(scheme.receive()):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)
        assert (scheme.version, scheme.staged_version) == (1, 2)
        assert scheme.apply_pending() == 2
        assert (await handle).acked == {0}


async def check_wait_staged(bench: Bench) -> None:
    """wait_staged() waits until a version or a newer one has arrived; a refusal raises."""
    refused: list[str] = []

    def transform(weights: Any) -> Any:
        if refused:
            raise RuntimeError(*refused)
        return weights

    init = {"transform": transform}
    async with bench.crew(small(1.0), [small()], worker=init, apply="manual") as crew:
        ends = crew.sender, crew.workers[0].scheme
        refused.append("not this one")
        handle = crew.send_nowait(2.0)
        await raises(aiosync.PartialSyncError, crew.sender.wait_staged(2))
        await raises(aiosync.PartialSyncError, handle)
        error = await raises(aiosync.ApplyError, ends[1].wait_staged(2))
        assert "not this one" in str(error)
        refused.clear()
        handle = crew.send_nowait(3.0)
        for scheme in ends:
            assert [await scheme.wait_staged(version) for version in (3, 2)] == [3, 3]
            await raises(aiosync.RecvTimeout, scheme.wait_staged(9, timeout=0.01))
        assert (ends[1].staged_version, ends[1].version) == (3, 1)
        async with background(crew.sender.wait_staged(4)) as [waiting]:
            await crew.sender.aclose()
            for ended in (waiting, handle):
                await raises(aiosync.TransportClosed, asyncio.wait_for(ended, PATIENCE))


async def check_wait_staged_names_the_dead(bench: Bench) -> None:
    """wait_staged() of a trainer raises if a worker died before the send."""
    async with bench.crew(small(1.0), [small(), small()], apply="manual") as crew:
        dead, living = crew.workers
        await dead.die()
        await until(lambda: set(crew.sender.worker_versions) == {1})
        handle = crew.send_nowait(2.0)
        await living.scheme.wait_staged(2)
        error = await raises(aiosync.PartialSyncError, crew.sender.wait_staged(2))
        assert set(error.failed) == {0}
        assert living.scheme.apply_pending() == 2
        await raises(aiosync.PartialSyncError, handle)


async def check_calls_in_a_loop(bench: Bench) -> None:
    """Calls that need not wait let other tasks run all the same."""
    async with bench.crew(small(1.0), [small()]) as crew:
        worker = crew.workers[0].scheme

        async def read() -> None:
            async with worker.reading():
                pass

        for call in (
            read,
            worker.ready.wait,
            lambda: worker.wait_for_version(1),
            lambda: worker.wait_staged(1),
            lambda: crew.sender.wait_for_version(1),
        ):
            turned = asyncio.Event()
            asyncio.get_running_loop().call_soon(turned.set)
            for _ in range(3):
                await call()
            assert turned.is_set()


async def check_update_waits_for_reader(bench: Bench) -> None:
    """An update that arrives during a read is seen by the next read."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        version = 1
        for way in ("awaited", "plain", "in threads"):
            async with background() as tasks:
                reading = worker.scheme.reading()
                if way == "awaited":
                    await reading.__aenter__()
                elif way == "plain":
                    reading.__enter__()
                else:
                    # A pool that steps a generator on any free thread ends a read on another
                    # thread.
                    await asyncio.to_thread(reading.__enter__)
                before = version
                for _ in range(4):
                    version += 1
                    tasks.append(asyncio.ensure_future(crew.send(float(version))))
                    await asyncio.wait(tasks, timeout=0.02)
                    assert worker.model() == (before, before)
                    assert await worker.version() == before
                if way == "awaited":
                    await reading.__aexit__(None, None, None)
                else:
                    reading.__exit__(None, None, None)
                reports = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
                assert reports[-1].acked == {0}
            assert (await worker.value(), await worker.version()) == (version, version)


class Pausing(type(small())):  # type: ignore[misc]
    """Model whose forward waits in the middle."""

    def forward(self) -> tuple[float, float]:
        first = self.layers[0].mean().item()
        self.entered.set()
        assert self.leave.wait(PATIENCE)
        return first, self.layers[-1].mean().item()


async def check_update_waits_for_forward(bench: Bench) -> None:
    """A forward that began in another thread before an update computes with one version."""
    target = Pausing(-1.0, 5)
    target.entered, target.leave = threading.Event(), threading.Event()
    async with bench.crew(small(1.0), [target]) as crew:
        async with background(asyncio.to_thread(target)) as [forward]:
            await until(target.entered.is_set)
            handle = crew.send_nowait(2.0)
            await asyncio.wait([forward], timeout=0.05)
            target.leave.set()
            assert await asyncio.wait_for(forward, PATIENCE) == (1.0, 1.0)
            assert (await handle).acked == {0}
        assert target() == (2.0, 2.0)


class Slow(Pausing):
    """Model that, during an update, waits between its new weights and its new extra state."""

    def get_extra_state(self) -> float:
        return self.layers[0].mean().item()

    def set_extra_state(self, state: float) -> None:
        self.entered.set()
        self.leave.wait(0.1)
        self.state = state

    def forward(self) -> tuple[float, float]:
        return self.layers[0].mean().item(), self.state


async def check_read_waits_for_update(bench: Bench) -> None:
    """A forward that begins while an update is being applied computes with the whole update."""
    target = Slow(-1.0, 5)
    target.entered, target.leave = threading.Event(), threading.Event()
    async with bench.crew(Slow(1.0, 5), [target]) as crew:
        target.entered.clear()

        def read() -> tuple[float, float]:
            assert target.entered.wait(PATIENCE)
            seen = target()
            target.leave.set()
            return seen

        async with background(asyncio.to_thread(read)) as [reading]:
            assert (await crew.send(2.0)).acked == {0}
            assert await asyncio.wait_for(reading, PATIENCE) == (2.0, 2.0)


async def check_waiting_inside_a_read(bench: Bench) -> None:
    """A call inside a read that waits for an update, which the read delays, raises at once."""
    async with bench.crew(small(1.0), [small()]) as crew:
        worker = crew.workers[0].scheme
        async with worker.reading():
            for waiting in (
                worker.wait_for_version(2),
                worker.receive(),
                worker.pull(min_version=2),
            ):
                await raises(aiosync.LocalProtocolError, waiting)
            assert await worker.wait_for_version(1) == 1
            assert await worker.receive(timeout=0) is None
            weights = small(7.0).state_dict()
            refuses(aiosync.LocalProtocolError, lambda: worker.apply_weights(weights))
        assert (await crew.send(2.0)).acked == {0}


def forwards(worker: Any, seen: list[tuple[float, float]], ended: threading.Event) -> None:
    """Compute in a thread, every other forward inside ``reading()``; check spans and versions."""
    worker.scheme.span()
    while not ended.is_set():
        seen.append(worker.model())
        with worker.scheme.reading() as read:
            seen.append((read.version, worker.model()[1]))
        span = worker.scheme.span()
        assert (span.first, span.last) == (seen[-2][0], seen[-1][0])
        assert sum(count for _, count in span.runs) == 2


async def check_torn_reads(bench: Bench) -> None:
    """No forward, in a thread or on the loop, mixes versions or goes back to an older one."""
    for options in ({}, {"apply_copy": True}):
        async with bench.crew(small(1.0), [small(), small()], **options) as crew:
            threaded, looping = crew.workers
            seen: tuple[list[tuple[float, float]], ...] = ([], [])
            ended = threading.Event()
            thread = asyncio.to_thread(forwards, threaded, seen[0], ended)
            async with background(thread) as [task]:
                try:
                    for number in range(2, 200):
                        assert (await crew.send(float(number))).acked == {0, 1}
                        seen[1].append(looping.model())
                        assert seen[1][-1] == (number, number)
                        # Without this wait the thread would see too few versions on a busy machine.
                        if number % 20 == 0:
                            # One forward had begun before this version; the next one has it.
                            enough = len(seen[0]) + 2
                            await until(lambda n=enough, s=seen[0]: len(s) >= n or task.done())
                finally:
                    ended.set()
                await asyncio.wait_for(task, PATIENCE)
            assert all(first == last for first, last in (*seen[0], *seen[1]))
            assert seen[0] == sorted(seen[0])
            assert len(set(seen[0])) > 8, "hardly anything was sent meanwhile"


@needs("pulls")
async def check_pull(bench: Bench) -> None:
    """pull() of a worker that only pulls gets the newest version, or waits for ``min_version``."""
    assert bench.hooks.pulls is not None
    init = {"num_workers": None}
    async with bench.crew(small(1.0), [small()], init=init, **bench.hooks.pulls) as crew:
        [worker] = crew.workers
        assert await worker.scheme.pull() == 1
        for number in (2.0, 3.0):
            assert (await crew.send(number)).acked == set()
        assert (await worker.version(), await worker.value()) == (1, 1.0)
        assert await worker.scheme.pull() == 3
        assert await worker.value() == 3.0
        async with background(worker.scheme.pull(min_version=4)) as [pulling]:
            await asyncio.wait([pulling], timeout=0.1)
            await crew.send(4.0)
            assert await asyncio.wait_for(pulling, PATIENCE) == 4
        assert await worker.value() == 4.0
        await raises(aiosync.RecvTimeout, worker.scheme.pull(min_version=9, timeout=0.05))


async def check_pull_of_a_subscriber(bench: Bench) -> None:
    """pull() of a worker that gets every update returns once it has the newest."""
    async with bench.crew(small(1.0), [small()]) as crew:
        worker = crew.workers[0].scheme
        assert await worker.pull() == 1
        handle = crew.send_nowait(2.0)
        assert await worker.pull(min_version=2) == 2
        assert (await handle).acked == {0}
        assert await crew.values() == [2.0]
        with read_elsewhere(worker):
            older, newest = crew.send_nowait(3.0), crew.send_nowait(4.0)
            # pull() waits for the newest version, which is on its way.
            pulling = asyncio.ensure_future(worker.pull())
            await worker.wait_staged(newest.version, timeout=PATIENCE)
            assert not pulling.done()
        assert await asyncio.wait_for(pulling, PATIENCE) == newest.version
        assert (await newest).acked == {0}
        await older


CHECKS = (
    check_receive,
    check_wait_for_version,
    check_manual_apply,
    check_refused_by_manual_apply,
    check_apply_weights,
    check_apply_weights_of_another_worker,
    check_calls_that_give_up,
    check_wait_staged,
    check_wait_staged_names_the_dead,
    check_calls_in_a_loop,
    check_update_waits_for_reader,
    check_update_waits_for_forward,
    check_read_waits_for_update,
    check_waiting_inside_a_read,
    check_torn_reads,
    check_pull,
    check_pull_of_a_subscriber,
)
