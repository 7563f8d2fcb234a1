"""Messages that repeat reach their handler however the stream cuts or joins them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from aiosync.errors import PeerClosed, ProtocolError, TransportBroken
from aiosync.transports.base import Received
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.types import AckStatus
from aiosync.wire import Ack, Fetch, encode_frame

EPOCH = 5


def ack(version: int) -> bytes:
    return encode_frame(Ack(EPOCH, version, AckStatus.APPLIED))


class Reading:
    """A link that remembers acknowledgements, and the socket of its peer."""

    def __init__(self) -> None:
        self.peer, sock = socket.socketpair()
        self.link = SharedMemTransport(sock)
        self.first: list[int] = []
        self.repeated: list[int] = []
        self.link.subscribe(self._handle)

    def _handle(self, received: Received):
        self.first.append(getattr(received.message, "version", 0))
        if not isinstance(received.message, Ack):
            return None
        return lambda version, _payload, _release: self.repeated.append(version)

    async def send(self, data: bytes) -> None:
        self.peer.sendall(data)
        for _ in range(20):
            await asyncio.sleep(0.001)

    async def __aenter__(self) -> Reading:
        await self.send(ack(1))
        assert (self.first, self.repeated) == ([1], [])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.link.aclose()
        self.peer.close()


@pytest.mark.asyncio
async def test_one_at_a_time_and_several_at_once() -> None:
    async with Reading() as reading:
        await reading.send(ack(2))
        await reading.send(ack(3) + ack(4) + ack(5))
        await reading.send(ack(6))
        assert (reading.first, reading.repeated) == ([1], [2, 3, 4, 5, 6])


@pytest.mark.asyncio
async def test_cut_anywhere() -> None:
    async with Reading() as reading:
        whole = ack(2)
        for at in range(1, len(whole)):
            reading.repeated.clear()
            await reading.send(whole[:at])
            assert reading.repeated == []
            await reading.send(whole[at:] + ack(3))
            assert reading.repeated == [2, 3]
        assert reading.first == [1]


@pytest.mark.asyncio
async def test_more_than_one_read_takes() -> None:
    async with Reading() as reading:
        await reading.send(b"".join(map(ack, range(2, 1002))))
        assert reading.repeated == list(range(2, 1002))


@pytest.mark.asyncio
async def test_more_than_one_read_takes_before_a_reset() -> None:
    async with Reading() as reading:
        await reading.link.send(Fetch(1))  # the peer closes with this unread: that is a reset
        reading.peer.sendall(b"".join(map(ack, range(2, 302))))
        reading.peer.close()
        async with asyncio.timeout(5):
            while len(reading.repeated) < 300:
                await asyncio.sleep(0.001)
        assert reading.repeated == list(range(2, 302))


@pytest.mark.asyncio
async def test_another_message_between_two() -> None:
    async with Reading() as reading:
        await reading.send(ack(2) + encode_frame(Fetch(1)))
        await reading.send(ack(3))
        await reading.send(encode_frame(Fetch(1)))
        assert (reading.first, reading.repeated) == ([1, 0, 0], [2, 3])


@pytest.mark.asyncio
async def test_the_end_after_one_is_the_end_of_the_link() -> None:
    async with Reading() as reading:
        reading.peer.sendall(ack(2))
        reading.peer.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerClosed):
            await reading.link.recv(timeout=5)
        assert reading.repeated == [2]


@pytest.mark.asyncio
async def test_the_end_in_the_middle_of_one_is_a_cut() -> None:
    async with Reading() as reading:
        reading.peer.sendall(ack(2)[:-1])
        reading.peer.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportBroken):
            await reading.link.recv(timeout=5)
        assert reading.repeated == []


@pytest.mark.asyncio
async def test_a_damaged_one_ends_the_link() -> None:
    async with Reading() as reading:
        damaged = bytearray(ack(2))
        damaged[-1] ^= 1
        reading.peer.sendall(damaged)
        with pytest.raises(ProtocolError):
            await reading.link.recv(timeout=5)
        assert reading.repeated == []
