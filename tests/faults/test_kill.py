"""Workers and trainers that die or freeze in any phase: nobody hangs, and nothing is left.

That nothing is left (descriptors, tasks, processes, shared memory) is what the fixture of
``conftest.py`` checks after each test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import pytest
import torch

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.one_loop]

SOON = 3.0
"""Seconds in which a death has to be noticed: far fewer than any deadline that ends a wait."""


@contextlib.contextmanager
def within(seconds: float):
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"took {took:.2f} s"


def _weight(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)}


async def _goes_on(scheme, model, dead: set[int], crew: dict[int, harness.Worker]) -> None:
    """A new send works, lists the dead, and reaches everybody else."""
    models.fill(model, 77.0)
    report = await scheme.send()
    assert report.acked == set(crew)
    assert set(report.lost) == dead
    for worker in crew.values():
        got = await worker.call(harness.weights)
        assert all((value == 77.0).all() for value in got.values())
        assert await worker.call(harness.version) == report.version


# -- while connecting -------------------------------------------------------------------------


def _die_before_dialling(state) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _die_after_dialling(state) -> None:
    from aiosync.schemes.rendezvous import dial

    await dial(state.scheme._address, sender_pid=None, timeout=10)
    os.kill(os.getpid(), signal.SIGKILL)


async def _die_after_hello(state) -> None:
    from aiosync.schemes.rendezvous import dial
    from aiosync.wire import Hello

    sock = await dial(state.scheme._address, sender_pid=None, timeout=10)
    link = state.scheme._transport_over(sock, "the trainer")
    await link.send(Hello(role="receiver", model_id="policy", pid=os.getpid(), worker_idx=0))
    os.kill(os.getpid(), signal.SIGKILL)


async def _die_after_welcome(state) -> None:
    from aiosync.schemes.rendezvous import dial
    from aiosync.wire import Hello

    sock = await dial(state.scheme._address, sender_pid=None, timeout=10)
    link = state.scheme._transport_over(sock, "the trainer")
    await link.send(Hello(role="receiver", model_id="policy", pid=os.getpid(), worker_idx=0))
    await link.recv()
    os.kill(os.getpid(), signal.SIGKILL)


async def _die_in_the_first_apply(state) -> None:
    await harness.join(state, 0, model=_Dying())


class _Dying(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def get_extra_state(self):
        return {"alive": True}

    def set_extra_state(self, state) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@both
@pytest.mark.parametrize(
    "phase",
    [_die_before_dialling, _die_after_dialling, _die_after_hello, _die_after_welcome],
)
async def test_a_worker_is_killed_while_connecting(make, phase) -> None:
    scheme, model = make(), models.linear()
    models.fill(model, 1.0)
    scheme.init_on_sender(model=model, num_workers=2)
    async with harness.workers(scheme, models.linear, 2, connect=False) as crew:
        pids = [worker.pid for worker in crew]
        connecting = asyncio.ensure_future(scheme.connect(timeout=harness.PATIENCE, processes=pids))
        assert await crew[1].call(harness.join, 1) == 1
        crew[0].post(phase)
        await harness.until(lambda: crew[0].process.exitcode is not None)
        assert crew[0].process.exitcode == -signal.SIGKILL
        with within(SOON), pytest.raises(aiosync.PartialSyncError) as caught:
            await connecting
        assert set(caught.value.failed) == {0}
        assert caught.value.acked == {1}
        await _goes_on(scheme, model, {0}, {1: crew[1]})


@both
async def test_a_worker_is_killed_while_it_applies_the_first_weights(make) -> None:
    scheme, model = make(), models.extra()
    scheme.init_on_sender(model=model, num_workers=1)
    async with harness.workers(scheme, None, 1, connect=False) as crew:
        crew[0].post(_join_and_die)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.connect(timeout=harness.PATIENCE, processes=[crew[0].pid])
        assert set(caught.value.failed) == {0}


async def _join_and_die(state) -> None:
    class Dying(models.Extra):
        def set_extra_state(self, state) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    await harness.join(state, 0, model=Dying())


# -- while sending ----------------------------------------------------------------------------


@both
async def test_a_worker_is_killed_between_two_sends(make) -> None:
    scheme, model = make(), models.linear()
    scheme.init_on_sender(model=model, num_workers=3)
    async with harness.workers(scheme, models.linear, 3) as crew:
        crew[1].kill()
        models.fill(model, 5.0)
        with within(SOON), pytest.raises(aiosync.PartialSyncError, match="worker 1") as caught:
            await scheme.send()
        assert set(caught.value.failed) == {1}
        assert isinstance(caught.value.failed[1], aiosync.TransportError)
        assert caught.value.acked == {0, 2}
        for worker in (crew[0], crew[2]):
            assert ((await worker.call(harness.weights))["weight"] == 5.0).all()
        await _goes_on(scheme, model, {1}, {0: crew[0], 2: crew[2]})


@both
async def test_a_worker_is_killed_in_the_middle_of_a_big_send(make) -> None:
    scheme, model = make(), models.big()
    scheme.init_on_sender(model=model, num_workers=2)
    async with harness.workers(scheme, models.big, 2) as crew:
        crew[0].stop()  # reads no more, so the payload stays under way
        models.fill(model, 5.0)
        handle = scheme.send_nowait()
        await crew[1].call(harness.wait_for_version, handle.version)
        assert not handle.done()
        crew[0].kill()
        with within(SOON), pytest.raises(aiosync.PartialSyncError) as caught:
            await handle
        assert set(caught.value.failed) == {0}
        assert caught.value.acked == {1}
        await _goes_on(scheme, model, {0}, {1: crew[1]})


@both
async def test_a_worker_is_killed_before_its_acknowledgement(make) -> None:
    scheme, model = make(), models.extra()
    scheme.init_on_sender(num_workers=2)
    async with harness.workers(scheme, models.very_slow, 1, connect=False) as crew:
        other = harness.start(scheme, models.extra)
        crew.append(other)
        crew[0].post(harness.join, 0)
        other.post(harness.join, 1)
        await scheme.connect(timeout=harness.PATIENCE)
        for worker in crew:
            await worker.answer()
        model.counter = 3
        handle = scheme.send_nowait(model)
        await other.call(harness.wait_for_version, handle.version)
        crew[0].kill()
        with within(SOON), pytest.raises(aiosync.PartialSyncError) as caught:
            await handle
        assert set(caught.value.failed) == {0}
        assert caught.value.acked == {1}
        report = await scheme.send(model)
        assert (report.acked, set(report.lost)) == ({1}, {0})


@both
async def test_every_worker_is_killed(make) -> None:
    scheme, model = make(), models.linear()
    scheme.init_on_sender(model=model, num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        for worker in crew:
            worker.kill()
        with within(SOON), pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send()
        assert set(caught.value.failed) == {0, 1}
        with within(SOON), pytest.raises(aiosync.PartialSyncError):
            await scheme.send()  # nobody is left, and it does not pretend otherwise


@both
async def test_a_worker_that_was_killed_comes_back(make) -> None:
    scheme, model = make(), models.linear()
    scheme.init_on_sender(model=model, num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        for round_ in range(3):
            crew[-1].kill()
            models.fill(model, float(round_))
            with pytest.raises(aiosync.PartialSyncError):
                await scheme.send()
            crew.append(harness.start(scheme, models.linear))
            await crew[-1].call(harness.join, 1)
            got = await crew[-1].call(harness.weights)
            assert (got["weight"] == float(round_)).all()
            report = await scheme.send()
            assert report.acked == {0, 1}
            assert not report.lost
        arena = getattr(scheme, "_arena", None)
        assert arena is None or arena.num_slots <= 3  # the dead hold nothing


@both
@pytest.mark.parametrize("method", ["forkserver", "fork"])
async def test_a_worker_behind_a_users_pipe_is_killed(make, method) -> None:
    """Other processes may hold copies of both ends, so that no end of the stream tells."""
    import multiprocessing

    scheme, model = make(), models.linear()
    ends = [multiprocessing.Pipe() for _ in range(2)]
    scheme.init_on_sender(model=model, pipes=[ours for ours, _ in ends])
    crew = []
    try:
        for _, theirs in ends:
            crew.append(harness.start_with_pipe(scheme, models.linear, theirs, method=method))
        for idx, worker in enumerate(crew):
            worker.post(harness.join_through_pipe, idx)
        await scheme.connect(timeout=harness.PATIENCE)
        for worker in crew:
            await worker.answer()
        crew[0].kill()
        models.fill(model, 5.0)
        with within(SOON), pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send()
        assert set(caught.value.failed) == {0}
        await _goes_on(scheme, model, {0}, {1: crew[1]})
    finally:
        await scheme.aclose()
        for worker in crew:
            worker.end()
        for _, theirs in ends:
            theirs.close()


# -- frozen workers ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize("build", [models.linear, models.medium])
async def test_a_frozen_worker_delays_nobody_and_catches_up(make, build) -> None:
    scheme, model = make(), build()
    scheme.init_on_sender(model=model, num_workers=2)
    async with harness.workers(scheme, build, 2) as crew:
        crew[0].stop()
        for value in (2.0, 3.0, 4.0):
            models.fill(model, value)
            started = time.monotonic()
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await scheme.send(timeout=0.2)
            assert 0.15 < time.monotonic() - started < 0.2 + SOON
            assert set(caught.value.failed) == {0}
            assert isinstance(caught.value.failed[0], aiosync.AckTimeout)
            assert caught.value.failed[0].worker_ids == {0}
            assert caught.value.acked == {1}
            got = await crew[1].call(harness.weights)
            assert all((tensor == value).all() for tensor in got.values())
        crew[0].cont()
        assert await crew[0].call(harness.wait_for_version, scheme.version) == scheme.version
        got = await crew[0].call(harness.weights)
        assert all((tensor == 4.0).all() for tensor in got.values())
        assert (await scheme.send()).acked == {0, 1}


# -- the trainer dies -------------------------------------------------------------------------


async def _train(state, crew_size) -> None:
    model = models.linear()
    models.fill(model, 3.0)
    state.scheme.init_on_sender(model=model, num_workers=crew_size)
    await state.scheme.connect(timeout=30)


async def _receive_until_the_end(state) -> tuple[str, float]:
    try:
        while True:
            await state.scheme.receive(timeout=30)
    except aiosync.AiosyncError as exc:
        return type(exc).__name__, time.time()


def _forward(state) -> float:
    return state.model(torch.ones(4)).sum().item()


async def _try_to_connect(state, timeout: float) -> tuple[str, float]:
    started = time.monotonic()
    try:
        await harness.join(state, 0, timeout)
    except aiosync.AiosyncError as exc:
        return f"{type(exc).__name__}: {exc}", time.monotonic() - started
    return "connected", 0.0


@both
async def test_the_trainer_is_killed(make) -> None:
    scheme = make()
    trainer = harness.start(scheme)
    worker = harness.start(scheme, models.linear)
    try:
        worker.post(harness.join, 0)
        await trainer.call(_train, 1)
        await worker.answer()
        worker.post(_receive_until_the_end)
        killed = time.time()
        trainer.kill()
        name, at = await worker.answer()
        assert name == "PeerClosed"
        assert at - killed < SOON
        assert await worker.call(_forward) == pytest.approx(2 * (4 * 3.0 + 3.0))
        assert await worker.call(harness.version) == 1
        with pytest.raises(aiosync.PeerClosed):
            await worker.call(harness.wait_for_version, 2)
    finally:
        trainer.end()
        worker.end()


def _pickled_sender(state) -> bytes:
    import pickle

    state.scheme.init_on_sender(model=models.linear(), num_workers=1)
    return pickle.dumps(state.scheme)


@both
@pytest.mark.parametrize("reaped", [True, False])
async def test_dialling_a_dead_trainer_fails_at_once(make, reaped) -> None:
    import pickle
    import subprocess

    trainer = harness.start(make(), method="fork")
    scheme = pickle.loads(await trainer.call(_pickled_sender))
    worker = harness.start(scheme, models.linear)
    try:
        trainer.kill()
        if reaped:
            trainer.process.join()
        else:
            status = f"/proc/{trainer.pid}/status"
            while "zombie" not in subprocess.check_output(["cat", status]).decode():
                await asyncio.sleep(0.01)
        text, took = await worker.call(_try_to_connect, 20.0)
        assert text.startswith("ConnectError")
        assert took < SOON
    finally:
        worker.end()
        trainer.end()


@both
async def test_the_trainer_is_killed_before_it_answers(make) -> None:
    import pickle

    trainer = harness.start(make())
    scheme = pickle.loads(await trainer.call(_pickled_sender))
    worker = harness.start(scheme, models.linear)
    try:
        worker.post(_try_to_connect, 20.0)  # waits in the listener's queue
        await asyncio.sleep(0.3)
        trainer.kill()
        text, _ = await worker.answer()
        assert text.startswith("ConnectError"), text
    finally:
        worker.end()
        trainer.end()
