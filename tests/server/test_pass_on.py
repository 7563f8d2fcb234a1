"""A server passes an update on while it arrives; no worker has a version before the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.errors import PartialSyncError
from aiosync.server import WeightClient, WeightServer
from aiosync.testing import FaultProxy, Faults, Plan
from aiosync.transports.address import Address
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import (
    Hello,
    LeafSpec,
    Manifest,
    ManifestMessage,
    Update,
    Welcome,
    checksum,
    state_checksum,
)
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import fill, holds
from tests.server._tools import URL, described, worker

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

CHUNK = 2**16
COUNT = 16
SIZE = COUNT * CHUNK
OPTIONS: dict[str, Any] = {"chunk_nbytes": CHUNK}
MANIFEST = Manifest((LeafSpec("weight", "float32", (1, SIZE // 4), 0, SIZE),), SIZE)


def large(value: float = 0.0) -> nn.Module:
    model = nn.Linear(SIZE // 4, 1, bias=False)
    fill(model, value)
    return model


@contextlib.asynccontextmanager
async def pushing(url: str, value: float, **options: Any) -> Any:
    """A trainer of a large model, over a proxy of its own that can stall."""
    async with FaultProxy(url) as proxy:
        options = {"dial": "both", "timeout": PATIENCE, **OPTIONS, **options}
        scheme = aiosync.TCPWeightSyncScheme(proxy.url, **options)
        scheme.it = large(value)
        scheme.init_on_sender("policy", model=scheme.it)
        async with scheme:
            await scheme.connect()
            yield scheme, proxy


def sent_nbytes(server: WeightServer) -> int:
    """Return the bytes that a server's only worker got."""
    found: int = described(server)["workers"][0]["sent_nbytes"]
    return found


@contextlib.asynccontextmanager
async def halted(url: str, server: WeightServer, least: int = SIZE // 4, **options: Any) -> Any:
    """A trainer whose second version stops on its way to the server, in the middle.

    Args:
        url: Address of the first server.
        server: The last one.
        least: Bytes that its only worker has got by then.
        options: Options of that worker.
    """
    async with pushing(url, 1.0) as (source, proxy):
        async with worker(server, model=large(), **options) as below:
            before = sent_nbytes(server)
            # The link begins anew, with a stall in the middle of the next version.
            stalls = [Plan(forward=Faults(stall_at=SIZE // 2))]
            proxy.plan = lambda _: stalls.pop() if stalls else None
            proxy.cut()
            await until(lambda: described(server)["trainer"] is None)
            await until(lambda: described(server)["trainer"] is not None)
            await until(lambda: [each.state for each in source.stats().workers] == ["ready"])
            fill(source.it, 2.0)
            sending = asyncio.ensure_future(source.send(source.it))
            await until(lambda: sent_nbytes(server) - before > least)
            try:
                yield source, proxy, below, sending
            finally:
                if not sending.done():
                    proxy.resume()
                await asyncio.wait({sending})
                sending.exception()


@pytest.mark.parametrize("stored", [False, True])
async def test_a_part_is_passed_on_before_the_rest_is_there(stored: bool, tmp_path: Path) -> None:
    options = {"store": tmp_path / "store"} if stored else {}
    async with WeightServer(URL, **OPTIONS, **options) as server:
        async with halted(server.url, server) as (_, proxy, below, sending):
            assert described(server)["version"] == below.version == 1
            assert holds(below, 1.0)
            async with worker(server, model=large()) as late:
                assert holds(late, 1.0)
                proxy.resume()
                assert (await sending).acked == {0}
                for scheme in (below, late):
                    await scheme.wait_for_version(2)
                    assert holds(scheme, 2.0)


@pytest.mark.parametrize("stored", [False, True])
async def test_changes_are_passed_on_before_the_rest_is_there(stored: bool, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    options = {"store": tmp_path / "store"} if stored else {}
    # Few bytes say that all weights are others.
    most = SIZE // 50
    async with WeightServer(URL, delta="always", **OPTIONS, **options) as server:
        async with halted(server.url, server, 300, delta="always") as (
            source,
            proxy,
            below,
            sending,
        ):
            assert described(server)["version"] == below.version == 1
            assert holds(below, 1.0)
            before = sent_nbytes(server)
            assert SIZE < before < SIZE + most
            proxy.resume()
            await sending
            await below.wait_for_version(2)
            assert holds(below, 2.0)
            assert before < sent_nbytes(server) < SIZE + most
            fill(source.it, 3.0)
            await source.send(source.it)
            await below.wait_for_version(3)
            assert holds(below, 3.0)
            assert sent_nbytes(server) < SIZE + 2 * most
            assert below.stats().reconnects == 0


async def test_a_half_version_is_no_base(tmp_path: Path) -> None:
    """The trainer begins its version anew; what was passed on of it is forgotten."""
    pytest.importorskip("zstandard")
    async with WeightServer(URL, delta="always", **OPTIONS) as server:
        async with halted(server.url, server, 300, delta="always") as (
            source,
            proxy,
            below,
            sending,
        ):
            proxy.cut()
            with contextlib.suppress(PartialSyncError):
                await sending
            await below.wait_for_version(2)
            assert holds(below, 2.0)
            for value in (3.0, 4.0, 5.0):
                fill(source.it, value)
                await source.send(source.it)
                await below.wait_for_version(source.version)
                assert holds(below, value)
            assert below.stats().reconnects == 0
            assert sent_nbytes(server) < 3 * SIZE


async def test_a_version_that_the_disk_refuses_reaches_no_worker(tmp_path: Path) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    async with WeightServer(URL, store=store, **OPTIONS) as server:
        async with halted(server.url, server) as (source, proxy, below, sending):
            store.rename(away)
            proxy.resume()
            with pytest.raises(PartialSyncError):
                await sending
            away.rename(store)
            assert described(server)["version"] == below.version == 1
            assert holds(below, 1.0)
            # A trainer that dials again brings the same version again.
            proxy.cut()
            await below.wait_for_version(2)
            assert holds(below, 2.0)
            fill(source.it, 3.0)
            await source.send(source.it)
            await below.wait_for_version(3)
            assert holds(below, 3.0)
            assert below.stats().reconnects == 0


async def test_a_part_of_the_names_is_stored_with_the_others(tmp_path: Path) -> None:
    """A server that follows another one counts on such updates."""
    store = tmp_path / "store"
    names = {name: torch.zeros(SIZE // 4) for name in ("a", "b")}
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(WeightServer(URL, **OPTIONS))
        following = {"model_ids": ["policy"], "upstream": first.url, "store": store}
        second = await stack.enter_async_context(WeightServer(URL, **OPTIONS, **following))
        source = aiosync.TCPWeightSyncScheme(
            first.url, dial="both", strict=False, timeout=PATIENCE, **OPTIONS
        )
        source.init_on_sender("policy")
        await stack.enter_async_context(source)
        await source.connect()
        await source.send(names)
        model = nn.ParameterDict(names)
        joining = worker(second, model=model, strict=False)
        below = await stack.enter_async_context(joining)
        for value in (1.0, 2.0):
            await source.send({"b": torch.full((SIZE // 4,), value)})
            await below.wait_for_version(source.version)
            assert (model["b"] == value).all() and (model["a"] == 0).all()
        pulled = (await WeightClient(second.url).pull("policy")).mapping()
        assert (pulled["b"] == 2).all() and (pulled["a"] == 0).all()


async def test_a_lost_link_goes_on_where_it_stopped() -> None:
    async with WeightServer(URL, **OPTIONS) as server:
        async with halted(server.url, server) as (source, proxy, below, _):
            proxy.cut()
            await below.wait_for_version(2)
            assert holds(below, 2.0)
            # The worker's link was not touched, and got every byte once.
            assert sent_nbytes(server) == 2 * SIZE
            assert below.stats().reconnects == 0
            fill(source.it, 3.0)
            await source.send(source.it)
            await below.wait_for_version(3)
            assert holds(below, 3.0)


async def test_another_run_takes_the_place_of_a_half_one() -> None:
    async with WeightServer(URL, **OPTIONS) as server:
        async with halted(server.url, server) as (source, proxy, below, sending):
            source.abort()
            proxy.cut()
            await asyncio.wait({sending})
            await until(lambda: described(server)["trainer"] is None)
            assert holds(below, 1.0)
            async with pushing(server.url, 5.0) as (new, _):
                await until(lambda: holds(below, 5.0))
                assert below.epoch == new.stats().epoch
                assert below.stats().reconnects == 0
                fill(new.it, 6.0)
                await new.send(new.it)
                await until(lambda: holds(below, 6.0))


async def test_a_newer_version_takes_the_place_of_a_half_one() -> None:
    """The trainer dials again with a newer version, while a worker reads the half one slowly."""
    async with WeightServer(URL, **OPTIONS) as server, FaultProxy(server.url) as slow:
        async with halted(server.url, server) as (source, proxy, below, sending):
            async with worker(slow.url, model=large()) as other:
                slow.stall()
                fill(source.it, 3.0)
                newer = asyncio.ensure_future(source.send(source.it))
                await asyncio.sleep(0.05)
                proxy.cut()
                await asyncio.gather(newer, sending, return_exceptions=True)
                await below.wait_for_version(3)
                slow.resume()
                await other.wait_for_version(3)
                assert holds(below, 3.0) and holds(other, 3.0)


@pytest.mark.parametrize("delta", ["off", "always"])
@pytest.mark.parametrize("seed", range(3))
async def test_every_state_is_the_trainers(seed: int, delta: Any, tmp_path: Path) -> None:
    """Cut and damaged links, new runs of the trainer, a store: over two servers."""
    if delta != "off":
        pytest.importorskip("zstandard")
    rng, url = random.Random(seed), f"unix://{tmp_path / 'first'}"
    options: Any = {**OPTIONS, "stall_timeout": 3.0, "delta": delta}
    store = tmp_path / "store" if seed == 2 else None
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(WeightServer(url, store=store, **options))
        proxies = [await enter(FaultProxy(url))]
        second = await enter(
            WeightServer(URL, model_ids=["policy"], upstream=proxies[0].url, **options)
        )
        proxies.append(await enter(FaultProxy(second.url)))
        crew = [
            await enter(worker(address, model=large(), initial=False, reconnect=None, delta=delta))
            for address in (proxies[1].url, second.url, url)
        ]
        run = await enter(contextlib.AsyncExitStack())
        source, proxy = await run.enter_async_context(pushing(url, 0.5, delta=delta))
        for number in range(1, 31):
            event, value = rng.random(), float(number)
            if event < 0.15:
                await run.aclose()
                source, proxy = await run.enter_async_context(pushing(url, value, delta=delta))
            harmed = rng.choice([*proxies, proxy])
            if event > 0.4:
                fault = Faults(**{rng.choice(["cut_at", "corrupt_at"]): rng.randrange(2 * SIZE)})
                plans = [Plan(forward=fault) if harmed is proxy else Plan(back=fault)]
                harmed.plan = lambda _, plans=plans: plans.pop() if plans else None
                harmed.cut()
            fill(source.it, value)
            with contextlib.suppress(PartialSyncError):
                await source.send(source.it)
            newest = source.stats().epoch, source.version
            for scheme in crew:
                await until(lambda one=scheme, newest=newest: (one.epoch, one.version) == newest)
                assert holds(scheme, value)


async def test_a_worker_that_leaves_in_the_middle_leaves_no_task() -> None:
    def writers() -> int:
        return sum("send to worker" in each.get_name() for each in asyncio.all_tasks())

    async with WeightServer(URL, **OPTIONS) as server:
        async with halted(server.url, server) as (_, _, below, _):
            assert writers() == 1
            await below.aclose()
            await until(lambda: not writers())


async def test_workers_that_ask_get_whole_versions() -> None:
    async with WeightServer(URL, **OPTIONS) as server:
        async with halted(server.url, server) as (_, proxy, _, _):
            async with worker(server, model=large(), subscribe=False) as asking:
                await asking.pull()
                assert holds(asking, 1.0)
                proxy.resume()
                await asking.pull(min_version=2)
                assert holds(asking, 2.0)
                assert not torch.isnan(asking.it.weight).any()


async def test_another_model_gets_the_served_version_while_the_rest_is_missing() -> None:
    async with WeightServer(URL, **OPTIONS) as server:
        async with halted(server.url, server) as (_, proxy, below, sending):
            for _ in range(2):
                below.model = None
                below.model = below.it = large()
                assert await below.pull(timeout=PATIENCE / 2) == 1
                assert holds(below, 1.0)
            proxy.resume()
            await sending
            await below.wait_for_version(2)
            assert holds(below, 2.0)
            assert below.stats().reconnects == 0


@contextlib.asynccontextmanager
async def raw_trainer(url: str) -> Any:
    """The link of a trainer that says what it likes, as a server has let it in."""
    none = Credentials(token=None)
    async with await TCPTransport.connect(Address.parse(url), credentials=none) as link:
        await link.send(Hello(role="sender", model_id="policy", pid=os.getpid(), epoch=5))
        assert isinstance((await link.recv()).message, Hello)
        await link.send(Welcome(5, 1, 0))
        await link.send(ManifestMessage(MANIFEST))
        yield link


async def send_chunks(
    link: Any, version: int, value: float, stop: int = COUNT, *, start: int = 0
) -> None:
    """Send chunks of a version whose elements are all ``value``; by default all of them."""
    chunk = torch.full((CHUNK // 4,), value).numpy().tobytes()
    sums = [checksum(chunk)] * COUNT
    for index in range(start, stop):
        state = state_checksum(MANIFEST.digest, sums) if index == COUNT - 1 else None
        place = (index, COUNT)
        update = Update(5, version, MANIFEST.digest, chunk=place, checksum=sums[index], state=state)
        await link.send(update, [chunk])


async def test_a_version_that_begins_anew_is_not_mixed_with_its_first_half() -> None:
    """Bytes that a worker may have are not written again, whatever a trainer sends."""
    async with WeightServer(URL, **OPTIONS) as server:
        async with raw_trainer(server.url) as link:
            await send_chunks(link, 1, 1.0)
            await until(lambda: described(server)["version"] == 1)
            joining = worker(server, model=large())
            async with joining as below, contextlib.AsyncExitStack() as stack:
                before = sent_nbytes(server)
                await send_chunks(link, 2, 2.0, COUNT // 2)
                await until(lambda: sent_nbytes(server) - before >= SIZE // 2)
                # A chunk that does not follow: the server counts on no byte of the version.
                await link.send(Update(5, 2, MANIFEST.digest, chunk=(3, 4), checksum=bytes(16)))
                await until(lambda: described(server)["trainer"] is None)
                again = await stack.enter_async_context(raw_trainer(server.url))
                await send_chunks(again, 2, 3.0)
                await below.wait_for_version(2)
                assert holds(below, 3.0)


async def test_a_trainer_that_stalls_and_begins_anew_costs_no_worker_its_link() -> None:
    """The bytes of the second attempt are as many as those of the first, which no worker took."""
    stall = 0.5
    async with WeightServer(URL, stall_timeout=stall, **OPTIONS) as server:
        async with contextlib.AsyncExitStack() as stack:
            async with raw_trainer(server.url) as link:
                await send_chunks(link, 1, 1.0)
                await until(lambda: described(server)["version"] == 1)
                below = await stack.enter_async_context(worker(server, model=large()))
                before = sent_nbytes(server)
                await send_chunks(link, 2, 2.0, COUNT // 2)
                await until(lambda: sent_nbytes(server) - before >= SIZE // 2)
                await asyncio.sleep(2.5 * stall)
            await until(lambda: described(server)["trainer"] is None)
            again = await stack.enter_async_context(raw_trainer(server.url))
            await send_chunks(again, 2, 2.0, 1)
            # A single chunk is not passed on yet, so that the worker owes no answer.
            await asyncio.sleep(1.5 * stall)
            await send_chunks(again, 2, 2.0, start=1)
            await below.wait_for_version(2)
            assert holds(below, 2.0)
            assert below.stats().reconnects == 0


async def test_a_follower_that_asks_is_answered_while_the_rest_is_missing() -> None:
    async with WeightServer(URL, **OPTIONS) as server:
        async with halted(server.url, server) as (_, proxy, below, sending):
            for _ in range(3):
                async with asyncio.timeout(PATIENCE / 2):
                    await below.pull()
                assert below.version == 1 and holds(below, 1.0)
            asking = asyncio.ensure_future(below.pull(min_version=2))
            proxy.resume()
            await sending
            await asking
            assert holds(below, 2.0)
            assert below.stats().reconnects == 0
