"""The contract with slots in the memory of a device, which a fake driver imitates.

All processes use the accelerator of :mod:`tests.support.accelerator`, whose copies happen only when
a call waits for them. ``DEVICE=cuda pytest tests/contract`` runs the same checks on a GPU.
"""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

import aiosync
from tests.contract import bench
from tests.contract.remote import Hired, Pretending
from tests.contract.suite import CONTRACT_CHECKS, Check, Hooks
from tests.contract.test_contract import SLOW
from tests.support.accelerator import deferred

COPIES = "workers copy from device memory, and what they kept changes, as with apply_copy=True"
NOT_PROMISED = {
    "kept_values": COPIES,
    "kept_buffers": COPIES,
    "plain_weights": "a load function copies what it keeps; on a GPU nothing else keeps it",
}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in SLOW else [])
        for each in CONTRACT_CHECKS
    ],
)
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_in_device_memory(check: Check, forkserver: None) -> None:
    if check.name in NOT_PROMISED:
        pytest.skip(NOT_PROMISED[check.name])
    on_gpu = bench.DEVICE != "cpu"
    hooks = Hooks(process=Hired if on_gpu else Pretending)
    reason = check.skip_reason(hooks)
    if reason is not None:
        pytest.skip(reason)
    with contextlib.nullcontext() if on_gpu else deferred():
        await check.run(partial(aiosync.SharedMemWeightSyncScheme, memory="device"), hooks)
