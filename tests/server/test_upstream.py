"""Servers that follow another server or a trainer, and deltas over every hop, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio import to_thread

import aiosync
from aiosync.errors import ConfigError, LocalProtocolError, PartialSyncError
from aiosync.receiver.kept_base import KeptBase
from aiosync.sender import update_queue
from aiosync.server import WeightClient, WeightServer, WeightStore
from aiosync.testing import FaultProxy, Faults, Plan
from tests.schemes import _deltas as deltas
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import holds, linear
from tests.server._tools import URL, described, refused, send, trainer, worker

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

SIZE = sum(each.numel() * each.element_size() for each in deltas.build().buffers())


def relay(upstream: WeightServer | str, url: str = URL, **options: Any) -> WeightServer:
    """Return a server of the model ``"policy"`` that follows another one."""
    followed = upstream if isinstance(upstream, str) else upstream.url
    return WeightServer(url, model_ids=["policy"], upstream=followed, **options)


# -- a server that follows ---------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 3])
async def test_versions_pass_through_servers_unchanged(hops: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = last = await stack.enter_async_context(WeightServer(URL))
        for _ in range(hops):
            last = await stack.enter_async_context(relay(last))
        source = await stack.enter_async_context(trainer(first))
        report = await send(source, 1.0)
        early = await stack.enter_async_context(worker(last))
        assert (early.epoch, early.version) == (report.epoch, report.version)
        for value in (2.0, 3.0):
            report = await send(source, value)
            await early.wait_for_version(report.version)
            assert holds(early, value)
        late = await stack.enter_async_context(worker(last))
        assert holds(late, 3.0)
        pulled = await WeightClient(last.url).pull("policy")
        assert (pulled.epoch, pulled.version) == (report.epoch, report.version)


async def test_a_trainer_that_listens_is_an_upstream() -> None:
    scheme = aiosync.TCPWeightSyncScheme(URL, timeout=PATIENCE)
    scheme.it = linear()
    scheme.init_on_sender("policy", model=scheme.it, num_workers=1)
    async with scheme, relay(scheme.address) as server:
        await scheme.connect()
        report = await send(scheme, 1.0)
        # The ack says that the server has the version.
        assert report.acked == {0}
        assert described(server)["version"] == report.version
        async with worker(server) as below:
            assert holds(below, 1.0)
        await server.aclose()
        # It said farewell.
        await until(lambda: [each.state for each in scheme.stats().workers] == ["left"])


async def test_a_server_that_follows_takes_no_index_of_a_worker() -> None:
    async with WeightServer(URL) as first, trainer(first) as source, relay(first) as server:
        await send(source, 1.0)
        await until(lambda: described(server)["version"] == source.version)
        scheme = aiosync.TCPWeightSyncScheme(first.url, dial="both", timeout=PATIENCE)
        scheme.it = linear()
        scheme.init_on_receiver("policy", model=scheme.it, worker_idx=0)
        async with scheme:
            await scheme.connect()
            assert holds(scheme, 1.0)


async def test_nobody_pushes_to_a_server_that_follows() -> None:
    async with WeightServer(URL) as first, relay(first) as server:
        await refused(trainer(server), PartialSyncError, f"ConfigError.*follows {first.url}")


async def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_ids="):
        WeightServer(URL, upstream="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no port"):
        WeightServer(URL, model_ids=["policy"], upstream="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="need an upstream="):
        WeightServer(URL, upstream_token="a" * 32)
    with pytest.raises(ConfigError, match="need an upstream="):
        WeightServer(URL, streams=2)
    with pytest.raises(ConfigError, match="limit_rate= is for tcp"):
        WeightServer("unix:///tmp/none", limit_rate=1000)
    with pytest.raises(ConfigError, match="limit_rate must be an int"):
        WeightServer(URL, limit_rate=0)
    with pytest.raises(ConfigError, match="delta must be"):
        WeightServer(URL, delta="sometimes")  # type: ignore[arg-type]


async def test_a_link_sends_no_faster_than_its_limit() -> None:
    loop = asyncio.get_running_loop()
    async with WeightServer(URL, limit_rate=2**22) as server, trainer(server) as source:
        await source.send({"weight": torch.zeros(2**19)})
        began = loop.time()
        await WeightClient(server.url).pull("policy")
        # 2 MiB at 4 MiB a second, of which the kernel's first bytes go at once.
        assert loop.time() - began > 0.2


async def test_the_end_of_a_server_that_follows_is_no_crash() -> None:
    async with WeightServer(URL) as upstream, relay(upstream) as server:
        await until(lambda: described(server)["trainer"] is not None)
        waiting = asyncio.ensure_future(server.wait_closed())
        await server.aclose()
        await waiting


async def test_a_link_to_the_upstream_comes_back(tmp_path: Path) -> None:
    """A cut link, an upstream that restarts empty or with a store, and a trainer's new run."""
    url, options = f"unix://{tmp_path / 'first'}", {"store": tmp_path / "store"}
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(WeightServer(url, **options))
        proxy = await stack.enter_async_context(FaultProxy(url))
        server = await stack.enter_async_context(relay(proxy.url))
        async with trainer(url) as source:
            await send(source, 1.0)
            below = await stack.enter_async_context(worker(server))
            proxy.cut()
            await send(source, 2.0)
            await until(lambda: holds(below, 2.0))
        await first.aclose()
        # The versions that are here are served meanwhile.
        async with worker(server) as late:
            assert holds(late, 2.0)
        first = await stack.enter_async_context(WeightServer(url, **options))
        async with trainer(url) as source:
            report = await send(source, 3.0)
            await until(lambda: holds(below, 3.0))
            assert (below.epoch, below.version) == (report.epoch, report.version)


async def test_a_server_that_restarts_catches_up(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'second'}"
    async with WeightServer(URL) as first, trainer(first) as source:
        for store in (None, tmp_path / "store", tmp_path / "store"):
            async with relay(first, url, store=store) as server:
                report = await send(source, 1.0)
                await until(
                    lambda server=server, report=report: (
                        described(server)["version"] == report.version
                    )
                )
            report = await send(source, 2.0)
        async with relay(first, url, store=store) as server, worker(server) as below:
            await below.wait_for_version(report.version)
            assert holds(below, 2.0)


async def test_a_server_that_is_closed_while_it_loads_follows_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, held, go = WeightStore.load, threading.Event(), threading.Event()

    def slow(store: WeightStore, model_id: str) -> Any:
        held.set()
        assert go.wait(PATIENCE)
        return load(store, model_id)

    async with WeightServer(URL) as first, trainer(first) as source:
        report = await send(source, 1.0)
        async with relay(first, store=tmp_path) as server:
            await until(lambda: described(server)["version"] == report.version)
        monkeypatch.setattr(WeightStore, "load", slow)
        server = relay(first, store=tmp_path)
        starting = asyncio.ensure_future(server.start())
        await until(held.is_set)
        await server.aclose()
        go.set()
        with pytest.raises(LocalProtocolError, match="closed while it loaded"):
            await starting
        assert server.status()["models"] == []
        await server.wait_closed()


async def test_updates_of_some_names_pass_as_they_are() -> None:
    async with WeightServer(URL) as first, relay(first) as server:
        async with trainer(first, strict=False) as source:
            await send(source, 1.0)
            async with worker(server, strict=False) as below:
                report = await source.send({"weight": torch.full((2, 4), 5.0)})
                await below.wait_for_version(report.version)
                async with worker(server, strict=False) as late:
                    for scheme in (below, late):
                        assert (scheme.it.weight == 5).all()
                        assert (scheme.it.bias == 1).all()


async def test_an_upstream_that_refuses_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aiosync")
    async with (
        WeightServer(URL, token="a" * 32) as first,
        relay(first, upstream_token="b" * 32) as server,
    ):
        await until(lambda: first.status()["refused"])
        await asyncio.sleep(0.5)
        said = [each.message for each in caplog.records if first.url in each.message]
        assert len([each for each in said if "is not followed" in each]) == 1
        assert described(server)["version"] == 0


async def test_an_update_that_cannot_be_taken_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "aiosync")
    async with WeightServer(URL) as first, trainer(first) as source:
        await send(source, 1.0)
        small = aiosync.Limits(max_payload_nbytes=16)
        async with relay(first, limits=small) as server:
            # A trainer and three links of the server that follows.
            await until(lambda: first.status()["accepted"] > 3)
            said = [each.message for each in caplog.records if first.url in each.message]
            assert len([each for each in said if "at most 16 are allowed" in each]) == 1
            assert described(server)["version"] == 0


# -- deltas over every hop ---------------------------------------------------------------------


def bringing(url: str, model: torch.nn.Module) -> Any:
    scheme = aiosync.TCPWeightSyncScheme(
        url, delta="always", chunk_nbytes=2**17, dial="both", timeout=PATIENCE
    )
    scheme.init_on_sender("policy", model=model)
    return scheme


@pytest.mark.parametrize("stored", [False, True])
async def test_few_changes_are_few_bytes_on_every_hop(stored: bool, tmp_path: Path) -> None:
    url, model, rng = f"unix://{tmp_path / 'first'}", deltas.build(), random.Random(0)
    options = {"store": tmp_path / "store"} if stored else {}
    async with WeightServer(url, delta="always", chunk_nbytes=2**17, **options) as first:
        async with relay(first, delta="always", chunk_nbytes=2**17) as second:
            target = deltas.build()
            async with (
                bringing(url, model) as source,
                worker(second, model=target, initial=False, delta="always") as below,
            ):
                await source.connect()
                for number in range(4):
                    before = [
                        source.stats().wire_nbytes,
                        *(server.stats()["policy"].wire_nbytes for server in (first, second)),
                    ]
                    for each in model.buffers():
                        if each.dtype == torch.bfloat16:
                            each.view(torch.int16)[:: 97 + rng.randrange(9)] += 1
                    await source.send()
                    await below.wait_for_version(source.version)
                    assert deltas.digests(target) == deltas.digests(model)
                    after = [
                        source.stats().wire_nbytes,
                        *(server.stats()["policy"].wire_nbytes for server in (first, second)),
                    ]
                    sent = [new - old for new, old in zip(after, before, strict=True)]
                    assert number == 0 or max(sent) < SIZE / 10, sent


async def test_a_chunk_of_a_link_that_was_replaced_changes_no_later_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer dials again while a thread of the server decodes a delta of its old link."""
    held, go, ended = threading.Event(), threading.Event(), threading.Event()
    take = KeptBase.take

    def slow(*args: Any) -> None:
        is_first = not held.is_set()
        held.set()
        assert not is_first or go.wait(PATIENCE)
        try:
            take(*args)
        finally:
            if is_first:
                ended.set()

    options: Any = {"delta": "always", "chunk_nbytes": 2**17}
    async with (
        WeightServer(URL, **options) as server,
        FaultProxy(server.url) as proxy,
        bringing(proxy.url, weights := deltas.build()) as source,
    ):
        await source.connect()
        await source.send()
        monkeypatch.setattr(KeptBase, "take", slow)
        for each in weights.buffers():
            each[::50] += 1
        handle = source.send_nowait()
        await until(held.is_set)
        proxy.cut()
        # The new link may not bring the whole version before the thread has ended.
        with contextlib.suppress(TimeoutError):
            await until(lambda: described(server)["version"] == source.version, 0.5)
        go.set()
        await until(ended.is_set)
        with contextlib.suppress(PartialSyncError):
            await handle
        await source.wait_for_version(source.version)
        pulled = (await WeightClient(server.url).pull()).mapping()
        assert all(torch.equal(pulled[name], each) for name, each in weights.named_buffers())


@pytest.mark.parametrize("failing", [(KeptBase, "take"), (to_thread, "run_sync")])
async def test_a_chunk_that_cannot_be_decoded_costs_the_link(
    failing: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory, or without a thread, for it: from a trainer and from an upstream."""
    options: Any = {"delta": "always", "chunk_nbytes": 2**17}
    async with (
        WeightServer(URL, **options) as first,
        relay(first, **options) as second,
        bringing(first.url, model := deltas.build()) as source,
    ):
        await source.connect()
        call, errors = getattr(*failing), [MemoryError()]
        errors += [RuntimeError("can't start new thread")] * 10

        def fail_first(*args: Any, **options: Any) -> Any:
            if errors:
                raise errors.pop()
            return call(*args, **options)

        monkeypatch.setattr(*failing, fail_first)
        while errors:
            for each in model.buffers():
                each[::50] += 1
            with contextlib.suppress(PartialSyncError):
                await source.send()
        await source.wait_for_version(source.version)
        await until(lambda: described(second)["version"] == source.version)
        pulled = (await WeightClient(second.url).pull()).mapping()
        assert all(torch.equal(pulled[name], each) for name, each in model.named_buffers())
        assert first.status()["ended"]["TransportBroken"]


async def test_an_update_of_an_ended_run_is_no_base_for_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parts are joined in a thread, while another trainer begins at version 1."""
    held, go, join = threading.Event(), threading.Event(), update_queue.join_parts

    def slow(*args: Any) -> Any:
        held.set()
        assert go.wait(PATIENCE)
        return join(*args)

    monkeypatch.setattr(update_queue, "join_parts", slow)
    model, target = deltas.build(), deltas.build()
    async with WeightServer(URL, delta="always", chunk_nbytes=2**17) as server:
        async with trainer(server, strict=False) as old:
            for name in 4 * "ab":
                await old.send({name: torch.ones(SIZE // 4)})
            pulling = asyncio.ensure_future(WeightClient(server.url).pull())
            await until(held.is_set)
        async with bringing(server.url, model) as new:
            await new.connect()
            await until(lambda: described(server)["version"] == new.version)
            async with worker(server, model=target, delta="always") as below:
                go.set()
                await pulling
                for _ in range(3):
                    before = server.stats()["policy"].wire_nbytes
                    for each in model.buffers():
                        each[::97] += 1
                    await new.send()
                    await below.wait_for_version(new.version)
                    assert server.stats()["policy"].wire_nbytes - before < SIZE / 5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
async def test_every_state_is_the_trainers(seed: int, tmp_path: Path) -> None:
    """Random changes, cut and damaged links, and new runs of the trainer, over two servers."""
    rng, url, model = random.Random(seed), f"unix://{tmp_path / 'first'}", deltas.build()
    options: Any = {"delta": "always", "chunk_nbytes": 2**17, "stall_timeout": 3}
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(WeightServer(url, **options))
        proxies = [await stack.enter_async_context(FaultProxy(first.url))]
        second = await stack.enter_async_context(relay(proxies[0].url, **options))
        proxies.append(await stack.enter_async_context(FaultProxy(second.url)))
        proxies.append(await stack.enter_async_context(FaultProxy(url)))
        target = deltas.build()
        joining = worker(proxies[1].url, model=target, initial=False, delta="always")
        below = await stack.enter_async_context(joining)
        source = await stack.enter_async_context(bringing(proxies[2].url, model))
        await source.connect()
        for _ in range(40):
            event = rng.random()
            if event < 0.1:
                await source.aclose()
                source = await stack.enter_async_context(bringing(proxies[2].url, model))
                await source.connect()
            elif event < 0.3:
                proxy = rng.choice(proxies)
                harmed = [Plan(back=Faults(corrupt_at=rng.randrange(2 * SIZE)))]
                proxy.plan = lambda _, left=harmed: left.pop() if left else None
                proxy.cut()
            deltas.change(model, rng)
            with contextlib.suppress(PartialSyncError):
                await source.send()
            newest = source.stats().epoch, source.version
            await until(lambda newest=newest: (below.epoch, below.version) == newest)
            async with below.reading():
                assert deltas.digests(target) == deltas.digests(model)
