"""Statistics, observers, and the lag that workers may have.

This module imports neither pytest nor a private name.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import Any

import torch

import aiosync
from tests.contract.bench import (
    PATIENCE,
    Bench,
    background,
    large,
    needs,
    raises,
    refuses,
    small,
    until,
)

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _timed(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any) -> Any:
        return method(*args)

    return call


class Late:
    """Observer for which no sync would wait: its method is async, below a decorator."""

    @_timed
    async def on_sync(self, event: aiosync.SyncEvent) -> None:
        del event


class Listener:
    """Observer that keeps its events."""

    def __init__(self) -> None:
        self.events: list[aiosync.SyncEvent] = []

    def on_sync(self, event: aiosync.SyncEvent) -> None:
        self.events.append(event)

    async def told(self, number: int) -> list[aiosync.SyncEvent]:
        """Return the events once there are ``number`` of them, and no more."""
        await until(lambda: len(self.events) >= number)
        assert len(self.events) == number
        return self.events


class Tracer(Listener):
    """Observer that gives each send a span."""

    trace: object = TRACE

    def traceparent(self, started_at: float) -> Any:
        assert 0 <= time.time() - started_at < PATIENCE
        return self.trace


async def check_stats(bench: Bench) -> None:
    """stats() counts sends and versions, has each worker's state, and works after the end."""
    async with bench.sender(small(1.0), {"num_workers": 3}) as crew:
        sender = crew.sender
        found = sender.stats()
        assert (found.role, found.model, found.version, found.workers) == (
            *("sender", "policy", 0),
            (),
        )
        transport = found.transport
        for idx in range(3):
            crew.hire(small(), idx)
        connecting = (each.connect() for each in crew.workers)
        await asyncio.gather(sender.connect(), *connecting)
        assert sender.stats().transport == transport
        for number in (2.0, 3.0, 4.0):
            report = await crew.send(number)
            assert await crew.values() == [number] * 3
        await crew.workers[1].die()
        await crew.workers[2].leave()
        await until(lambda: set(sender.worker_versions) == {0})
        found = await asyncio.to_thread(sender.stats)
        assert (found.epoch, found.version, found.newest_version) == (report.epoch, 4, 4)
        assert (found.lag, found.started, found.finished["ok"]) == (0, 3, 3)
        assert found.nbytes == 3 * report.nbytes
        assert sum(found.finished.values()) == 3
        # Phases are timed for observers only, and there is none.
        assert found.seconds == {}
        states = [(each.index, each.version, each.lag, each.state) for each in found.workers]
        assert states == [(0, 4, 0, "ready"), (1, 4, 0, "lost"), (2, 4, 0, "left")]
        assert all(0 <= each.age < PATIENCE for each in (found, *found.workers))
        worker = crew.workers[0].scheme
        found = await asyncio.to_thread(worker.stats)
        assert (found.role, found.model, found.transport) == (
            *("receiver", "policy"),
            sender.stats().transport,
        )
        assert (found.version, found.newest_version, found.lag) == (4, 4, 0)
        assert (found.epoch, found.started, found.finished["ok"]) == (report.epoch, 4, 4)
        assert (found.nbytes, found.workers) == (4 * report.nbytes, ())
        assert 0 <= found.age < PATIENCE
    assert (sender.stats().finished["ok"], worker.stats().finished["ok"]) == (3, 4)
    assert found.age <= worker.stats().age < PATIENCE


async def check_observers(bench: Bench) -> None:
    """Observers get an event for each send and version, with its phases and the sender's trace."""
    for build in (small, large):
        async with bench.crew(build(1.0), [build()]) as crew:
            worker, began = crew.workers[0].scheme, time.time()
            sent, came = Tracer(), Listener()
            crew.sender.add_observer(sent)
            worker.add_observer(came)
            for number in (2.0, 3.0, 4.0):
                report = await crew.send(number)
                assert await crew.values() == [number]
            events = [*await sent.told(3), *await came.told(3)]
            assert [each.role for each in events] == ["sender"] * 3 + ["receiver"] * 3
            assert [each.version for each in events] == 2 * [2, 3, 4]
            for each in events:
                assert (each.model, each.outcome, each.epoch) == ("policy", "ok", report.epoch)
                assert (each.trace, each.nbytes) == (TRACE, report.nbytes)
                assert began <= each.started_at <= time.time()
                assert each.wire_nbytes in (0, report.nbytes)
                assert all(0 <= each.seconds[phase] < PATIENCE for phase in each.seconds)
            assert all(each.seconds.keys() == {"snapshot", "wire"} for each in sent.events)
            for each in came.events:
                assert each.seconds.keys() - {"stage"} == {"apply", "pause"}
                assert each.seconds["pause"] <= each.seconds["apply"]
            assert crew.sender.stats().seconds == sent.events[-1].seconds
            crew.sender.remove_observer(sent)
            worker.remove_observer(came)
            await crew.send(5.0)
            assert await crew.values() == [5.0]
            await asyncio.sleep(0)
            assert (len(sent.events), len(came.events)) == (3, 3)
            assert crew.sender.stats().seconds == worker.stats().seconds == {}


async def check_observed_refusals(bench: Bench) -> None:
    """An event of a refused update says so on both sides; an invalid trace does not travel."""
    async with bench.crew(small(1.0), [small()]) as crew:
        worker = crew.workers[0].scheme
        for wrong in (object(), Late()):
            refuses(aiosync.ConfigError, lambda each=wrong: worker.add_observer(each))
        sent, came = Tracer(), Listener()
        sent.trace = "00-" + 52 * "0"
        crew.sender.add_observer(sent)
        worker.add_observer(came)
        weights = {f"layers.{idx}": torch.zeros(3, 3) for idx in range(5)}
        await raises(aiosync.PartialSyncError, crew.sender.send(weights))
        [event], [other] = await sent.told(1), await came.told(1)
        assert (event.outcome, other.outcome, event.trace, other.trace) == (
            *("refused", "refused"),
            *(None, None),
        )
        assert (event.version, other.version) == (2, 2)
        for scheme in (crew.sender, worker):
            found = scheme.stats()
            assert (found.refused, found.finished["refused"]) == (1, 1)
        # Only a worker with an update on its way counts, and this one refused its update.
        assert await crew.sender.wait_lag_below(1, timeout=PATIENCE) == 0
        assert (crew.sender.lag, crew.sender.stats().lag) == (0, 1)


async def check_observer_raises(bench: Bench) -> None:
    """An observer that raises is removed, and logged once; sends and other observers go on."""

    class Broken(Listener):
        def on_sync(self, event: aiosync.SyncEvent) -> None:
            super().on_sync(event)
            raise ValueError("broken observer")

        def traceparent(self, started_at: float) -> str | None:
            return None

    class Untraceable(Listener):
        def traceparent(self, started_at: float) -> str | None:
            raise ValueError("broken tracer")

    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("aiosync")
    logger.addHandler(handler)
    try:
        async with bench.crew(small(1.0), [small()]) as crew:
            worker = crew.workers[0].scheme
            broken, untraceable, other = Broken(), Untraceable(), Listener()
            for each in (broken, untraceable, other):
                crew.sender.add_observer(each)
                worker.add_observer(each)
            for number in (2.0, 3.0):
                await crew.send(number)
                assert await crew.values() == [number]
            await other.told(4)
            assert sorted(each.role for each in broken.events) == ["receiver", "sender"]
            assert {each.role for each in untraceable.events} == {"receiver"}
    finally:
        logger.removeHandler(handler)
    told = [each for each in records if each.exc_info]
    assert sorted(str(each.exc_info[1]) for each in told if each.exc_info) == (
        ["broken observer", "broken observer", "broken tracer"]
    )
    assert all("is removed" in each.getMessage() for each in told)


async def check_bounded_lag(bench: Bench) -> None:
    """wait_lag_below() waits for slow workers on both sides; send(max_lag=) does so at first."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        sender, worker = crew.sender, crew.workers[0].scheme
        # Over shared memory a model that has computed takes named versions without an answer.
        assert await crew.values() == [1.0, 1.0]
        assert await sender.wait_lag_below(1) == await worker.wait_lag_below(1) == 0
        for scheme in (sender, worker):
            for wrong in (0, -1, 1.0, True):
                await raises(aiosync.ConfigError, scheme.wait_lag_below(wrong))
        reading = worker.reading()
        reading.__enter__()
        for number in (2.0, 3.0):
            crew.send_nowait(number)
        assert await sender.wait_lag_below(3) == sender.lag == 2
        error = await raises(aiosync.RecvTimeout, sender.wait_lag_below(2, timeout=0.01))
        assert "0 by 2" in str(error)
        await raises(aiosync.RecvTimeout, sender.send(max_lag=2, timeout=0))
        await raises(aiosync.ConfigError, sender.send(max_lag=0))
        assert sender.version == 3
        await until(lambda: [each.state for each in sender.stats().workers] == ["lagging", "ready"])
        async with background(crew.send(4.0, max_lag=1)) as [sending]:
            await asyncio.sleep(0.05)
            assert (sending.done(), sender.version) == (False, 3)
            reading.__exit__(None, None, None)
            report = await asyncio.wait_for(sending, PATIENCE)
        assert (report.version, report.acked) == (4, {0, 1})
        assert await sender.wait_lag_below(1) == 0
        assert await crew.values() == [4.0, 4.0]


async def check_lag_of_those_who_are_sent_nothing(bench: Bench) -> None:
    """`if scheme.lag < n: send()` goes on although a worker gets no updates."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        for number in (2.0, 3.0, 4.0):
            await crew.send(number, worker_ids=[0])
            assert crew.sender.lag == await crew.sender.wait_lag_below(1) == 0


async def check_lag_by_hand(bench: Bench) -> None:
    """With apply="manual" a worker lags until it applies, as its wait_lag_below() does."""
    async with bench.crew(small(1.0), [small()], apply="manual") as crew:
        [worker] = crew.workers
        for number in (2.0, 3.0):
            crew.send_nowait(number)
        await worker.scheme.wait_staged(3)
        found = worker.scheme.stats()
        assert (found.version, found.newest_version, found.lag) == (1, 3, 2)
        assert (found.started, found.finished["ok"]) == (2 + found.finished["skipped"], 1)
        with worker.scheme.reading():
            error = await raises(aiosync.LocalProtocolError, worker.scheme.wait_lag_below(2))
            assert "reading()" in str(error)
        async with background(crew.sender.wait_lag_below(1)) as [waiting]:
            assert await worker.scheme.wait_lag_below(1) == 0
            assert await asyncio.wait_for(waiting, PATIENCE) == 0
        assert await worker.value() == 3.0
        await until(lambda: crew.sender.stats().lag == 0)
        crew.send_nowait(4.0)
        await worker.scheme.wait_staged(4)
        started = worker.scheme.stats().started
        # The worker leaves with a version that it never applied.
        await worker.leave()
        assert worker.scheme.stats().started == started


async def check_bytes(bench: Bench) -> None:
    """A worker counts all bytes that travelled, and those of the weights that its model took."""
    async with bench.crew(small(1.0), [small()], apply="manual") as crew:
        worker = crew.workers[0].scheme
        first = worker.stats()
        # Either a link carries all the bytes, or shared memory none.
        assert first.wire_nbytes in (0, first.nbytes)
        for number in (2.0, 3.0):
            handle = crew.send_nowait(number)
            await worker.wait_staged(handle.version)
        await worker.wait_lag_below(1)
        await handle
        found = worker.stats()
        assert (found.nbytes, found.wire_nbytes) == (2 * first.nbytes, 3 * first.wire_nbytes)
        weights = {f"layers.{idx}": torch.zeros(3, 3) for idx in range(5)}
        refusal = raises(aiosync.PartialSyncError, crew.sender.send(weights))
        async with background(refusal) as [sending]:
            await worker.wait_staged(4)
            refuses(aiosync.ApplyError, worker.apply_pending)
            await asyncio.wait_for(sending, PATIENCE)
        last = worker.stats()
        assert last.nbytes == found.nbytes
        assert (last.wire_nbytes > found.wire_nbytes) == (first.wire_nbytes > 0)


@needs("process")
async def check_lag_of_the_dead(bench: Bench) -> None:
    """wait_lag_below() stops waiting for a worker that dies."""
    async with bench.elsewhere.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        worker.stop()
        handles = [crew.send_nowait(number) for number in (2.0, 3.0)]
        async with background(crew.sender.wait_lag_below(1)) as [waiting]:
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await worker.die()
            assert await asyncio.wait_for(waiting, PATIENCE) == 0
        await until(lambda: [each.state for each in crew.sender.stats().workers] == ["lost"])
        await asyncio.gather(*handles, return_exceptions=True)


CHECKS = (
    check_stats,
    check_observers,
    check_observed_refusals,
    check_observer_raises,
    check_bounded_lag,
    check_lag_by_hand,
    check_bytes,
    check_lag_of_the_dead,
    check_lag_of_those_who_are_sent_nothing,
)
