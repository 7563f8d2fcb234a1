"""Delivery of small messages to handlers, and links that have ended."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from typing import Any

import pytest

from aiosync.errors import (
    PeerClosed,
    RemoteProtocolError,
    TransportClosed,
)
from aiosync.transports import MPTransport, Received, SharedMemTransport, TCPTransport
from aiosync.wire import Fetch


@pytest.mark.parametrize("kind", [TCPTransport, MPTransport, SharedMemTransport])
@pytest.mark.parametrize("how", ["broken", "left by its peer"])
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_a_dead_link_keeps_no_memory_until_the_collector_runs(kind: Any, how: str) -> None:
    left, right = map(kind, socket.socketpair())
    left.subscribe(lambda received: None)
    await right.send(Fetch(1))
    await asyncio.sleep(0.01)
    gc.collect()
    gc.disable()
    try:
        if how == "left by its peer":
            await right.aclose()
            with pytest.raises(PeerClosed):
                await left.recv(timeout=5)
        elif how == "broken":
            await right.send(Fetch(1))
            left.subscribe(refuse)
            await asyncio.sleep(0.01)
        await left.aclose()
        # The loop may still have callbacks that refer to the link.
        await asyncio.sleep(0.01)
        gone = weakref.ref(left)
        del left
        assert gone() is None
    finally:
        gc.enable()
        await right.aclose()


@pytest.mark.parametrize("how", ["closed", "left by its peer"])
@pytest.mark.asyncio
async def test_who_asks_after_the_end_is_told_as_well(how: str) -> None:
    """call_on_end() calls its callback at once if the link has ended already.

    A listener may hand over a link that ended just before.
    """
    async with MPTransport.pair() as (left, right):
        await (left if how == "closed" else right).aclose()
        with pytest.raises((PeerClosed, TransportClosed)):
            await left.recv(timeout=5)
        told: list[str] = []
        left.call_on_end(lambda: told.append(how))
        await asyncio.sleep(0)
        assert told == [how]


@pytest.mark.asyncio
async def test_a_message_that_came_before_its_handler_is_handed_to_it() -> None:
    async with MPTransport.pair() as (left, right):
        for number in (1, 2):
            await right.send(Fetch(number))
        await asyncio.sleep(0.01)
        seen: list[Any] = []
        left.subscribe(lambda received: seen.append(received.message))
        await asyncio.sleep(0.01)
        assert seen == [Fetch(1), Fetch(2)]


def refuse(received: Received) -> None:
    raise RemoteProtocolError("not that")
