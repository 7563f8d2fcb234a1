"""Delivery of small messages to handlers, and links that have ended."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from aiosync.errors import (
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    TransportBroken,
    TransportClosed,
)
from aiosync.transports import MPTransport, Received, SharedMemTransport, TCPTransport
from aiosync.wire import Fetch, Update, encode_frame


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


class Landing:
    """Lender of memory that takes messages as they arrive, and lists the versions it lent for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.lent: list[int] = []
        self.taken: list[tuple[int, bytes]] = []
        self._error = error

    def __call__(self, message: Any, nbytes: int) -> list[memoryview]:
        self.lent.append(message.version)
        return [memoryview(bytearray(nbytes))]

    def arrived(self, received: Received) -> None:
        if self._error is not None:
            raise self._error
        self.taken.append((received.message.version, b"".join(received.payload)))  # type: ignore[union-attr]


def update(version: int) -> Update:
    return Update(1, version, bytes(16))


@pytest.mark.parametrize("kind", [TCPTransport, MPTransport, SharedMemTransport])
@pytest.mark.asyncio
async def test_a_lender_takes_messages_that_came_whole_and_recv_gives_the_others(kind: Any) -> None:
    left, right = map(kind, socket.socketpair())
    landing, large = Landing(), bytes(2**20)
    async with left, right:
        waiting = asyncio.ensure_future(left.recv(into=landing))
        await asyncio.sleep(0)
        for version in (1, 2, 3):
            await right.send(update(version), [b"abc", bytes([version])])
        await right.send(update(4), [large])
        received = await asyncio.wait_for(waiting, 10)
    assert landing.taken == [(version, b"abc" + bytes([version])) for version in (1, 2, 3)]
    assert landing.lent == [1, 2, 3, 4]
    assert (received.message.version, b"".join(received.payload)) == (4, large)


@pytest.mark.asyncio
async def test_a_message_that_came_before_recv_goes_out_of_it_also_with_such_a_lender() -> None:
    async with MPTransport.pair() as (left, right):
        landing = Landing()
        await right.send(update(1), [b"abc"])
        await asyncio.sleep(0.01)
        received = await left.recv(into=landing, timeout=5)
        assert (b"".join(received.payload), landing.taken) == (b"abc", [])


@pytest.mark.parametrize("error", [RemoteProtocolError("not that"), ValueError("a bug")])
@pytest.mark.asyncio
async def test_what_such_a_lender_raises_ends_the_link_with_its_cause(error: Exception) -> None:
    async with MPTransport.pair() as (left, right):
        waiting = asyncio.ensure_future(left.recv(into=Landing(error)))
        await asyncio.sleep(0)
        await right.send(update(1), [b"abc"])
        with pytest.raises((RemoteProtocolError, TransportBroken)) as caught:
            await asyncio.wait_for(waiting, 10)
        assert str(error) in str(caught.value) or caught.value.__cause__ is error


@pytest.mark.asyncio
async def test_a_recv_that_ended_leaves_messages_for_the_next_one() -> None:
    async with MPTransport.pair() as (left, right):
        landing = Landing()
        with pytest.raises(RecvTimeout):
            await left.recv(into=landing, timeout=0.01)
        await right.send(update(1), [b"abc"])
        await asyncio.sleep(0.01)
        assert landing.taken == []
        received = await left.recv(timeout=5)
        assert b"".join(received.payload) == b"abc"


def refuse(received: Received) -> None:
    raise RemoteProtocolError("not that")


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "held by another process"])
@pytest.mark.parametrize("kind", [MPTransport, SharedMemTransport])
@pytest.mark.asyncio
async def test_what_a_process_sent_before_it_ended_is_read_to_the_end(
    kind: Any, closes: bool
) -> None:
    """The loop was busy meanwhile, and hears of the messages and of the end in one turn."""
    left, right = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with right:
        async with kind(left, name="the trainer") as link:
            link.channel.watch_process(process.pid)
            receiving = asyncio.create_task(link.recv(timeout=20))
            await asyncio.sleep(0.01)
            payload = bytes(range(250)) * 600
            right.sendall(encode_frame(update(1), len(payload)) + payload)
            right.sendall(encode_frame(Fetch(1)) + encode_frame(update(2), 3) + b"abc")
            process.communicate(b"\n")
            if closes:
                right.close()
            assert b"".join((await receiving).payload) == payload
            assert (await link.recv(timeout=20)).message == Fetch(1)
            assert b"".join((await link.recv(timeout=20)).payload) == b"abc"
            with pytest.raises(PeerClosed, match="the process of the trainer ended"):
                await link.recv(timeout=20)


@pytest.mark.asyncio
async def test_a_process_that_ended_in_mid_message_breaks_the_link() -> None:
    left, right = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with right:
        async with MPTransport(left, name="the trainer") as link:
            link.channel.watch_process(process.pid)
            receiving = asyncio.create_task(link.recv(timeout=20))
            await asyncio.sleep(0.01)
            right.sendall(encode_frame(update(1), 200_000) + bytes(100_000))
            process.communicate(b"\n")
            with pytest.raises(TransportBroken, match="the process of the trainer ended"):
                await receiving


@pytest.mark.parametrize("nbytes", [0, 1024])
@pytest.mark.asyncio
async def test_a_whole_message_stays_though_a_write_finds_that_the_peer_has_closed(
    nbytes: int,
) -> None:
    left, right = socket.socketpair()
    async with MPTransport(left) as link:
        right.sendall(encode_frame(update(1), nbytes) + bytes([7]) * nbytes)
        right.close()
        with pytest.raises(PeerClosed):
            link.send_nowait(Fetch(1))
        received = await link.recv(timeout=5)
        assert (received.message, b"".join(received.payload)) == (update(1), bytes([7]) * nbytes)
        with pytest.raises(PeerClosed):
            await link.recv(timeout=5)


@pytest.mark.asyncio
async def test_a_message_of_which_a_part_was_read_ends_as_the_link_did() -> None:
    left, right = socket.socketpair()
    async with MPTransport(left) as link:
        right.sendall(encode_frame(update(1), 1024) + bytes(1000))
        right.close()
        with pytest.raises(PeerClosed):
            link.send_nowait(Fetch(1))
        with pytest.raises(PeerClosed):
            await link.recv(timeout=5)


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_buffers_of_every_format_and_shape_travel() -> None:
    formats = ["<c8", "<c16", ">f4", "<f4", "|b1"]
    async with MPTransport.pair() as (left, right):
        for each in [np.arange(4).astype(name) for name in formats] + [np.zeros((0, 3))]:
            await left.send(Update(1, 1, bytes(16)), [each, b"x"])
            whole = b"".join(bytes(view) for view in (await right.recv(timeout=5)).payload)
            assert whole == each.tobytes() + b"x"
        into = np.zeros(4, np.complex64)
        sent = np.arange(4).astype(np.complex64)
        await left.send(Update(1, 1, bytes(16)), [sent])
        await right.recv(into=lambda message, nbytes: [into], timeout=5)
        assert (into == sent).all()
        with pytest.raises((TypeError, ValueError)):
            await left.send(Update(1, 1, bytes(16)), [np.zeros((4, 4))[:, 1]])
