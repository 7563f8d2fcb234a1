"""A trainer that comes back to a weight server after another one pushed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aiosync
from aiosync.schemes._handshake import ANY_STRATEGY
from aiosync.server import WeightServer
from aiosync.testing import FaultProxy
from aiosync.testing.proxy import Faults, Plan
from tests.schemes._harness import until
from tests.schemes._models import filled, linear
from tests.server._tools import URL, described, send, trainer, worker

pytestmark = pytest.mark.asyncio


async def cut_off(server: WeightServer, proxy: FaultProxy, scheme: Any) -> None:
    """End the trainer's link, and let it open no other."""
    proxy.plan = lambda number: Plan(forward=Faults(cut_at=0))
    server._models["policy"]._trainer.abort()  # type: ignore[union-attr]
    await until(lambda: described(server)["trainer"] is None)
    await until(lambda: not scheme._sender.peers)


async def come_back(proxy: FaultProxy, scheme: Any) -> None:
    proxy.plan = None
    await until(lambda: bool(scheme._sender.peers))


@pytest.mark.parametrize("stored", [False, True])
async def test_what_it_pushed_before_is_not_served_again(stored: bool, tmp_path: Path) -> None:
    async with (
        WeightServer(URL, store=tmp_path if stored else None) as server,
        FaultProxy(server.url) as proxy,
        trainer(proxy.url, reconnect=None) as first,
        worker(server) as reader,
    ):
        await send(first, 1.0)
        await cut_off(server, proxy, first)
        async with trainer(server) as second:
            await send(second, 2.0)
            epoch = second._clock.epoch
        await until(lambda: filled(reader.it, 2.0))
        updates = described(server)["updates"]

        await come_back(proxy, first)
        assert await first.wait_for_version(1) == 1  # as it was: the server had it
        assert first.worker_versions == {0: 1}
        told = described(server)
        assert (told["epoch"], told["version"], told["updates"]) == (epoch, 1, updates)
        async with worker(server) as late:
            assert filled(late.it, 2.0)

        assert (await send(first, 3.0)).acked == {0}  # what is new is served
        await until(lambda: filled(reader.it, 3.0))
        assert described(server)["epoch"] == first._clock.epoch


@pytest.mark.parametrize("refused", [False, True])
async def test_what_it_offers_all_the_same_is_answered_once(refused: bool) -> None:
    """Because the server said nothing of it: applied if it was served, else it is told why not."""
    async with (
        WeightServer(URL) as server,
        FaultProxy(server.url) as proxy,
        trainer(proxy.url, reconnect=None) as first,
    ):
        await send(first, 1.0)
        await cut_off(server, proxy, first)
        async with trainer(server) as second:
            await send(second, 2.0)
        model, epoch = server._models["policy"], first._clock.epoch
        model._had[epoch] = 0 if refused else 99  # as if the disk had refused it, or more had come
        before = dict(first._sender.workers._failures)
        await come_back(proxy, first)
        if refused:
            await until(lambda: first._sender.workers._failures != before)
            [error] = first._sender.workers._failures.values()
            assert "another trainer pushed after version 1" in str(error)
        else:
            assert await first.wait_for_version(1) == 1
        assert described(server)["epoch"] == second._clock.epoch
        assert (await send(first, 3.0)).acked == {0}
        assert described(server)["epoch"] == epoch


async def test_its_strategy_does_not_count_before_it_pushes() -> None:
    async with (
        WeightServer(URL) as server,
        FaultProxy(server.url) as proxy,
        trainer(proxy.url, reconnect=None) as first,
    ):
        await send(first, 1.0)
        await cut_off(server, proxy, first)
        pushed = aiosync.TCPWeightSyncScheme(server.url, "state_dict", dial="both")
        pushed.strategy_str = ANY_STRATEGY
        pushed.init_on_sender()
        async with pushed:
            await pushed.connect()
            await pushed.send(linear().state_dict())
        await come_back(proxy, first)
        assert described(server)["strategy"] == ANY_STRATEGY
        async with worker(server, strategy="state_dict"):  # gets what is served
            pass
        await send(first, 3.0)
        assert described(server)["strategy"] == "tensordict"
