"""TLS under the frames: bytes that wait inside OpenSSL, and how streams end."""

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
    """Who listened and who dialled, with small buffers if a version is given."""
    files = certificates()
    context = files.listening.listening_context()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(PATIENCE))
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.setblocking(False)
        if version is not None:
            context.maximum_version = version
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # accepted sockets inherit it
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
    """Several messages and lent buffers come out of one record; no event announces the rest."""
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
    """Also while this end has something to write: a refusal comes at exactly that moment."""
    async with pair(version=ssl.TLSVersion.TLSv1_2) as (left, right):
        sending = asyncio.ensure_future(left.send(UPDATE, [bytes(2**23)]))
        await asyncio.sleep(0.2)
        assert not sending.done()  # nobody reads there
        await right.send(Fetch(7))
        right.abort()
        time.sleep(0.05)  # noqa: ASYNC251 - both have come before this end looks
        assert (await left.recv()).message == Fetch(7)
        with pytest.raises(TransportBroken):
            await sending


@pytest.mark.parametrize("faults", [Faults(cut_at=200_000), Faults(corrupt_at=200_000)], ids=str)
async def test_truncation_in_mid_message(faults: Faults) -> None:
    """Somebody on the way ends the stream, or changes it: never taken for a whole message."""
    async with pair(faults) as (left, right):
        await left.send(Fetch(1))
        assert (await right.recv()).message == Fetch(1)
        sending = asyncio.ensure_future(left.send(UPDATE, [bytes(400_000)]))
        with pytest.raises(TransportBroken):
            await right.recv(into=lambda _, nbytes: [bytearray(nbytes)])
        sending.cancel()
        await asyncio.wait({sending})


async def test_a_forked_child_ends_no_stream_of_its_parent() -> None:
    """Its copy of the socket is closed without a word: a close_notify would be the parent's."""
    async with pair() as (one, two):
        pid = os.fork()
        if pid == 0:
            os._exit(0)  # what is closed in a child was closed by fork() already
        await asyncio.to_thread(os.waitpid, pid, 0)
        await one.send(Fetch(1))
        assert (await two.recv(timeout=PATIENCE)).message == Fetch(1)
        await two.send(Fetch(2))
        assert (await one.recv(timeout=PATIENCE)).message == Fetch(2)
