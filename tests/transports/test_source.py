"""Small messages reach their handler however the stream cuts or joins them."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from typing import Any

import pytest

from aiosync.errors import (
    PeerClosed,
    ProtocolError,
    RemoteProtocolError,
    TransportBroken,
    TransportClosed,
)
from aiosync.transports import MPTransport, Received, SharedMemTransport, TCPTransport
from aiosync.types import AckStatus
from aiosync.wire import Ack, Fetch, encode_frame

EPOCH = 5


def ack(version: int) -> bytes:
    return encode_frame(Ack(EPOCH, version, AckStatus.APPLIED))


class Reading:
    """A link that notes the versions of messages, and the socket of its peer."""

    def __init__(self) -> None:
        self.peer, sock = socket.socketpair()
        self.link = SharedMemTransport(sock)
        self.seen: list[int] = []
        self.link.subscribe(self._handle)

    def _handle(self, received: Received) -> None:
        self.seen.append(getattr(received.message, "version", 0))

    async def send(self, data: bytes) -> None:
        self.peer.sendall(data)
        for _ in range(20):
            await asyncio.sleep(0.001)

    async def __aenter__(self) -> Reading:
        await self.send(ack(1))
        assert self.seen == [1]
        self.seen.clear()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.link.aclose()
        self.peer.close()


OTHER = encode_frame(Fetch(1))
JOINED = {
    "one at a time": ([ack(2), ack(3)], [2, 3]),
    "several at once": ([ack(2) + ack(3) + ack(4), ack(5)], [2, 3, 4, 5]),
    "more than one read takes": ([b"".join(map(ack, range(2, 1002)))], [*range(2, 1002)]),
    "another message between two": ([ack(2) + OTHER, ack(3), OTHER], [2, 0, 3, 0]),
}


@pytest.mark.parametrize("case", JOINED)
@pytest.mark.asyncio
async def test_joined(case: str) -> None:
    pieces, seen = JOINED[case]
    async with Reading() as reading:
        for piece in pieces:
            await reading.send(piece)
        assert reading.seen == seen


@pytest.mark.asyncio
async def test_cut_anywhere() -> None:
    async with Reading() as reading:
        whole = ack(2)
        for at in range(1, len(whole)):
            reading.seen.clear()
            await reading.send(whole[:at])
            assert reading.seen == []
            await reading.send(whole[at:] + ack(3))
            assert reading.seen == [2, 3]


@pytest.mark.asyncio
async def test_more_than_one_read_takes_before_a_reset() -> None:
    async with Reading() as reading:
        await reading.link.send(Fetch(1))  # the peer closes with this unread: that is a reset
        reading.peer.sendall(b"".join(map(ack, range(2, 302))))
        reading.peer.close()
        async with asyncio.timeout(5):
            while len(reading.seen) < 300:
                await asyncio.sleep(0.001)
        assert reading.seen == list(range(2, 302))


@pytest.mark.parametrize(
    ("data", "error", "seen"),
    [
        (ack(2), PeerClosed, [2]),
        (ack(2)[:-1], TransportBroken, []),
        (ack(2)[:-1] + b"\xff", ProtocolError, []),
    ],
    ids=["whole", "cut", "damaged"],
)
@pytest.mark.asyncio
async def test_the_last_one(data: bytes, error: type[Exception], seen: list[int]) -> None:
    async with Reading() as reading:
        reading.peer.sendall(data)
        reading.peer.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            await reading.link.recv(timeout=5)
        assert reading.seen == seen


@pytest.mark.parametrize("kind", [TCPTransport, MPTransport, SharedMemTransport])
@pytest.mark.parametrize("how", ["closed", "broken", "left by its peer"])
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
        await asyncio.sleep(0.01)  # what the loop still had to call
        gone = weakref.ref(left)
        del left
        assert gone() is None
    finally:
        gc.enable()
        await right.aclose()


@pytest.mark.parametrize("how", ["closed", "left by its peer"])
@pytest.mark.asyncio
async def test_who_asks_after_the_end_is_told_as_well(how: str) -> None:
    """A listener hands a link over that may have ended just before."""
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
