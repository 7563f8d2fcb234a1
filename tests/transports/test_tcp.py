"""TCPTransport beyond the contract of every transport: dialling, options, and lost peers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import select
import socket
import struct
import warnings
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aiosync.errors import (
    ConfigError,
    ConnectError,
    PeerClosed,
    TransportBroken,
    TransportError,
)
from aiosync.rendezvous.listener import Listener, StreamListener
from aiosync.transports.base import Received
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits
from aiosync.wire import Current, Fetch, Hello, Setup, encode_frame
from tests.schemes._harness import PATIENCE

pytestmark = pytest.mark.asyncio

HELLO = Hello("receiver", "policy", os.getpid())


@contextlib.asynccontextmanager
async def listening(url: str, **options) -> AsyncIterator[tuple[str, asyncio.Queue[TCPTransport]]]:
    """A listener that queues its links."""
    listener = StreamListener(url, **options)
    links: asyncio.Queue[TCPTransport] = asyncio.Queue()
    crashes: list[BaseException] = []
    listener.start(lambda link, hello: links.put_nowait(link), crashes.append)
    try:
        yield listener.url, links
    finally:
        await listener.aclose()
        while not links.empty():
            links.get_nowait().abort()
    assert not crashes


@contextlib.asynccontextmanager
async def linked(url: str, **options) -> AsyncIterator[tuple[TCPTransport, TCPTransport]]:
    async with listening(url, **options) as (where, links):
        async with await TCPTransport.connect(where, **options) as dialer:
            await dialer.send(HELLO)
            async with await links.get() as accepted:
                accepted.channel.allow_payloads()
                yield dialer, accepted


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0", "unix"])
@pytest.mark.parametrize("token", [None, "a token of some length"])
async def test_a_link(url: str, token: str | None, tmp_path: Path) -> None:
    if url == "unix":
        url = f"unix://{tmp_path}/socket"
    credentials = Credentials(token=token)
    try:
        async with linked(url, credentials=credentials) as (dialer, accepted):
            await dialer.send(Fetch(3))
            assert (await accepted.recv()).message == Fetch(3)
            await accepted.send(Current(1, 2))
            assert (await dialer.recv()).message == Current(1, 2)
    except ConfigError as exc:
        if "[::1]" not in url:
            raise
        pytest.skip(f"no IPv6: {exc}")


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1:{port}", "unix://{folder}/socket", "tcp://no-such-host.invalid:1"]
)
async def test_nobody_is_there(url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectError, match="cannot be reached"):
        await TCPTransport.connect(url.format(port=port, folder=tmp_path))


async def test_cancelled_handshakes_leave_nothing() -> None:
    near, far = socket.socketpair()
    with near, socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        waiting = [
            asyncio.ensure_future(TCPTransport.accept(far)),
            asyncio.ensure_future(TCPTransport.connect(url)),
        ]
        await asyncio.sleep(0.01)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        assert all(each.cancelled() for each in waiting)
        assert far.fileno() == -1


async def test_a_child_that_is_forked_while_its_parent_dials_keeps_no_link() -> None:
    """The listener sees the end of the stream although the child lives on."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        dialing = asyncio.create_task(TCPTransport.connect(url))
        # The kernel connects the socket before the loop of this process hears of it.
        while not select.select([server], [], [], 0)[0]:
            await asyncio.sleep(0)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        stack.callback(os.waitpid, pid, 0)
        stack.callback(os.close, write)
        os.close(read)
        dialing.cancel()
        await asyncio.wait({dialing})
        peer, _ = server.accept()
        stack.enter_context(peer)
        peer.setblocking(False)
        # The loop may close its end of a cancelled connection only in its next turn.
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.get_running_loop().sock_recv(peer, 1) == b""


async def test_options_of_the_socket() -> None:
    async with linked("tcp://127.0.0.1:0", keepalive=12.0, untaken=24.0) as ends:
        for end in ends:
            sock = end.channel.io.sock
            assert sock.get_inheritable() is False
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 12
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 4
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 24_000
    async with linked("tcp://127.0.0.1:0", keepalive=None, untaken=None) as ends:
        for end in ends:
            sock = end.channel.io.sock
            assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("nbytes", [1, 30, None])
async def test_data_and_a_reset_that_come_together(nbytes: int | None) -> None:
    """uvloop reports the data and the reset with a single callback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        left = socket.create_connection(listening.getsockname())
        right, _ = listening.accept()
    async with TCPTransport(right) as transport:
        receiving = asyncio.create_task(transport.recv(timeout=PATIENCE))
        await asyncio.sleep(0)
        left.send(encode_frame(Fetch(0))[:nbytes])
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left.close()
        with pytest.raises(TransportError):
            # A whole message may arrive, or the kernel dropped it because of the reset.
            await receiving
            await transport.recv(timeout=PATIENCE)


async def test_messages_that_wait_count_after_a_reset() -> None:
    async with linked("tcp://127.0.0.1:0") as (dialer, accepted):
        for number in range(3):
            await dialer.send(Fetch(number))
        await asyncio.sleep(0.1)
        dialer.io.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dialer.abort()
        await asyncio.sleep(0.1)
        for number in range(3):
            assert (await accepted.recv(timeout=PATIENCE)).message == Fetch(number)
        with pytest.raises(PeerClosed):
            await accepted.recv(timeout=PATIENCE)


async def test_answers_to_a_peer_that_has_gone_are_not_written_one_inside_the_other() -> None:
    depth = deepest = 0
    async with TCPTransport.pair() as (left, right):

        def answer(received: Received) -> None:
            nonlocal depth, deepest
            depth += 1
            deepest = max(deepest, depth)
            try:
                left.send_nowait(Current(1, 1))
            finally:
                depth -= 1

        left.subscribe(answer)
        for _ in range(1000):
            assert right.send_nowait(Fetch(0))
        right.abort()
        with pytest.raises(TransportError):
            await left.recv(timeout=PATIENCE)
    # The answer that finds the peer gone reads the peer's last messages, whose handler is called
    # inside it. That one writes no answer, so the depth is two.
    assert deepest == 2


async def test_a_listener_in_a_cycle_closes_its_sockets_before_they_are_collected() -> None:
    """A scheme that was forgotten may be garbage in a cycle, with the traceback of an error."""
    sock = socket.create_server(("127.0.0.1", 0))
    cycle: list[object] = [Listener(sock)]
    cycle.append(cycle)
    gone = weakref.ref(sock)
    del sock, cycle
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        gc.collect()
    assert gone() is None


def address_space_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


async def test_a_header_that_fits_into_no_memory_ends_the_link() -> None:
    nbytes = 2**28
    async with linked("tcp://127.0.0.1:0", limits=Limits(max_header_nbytes=nbytes)) as (peer, link):
        peer.channel.io.sock.send(struct.pack("<4sBBHIIQ", b"AIOS", 2, 0, 0, nbytes, 0, 0))
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space_nbytes() + nbytes // 2, limits[1]))
        try:
            with pytest.raises(TransportBroken, match="no memory"):
                await link.recv(timeout=PATIENCE)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


async def test_a_payload_that_fits_into_no_memory_ends_the_link() -> None:
    limits = Limits(max_payload_nbytes=2**62, max_buffer_nbytes=2**62)
    async with linked("tcp://127.0.0.1:0", limits=limits) as (peer, link):
        peer.channel.io.sock.send(encode_frame(Setup("test", "x", b""), 2**61, limits=limits))
        with pytest.raises(TransportBroken, match="no memory for 2305843009213693952 bytes"):
            await link.recv(timeout=PATIENCE)
        with pytest.raises(TransportBroken):
            await link.recv(timeout=PATIENCE)
