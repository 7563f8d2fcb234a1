"""Workers and trainers that die in any phase: no call hangs, and nothing is left.

The fixture of ``conftest.py`` checks after each test that nothing is left: descriptors, tasks,
processes, shared memory.
"""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import pickle
import signal
from typing import Any

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import num_slots

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.one_loop]


async def _goes_on(scheme, model, dead: set[int], crew: dict[int, harness.Worker]) -> None:
    """Check that a new send works, lists the dead workers, and reaches all others."""
    models.fill(model, 77.0)
    report = await scheme.send()
    assert report.acked == set(crew)
    assert set(report.lost) == dead
    for worker in crew.values():
        assert await worker.value() == 77.0
        assert await worker.call(harness.version) == report.version


# -- while connecting -------------------------------------------------------------------------


async def _join_and_die(state: harness.State, method: str, called: bool = False) -> None:
    """Join, and kill this process before or after the first call of a method of the link."""

    async def dying(self: Any, *args: Any, **options: Any) -> None:
        if called:
            await real(self, *args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    shared = isinstance(state.scheme, aiosync.SharedMemWeightSyncScheme)
    transport = aiosync.SharedMemTransport if shared else aiosync.MPTransport
    real = getattr(transport, method)
    setattr(transport, method, dying)
    await harness.join(state, 0)


@both
@pytest.mark.parametrize("phase", [("send", False), ("send", True), ("recv", True)], ids=str)
async def test_a_worker_is_killed_while_connecting(make, phase) -> None:
    """The worker dies after it has dialled, after its Hello, or after its Welcome."""
    scheme, model = make(), models.linear(1.0)
    scheme.init_on_sender(model=model, num_workers=2)
    async with harness.workers(scheme, models.linear, 2, connect=False) as crew:
        pids = [worker.pid for worker in crew]
        connecting = asyncio.ensure_future(scheme.connect(timeout=harness.PATIENCE, processes=pids))
        assert await crew[1].call(harness.join, 1) == 1
        crew[0].post(_join_and_die, *phase)
        await harness.until(lambda: crew[0].process.exitcode is not None)
        assert crew[0].process.exitcode == -signal.SIGKILL
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await connecting
        assert set(caught.value.failed) == {0}
        assert caught.value.acked == {1}
        await _goes_on(scheme, model, {0}, {1: crew[1]})


# -- while sending ----------------------------------------------------------------------------


async def test_what_killed_workers_held_is_used_again() -> None:
    scheme, model, mapped = aiosync.SharedMemWeightSyncScheme(), models.medium(), set()
    scheme.init_on_sender(model=model, num_workers=2)
    async with harness.workers(scheme, models.medium, 2) as crew:
        for round_ in range(5):
            crew[-1].kill()
            models.fill(model, float(round_))
            with pytest.raises(aiosync.PartialSyncError):
                await scheme.send()
            crew.append(harness.start(scheme, models.medium))
            await crew[-1].call(harness.join, 1)
            assert await crew[-1].value() == round_
            report = await scheme.send()
            assert (report.acked, report.lost) == ({0, 1}, {})
            mapped.add(num_slots())
    assert max(mapped) - min(mapped) <= 1, mapped


@both
@pytest.mark.parametrize("method", ["forkserver", "fork"])
async def test_a_worker_behind_a_users_pipe_is_killed(make, method) -> None:
    """Other processes may hold copies of both ends, so the stream may not end with the worker."""
    scheme, model = make(), models.linear()
    ends = [multiprocessing.Pipe() for _ in range(2)]
    scheme.init_on_sender(model=model, pipes=[ours for ours, _ in ends])
    crew = []
    try:
        for _, theirs in ends:
            crew.append(harness.start(scheme, models.linear, method=method, pipe=theirs))
        for idx, worker in enumerate(crew):
            worker.post(harness.join, idx)
        await scheme.connect(timeout=harness.PATIENCE)
        for worker in crew:
            await worker.answer()
        crew[0].kill()
        models.fill(model, 5.0)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send()
        assert set(caught.value.failed) == {0}
        await _goes_on(scheme, model, {0}, {1: crew[1]})
    finally:
        await scheme.aclose()
        for worker in crew:
            worker.end()
        for _, theirs in ends:
            theirs.close()


# -- the trainer dies -------------------------------------------------------------------------


async def _train(state: harness.State) -> None:
    state.scheme.init_on_sender(model=models.linear(3.0), num_workers=1)
    await state.scheme.connect(timeout=30)


async def _receive_until_the_end(state: harness.State) -> int:
    with pytest.raises(aiosync.PeerClosed):
        while True:
            await state.scheme.receive(timeout=30)
    return state.scheme.version


@both
async def test_the_trainer_is_killed(make: Any) -> None:
    scheme = make()
    trainer = harness.start(scheme)
    worker = harness.start(scheme, models.linear)
    try:
        worker.post(harness.join, 0)
        await trainer.call(_train)
        await worker.answer()
        worker.post(_receive_until_the_end)
        trainer.kill()
        assert await worker.answer() == 1
        assert await worker.value() == 3.0
        with pytest.raises(aiosync.PeerClosed):
            await worker.call(harness.wait_for_version, 2)
    finally:
        trainer.end()
        worker.end()


def _pickled_sender(state) -> bytes:
    state.scheme.init_on_sender(model=models.linear(), num_workers=1)
    return pickle.dumps(state.scheme)


def _refused(pid: int) -> int:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@both
@pytest.mark.parametrize(
    ("reaped", "pidfds", "error"),
    [
        (True, True, aiosync.ConnectError),
        (False, True, aiosync.ConnectError),
        # A sandbox may forbid pidfds, and then the worker cannot know that the trainer ended.
        (True, False, aiosync.ConnectTimeout),
    ],
)
async def test_dialling_a_dead_trainer_fails_at_once(
    make, reaped, pidfds, error, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = harness.start(make(), method="fork")
    try:
        scheme = pickle.loads(await trainer.call(_pickled_sender))
        trainer.kill()
        if reaped:
            trainer.process.join()
        else:
            await asyncio.to_thread(os.waitid, os.P_PID, trainer.pid, os.WEXITED | os.WNOWAIT)
        if not pidfds:
            monkeypatch.setattr(os, "pidfd_open", _refused)
        async with scheme:
            scheme.init_on_receiver(model=models.linear())
            with pytest.raises(error) as caught:
                await scheme.connect(timeout=20.0 if error is aiosync.ConnectError else 0.2)
        assert type(caught.value) is error
    finally:
        monkeypatch.undo()
        trainer.end()
