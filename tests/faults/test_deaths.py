"""Dead workers in reports: the first report after a death names the worker's index and process."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from aiosync.wire import Hello
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop, pytest.mark.slow]
ANY = pytest.mark.parametrize("make", [*harness.SCHEMES, aiosync.TCPWeightSyncScheme])


def _apply(state: harness.State) -> int | None:
    applied: int | None = state.scheme.apply_pending()
    return applied


async def _stage(state: harness.State, version: int) -> None:
    await state.scheme.wait_staged(version, timeout=harness.PATIENCE)


@ANY
async def test_it_dies_after_it_has_the_version(make: Any) -> None:
    """The other worker has not answered yet, so the send is still going on."""
    scheme = make(apply="manual")
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        handle = scheme.send_nowait()
        for worker in crew:
            await worker.call(_stage, 2)
        assert await crew[0].call(_apply) == 2
        await harness.until(lambda: scheme.worker_versions.get(0) == 2)
        crew[0].kill()
        assert await crew[1].call(_apply) == 2
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await handle
        assert (caught.value.acked, caught.value.failed.keys()) == ({1}, {0})
        assert str(crew[0].pid) in str(caught.value.failed[0])


@ANY
async def test_its_index_has_a_new_holder(make: Any) -> None:
    scheme = make()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        first = crew[0].pid
        for _ in range(2):
            crew[0].kill()
            crew.insert(0, harness.start(scheme, models.linear))
            assert await crew[0].call(harness.join, 0) == scheme.version
            report = await scheme.send()
            assert (report.acked, report.lost.keys()) == ({0, 1}, {0})
            assert isinstance(report.lost[0], aiosync.TransportError)
            assert str(first) in str(report.lost[0])
            report = await scheme.send()
            assert (report.acked, report.lost) == ({0, 1}, {})
            first = crew[0].pid


async def test_a_send_that_fails_leaves_it_to_the_next_report() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        crew[0].kill()
        crew.append(harness.start(scheme, models.linear))
        assert await crew[2].call(harness.join, 0) == 1
        crew[1].kill()
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send()
        assert caught.value.failed.keys() == {1}
        assert (await scheme.send()).lost.keys() == {0, 1}
        assert (await scheme.send()).lost.keys() == {1}


async def test_a_quorum_that_cannot_be_met_blames_no_new_holder() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        crew[1].kill()
        with pytest.raises(aiosync.PartialSyncError):
            await scheme.send()
        crew[0].kill()
        crew.append(harness.start(scheme, models.linear))
        assert await crew[2].call(harness.join, 0) == 2
        scheme.require = 2
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send()
        assert (caught.value.acked, caught.value.failed.keys()) == ({0}, {1})
        scheme.require = 1
        report = await scheme.send()
        assert (report.acked, report.lost.keys()) == ({0}, {0, 1})
        assert (await scheme.send()).lost.keys() == {1}


@ANY
async def test_a_worker_that_was_closed_is_not_dead(make: Any) -> None:
    scheme = make()
    scheme.init_on_sender(model=models.linear(1.0), num_workers=1)
    async with harness.workers(scheme, models.linear, 1) as crew:
        await crew[0].call(harness.close)
        crew.append(harness.start(scheme, models.linear))
        assert await crew[1].call(harness.join, 0) == 1
        report = await scheme.send()
        assert (report.acked, report.lost) == ({0}, {})


class Trainer:
    """A context that calls ``before`` when a send asks for the model, as to kill a worker."""

    def __init__(self) -> None:
        self.policy = models.linear(1.0)
        self.before: Callable[[], None] = lambda: None

    def get_model(self, model_id: str) -> Any:
        self.before()
        return self.policy


@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_it_dies_while_the_send_begins(make: Any) -> None:
    trainer = Trainer()
    scheme = make()
    scheme.init_on_sender("policy", context=trainer, num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        trainer.before = crew[0].kill
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send()
        assert (caught.value.acked, caught.value.failed.keys()) == ({1}, {0})
        assert str(crew[0].pid) in str(caught.value.failed[0])
        trainer.before = lambda: None
        assert (await scheme.send()).acked == {1}
        trainer.before = crew[1].kill
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send_nowait()
        assert (caught.value.acked, caught.value.failed.keys()) == (set(), {1})


async def _hang(epoch: int, version: int) -> None:
    if version > 1:
        await asyncio.Event().wait()


async def _compute(state: harness.State) -> None:
    state.model(torch.zeros(1, 4))


async def test_the_quorum_dies_unnoticed_and_the_others_never_answer() -> None:
    trainer = Trainer()
    scheme = aiosync.SharedMemWeightSyncScheme(require=1)
    scheme.init_on_sender("policy", context=trainer, num_workers=2)
    init = [{}, {"hooks": aiosync.SchemeHooks(applied=_hang)}]
    async with harness.workers(scheme, models.linear, 2, init=init) as crew:
        for _ in range(5):
            # The worker takes versions by itself from the second one on.
            await scheme.send(worker_ids=0)
            await crew[0].call(_compute)
        # No send waits any more, so that no timer of an earlier one ends this one.
        await asyncio.sleep(6)
        trainer.before = crew[0].kill
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await asyncio.wait_for(scheme.send_nowait(timeout=1), harness.PATIENCE / 2)
        assert (caught.value.acked, caught.value.failed.keys()) == (set(), {0, 1})
        assert isinstance(caught.value.failed[1], aiosync.AckTimeout)


@pytest.mark.parametrize(
    "make",
    [aiosync.sync.SharedMemWeightSyncScheme, aiosync.sync.MultiProcessWeightSyncScheme],
)
async def test_it_dies_while_a_blocking_send_begins(make: Any) -> None:
    trainer = Trainer()
    scheme = make()
    scheme.init_on_sender("policy", context=trainer, num_workers=2)
    crew = [harness.start(scheme, models.linear, method="spawn") for _ in range(2)]
    try:
        for worker in crew:
            worker.post(_join_blocking)
        await asyncio.to_thread(scheme.connect, timeout=harness.PATIENCE)
        for worker in crew:
            await worker.answer()
        assert (await asyncio.to_thread(scheme.send)).acked == {0, 1}
        trainer.before = crew[0].kill
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await asyncio.to_thread(scheme.send)
        assert len(caught.value.failed) == 1
        assert str(crew[0].pid) in str(caught.value)
    finally:
        await asyncio.to_thread(scheme.shutdown)
        for worker in crew:
            worker.process.kill()
            worker.end()


async def _join_blocking(state: harness.State) -> None:
    state.scheme.init_on_receiver(model=state.model)
    await asyncio.to_thread(state.scheme.connect)


async def test_a_process_of_another_namespace_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker's id, of a namespace that the trainer cannot see, is another process's here."""
    other = subprocess.Popen(["sleep", "60"])

    class Link(aiosync.MPTransport):
        async def recv(self, **how: Any) -> Any:
            received = await super().recv(**how)
            if isinstance(received.message, Hello):
                received.message = replace(received.message, pid=other.pid)
            return received

    # The kernel's credentials of such a process: no id, and this user.
    unseen = struct.pack("3i", 0, os.geteuid(), os.getegid())
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: unseen)
    left, right = socket.socketpair()
    trainer, worker = aiosync.MultiProcessWeightSyncScheme(), aiosync.MultiProcessWeightSyncScheme()
    trainer.init_on_sender(model=models.linear(1.0), transports={0: Link(left)})
    worker.init_on_receiver(model=models.linear(), transport=aiosync.MPTransport(right))
    try:
        async with trainer, worker:
            await asyncio.gather(trainer.connect(), worker.connect())
            other.kill()
            other.wait()
            assert (await trainer.send()).acked == {0}
            assert (await trainer.send()).acked == {0}
    finally:
        other.kill()
        other.wait()


# -- many lost workers -----------------------------------------------------------------------------


async def _come_and_go(scheme: Any, count: int, first: int) -> None:
    """Connect ``count`` workers with ever new indices, and end each link without a farewell."""
    for idx in range(first, first + count):
        worker = harness.twin(scheme)
        worker.init_on_receiver(model=models.linear(), worker_idx=idx)
        await worker.connect()
        worker.receiver_transport.abort()
        await worker.aclose()


@pytest.mark.parametrize("named", [True, False], ids=["to one", "to all"])
@ANY
async def test_workers_that_went_are_forgotten(make: Any, named: bool) -> None:
    """Lost workers are forgotten after a report has named them, even if no send addresses them."""
    options = {"reconnect": 0} if make is aiosync.TCPWeightSyncScheme else {}
    scheme = make(require=1, **options)
    scheme.init_on_sender(model=models.linear(1.0), num_workers=None)
    living = harness.twin(scheme)
    async with scheme, living:
        await scheme.connect()
        living.init_on_receiver(model=models.linear(), worker_idx=0)
        await living.connect()
        told = set[int]()
        for round_ in range(3):
            first = 1 + 40 * round_
            await _come_and_go(scheme, 40, first)
            await harness.until(lambda: scheme.worker_versions.keys() == {0})
            report = await scheme.send(worker_ids=0 if named else None)
            assert report.acked == {0}
            told |= report.lost.keys() | report.failed.keys()
            assert told >= {*range(first, first + 40)}
        await scheme.send(worker_ids=0)
        assert len((await scheme.send(worker_ids=0)).lost) <= 64
        assert len(scheme.stats().workers) <= 65


@pytest.mark.parametrize("named", [True, False], ids=["to two", "to all"])
@ANY
async def test_a_send_to_a_worker_that_is_about_to_be_forgotten(make: Any, named: bool) -> None:
    """It had left before so many others were lost, and no report has named it yet."""
    options = {"reconnect": 0} if make is aiosync.TCPWeightSyncScheme else {}
    scheme = make(**options)
    scheme.init_on_sender(model=models.linear(1.0), num_workers=None)
    living, leaver = harness.twin(scheme), harness.twin(scheme)
    async with scheme, living:
        await scheme.connect()
        for idx, worker in ((0, living), (100, leaver)):
            worker.init_on_receiver(model=models.linear(), worker_idx=idx)
            await worker.connect()
        await leaver.aclose()
        await _come_and_go(scheme, 66, 1)
        await harness.until(lambda: scheme.worker_versions.keys() == {0})
        if not named:
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await scheme.send()
            assert caught.value.failed.keys() == {*range(1, 67)}
        report = await scheme.send(worker_ids=[0, 100] if named else None)
        assert (report.acked, report.left) == ({0}, {100})
