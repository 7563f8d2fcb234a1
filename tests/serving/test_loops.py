"""One gate on one event loop after the other, as modules that are imported once have it."""

from __future__ import annotations

import asyncio

import pytest

import aiosync
from aiosync.serving import AdmissionGate


async def _use(gate: AdmissionGate, first: int) -> None:
    with pytest.raises(aiosync.AdmissionTimeout):
        async with gate.request(min_version=first + 1, timeout=0.01):
            pytest.fail("was let in")

    async def hold() -> None:
        async with gate.request():
            await asyncio.sleep(0.01)

    async def switch() -> None:
        async with gate.swap():
            await asyncio.sleep(0)

    await asyncio.gather(hold(), hold(), switch(), hold(), switch(), hold())
    assert gate.version == first + 2


def test_one_loop_after_the_other() -> None:
    gate = AdmissionGate(initial_version=1)
    for number in range(3):
        asyncio.run(_use(gate, 1 + 2 * number))
