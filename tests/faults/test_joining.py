"""Processes that end during a trainer's connect(): the errors that name them, and how soon."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import aiosync
import aiosync.sync
from aiosync.server import WeightClient
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop, pytest.mark.slow]
both = pytest.mark.parametrize("make", harness.SCHEMES)
AT_ONCE_SECONDS = 10.0
"""Longest time of an immediate error: far below harness.PATIENCE, and enough on a busy machine."""


async def _exit(state: harness.State, code: int) -> None:
    os._exit(code)


async def _fails(connecting: Any) -> aiosync.PartialSyncError:
    with pytest.raises(aiosync.PartialSyncError) as caught:
        await asyncio.wait_for(connecting, AT_ONCE_SECONDS)
    return caught.value


@both
@pytest.mark.parametrize("code", [0, 3])
async def test_one_ends_while_the_other_starts(make, code) -> None:
    scheme, model = make(), models.linear(1.0)
    scheme.init_on_sender(model=model, num_workers=2)
    async with harness.workers(scheme, models.linear, 2, connect=False) as crew:
        processes = [worker.process for worker in crew]
        connecting = asyncio.ensure_future(
            scheme.connect(timeout=harness.PATIENCE, processes=processes)
        )
        crew[0].post(_exit, code)
        error = await _fails(connecting)
        assert error.failed.keys() == {0}
        assert error.acked == set()
        expected = f"process {crew[0].pid} ended with exit code {code} before it connected"
        assert expected in str(error.failed[0])
        # The other worker, and a successor of the first one, can still connect.
        assert await crew[1].call(harness.join, 1) == 1
        crew.append(harness.start(scheme, models.linear))
        assert await crew[2].call(harness.join, 0) == 1
        assert (await scheme.send()).acked == {0, 1}


@both
async def test_it_had_ended_before(make) -> None:
    """A process that ended before the call is named.

    It may be reaped or not, and given as an object of any library or as a number.
    """
    for kind in ("popen", "reaped", "number"):
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if kind == "reaped":
            process.poll()
        scheme = make()
        scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
        async with scheme:
            given = [process.pid if kind == "number" else process, os.getpid()]
            error = await _fails(scheme.connect(processes=given))
            assert error.failed.keys() == {0}
            assert f"process {process.pid} ended with exit code 7" in str(error)
        process.wait()


async def test_as_long_as_enough_can_come_it_waits() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme(require=1)
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 2, connect=False) as crew:
        crew[0].kill()
        connecting = asyncio.ensure_future(
            scheme.connect(timeout=harness.PATIENCE, processes=[each.pid for each in crew])
        )
        await asyncio.wait([connecting], timeout=1.5)
        assert not connecting.done()
        assert await crew[1].call(harness.join) == 1
        error = await _fails(connecting)
        assert (error.failed.keys(), error.acked) == ({1}, {0})
        assert f"process {crew[0].pid} ended" in str(error)
        assert (await scheme.send()).acked == {0}


async def test_a_timeout_names_those_that_ended() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme(require=0.5)
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 2, connect=False) as crew:
        crew[1].kill()
        with pytest.raises(aiosync.ConnectTimeout, match=f"process {crew[1].pid} ended"):
            await scheme.connect(timeout=1.5, processes=[each.process for each in crew])


@both
async def test_a_supervisor_starts_another_one(make) -> None:
    """The new process may take a place in the list of processes, or be unknown to connect()."""
    scheme = make()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 3, connect=False) as crew:
        processes = [worker.process for worker in crew[:2]]
        crew[0].kill()
        connecting = asyncio.ensure_future(
            scheme.connect(timeout=harness.PATIENCE, processes=processes)
        )
        await asyncio.sleep(0.05)
        processes[0] = crew[2].process
        await asyncio.wait([connecting], timeout=1.5)
        assert not connecting.done()
        joins = [crew[1].call(harness.join, 1), crew[2].call(harness.join, 0)]
        assert await asyncio.gather(*joins) == [1, 1]
        await connecting
    scheme = make()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 3, connect=False) as crew:
        connecting = asyncio.ensure_future(
            scheme.connect(timeout=harness.PATIENCE, processes=[each.pid for each in crew[:2]])
        )
        # It would have half a second to join after the end of the first one.
        assert await crew[2].call(harness.join, 0) == 1
        crew[0].kill()
        await asyncio.wait([connecting], timeout=1.5)
        assert not connecting.done()
        assert await crew[1].call(harness.join, 1) == 1
        await connecting


async def test_spare_processes_are_no_workers() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=1)
    async with harness.workers(scheme, models.linear, 2, connect=False) as crew:
        crew[0].kill()
        connecting = asyncio.ensure_future(
            scheme.connect(timeout=harness.PATIENCE, processes=[each.pid for each in crew])
        )
        await asyncio.wait([connecting], timeout=1.5)
        assert not connecting.done()
        assert await crew[1].call(harness.join) == 1
        await connecting


# -- processes that have other links, too ----------------------------------------------------------


async def _pull(state: harness.State, address: str) -> int:
    return (await WeightClient(address).pull("policy")).version


async def test_a_process_that_only_pulled_is_still_awaited() -> None:
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    scheme.init_on_sender(model=models.linear(1.0), num_workers=1)
    async with harness.workers(scheme, models.linear, 1, connect=False) as [worker]:
        connecting = asyncio.ensure_future(
            scheme.connect(timeout=harness.PATIENCE, processes=[worker.process])
        )
        await harness.until(lambda: scheme.version == 1)
        assert await worker.call(_pull, scheme.address) == 1
        await asyncio.wait([connecting], timeout=0.3)
        assert not connecting.done()
        worker.post(_exit, 3)
        error = await _fails(connecting)
        text = f"process {worker.pid} ended with exit code 3 before it connected"
        assert text in str(error.failed[0])


async def test_a_process_that_becomes_two_workers_is_awaited_twice() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    first, second = harness.twin(scheme), harness.twin(scheme)
    async with scheme, first, second:
        connecting = asyncio.ensure_future(
            scheme.connect(timeout=harness.PATIENCE, processes=[os.getpid()] * 2)
        )
        for worker in (first, second):
            await asyncio.wait([connecting], timeout=0.3)
            assert not connecting.done()
            worker.init_on_receiver(model=models.linear())
            await worker.connect()
        await connecting
        assert (await scheme.send()).acked == {0, 1}


async def _close_and_exit(state: harness.State) -> None:
    await state.scheme.aclose()
    os._exit(3)


async def test_a_process_that_ends_after_one_of_its_two_workers_is_not_awaited() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 1, connect=False) as [worker]:
        connecting = asyncio.ensure_future(
            scheme.connect(timeout=harness.PATIENCE, processes=[worker.process] * 2)
        )
        assert await worker.call(harness.join) == 1
        worker.post(_close_and_exit)
        error = await _fails(connecting)
        assert set(error.failed) == {1}
        assert f"process {worker.pid} ended with exit code 3" in str(error.failed[1])


def _sleep_or_exit(code: int | None) -> None:
    if code is None:
        time.sleep(harness.PATIENCE)
    sys.exit(code)


async def test_blocking() -> None:
    for make in (aiosync.sync.SharedMemWeightSyncScheme, aiosync.sync.TCPWeightSyncScheme):
        await asyncio.to_thread(_block, make())


def _block(scheme: Any) -> None:
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    fork = harness.context("forkserver")
    processes = [fork.Process(target=_sleep_or_exit, args=(code,)) for code in (None, 4)]
    for process in processes:
        process.start()
    began = time.monotonic()
    try:
        with scheme, pytest.raises(aiosync.PartialSyncError) as caught:
            scheme.connect(processes=processes)
        assert time.monotonic() - began < 2 * AT_ONCE_SECONDS
        assert caught.value.failed.keys() == {1}
        assert f"process {processes[1].pid} ended with exit code 4" in str(caught.value)
        assert "aiosync-portal" not in {each.name for each in threading.enumerate()}
    finally:
        for process in processes:
            process.kill()
            harness.end(process)


# -- workers that refuse the first version, and end ------------------------------------------------


def _refuse(scheme: Any, worker_idx: int | None, started: Any) -> None:
    scheme.init_on_receiver(model=models.wide(), worker_idx=worker_idx)
    started.wait()
    with scheme:
        scheme.connect()


@pytest.mark.parametrize("indices", [(None, None), (0, 0)], ids=["chosen", "the same"])
@pytest.mark.parametrize(
    "make",
    [
        aiosync.sync.SharedMemWeightSyncScheme,
        aiosync.sync.MultiProcessWeightSyncScheme,
        aiosync.sync.TCPWeightSyncScheme,
    ],
)
async def test_why_each_worker_refused_is_kept(make, indices) -> None:
    """The reasons are kept even if a worker exits and another one gets its index."""
    await asyncio.to_thread(_are_refused, make(require=1), indices)


def _are_refused(scheme: Any, indices: Sequence[int | None]) -> None:
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    context = harness.context("forkserver")
    started = [context.Event() for _ in indices]
    processes = [
        context.Process(target=_refuse, args=(scheme, idx, event))
        for idx, event in zip(indices, started, strict=True)
    ]
    for process in processes:
        process.start()
    started[0].set()
    follow = threading.Thread(target=_follow, args=(processes[0], started[1]))
    follow.start()
    try:
        with scheme, pytest.raises(aiosync.PartialSyncError) as caught:
            scheme.connect(timeout=harness.PATIENCE, processes=processes)
        assert (caught.value.failed.keys(), caught.value.acked) == ({0, 1}, set())
        for error in caught.value.failed.values():
            assert "refused version 1: ManifestMismatch" in str(error)
    finally:
        follow.join()
        for process in processes:
            harness.end(process)


def _follow(first: Any, then: Any) -> None:
    first.join()
    then.set()


# -- workers that take the first version, and leave ------------------------------------------------


async def _come_and_leave(trainer: Any, worker_idx: int | None = None) -> int:
    worker = harness.twin(trainer)
    worker.init_on_receiver(model=models.linear(), worker_idx=worker_idx)
    async with worker:
        await worker.connect()
        found: int = worker.worker_idx
    await harness.until(lambda: not trainer.worker_versions)
    return found


ANY = [*harness.SCHEMES, aiosync.TCPWeightSyncScheme]


@pytest.mark.parametrize("make", ANY)
@pytest.mark.parametrize("initial", [True, False], ids=["weights", "no weights"])
async def test_workers_come_and_leave(make, initial) -> None:
    """Workers that connect and leave one after the other all count as connected."""
    trainer = make()
    model = models.linear(1.0)
    trainer.init_on_sender(num_workers=3, **({"model": model} if initial else {}))
    async with trainer:
        connecting = asyncio.ensure_future(trainer.connect(timeout=harness.PATIENCE))
        indices = [await _come_and_leave(trainer) for _ in range(3)]
        assert indices == [0, 1, 2]
        await connecting
        report = await trainer.send(model)
        assert (report.acked, report.left) == (set(), {0, 1, 2})
        # From now on a new worker gets the index of one that has left.
        assert await _come_and_leave(trainer) == 0


@pytest.mark.parametrize("make", ANY)
async def test_a_timeout_says_who_came_and_left(make) -> None:
    trainer = make()
    trainer.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with trainer:
        connecting = asyncio.ensure_future(trainer.connect(timeout=2))
        for _ in range(2):
            assert await _come_and_leave(trainer, 1) == 1
        with pytest.raises(aiosync.ConnectTimeout) as caught:
            await connecting
        assert "workers [1] connected, and left; workers [0] did not connect" in str(caught.value)


@pytest.mark.parametrize("make", ANY)
async def test_one_that_left_before_it_applied_the_first_version_has_not_acked_it(make) -> None:
    trainer = make()
    trainer.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with trainer:
        connecting = asyncio.ensure_future(trainer.connect(timeout=harness.PATIENCE))
        # A worker without a model has the weights, and cannot apply them.
        idle, other = harness.twin(trainer), harness.twin(trainer)
        idle.init_on_receiver(worker_idx=0)
        async with idle:
            await idle.connect(initial=False)
        await harness.until(lambda: not trainer.worker_versions)
        other.init_on_receiver(model=models.wide(), worker_idx=1)
        async with other:
            with pytest.raises(aiosync.ApplyError):
                await other.connect()
        error = await _fails(connecting)
        assert (error.acked, error.failed.keys()) == (set(), {1})


async def test_a_blocking_trainer_whose_workers_come_and_leave() -> None:
    trainer = aiosync.sync.SharedMemWeightSyncScheme()
    trainer.init_on_sender(model=models.linear(1.0), num_workers=2)

    def come_and_leave() -> None:
        worker = harness.twin(trainer)
        worker.init_on_receiver(model=models.linear())
        with worker:
            worker.connect()

    connecting = asyncio.create_task(asyncio.to_thread(trainer.connect, timeout=harness.PATIENCE))
    for _ in range(2):
        await asyncio.to_thread(come_and_leave)
        await harness.until(lambda: not trainer.worker_versions)
    await connecting
    await asyncio.to_thread(trainer.shutdown)
