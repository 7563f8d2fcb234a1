"""Weights over TCP and Unix sockets: lost links, cut transfers, and the side that dials.

The contract suite tests the promises of every scheme: late joiners, restarted trainers, cancelling.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.testing import FaultProxy, Faults, Plan
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Challenge, Hello, Message, Proof, Refuse, encode_frame
from tests._certificates import certificates
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_address, free_port

pytestmark = [pytest.mark.one_loop, pytest.mark.asyncio]

PATIENCE = harness.PATIENCE
TCP = "tcp://127.0.0.1:0"
CHUNK = 2**14


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address of each kind where a sender may listen."""
    if request.param == "tcp":
        yield TCP
        return
    # tmp_path is too long for the name of a socket.
    folder = tempfile.mkdtemp(prefix="aiosync-tests-")
    yield f"unix://{folder}/socket"
    # No socket is left in the folder.
    assert os.listdir(folder) == []
    shutil.rmtree(folder)


def make(address: str = TCP, **options: Any) -> aiosync.TCPWeightSyncScheme:
    return aiosync.TCPWeightSyncScheme(address, **{"timeout": PATIENCE, **options})


def blocks() -> nn.Module:
    """Return a model of 20 chunks of random numbers."""
    return nn.ParameterList([torch.randn(20 * CHUNK // 4)])


def same(receiver: Any, source: nn.Module) -> bool:
    with receiver.reading():
        return torch.equal(receiver.model[0], source[0])


class Stage:
    """A connected sender with version 1, and a receiver behind a proxy."""

    def __init__(self, sender: Any, proxy: FaultProxy, receiver: Any) -> None:
        self.sender, self.proxy, self.receiver = sender, proxy, receiver

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Cut the link; no connection passes the proxy inside the block."""
        upstream, self.proxy.upstream = self.proxy.upstream, "unix:///nowhere/at/all"
        self.proxy.cut()
        await harness.until(lambda: not self.sender.worker_versions)
        yield
        self.proxy.upstream = upstream

    async def back(self) -> None:
        """Wait until the receiver has its link again."""
        await harness.until(lambda: self.receiver.reconnects == 1 and self.sender.worker_versions)


@contextlib.asynccontextmanager
async def stage(url: str, plan: Plan | None = None, **options: Any) -> AsyncIterator[Stage]:
    """A connected sender and receiver with a proxy between them; ``plan`` is for the first link."""
    sender = make(url, chunk_nbytes=CHUNK)
    sender.init_on_sender(model=blocks())
    async with sender, FaultProxy(sender.address) as proxy, make(proxy.url, **options) as receiver:
        proxy.plan = lambda number: None if number else plan
        receiver.init_on_receiver(model=blocks())
        await asyncio.gather(sender.connect(), receiver.connect())
        yield Stage(sender, proxy, receiver)


# -- links that are lost -------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["unix"], indirect=True)
async def test_a_worker_that_never_came_does_not_come_back(url: str) -> None:
    """Its first links end before the answer, which fails at once over a Unix socket alone."""
    sender, hello = make(url), Hello("receiver", "policy", os.getpid(), session=b"s" * 16)
    sender.init_on_sender("policy", model=models.linear())
    async with sender:
        await sender.connect()
        for _ in range(3):
            link = await TCPTransport.connect(sender.address)
            await link.send(hello)
            link.abort()
        async with await TCPTransport.connect(sender.address) as link:
            await link.send(hello)
            await link.recv(timeout=PATIENCE)
            assert sender.stats().reconnects == 0


@pytest.mark.parametrize("applied", ["before", "while it is away", "on the next link"])
async def test_what_has_come_outlives_its_link_and_is_not_applied_twice(
    url: str, applied: str
) -> None:
    async with stage(url, apply="manual") as ends:
        receiver, weights = ends.receiver, blocks()
        handle = ends.sender.send_nowait(weights)
        await receiver.wait_staged(2)
        if applied == "before":
            assert receiver.apply_pending() == 2
            await handle
        before = ends.proxy.bytes_back
        async with ends.away():
            if applied != "before":
                with pytest.raises(aiosync.PartialSyncError):
                    await handle
            if applied == "while it is away":
                assert receiver.apply_pending() == 2
        await ends.back()
        if applied == "on the next link":
            assert (receiver.version, receiver.lag) == (1, 1)
            assert receiver.apply_pending() == 2
        await harness.until(lambda: ends.sender.worker_versions == {0: 2})
        assert same(receiver, weights)
        assert receiver.apply_pending() is None
        # A worker that has a version does not get it again.
        if applied != "on the next link":
            assert ends.proxy.bytes_back - before < CHUNK


async def test_what_a_trainer_before_is_told_says_nothing_of_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A version of the run before may be overtaken while a hook passes it on."""
    caplog.set_level(logging.INFO, "aiosync")
    free = asyncio.Event()
    free.set()

    async def pass_on(epoch: int, version: int) -> None:
        await free.wait()

    first, second, hooks = make(), make(), aiosync.SchemeHooks(applied=pass_on)
    for sender in (first, second):
        sender.init_on_sender(model=models.linear())
    async with first, second, FaultProxy(first.address) as proxy:
        async with make(proxy.url, apply="manual") as receiver:
            receiver.init_on_receiver(model=models.linear(), hooks=hooks)
            await asyncio.gather(first.connect(), second.connect(), receiver.connect())
            await harness.until(lambda: first.worker_versions == {0: 1})
            free.clear()
            handles = []
            # The hook has version 2, and version 3 waits for the hook.
            for version in (2, 3):
                handles.append(first.send_nowait())
                await receiver.wait_staged(version)
                assert receiver.apply_pending() == version
            proxy.upstream = second.address
            proxy.cut()
            await harness.until(lambda: receiver.lag == 1)
            assert receiver.apply_pending() == 1
            proxy.cut()
            await harness.until(lambda: receiver.reconnects == 2 and 0 in second.worker_versions)
            handle = second.send_nowait()
            # By now version 1, which came once more, was answered.
            await receiver.wait_staged(2)
            assert not [each for each in caplog.records if "refused" in each.getMessage()]
            assert receiver.apply_pending() == 2
            free.set()
            assert (await handle).acked == {0}
            for each in handles:
                with pytest.raises(aiosync.PartialSyncError, match="PeerClosed"):
                    await each


async def test_a_worker_takes_over_from_its_own_half_open_link(url: str) -> None:
    async with stage(url) as ends:
        old = ends.sender.sender_transports[0]
        # The trainer does not see what the worker's end does.
        ends.proxy.stall()
        ends.receiver.receiver_transport.abort()
        await harness.until(lambda: ends.sender.sender_transports[0] is not old)
        await ends.back()
        assert (await ends.sender.send()).acked == {0}


@pytest.mark.parametrize("reconnect", [0, 0.1])
async def test_a_link_is_given_up_after_reconnect_seconds(url: str, reconnect: float) -> None:
    async with stage(url, reconnect=reconnect) as ends:
        async with ends.away():
            with pytest.raises(aiosync.PeerClosed):
                await ends.receiver.receive(timeout=PATIENCE)
        assert ends.proxy.connections == 1 or reconnect
        # The model keeps the weights that it has.
        assert same(ends.receiver, ends.sender.model)


@pytest.mark.parametrize("newer", [False, True])
async def test_a_cut_transfer_goes_on_where_it_stopped_or_gives_way(url: str, newer: bool) -> None:
    # One version has 20 chunks.
    plan = Plan(back=Faults(cut_at=33 * CHUNK))
    async with stage(url, plan) as ends:
        weights = blocks()
        with pytest.raises(aiosync.PartialSyncError):
            await ends.sender.send(weights)
        if newer:
            async with ends.away():
                with contextlib.suppress(aiosync.PartialSyncError):
                    await ends.sender.send(weights := blocks())
        await ends.back()
        await ends.receiver.wait_for_version(ends.sender.version)
        assert same(ends.receiver, weights)
        rest = ends.proxy.bytes_back - 33 * CHUNK
        assert (rest > 20 * CHUNK) if newer else (CHUNK < rest < 15 * CHUNK)


async def test_a_cut_part_does_not_go_on_inside_of_the_parts_that_are_sent_then(url: str) -> None:
    """The next link carries the newest parts of all names as one update, of the same version."""

    def part(name: str, value: float) -> dict[str, torch.Tensor]:
        return {name: torch.full((20 * CHUNK // 4,), value)}

    target = part("a", 0.0) | part("b", 0.0)
    sender = make(url, chunk_nbytes=CHUNK, strict=False)
    sender.init_on_sender(weights=part("a", 1.0) | part("b", 1.0))
    async with sender, FaultProxy(sender.address) as proxy:
        # Four parts have come whole, and half of the fifth.
        plan = Plan(back=Faults(cut_at=90 * CHUNK))
        proxy.plan = lambda number: None if number else plan
        async with make(proxy.url, strict=False, guard="reading") as receiver:
            receiver.init_on_receiver(weights=target)
            await asyncio.gather(sender.connect(), receiver.connect())
            for name, value in (("b", 2.0), ("a", 3.0)):
                await sender.send(part(name, value))
            with pytest.raises(aiosync.PartialSyncError):
                await sender.send(part("b", 4.0))
            await receiver.wait_for_version(4)
            with receiver.reading():
                assert [each.unique().tolist() for each in target.values()] == [[3.0], [4.0]]
        assert proxy.connections == 2


async def test_a_receiver_that_has_ended_with_an_error_dials_nobody() -> None:
    """Otherwise the trainer would go on sending to a worker whose calls raise for ever."""

    async def ends(epoch: int, version: int) -> None:
        if version > 1:
            raise asyncio.CancelledError

    sender = make()
    sender.init_on_sender(model=models.linear(1.0), num_workers=1)
    async with sender, make(sender.address, reconnect=None) as receiver:
        hooks = aiosync.SchemeHooks(applied=ends)
        receiver.init_on_receiver(model=models.linear(), hooks=hooks)
        await asyncio.gather(sender.connect(), receiver.connect())
        with contextlib.suppress(aiosync.PartialSyncError):
            await sender.send()
        with pytest.raises(aiosync.AiosyncError):
            await receiver.wait_for_version(99)
        await asyncio.sleep(0.5)
        assert receiver.reconnects == 0
        assert [each.state for each in sender.stats().workers] == ["lost"]


async def test_a_send_whose_worker_leaves_meanwhile_keeps_no_memory() -> None:
    nbytes, kept = 64 * 2**20, []
    async with make() as sender:
        sender.init_on_sender(model=nn.Linear(nbytes // 4, 1, bias=False))
        await sender.connect()
        for number in range(6):
            receiver = make(sender.address, subscribe=False)
            receiver.init_on_receiver(model=nn.Linear(nbytes // 4, 1, bias=False), worker_idx=0)
            await receiver.connect(initial=False)
            sending = asyncio.ensure_future(sender.send(worker_ids={0}))
            await asyncio.sleep(0)
            receiver.abort()
            try:
                await sending
            except aiosync.AiosyncError as exc:
                kept.append(exc)  # with its traceback
            if number == 1:
                before = _resident()
            del receiver
        assert any(isinstance(each, aiosync.ConfigError) for each in kept[2:])
        assert _resident() < before + 3 * nbytes


def _resident() -> int:
    """Return the bytes of this process that are in memory, without garbage."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_pulls_that_wait_get_what_they_ask_for_on_the_next_link(url: str) -> None:
    async with stage(url, subscribe=False) as ends:
        waiting = asyncio.ensure_future(ends.receiver.pull(min_version=2))
        async with ends.away():
            now = asyncio.ensure_future(ends.receiver.pull())
            await asyncio.sleep(0)
        await ends.back()
        assert await now == 1
        assert not waiting.done()
        await ends.sender.send()
        assert await waiting == 2


IMPOSTORS: dict[str, list[Message]] = {
    "refuses with a ConfigError": [Refuse("ConfigError", "go away")],
    "refuses the proof": [Challenge(bytes(32)), Refuse("AuthError", "no")],
    "offers no token": [Challenge(bytes(32), required=False), Proof(bytes(32), b"")],
    "has another token": [Challenge(bytes(32)), Proof(bytes(32), b"m" * 32)],
}


@pytest.mark.parametrize("said", IMPOSTORS.values(), ids=list(IMPOSTORS))
async def test_who_has_the_port_for_a_moment_and_proves_nothing_ends_no_worker(
    said: list[Message],
) -> None:
    port = free_port()
    refused = asyncio.Event()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(map(encode_frame, said)))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        refused.set()
        writer.close()

    plain = make(f"tcp://127.0.0.1:{port}", token="a secret of sixteen", reconnect=None)
    async with harness.twin(plain) as worker:
        worker.init_on_receiver("policy", model=models.linear())
        joining = asyncio.ensure_future(worker.connect())
        for value in (1.0, 2.0):
            async with harness.twin(plain) as trainer:
                trainer.init_on_sender("policy", model=models.linear(value), num_workers=1)
                await asyncio.gather(trainer.connect(), joining)
                await harness.until(lambda value=value: models.holds(worker, value))  # type: ignore[misc]
            if value == 1.0:
                async with await asyncio.start_server(impostor, "127.0.0.1", port):
                    await asyncio.wait_for(refused.wait(), PATIENCE)


# -- worker processes ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tcp", "unix", "shared memory", "group"])
async def test_a_killed_trainer_is_followed_by_the_next(way: str, tmp_path: Path) -> None:
    """Slots of both trainers have the same names, and the first one leaves its socket as a file."""
    options: dict[str, Any] = {"timeout": PATIENCE, "token": "a secret of sixteen"}
    address = f"unix://{tmp_path}/socket" if way == "unix" else free_address()
    plain: Any = make(address, **options)
    if way in ("shared memory", "group"):
        options |= {"address": address, "shared_memory": way == "shared memory"}
        plain = aiosync.DistributedWeightSyncScheme(**options)
    receiver = harness.twin(plain)
    receiver.init_on_receiver(model_id="policy", model=models.medium())
    crew: list[harness.Worker] = []
    try:
        for value in (10.0, 20.0):
            crew.append(harness.start(plain, models.medium))
            await crew[-1].call(become_sender, value)
            if not receiver.synchronized_on_receiver:
                await receiver.connect()
            await harness.until(lambda value=value: models.holds(receiver, value))  # type: ignore[misc]
            assert receiver.version == 1
            for number in (1.0, 2.0, 3.0, 4.0):
                assert await crew[-1].call(send, value + number) == {0}
                assert models.holds(receiver, value + number)
            crew[-1].kill()
        assert receiver.reconnects == 1
    finally:
        await receiver.aclose()
        for worker in crew:
            worker.end()


async def become_sender(state: harness.State, value: float) -> None:
    models.fill(state.model, value)
    state.scheme.init_on_sender(model_id="policy", model=state.model)
    await state.scheme.connect()


async def send(state: harness.State, value: float) -> set[int]:
    models.fill(state.model, value)
    return set((await state.scheme.send(timeout=PATIENCE)).acked)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_tls_and_token_travel_into_workers(method: str) -> None:
    scheme = make(token="t" * 20, tls=certificates().both)
    scheme.init_on_sender(model_id="policy", model=models.linear(2.0), num_workers=1)
    async with harness.workers(scheme, models.linear, method=method) as [worker]:
        assert await worker.value() == 2.0
    assert scheme.refused == {}


# -- who dials, and what errors say ----------------------------------------------------------


@pytest.mark.parametrize("token", [None, "another"])
async def test_a_trainer_says_why_it_let_no_worker_in(token: str | None) -> None:
    async with make(token="one", timeout=2) as sender:
        sender.init_on_sender(model=models.linear(), num_workers=1)
        joining = asyncio.create_task(sender.connect())
        for _ in range(2):
            async with make(sender.address, token=token) as receiver:
                receiver.init_on_receiver(model=models.linear(), worker_idx=0)
                with pytest.raises(aiosync.AuthError):
                    await receiver.connect()
        with pytest.raises(aiosync.ConnectTimeout, match="refused: AuthError 2 times: .*give"):
            await joining


@pytest.mark.parametrize(("dial", "role"), [("both", "sender"), ("receiver", "receiver")])
async def test_port_0_cannot_be_dialled(dial: Any, role: str) -> None:
    async with aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", dial=dial, timeout=2) as scheme:
        getattr(scheme, f"init_on_{role}")(model=models.linear())
        with pytest.raises(aiosync.ConfigError, match="has no port to dial"):
            await scheme.connect()


@pytest.mark.parametrize(
    ("dial", "role", "says"),
    [
        ("both", "sender", "after 0.4 s the weight server at.*`aiosync serve` has to run"),
        ("receiver", "receiver", r"init_on_sender\(\) and connect\(\), or"),
        ("both", "receiver", "`aiosync serve` has to run"),
    ],
)
async def test_connect_has_its_own_timeout_and_says_what_the_other_side_has_to_do(
    dial: Any, role: str, says: str
) -> None:
    began = asyncio.get_running_loop().time()
    async with aiosync.TCPWeightSyncScheme(free_address(), dial=dial, timeout=0.1) as scheme:
        getattr(scheme, f"init_on_{role}")(model=models.linear())
        with pytest.raises(aiosync.ConnectTimeout, match=f"{says}.*the last attempt: ") as caught:
            await scheme.connect(timeout=0.4)
    assert caught.value.__cause__ is not None
    assert asyncio.get_running_loop().time() - began >= 0.35


async def test_a_weight_server_is_the_only_worker_of_its_trainer() -> None:
    sender = aiosync.TCPWeightSyncScheme("tcp://a:1", dial="both")
    with pytest.raises(aiosync.ConfigError, match="workers are expected, but .*num_workers out"):
        sender.init_on_sender(num_workers=2)
    # The refused call has given the sender no role.
    sender.init_on_sender(num_workers=1)
