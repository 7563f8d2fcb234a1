"""Errors and leaks of Gloo groups whose hosts cannot connect, for example behind a firewall.

The error names the cause, and the failed group leaves nothing. A device of Gloo that stayed would
call into freed memory when the network comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from aiosync.errors import PeerClosed, RecvTimeout, RemoteProtocolError, TransportBroken
from aiosync.transports import DistributedTransport, TCPTransport
from aiosync.wire import Setup, Update

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads_of_gloo() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("gloo")]


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that neither refuses nor answers a connection, because its backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


class Forged(dist.Store):
    """A store that gives the silent port as the address of each peer's Gloo."""

    port = 0

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__()
        self.store, self.peer = store, f"/{1 - rank}"

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self.store.wait(keys)

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        if not key.endswith(self.peer):
            return value
        # The value has an IPv4 address in the kernel's form, as large as a sockaddr_storage.
        here = rb"(\x88\0{7}\x02\0)..(" + re.escape(socket.inet_aton("127.0.0.1")) + rb")"
        port = struct.pack(">H", self.port)
        forged, count = re.subn(here, lambda found: found[1] + port + found[2], value)
        assert count == 1
        return forged


class Blocked(dist.ProcessGroupGloo):
    """A Gloo group that gives up after 60 ms."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        # An error keeps this frame alive, and with it the device that the options have.
        del options
        super().__init__(Forged(store, rank), rank, size, timedelta(seconds=0.06))


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_meeting_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupGloo", Blocked)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with silent_port() as Forged.port:
        before = descriptors()
        for _ in range(2):
            async with DistributedTransport.pair() as (left, right):
                sending = left.send(Update(1, 1, bytes(16)), [bytes(2**18)])
                errors = await asyncio.gather(sending, right.recv(), return_exceptions=True)
                # Either end may give up first, so the other one may see a closed peer.
                assert all(isinstance(each, TransportBroken | PeerClosed) for each in errors)
                assert any("any port" in str(each) for each in errors)
                assert any("Connect timeout" in str(each) for each in errors)
            # The errors are kept here, and with them their frames: these may hold nothing open.
            assert (descriptors(), threads_of_gloo()) == (before, [])


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_peer_that_does_not_go_on_says_nothing_about_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its loop may be busy for long, which no open port changes."""
    wait_for = threading.Condition.wait_for

    def wait(self: Any, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        return wait_for(self, predicate, timeout and timeout / 15)

    monkeypatch.setattr(threading.Condition, "wait_for", wait)
    async with (
        TCPTransport.pair() as (left, right),
        DistributedTransport(left, rank=0) as link,
    ):
        sending = asyncio.create_task(link.send(Update(1, 1, bytes(16)), [bytes(2**18)]))
        await right.recv(timeout=9)
        with pytest.raises(TransportBroken, match="did not join the process group") as caught:
            await sending
        assert "port" not in str(caught.value)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_poll_has_time_for_a_payload_beside_the_stream() -> None:
    for _ in range(20):
        async with DistributedTransport.pair() as (left, right):
            # The first payload makes the group, which may take long on a busy machine.
            first = asyncio.ensure_future(left.send(Update(1, 1, bytes(16)), [bytes(2**18)]))
            await right.recv(timeout=20)
            await first
            sending = asyncio.ensure_future(left.send(Update(1, 2, bytes(16)), [bytes(2**18)]))
            await asyncio.sleep(0.2)
            try:
                received = await right.recv(timeout=0)
            except RecvTimeout:
                # If only the message was late, the link goes on, and the send waits for a recv().
                right.abort()
                await asyncio.gather(sending, return_exceptions=True)
            else:
                assert bytes(received.payload[0]) == bytes(2**18)
                await sending
                return
    pytest.fail("no payload came within the 10 ms of a poll")


# A value has the size of a name, the name, the size of an address, 136 bytes, and two numbers.
FORGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda own: b"",
    "one byte": lambda own: own[:1],
    "other bytes": lambda own: b"\xfe" * 1500,
    "zeros": lambda own: bytes(len(own)),
    "a name behind the end": lambda own: b"\xff" * 4 + own[4:],
    "a name before the start": lambda own: struct.pack("q", -8) + own[8:],
    "no address": lambda own: own[:-160] + bytes(8) + own[-152:],
    "an address behind the end": lambda own: own[:-160] + struct.pack("Q", 2**40) + own[-152:],
    "a short address": lambda own: own[:-160] + struct.pack("Q", 128) + own[-152:],
    "one number": lambda own: own[:-8],
    "no number": lambda own: own[:-16],
    "three numbers": lambda own: own + bytes(8),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
async def test_gloo_never_sees_an_address_of_another_form(forge: Callable[[bytes], bytes]) -> None:
    """Gloo would read behind the end of such a value, which ends the process."""
    async with (
        TCPTransport.pair() as (left, right),
        DistributedTransport(left, rank=0) as link,
    ):
        sending = asyncio.create_task(link.send(Update(1, 1, bytes(16)), [bytes(2**18)]))
        own = (await right.recv(timeout=9)).message
        assert isinstance(own, Setup)
        await right.send(Setup("gloo", "have", own.key.encode()))
        await right.send(Setup("gloo", "0/1", forge(own.value)))
        with pytest.raises(RemoteProtocolError, match="no address of Gloo"):
            await sending
        assert isinstance(left.error, RemoteProtocolError)


@pytest.mark.asyncio
async def test_a_family_that_gloo_does_not_know_breaks_the_link() -> None:
    async with (
        TCPTransport.pair() as (left, right),
        DistributedTransport(left, rank=0) as link,
    ):
        sending = asyncio.create_task(link.send(Update(1, 1, bytes(16)), [bytes(2**18)]))
        own = (await right.recv(timeout=9)).message
        assert isinstance(own, Setup)
        await right.send(Setup("gloo", "have", own.key.encode()))
        await right.send(Setup("gloo", "0/1", own.value[:-152] + b"\xff\xff" + own.value[-150:]))
        with pytest.raises(TransportBroken, match="Gloo could not connect"):
            await sending


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["0/0", "0/1", "have"])
async def test_a_step_that_is_repeated_ends_the_link(key: str) -> None:
    """Each step is answered, so a peer that reads nothing could fill the memory with answers."""
    async with (
        TCPTransport.pair() as (left, right),
        DistributedTransport(left, rank=0) as link,
    ):
        for _ in range(2):
            await right.send(Setup("gloo", key, b"0/0"))
        with pytest.raises(RemoteProtocolError, match="twice"):
            await link.recv(timeout=9)
