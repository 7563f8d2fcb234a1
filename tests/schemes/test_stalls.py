"""A worker is dropped when its host takes nothing, and not because the kernel's buffer is large."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, cast

import pytest

from aiosync.errors import AckTimeout
from aiosync.schemes._streaming import Streaming, StreamWriter
from aiosync.transports._io import unacknowledged_nbytes
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Hello, Update
from tests.schemes import _harness as harness

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.one_loop,
    pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell"),
]

STALL = 0.5  # seconds


class Sent:
    """A snapshot as far as deadlines need one."""

    version = 1

    def retain(self) -> Sent:
        return self

    def release(self) -> None:
        pass


def full_link() -> tuple[TCPTransport, socket.socket]:
    """A link with a large buffer here, and a peer whose host takes little without reading."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        near.connect(listening.getsockname())
        peer, _ = listening.accept()
    peer.setblocking(False)
    return TCPTransport(near), peer


async def settled(link: TCPTransport) -> None:
    """Wait until the kernel has taken no more for half a second."""
    before, same = -1, 0
    while same < 10:
        await asyncio.sleep(0.05)
        now = link.channel.written_nbytes
        before, same = now, same + 1 if now == before else 0


@pytest.mark.slow
@pytest.mark.parametrize("reads", [True, False])
async def test_a_slow_link_is_no_stall(reads: bool) -> None:
    link, peer = full_link()
    stalls: list[BaseException] = []
    writer = StreamWriter(
        link,
        Streaming(stall_timeout=STALL),
        1,
        Hello(role="receiver", model_id="policy", pid=1, strategy="any"),
        on_stall=stalls.append,
    )
    with peer:
        sending = asyncio.ensure_future(link.send(Update(1, 1, bytes(16)), [bytes(2**24)]))
        try:
            await settled(link)
            taken = link.channel.taken_nbytes
            assert unacknowledged_nbytes(link.channel.io.write_fd) > 2**17  # much is in the kernel
            writer.watch(cast("Any", Sent()), 1)
            loop = asyncio.get_running_loop()
            end = loop.time() + 4 * STALL
            while loop.time() < end and not stalls:
                if reads:
                    await loop.sock_recv(peer, 2048)
                await asyncio.sleep(STALL / 10)
            if reads:
                assert not stalls
                assert link.channel.taken_nbytes > taken
            else:
                assert isinstance(stalls[0], AckTimeout)
        finally:
            writer.close()
            sending.cancel()
            await asyncio.wait([sending], timeout=harness.PATIENCE)
            await link.aclose()


async def test_only_tcp_tells() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.send(bytes(1000))
        assert unacknowledged_nbytes(here.fileno()) == 0
