"""Slots of shared memory: descriptors that are missing, and readers that leave."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import subprocess
import sys
from typing import Any

import pytest

import aiosync
from aiosync.transports._segment import Arena
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.asyncio


def _no_descriptor(*_args: Any, **_kwargs: Any) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


async def test_a_worker_that_comes_without_descriptors_left_ends_nothing(monkeypatch) -> None:
    source, target = models.linear(), models.linear()
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=source)
    worker = harness.twin(scheme)
    async with scheme, worker:
        await scheme.connect()
        worker.init_on_receiver(model_id="policy", model=target, worker_idx=0)
        with monkeypatch.context() as short:
            short.setattr(os, "open", _no_descriptor)
            short.setattr(os, "dup", _no_descriptor)
            await worker.connect(timeout=harness.PATIENCE)
        assert (await scheme.send(timeout=harness.PATIENCE)).acked == {0}


async def test_a_segment_without_a_descriptor_for_readers_is_refused(monkeypatch) -> None:
    before = _num_descriptors()
    monkeypatch.setattr(os, "open", _no_descriptor)
    monkeypatch.setattr(os, "dup", _no_descriptor)
    with pytest.raises(aiosync.ConfigError, match="descriptor"):
        Arena().grow(4096)
    monkeypatch.undo()
    assert _num_descriptors() == before


# -- readers that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [False, True])
async def test_workers_that_leave_during_an_update_leave_no_slots_behind(reads) -> None:
    source = models.linear()
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=source)
    async with scheme:
        await scheme.connect()
        before = _num_descriptors()
        for _ in range(8):
            worker = copy.copy(scheme)
            worker.init_on_receiver(model_id="policy", model=models.linear(), worker_idx=0)
            async with worker:
                await worker.connect()
                sending = scheme.send_nowait()  # on its way when the worker leaves
                if reads:
                    await worker.receive(timeout=harness.PATIENCE)
            try:
                await sending
            except aiosync.PartialSyncError:
                assert not reads
        arena = scheme._maker._store.arena
        assert arena.num_slots <= 3
        assert all(slot.is_free() or slot.refs for slot in arena.segment.slots)
        assert _num_descriptors() <= before + 4  # the last worker's mappings


async def test_what_a_worker_keeps_when_it_leaves_is_never_written() -> None:
    source, target = models.linear(), models.linear()
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=source)
    worker = copy.copy(scheme)
    worker.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    async with scheme:
        await scheme.connect()
        async with worker:
            await worker.connect()
            models.fill(source, 3.0)
            await scheme.send()
            kept = dict(target.state_dict())
            models.fill(source, 4.0)
            sending = scheme.send_nowait()
        with contextlib.suppress(aiosync.PartialSyncError):  # it left before it read that one
            await sending
        arena = scheme._maker._store.arena
        await harness.until(lambda: not scheme.sender_transports)
        assert sum(slot.num_orphans for slot in arena.segment.slots) >= 1
        for value in range(5, 15):
            models.fill(source, float(value))
            with contextlib.suppress(aiosync.PartialSyncError):  # names who left, once
                await scheme.send()
            assert all(bool((each == 3.0).all()) for each in kept.values()), value
        assert arena.num_slots <= 5


async def test_slots_of_processes_that_ended_come_back_together() -> None:
    arena = Arena()
    slots = [arena.grow(4096) for _ in range(3)]
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = _num_descriptors()
    for holder, slot in enumerate(slots):
        slot.holders[holder] = False
        slot.release()
        arena.drop_holder(holder, lambda: os.pidfd_open(process.pid))
    assert not any(slot.is_free() for slot in slots)
    assert arena.free_slot(4096) is None
    process.communicate(b"")
    assert arena.free_slot(4096) is slots[0]
    assert all(slot.is_free() for slot in slots[1:])
    assert _num_descriptors() == before - 1  # that of the pipe to it
    arena.close()


async def test_a_reader_that_cannot_be_watched_keeps_its_slots_for_good() -> None:
    arena = Arena()
    slot = arena.grow(4096)
    slot.holders["reader"] = False
    slot.release()
    arena.drop_holder("reader", lambda: -1)
    assert arena.free_slot(4096) is None
    arena.close()


async def test_a_reader_that_said_what_it_keeps_has_left_the_others() -> None:
    arena = Arena()
    slots = [arena.grow(4096) for _ in range(2)]
    for slot in slots:
        slot.holders["reader"] = False
        slot.release()
    arena.drop_holder("reader", lambda: -1, kept={slots[0].key})
    assert [slot.is_free() for slot in slots] == [False, True]
    arena.close()
