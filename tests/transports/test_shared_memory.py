"""Slots of shared memory: descriptors that are missing, and readers that leave."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
from typing import Any

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import num_slots

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


def _refused(*_args: Any, **_kwargs: Any) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


async def test_a_worker_that_comes_without_descriptors_left_ends_nothing(monkeypatch) -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=models.linear())
    worker, next_one = harness.twin(scheme), harness.twin(scheme)
    async with scheme, worker, next_one:
        await scheme.connect()
        worker.init_on_receiver(model=models.linear(), worker_idx=0)
        next_one.init_on_receiver(model=models.linear(), worker_idx=0)
        with monkeypatch.context() as short:
            short.setattr(os, "open", _refused)
            with pytest.raises(aiosync.AiosyncError):
                await worker.connect(timeout=harness.PATIENCE)
        await harness.until(lambda: not scheme.sender_transports)
        await next_one.connect(timeout=harness.PATIENCE)
        assert (await scheme.send(timeout=harness.PATIENCE)).acked == {0}


# -- readers that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [False, True])
async def test_workers_that_leave_during_an_update_leave_no_slots_behind(reads) -> None:
    async with aiosync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=models.linear())
        await scheme.connect()
        before = _num_descriptors()
        for _ in range(8):
            worker = copy.copy(scheme)
            worker.init_on_receiver(model=models.linear(), worker_idx=0)
            async with worker:
                await worker.connect()
                sending = scheme.send_nowait()  # on its way when the worker leaves
                if reads:
                    await worker.receive(timeout=harness.PATIENCE)
            try:
                await sending
            except aiosync.PartialSyncError:
                assert not reads
        assert num_slots() <= 4
        assert _num_descriptors() <= before + 4  # the last worker's mappings


@pytest.mark.parametrize("pidfds", [True, False])
async def test_what_a_worker_keeps_when_it_leaves_is_never_written(
    pidfds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system does not tell when its process has ended."""
    if not pidfds:
        monkeypatch.setattr(os, "pidfd_open", _refused, raising=False)
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
        with contextlib.suppress(aiosync.PartialSyncError):  # it left before it read that one
            await sending
        await harness.until(lambda: not scheme.sender_transports)
        for value in range(5, 15):
            models.fill(source, float(value))
            with contextlib.suppress(aiosync.PartialSyncError):  # names who left, once
                await scheme.send()
            assert all(bool((each == 3.0).all()) for each in kept.values()), value
        assert num_slots() <= 6
