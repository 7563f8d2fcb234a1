"""Clients that pull once from a weight server or a trainer: whole and cut transfers, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.errors import (
    ConfigError,
    ConnectError,
    ConnectTimeout,
    RecvTimeout,
    RemoteProtocolError,
)
from aiosync.server import WeightClient, WeightServer
from aiosync.testing import FaultProxy, Faults, Plan
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import (
    Fetch,
    Hello,
    LeafSpec,
    Manifest,
    ManifestMessage,
    Take,
    Update,
    Welcome,
    checksum,
)
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import Tied, batch_norm, fill, linear, medium
from tests.server._tools import URL, described, send, trainer, worker

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


class Counter(nn.Module):
    """A module with a parameter, and with a tensor in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.steps = torch.zeros(2)

    def get_extra_state(self) -> object:
        return {"steps": self.steps, "name": "counter", "shape": (1, 2)}

    def set_extra_state(self, state: object) -> None:
        assert isinstance(state, dict)
        self.steps = state["steps"]


@pytest.mark.parametrize("build", [linear, batch_norm, Tied, Counter])
async def test_what_is_pulled_loads_into_the_model(build: type[nn.Module]) -> None:
    model, copy = build(), build()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if isinstance(model, Counter):
        model.steps += 5
    async with WeightServer(URL) as server, trainer(server, strategy="state_dict") as source:
        await source.send(model)
        pulled = await WeightClient(server.url).pull()
    mapping = pulled.mapping()
    assert mapping.keys() == model.state_dict().keys()
    assert len({id(value) for value in mapping.values()}) == len(mapping) - isinstance(model, Tied)
    copy.load_state_dict(mapping)
    for name, value in copy.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, model.state_dict()[name])
    if isinstance(copy, Counter):
        assert copy.steps.tolist() == [5.0, 5.0]
        assert mapping["_extra_state"]["shape"] == (1, 2)


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_a_trainer_that_listens_is_asked_in_the_same_way(scheme: str, tmp_path: Path) -> None:
    url = URL if scheme == "tcp" else f"unix://{tmp_path / 'socket'}"
    source = aiosync.TCPWeightSyncScheme(url, timeout=PATIENCE)
    model = linear()
    fill(model, 0.0)
    source.init_on_sender(model=model)
    async with source:
        await source.connect()
        first = await WeightClient(source.address).pull(timeout=PATIENCE)
        await until(lambda: not source.sender_transports)
        # A client that has only pulled does not count as a lost worker.
        assert not (await source.send()).lost
        fill(model, 2.0)
        waiting = asyncio.ensure_future(
            WeightClient(source.address).pull(min_version=first.version + 2, timeout=PATIENCE)
        )
        async with worker(source.address, dial="receiver") as subscriber:
            await until(lambda: len(source.sender_transports) == 2)
            await source.send()
            second = await waiting
            assert (first.version, second.version) == (1, 3)
            assert all(bool((each == 2.0).all()) for each in second.mapping().values())
            await subscriber.wait_for_version(3)
            with pytest.raises(ConnectError, match="is a trainer, not a weight server"):
                await WeightClient(source.address).status()


@pytest.mark.parametrize("strict", [True, False])
async def test_a_client_gets_the_version_for_all_after_each_worker_was_named(strict: bool) -> None:
    source = aiosync.TCPWeightSyncScheme(URL, timeout=PATIENCE, strict=strict)
    model = linear()
    fill(model, 1.0)
    source.init_on_sender(model=model, num_workers=2)
    client, options = WeightClient(source.address), {"strict": strict, "dial": "receiver"}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(source)
        connecting = asyncio.ensure_future(source.connect())
        for _ in range(2):
            await stack.enter_async_context(worker(source.address, **options))
        await connecting
        fill(model, 2.0)
        part = model if strict else {"bias": model.bias}
        for idx in range(2):
            assert (await source.send(part, worker_ids=[idx])).acked == {idx}
        pulled = await client.pull(timeout=PATIENCE)
        assert (pulled.version, {*pulled.mapping()}) == (1, {"weight", "bias"})
        assert all(bool((each == 1.0).all()) for each in pulled.mapping().values())
        await source.send(part)
        pulled = await client.pull(timeout=PATIENCE)
        assert (pulled.version, {*pulled.mapping()}) == (4, {"weight", "bias"})
        assert float(pulled.mapping()["bias"][0]) == 2.0


async def test_a_transfer_that_is_cut_goes_on_where_it_stopped() -> None:
    async with (
        WeightServer(URL, chunk_nbytes=2**18) as server,
        trainer(server) as source,
        FaultProxy(server.url) as proxy,
    ):
        await source.send(medium())
        proxy.plan = lambda number: Plan(
            back=[Faults(cut_at=3_000_000), Faults(reset_at=2_000_000), Faults()][number]
        )
        seen: list[int] = []

        def progress(done: int, total: int) -> None:
            assert total == 2**23
            seen.append(done)

        pulled = await WeightClient(proxy.url).pull(timeout=PATIENCE, progress=progress)
        assert proxy.connections == 3
        assert pulled.reconnects == 2
        assert pulled.nbytes == 2**23
        # Complete chunks are not sent again: only those that were cut are repeated.
        assert proxy.bytes_back < 2**23 + 3 * 2**18 + 2**16
        assert seen == sorted(seen)
        assert seen[-1] == pulled.nbytes
        assert torch.equal(pulled.mapping()["block"], torch.full((2, 2**20), -1.0))


CHUNK = bytes(2**16)
MANIFEST = Manifest((LeafSpec("weight", "uint8", (2**17,), 0, 2**17),), 2**17)


@contextlib.asynccontextmanager
async def raw_server(path: Path) -> AsyncIterator[asyncio.Queue[tuple[Hello, TCPTransport]]]:
    """The links that a client dials, each with its Hello, once it asks for a version."""
    links, accepted = asyncio.Queue[tuple[Hello, TCPTransport]](), list[TCPTransport]()

    async def accept(listening: socket.socket) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listening)
            link = await TCPTransport.accept(sock, credentials=Credentials())
            accepted.append(link)
            hello = (await link.recv()).message
            assert isinstance(hello, Hello)
            await link.send(Welcome(5, 1, 0))
            assert isinstance((await link.recv()).message, Fetch)
            links.put_nowait((hello, link))

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.setblocking(False)
        accepting = asyncio.ensure_future(accept(listening))
        try:
            yield links
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])
            for link in accepted:
                link.abort()


async def send_half(link: TCPTransport) -> None:
    """Send the first of the two chunks of a version, and close the link."""
    await link.send(ManifestMessage(MANIFEST))
    first = Update(5, 1, MANIFEST.digest, chunk=(0, 2), checksum=checksum(CHUNK))
    await link.send(first, [CHUNK])
    await link.aclose()


async def send_illegal(link: TCPTransport) -> None:
    await link.send(Take(5, 1))


@pytest.mark.parametrize(
    ("steps", "partial"),
    [
        ([send_half, send_illegal, send_illegal], [0, len(CHUNK), 0]),
        ([send_half, send_illegal, send_half, send_illegal], [0, len(CHUNK), 0, len(CHUNK)]),
    ],
)
async def test_a_second_illegal_message_ends_a_transfer(
    steps: Any, partial: list[int], tmp_path: Path
) -> None:
    """After the first one the transfer begins anew, as the two sides may have disagreed."""
    announced = []
    async with raw_server(tmp_path / "socket") as links, asyncio.timeout(PATIENCE):
        client = WeightClient(f"unix://{tmp_path / 'socket'}")
        pulling = asyncio.ensure_future(client.pull(timeout=None))
        for step in steps:
            hello, link = await links.get()
            announced.append(hello.partial_nbytes)
            await step(link)
        with pytest.raises(RemoteProtocolError, match="unexpected Take"):
            await pulling
    assert announced == partial


async def test_without_a_version_it_says_so() -> None:
    async with WeightServer(URL) as server:
        client = WeightClient(server.url)
        with pytest.raises(RecvTimeout, match=r"no version of model 'nix' yet, and got none"):
            await client.pull("nix", timeout=0.5)
        async with trainer(server) as source:
            await send(source, 1.0)
            with pytest.raises(RecvTimeout, match=r"has no version 5 .* it had version 1; .*push"):
                await client.pull(min_version=5, timeout=0.5)
            listed = r"no version of model 'polisy' yet, .* that it has weights of: 'policy'"
            with pytest.raises(RecvTimeout, match=listed):
                await client.pull("polisy", timeout=0.5)
        await until(lambda: not described(server)["workers"])


async def test_a_server_that_went_away_is_waited_for_until_the_time_is_up() -> None:
    server = WeightServer(URL)
    await server.start()
    pull = asyncio.ensure_future(WeightClient(server.url).pull(timeout=0.5))
    await until(lambda: bool(server.status()["models"] and described(server)["workers"]))
    await server.aclose()
    with pytest.raises(RecvTimeout, match=r"was lost .* and not reached again within 0.5 s"):
        await pull


async def test_a_server_that_is_reached_again_does_not_count_as_lost(tmp_path: Path) -> None:
    async with raw_server(tmp_path / "socket") as links:
        client = WeightClient(f"unix://{tmp_path / 'socket'}")
        pull = asyncio.ensure_future(client.pull(min_version=2, timeout=5.0))
        _, link = await links.get()
        link.abort()
        async with asyncio.timeout(PATIENCE):
            await links.get()
        with pytest.raises(RecvTimeout, match="has no version 2 of model 'policy', and got none"):
            await pull


async def test_attempts_that_fail_are_no_reconnects(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with raw_server(path) as links, FaultProxy(f"unix://{path}") as proxy:
        pull = asyncio.ensure_future(WeightClient(proxy.url).pull(timeout=PATIENCE))
        await links.get()
        proxy.upstream = f"unix://{tmp_path / 'nobody'}"
        proxy.cut()
        await until(lambda: proxy.connections > 3)
        proxy.upstream = f"unix://{path}"
        _, link = await links.get()
        await link.send(ManifestMessage(MANIFEST))
        for index in range(2):
            chunk = Update(5, 1, MANIFEST.digest, chunk=(index, 2), checksum=checksum(CHUNK))
            await link.send(chunk, [CHUNK])
        assert (await pull).reconnects == 1


@pytest.mark.parametrize("call", [WeightClient.pull, WeightClient.status])
async def test_nobody_there_is_an_error_at_once(call: Any, tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE):
        for url in (f"unix://{tmp_path / 'nothing'}", "tcp://127.0.0.1:1"):
            with pytest.raises(ConnectError, match="cannot be reached"):
                await call(WeightClient(url), timeout=None)


@pytest.mark.parametrize(
    ("call", "error"), [(WeightClient.pull, RecvTimeout), (WeightClient.status, ConnectTimeout)]
)
async def test_who_never_answers_is_given_up(call: Any, error: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        # The kernel accepts the connection, and no message follows.
        silent.listen()
        with pytest.raises(error, match="did not answer within 0.1 s"):
            await call(WeightClient(f"unix://{tmp_path / 'silent'}"), timeout=0.1)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "http://127.0.0.1:80", "nonsense", ""])
async def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        WeightClient(url)


async def test_a_client_of_a_trainer_is_no_worker() -> None:
    """It takes no place of a worker that is waited for, nor is it refused for want of one."""
    source = aiosync.TCPWeightSyncScheme(URL, timeout=PATIENCE)
    source.init_on_sender(model=nn.Linear(2, 2), num_workers=2)
    connecting = asyncio.ensure_future(source.connect())
    workers = []
    for number in range(2):
        await asyncio.sleep(0)
        target = aiosync.TCPWeightSyncScheme(source.address, timeout=PATIENCE)
        target.init_on_receiver(model=nn.Linear(2, 2))
        await target.connect()
        workers.append(target)
        # Before the last worker has come, and when no place is left.
        found = await WeightClient(source.address).pull(timeout=PATIENCE)
        assert found.version == 1
        if not number:
            await asyncio.sleep(0.1)
            assert not connecting.done()
            assert not source.ready
    await connecting
    assert source.ready
    assert (await source.send()).acked == {0, 1}
    for scheme in (*workers, source):
        await scheme.aclose()
