"""FaultProxy does to a stream what its plan says, at the byte that it says, and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiosync.errors import ConfigError
from aiosync.testing import FaultProxy, Faults, Plan, PlanSource, assert_no_leaks

DATA = random.Random(7).randbytes(300_000)
OFFSETS = [0, 1, 65_535, 65_536, 200_001]
KINDS = ["tcp", "unix"]
DIRECTIONS = ["forward", "back"]
TRIES = 3
"""How often a time is taken on a machine that may be busy elsewhere; the bounds stay."""

pytestmark = pytest.mark.one_loop
by_kind = pytest.mark.parametrize("kind", KINDS)
by_direction = pytest.mark.parametrize("direction", DIRECTIONS)


@dataclass
class Pair:
    proxy: FaultProxy
    dialer: socket.socket
    server: socket.socket

    def ends(self, direction: str) -> tuple[socket.socket, socket.socket]:
        """Source and destination of a direction."""
        two = (self.dialer, self.server)
        return two if direction == "forward" else two[::-1]


def listen(kind: str, folder: Path) -> tuple[socket.socket, str]:
    if kind == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    else:
        path = os.path.relpath(folder / "upstream")  # a Unix socket's path has 107 bytes at most
        path = path if len(path) < 100 else str(folder / "upstream")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        url = f"unix://{Path(path).absolute()}"
    listener.setblocking(False)
    return listener, url


async def dial(url: str) -> socket.socket:
    if url.startswith("unix://"):
        sock = socket.socket(socket.AF_UNIX)
        target: object = url.removeprefix("unix://")
    else:
        sock = socket.socket()
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        target = (host, int(port))
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


@asynccontextmanager
async def relayed(kind: str, folder: Path, plan: PlanSource = None) -> AsyncIterator[Pair]:
    """One connection through a proxy; leaks of the proxy are the caller's failure."""
    listener, url = listen(kind, folder)
    with listener:
        async with assert_no_leaks(), FaultProxy(url) as proxy:
            proxy.plan = plan
            with await dial(proxy.url) as dialer:
                server, _ = await asyncio.get_running_loop().sock_accept(listener)
                with server:
                    server.setblocking(False)
                    yield Pair(proxy, dialer, server)


async def send(sock: socket.socket, data: bytes = DATA, *, end: bool = False) -> str:
    """Send everything; "sent", or "refused" when the connection broke meanwhile."""
    try:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        if end:
            sock.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError):
        return "refused"
    return "sent"


async def read_all(sock: socket.socket) -> tuple[bytes, str]:
    """What arrives until the end, and how it ended: "end" or "reset"."""
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


async def is_silent(sock: socket.socket, seconds: float = 0.05) -> bool:
    reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(sock, 1))
    _, pending = await asyncio.wait({reading}, timeout=seconds)
    if pending:
        reading.cancel()
        await asyncio.wait({reading})
    return bool(pending)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def fill(sock: socket.socket) -> int:
    """Send until nothing is taken for 50 ms; bytes that were taken."""
    loop = asyncio.get_running_loop()
    taken, last = 0, loop.time()
    while loop.time() < last + 0.05:
        try:
            taken += sock.send(bytes(4096))
            last = loop.time()
        except BlockingIOError:
            await asyncio.sleep(0.001)
    return taken


def folder_exists(url: str) -> bool:
    return Path(url.removeprefix("unix://")).parent.exists()


def plan_of(direction: str, **faults) -> Plan:
    return Plan(**{direction: Faults(**faults)})


# -- without faults ----------------------------------------------------------------------------


@by_kind
@pytest.mark.asyncio
async def test_it_is_transparent_both_ways_at_once(kind: str, tmp_path: Path) -> None:
    back = DATA[::-1]
    async with relayed(kind, tmp_path) as pair:
        assert pair.proxy.url.startswith(kind)
        forward, backward, *sent = await asyncio.gather(
            read_all(pair.server),
            read_all(pair.dialer),
            send(pair.dialer, end=True),
            send(pair.server, back, end=True),
        )
        assert forward == (DATA, "end") and backward == (back, "end")
        assert sent == ["sent", "sent"]
        assert (pair.proxy.bytes_forward, pair.proxy.bytes_back) == (len(DATA), len(back))
        assert pair.proxy.connections == 1
        await until(lambda: pair.proxy.live == 0)


@by_kind
@by_direction
@pytest.mark.asyncio
async def test_a_half_close_is_relayed_and_the_other_direction_goes_on(
    kind: str, direction: str, tmp_path: Path
) -> None:
    async with relayed(kind, tmp_path) as pair:
        source, destination = pair.ends(direction)
        await send(source, b"last", end=True)
        assert await read_all(destination) == (b"last", "end")
        await send(destination, b"answer")
        assert await read_exactly(source, 6) == b"answer"
        assert pair.proxy.live == 1


@by_direction
@pytest.mark.asyncio
async def test_the_reset_of_a_peer_is_relayed_after_its_bytes(
    direction: str, tmp_path: Path
) -> None:
    async with relayed("tcp", tmp_path) as pair:
        source, destination = pair.ends(direction)
        await send(source, b"last")
        await until(lambda: pair.proxy.bytes_forward + pair.proxy.bytes_back == 4)
        source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        source.close()
        assert await read_all(destination) == (b"last", "reset")


@pytest.mark.asyncio
async def test_tcp_nodelay_is_on_and_buffers_are_small(tmp_path: Path) -> None:
    async with relayed("tcp", tmp_path) as pair:
        (connection,) = pair.proxy._live()
        for sock in connection._socks:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2**18


@by_kind
@pytest.mark.asyncio
async def test_an_upstream_that_is_not_there(kind: str, tmp_path: Path) -> None:
    listener, url = listen(kind, tmp_path)
    listener.close()
    async with assert_no_leaks(), FaultProxy(url) as proxy:
        with await dial(proxy.url) as dialer:
            assert await read_all(dialer) == (b"", "reset" if kind == "tcp" else "end")
        await until(lambda: proxy.live == 0)
        assert proxy.connections == 1


@pytest.mark.asyncio
async def test_names_are_resolved_and_the_listening_address_can_be_chosen(tmp_path: Path) -> None:
    listener, url = listen("tcp", tmp_path)
    path = tmp_path / "own"
    with listener:
        port = url.rpartition(":")[2]
        async with FaultProxy(f"tcp://localhost:{port}", listen="tcp://127.0.0.1:0") as one:
            async with FaultProxy(one.url, listen=f"unix://{path}") as two:
                with await dial(two.url) as dialer:
                    await send(dialer, b"x", end=True)
                    server, _ = await asyncio.get_running_loop().sock_accept(listener)
                    with server:
                        assert await read_all(server) == (b"x", "end")
            assert not path.exists()


# -- faults at an offset -----------------------------------------------------------------------


@by_kind
@by_direction
@pytest.mark.parametrize("at", OFFSETS)
@pytest.mark.asyncio
async def test_cut_at(kind: str, direction: str, at: int, tmp_path: Path) -> None:
    async with relayed(kind, tmp_path, plan_of(direction, cut_at=at)) as pair:
        source, destination = pair.ends(direction)
        arrived, returned, _ = await asyncio.gather(
            read_all(destination), read_all(source), send(source)
        )
        assert arrived == (DATA[:at], "end")
        assert returned == (b"", "end")
        assert pair.proxy.bytes_forward + pair.proxy.bytes_back == at
        await until(lambda: pair.proxy.live == 0)


@by_kind
@by_direction
@pytest.mark.parametrize("at", OFFSETS)
@pytest.mark.asyncio
async def test_reset_at(kind: str, direction: str, at: int, tmp_path: Path) -> None:
    async with relayed(kind, tmp_path, plan_of(direction, reset_at=at)) as pair:
        source, destination = pair.ends(direction)
        (arrived, how), (returned, source_how), sent = await asyncio.gather(
            read_all(destination), read_all(source), send(source)
        )
        assert arrived == DATA[:at]
        assert returned == b""
        if kind == "tcp":
            assert how == "reset"
            assert source_how == "reset" or sent == "refused"
        assert pair.proxy.live == 0


@by_kind
@by_direction
@pytest.mark.parametrize("fault", ["cut_at", "reset_at", "half_close_at"])
@pytest.mark.asyncio
async def test_a_fault_does_not_wait_for_another_byte(
    kind: str, direction: str, fault: str, tmp_path: Path
) -> None:
    async with relayed(kind, tmp_path, plan_of(direction, **{fault: 5})) as pair:
        source, destination = pair.ends(direction)
        await send(source, b"first")
        arrived, how = await read_all(destination)
        assert arrived == b"first"
        assert how == ("reset" if fault == "reset_at" and kind == "tcp" else "end")


@by_kind
@by_direction
@pytest.mark.parametrize("at", OFFSETS)
@pytest.mark.asyncio
async def test_half_close_at(kind: str, direction: str, at: int, tmp_path: Path) -> None:
    async with relayed(kind, tmp_path, plan_of(direction, half_close_at=at)) as pair:
        source, destination = pair.ends(direction)
        arrived, sent = await asyncio.gather(read_all(destination), send(source))
        assert arrived == (DATA[:at], "end")
        assert sent == "sent"  # the rest was thrown away
        returned, _ = await asyncio.gather(read_all(source), send(destination, end=True))
        assert returned == (DATA, "end")
        await until(lambda: pair.proxy.live == 0)


@by_direction
@pytest.mark.parametrize("mask", [0xFF, 0x01])
@pytest.mark.parametrize("at", [*OFFSETS, len(DATA) - 1])
@pytest.mark.asyncio
async def test_corrupt_at(direction: str, at: int, mask: int, tmp_path: Path) -> None:
    plan = plan_of(direction, corrupt_at=at, corrupt_mask=mask)
    async with relayed("tcp", tmp_path, plan) as pair:
        source, destination = pair.ends(direction)
        (arrived, _), _ = await asyncio.gather(read_all(destination), send(source, end=True))
        assert arrived == DATA[:at] + bytes([DATA[at] ^ mask]) + DATA[at + 1 :]


@by_direction
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 131_072), (1, 2), (65_530, 65_541), (299_999, 300_000)]
)
@pytest.mark.asyncio
async def test_duplicate(direction: str, start: int, stop: int, tmp_path: Path) -> None:
    async with relayed("unix", tmp_path, plan_of(direction, duplicate=(start, stop))) as pair:
        source, destination = pair.ends(direction)
        (arrived, _), _ = await asyncio.gather(read_all(destination), send(source, end=True))
        assert arrived == DATA[:stop] + DATA[start:stop] + DATA[stop:]
        assert pair.proxy.bytes_forward + pair.proxy.bytes_back == len(DATA) + stop - start


@by_direction
@pytest.mark.asyncio
async def test_a_duplicate_has_the_corrupt_byte_twice_and_comes_before_the_cut(
    direction: str, tmp_path: Path
) -> None:
    plan = plan_of(direction, duplicate=(1, 3), corrupt_at=2, corrupt_mask=1, cut_at=3)
    async with relayed("tcp", tmp_path, plan) as pair:
        source, destination = pair.ends(direction)
        await send(source, b"abbc")
        assert await read_all(destination) == (b"abcbc", "end")


@by_direction
@pytest.mark.asyncio
async def test_the_first_of_several_ends_happens(direction: str, tmp_path: Path) -> None:
    plan = plan_of(direction, cut_at=3, reset_at=4, half_close_at=3)
    async with relayed("tcp", tmp_path, plan) as pair:
        source, destination = pair.ends(direction)
        await send(source, b"abcdef")
        assert await read_all(destination) == (b"abc", "end")
        assert await read_all(source) == (b"", "end")


@by_kind
@pytest.mark.asyncio
async def test_a_cut_is_in_order_for_peers_that_have_sent_what_nobody_reads(
    kind: str, tmp_path: Path
) -> None:
    """The kernel answers a close beside unread bytes with a reset, which must not overtake."""
    plan = Plan(forward=Faults(cut_at=200_000), back=Faults(stall_at=0))
    async with relayed(kind, tmp_path, plan) as pair:
        await send(pair.server, b"never read")
        arrived, returned, _ = await asyncio.gather(
            read_all(pair.server), read_all(pair.dialer), send(pair.dialer)
        )
        assert arrived == (DATA[:200_000], "end")
        assert returned == (b"", "end")


@by_direction
@pytest.mark.parametrize("fault", ["cut_at", "reset_at"])
@pytest.mark.asyncio
async def test_the_bytes_before_a_fault_reach_a_destination_that_reads_late(
    direction: str, fault: str, tmp_path: Path
) -> None:
    """More bytes than the destination's kernel takes at first; some of its own are not read."""
    other = "back" if direction == "forward" else "forward"
    plan = Plan(**{direction: Faults(**{fault: 250_000}), other: Faults(stall_at=0)})
    async with relayed("tcp", tmp_path, plan) as pair:
        source, destination = pair.ends(direction)
        await send(destination, b"never read")
        sending = asyncio.create_task(send(source))
        await until(lambda: pair.proxy.bytes_forward + pair.proxy.bytes_back == 250_000)
        await asyncio.sleep(0.02)  # a reset that does not wait for the kernel has come by then
        (arrived, how), *_ = await asyncio.gather(read_all(destination), sending)
        assert arrived == DATA[:250_000]
        assert how == ("end" if fault == "cut_at" else "reset")


# -- stalls and backpressure -------------------------------------------------------------------


@by_kind
@by_direction
@pytest.mark.parametrize("at", [0, 1, 70_000])
@pytest.mark.asyncio
async def test_stall_at(kind: str, direction: str, at: int, tmp_path: Path) -> None:
    async with relayed(kind, tmp_path, plan_of(direction, stall_at=at)) as pair:
        source, destination = pair.ends(direction)
        sending = asyncio.create_task(send(source, end=True))
        assert await read_exactly(destination, at) == DATA[:at]
        assert await is_silent(destination)
        await send(destination, b"answer")
        assert await read_exactly(source, 6) == b"answer"
        assert pair.proxy.live == 1
        pair.proxy.resume()
        assert await read_all(destination) == (DATA[at:], "end")
        assert await sending == "sent"


@by_direction
@pytest.mark.asyncio
async def test_a_stall_comes_before_the_cut_of_its_offset(direction: str, tmp_path: Path) -> None:
    plan = plan_of(direction, stall_at=3, cut_at=3)
    async with relayed("tcp", tmp_path, plan) as pair:
        source, destination = pair.ends(direction)
        await send(source, b"abcdef")
        assert await read_exactly(destination, 3) == b"abc"
        assert await is_silent(destination)
        pair.proxy.resume()
        assert await read_all(destination) == (b"", "end")


@by_kind
@by_direction
@pytest.mark.parametrize("how", ["stall_at", "delay", "stall", "reader"])
@pytest.mark.asyncio
async def test_backpressure_reaches_the_source(
    kind: str, direction: str, how: str, tmp_path: Path
) -> None:
    faults = {"stall_at": {"stall_at": 0}, "delay": {"delay": 60.0}}.get(how, {})
    async with relayed(kind, tmp_path, plan_of(direction, **faults)) as pair:
        source, destination = pair.ends(direction)
        for sock in (source, destination):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        if how == "stall":
            await until(lambda: pair.proxy.live == 1)
            pair.proxy.stall()
        taken = await fill(source)
        assert 0 < taken < 2**20  # of the proxy and of the kernel together
        if how != "reader":
            assert await is_silent(destination)


@by_direction
@pytest.mark.asyncio
async def test_at_most_256_kib_are_held(direction: str, tmp_path: Path, monkeypatch) -> None:
    """Bytes that were read and neither written nor thrown away, whatever the kernel holds."""
    from aiosync.testing import _relay

    streams = []
    original = _relay._Stream.__init__

    def remember(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        streams.append(self)

    monkeypatch.setattr(_relay._Stream, "__init__", remember)
    plan = plan_of(direction, delay=60.0, duplicate=(1000, 1000 + 2**17))
    async with relayed("tcp", tmp_path, plan) as pair:
        source, _ = pair.ends(direction)
        await fill(source)
        held = max(sum(len(block) for _, block in stream._queue) for stream in streams)
        assert 2**17 <= held <= 2**18


@pytest.mark.asyncio
async def test_stall_and_resume_freeze_both_directions(tmp_path: Path) -> None:
    async with relayed("tcp", tmp_path) as pair:
        await until(lambda: pair.proxy.live == 1)
        pair.proxy.stall()
        await send(pair.dialer, b"ping", end=True)
        await send(pair.server, b"pong", end=True)
        assert await is_silent(pair.server) and await is_silent(pair.dialer)
        assert (pair.proxy.bytes_forward, pair.proxy.bytes_back) == (0, 0)
        assert pair.proxy.live == 1
        pair.proxy.resume()
        assert await read_all(pair.server) == (b"ping", "end")
        assert await read_all(pair.dialer) == (b"pong", "end")


# -- time --------------------------------------------------------------------------------------


@by_direction
@pytest.mark.asyncio
async def test_delay_is_latency_and_blocks_do_not_wait_for_one_another(
    direction: str, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(TRIES):
        async with relayed("tcp", tmp_path, plan_of(direction, delay=0.06)) as pair:
            source, destination = pair.ends(direction)
            began = loop.time()
            await send(source, b"a")
            await asyncio.sleep(0.03)
            await send(source, b"b")
            assert await read_exactly(destination, 1) == b"a"
            first = loop.time() - began
            assert await read_exactly(destination, 1) == b"b"
            second = loop.time() - began
        assert first >= 0.058 and second >= 0.088
        if second < 0.058 + 0.06:
            break
    assert second < 0.058 + 0.06  # one after the other would take that long


@pytest.mark.slow
@by_direction
@pytest.mark.parametrize("rate", [2e6, 8e6])
@pytest.mark.asyncio
async def test_a_rate_is_kept(direction: str, rate: float, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    nbytes = int(rate / 2)
    for _ in range(TRIES):
        async with relayed("tcp", tmp_path, plan_of(direction, rate=rate)) as pair:
            source, destination = pair.ends(direction)
            began = loop.time()
            sending = asyncio.create_task(send(source, bytes(nbytes)))
            await read_exactly(destination, nbytes)
            took = loop.time() - began
            assert await sending == "sent"
        assert took > 0.485  # of 0.5 s: the rate is never exceeded
        if took < 0.65:
            break
    assert took < 0.95  # half the rate would take longer


@pytest.mark.asyncio
async def test_a_rate_of_few_bytes_comes_byte_by_byte(tmp_path: Path) -> None:
    async with relayed("tcp", tmp_path, plan_of("forward", rate=100.0)) as pair:
        began = asyncio.get_running_loop().time()
        await send(pair.dialer, b"0123456789")
        first = len(await asyncio.get_running_loop().sock_recv(pair.server, 100))
        assert first < 10
        await read_exactly(pair.server, 10 - first)
        assert asyncio.get_running_loop().time() - began > 0.07  # 20 ms are the bucket's


# -- all live connections ----------------------------------------------------------------------


@by_kind
@pytest.mark.parametrize("how", ["cut", "reset"])
@pytest.mark.asyncio
async def test_cut_and_reset_now(kind: str, how: str, tmp_path: Path) -> None:
    async with relayed(kind, tmp_path) as pair:
        await send(pair.dialer, b"ping")
        assert await read_exactly(pair.server, 4) == b"ping"
        pair.proxy.stall()  # an end is not held up
        getattr(pair.proxy, how)()
        assert pair.proxy.live == 0
        expected = "reset" if how == "reset" and kind == "tcp" else "end"
        assert await read_all(pair.dialer) == (b"", expected)
        assert await read_all(pair.server) == (b"", expected)
        getattr(pair.proxy, how)()  # with nothing live


@pytest.mark.asyncio
async def test_each_connection_has_the_plan_of_its_number(tmp_path: Path) -> None:
    plans = {0: Plan(forward=Faults(cut_at=1)), 2: Plan(forward=Faults(corrupt_at=0))}
    listener, url = listen("tcp", tmp_path)
    arrived = []
    with listener:
        async with FaultProxy(url) as proxy:
            proxy.plan = plans.get
            for _ in range(3):
                with await dial(proxy.url) as dialer:
                    await send(dialer, b"ab", end=True)
                    server, _ = await asyncio.get_running_loop().sock_accept(listener)
                    with server:
                        arrived.append((await read_all(server))[0])
            assert proxy.connections == 3
    assert arrived == [b"a", b"ab", bytes([ord("a") ^ 0xFF]) + b"b"]


# -- ends and errors ---------------------------------------------------------------------------


@pytest.mark.slow
@by_kind
@pytest.mark.asyncio
async def test_aclose_ends_everything_and_may_be_repeated(kind: str, tmp_path: Path) -> None:
    listener, url = listen(kind, tmp_path)
    loop = asyncio.get_running_loop()
    with listener:
        async with assert_no_leaks():
            proxy = FaultProxy(url)
            await proxy.start()
            proxy.plan = Plan(forward=Faults(stall_at=0), back=Faults(delay=60.0))
            dialers = [await dial(proxy.url) for _ in range(3)]
            servers = [(await loop.sock_accept(listener))[0] for _ in dialers]
            dialers.append(await dial(proxy.url))  # its task has perhaps not begun yet
            for sock in (*dialers[:3], *servers):
                sock.setblocking(False)
                await fill(sock)
            began = loop.time()
            await asyncio.gather(proxy.aclose(), proxy.aclose())
            await proxy.aclose()
            assert loop.time() - began < 10  # the delay is 60 s
            assert proxy.live == 0
            if kind == "unix":
                assert not folder_exists(proxy.url)
            with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
                await dial(proxy.url)
            for sock in (*dialers, *servers):
                sock.close()


@pytest.mark.asyncio
async def test_aclose_at_once_after_a_dial_leaves_nothing(tmp_path: Path) -> None:
    listener, url = listen("tcp", tmp_path)
    with listener:
        for turns in range(6):
            async with assert_no_leaks():
                async with FaultProxy(url) as proxy:
                    dialer = await dial(proxy.url)
                    for _ in range(turns):
                        await asyncio.sleep(0)
                dialer.close()


@pytest.mark.asyncio
async def test_a_cancelled_aclose_closes_all_the_same(tmp_path: Path) -> None:
    async with relayed("tcp", tmp_path) as pair:
        closing = asyncio.create_task(pair.proxy.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await read_all(pair.dialer) == (b"", "end")
        assert await read_all(pair.server) == (b"", "end")


@pytest.mark.asyncio
async def test_the_error_of_a_plan_resets_its_connection_and_is_raised(tmp_path: Path) -> None:
    def fail_first(number: int) -> Plan | None:
        if number == 0:
            raise LookupError("no such plan")
        return None

    listener, url = listen("tcp", tmp_path)
    with listener:
        async with assert_no_leaks():
            proxy = FaultProxy(url)
            await proxy.start()
            proxy.plan = fail_first
            with await dial(proxy.url) as dialer:
                assert await read_all(dialer) == (b"", "reset")
            with await dial(proxy.url) as dialer:  # the others work
                await send(dialer, b"x", end=True)
                server, _ = await asyncio.get_running_loop().sock_accept(listener)
                with server:
                    assert await read_all(server) == (b"x", "end")
            with pytest.raises(LookupError, match="no such plan"):
                await proxy.aclose()
            await proxy.aclose()


@pytest.mark.asyncio
async def test_several_errors_are_raised_together(tmp_path: Path) -> None:
    listener, url = listen("tcp", tmp_path)
    with listener:
        proxy = FaultProxy(url)
        await proxy.start()
        proxy.plan = {}.__getitem__
        for _ in range(2):
            with await dial(proxy.url) as dialer:
                assert await read_all(dialer) == (b"", "reset")
        with pytest.raises(ExceptionGroup) as caught:
            await proxy.aclose()
        assert [type(error) for error in caught.value.exceptions] == [KeyError, KeyError]


@pytest.mark.asyncio
async def test_a_bug_inside_is_raised_too(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        async with relayed("tcp", tmp_path) as pair:
            await until(lambda: pair.proxy.live == 1)
            pair.proxy.bytes_forward = None
            await send(pair.dialer, b"x")
            assert await read_all(pair.dialer) == (b"", "reset")


@pytest.mark.asyncio
async def test_the_error_of_the_proxy_does_not_replace_a_cancellation(tmp_path: Path) -> None:
    listener, url = listen("tcp", tmp_path)
    with listener:
        with pytest.raises(asyncio.CancelledError) as caught:
            async with FaultProxy(url) as proxy:
                proxy.plan = {}.__getitem__
                with await dial(proxy.url) as dialer:
                    await read_all(dialer)
                raise asyncio.CancelledError
    assert "KeyError" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "faults",
    [
        {"cut_at": -1},
        {"stall_at": -1},
        {"corrupt_mask": 0},
        {"corrupt_mask": 256},
        {"duplicate": (3, 3)},
        {"duplicate": (-1, 3)},
        {"duplicate": (0, 2**17 + 1)},
        {"delay": -0.1},
        {"delay": float("inf")},
        {"rate": 0.0},
        {"rate": float("nan")},
    ],
)
def test_faults_that_make_no_sense(faults: dict) -> None:
    with pytest.raises(ConfigError):
        Faults(**faults)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://a:b", "tcp://a:1/x", "unix://x/y",
     "unix:", "http://a:1", "tcp://a:99999"],
)  # fmt: skip
def test_addresses_of_another_form(url: str) -> None:
    with pytest.raises(ConfigError):
        FaultProxy(url)
    with pytest.raises(ConfigError):
        FaultProxy("tcp://127.0.0.1:1", listen=url)


@pytest.mark.asyncio
async def test_the_url_is_known_after_the_start_only() -> None:
    proxy = FaultProxy("tcp://[::1]:1", listen="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError):
        _ = proxy.url
    async with proxy:
        assert proxy.url.startswith("tcp://127.0.0.1:")
        assert proxy.url in repr(proxy)
        with pytest.raises(ConfigError):
            await proxy.start()
    with pytest.raises(ConfigError):
        await proxy.start()


@pytest.mark.asyncio
async def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    listener, url = listen("tcp", tmp_path)
    with listener:
        async with assert_no_leaks():
            with pytest.raises(OSError):  # noqa: PT011  # the address is in use
                await FaultProxy(url, listen=url).start()
