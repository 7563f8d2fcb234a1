"""A meeting over Gloo that comes to nothing, as between hosts with a firewall, leaves nothing.

What Gloo leaves where its device stays calls into freed memory when the network comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiosync.errors import TransportBroken
from aiosync.transports import _link_store
from aiosync.transports._process_group import GroupCarrier
from tests.schemes._harness import until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

LOW, HIGH = "127.0.0.1", "127.0.0.2"  # Gloo connects from the higher of two addresses


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads_of_gloo() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("gloo")]


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port at ``LOW`` where nothing is refused, and nothing answered: its backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((LOW, 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


class Blocked(GroupCarrier):
    """A carrier whose peer says that its Gloo is at ``(host, port)``."""

    where: tuple[str, int] = (HIGH, 9)
    port = 0
    """The port of this side's Gloo."""

    def say(self, key: str, value: bytes = b"") -> None:
        """Be the peer: it has that key, and sets its own."""
        # An address of IPv4 as the kernel has it, in a structure of sockaddr_storage's size.
        found = re.search(rb"\x88\0{7}\x02\0(..)" + re.escape(socket.inet_aton(self._host)), value)
        assert found is not None
        [self.port] = struct.unpack(">H", found[1])
        address = struct.pack(">H", self.where[1]) + socket.inet_aton(self.where[0])
        forged = value[: found.start(1)] + address + value[found.end() :]
        self._store.acknowledged(key)
        self._store.learn(key.replace("0/0", "0/1"), forged)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("dials", [False, True])
async def test_a_meeting_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, dials: bool
) -> None:
    monkeypatch.setattr(_link_store, "_CONNECT_SECONDS", 0.3)
    with silent_port() as port:
        carrier = Blocked(0, HIGH if dials else LOW)
        carrier.where = (LOW, port) if dials else (HIGH, port)
        try:
            before = descriptors()
            for _ in range(2):
                carrier._store.__init__(carrier._say_from_thread)  # type: ignore[misc]  # anew
                with pytest.raises(TransportBroken, match=r"any port.*Connect timeout") as caught:
                    await carrier._in_thread(carrier._make_group)
                # While somebody keeps the error, and with it the frames.
                assert descriptors() == before
                assert threads_of_gloo() == []
                with socket.socket() as late, pytest.raises(ConnectionRefusedError):
                    late.connect((carrier._host, carrier.port))
            assert caught.value.__cause__ is not None
            assert carrier.hint() == ""  # none has begun by itself
            carrier._making = carrier._start(carrier._make_group)
            # The peer may be the first to give up.
            await until(lambda: carrier._store.met)
            assert "any port" in carrier.hint()
            await asyncio.wait({carrier._making})
            assert "any port" in carrier.hint()
        finally:
            await carrier.aclose()


@pytest.mark.asyncio
async def test_a_peer_that_does_not_come_is_no_matter_of_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_link_store, "_MEET_SECONDS", 0.05)
    carrier = GroupCarrier(0, LOW)
    monkeypatch.setattr(carrier, "say", lambda key, value: None)
    try:
        with pytest.raises(TransportBroken, match="did not join") as caught:
            await carrier._in_thread(carrier._make_group)
        assert "any port" not in str(caught.value)
    finally:
        await carrier.aclose()
