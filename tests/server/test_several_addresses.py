"""Workers, trainers and servers with several addresses, some of which cannot be reached."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

import aiosync
import aiosync.sync
from aiosync.errors import AuthError, ConfigError, ConnectTimeout
from aiosync.server import WeightServer
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import holds, linear
from tests.server._tools import URL, described, send, trainer, worker
from tests.support.waiting import free_port

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
        urls: Any = [middle.url, root.url]
        leaf = WeightServer(URL, model_ids=["policy"], upstream=urls)
        await stack.enter_async_context(leaf)
        below = await stack.enter_async_context(worker(urls))
        behind = await stack.enter_async_context(worker(leaf))
        assert len(described(middle)["workers"]) == 2
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


async def test_a_silent_address_leaves_time_for_the_next_one() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    async with WeightServer(URL) as server, trainer(server) as source:
        await send(source, 1.0)
        urls: Any = [f"tcp://127.0.0.1:{silent.getsockname()[1]}", server.url]
        with silent:
            async with worker(urls, timeout=3.0) as below:
                assert holds(below, 1.0)


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
