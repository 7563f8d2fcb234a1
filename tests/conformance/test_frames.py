"""Transports over byte streams: illegal frames, and streams that end inside a frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from aiosync.errors import (
    FrameTooLarge,
    PeerClosed,
    RemoteProtocolError,
    TransportBroken,
    TransportClosed,
    WireVersionMismatch,
)
from aiosync.transports.base import Transport
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.framed_link import MPTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import PREFIX_NBYTES, Update, encode_frame
from tests.conformance.test_transports import duplex_ends, tcp_ends

MIB = 2**20
# Sizes of payloads that the stream of such a transport carries itself.
NBYTES = {"shm": 4096, "distributed": 65536}

MAKERS: dict[str, tuple[Callable[..., Transport], Callable[[], Any]]] = {
    "pipe": (MPTransport, socket.socketpair),
    "mp-duplex": (MPTransport, duplex_ends),
    "shm": (SharedMemTransport, socket.socketpair),
    "tcp": (TCPTransport, tcp_ends),
    "unix": (TCPTransport, socket.socketpair),
    "distributed": (
        lambda sock: DistributedTransport(TCPTransport(sock), rank=0),
        socket.socketpair,
    ),
}

pytestmark = [pytest.mark.one_loop, pytest.mark.asyncio, pytest.mark.parametrize("kind", MAKERS)]


class FdPeer:
    """The raw far end of a byte stream."""

    def __init__(self, end: Connection | socket.socket) -> None:
        self.close = end.close
        self._fd = end.fileno()
        os.set_blocking(self._fd, False)

    async def write(self, *blocks: bytes) -> None:
        for block in blocks:
            view = memoryview(block)
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    pass
                await asyncio.sleep(0)


@asynccontextmanager
async def raw(kind: str) -> AsyncIterator[tuple[FdPeer, Transport]]:
    build, make_ends = MAKERS[kind]
    left, right = make_ends()
    with contextlib.closing(FdPeer(left)) as peer:
        async with build(right) as transport, asyncio.timeout(20):
            yield peer, transport


def update(version: int) -> Update:
    return Update(epoch=1, version=version, digest=version.to_bytes(16, "little"))


def frame(version: int, payload: bytes = b"") -> bytes:
    return encode_frame(update(version), len(payload)) + payload


def patched(at: int, data: bytes) -> bytes:
    whole = frame(2, b"abc")
    return whole[:at] + data + whole[at + len(data) :]


async def arrives(transport: Transport, version: int, payload: bytes = b"") -> None:
    received = await transport.recv()
    assert received.message == update(version)
    assert b"".join(received.payload) == payload


async def stays_broken(transport: Transport) -> None:
    for timeout in (None, 0):
        with pytest.raises(TransportBroken):
            await transport.recv(timeout=timeout)
        with pytest.raises(TransportBroken):
            await transport.send(update(999))
    await transport.aclose()
    with pytest.raises(TransportClosed):
        await transport.recv()


def payload_of(kind: str) -> bytes:
    return os.urandom(NBYTES.get(kind, MIB))


# Offsets into the frame prefix are those of docs/topics/wire-format.md.
HEADER_AT = PREFIX_NBYTES + 2
ILLEGAL: dict[str, tuple[bytes, type[RemoteProtocolError]]] = {
    "text": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", RemoteProtocolError),
    "a pickle": (b"\x80\x04\x95" + bytes(64), RemoteProtocolError),
    "zeros": (bytes(100), RemoteProtocolError),
    "another wire version": (patched(4, b"\xee"), WireVersionMismatch),
    "unknown flags": (patched(5, b"\x80"), RemoteProtocolError),
    "a changed header": (
        patched(HEADER_AT, bytes([frame(2, b"abc")[HEADER_AT] ^ 1])),
        RemoteProtocolError,
    ),
    "2 TiB": (patched(16, (2**41).to_bytes(8, "little")), FrameTooLarge),
    "the largest payload": (patched(16, b"\xff" * 8), FrameTooLarge),
    "a long header": (patched(8, (512 * MIB).to_bytes(4, "little")), FrameTooLarge),
    "the longest header": (patched(8, b"\xff" * 4), FrameTooLarge),
}


@pytest.mark.parametrize("what", ILLEGAL)
async def test_illegal_bytes_after_a_good_frame_end_the_link_and_take_no_memory(
    kind: str, what: str
) -> None:
    illegal, error = ILLEGAL[what]
    async with raw(kind) as (peer, transport):
        tracemalloc.start()
        try:
            await peer.write(frame(1) + illegal)
            await arrives(transport, 1)
            with pytest.raises(error):
                await transport.recv(
                    into=lambda message, nbytes: pytest.fail("memory was asked for")
                )
            with pytest.raises(RemoteProtocolError):
                await transport.recv()
            with pytest.raises((RemoteProtocolError, TransportBroken)):
                await transport.send(update(1))
            assert tracemalloc.get_traced_memory()[1] < 8 * MIB
        finally:
            tracemalloc.stop()


async def test_a_peer_that_ends_in_a_frame_and_one_that_ends_between_two(kind: str) -> None:
    payload = payload_of(kind)
    whole, header_end = frame(1, payload), len(frame(1))
    ends = (1, PREFIX_NBYTES - 1, PREFIX_NBYTES, header_end - 1, len(whole) // 2, len(whole) - 1)
    for end in (*ends, len(whole)):
        async with raw(kind) as (peer, transport):
            receiving = asyncio.create_task(arrives(transport, 1, payload))
            await peer.write(whole[:end])
            peer.close()
            if end < len(whole):
                with pytest.raises(TransportBroken):
                    await receiving
                await stays_broken(transport)
            else:
                await receiving
                with pytest.raises(PeerClosed):
                    await transport.recv()
