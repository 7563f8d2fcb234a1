"""TLS under the frames: bytes that OpenSSL has read ahead, and the ends of streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator

import pytest

from aiosync.errors import TransportBroken
from aiosync.testing import FaultProxy, Faults, Plan
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Fetch, Update
from tests._certificates import certificates

pytestmark = pytest.mark.asyncio

UPDATE = Update(1, 1, bytes(16))
PATIENCE = 20


@contextlib.asynccontextmanager
async def pair(
    faults: Faults | None = None, version: ssl.TLSVersion | None = None
) -> AsyncIterator[tuple[TCPTransport, TCPTransport]]:
    """The links of the listener and of the dialer, in this order.

    If a version of TLS is given, the buffers of their sockets are small.
    """
    files = certificates()
    context = files.listening.listening_context()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(PATIENCE))
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.setblocking(False)
        if version is not None:
            context.maximum_version = version
            # Accepted sockets inherit the sizes of the listening socket.
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                listening.setsockopt(socket.SOL_SOCKET, option, 2**15)
        url = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        if faults is not None:
            proxy = await stack.enter_async_context(FaultProxy(url))
            proxy.plan, url = Plan(back=faults), proxy.url
        credentials = Credentials(tls=files.dialling)
        dialling = asyncio.ensure_future(TCPTransport.connect(url, credentials=credentials))
        sock, _ = await asyncio.get_running_loop().sock_accept(listening)
        left = await TCPTransport.accept(sock, credentials=Credentials(tls=context))
        await stack.enter_async_context(left)
        yield left, await stack.enter_async_context(await dialling)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (100,) * 50, (16_385, 70_000, 5), (300_000, 1)])
async def test_what_openssl_read_ahead_is_not_forgotten(sizes: tuple[int, ...]) -> None:
    """One TLS record may fill several messages and lent buffers.

    The socket is not readable for the rest of the record, which OpenSSL has read ahead.
    """
    async with pair() as (left, right):
        for turn in range(3):
            for size in sizes:
                await left.send(UPDATE, [bytes([turn]) * size])
                await left.send(Fetch(size))
            for size in sizes:
                got = await right.recv(
                    into=lambda _, nbytes: [bytearray(nbytes // 2), bytearray(nbytes - nbytes // 2)]
                )
                assert b"".join(got.payload) == bytes([turn]) * size
                assert (await right.recv()).message == Fetch(size)
        assert left.send_batch_nowait([Fetch(number) for number in range(500)])
        for number in range(500):
            assert (await right.recv()).message == Fetch(number)


async def test_what_a_peer_said_before_it_reset_the_link_is_read() -> None:
    """A message is read though this end is writing, which is when refusals arrive."""
    async with pair(version=ssl.TLSVersion.TLSv1_2) as (left, right):
        sending = asyncio.ensure_future(left.send(UPDATE, [bytes(2**23)]))
        await asyncio.sleep(0.2)
        # The other end does not read, so that this end cannot finish its write.
        assert not sending.done()
        await right.send(Fetch(7))
        right.abort()
        time.sleep(0.05)  # noqa: ASYNC251 - the message and the reset arrive before this end reads
        assert (await left.recv()).message == Fetch(7)
        with pytest.raises(TransportBroken):
            await sending


@pytest.mark.parametrize("faults", [Faults(cut_at=200_000), Faults(corrupt_at=200_000)], ids=str)
async def test_truncation_in_mid_message(faults: Faults) -> None:
    """A stream that is cut or changed on its way is never taken for a whole message."""
    async with pair(faults) as (left, right):
        await left.send(Fetch(1))
        assert (await right.recv()).message == Fetch(1)
        sending = asyncio.ensure_future(left.send(UPDATE, [bytes(400_000)]))
        with pytest.raises(TransportBroken):
            await right.recv(into=lambda _, nbytes: [bytearray(nbytes)])
        sending.cancel()
        await asyncio.wait({sending})


async def test_a_forked_child_ends_no_stream_of_its_parent() -> None:
    """The child closes its copy of the socket without a close_notify.

    The peer would take a close_notify for the parent's.
    """
    async with pair() as (one, two):
        pid = os.fork()
        if pid == 0:
            # Hooks of fork() have already closed everything that a child closes.
            os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        await one.send(Fetch(1))
        assert (await two.recv(timeout=PATIENCE)).message == Fetch(1)
        await two.send(Fetch(2))
        assert (await one.recv(timeout=PATIENCE)).message == Fetch(2)
