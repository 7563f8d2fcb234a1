"""Calls that need not wait leave the loop its turns all the same: updates come on it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


async def read(scheme: Any) -> None:
    async with scheme.reading():
        pass


CALLS: dict[str, Any] = {
    "wait_for_version": lambda scheme: scheme.wait_for_version(1),
    "wait_staged": lambda scheme: scheme.wait_staged(1),
    "ready": lambda scheme: scheme.ready.wait(),
    "reading": read,
}


@pytest.mark.parametrize(
    ("call", "side"),
    [(call, side) for call in CALLS for side in ("sender", "receiver") if call != "reading"]
    + [("reading", "receiver")],
)
async def test_a_loop_of_them_lets_others_run(call: str, side: str) -> None:
    scheme = aiosync.MultiProcessWeightSyncScheme()
    async with harness.here(scheme, models.linear(), sender={"model": models.linear()}) as pair:
        mine = pair[side == "receiver"]
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1

        asyncio.get_running_loop().call_soon(turn)
        for _ in range(3):
            await CALLS[call](mine)
        assert turns


async def test_a_worker_that_polls_gets_its_updates() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    async with harness.here(scheme, models.linear(), sender={"model": models.linear()}) as pair:
        sender, receiver = pair

        async def poll() -> None:
            while receiver.version < 2:
                await receiver.wait_for_version(1)

        async with asyncio.timeout(harness.PATIENCE):
            await asyncio.gather(poll(), sender.send())
