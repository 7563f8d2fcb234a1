"""Peers that refuse weights, die, stop or are late.

This module imports neither pytest nor a private name.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

import aiosync
from tests.contract.bench import (
    PATIENCE,
    Bench,
    background,
    fill,
    needs,
    raises,
    small,
    until,
    wide,
)


async def refused(crew: Any, weights: Any, worker_idx: int, version: int) -> aiosync.ApplyError:
    """Send weights that only one worker refuses; return its error."""
    error = await raises(aiosync.PartialSyncError, crew.sender.send(weights))
    assert (set(error.failed), error.version) == ({worker_idx}, version)
    assert error.acked == {idx for idx in range(len(crew.workers)) if idx != worker_idx}
    reason = error.failed[worker_idx]
    assert isinstance(reason, aiosync.ApplyError)
    assert (reason.worker_idx, reason.version) == (worker_idx, version)
    return reason


async def check_refused_shape(bench: Bench) -> None:
    """A worker refuses weights that do not fit, keeps its version, and takes the next that fit."""
    async with bench.crew(None, [small(), wide()]) as crew:
        good, bad = crew.workers
        reason = await refused(crew, small(2.0), 1, 1)
        assert reason.remote_type == "ManifestMismatch"
        assert "layers.3" in str(reason)
        await raises(aiosync.PartialSyncError, crew.sender.wait_for_version(1))
        assert (await good.value(), await bad.value(), await bad.version()) == (2.0, -1.0, 0)
        assert (await crew.sender.send(wide(3.0), worker_ids=1)).acked == {1}
        assert (await bad.value(), await bad.version()) == (3.0, 2)
        await refused(crew, wide(4.0), 0, 3)
        assert (await good.value(), await good.version()) == (2.0, 1)
        assert (await bad.value(), await bad.version()) == (4.0, 3)
        assert (await crew.sender.send(small(5.0), worker_ids=0)).acked == {0}
        assert (await good.value(), await good.version()) == (5.0, 4)


async def check_refused_names(bench: Bench) -> None:
    """The error lists missing and unexpected names and those of another dtype; nothing changes."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        names = small(2.0).state_dict()
        wrong: list[tuple[str, dict[str, torch.Tensor]]] = [
            ("layers.4", {k: v for k, v in names.items() if k != "layers.4"}),
            ("layers.9", {**names, "layers.9": torch.zeros(3)}),
            ("layers.2", {**names, "layers.2": names["layers.2"].double()}),
        ]
        for version, (name, weights) in enumerate(wrong, 2):
            reason = await refused(crew, weights, 0, version)
            assert reason.remote_type == "ManifestMismatch"
            assert name in str(reason)
            assert "layers.0" not in str(reason)
            assert (await worker.value(), await worker.version()) == (1.0, 1)
            error = await raises(aiosync.ApplyError, worker.scheme.wait_for_version(version))
            assert error.version == version
        assert (await crew.send(5.0)).acked == {0}
        assert (await worker.value(), await worker.version()) == (5.0, 5)


class Picky(torch.nn.Module):
    """Model that refuses a negative extra state, which comes after its parameters."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.state = value
        fill(self, value)

    def get_extra_state(self) -> float:
        return self.state

    def set_extra_state(self, state: float) -> None:
        if state < 0:
            raise KeyError("not here")
        self.state = state


async def check_refused_halfway(bench: Bench) -> None:
    """A model that refuses an update halfway keeps its version; the error has the cause."""
    for apply_copy in (False, True):
        async with bench.crew(Picky(1.0), [Picky(0.0)], apply_copy=apply_copy) as crew:
            [worker] = crew.workers
            reason = await refused(crew, Picky(-2.0), 0, 2)
            assert reason.remote_type == "KeyError"
            assert "not here" in str(reason)
            assert (await worker.value(), worker.model.state) == (1.0, 1.0)
            assert (await crew.sender.send(Picky(3.0))).acked == {0}
            assert (await worker.value(), worker.model.state) == (3.0, 3.0)


async def check_refused_before_the_end(bench: Bench) -> None:
    """A refusal that no send waited for is reported once, and then why the worker is gone."""
    for leaves in (True, False):
        async with bench.crew(Picky(1.0), [Picky(0.0)], apply="manual") as crew:
            [worker] = crew.workers
            await raises(aiosync.PartialSyncError, crew.sender.send(Picky(-2.0), timeout=0.05))
            await raises(aiosync.ApplyError, worker.scheme.receive(timeout=PATIENCE))
            await until(lambda crew=crew: crew.sender.stats().refused == 1)
            await (worker.leave() if leaves else worker.die())
            await until(lambda crew=crew: not crew.sender.worker_versions)
            if leaves:
                assert await crew.sender.wait_for_version(1) == 1
                await raises(aiosync.PartialSyncError, crew.sender.wait_for_version(2))
            error = await raises(aiosync.PartialSyncError, crew.sender.send(Picky(3.0)))
            assert isinstance(error.failed[0], aiosync.ApplyError)
            for _ in range(2):
                if leaves:
                    assert not (await crew.sender.send(Picky(3.0))).lost
                else:
                    error = await raises(aiosync.PartialSyncError, crew.sender.send(Picky(3.0)))
                    assert not isinstance(error.failed[0], aiosync.ApplyError)
            [seen] = crew.sender.stats().workers
            assert seen.state == ("left" if leaves else "lost")


async def check_refused_first_weights(bench: Bench) -> None:
    """Initial weights that do not fit make both connect() calls raise; other workers go on."""
    async with bench.sender(small(1.0), {"num_workers": 2}) as crew:
        good, bad = crew.hire(small(), 0), crew.hire(wide(), 1)
        async with background(good.scheme.connect(), bad.scheme.connect()) as joining:
            error = await raises(aiosync.PartialSyncError, crew.sender.connect())
            assert set(error.failed) == {1}
            assert isinstance(error.failed[1], aiosync.ApplyError)
            mismatch = await raises(aiosync.ApplyError, joining[1])
            assert mismatch.remote_type == "ManifestMismatch" or mismatch.__cause__ is not None
            await joining[0]
        assert (await crew.send(2.0, worker_ids=0)).acked == {0}
        assert await good.value() == 2.0


async def check_other_model(bench: Bench) -> None:
    """A worker with another model_id or strategy is refused at connect(), with the reason."""
    async with bench.crew(small(1.0), [small()], init={"num_workers": None}) as crew:
        stranger = crew.hire(small(), model_id="critic")
        error = await raises(aiosync.AiosyncError, stranger.scheme.connect(timeout=PATIENCE))
        assert "critic" in str(error)
        other = crew.hire(small())
        other.scheme.strategy = "state_dict"
        error = await raises(aiosync.AiosyncError, other.scheme.connect(timeout=PATIENCE))
        assert "state_dict" in str(error)
        assert (await crew.send(2.0)).acked == {0}


async def check_index_taken(bench: Bench) -> None:
    """The index of a live worker is refused; a worker without an index gets a free one."""
    async with bench.crew(small(1.0), [small()], init={"num_workers": None}) as crew:
        second = crew.hire(small(), 0)
        error = await raises(aiosync.ConnectTimeout, second.scheme.connect(timeout=0.2))
        assert "0" in str(error)
        third = await crew.join(small())
        assert (crew.workers[0].scheme.worker_idx, third.scheme.worker_idx) == (0, 1)
        assert (await crew.send(2.0)).acked == {0, 1}
    async with bench.crew(small(1.0), [small()]) as crew:
        fourth = crew.hire(small(), 3)
        await raises(aiosync.ConfigError, fourth.scheme.connect(timeout=PATIENCE))


async def check_require(bench: Bench) -> None:
    """require= is the number of workers that have to apply; reports and errors name the others."""
    for require, enough in ((1, True), (0.5, True), (2, True), (3, False), ("all", False)):
        targets = [small(), small(), wide()]
        async with bench.crew(None, targets, init={"num_workers": 3}, require=require) as crew:
            if enough:
                report = await crew.sender.send(small(2.0))
                assert report.acked | report.waiting | report.failed.keys() >= {0, 1}
                assert len(report.acked) >= (1 if require == 1 else 2)
                assert set(report.failed) <= {2}
            else:
                error = await raises(aiosync.PartialSyncError, crew.sender.send(small(2.0)))
                assert (error.acked, set(error.failed)) == ({0, 1}, {2})
            for worker in crew.workers[:2]:
                await worker.wait(1)
                assert await worker.value() == 2.0
    async with bench.crew(small(1.0), [small()], require=2) as crew:
        # In the second round some schemes need no message to the worker.
        for _ in range(2):
            await raises(aiosync.PartialSyncError, crew.sender.send(small(2.0)))
            assert (await crew.sender.send(small(3.0), worker_ids=[0])).acked == {0}


async def check_nobody_comes(bench: Bench) -> None:
    """connect() times out if workers, whom the error names, or the trainer are missing."""
    async with bench.sender(small(1.0), {"num_workers": 2}) as crew:
        worker = crew.hire(small(), 0)
        async with background(worker.scheme.connect()) as [joining]:
            error = await raises(aiosync.ConnectTimeout, crew.sender.connect(timeout=0.3))
            assert "1" in str(error)
            await joining
        # The sender goes on with the workers that have joined.
        assert (await crew.send(2.0)).acked == {0}
        assert await worker.value() == 2.0
        late = await crew.join(small(), 1)
        assert await late.value() == 2.0
    async with bench.sender(small(1.0)) as crew:
        early = crew.hire(small())
        await raises(aiosync.ConnectTimeout, early.scheme.connect(timeout=0.1))


async def check_dead_worker(bench: Bench) -> None:
    """One error names a worker that died; later sends reach the others and list it as lost."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        dead, living = crew.workers
        await dead.die()
        error = await raises(aiosync.PartialSyncError, crew.send(2.0))
        assert (set(error.failed), error.acked) == ({0}, {1})
        assert isinstance(error.failed[0], (aiosync.PeerClosed, aiosync.TransportBroken))
        assert await living.value() == 2.0
        report = await crew.send(3.0)
        assert (report.acked, set(report.lost)) == ({1}, {0})
        assert await living.value() == 3.0
        again = await crew.join(small(), 0)
        assert await again.value() == 3.0
        report = await crew.send(4.0)
        assert (report.acked, report.lost) == ({0, 1}, {})
        assert (await crew.send(5.0, worker_ids=1)).lost == {}
        for worker in (again, living):
            await worker.die()
        # With no worker left each send raises, and none of them waits.
        for _ in range(3):
            error = await raises(aiosync.PartialSyncError, crew.send(6.0))
            assert set(error.failed) == {0, 1}


async def check_dead_trainer(bench: Bench) -> None:
    """A worker whose trainer ended keeps its weights; its calls that wait for an update raise."""
    async with bench.crew(small(1.0), [small()], **bench.hooks.final) as crew:
        [worker] = crew.workers
        await crew.send(2.0)
        assert (await worker.scheme.receive(timeout=0)).version == 2
        waits = (worker.scheme.receive(), worker.scheme.wait_for_version(9))
        async with background(*waits) as tasks:
            await crew.sender.aclose()
            for task in tasks:
                await raises(aiosync.PeerClosed, asyncio.wait_for(task, PATIENCE))
        await raises(aiosync.PeerClosed, worker.scheme.receive(timeout=0))
        assert await worker.value() == 2.0
        assert worker.model() == (2.0, 2.0)


@needs("process")
async def check_dead_before_connect(bench: Bench) -> None:
    """A worker process that dies before it connected ends the trainer's connect() at once."""
    async with bench.elsewhere.sender(small(1.0), {"num_workers": 1}) as crew:
        worker = crew.hire(small(), 0)
        async with background(crew.sender.connect(processes=[worker.pid])) as [connecting]:
            await worker.die()
            error = await raises(aiosync.PartialSyncError, asyncio.wait_for(connecting, PATIENCE))
            assert set(error.failed) == {0}


@needs("process")
async def check_killed_worker(bench: Bench) -> None:
    """Errors name a worker that SIGKILL ended, between two sends or in the middle of a read."""
    async with bench.elsewhere.crew(small(1.0), [small() for _ in range(3)]) as crew:
        idle, busy, living = crew.workers
        await idle.die()
        error = await raises(aiosync.PartialSyncError, crew.send(2.0))
        assert (set(error.failed), error.acked) == ({0}, {1, 2})
        await busy.hold()
        async with background(crew.send(3.0)) as [sending]:
            await living.wait(3)
            await busy.die()
            await asyncio.wait({sending}, timeout=PATIENCE)
            outcome = sending.exception()
        if outcome is None:
            # The worker had the version before it died.
            outcome = await raises(aiosync.PartialSyncError, crew.send(3.0))
        assert isinstance(outcome, aiosync.PartialSyncError)
        assert set(outcome.failed) == {1}
        report = await crew.send(4.0)
        assert (report.acked, set(report.lost)) == ({2}, {0, 1})
        assert await living.value() == 4.0
        await crew.join(small(), 0)
        assert (await crew.send(5.0)).acked == {0, 2}


@needs("process")
async def check_stopped_worker(bench: Bench) -> None:
    """A stopped worker is an AckTimeout, delays no other worker, and catches up later."""
    targets = [small(), small()]
    async with bench.elsewhere.crew(small(1.0), targets, apply="manual") as crew:
        stopped, living = crew.workers
        stopped.stop()
        async with background(living.wait(2)) as [waiting]:
            error = await raises(aiosync.PartialSyncError, crew.send(2.0, timeout=3.0))
            await waiting
        assert (set(error.failed), error.acked) == ({0}, {1})
        timeout = error.failed[0]
        assert isinstance(timeout, aiosync.AckTimeout)
        assert (timeout.worker_ids, timeout.version) == ({0}, 2)
        stopped.cont()
        handle = crew.send_nowait(3.0)
        await asyncio.gather(stopped.wait(3), living.wait(3))
        assert (await handle).acked == {0, 1}
        assert await crew.values() == [3.0, 3.0]


async def check_slow_worker(bench: Bench) -> None:
    """A worker that does not apply skips to the newest version, and delays no other worker."""
    async with bench.sender(small(1.0), {"num_workers": 2}) as crew:
        slow, quick = crew.hire(small(), 0, apply="manual"), crew.hire(small(), 1)
        await asyncio.gather(crew.sender.connect(), slow.scheme.connect(), quick.scheme.connect())
        handles = []
        for number in range(2, 300):
            handles.append(crew.send_nowait(float(number)))
            if number % 50 == 0:
                await quick.wait(number)
                assert await quick.value() == number
                assert not handles[-1].done()
                assert await slow.version() == 1
        await slow.wait(299)
        assert await slow.value() == 299.0
        reports = [await handle for handle in handles]
        assert reports[-1].acked == {0, 1}
        assert [report.skipped.get(0) for report in reports[:-1]].count(None) <= 2
        assert all(
            newer > report.version for report in reports for newer in report.skipped.values()
        )
        for report in reports:
            assert report.acked | report.skipped.keys() == {0, 1}


async def check_send_timeout(bench: Bench) -> None:
    """send(timeout=) raises in time with an AckTimeout; this update and the next arrive anyway."""
    async with bench.crew(small(1.0), [small()], apply="manual") as crew:
        [worker] = crew.workers
        for number in (2, 3):
            error = await raises(aiosync.PartialSyncError, crew.send(float(number), timeout=0.05))
            assert isinstance(error.failed[0], aiosync.AckTimeout)
            assert (await worker.version(), await worker.value()) == (number - 1, number - 1)
            await worker.wait(number)
            assert (await worker.version(), await worker.value()) == (number, number)
        handle = crew.send_nowait(4.0, timeout=0.05)
        await raises(aiosync.PartialSyncError, handle)
        crew.sender.timeout = 0.05
        await raises(aiosync.PartialSyncError, crew.send(5.0))


async def check_handles(bench: Bench) -> None:
    """send_nowait() returns after its copy; a wait for its handle may be repeated or cancelled."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        handle = crew.send_nowait(2.0)
        fill(crew.source, 9.0)
        assert handle.version == crew.sender.version == 2
        async with background(asyncio.wait_for(handle, PATIENCE)) as [cancelled]:
            cancelled.cancel()
        report = await handle
        assert report == await handle
        assert (handle.done(), report.acked, report.version) == (True, {0}, 2)
        assert await worker.value() == 2.0
        bad = crew.sender.send_nowait(wide(3.0))
        await raises(aiosync.PartialSyncError, bad)
        await raises(aiosync.PartialSyncError, bad)
        await until(bad.done)


CHECKS = (
    check_refused_shape,
    check_refused_names,
    check_refused_halfway,
    check_refused_before_the_end,
    check_refused_first_weights,
    check_other_model,
    check_index_taken,
    check_require,
    check_nobody_comes,
    check_dead_worker,
    check_dead_trainer,
    check_dead_before_connect,
    check_killed_worker,
    check_stopped_worker,
    check_slow_worker,
    check_send_timeout,
    check_handles,
)
