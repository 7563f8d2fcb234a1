"""Workers, trainers and servers with several addresses, some of which cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiosync
import aiosync.sync
from aiosync.errors import (
    ApplyError,
    AuthError,
    ConfigError,
    ConnectTimeout,
    PartialSyncError,
)
from aiosync.server import WeightClient, WeightServer
from aiosync.testing import FaultProxy, Faults, Plan
from tests._certificates import certificates
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import holds, linear
from tests.server._tools import URL, described, send, trainer, without, worker
from tests.support.waiting import free_port
from tests.transports.test_streams import listening

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


def nowhere() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


async def test_what_a_server_leaves_behind_goes_on_at_another_one() -> None:
    """A worker and a server behind one that ends, with the next address of each."""
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(WeightServer(URL))
        source = await stack.enter_async_context(trainer(root))
        await send(source, 1.0)
        middle = WeightServer(URL, model_ids=["policy"], upstream=root.url)
        await stack.enter_async_context(middle)
        # The next address is empty at first: else a stall of the machine sends them there.
        next_one = await stack.enter_async_context(FaultProxy(nowhere()))
        urls: Any = [middle.url, next_one.url]
        leaf = WeightServer(URL, model_ids=["policy"], upstream=urls)
        await stack.enter_async_context(leaf)
        below = await stack.enter_async_context(worker(urls))
        behind = await stack.enter_async_context(worker(leaf))
        assert len(described(middle)["workers"]) == 2
        next_one.upstream = root.url
        await middle.aclose()
        report = await send(source, 2.0)
        for each in (below, behind):
            await each.wait_for_version(report.version, timeout=PATIENCE)
            assert (each.epoch, each.version) == (report.epoch, report.version)
            assert holds(each, 2.0)
        assert below.reconnects == 1
        assert len(described(root)["workers"]) == 2


async def test_the_first_address_that_answers_is_used() -> None:
    async with WeightServer(URL) as first, WeightServer(URL) as second:
        urls: Any = [nowhere(), first.url, second.url]
        async with trainer(urls) as source:
            await send(source, 1.0)
            async with worker(urls) as below:
                assert holds(below, 1.0)
                assert below.address == urls[0]
            assert second.status()["models"] == []


async def refuse_untold(source: Any, store: Path) -> None:
    """Have a trainer's server refuse a version; no call of the trainer reports it."""
    await send(source, 1.0)
    with without(store):
        sending = asyncio.ensure_future(send(source, 2.0))
        await asyncio.sleep(0)
        sending.cancel()
        await until(lambda: source.stats().refused == 1)


async def test_a_redial_that_is_refused_does_not_hide_an_untold_refusal(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with (
        WeightServer(URL, store=store) as server,
        WeightServer(URL) as taken,
        FaultProxy(server.url) as proxy,
        trainer(proxy.url) as source,
        trainer(taken),
    ):
        await refuse_untold(source, store)
        proxy.upstream = taken.url
        proxy.reset()
        await until(lambda: taken.status()["ended"].get("ConnectError", 0) > 2)
        errors = []
        for _ in range(2):
            with pytest.raises(PartialSyncError) as caught:
                await send(source, 3.0)
            errors.append(caught.value.failed[0])
        assert isinstance(errors[0], ApplyError)
        # The newest reason follows.
        assert "is already pushing model 'policy'" in str(errors[1])


async def test_a_silent_address_leaves_time_for_the_next_one() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    async with WeightServer(URL) as server, trainer(server) as source:
        await send(source, 1.0)
        urls: Any = [f"tcp://127.0.0.1:{silent.getsockname()[1]}", server.url]
        with silent:
            async with worker(urls, timeout=3.0) as below:
                assert holds(below, 1.0)


@contextlib.asynccontextmanager
async def _program_that_answers(data: bytes) -> AsyncIterator[str]:
    """A server of something else, which says ``data`` to everybody."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def _other_models() -> AsyncIterator[str]:
    async with WeightServer(URL, model_ids=["value"]) as server:
        yield server.url


@contextlib.asynccontextmanager
async def _secured() -> AsyncIterator[str]:
    async with WeightServer(URL, tls=certificates().listening) as server:
        yield server.url


@contextlib.asynccontextmanager
async def _no_place_left() -> AsyncIterator[str]:
    """A trainer whose only worker is there already."""
    scheme = aiosync.TCPWeightSyncScheme(URL)
    scheme.init_on_sender("policy", model=linear(), num_workers=1)
    taken = copy.copy(scheme)
    taken.init_on_receiver("policy", model=linear())
    async with scheme, taken:
        await asyncio.gather(scheme.connect(), taken.connect())
        yield scheme.address


@contextlib.asynccontextmanager
async def _silent() -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


WRONG: dict[str, Any] = {
    "another program": lambda: _program_that_answers(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "another wire version": lambda: _program_that_answers(b"AIOSYNC" + bytes(64)),
    "other models": _other_models,
    "TLS": _secured,
    "no place": _no_place_left,
    "silent": _silent,
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
async def test_a_wrong_address_leaves_a_worker_the_next_one(make: Any) -> None:
    async with make() as wrong, WeightServer(URL) as server, trainer(server) as source:
        await send(source, 1.0)
        urls: Any = [wrong, server.url]
        async with worker(urls, timeout=10.0) as below:
            assert holds(below, 1.0)


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
async def test_a_wrong_address_leaves_a_server_the_next_one(make: Any) -> None:
    async with make() as wrong, WeightServer(URL) as server, trainer(server) as source:
        await send(source, 1.0)
        urls: Any = [wrong, server.url]
        async with WeightServer(URL, model_ids=["policy"], upstream=urls) as below:
            await until(lambda: described(below)["version"] == 1)


@pytest.mark.parametrize("nbytes", [0, 50, 100, 150, 200, 250])
async def test_a_server_that_freezes_during_the_handshake_leaves_the_next_one(nbytes: int) -> None:
    options: Any = {"token": "a" * 32}
    async with WeightServer(URL, **options) as near, WeightServer(URL, **options) as server:
        async with FaultProxy(near.url) as proxy, trainer(server, **options) as source:
            await send(source, 1.0)
            proxy.plan = lambda _: Plan(back=Faults(stall_at=nbytes))
            async with worker([proxy.url, server.url], timeout=10.0, **options) as below:
                assert holds(below, 1.0)


async def test_a_server_that_answers_no_hello_leaves_those_that_follow_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has proved its identity; the other one comes later."""
    monkeypatch.setattr("aiosync.rendezvous.dialer.HANDSHAKE_SECONDS", 1.0)
    async with listening() as (silent, links), FaultProxy(nowhere()) as proxy:
        async with WeightServer(URL) as server, trainer(server) as source:
            await send(source, 1.0)
            urls: Any = [proxy.url, silent.url]
            below = WeightServer(URL, model_ids=["policy"], upstream=urls)
            async with below, await links.get():
                proxy.upstream = server.url
                await until(lambda: described(below)["version"] == 1)


ANSWERS_NO_TRAINER = ["another program", "another wire version", "TLS", "silent"]


@pytest.mark.parametrize("name", ANSWERS_NO_TRAINER)
async def test_a_wrong_address_leaves_a_trainer_the_next_one(name: str) -> None:
    async with WRONG[name]() as wrong, WeightServer(URL) as server:
        urls: Any = [wrong, server.url]
        async with trainer(urls, timeout=10.0) as source:
            assert (await send(source, 1.0)).version == 1


@pytest.mark.parametrize("name", ANSWERS_NO_TRAINER)
async def test_a_wrong_address_leaves_a_client_the_next_one(name: str) -> None:
    async with WRONG[name]() as wrong, WeightServer(URL) as server, trainer(server) as source:
        await send(source, 1.0)
        client = WeightClient([wrong, server.url])
        assert (await client.pull("policy", timeout=PATIENCE)).version == 1


async def test_a_worker_goes_on_although_another_program_has_the_port() -> None:
    port = free_port()
    near = WeightServer(f"tcp://127.0.0.1:{port}")
    async with near, WeightServer(URL) as far, trainer(near) as one, trainer(far) as two:
        await send(one, 1.0)
        await send(two, 2.0)
        urls: Any = [near.url, far.url]
        async with worker(urls, reconnect=None) as below:
            assert holds(below, 1.0)
            await near.aclose()
            with socket.create_server(("127.0.0.1", port)) as other:
                other.settimeout(PATIENCE)
                stranger, _ = await asyncio.to_thread(other.accept)
                with stranger:
                    stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    await until(lambda: holds(below, 2.0))


@pytest.mark.parametrize("order", [1, -1])
async def test_a_wrong_token_is_told_although_another_address_is_dead(order: int) -> None:
    async with WeightServer(URL, token="a" * 32) as server:
        urls = [server.url, nowhere()][::order]
        scheme = aiosync.TCPWeightSyncScheme(urls, dial="both", token="b" * 32)
        scheme.init_on_receiver("policy", model=linear())
        async with scheme:
            with pytest.raises(AuthError) as info:
                await scheme.connect(timeout=PATIENCE)
        assert all(url in str(info.value) for url in urls)


async def test_a_full_server_sends_workers_to_the_next_one() -> None:
    async with WeightServer(URL) as root, trainer(root) as source:
        await send(source, 1.0)
        small = WeightServer(URL, model_ids=["policy"], upstream=root.url, max_connections=1)
        async with small:
            await until(lambda: described(small)["version"] == 1)
            urls: Any = [small.url, root.url]
            async with worker(urls), worker(urls) as second:
                assert holds(second, 1.0)
                assert len(described(small)["workers"]) == 1


async def test_errors_name_every_address() -> None:
    urls: Any = [nowhere(), nowhere()]
    scheme = aiosync.TCPWeightSyncScheme(urls, dial="both")
    scheme.init_on_receiver("policy", model=linear())
    async with scheme:
        with pytest.raises(ConnectTimeout, match=f"{urls[0]} or {urls[1]} was not reached"):
            await scheme.connect(timeout=0.3)


async def test_a_wrong_token_is_final_at_each_address() -> None:
    async with WeightServer(URL, token="a" * 32) as server:
        scheme = aiosync.TCPWeightSyncScheme([nowhere(), server.url], dial="both", token="b" * 32)
        scheme.init_on_receiver("policy", model=linear())
        async with scheme:
            with pytest.raises(AuthError):
                await scheme.connect(timeout=PATIENCE)


async def test_lists_that_cannot_be_dialled_are_refused() -> None:
    with pytest.raises(ConfigError, match="need dial='both'"):
        aiosync.TCPWeightSyncScheme(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"])
    with pytest.raises(ConfigError, match="the list is empty"):
        aiosync.sync.TCPWeightSyncScheme([], dial="both")
    with pytest.raises(ConfigError, match="no port to dial"):
        aiosync.TCPWeightSyncScheme(["tcp://127.0.0.1:1", "tcp://127.0.0.1:0"], dial="both")
    with pytest.raises(ConfigError, match="must be a str"):
        aiosync.TCPWeightSyncScheme([5], dial="both")  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="the list is empty"):
        WeightServer(URL, model_ids=["policy"], upstream=[])
