"""Slots of shared memory whose readers leave or go on to newer versions."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import socket
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import aiosync
from aiosync.errors import PeerClosed
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.wire import Fetch, encode_frame
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import num_slots

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


def _segment_nbytes() -> int:
    """Bytes in memory of the segments and pages that this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # The descriptor that listdir() used is in the list, and closed by now.
        with contextlib.suppress(OSError):
            if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                stat = os.stat(f"/proc/self/fd/{name}")
                found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def _num_written() -> int:
    """Number of slots and pages that this process has mapped to write, as a sender does."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:" in line and line.split()[1].endswith("s") for line in lines)


async def test_what_a_worker_keeps_when_it_leaves_is_never_written() -> None:
    source, target = models.linear(), models.linear()
    async with aiosync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=source)
        worker = copy.copy(scheme)
        worker.init_on_receiver(model=target, worker_idx=0)
        await scheme.connect()
        async with worker:
            await worker.connect()
            models.fill(source, 3.0)
            await scheme.send()
            with worker.reading():
                kept = dict(target.state_dict())
            models.fill(source, 4.0)
            sending = scheme.send_nowait()
        # The worker left before it read the last version, so the send may fail.
        with contextlib.suppress(aiosync.PartialSyncError):
            await sending
        await harness.until(lambda: not scheme.sender_transports)
        for value in range(5, 15):
            models.fill(source, float(value))
            # One of the sends may fail, because it reports the worker that left.
            with contextlib.suppress(aiosync.PartialSyncError):
                await scheme.send()
            assert all(bool((each == 3.0).all()) for each in kept.values()), value
        assert num_slots() <= 6


@pytest.mark.parametrize("fork", [False, True], ids=["writes", "forks"])
async def test_a_worker_sees_each_new_version_after_its_own_page_has_another(fork: bool) -> None:
    """A slot's header is in the page of the first weights, which is the worker's after a write."""
    source, target = models.linear(), models.linear()
    scheme = aiosync.SharedMemWeightSyncScheme(apply="manual")
    scheme.init_on_sender(model=source)
    worker = harness.twin(scheme)
    worker.init_on_receiver(model=target)
    async with scheme, worker:
        await scheme.connect()
        await worker.connect()
        worker.apply_pending()
        # Each slot is used several times.
        for value in range(8):
            if fork:
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
                await asyncio.to_thread(os.waitpid, pid, 0)
            else:
                models.fill(target, -1.0)
            models.fill(source, float(value))
            sending = scheme.send_nowait()
            assert await worker.wait_staged(scheme.version, timeout=5) == scheme.version
            assert (worker.staged_version, worker.lag) == (scheme.version, 1)
            assert worker.apply_pending() == scheme.version
            assert models.filled(target, float(value))
            await sending


@pytest.mark.parametrize("last_stays", [False, True])
async def test_slots_of_workers_that_went_on_are_given_back_within_100_sends(last_stays) -> None:
    """Each of six workers reads another version; then all of them go on, or all but the last."""
    # Seven slots of so many bytes clearly stand out from the other memory.
    nbytes = 2**22
    scheme = aiosync.SharedMemWeightSyncScheme(guard="reading", require=1)
    scheme.init_on_sender(weights={"weight": torch.zeros(nbytes // 4)})
    workers = [harness.twin(scheme) for _ in range(7)]
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(scheme)
        await scheme.connect()
        for worker in workers:
            worker.init_on_receiver(weights={"weight": torch.zeros(nbytes // 4)})
            await stack.enter_async_context(worker)
            await worker.connect()
        for _ in range(3):
            await scheme.send()
        before, mapped = _segment_nbytes(), _num_written()
        reads = list[contextlib.AsyncExitStack]()
        for worker in workers[1:]:
            await scheme.send()
            await worker.wait_for_version(scheme.version, timeout=harness.PATIENCE)
            reads.append(await contextlib.AsyncExitStack().__aenter__())
            await reads[-1].enter_async_context(worker.reading())
        await scheme.send()
        assert _segment_nbytes() >= 7 * nbytes
        last = reads.pop()
        for read in reads:
            await read.aclose()
        if not last_stays:
            await last.aclose()
        for _ in range(100):
            await scheme.send()
        assert _segment_nbytes() <= before + last_stays * (nbytes + 2**16)
        if not last_stays:
            # The mapping of each slot has a descriptor. A slot whose memory was given back keeps
            # its mapping as long as a slot after it is used.
            assert _num_written() <= mapped + 2
        await last.aclose()


async def test_workers_that_came_once_are_forgotten_and_so_are_their_weights() -> None:
    """Workers with ever new indices neither grow the reports nor keep their weights in memory."""
    scheme = aiosync.SharedMemWeightSyncScheme(per_worker_weights=True)
    scheme.init_on_sender(model=models.linear())
    stays, given = harness.twin(scheme), list[weakref.ref[torch.Tensor]]()
    async with scheme, stays:
        await scheme.connect()
        stays.init_on_receiver(model=models.linear(), worker_idx=0)
        await stays.connect(timeout=harness.PATIENCE)
        for idx in range(100):
            worker = harness.twin(scheme)
            worker.init_on_receiver(model=models.linear(), worker_idx=1000 + idx)
            await worker.connect(timeout=harness.PATIENCE)
            weights = models.linear(float(idx)).state_dict()
            given.append(weakref.ref(weights["weight"]))
            await scheme.send({1000 + idx: weights})
            worker.abort()
            await harness.until(lambda: len(scheme.sender_transports) == 1)
            # The send may fail, because it reports the worker that left.
            with contextlib.suppress(aiosync.PartialSyncError):
                await scheme.send({1000 + idx: weights})
        report = await scheme.send()
        assert len(report.lost) <= 70
        assert _num_written() <= 70
        assert sum(each() is not None for each in given) <= 70


async def _come_and_go(state: harness.State, aborts: bool, seconds: float) -> None:
    """Join the trainer, and leave it before anything that it sent was read."""
    joined = asyncio.Event()

    async def connected() -> None:
        joined.set()
        await asyncio.sleep(harness.PATIENCE)

    one = harness.twin(state.scheme)
    hooks = aiosync.SchemeHooks(connected=connected)
    one.init_on_receiver(model=state.model, worker_idx=0, hooks=hooks)
    await one.connect(initial=False, timeout=harness.PATIENCE)
    await joined.wait()
    await asyncio.sleep(seconds)
    if aborts:
        one.abort()
    await one.aclose()


@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["at once", "later"])
@pytest.mark.parametrize("aborts", [False, True], ids=["aclose", "abort"])
async def test_workers_that_leave_before_they_read_anything_keep_no_slot(
    aborts: bool, seconds: float
) -> None:
    """The process of the workers goes on, and each of them was offered another version."""
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(weights=models.medium())
    async with harness.workers(scheme, models.medium, connect=False) as [worker]:
        await scheme.connect()
        numbers = list[int]()
        for _ in range(8):
            # A send may fail, because it reports the worker that left.
            with contextlib.suppress(aiosync.PartialSyncError):
                await scheme.send()
            await worker.call(_come_and_go, aborts, seconds)
            await harness.until(lambda: not scheme.sender_transports)
            numbers.append(_num_written())
        assert numbers[-1] <= numbers[1] + 1, numbers


async def test_a_version_that_no_worker_would_get_any_more_is_not_kept() -> None:
    """Once each worker has weights of its own, no worker can get the common version."""
    nbytes, held = 8 * 2**20, _segment_nbytes()
    scheme = aiosync.SharedMemWeightSyncScheme(per_worker_weights=True)
    init = {"weights": models.medium()}
    async with harness.crowd(scheme, [models.medium(), models.medium()], sender=init) as ends:
        sender, others = ends
        for version in range(2, 8):
            await sender.send({0: models.medium(), 1: models.medium()})
            for other in others:
                await other.wait_for_version(version, timeout=harness.PATIENCE)
        # Each of the two workers reads one slot, and the next send writes two others.
        assert _segment_nbytes() - held < 4.5 * nbytes


async def test_a_message_and_a_reset_that_come_together() -> None:
    """uvloop reports the message and the reset with a single callback."""
    left, right = socket.socketpair()
    async with SharedMemTransport(right) as link:
        assert link.send_nowait(Fetch(1))  # it stays unread, so that closing resets the link
        left.sendall(encode_frame(Fetch(2)))
        left.close()
        assert (await link.recv(timeout=harness.PATIENCE)).message == Fetch(2)
        with pytest.raises(PeerClosed):
            await link.recv(timeout=harness.PATIENCE)


async def test_a_version_that_another_model_refused_is_not_reported() -> None:
    ours, theirs = socket.socketpair()
    trainer, worker = (aiosync.SharedMemWeightSyncScheme() for _ in range(2))
    trainer.init_on_sender(model=nn.Linear(4, 2), pipes=[ours])
    worker.init_on_receiver(model=nn.Linear(4, 2), pipe=theirs)
    async with trainer, worker:
        await asyncio.gather(trainer.connect(), worker.connect())
        await trainer.send()
        assert trainer.worker_versions == {0: 2}
        worker.model = None
        worker.model = nn.Linear(4, 3)
        with pytest.raises(aiosync.ApplyError):
            await worker.pull(timeout=harness.PATIENCE)
        assert (worker.version, trainer.worker_versions) == (0, {0: 0})
