"""Transfers by RPC that fail because of this process."""

from __future__ import annotations

import asyncio

import pytest

from aiosync.errors import TransportBroken

pytest.importorskip("torch.distributed.rpc")

from aiosync.transports._rpc_flight import Flight

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("text", ["pipe closed", "RPC is no longer running on this node"])
async def test_a_transfer_of_a_process_without_rpc_says_so(text: str) -> None:
    flight = Flight(asyncio.get_running_loop(), "worker0", 1.0)  # pytest's own has no RPC
    flight.calls = 1
    flight._answered(0, RuntimeError(text))
    with pytest.raises(TransportBroken, match=f"{text}. RPC was shut down in this process") as got:
        await flight.until(0)
    assert isinstance(got.value.__cause__, RuntimeError)
