"""Slots of shared memory: descriptors that are missing, and readers that leave."""

from __future__ import annotations

import errno
import os
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
