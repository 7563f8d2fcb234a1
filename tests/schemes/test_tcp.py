"""Weights over TCP and Unix sockets, with both sides in this process and real links between."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import math
import os
import pickle
import shutil
import socket
import ssl
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.schemes._staging import Staging
from aiosync.server import WeightServer
from aiosync.tensors import FlatBuffer
from aiosync.testing import FaultProxy, Faults, Plan, assert_no_leaks, cancel_at_every_await
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import Self

    from aiosync.schemes._peer import Peer

pytestmark = pytest.mark.one_loop

PATIENCE = harness.PATIENCE
TCP = "tcp://127.0.0.1:0"


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a sender may listen, of each kind."""
    if request.param == "tcp":
        yield TCP
        return
    folder = tempfile.mkdtemp(prefix="aiosync-tests-")  # tmp_path is too long for a socket
    yield f"unix://{folder}/socket"
    assert os.listdir(folder) == []  # nobody left a socket there
    shutil.rmtree(folder)


def known(url: str) -> str:
    """The same address, with a port that is free now."""
    if url != TCP:
        return url
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def make(address: str = TCP, **options: Any) -> aiosync.TCPWeightSyncScheme:
    return aiosync.TCPWeightSyncScheme(address, **{"timeout": PATIENCE, **options})


def mebibyte() -> nn.Module:
    model = nn.Module()
    model.block = nn.Parameter(torch.zeros(2**18))
    return model


class Stage:
    """A connected sender with version 1, and receivers as the test adds them."""

    def __init__(self, url: str, build: Any = models.linear, **options: Any) -> None:
        self.url, self.build, self.options = url, build, options
        self.receivers: list[aiosync.TCPWeightSyncScheme] = []
        self.targets: list[Any] = []
        self.init: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        await self.start_sender(1.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for receiver in self.receivers:
            await receiver.aclose()
        await self.sender.aclose()

    async def start_sender(self, value: float | None = None) -> None:
        self.source = self.build()
        if value is not None:
            models.fill(self.source, value)
        self.sender = make(self.url, **self.options)
        self.sender.init_on_sender(model=self.source if value is not None else None, **self.init)
        await self.sender.connect()

    def receiver(
        self, idx: int | None = None, through: FaultProxy | None = None, **options: Any
    ) -> aiosync.TCPWeightSyncScheme:
        address = self.sender.address if through is None else through.url
        receiver = make(address, **{**self.options, **options})
        target = self.build()
        receiver.init_on_receiver(model=target, worker_idx=idx)
        self.receivers.append(receiver)
        self.targets.append(target)
        return receiver

    async def add(self, *args: Any, **options: Any) -> aiosync.TCPWeightSyncScheme:
        receiver = self.receiver(*args, **options)
        await receiver.connect()
        return receiver

    async def send(self, value: float, **options: Any) -> aiosync.SendReport:
        models.fill(self.source, value)
        return await self.sender.send(**options)

    def peer(self, idx: int = 0) -> Peer:
        assert self.sender._sender is not None
        return self.sender._sender.peers[idx]

    async def gone(self, idx: int = 0) -> None:
        """Until the sender has noticed that a link is lost."""
        await harness.until(lambda: idx not in self.sender.worker_versions)


@contextlib.asynccontextmanager
async def away(proxy: FaultProxy, stage: Stage) -> AsyncIterator[None]:
    """Nobody comes through the proxy inside."""
    upstream = proxy.upstream
    proxy.upstream = "unix:///nowhere/at/all"
    proxy.cut()
    await stage.gone()
    yield
    proxy.upstream = upstream


async def back(stage: Stage, receiver: aiosync.TCPWeightSyncScheme, idx: int = 0) -> None:
    """Until a receiver that was cut off has its link again."""
    await harness.until(lambda: receiver.reconnects == 1 and idx in stage.sender.worker_versions)


# -- who comes when ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_late_joiners_get_the_newest_version_and_disturb_nobody(url) -> None:
    async with Stage(url) as stage:
        first = await stage.add()
        await stage.send(2.0)
        sent = stage.peer(0).sent_nbytes
        assert sent > 0
        late = await stage.add()
        assert (late.worker_idx, late.version, first.version) == (1, 2, 2)
        assert models.filled(stage.targets[1], 2.0)
        assert stage.peer(0).sent_nbytes == sent
        assert stage.peer(1).sent_nbytes == sent // 2  # one version, not two
        report = await stage.send(3.0)
        assert report.acked == {0, 1}
        assert all(models.filled(target, 3.0) for target in stage.targets)


@pytest.mark.asyncio
async def test_a_worker_may_dial_long_before_there_is_a_trainer(url) -> None:
    address = known(url)
    target = models.linear()
    async with FaultProxy(address) as proxy, make(proxy.url) as early:
        early.init_on_receiver(model=target)
        joining = asyncio.ensure_future(early.connect())
        await harness.until(lambda: proxy.connections >= 3)  # refused, and tried again
        async with Stage(address):
            await joining
            assert early.version == 1
            assert models.filled(target, 1.0)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_worker_may_dial_between_init_and_connect_of_the_sender(url) -> None:
    sender, target = make(url), models.linear()
    source = models.linear()
    models.fill(source, 5.0)
    sender.init_on_sender(model=source, num_workers=1)
    receiver = copy.copy(sender)  # finds the port in it
    async with sender, receiver:
        receiver.init_on_receiver(model=target)
        joining = asyncio.ensure_future(receiver.connect())
        await asyncio.sleep(0.1)  # it waits at the bound socket, whom nobody answers yet
        assert not joining.done()
        await sender.connect()
        await joining
        assert models.filled(target, 5.0)
        assert sender.worker_versions == {0: 1}


@pytest.mark.asyncio
async def test_connect_says_where_nobody_is() -> None:
    address = known(TCP)
    receiver = make(address)
    receiver.init_on_receiver(model=models.linear())
    with pytest.raises(aiosync.ConnectTimeout, match=address) as caught:
        await receiver.connect(timeout=0.1)
    assert isinstance(caught.value.__cause__, aiosync.ConnectError)


# -- links that are lost -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_nothing_is_sent_again_to_who_has_it(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy)
        other = await stage.add()
        old, others = stage.peer(0), stage.peer(1).sent_nbytes
        proxy.cut()
        await harness.until(lambda: receiver.reconnects == 1 and stage.peer(0) is not old)
        assert receiver.version == 1
        assert receiver.worker_idx == 0
        assert stage.sender.worker_versions == {0: 1, 1: 1}
        report = await stage.send(2.0)
        assert report.acked == {0, 1}
        assert not report.lost
        # Only version 2 went over the new link, and the other worker noticed nothing.
        assert stage.peer(0).sent_nbytes == stage.peer(1).sent_nbytes - others
        assert other.reconnects == 0
        assert models.filled(stage.targets[0], 2.0)


@pytest.mark.asyncio
async def test_who_comes_back_gets_the_version_that_is_new(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy)
        async with away(proxy, stage):
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await stage.send(2.0)
            assert set(caught.value.failed) == {0}
            other = await stage.add(1)
            report = await stage.send(3.0)  # it was reported once
            assert (report.acked, set(report.lost)) == ({1}, {0})
            await other.aclose()
            await stage.gone(1)
        await back(stage, receiver)
        assert await receiver.wait_for_version(3) == 3
        assert models.filled(stage.targets[0], 3.0)
        await harness.until(lambda: stage.sender.worker_versions == {0: 3})
        assert stage.peer().outbox.stray == 0


@pytest.mark.asyncio
async def test_an_acknowledgement_that_was_lost_does_no_harm(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        trial = await stage.add(0, through=proxy)
        await harness.until(lambda: stage.sender.worker_versions == {0: 1})
        upto = proxy.bytes_forward  # the handshake, and the acknowledgement of one version
        await trial.aclose()
        await stage.gone()
        proxy.plan = Plan(forward=Faults(stall_at=upto))
        receiver = await stage.add(0, through=proxy)
        await harness.until(lambda: stage.sender.worker_versions == {0: 1})
        models.fill(stage.source, 2.0)
        handle = stage.sender.send_nowait()
        await receiver.wait_for_version(2)
        assert stage.sender.worker_versions == {0: 1}
        proxy.plan = None
        proxy.cut()
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await handle
        assert isinstance(caught.value.failed[0], aiosync.TransportError)
        await back(stage, receiver)
        assert stage.sender.worker_versions == {0: 2}
        assert stage.peer().sent_nbytes == 0
        assert (await stage.send(3.0)).acked == {0}


@pytest.mark.asyncio
async def test_a_staged_update_outlives_its_link(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy, apply="manual")
        models.fill(stage.source, 2.0)
        handle = stage.sender.send_nowait()
        await harness.until(lambda: receiver._receiver.has_staged)
        proxy.cut()
        with pytest.raises(aiosync.PartialSyncError):
            await handle
        await back(stage, receiver)
        # It did not say that it has version 2, so that came again, and was no news to it.
        await harness.until(lambda: stage.peer().received_version == 2)
        assert (receiver.version, receiver.lag) == (1, 1)
        assert receiver.apply_pending() == 2
        assert models.filled(stage.targets[0], 2.0)
        await harness.until(lambda: stage.sender.worker_versions == {0: 2})
        assert receiver.apply_pending() is None


@pytest.mark.asyncio
async def test_an_update_applied_while_the_link_was_away_is_told_on_the_next(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy, apply="manual")
        models.fill(stage.source, 2.0)
        stage.sender.send_nowait(timeout=math.inf)._future.add_done_callback(
            lambda f: f.exception()
        )
        await harness.until(lambda: receiver._receiver.has_staged)
        async with away(proxy, stage):
            assert receiver.apply_pending() == 2
        await back(stage, receiver)
        assert stage.sender.worker_versions == {0: 2}
        assert stage.peer().sent_nbytes == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_worker_takes_over_from_its_own_half_open_link_and_from_no_other(
    url, monkeypatch
) -> None:
    monkeypatch.setattr("aiosync.schemes._handshake._GRACE_SECONDS", 0.2)
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(0, through=proxy)
        old = stage.peer()
        proxy.stall()  # whatever the worker's end does, the trainer does not see it
        with pytest.raises(aiosync.ConfigError, match="worker_idx 0 is taken"):
            await stage.add(0)
        assert stage.peer() is old
        receiver._receiver.transport.abort()
        await back(stage, receiver)
        await harness.until(lambda: stage.peer() is not old)
        assert (await stage.send(2.0)).acked == {0}
        assert receiver.version == 2
        with pytest.raises(aiosync.ConfigError, match="worker_idx 0 is taken"):
            await stage.add(0)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_link_that_idled_for_longer_than_reconnect_is_got_back_twice() -> None:
    async with Stage(TCP) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy, reconnect=1.0)
        proxy.cut()
        await back(stage, receiver)
        await asyncio.sleep(1.3)  # nothing is sent, as it has the newest version
        proxy.cut()
        await harness.until(lambda: receiver.reconnects == 2)
        await harness.until(lambda: 0 in stage.sender.worker_versions)
        assert (await stage.send(2.0)).acked == {0}


@pytest.mark.asyncio
async def test_a_link_is_given_up_after_reconnect_seconds(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy, reconnect=0.1)
        async with away(proxy, stage):
            with pytest.raises(aiosync.PeerClosed) as caught:
                await receiver.receive(timeout=PATIENCE)
        assert "0.1 s" in str(caught.value.__cause__)
        assert models.filled(stage.targets[0], 1.0)  # the model keeps what it has


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_trainer_that_answers_nothing_does_not_stretch_reconnect() -> None:
    async with Stage(TCP) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy, reconnect=0.5, subscribe=False)
        # All that came is the handshake; the next time all but the last byte of its Welcome.
        proxy.plan = Plan(back=Faults(stall_at=proxy.bytes_back - 1))
        began = asyncio.get_running_loop().time()
        proxy.cut()
        with pytest.raises(aiosync.PeerClosed):
            await receiver.receive(timeout=PATIENCE)
        assert asyncio.get_running_loop().time() - began < 10


@pytest.mark.asyncio
async def test_reconnect_0_ends_with_the_first_link(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy, reconnect=0)
        proxy.cut()
        with pytest.raises(aiosync.PeerClosed):
            await receiver.wait_for_version(2)
        await stage.gone()
        assert receiver.reconnects == 0
        assert proxy.connections == 1


# -- transfers that are cut ----------------------------------------------------------------------

CHUNK = 2**14


class Blocks(nn.Module):
    """20 chunks of random numbers, an extra state, a buffer and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Parameter(torch.randn(20 * CHUNK // 4))
        self.more = models.Tied()
        self.extra = models.Extra()
        self.register_buffer("count", torch.randint(0, 100, (3,)))


def same(left: nn.Module, right: nn.Module) -> bool:
    mine, others = left.state_dict(), right.state_dict()
    tensors = [name for name in mine if isinstance(mine[name], torch.Tensor)]
    return (
        mine.keys() == others.keys()
        and all(torch.equal(mine[name], others[name]) for name in tensors)
        and left.extra.counter == right.extra.counter
    )


class Cuttable(Stage):
    """A sender whose first link is cut in the middle of version 2."""

    def __init__(self, url: str) -> None:
        super().__init__(url, Blocks, chunk_nbytes=CHUNK)

    async def __aenter__(self) -> Self:
        await self.start_sender()
        self.source = Blocks()
        self.source.extra.counter = 7
        self.proxy = FaultProxy(self.sender.address)
        await self.proxy.start()
        self.proxy.plan = lambda number: (
            Plan(back=Faults(cut_at=11 * CHUNK)) if number == 0 else None
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self.proxy.aclose()


@pytest.mark.asyncio
async def test_a_cut_transfer_goes_on_where_it_stopped(url) -> None:
    async with Cuttable(url) as stage:
        receiver = await stage.add(through=stage.proxy)
        with pytest.raises(aiosync.PartialSyncError):
            await stage.sender.send(stage.source)
        staging = receiver._receiver._staging
        landing = staging._landing
        assert landing is not None
        await back(stage, receiver)
        await receiver.wait_for_version(1)
        stream = stage.peer().stream
        assert stream is not None
        assert stream.resumed_nbytes in range(5 * CHUNK, 11 * CHUNK, CHUNK)
        assert stream.sent_nbytes + stream.resumed_nbytes == landing.nbytes
        assert same(stage.source, stage.targets[0])
        assert receiver._receiver._current.flat is landing  # one buffer for both halves
        assert receiver.damaged_chunks == 0
        # And the next one needs all of it, in another buffer, and then in the first again.
        await stage.sender.send(stage.source)
        second = receiver._receiver._current.flat
        await stage.sender.send(stage.source)
        assert receiver._receiver._current.flat in (landing, second)
        assert same(stage.source, stage.targets[0])


@pytest.mark.asyncio
async def test_a_cut_transfer_gives_way_to_a_newer_version(url) -> None:
    async with Cuttable(url) as stage:
        receiver = await stage.add(through=stage.proxy)
        with pytest.raises(aiosync.PartialSyncError):
            await stage.sender.send(stage.source)
        landing = receiver._receiver._staging._landing
        async with away(stage.proxy, stage):
            newer = Blocks()
            newer.extra.counter = 8
            with contextlib.suppress(aiosync.PartialSyncError):
                await stage.sender.send(newer)
        await back(stage, receiver)
        await receiver.wait_for_version(2)
        stream = stage.peer().stream
        assert stream is not None
        assert (stream.resumed_nbytes, stream.sent_nbytes) == (0, landing.nbytes)
        assert same(newer, stage.targets[0])
        assert receiver._receiver._current.flat is landing


@pytest.mark.asyncio
async def test_the_first_version_is_resumed_within_connect(url) -> None:
    async with Cuttable(url) as stage:
        await stage.sender.send(stage.source)  # kept for who comes later
        receiver = await stage.add(through=stage.proxy)
        assert receiver.version == 1
        assert receiver.reconnects == 1
        assert stage.peer().stream.resumed_nbytes > 0
        assert same(stage.source, stage.targets[0])


@pytest.mark.asyncio
async def test_a_damaged_chunk_comes_again(url) -> None:
    async with Cuttable(url) as stage:
        stage.proxy.plan = Plan(back=Faults(corrupt_at=9 * CHUNK))
        receiver = await stage.add(through=stage.proxy)
        report = await stage.sender.send(stage.source)
        assert report.acked == {0}
        assert receiver.damaged_chunks == stage.sender.damaged_chunks == 1
        assert receiver.reconnects == 0
        assert same(stage.source, stage.targets[0])


@pytest.mark.asyncio
async def test_looking_while_a_damaged_chunk_is_awaited_changes_nothing(url, monkeypatch) -> None:
    seen = []

    def take_part(staging, received):
        part = original(staging, received)
        seen.append(receiver._receiver.partial_since)  # what a feed's status and /readyz ask
        return part

    original = Staging.take_part
    async with Cuttable(url) as stage:
        stage.proxy.plan = Plan(back=Faults(corrupt_at=9 * CHUNK))
        receiver = await stage.add(through=stage.proxy)
        monkeypatch.setattr(Staging, "take_part", take_part)
        report = await stage.sender.send(stage.source)
        assert report.acked == {0}
        assert (receiver.damaged_chunks, receiver.reconnects) == (1, 0)
        assert same(stage.source, stage.targets[0])
    assert None not in seen[:-1]
    assert seen[-1] is None


# -- asking --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_pull_gets_the_newest_and_nothing_comes_unasked(url) -> None:
    async with Stage(url) as stage:
        puller = await stage.add(subscribe=False)
        subscriber = await stage.add()
        assert puller.version == 0
        assert not puller.ready
        report = await stage.send(2.0)
        assert report.acked == {1}
        await stage.send(3.0)
        assert (puller.version, subscriber.version) == (0, 3)
        assert stage.peer(0).sent_nbytes == 0
        assert await puller.pull() == 3
        assert puller.ready
        assert models.filled(stage.targets[0], 3.0)
        sent = stage.peer(0).sent_nbytes
        assert await puller.pull() == 3  # a word is enough
        assert await subscriber.pull() == 3
        assert stage.peer(0).sent_nbytes == sent
        assert (await puller.receive(timeout=0)).version == 3


@pytest.mark.asyncio
async def test_pull_of_nothing_is_version_0(url) -> None:
    async with make(url) as sender:
        sender.init_on_sender()
        await sender.connect()
        for subscribe in (True, False):
            async with make(sender.address, subscribe=subscribe) as receiver:
                receiver.init_on_receiver(model=models.linear())
                await receiver.connect()
                assert await receiver.pull() == 0
                assert not receiver.ready


@pytest.mark.asyncio
async def test_pull_waits_for_a_version_to_come(url) -> None:
    async with Stage(url) as stage:
        puller = await stage.add(subscribe=False)
        with pytest.raises(aiosync.RecvTimeout, match="no version from 3 on"):
            await puller.pull(min_version=3, timeout=0.02)
        pulling = asyncio.ensure_future(puller.pull(min_version=3))
        await harness.until(lambda: stage.peer().wanted == 3)
        await stage.send(2.0)
        assert not pulling.done()
        assert puller.version == 0
        await stage.send(3.0)
        assert await pulling == 3
        await stage.send(4.0)
        assert puller.version == 3
        assert await puller.pull(min_version=2) == 4


@pytest.mark.asyncio
async def test_two_pulls_at_a_time_both_get_what_they_ask_for(url) -> None:
    async with Stage(url) as stage:
        puller = await stage.add(subscribe=False)
        patient = asyncio.ensure_future(puller.pull(min_version=2))
        await harness.until(lambda: stage.peer().wanted == 2)
        assert await puller.pull() == 1
        assert not patient.done()
        await stage.send(2.0)
        async with asyncio.timeout(5):
            assert await patient == 2


@pytest.mark.slow
@pytest.mark.asyncio
async def test_pull_waits_for_a_version_that_is_on_its_way() -> None:
    async with Stage(TCP, models.medium, chunk_nbytes=2**16) as stage:
        async with FaultProxy(stage.sender.address) as proxy:
            receiver = await stage.add(through=proxy)
            proxy.stall()
            models.fill(stage.source, 2.0)
            handle = stage.sender.send_nowait()
            pulling = asyncio.ensure_future(receiver.pull())
            await asyncio.sleep(0)
            proxy.resume()
            assert await pulling == 2
            assert models.filled(stage.targets[0], 2.0)
            await handle


@pytest.mark.asyncio
async def test_pull_of_a_version_that_the_model_refused_says_so(url) -> None:
    async with Stage(url, models.extra) as stage:
        receiver = await stage.add()
        puller = await stage.add(subscribe=False)
        stage.source.counter = -1
        with pytest.raises(aiosync.PartialSyncError):
            await stage.sender.send()
        for each in (receiver, puller, puller):
            with pytest.raises(aiosync.ApplyError, match="no good here"):
                await each.pull(timeout=5)
        assert receiver.version == 1
        stage.source.counter = 1
        await stage.sender.send()
        assert await receiver.pull() == await puller.pull() == 3


@pytest.mark.asyncio
async def test_a_refused_version_is_refused_for_the_same_reason_on_the_next_link(url) -> None:
    async with Stage(url, models.extra) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy)
        puller = await stage.add(1, subscribe=False)
        stage.source.counter = -1
        with pytest.raises(aiosync.PartialSyncError):
            await stage.sender.send()
        proxy.cut()
        await back(stage, receiver)
        workers = stage.sender._sender.workers
        await harness.until(lambda: 0 in workers._failures)
        assert "no good here" in str(workers._failures[0])
        with pytest.raises(aiosync.ApplyError, match="no good here"):
            await receiver.pull(timeout=5)
        with pytest.raises(aiosync.ApplyError, match="no good here"):
            await puller.pull(timeout=5)
        puller._receiver.transport.abort()
        await harness.until(lambda: puller.reconnects == 1 and 1 in stage.sender.worker_versions)
        with pytest.raises(aiosync.ApplyError, match="no good here"):
            await puller.pull(timeout=5)
        assert stage.sender.worker_versions == {0: 1, 1: 0}
        stage.source.counter = 1
        assert (await stage.sender.send()).acked == {0}
        assert receiver.version == 3


@pytest.mark.asyncio
async def test_send_to_pullers_only(url) -> None:
    async with Stage(url) as stage:
        puller = await stage.add(subscribe=False)
        report = await stage.send(2.0)
        assert (report.acked, report.skipped) == (set(), {})
        assert stage.peer().sent_nbytes == 0
        report = await stage.send(3.0, worker_ids=[0])  # by name it gets it unasked
        assert report.acked == {0}
        assert puller.version == 3
        assert models.filled(stage.targets[0], 3.0)


@pytest.mark.asyncio
async def test_a_puller_that_leaves_fails_no_send(url) -> None:
    async with Stage(url) as stage:
        await stage.add()
        puller = await stage.add(subscribe=False)
        await puller.pull()
        await puller.aclose()
        await stage.gone(1)
        report = await stage.send(2.0)
        assert report.acked == {0}
        alone = stage.receivers[0]
        await alone.aclose()
        await stage.gone(0)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await stage.send(3.0)
        assert set(caught.value.failed) == {0}


@pytest.mark.asyncio
async def test_sends_without_anybody_but_a_puller_that_left_succeed(url) -> None:
    async with Stage(url) as stage:
        puller = await stage.add(subscribe=False)
        await puller.aclose()
        await stage.gone()
        assert (await stage.send(2.0)).acked == set()
        assert (await stage.send(3.0)).version == 3


@pytest.mark.asyncio
async def test_pull_applies_where_apply_is_manual(url) -> None:
    async with Stage(url) as stage:
        puller = await stage.add(subscribe=False, apply="manual")
        receiver = await stage.add(apply="manual")
        assert await puller.pull() == 1
        handle = stage.sender.send_nowait()
        await harness.until(lambda: receiver._receiver.has_staged)
        assert await receiver.pull() == 2
        assert (await handle).acked == {1}
        assert await puller.pull() == 2


@pytest.mark.asyncio
async def test_pull_outlives_a_link(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        puller = await stage.add(through=proxy, subscribe=False)
        waits = asyncio.ensure_future(puller.pull(min_version=3))
        await harness.until(lambda: stage.peer().wanted == 3)
        async with away(proxy, stage):
            now = asyncio.ensure_future(puller.pull())
            await asyncio.sleep(0)
            assert not now.done()
        await back(stage, puller)
        assert await now == 1
        await stage.send(2.0)
        assert not waits.done()
        await stage.send(3.0)
        assert await waits == 3
        assert models.filled(stage.targets[0], 3.0)


# -- ready ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_ready_on_both_sides(url) -> None:
    async with make(url) as sender:
        source = models.linear()
        sender.init_on_sender(num_workers=2)
        assert not sender.ready
        with pytest.raises(aiosync.LocalProtocolError):
            await sender.ready
        receivers = [copy.copy(sender) for _ in range(2)]
        async with receivers[0], receivers[1]:
            for receiver in receivers:
                receiver.init_on_receiver(model=models.linear())
                assert not receiver.ready
            await asyncio.gather(sender.connect(), *(each.connect() for each in receivers))
            assert not sender.ready.is_set()
            assert repr(sender.ready) == "<not ready>"
            for scheme in (sender, *receivers):
                with pytest.raises(aiosync.RecvTimeout, match="no complete version"):
                    await scheme.ready.wait(timeout=0.01)
            ready = [asyncio.ensure_future(each.ready.wait()) for each in (sender, *receivers)]
            await asyncio.sleep(0)
            await sender.send(source, worker_ids=1)
            assert receivers[1].ready.is_set() or receivers[0].ready.is_set()
            assert not sender.ready
            await sender.send(source)
            await asyncio.gather(*ready)
            assert all(each.ready for each in (sender, *receivers))
            await receivers[0].ready
            await receivers[0].aclose()
            await harness.until(lambda: not sender.ready)


# -- who dials -----------------------------------------------------------------------------------


@contextlib.contextmanager
def addresses(count: int, kind: str) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(prefix="aiosync-tests-") as folder:
        if kind == "unix":
            yield [f"unix://{folder}/{idx}" for idx in range(count)]
        else:
            yield [known(TCP) for _ in range(count)]


def worker(where: list[str], idx: int, **options: Any) -> tuple[Any, nn.Module]:
    receiver, target = make(where, dial="sender", **options), models.linear()  # type: ignore[arg-type]
    receiver.init_on_receiver(model=target, worker_idx=idx)
    return receiver, target


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_the_sender_dials_workers_whenever_they_come(kind) -> None:
    source = models.linear()
    models.fill(source, 1.0)
    with addresses(2, kind) as where:
        sender = make(where, dial="sender")  # type: ignore[arg-type]
        sender.init_on_sender(model=source)
        async with sender:
            (first, one), (second, two) = worker(where, 0), worker(where, 1)
            connecting = asyncio.ensure_future(sender.connect())
            await first.connect()
            assert first.address == where[0]
            assert models.filled(one, 1.0)
            await asyncio.sleep(0.1)
            assert not connecting.done()
            await asyncio.gather(connecting, second.connect())
            assert (await sender.send()).acked == {0, 1}
            sent = sender._sender.peers[1].sent_nbytes
            await first.aclose()  # and another one at its address
            await harness.until(lambda: 0 not in sender.worker_versions)
            again, one = worker(where, 0)
            await again.connect()
            assert (again.version, again.worker_idx) == (2, 0)
            assert sender._sender.peers[1].sent_nbytes == sent
            models.fill(source, 3.0)
            await harness.until(lambda: 0 in sender.worker_versions)
            assert (await sender.send()).acked == {0, 1}
            assert models.filled(one, 3.0)
            assert models.filled(two, 3.0)
            # The link is cut in the middle: the sender dials again, and nothing comes twice.
            sender._sender.peers[0].transport.abort()
            await harness.until(lambda: again.reconnects == 1 and 0 in sender.worker_versions)
            assert sender._sender.peers[0].sent_nbytes == 0
            await again.aclose()
            await second.aclose()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_worker_that_the_sender_cannot_reach_is_named() -> None:
    with addresses(2, "unix") as where:
        sender = make(where, dial="sender", timeout=0.3)  # type: ignore[arg-type]
        sender.init_on_sender(model=models.linear())
        receiver, _ = worker(where, 1)
        async with sender, receiver:
            joining = asyncio.ensure_future(receiver.connect())
            with pytest.raises(aiosync.ConnectTimeout, match=r"worker 0 at .* init_on_receiver"):
                await sender.connect()
            await joining
            assert receiver.version == 1
        with pytest.raises(aiosync.ConfigError, match="no address for worker 2"):
            await worker(where, 2)[0].connect()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_workers_follow_a_trainer_that_starts_again(url) -> None:
    address = known(url)
    stage = Stage(address)
    async with stage:
        receiver, puller = await stage.add(), await stage.add(subscribe=False)
        await stage.send(2.0)
        await puller.pull()
        epoch = receiver._receiver.inbox.epoch
        await stage.sender.aclose()
        await stage.start_sender(7.0)
        await harness.until(lambda: receiver._receiver.inbox.epoch != epoch)
        assert receiver.version == 1  # of the new epoch, though the number is smaller
        assert models.filled(stage.targets[0], 7.0)
        await harness.until(lambda: len(stage.sender.worker_versions) == 2)
        assert puller.version == 2
        assert await puller.pull() == 1
        assert models.filled(stage.targets[1], 7.0)
        assert (await stage.send(8.0)).acked == {0}
        assert models.filled(stage.targets[0], 8.0)


@pytest.mark.asyncio
async def test_receive_reports_the_first_version_of_another_trainer(url) -> None:
    stage = Stage(known(url))
    async with stage:
        receiver = await stage.add()
        epoch = receiver._receiver.inbox.epoch
        await stage.sender.aclose()
        await stage.start_sender(7.0)
        update = await receiver.receive(timeout=3)
        assert update is not None
        assert update.epoch != epoch
        assert update.version == 1
        assert models.filled(stage.targets[0], 7.0)
        assert await receiver.receive(timeout=0) is None


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_new_worker_does_not_push_out_one_that_follows_a_trainer(url) -> None:
    stage = Stage(known(url))
    async with stage:
        old = await stage.add()
        async with FaultProxy(stage.sender.address) as proxy:
            late = await stage.add(through=proxy)
            assert (old.worker_idx, late.worker_idx) == (0, 1)
            await old.aclose()
            await stage.sender.aclose()
            proxy.upstream = "unix:///nowhere/at/all"
            await stage.start_sender(7.0)
            await stage.add()
            await stage.add()  # both numbers are taken before the old worker is back
            proxy.upstream = stage.sender.address
            await harness.until(lambda: models.filled(stage.targets[1], 7.0))
            await harness.until(lambda: len(stage.sender.worker_versions) == 3)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_server_between_trainer_and_workers(url) -> None:
    server = WeightServer(url)
    await server.start()
    try:
        source, targets = models.linear(), [models.linear() for _ in range(2)]
        early = make(server.url, dial="both")
        early.init_on_receiver(model=targets[0])
        await early.connect()
        assert early.version == 0
        epochs = set()
        for value in (1.0, 2.0):  # the second is the trainer started again
            async with make(server.url, dial="both") as trainer:
                models.fill(source, value)
                trainer.init_on_sender(model=source)
                await trainer.connect()
                await harness.until(lambda value=value: models.filled(targets[0], value))
                epochs.add(early._receiver.inbox.epoch)
                models.fill(source, value + 0.5)
                report = await trainer.send()
                assert report.version == 2
                await harness.until(lambda value=value: models.filled(targets[0], value + 0.5))
        assert len(epochs) == 2
        late = make(server.url, dial="both", subscribe=False)
        late.init_on_receiver(model=targets[1])
        await late.connect()
        await late.pull()
        assert models.filled(targets[1], 2.5)  # there is no trainer any more
        await late.aclose()
        await early.aclose()
    finally:
        await server.aclose()


@pytest.mark.asyncio
async def test_a_trainer_that_the_server_refuses_is_told_why_at_once(url) -> None:
    server = WeightServer(url, model_ids=["critic"])
    await server.start()
    try:
        async with make(server.url, dial="both") as trainer:
            trainer.init_on_sender(model_id="actor", model=models.linear())
            with pytest.raises(
                aiosync.PartialSyncError, match="does not serve model 'actor'"
            ) as caught:
                await trainer.connect(timeout=5)
            assert isinstance(caught.value.failed[0], aiosync.ConfigError)
    finally:
        await server.aclose()


# -- what travels in a pickle --------------------------------------------------------------------

TOKEN = "correct horse battery staple"


@pytest.mark.asyncio
@pytest.mark.parametrize("way", [copy.copy, harness.twin])
async def test_copies_find_the_port_and_prove_the_token(way) -> None:
    async with make(token=TOKEN) as sender:
        sender.init_on_sender(model=models.linear())
        assert not sender.address.endswith(":0")
        await sender.connect()
        async with way(sender) as receiver, make(sender.address, token="wrong") as stranger:
            assert receiver.address == sender.address
            assert receiver._session != sender._session
            receiver.init_on_receiver(model=models.linear())
            await receiver.connect()
            assert receiver.version == 1
            stranger.init_on_receiver(model=models.linear())
            with pytest.raises(aiosync.AuthError):
                await stranger.connect()
            await harness.until(lambda: sender.refused == {"AuthError": 1})


def test_the_token_shows_nowhere() -> None:
    scheme = make(token=TOKEN)
    for text in (pickle.dumps(scheme), repr(scheme).encode(), repr(vars(scheme)).encode()):
        assert TOKEN.encode() not in text
    other = harness.twin(scheme)
    assert other._credentials.token_bytes == TOKEN.encode()
    assert pickle.dumps(scheme) != pickle.dumps(scheme)  # masked anew each time


def test_options_travel() -> None:
    scheme = make(
        "tcp://10.0.0.1:7", reconnect=1.5, stall_timeout=None, chunk_nbytes=128, subscribe=False
    )
    for other in (copy.copy(scheme), harness.twin(scheme)):
        assert other.address == "tcp://10.0.0.1:7"
        assert other.reconnect == 1.5
        assert other._streaming() == scheme._streaming()
        assert other.subscribe is False
        assert other._arrived is None
        assert other._session != scheme._session


def test_an_ssl_context_is_refused_with_advice() -> None:
    scheme = make(tls=ssl.create_default_context())
    with pytest.raises(aiosync.ConfigError, match=r"aiosync\.TLS"):
        pickle.dumps(scheme)
    assert copy.copy(scheme)._credentials is scheme._credentials  # within a process it may


@pytest.mark.asyncio
async def test_port_0_cannot_be_dialled() -> None:
    receiver = make()
    receiver.init_on_receiver(model=models.linear())
    with pytest.raises(aiosync.ConfigError, match="has no port"):
        await receiver.connect()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"address": "http://x"}, "http"),
        ({"address": []}, "one address"),
        ({"address": ["tcp://a:1", "tcp://b:1"]}, "dial='sender'"),
        ({"dial": "nobody"}, "dial must be"),
        ({"reconnect": -1}, "reconnect"),
        ({"chunk_nbytes": 100}, "multiple of 64"),
        ({"stall_timeout": 0}, "stall_timeout"),
        ({"token": ""}, "empty"),
    ],
)
def test_options_are_checked(options, text) -> None:
    with pytest.raises(aiosync.ConfigError, match=text):
        aiosync.TCPWeightSyncScheme(**options)


# -- chunks --------------------------------------------------------------------------------------


def numbers(nbytes: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randint(0, 256, (nbytes,), dtype=torch.uint8)}


@contextlib.asynccontextmanager
async def tensors(
    url: str, source: Any, target: Any, **options: Any
) -> AsyncIterator[tuple[aiosync.TCPWeightSyncScheme, aiosync.TCPWeightSyncScheme]]:
    """A pair over dicts of tensors."""
    async with make(url, guard="reading", **options) as sender:
        sender.init_on_sender(weights=source)
        await sender.connect()
        async with copy.copy(sender) as receiver:
            receiver.init_on_receiver(weights=target)
            await receiver.connect()
            yield sender, receiver


@pytest.mark.asyncio
@pytest.mark.parametrize("offset", [None, -64, 0, 64, 4 * 4096 + 100])
async def test_sizes_around_the_border_of_a_chunk(url, offset) -> None:
    nbytes = 0 if offset is None else 4096 + offset
    source, target = numbers(nbytes), {"x": torch.zeros(nbytes, dtype=torch.uint8)}
    async with tensors(url, source, target, chunk_nbytes=4096) as (sender, receiver):
        assert torch.equal(receiver.weights["x"], source["x"])
        source["x"].random_(0, 256)
        report = await sender.send()
        assert report.acked == {0}
        assert torch.equal(receiver.weights["x"], source["x"])
        peer = sender._sender.peers[0]
        assert peer.sent_nbytes == 2 * report.nbytes


@pytest.mark.slow
@pytest.mark.asyncio
async def test_many_small_chunks(url) -> None:
    nbytes = 100_000
    source, target = numbers(nbytes), {"x": torch.zeros(nbytes, dtype=torch.uint8)}
    async with tensors(url, source, target, chunk_nbytes=64) as (_, receiver):
        assert torch.equal(receiver.weights["x"], source["x"])


@pytest.mark.asyncio
async def test_every_dtype_travels(url) -> None:
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
        torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip
    source, target = {}, {}
    for dtype in dtypes:
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 2, (97 * size,), dtype=torch.uint8)
        source[str(dtype)] = raw.view(dtype)
        target[str(dtype)] = torch.zeros(97 * size, dtype=torch.uint8).view(dtype)
    source["scalar"], target["scalar"] = torch.tensor(3.5), torch.tensor(0.0)
    source["none"], target["none"] = torch.empty(0, 3), torch.empty(0, 3)
    async with tensors(url, source, target, chunk_nbytes=128) as (_, receiver):
        for name, value in source.items():
            arrived = receiver.weights[name]
            assert (arrived.dtype, arrived.shape) == (value.dtype, value.shape)
            if value.ndim == 1:
                assert torch.equal(arrived.view(torch.uint8), value.view(torch.uint8))
            else:
                assert torch.equal(arrived, value)


@pytest.mark.asyncio
async def test_each_worker_may_get_weights_of_its_own(url) -> None:
    async with Stage(url, per_worker_weights=True) as stage:
        for _ in range(3):
            await stage.add()
        own = {idx: models.linear() for idx in (0, 2)}
        for idx, model in own.items():
            models.fill(model, 10.0 + idx)
        report = await stage.sender.send(own)
        assert report.acked == {0, 2}
        values = [float(target.weight.detach()[0, 0]) for target in stage.targets]
        assert values == [10.0, 1.0, 12.0]
        # Who comes in the place of worker 2 gets what worker 2 had.
        await stage.receivers[2].aclose()
        await stage.gone(2)
        await stage.add(2)
        assert models.filled(stage.targets[3], 12.0)


def rss_nbytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_storm_of_sends_to_a_worker_that_takes_nothing(url) -> None:
    async with Stage(url, mebibyte, chunk_nbytes=2**16) as stage:
        async with FaultProxy(stage.sender.address) as proxy:
            receiver = await stage.add(through=proxy)
            quick = await stage.add()
            proxy.stall()
            before, handles = rss_nbytes(), []
            for version in range(2, 1002):
                models.fill(stage.source, float(version))
                handles.append(stage.sender.send_nowait())
                if version % 20 == 0:
                    await quick.wait_for_version(version)
            assert rss_nbytes() - before < 64 * 2**20  # and not 1,000 MiB
            gc.collect()
            # Sender: the latest, one in flight, one idle or two; receivers: two each.
            buffers = [each for each in gc.get_objects() if type(each) is FlatBuffer]
            assert sum(each.nbytes for each in buffers) <= 10 * 2**20
            assert receiver.version == 1
            proxy.resume()
            reports = await asyncio.gather(*handles)
            assert receiver.version == quick.version == 1001
            assert all(models.filled(target, 1001.0) for target in stage.targets)
            assert sum(0 in report.skipped for report in reports) >= 990
            assert reports[-1].acked == {0, 1}


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_latest_of_many_sends_wins(url) -> None:
    async with Stage(url, models.slow) as stage:
        receiver = await stage.add()
        handles = []
        for version in range(2, 1002):
            models.fill(stage.source, float(version))
            handles.append(stage.sender.send_nowait())
        reports = await asyncio.gather(*handles)
        assert receiver.version == 1001
        assert models.filled(stage.targets[0], 1001.0)
        assert reports[-1].acked == {0}
        assert stage.sender._sender.skipped >= 990


# -- cancelling ----------------------------------------------------------------------------------


class _Runs:
    """A stage for each run of a cancellation, with a look for leaks after it."""

    def __init__(self, url: str, build: Any = models.linear, **options: Any) -> None:
        self.url, self.build, self.options = url, build, options

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with assert_no_leaks(kinds=("tasks", "fds")):
            async with Stage(self.url, self.build, chunk_nbytes=2**20) as self.stage:
                self.receiver = await self.stage.add(**self.options)
                yield

    @contextlib.asynccontextmanager
    async def unconnected(self) -> AsyncIterator[None]:
        async with assert_no_leaks(kinds=("tasks", "fds")):
            async with Stage(self.url, self.build) as self.stage:
                self.receiver = self.stage.receiver(0, **self.options)
                yield

    async def works(self) -> None:
        report = await self.stage.send(123.0)
        assert not report.lost
        assert await self.receiver.pull(min_version=report.version) == report.version
        assert models.filled(self.stage.targets[-1], 123.0)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("build", [models.linear, models.medium])
async def test_cancel_send(build) -> None:
    runs = _Runs(TCP, build)

    async def check(outcome: Any) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        await runs.works()

    await cancel_at_every_await(
        lambda: runs.stage.sender.send(), check, around=runs.connected, may_not_wait=True
    )


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("subscribe", [True, False])
async def test_cancel_pull(subscribe) -> None:
    runs = _Runs(TCP, subscribe=subscribe)

    async def pull() -> int:
        runs.stage.sender.send_nowait()
        return await runs.receiver.pull(min_version=2)

    async def check(outcome: Any) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        await runs.works()

    await cancel_at_every_await(pull, check, around=runs.connected)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_cancel_receive() -> None:
    runs = _Runs(TCP)

    async def receive() -> Any:
        runs.stage.sender.send_nowait()
        return await runs.receiver.receive()

    async def check(outcome: Any) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        await runs.works()
        assert (await runs.receiver.receive(timeout=0)).version == 3

    await cancel_at_every_await(receive, check, around=runs.connected)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_cancel_connect_of_a_receiver(url) -> None:
    runs = _Runs(url)

    async def check(outcome: Any) -> None:
        if not outcome.finished:
            assert outcome.cancelled, outcome.error
            with pytest.raises(aiosync.TransportClosed):
                await runs.receiver.connect()
            runs.receiver = await runs.stage.add(0)
        await harness.until(lambda: runs.stage.sender.worker_versions == {0: 1})
        await runs.stage.send(122.0)
        await runs.works()

    await cancel_at_every_await(lambda: runs.receiver.connect(), check, around=runs.unconnected)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("dial", ["receiver", "sender"])
async def test_cancel_connect_of_the_sender(dial) -> None:
    made: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def around() -> AsyncIterator[None]:
        async with assert_no_leaks(kinds=("tasks", "fds")):
            address = known(TCP)
            made["sender"] = make(address, dial=dial)
            made["sender"].init_on_sender(model=models.linear(), num_workers=1)
            made["receiver"] = make(address, dial=dial, reconnect=0.05)
            made["receiver"].init_on_receiver(model=models.linear())
            async with made["sender"], made["receiver"]:
                yield

    async def connect() -> None:
        made["joining"] = asyncio.ensure_future(made["receiver"].connect(timeout=1))
        await made["sender"].connect()

    async def check(outcome: Any) -> None:
        assert outcome.finished or outcome.cancelled, outcome.error
        [result] = await asyncio.gather(made["joining"], return_exceptions=True)
        if outcome.finished:
            assert result is None
            assert (await made["sender"].send()).acked == {0}
        else:
            assert result is None or isinstance(result, aiosync.AiosyncError)
            with pytest.raises(aiosync.TransportClosed):
                await made["sender"].send()

    await cancel_at_every_await(connect, check, around=around)


@pytest.mark.asyncio
async def test_closing_in_the_middle_of_anything_leaves_nothing(url) -> None:
    async with assert_no_leaks(kinds=("tasks", "fds")):
        async with Cuttable(url) as stage:
            stage.proxy.plan = Plan(back=Faults(stall_at=9 * CHUNK))
            receiver = await stage.add(through=stage.proxy)
            handle = stage.sender.send_nowait(stage.source)
            await harness.until(lambda: receiver._receiver._staging._landing is not None)
            await receiver.aclose()  # half an update is there
            stage.proxy.plan = None
            with pytest.raises(aiosync.PartialSyncError):
                await handle
            second = await stage.add(0, through=stage.proxy)
            assert second.version == 1
            async with away(stage.proxy, stage):
                await stage.sender.aclose()  # the worker is looking for it now
                await second.aclose()


@pytest.mark.asyncio
async def test_closing_while_reconnecting_is_quick(url) -> None:
    async with Stage(url) as stage, FaultProxy(stage.sender.address) as proxy:
        receiver = await stage.add(through=proxy, reconnect=None)
        async with away(proxy, stage):
            await harness.until(lambda: proxy.connections >= 3)
            async with asyncio.timeout(4):  # tasks that do not end get 5 s
                await receiver.aclose()
