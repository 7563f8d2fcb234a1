"""The weight feed of an inference server, which follows its trainer, and goes on without it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from aiosync.server import WeightServer
from aiosync.serving import AdmissionGate, WeightFeed
from tests.schemes import _models as models
from tests.schemes._harness import PATIENCE, until
from tests.schemes.test_loading import Engine
from tests.support.waiting import free_address

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix://{tmp_path / 'trainer'}"


@contextlib.asynccontextmanager
async def trainer(source: nn.Module, address: str, workers: int | None = None, **options):
    scheme = aiosync.TCPWeightSyncScheme(address, **options)
    scheme.init_on_sender(model=source, num_workers=workers)
    async with scheme:
        await scheme.connect(timeout=PATIENCE)
        yield scheme


async def admitted(feed: WeightFeed, **options) -> int:
    """Return the version of a request that ends at once."""
    async with feed.request(**options) as version:
        return version


def feed_of(address: str, **options) -> WeightFeed:
    options.setdefault("max_pause", 0.1)
    return WeightFeed(aiosync.TCPWeightSyncScheme(address), **options)


async def test_requests_that_do_not_end_make_it_stale_and_a_newer_version_overtakes(
    address: str,
) -> None:
    source, target = models.linear(), models.linear()
    gate = AdmissionGate(swap_timeout=0.05)
    feed = feed_of(address, model=target, gate=gate)
    async with feed, trainer(source, address, 1) as scheme:
        await feed.ready.wait(timeout=PATIENCE)
        holder = asyncio.ensure_future(_hold(gate))
        await asyncio.sleep(0)
        handles = []
        for value in (2.0, 3.0):
            models.fill(source, value)
            handles.append(scheme.send_nowait())
            await until(lambda: feed.status.state == "stale")
        status = feed.status
        assert "1 requests that were running did not end" in status.reason
        assert status.stale_for > 0
        assert status.connected
        # Other requests are served while the switch cannot happen.
        assert await admitted(feed, timeout=PATIENCE) == 1
        holder.cancel()
        await handles[-1]
        await until(lambda: feed.status.state == "live")
        assert feed.version == 3
        async with feed.request():
            assert models.filled(target, 3.0)


async def _hold(gate: AdmissionGate) -> None:
    async with gate.request():
        await asyncio.sleep(3600)


async def test_a_refused_update_leaves_the_old_version_and_says_so(address: str) -> None:
    source, target = models.linear(), models.linear()
    async with feed_of(address, model=target) as feed, trainer(source, address, 1) as scheme:
        await feed.ready.wait(timeout=PATIENCE)
        with pytest.raises(aiosync.PartialSyncError, match="do not fit"):
            await scheme.send({"other": torch.ones(3)})
        status = feed.status
        assert (status.state, status.version, status.refused) == ("stale", 1, 2)
        assert "version 2 was refused" in status.reason
        async with feed.request() as version:
            assert version == 1
            assert models.filled(target, -1.0)
        models.fill(source, 4.0)
        await scheme.send()
        await until(lambda: feed.status.state == "live")
        assert (feed.version, feed.status.refused) == (3, None)


async def _outcome(handle: aiosync.SendHandle) -> None:
    with contextlib.suppress(aiosync.PartialSyncError, aiosync.TransportClosed):
        await handle


class Held(Engine):
    """An engine whose loads, from number ``first`` on, wait until ``go_on`` is set."""

    def __init__(self, first: int = 1) -> None:
        super().__init__()
        self.first, self.entered, self.go_on = first, threading.Event(), threading.Event()

    def load(self, weights) -> None:
        if self.loads + 1 >= self.first:
            self.entered.set()
            assert self.go_on.wait(PATIENCE)
        super().load(weights)


async def test_a_function_loads_in_a_thread_while_the_loop_goes_on(address: str) -> None:
    source, engine = models.linear(), Held(2)
    async with feed_of(address, load=engine.load) as feed, trainer(source, address, 1) as scheme:
        await feed.ready.wait(timeout=PATIENCE)
        handle = scheme.send_nowait()
        await until(engine.entered.is_set)
        # No request is admitted while the weights are being loaded.
        await refused(feed, "a switch of the weights")
        engine.go_on.set()
        await handle
        assert feed.version == 2
        assert "aiosync-apply" in engine.thread
    await until(lambda: not [t for t in threading.enumerate() if "aiosync-apply" in t.name])


async def test_over_shared_memory() -> None:
    source, target = models.linear(), models.linear()
    scheme = aiosync.SharedMemWeightSyncScheme()
    feed = WeightFeed(scheme, model=target, max_pause=0.05)
    scheme.init_on_sender(model=source, num_workers=1)
    async with feed:
        async with scheme:
            await scheme.connect(timeout=PATIENCE)
            await feed.ready.wait(timeout=PATIENCE)
            models.fill(source, 9.0)
            await scheme.send()
            assert feed.version == 2
        await until(lambda: feed.status.state == "stale")
        async with feed.request() as version:
            assert version == 2
            assert models.filled(target, 9.0)


async def test_a_new_trainer_comes_while_a_version_of_the_old_one_is_loaded(address: str) -> None:
    source, engine = models.linear(), Held(2)
    models.fill(source, 1.0)
    async with feed_of(address, load=engine.load) as feed:
        async with trainer(source, address, 1) as scheme:
            await feed.ready.wait(timeout=PATIENCE)
            first = feed.epoch
            models.fill(source, 5.0)
            handle = scheme.send_nowait()
            await until(engine.entered.is_set)
        await _outcome(handle)
        models.fill(source, 9.0)
        async with trainer(source, address):
            await until(lambda: feed.status.newest == 1)
            # The lag counts all versions of the new trainer.
            assert feed.lag == 1
            engine.go_on.set()
            seen = set()
            async with asyncio.timeout(PATIENCE):
                while feed.epoch == first:
                    async with feed.request() as version:
                        if feed.epoch == first:
                            seen.add((version, float(engine.weights["bias"][0])))
                    await asyncio.sleep(0)
            # No request was told that the old weights are version 1 of the new trainer.
            assert seen <= {(2, 5.0)}
            async with feed.request(epoch=feed.epoch) as version:
                assert version == 1
                assert (engine.weights["bias"] == 9.0).all()
            await until(lambda: feed.status.state == "live")


@pytest.mark.slow
async def test_a_function_that_does_not_return_holds_up_nobody_who_closes(address: str) -> None:
    source, engine = models.linear(), Held(2)
    async with trainer(source, address) as scheme:
        async with feed_of(address, load=engine.load) as feed:
            await feed.ready.wait(timeout=PATIENCE)
            handle = scheme.send_nowait()
            await until(engine.entered.is_set)
            started = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - started < 10
        engine.go_on.set()
        await _outcome(handle)
    await until(lambda: not [t for t in threading.enumerate() if "aiosync-apply" in t.name])


class Slow(nn.Module):
    """A model whose forward lasts until ``go_on`` is set."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner, self.entered, self.go_on = models.linear(), threading.Event(), threading.Event()
        models.fill(self, value)

    def forward(self) -> None:
        self.entered.set()
        assert self.go_on.wait(PATIENCE)


@pytest.mark.parametrize("copies", [False, True])
async def test_whoever_closes_waits_for_no_forward_of_another_thread(
    copies: bool, address: str
) -> None:
    source, target = Slow(1.0), Slow(-1.0)
    scheme = aiosync.TCPWeightSyncScheme(address, apply_copy=copies)
    feed = WeightFeed(scheme, model=target, gate=AdmissionGate(swap_timeout=None))
    async with trainer(source, address) as sender:
        async with feed:
            await feed.ready.wait(timeout=PATIENCE)
            forward = asyncio.create_task(asyncio.to_thread(target))
            await until(target.entered.is_set)
            models.fill(source, 2.0)
            handle = sender.send_nowait()
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(aiosync.AdmissionTimeout, match="a switch of the weights"):
                    while True:
                        async with feed.request(timeout=0.01):
                            await asyncio.sleep(0)
        assert not [each for each in threading.enumerate() if "aiosync-apply" in each.name]
        target.go_on.set()
        await forward
        # The model is as it was when the feed was closed.
        assert models.filled(target, 1.0)
        await _outcome(handle)


@pytest.mark.parametrize(
    "error", [RuntimeError, asyncio.CancelledError, CancelledError, SystemExit, StopIteration]
)
async def test_whatever_a_function_raises_refuses_the_update(error, address: str) -> None:
    source, engine = models.linear(), Engine()
    async with feed_of(address, load=engine.load) as feed, trainer(source, address, 1) as scheme:
        await feed.ready.wait(timeout=PATIENCE)
        engine.error = error()
        with pytest.raises(aiosync.PartialSyncError, match=error.__name__):
            await scheme.send()
        await until(lambda: feed.status.refused == 2)
        assert feed.version == 1
        engine.error = None
        await scheme.send()
        assert feed.version == 3
        assert feed.status.state == "live"


# -- a server that joins --------------------------------------------------------------------------


async def refused(feed: WeightFeed, text: str) -> None:
    with pytest.raises(aiosync.AdmissionTimeout, match=text):
        await admitted(feed, timeout=0.01)


async def test_a_server_that_joins_answers_once_it_is_as_new_as_its_source(address: str) -> None:
    source, engine = models.linear(), Held()
    # The gate begins with the version of a checkpoint.
    gate = AdmissionGate(initial_version=1)
    feed = feed_of(address, load=engine.load, gate=gate)
    async with feed:
        # Requests are admitted as long as the feed knows of no newer version.
        assert await admitted(feed, timeout=0) == 1
        async with trainer(source, address) as scheme:
            for _ in range(3):
                # The feed may not be connected yet, so a send may have no worker.
                await scheme.send()
            await until(engine.entered.is_set)
            status = feed.status
            assert status.state == "starting" and not feed.ready
            assert status.version == 1 and 1 <= status.waits_for <= scheme.version
            await refused(feed, "has version 1 and answers from")
            engine.go_on.set()
            async with feed.request(timeout=PATIENCE) as version:
                assert version >= status.waits_for
                assert (feed.epoch, feed.status.waits_for) == (scheme.epoch, 0)


async def test_a_part_of_what_the_source_has_is_not_enough(address: str) -> None:
    whole = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    engine = Held(2)
    sender = aiosync.TCPWeightSyncScheme(address, strict=False)
    sender.init_on_sender(weights=whole)
    scheme = aiosync.TCPWeightSyncScheme(address, strict=False)
    async with sender:
        await sender.connect(timeout=PATIENCE)
        await sender.send({"bias": torch.ones(2)})
        async with WeightFeed(scheme, load=engine.load) as feed:
            await until(engine.entered.is_set)
            assert (feed.version, feed.status.waits_for) == (1, 2)
            assert not feed.ready
            await refused(feed, "has version 1 and answers from version 2 on")
            engine.go_on.set()
            assert await admitted(feed, timeout=PATIENCE) == 2


async def test_a_source_that_dies_meanwhile_is_waited_for_no_more(address: str) -> None:
    source, engine = models.linear(), Engine()
    engine.error = RuntimeError("out of memory")
    feed = feed_of(address, load=engine.load, gate=AdmissionGate(initial_version=1))
    async with trainer(source, address) as scheme:
        for _ in range(4):
            await scheme.send()
        async with feed:
            await until(lambda: feed.status.refused)
            assert feed.status.waits_for == 5
            assert "version 5 was refused" in feed.status.reason
            await scheme.aclose()
            engine.error = None
            async with trainer(source, address) as successor:
                assert (await admitted(feed, timeout=PATIENCE), feed.epoch) == (1, successor.epoch)


async def test_a_successor_that_has_no_weights_yet_is_waited_for_no_more(address: str) -> None:
    async with feed_of(address, model=models.linear()) as feed:
        async with trainer(nn.Linear(3, 3), address):
            await until(lambda: feed.status.refused)
        scheme = aiosync.TCPWeightSyncScheme(address)
        scheme.init_on_sender(num_workers=None)
        async with scheme:
            await scheme.connect(timeout=PATIENCE)
            await until(lambda: scheme.worker_versions)
            await scheme.send(models.linear())
            assert (await admitted(feed, timeout=PATIENCE), feed.epoch) == (1, scheme.epoch)


@pytest.mark.slow
async def test_behind_a_weight_server_a_trainer_that_begins_anew_is_not_waited_for() -> None:
    engine, source = Engine(), models.linear()
    engine.error = RuntimeError("out of memory")
    options = {"token": "secret of 16 bytes", "dial": "both"}
    async with WeightServer("tcp://127.0.0.1:0", token=options["token"]) as server:
        async with trainer(source, server.url, **options) as scheme:
            for _ in range(4):
                await scheme.send()
        link = aiosync.TCPWeightSyncScheme(server.url, token=options["token"])
        async with WeightFeed(link, load=engine.load) as feed:
            await until(lambda: feed.status.refused)
            assert feed.status.waits_for == 5
            engine.error = None
            async with trainer(source, server.url, **options) as successor:
                assert (await admitted(feed, timeout=PATIENCE), feed.epoch) == (1, successor.epoch)


@pytest.mark.slow
async def test_a_weight_server_that_lost_its_weights_leaves_the_feed_stale() -> None:
    source, url = models.linear(), free_address()
    options = {"token": "secret of 16 bytes"}
    link = aiosync.TCPWeightSyncScheme(url, reconnect=None, **options)
    async with WeightFeed(link, model=models.linear()) as feed:
        async with WeightServer(url, **options), trainer(source, url, dial="both", **options):
            await feed.ready.wait(timeout=PATIENCE)
            first = feed.epoch
        await until(lambda: not feed.status.connected)
        async with WeightServer(url, **options):
            await until(lambda: feed.status.connected)
            assert feed.status.state == "stale"
            async with trainer(source, url, dial="both", **options) as scheme:
                await scheme.send()
                await until(lambda: feed.status.state == "live")
                assert feed.epoch == scheme.epoch != first


async def test_the_least_version_that_the_user_gives(address: str) -> None:
    source, target = models.linear(), models.linear()
    feed = feed_of(address, model=target, min_version=3)
    async with trainer(source, address) as scheme, feed:
        await until(lambda: feed.version == 1)
        assert feed.status.state == "starting" and feed.status.waits_for == 3
        await refused(feed, "has version 1 and answers from version 3 on")
        for _ in range(2):
            await scheme.send()
        assert await admitted(feed, timeout=PATIENCE) == 3
    for wrong in (0, True, 1.5, "3"):
        with pytest.raises(aiosync.ConfigError, match="min_version must be"):
            feed_of(address, model=target, min_version=wrong)


async def test_a_feed_that_is_started_again_joins_again(address: str) -> None:
    source, engine = models.linear(), Held()
    engine.go_on.set()
    feed = feed_of(address, load=engine.load)
    async with trainer(source, address) as scheme:
        for _ in range(2):
            await scheme.send()
        async with feed:
            assert await admitted(feed, timeout=PATIENCE) == 3
    engine.go_on.clear()
    engine.entered.clear()
    # This trainer counts from 1 again, so version 3 of the old one is not newer.
    async with trainer(source, address) as scheme:
        async with feed:
            await until(engine.entered.is_set)
            assert (feed.version, feed.status.waits_for) == (3, 1)
            await refused(feed, "has version 3 and answers from version 1 on")
            engine.go_on.set()
            assert (await admitted(feed, timeout=PATIENCE), feed.epoch) == (1, scheme.epoch)


async def test_the_statistics_outlive_a_run(address: str) -> None:
    source, feed = models.linear(), feed_of(address, model=models.linear())
    async with trainer(source, address) as scheme:
        async with feed:
            await feed.ready.wait(timeout=PATIENCE)
            await scheme.send()
            await until(lambda: feed.version == 2)
            for transport in scheme.sender_transports.values():
                transport.abort()
            await until(lambda: feed.status.reconnects == 1)
        before = feed.stats()
    assert (before.version, before.reconnects) == (2, 1)
    async with feed:
        found = await asyncio.to_thread(feed.stats)
        assert (found.epoch, found.version, found.newest_version) == (before.epoch, 2, 2)
        assert (found.lag, found.started, found.reconnects) == (0, before.started, 1)
        assert before.age < found.age < PATIENCE
        status = feed.status
        assert (status.version, status.newest, status.reconnects) == (2, 2, 1)
        assert status.age is not None
        # This trainer counts from 1 again.
        async with trainer(source, address) as scheme:
            await until(lambda: feed.epoch == scheme.epoch)
            found = feed.stats()
            assert (found.epoch, found.version, found.reconnects) == (scheme.epoch, 1, 1)


async def test_a_closed_feed_says_how_old_its_version_is(address: str) -> None:
    async with trainer(models.linear(), address) as scheme:
        feed = feed_of(address, model=models.linear())
        async with feed:
            await feed.ready.wait(timeout=PATIENCE)
        before, found, after = feed.status.age, feed.stats(), feed.status.age
        assert before is not None and after is not None
        assert 0 < before <= found.age <= after
        assert (found.version, found.epoch, found.lag) == (1, scheme.epoch, 0)


async def test_a_feed_that_is_started_again_before_it_has_ended(address: str) -> None:
    source, engine = models.linear(), Engine()
    feed = feed_of(address, load=engine.load)
    async with trainer(source, address) as scheme:
        await feed.start()
        await feed.ready.wait(timeout=PATIENCE)
        closing = asyncio.ensure_future(feed.aclose())
        await asyncio.sleep(0)
        async with feed:
            await closing
            await scheme.send()
            await until(lambda: feed.version == 2)
            assert feed.status.state == "live"


@pytest.mark.slow
async def test_a_load_that_outlasts_its_feed_ends_no_later_one(address: str) -> None:
    source, engine = models.linear(), Held(2)
    feed = feed_of(address, load=engine.load)
    async with trainer(source, address) as scheme:
        async with feed:
            await feed.ready.wait(timeout=PATIENCE)
            handle = scheme.send_nowait()
            await until(engine.entered.is_set)
        async with feed:
            await until(lambda: feed.status.connected)
            engine.go_on.set()
            await _outcome(handle)
            await until(lambda: engine.loads >= 3)
            await until(lambda: feed.status.state == "live")
            assert feed.status.connected


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True], ids=["gone", "another"])
async def test_a_load_that_outlasts_its_feed_names_its_version(
    comes_back: bool, address: str
) -> None:
    source, engine = models.linear(), Held(2)
    feed = feed_of(address, load=engine.load)
    async with trainer(source, address) as scheme:
        async with feed:
            await feed.ready.wait(timeout=PATIENCE)
            scheme.send_nowait()
            await until(engine.entered.is_set)
        scheme.abort()
    async with contextlib.AsyncExitStack() as stack:
        if comes_back:
            scheme = await stack.enter_async_context(trainer(source, address))
        await stack.enter_async_context(feed)
        if not comes_back:
            engine.go_on.set()
            assert await admitted(feed, timeout=PATIENCE) == 2
            return
        await until(lambda: feed.status.connected)
        engine.go_on.set()
        # The load leaves weights of the old source, for which the new one is not known.
        assert (await admitted(feed, timeout=PATIENCE), feed.epoch) == (1, scheme.epoch)


async def test_mistakes() -> None:
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:9")
    for wrong_target in ({}, {"model": nn.Linear(1, 1), "load": print}):
        with pytest.raises(aiosync.ConfigError, match="one of model, weights and load"):
            WeightFeed(scheme, **wrong_target)
    for name, value in (("max_pause", 0), ("max_pause", "5"), ("transform", 3)):
        with pytest.raises(aiosync.ConfigError, match=name):
            WeightFeed(scheme, model=nn.Linear(1, 1), **{name: value})
    for wrong in (aiosync.sync.TCPWeightSyncScheme(), aiosync.NoWeightSyncScheme(), "tcp://a:1"):
        with pytest.raises(aiosync.ConfigError, match="needs an async scheme"):
            WeightFeed(wrong, model=nn.Linear(1, 1))
    scheme.init_on_receiver(model=nn.Linear(1, 1))
    with pytest.raises(aiosync.ConfigError, match="has not been initialised"):
        WeightFeed(scheme, model=nn.Linear(1, 1))


async def test_a_gate_has_one_running_feed(address: str) -> None:
    """Two feeds would set one version in turn, and a request would get a model without weights."""
    gate = AdmissionGate()
    one, other = (feed_of(address, model=models.linear(), gate=gate) for _ in range(2))
    async with one:
        with pytest.raises(aiosync.ConfigError, match="a gate of its own"):
            await other.start()
        async with one:
            pass
        with pytest.raises(aiosync.ConfigError, match="a gate of its own"):
            await other.start()
    async with other, feed_of(address, model=models.linear()):
        pass
    async with one:
        pass


async def test_a_start_without_a_loop_does_not_count(address: str) -> None:
    source, target = models.linear(), models.linear()
    feed = feed_of(address, model=target)
    with pytest.raises(aiosync.LocalProtocolError, match="needs an asyncio event loop"):
        await asyncio.to_thread(feed.start().send, None)
    assert feed.status.state == "closed"
    async with feed, trainer(source, address, 1):
        assert await admitted(feed, timeout=PATIENCE) == 1


async def test_a_feed_whose_gate_was_closed_leaves_its_source(address: str) -> None:
    source, target = models.linear(), models.linear()
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with feed_of(address, model=target) as feed, trainer(source, address, 1) as scheme:
        await feed.ready.wait(timeout=PATIENCE)
        await asyncio.sleep(0.05)
        closed_at = time.monotonic()
        feed.gate.close()
        assert (feed.gate.closed, feed.status.state) == (True, "closed")
        assert "its gate was closed" in feed.status.reason
        report = await scheme.send()
        assert (report.acked, report.left) == (frozenset(), {0})
        await until(lambda: not feed.status.connected)
        assert feed.status.stale_for <= time.monotonic() - closed_at
        assert models.filled(target, -1.0)
    assert faults == []


async def test_a_scheme_that_only_pulls_is_refused(address: str) -> None:
    scheme = aiosync.TCPWeightSyncScheme(address, subscribe=False)
    with pytest.raises(aiosync.ConfigError, match="without subscribe=False"):
        WeightFeed(scheme, model=models.linear())
