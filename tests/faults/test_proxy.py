"""FaultProxy: it harms a stream as its plan says, at the given byte, and in no other way."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from aiosync.testing import FaultProxy, Faults, Plan, PlanSource, assert_no_leaks

DATA = random.Random(7).randbytes(300_000)
OFFSETS = [0, 1, 65_536, 200_001]

pytestmark = [pytest.mark.one_loop, pytest.mark.asyncio]
by_direction = pytest.mark.parametrize("direction", ["forward", "back"])


@dataclass
class Pair:
    proxy: FaultProxy
    dialer: socket.socket
    server: socket.socket

    def ends(self, direction: str) -> tuple[socket.socket, socket.socket]:
        """Return the source and the destination of a direction."""
        two = (self.dialer, self.server)
        return two if direction == "forward" else two[::-1]

    @property
    def relayed(self) -> int:
        return self.proxy.bytes_forward + self.proxy.bytes_back


async def dial(url: str) -> socket.socket:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


@asynccontextmanager
async def relayed(plan: PlanSource = None) -> AsyncIterator[Pair]:
    """One connection through a proxy; the test fails if the proxy leaks anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        async with assert_no_leaks(grace=5.0), FaultProxy(url) as proxy:
            proxy.plan = plan
            with await dial(proxy.url) as dialer:
                server, _ = await asyncio.get_running_loop().sock_accept(listener)
                with server:
                    server.setblocking(False)
                    yield Pair(proxy, dialer, server)


async def send(sock: socket.socket, data: bytes = DATA, *, end: bool = False) -> str:
    """Send all data; return "sent", or "refused" if the connection broke meanwhile."""
    try:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        if end:
            sock.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError):
        return "refused"
    return "sent"


async def read_all(sock: socket.socket) -> tuple[bytes, str]:
    """Return the bytes that arrive until the stream ends, and its end: "end" or "reset"."""
    got = bytearray()
    try:
        while block := await asyncio.get_running_loop().sock_recv(sock, 2**16):
            got += block
    except ConnectionResetError:
        return bytes(got), "reset"
    return bytes(got), "end"


async def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    got = bytearray()
    while len(got) < nbytes:
        block = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(got))
        assert block, "ended early"
        got += block
    return bytes(got)


async def is_silent(sock: socket.socket) -> bool:
    try:
        async with asyncio.timeout(0.05):
            await asyncio.get_running_loop().sock_recv(sock, 1)
    except TimeoutError:
        return True
    return False


def plan_of(direction: str, **faults) -> Plan:
    return Plan(**{direction: Faults(**faults)})


@by_direction
@pytest.mark.parametrize("fault", ["cut_at", "reset_at"])
@pytest.mark.parametrize("at", OFFSETS)
async def test_ends_at_an_offset(direction: str, fault: str, at: int) -> None:
    async with relayed(plan_of(direction, **{fault: at})) as pair:
        source, destination = pair.ends(direction)
        (arrived, how), (returned, source_how), sent = await asyncio.gather(
            read_all(destination), read_all(source), send(source)
        )
        assert arrived == DATA[:at]
        assert returned == b""
        assert pair.relayed == at
        if fault == "cut_at":
            assert how == "end"
            assert source_how == "end" or sent == "refused"
        else:
            assert how == "reset"
            assert source_how == "reset" or sent == "refused"


@by_direction
@pytest.mark.parametrize("at", [0, 65_536])
async def test_a_stall_holds_the_source_up_until_resume(direction: str, at: int) -> None:
    """A plan stalls a stream at its byte, before a later cut; stall() stalls all connections."""
    async with relayed(plan_of(direction, stall_at=at, cut_at=200_000)) as pair:
        source, destination = pair.ends(direction)
        sending = asyncio.create_task(send(source, bytes(6_000_000)))
        await read_exactly(destination, at)
        assert await is_silent(destination)
        assert not sending.done() and pair.relayed == at
        await send(destination, b"other")
        # The plan stalls one direction only.
        assert await read_exactly(source, 5) == b"other"
        pair.proxy.stall()
        await send(destination, b"x")
        assert await is_silent(source)
        pair.proxy.resume()
        assert await read_exactly(source, 1) == b"x"
        assert len((await read_all(destination))[0]) == 200_000 - at
        await sending


@by_direction
async def test_a_stall_holds_back_the_rest_of_a_block(direction: str) -> None:
    async with relayed() as pair:
        source, destination = pair.ends(direction)
        sending = asyncio.create_task(send(source, bytes(6_000_000)))
        before = -1
        while pair.relayed != before:
            before = pair.relayed
            await asyncio.sleep(0.1)
        # The kernel took a part of the next block at most.
        pair.proxy.stall()
        await read_exactly(destination, before)
        got = before
        with contextlib.suppress(TimeoutError):
            while got < before + 2**16:
                async with asyncio.timeout(0.1):
                    got += len(await asyncio.get_running_loop().sock_recv(destination, 2**16))
        assert got < before + 2**16 and pair.relayed == before
        pair.proxy.resume()
        await read_exactly(destination, 6_000_000 - got)
        assert await sending == "sent"
