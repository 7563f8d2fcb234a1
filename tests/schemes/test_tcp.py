"""Weights over TCP and Unix sockets, with both sides in this process and real links between.

What holds for every scheme (late joiners, restarted trainers, cancelling) is in the contract suite.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.testing import FaultProxy, Faults, Plan
from aiosync.wire import Challenge, Message, Proof, Refuse, encode_frame
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import Self

pytestmark = pytest.mark.one_loop

PATIENCE = harness.PATIENCE
TCP = "tcp://127.0.0.1:0"
NOWHERE = "unix:///nowhere/at/all"
SMALL = 2**16
"""Bytes that links need for all but weights, and far fewer than those of :func:`mebibyte`."""


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


def make(address: str = TCP, **options: Any) -> aiosync.TCPWeightSyncScheme:
    return aiosync.TCPWeightSyncScheme(address, **{"timeout": PATIENCE, **options})


def mebibyte() -> nn.Module:
    model = nn.Module()
    model.block = nn.Parameter(torch.zeros(2**18))
    return model


class Stage:
    """A connected sender with version 1, a proxy before it, and receivers as the test adds them."""

    def __init__(self, url: str = TCP, build: Any = models.linear, **options: Any) -> None:
        self.url, self.build, self.options = url, build, options
        self.receivers: list[aiosync.TCPWeightSyncScheme] = []

    async def __aenter__(self) -> Self:
        await self.start_sender()
        self.proxy = FaultProxy(self.sender.address)
        await self.proxy.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for receiver in self.receivers:
            await receiver.aclose()
        await self.proxy.aclose()
        await self.sender.aclose()

    async def start_sender(self, value: float = 1.0) -> None:
        self.source = self.build()
        models.fill(self.source, value)
        self.sender = make(self.url, **self.options)
        self.sender.init_on_sender(model=self.source)
        await self.sender.connect()

    async def add(
        self, idx: int | None = None, through: bool = False, **options: Any
    ) -> aiosync.TCPWeightSyncScheme:
        address = self.proxy.url if through else self.sender.address
        receiver = make(address, **{**self.options, **options})
        receiver.init_on_receiver(model=self.build(), worker_idx=idx)
        self.receivers.append(receiver)
        await receiver.connect()
        return receiver

    async def send(self, value: float, **options: Any) -> aiosync.SendReport:
        models.fill(self.source, value)
        return await self.sender.send(**options)

    def send_nowait(self, value: float, **options: Any) -> aiosync.SendHandle:
        models.fill(self.source, value)
        return self.sender.send_nowait(**options)

    async def gone(self, idx: int = 0) -> None:
        """Until the sender has noticed that a link is lost."""
        await harness.until(lambda: idx not in self.sender.worker_versions)

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Nobody comes through the proxy inside."""
        upstream, self.proxy.upstream = self.proxy.upstream, NOWHERE
        self.proxy.cut()
        await self.gone()
        yield
        self.proxy.upstream = upstream

    async def back(self, receiver: aiosync.TCPWeightSyncScheme, times: int = 1) -> None:
        """Until a receiver that was cut off has its link again."""
        idx = receiver.worker_idx
        await harness.until(
            lambda: receiver.reconnects == times and idx in self.sender.worker_versions
        )


# -- links that are lost -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_nothing_is_sent_again_to_who_has_it(url: str) -> None:
    async with Stage(url, mebibyte) as stage:
        receiver, other = await stage.add(through=True), await stage.add()
        link, before = stage.sender.sender_transports[0], stage.proxy.bytes_back
        stage.proxy.cut()
        await harness.until(
            lambda: receiver.reconnects == 1 and stage.sender.sender_transports.get(0) is not link
        )
        await stage.back(receiver)
        assert (receiver.version, receiver.worker_idx, other.reconnects) == (1, 0, 0)
        assert stage.sender.worker_versions == {0: 1, 1: 1}
        assert stage.proxy.bytes_back - before < SMALL
        report = await stage.send(2.0)
        assert (report.acked, report.lost) == ({0, 1}, {})
        assert models.holds(receiver, 2.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("applied", ["while it is away", "on the next link"])
async def test_a_staged_update_outlives_its_link(url: str, applied: str) -> None:
    async with Stage(url) as stage:
        receiver = await stage.add(through=True, apply="manual")
        handle = stage.send_nowait(2.0)
        await receiver.wait_staged(2)
        async with stage.away():
            with pytest.raises(aiosync.PartialSyncError):
                await handle
            if applied == "while it is away":
                assert receiver.apply_pending() == 2
        await stage.back(receiver)
        if applied != "while it is away":
            assert (receiver.version, receiver.lag) == (1, 1)
            assert receiver.apply_pending() == 2
        await harness.until(lambda: stage.sender.worker_versions == {0: 2})
        assert models.holds(receiver, 2.0)
        assert receiver.apply_pending() is None  # it did not come twice


@pytest.mark.asyncio
async def test_a_worker_takes_over_from_its_own_half_open_link(url: str) -> None:
    async with Stage(url) as stage:
        receiver = await stage.add(0, through=True)
        old = stage.sender.sender_transports[0]
        stage.proxy.stall()  # whatever the worker's end does, the trainer does not see it
        receiver.receiver_transport.abort()
        await harness.until(lambda: stage.sender.sender_transports[0] is not old)
        await stage.back(receiver)
        assert (await stage.send(2.0)).acked == {0}


@pytest.mark.asyncio
@pytest.mark.parametrize("reconnect", [0, 0.1])
async def test_a_link_is_given_up_after_reconnect_seconds(url: str, reconnect: float) -> None:
    async with Stage(url) as stage:
        receiver = await stage.add(through=True, reconnect=reconnect)
        async with stage.away():
            with pytest.raises(aiosync.PeerClosed):
                await receiver.receive(timeout=PATIENCE)
        assert stage.proxy.connections == 1 or reconnect
        assert models.holds(receiver, 1.0)  # the model keeps what it has


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_trainer_that_answers_nothing_does_not_stretch_reconnect() -> None:
    async with Stage() as stage:
        receiver = await stage.add(through=True, reconnect=0.5, subscribe=False)
        # All that came is the handshake; the next time all but the last byte of its Welcome.
        stage.proxy.plan = Plan(back=Faults(stall_at=stage.proxy.bytes_back - 1))
        stage.proxy.cut()
        async with asyncio.timeout(10):
            with pytest.raises(aiosync.PeerClosed):
                await receiver.receive(timeout=PATIENCE)


IMPOSTORS: dict[str, list[Message]] = {
    "refuses with a ConfigError": [Refuse("ConfigError", "go away")],
    "refuses the proof": [Challenge(bytes(32)), Refuse("AuthError", "no")],
    "offers no token": [Challenge(bytes(32), required=False), Proof(bytes(32), b"")],
    "has another token": [Challenge(bytes(32)), Proof(bytes(32), b"m" * 32)],
}


@pytest.mark.parametrize("said", IMPOSTORS.values(), ids=list(IMPOSTORS))
@pytest.mark.asyncio
async def test_who_has_the_port_for_a_moment_and_proves_nothing_ends_no_worker(
    said: list[Message],
) -> None:
    port = free_port()
    refused = asyncio.Event()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(map(encode_frame, said)))
        with contextlib.suppress(ConnectionError):
            while await reader.read(1000):
                pass
        refused.set()
        writer.close()

    options: dict[str, Any] = {"token": "a secret of sixteen", "timeout": PATIENCE}
    address = f"tcp://127.0.0.1:{port}"
    async with aiosync.TCPWeightSyncScheme(address, reconnect=None, **options) as worker:
        worker.init_on_receiver("policy", model=models.linear())
        for value in (1.0, 2.0):
            async with aiosync.TCPWeightSyncScheme(address, **options) as trainer:
                source = models.linear()
                models.fill(source, value)
                trainer.init_on_sender("policy", model=source, num_workers=1)
                again = value == 2.0
                await asyncio.gather(trainer.connect(), *([] if again else [worker.connect()]))
                await harness.until(lambda value=value: models.holds(worker, value))  # type: ignore[misc]
            if not again:
                async with await asyncio.start_server(impostor, "127.0.0.1", port):
                    await asyncio.wait_for(refused.wait(), PATIENCE)


# -- transfers that are cut ----------------------------------------------------------------------

CHUNK = 2**14


def blocks() -> nn.Module:
    """20 chunks of random numbers."""
    return nn.ParameterList([torch.randn(20 * CHUNK // 4)])


def same(receiver: Any, source: nn.Module) -> bool:
    with receiver.reading():
        return torch.equal(receiver.model[0], source[0])


@contextlib.asynccontextmanager
async def harmed(url: str, **faults: int) -> AsyncIterator[tuple[Stage, nn.Module]]:
    """A stage whose first link through the proxy is harmed in the middle of new weights."""
    async with Stage(url, blocks, chunk_nbytes=CHUNK) as stage:
        plan = Plan(back=Faults(**faults))
        stage.proxy.plan = lambda number: plan if number == 0 else None
        yield stage, blocks()


@pytest.mark.asyncio
@pytest.mark.parametrize("newer", [False, True])
async def test_a_cut_transfer_goes_on_where_it_stopped_or_gives_way(url: str, newer: bool) -> None:
    async with harmed(url, cut_at=33 * CHUNK) as (stage, weights):  # one version is 20 chunks
        receiver = await stage.add(through=True)
        with pytest.raises(aiosync.PartialSyncError):
            await stage.sender.send(weights)
        if newer:
            async with stage.away():
                with contextlib.suppress(aiosync.PartialSyncError):
                    await stage.sender.send(weights := blocks())
        await stage.back(receiver)
        assert await receiver.wait_for_version(stage.sender.version) == stage.sender.version
        assert same(receiver, weights)
        rest = stage.proxy.bytes_back - 33 * CHUNK
        assert (rest > 20 * CHUNK) if newer else (CHUNK < rest < 15 * CHUNK)
        await stage.sender.send(weights := blocks())
        assert same(receiver, weights)


# -- asking --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_pulls_that_wait_get_what_they_ask_for_also_on_the_next_link(url: str) -> None:
    async with Stage(url) as stage:
        puller = await stage.add(through=True, subscribe=False)
        with pytest.raises(aiosync.RecvTimeout):
            await puller.pull(min_version=3, timeout=0.02)
        waiting = {n: asyncio.ensure_future(puller.pull(min_version=n)) for n in (3, 2)}
        assert await puller.pull() == 1  # meanwhile
        async with stage.away():
            now = asyncio.ensure_future(puller.pull())
            await asyncio.sleep(0)
            assert not now.done()
        await stage.back(puller)
        assert await now == 1
        for version in (2, 3):
            assert not waiting[version].done()
            await stage.send(float(version))
            assert await waiting[version] == version
        assert models.holds(puller, 3.0)
        await stage.send(4.0)
        assert await puller.pull(min_version=2) == 4


@pytest.mark.asyncio
async def test_pull_of_a_version_that_the_model_refused_says_so(url: str) -> None:
    async with Stage(url, models.extra) as stage:
        receiver, puller = await stage.add(through=True), await stage.add(subscribe=False)
        stage.source.counter = -1
        with pytest.raises(aiosync.PartialSyncError):
            await stage.sender.send()
        for each in (receiver, puller, puller):
            with pytest.raises(aiosync.ApplyError, match="no good here"):
                await each.pull(timeout=5)
        stage.proxy.cut()
        await stage.back(receiver)
        puller.receiver_transport.abort()
        await stage.back(puller)
        for each in (receiver, puller):  # for the same reason on the next link
            with pytest.raises(aiosync.ApplyError, match="no good here"):
                await each.pull(timeout=5)
        assert stage.sender.worker_versions == {0: 1, 1: 0}
        stage.source.counter = 1
        await stage.sender.send()
        assert await receiver.pull() == await puller.pull() == 3


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"address": "http://x"}, "http"),
        ({"address": []}, "one address"),
        ({"address": ["tcp://a:1", "tcp://b:1"]}, "dial='sender'"),
        ({"dial": "nobody"}, "dial must be"),
    ],
)
def test_addresses_are_checked(options: Any, text: str) -> None:
    with pytest.raises(aiosync.ConfigError, match=text):
        aiosync.TCPWeightSyncScheme(**options)
