"""Links of several connections: stripes in turn, connections that are missing, late or lost."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from aiosync.errors import ConfigError, ConnectError, ConnectTimeout, TransportError
from aiosync.rendezvous.listener import StreamListener
from aiosync.server import WeightClient, WeightServer
from aiosync.testing import FaultProxy, Faults, Plan
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Hello, Join, Setup, Welcome
from tests._certificates import certificates
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import holds
from tests.server._tools import URL, send, trainer, worker

HELLO = Hello("receiver", "policy", os.getpid())


@contextlib.asynccontextmanager
async def listening(
    url: str = URL, **options: Any
) -> AsyncIterator[tuple[StreamListener, asyncio.Queue[TCPTransport]]]:
    """A listener that queues its links."""
    listener = StreamListener(url, **options)
    links: asyncio.Queue[TCPTransport] = asyncio.Queue()
    crashes: list[BaseException] = []
    listener.start(lambda link, hello: links.put_nowait(link), crashes.append)
    try:
        yield listener, links
    finally:
        await listener.aclose()
        while not links.empty():
            links.get_nowait().abort()
    assert not crashes


@contextlib.asynccontextmanager
async def linked(
    streams: int, url: str = URL, dialer: Any = None, accepts: Any = None
) -> AsyncIterator[tuple[TCPTransport, TCPTransport]]:
    """Both ends of a link of so many connections, the one that dialled first."""
    async with listening(url, credentials=accepts) as (listener, links):
        link = await TCPTransport.connect(listener.url, credentials=dialer, streams=streams)
        async with link:
            await link.send(HELLO)
            async with await links.get() as accepted:
                accepted.channel.allow_payloads()
                yield link, accepted


async def exchange(left: TCPTransport, right: TCPTransport, sizes: list[int], seed: int) -> None:
    """Send payloads of these sizes both ways at the same time, and compare them."""
    numbers = random.Random(seed)
    payloads = [numbers.randbytes(size) for size in sizes]

    async def push(link: TCPTransport) -> None:
        for index, payload in enumerate(payloads):
            await link.send(Setup("test", str(index), b""), [payload], timeout=PATIENCE)

    async def take(link: TCPTransport) -> None:
        for index, payload in enumerate(payloads):
            received = await link.recv(timeout=PATIENCE)
            assert received.message == Setup("test", str(index), b"")
            assert b"".join(received.payload) == payload

    await asyncio.gather(push(left), push(right), take(left), take(right))


@pytest.mark.asyncio
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("streams", [2, 3, 16])
async def test_bytes_arrive_in_order(streams: int, tls: bool) -> None:
    """Sizes around those of stripes, none, and many stripes at once."""
    both = Credentials(token="a long secret", tls=certificates().both if tls else None)
    stripe = 256 * 1024
    sizes = [1, stripe - 1, stripe, stripe + 1, 5 * stripe, 0, *[700] * 40, 9 * 2**20]
    async with linked(streams, URL, both, both) as (left, right):
        await exchange(left, right, sizes, streams)
        await exchange(left, right, random.Random(1).choices(range(600_000), k=20), 1)


@pytest.mark.asyncio
async def test_both_directions_are_full_at_once() -> None:
    """The buffers of the kernel are small, so that TLS keeps bytes at the ends of stripes."""
    both = Credentials(token="a long secret", tls=certificates().both)
    async with (
        listening(credentials=both) as (listener, links),
        FaultProxy(listener.url) as proxy,
        await TCPTransport.connect(proxy.url, credentials=both, streams=3) as link,
    ):
        await link.send(HELLO)
        async with await links.get() as accepted:
            accepted.channel.allow_payloads()
            for sock in (*link.io.socks, *accepted.io.socks):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            await exchange(link, accepted, [5 * 2**20, 100, 3 * 2**20, 2**18], 4)


@pytest.mark.asyncio
async def test_a_unix_socket_may_have_several_as_well(tmp_path: Any) -> None:
    async with linked(4, f"unix://{tmp_path}/socket") as (left, right):
        await exchange(left, right, [10, 3 * 2**20], 0)


@pytest.mark.asyncio
async def test_the_right_to_push_needs_the_token_on_all_connections() -> None:
    accepts = Credentials(token="a long secret", pull_token="another secret")
    for token, read_only in (("a long secret", False), ("another secret", True)):
        async with linked(3, dialer=Credentials(token=token), accepts=accepts) as (_, right):
            assert right.channel.read_only is read_only
    with pytest.raises(aiosync.AuthError):
        async with linked(3, dialer=Credentials(token="a wrong secret"), accepts=accepts):
            pytest.fail("was let in")


@pytest.mark.asyncio
async def test_a_link_ends_with_one_of_its_connections() -> None:
    async with listening() as (listener, links), FaultProxy(listener.url) as proxy:
        plans = iter([Plan(), Plan(), Plan(forward=Faults(reset_at=500_000)), Plan()])
        proxy.plan = lambda _: next(plans)
        async with await TCPTransport.connect(proxy.url, streams=4) as link:
            await link.send(HELLO)
            async with await links.get() as accepted:
                accepted.channel.allow_payloads()
                ends = await asyncio.gather(
                    link.send(Setup("test", "", b""), [bytes(2**26)], timeout=PATIENCE),
                    accepted.recv(timeout=PATIENCE),
                    return_exceptions=True,
                )
                assert all(isinstance(each, TransportError) for each in ends), ends


class Relay:
    """An address that leads to another one over connections that a test can end one by one."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.url = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs: list[tuple[asyncio.Future[Any], list[socket.socket]]] = []

    async def accept(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(number):
            near, _ = await loop.sock_accept(self.listener)
            far = socket.create_connection(self.target)
            for sock in (near, far):
                sock.setblocking(False)
            moving = asyncio.gather(self.move(near, far), self.move(far, near))
            self.pairs.append((moving, [near, far]))
        self.listener.close()

    async def move(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 65536):
                await loop.sock_sendall(target, data)

    async def end(self, which: int, *, reset: bool) -> None:
        moving, socks = self.pairs[which]
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        for sock in socks:
            if reset and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


@pytest.mark.parametrize("how", ["reset", "closed"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_an_idle_link_ends_with_one_of_its_connections(
    which: int, tls: bool, how: str
) -> None:
    """It does not wait for the turn of the connection, which would be at the next update."""
    both = Credentials(token="a long secret", tls=certificates().both if tls else None)
    async with listening(credentials=both) as (listener, links):
        relay = Relay(listener.url)
        accepting = asyncio.ensure_future(relay.accept(4))
        left = await TCPTransport.connect(relay.url, credentials=both, streams=4)
        await accepting
        await left.send(HELLO)
        async with left, await links.get() as right:
            right.channel.allow_payloads()
            left.channel.allow_payloads()
            await exchange(left, right, [1000, 2000], 1)
            ended = asyncio.Event()
            left.channel.call_on_end(ended.set)
            right.channel.call_on_end(ended.set)
            await asyncio.sleep(0.1)
            assert not ended.is_set()
            await relay.end(which, reset=how == "reset")
            async with asyncio.timeout(PATIENCE):
                await ended.wait()
        for each in range(4):
            await relay.end(each, reset=False)


@pytest.mark.asyncio
async def test_connections_that_are_missing_end_the_attempt() -> None:
    """The proxy lets only two of the four connections get through."""
    async with (
        listening(handshake_timeout=0.5) as (listener, links),
        FaultProxy(listener.url) as proxy,
    ):
        plans = iter([Plan(), Plan(), *[Plan(forward=Faults(stall_at=0))] * 2])
        proxy.plan = lambda _: next(plans)
        with pytest.raises((ConnectError, ConnectTimeout)):
            await TCPTransport.connect(proxy.url, streams=4, timeout=1.5)
        assert links.empty()
        # One that stalls, and the two that have waited for it.
        await until(lambda: sum(listener.refused.values()) == 2)
        assert not listener.links


@pytest.mark.asyncio
async def test_each_link_takes_one_place() -> None:
    """Connections that wait for others take no place, nor do those that come at the same time."""
    async with listening(max_connections=3, handshake_timeout=PATIENCE) as (listener, links):
        dialled = await asyncio.gather(
            *(TCPTransport.connect(listener.url, streams=4, timeout=PATIENCE) for _ in range(3))
        )
        for link in dialled:
            await link.send(HELLO)
        accepted = [await links.get() for _ in range(3)]
        assert len(listener.links) == 3
        with pytest.raises(ConnectError, match="limit"):
            await TCPTransport.connect(listener.url, streams=2, timeout=PATIENCE)
        for link in (*dialled, *accepted):
            link.abort()


@pytest.mark.asyncio
async def test_the_last_join_and_a_crowd_at_the_same_time() -> None:
    """A link that has come together keeps all its sockets, whatever its strangers' tasks do."""
    async with listening(max_connections=2, handshake_timeout=PATIENCE) as (listener, links):
        for _ in range(30):
            first, second = [await TCPTransport.connect(listener.url) for _ in range(2)]
            name = os.urandom(16)
            await first.send(Join(name, 0, 2))
            crowd = [socket.create_connection(second.io.sock.getpeername()) for _ in range(3)]
            # A busy machine may take longer to answer.
            with contextlib.suppress(aiosync.AiosyncError):
                await second.send(Join(name, 1, 2))
                await first.recv(timeout=0.05)
                await first.send(HELLO)
            await asyncio.sleep(0.01)
            for link in listener.links:
                assert all(sock.fileno() >= 0 for sock in link.io.socks)
            for end in (first, second):
                end.abort()
            for sock in crowd:
                sock.close()
            while not links.empty():
                links.get_nowait().abort()


@pytest.mark.asyncio
async def test_peers_leave_nothing_with_wrong_joins() -> None:
    async with listening(handshake_timeout=0.2) as (listener, links):
        for _ in range(20):
            link = await TCPTransport.connect(listener.url)
            await link.send(Join(os.urandom(16), 15, 2))
            with pytest.raises(TransportError):
                await link.recv(timeout=PATIENCE)
            link.abort()
        assert links.empty()
        assert listener.refused == {"RemoteProtocolError": 20}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "joins",
    [
        [Join(b"0" * 16, 0, 2), Join(b"0" * 16, 0, 2)],
        [Join(b"0" * 16, 3, 2)],
        [Join(b"0" * 16, 0, 2), Join(b"1" * 16, 1, 2)],
        [Join(b"0" * 16, 0, 2), HELLO],
        [Join(b"0" * 16, 0, 3), Join(b"0" * 16, 1, 2)],
    ],
    ids=["twice", "beyond", "another link", "hello", "another count"],
)
async def test_wrong_connections_make_no_link(joins: list[Any]) -> None:
    async with (
        listening(handshake_timeout=0.3) as (listener, links),
        contextlib.AsyncExitStack() as stack,
    ):
        ends = []
        for join in joins:
            link = await stack.enter_async_context(await TCPTransport.connect(listener.url))
            await link.send(join)
            ends.append(link)
        is_hello = [join is HELLO for join in joins]
        await until(lambda: sum(listener.refused.values()) == is_hello.count(False))
        assert links.qsize() == is_hello.count(True)
        for link in ends[: is_hello.count(False)]:
            with pytest.raises(TransportError):
                # The answer to a Join may be there, and then the end.
                for _ in range(2):
                    await link.recv(timeout=PATIENCE)


@pytest.mark.asyncio
async def test_a_listener_that_knows_no_join_is_told_of() -> None:
    """Another release, or the raw link of another program."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        dialling = asyncio.create_task(TCPTransport.connect(url, streams=2, timeout=PATIENCE))
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        async with await TCPTransport.accept(sock) as link:
            assert isinstance((await link.recv(timeout=PATIENCE)).message, Join)
            await link.send(Welcome(1, 1, 0, 1))
            with pytest.raises(aiosync.RemoteProtocolError, match="expected the same Join"):
                await dialling


# -- schemes, servers, clients ------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("delta", ["off", "always"])
async def test_a_trainer_a_server_and_workers(delta: Any) -> None:
    options = {"streams": 4, "delta": delta}
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(WeightServer(URL, delta=delta))
        source = await stack.enter_async_context(trainer(root, **options))
        relay = WeightServer(URL, model_ids=["policy"], upstream=root.url, streams=3, delta=delta)
        await stack.enter_async_context(relay)
        workers = [
            await stack.enter_async_context(worker(each, initial=False, **options))
            for each in (root, root, relay)
        ]
        for value in (1.0, 2.0, 3.0):
            report = await send(source, value)
            for each in workers:
                await each.wait_for_version(report.version, timeout=PATIENCE)
                assert holds(each, value)
        got = await WeightClient(relay.url, streams=2).pull("policy", timeout=PATIENCE)
        assert got.version == report.version


def large() -> torch.nn.Module:
    return torch.nn.Linear(1024, 2048, bias=False)


@pytest.mark.asyncio
async def test_a_lost_connection_is_replaced_with_all_of_them() -> None:
    trained, model = large(), large()
    source = aiosync.TCPWeightSyncScheme(token="a long secret", timeout=PATIENCE)
    source.init_on_sender(model=trained, num_workers=1)
    async with FaultProxy(source.address) as proxy, source:
        target = aiosync.TCPWeightSyncScheme(
            proxy.url, token="a long secret", timeout=PATIENCE, streams=4
        )
        plans = iter([Plan(), Plan(back=Faults(cut_at=3_000_000)), *[Plan()] * 6])
        proxy.plan = lambda _: next(plans)
        target.init_on_receiver(model=model)
        async with target:
            await asyncio.gather(source.connect(), target.connect())
            for value in (1.0, 2.0):
                torch.nn.init.constant_(trained.weight, value)
                with contextlib.suppress(aiosync.PartialSyncError):
                    await source.send()
            await target.wait_for_version(2, timeout=PATIENCE)
            assert torch.equal(model.weight, trained.weight)
            assert target.reconnects == 1
            assert proxy.connections == 8


def test_blocking_schemes_have_the_option() -> None:
    trained, model = large(), large()
    source = aiosync.sync.TCPWeightSyncScheme(timeout=PATIENCE)
    source.init_on_sender(model=trained, num_workers=1)
    target = copy.copy(source)
    assert (source.streams, target.streams) == (1, 1)
    target.streams = 2
    target.init_on_receiver(model=model)
    with source, target:
        aiosync.sync.connect_all(source, target)
        source.send()
        assert torch.equal(model.weight, trained.weight)


@pytest.mark.asyncio
async def test_several_connections_with_a_limit_each_are_faster() -> None:
    """Each connection gets 64 KiB in 20 ms. The bytes of one take four times as long as of four."""
    seconds = {}
    for streams in (1, 4):
        async with listening() as (listener, links), FaultProxy(listener.url) as proxy:
            proxy.plan = Plan(forward=Faults(delay=0.02))
            async with await TCPTransport.connect(proxy.url, streams=streams) as link:
                await link.send(HELLO)
                async with await links.get() as accepted:
                    accepted.channel.allow_payloads()
                    payload = bytes(6 * 2**20)
                    started = time.perf_counter()
                    sending = asyncio.create_task(
                        link.send(Setup("test", "", b""), [payload], timeout=PATIENCE)
                    )
                    await accepted.recv(timeout=PATIENCE)
                    await sending
                    seconds[streams] = time.perf_counter() - started
    assert seconds[4] < 0.6 * seconds[1], seconds


@pytest.mark.asyncio
async def test_the_connections_of_a_link_share_its_limit() -> None:
    loop = asyncio.get_running_loop()
    async with WeightServer(URL, limit_rate=2**22) as server, trainer(server) as source:
        await source.send({"weight": torch.zeros(2**19)})
        began = loop.time()
        await WeightClient(server.url, streams=4).pull("policy")
        # 2 MiB at 4 MiB a second, of which the kernel's first bytes go at once.
        assert loop.time() - began > 0.2


@pytest.mark.parametrize("streams", [0, 17, True, 1.5, "2"])
def test_the_number_of_connections_is_checked(streams: Any) -> None:
    for make in (
        lambda: aiosync.TCPWeightSyncScheme(streams=streams),
        lambda: WeightServer(URL, streams=streams),
        lambda: WeightClient("tcp://127.0.0.1:1", streams=streams),
    ):
        with pytest.raises(ConfigError, match="streams must be an int from 1 to 16"):
            make()
