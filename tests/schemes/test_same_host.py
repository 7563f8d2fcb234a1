"""Engines' workers on the trainer's own host: shared memory instead of a group or calls."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import itertools
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed as dist

import aiosync
import aiosync.sync
from aiosync.errors import ApplyError, PartialSyncError
from aiosync.schemes import _making, _same_host
from aiosync.schemes._tasks import TaskOwner
from aiosync.tensors import Flattener
from aiosync.transports import _anonymous, _segment
from aiosync.transports.address import Address
from aiosync.transports.credentials import Credentials
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.wire import Challenge, Hello, Refuse, Setup, Welcome
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

PATIENCE = harness.PATIENCE
TOKEN = "a secret of the test"

pytestmark = pytest.mark.skipif(not _same_host.available(), reason="Linux only")


def sending(
    build: Any = models.medium, num_workers: int | None = None, **options: Any
) -> tuple[aiosync.DistributedWeightSyncScheme, nn.Module]:
    source = build()
    models.fill(source, 1.0)
    scheme = aiosync.DistributedWeightSyncScheme(**{"timeout": PATIENCE, **options})
    scheme.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    return scheme, source


def receiving(sender: Any, build: Any = models.medium, **changes: Any) -> tuple[Any, nn.Module]:
    """A copy of the sender's scheme that is a receiver, not connected, and its model."""
    receiver, target = harness.twin(sender), build()
    for name, value in changes.items():
        setattr(receiver, name, value)
    receiver.init_on_receiver(model_id="policy", model=target)
    return receiver, target


def kind(scheme: Any) -> type:
    return type(scheme._receiver.transport)


def kind_there(worker: harness.State) -> tuple[str, list[str]]:
    gloo = [thread.name for thread in threading.enumerate() if "gloo" in thread.name]
    return kind(worker.scheme).__name__, gloo


async def value(worker: harness.Worker) -> float:
    [found] = {float(x) for w in (await worker.call(harness.weights)).values() for x in w.unique()}
    return found


# -- worker processes --------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.slow
async def test_workers_get_every_version_without_a_group() -> None:
    scheme, source = sending(num_workers=2)
    async with harness.workers(scheme, models.medium, 2) as crew:
        for version in range(2, 8):
            models.fill(source, float(version))
            report = await scheme.send()
            assert (report.version, report.acked) == (version, {0, 1})
            models.fill(source, -9.0)  # an optimizer's step, which nobody may see
            assert [await value(worker) for worker in crew] == [version, version]
        assert [await worker.call(kind_there) for worker in crew] == [
            ("SharedMemTransport", [])
        ] * 2
        late = harness.start(scheme, models.medium)
        try:
            scheme._sources.num_workers = scheme._sender.workers.num_workers = 3
            assert await late.call(harness.join, 2) == 7
            assert await value(late) == 7.0
        finally:
            late.end()
        assert scheme._same_host.arena.num_slots <= 3  # one copy, whatever the number of workers


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
async def test_a_worker_that_is_killed_is_named_at_once() -> None:
    scheme, source = sending(num_workers=2)
    async with harness.workers(scheme, models.medium, 2) as crew:
        models.fill(source, 2.0)
        crew[1].stop()
        sent = asyncio.ensure_future(scheme.send(timeout=PATIENCE))
        await harness.until(lambda: scheme.worker_versions.get(0) == 2)
        started = asyncio.get_running_loop().time()
        crew[1].kill()
        with pytest.raises(PartialSyncError) as caught:
            await sent
        assert asyncio.get_running_loop().time() - started < 1.0
        assert (set(caught.value.failed), caught.value.acked) == ({1}, {0})
        again = harness.start(scheme, models.medium)
        try:
            assert await again.call(harness.join, 1) == 2
            models.fill(source, 3.0)
            assert (await scheme.send()).acked == {0, 1}
            assert await value(again) == 3.0
        finally:
            again.end()


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("build", [models.linear, models.big])
async def test_workers_of_both_kinds(build: Any) -> None:
    """The copy for the group goes ahead of the transfer; shared slots have to be full."""
    scheme, source = sending(build)
    (near, near_model), (far, far_model) = (
        receiving(scheme, build),
        receiving(scheme, build, shared_memory=False),
    )
    async with scheme, near, far:
        await asyncio.gather(scheme.connect(), near.connect(), far.connect())
        assert (kind(near), kind(far)) == (SharedMemTransport, DistributedTransport)
        whole: list[bool] = []
        near._flipped = lambda _, version: whole.append(models.filled(near_model, float(version)))
        for number in range(2, 8):
            models.fill(source, float(number))
            if number % 3:
                assert len((await scheme.send()).acked) == 2
            else:
                handle = scheme.send_nowait()
            models.fill(source, -9.0)
            if number % 3 == 0:
                assert len((await handle).acked) == 2
            assert models.filled(near_model, float(number))
            assert models.filled(far_model, float(number))
        assert whole == [True] * 6


# -- links that are lost -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_link_that_is_lost_is_replaced() -> None:
    scheme, source = sending()
    receiver, target = receiving(scheme)
    async with scheme, receiver:
        await asyncio.gather(scheme.connect(), receiver.connect())
        for number in range(2, 6):
            models.fill(source, float(number))
            await scheme.send()
            [peer] = scheme._sender.peers.values()
            peer.transport.channel.fail(aiosync.TransportBroken("for the test"))
            await harness.until(lambda: list(scheme._sender.peers.values()) not in ([], [peer]))  # noqa: B023
            assert models.filled(target, float(number))
        await harness.until(lambda: receiver.reconnects == 4)  # the worker is told last
        assert kind(receiver) is SharedMemTransport


@pytest.mark.asyncio
async def test_the_slots_of_the_next_trainer_are_not_those_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Segments and slots are counted from 1 in each process, and may have the same names."""
    address = f"tcp://127.0.0.1:{free_port()}"
    first, source = sending(token=TOKEN, address=address)
    receiver, target = receiving(first)
    async with receiver:
        async with first:
            await asyncio.gather(first.connect(), receiver.connect())
            for number in (2.0, 3.0, 4.0):
                models.fill(source, number)
                await first.send()
            segment = first._same_host.arena.segment.segment_id
        assert models.filled(target, 4.0)
        monkeypatch.setattr(_segment, "_segment_ids", itertools.count(segment))
        second, source = sending(token=TOKEN, address=address)
        async with second:
            await second.connect()
            await harness.until(lambda: models.filled(target, 1.0))
            for number in (12.0, 13.0, 14.0, 15.0):
                models.fill(source, number)
                await second.send()
                assert models.filled(target, number)
        assert receiver.reconnects == 1
        assert kind(receiver) is SharedMemTransport
    assert models.filled(target, 15.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.asyncio
async def test_a_worker_that_waits_for_its_trainer_finds_it_here() -> None:
    """Whether it is dialled for the first time or again."""
    address = f"tcp://127.0.0.1:{free_port()}"
    early = aiosync.DistributedWeightSyncScheme(timeout=PATIENCE, token=TOKEN, address=address)
    target = models.medium()
    early.init_on_receiver(model_id="policy", model=target)
    async with early:
        joining = asyncio.ensure_future(early.connect())
        for number in range(3):
            await asyncio.sleep(0.3)
            trainer, source = sending(token=TOKEN, address=address)
            async with trainer:
                await trainer.connect()
                await joining
                await harness.until(lambda trainer=trainer: bool(trainer._sender.peers))  # type: ignore[misc]
                models.fill(source, float(number))
                await trainer.send()
                assert models.filled(target, float(number))
                assert kind(early) is SharedMemTransport


@pytest.mark.asyncio
@pytest.mark.parametrize("trouble", ["hangs up", "other token", "other user", "no process"])
async def test_who_cannot_be_met_there_is_met_over_the_network(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers that share a network, but no processes."""
    address = Address.parse(f"tcp://127.0.0.1:{free_port()}")
    stranger = _same_host.SameHost(
        address,
        Credentials(token=(TOKEN if trouble == "hangs up" else "another secret of 16").encode()),
        handshake_timeout=1e-9 if trouble == "hangs up" else PATIENCE,
    )
    tasks = TaskOwner(lambda error: None)
    stranger.arena = _segment.Arena()
    stranger.start(lambda link: None, tasks)
    if trouble in ("other user", "no process"):
        found = (os.getpid(), os.geteuid() + 1) if trouble == "other user" else (0, os.geteuid())
        monkeypatch.setattr(_same_host, "peer_pid", lambda _: found)
    scheme, source = sending(token=TOKEN, address=str(address))  # the name is taken
    receiver, target = receiving(scheme)
    try:
        async with scheme, receiver:
            await asyncio.gather(scheme.connect(), receiver.connect())
            assert kind(receiver) is DistributedTransport
            models.fill(source, 2.0)
            await scheme.send()
            assert models.filled(target, 2.0)
            [peer] = scheme._sender.peers.values()
            peer.transport.channel.fail(aiosync.TransportBroken("for the test"))
            await harness.until(lambda: receiver.reconnects == 1)
            assert kind(receiver) is DistributedTransport
    finally:
        stranger.close()
        stranger.arena.close()
        await tasks.aclose()


@pytest.mark.asyncio
async def test_a_trainer_here_that_does_not_answer_costs_no_more_than_the_deadline() -> None:
    address = Address.parse(f"tcp://127.0.0.1:{free_port()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hung:
        hung.bind(_same_host._name(address))
        hung.listen()
        receiver = aiosync.DistributedWeightSyncScheme(token=TOKEN, address=str(address))
        receiver.init_on_receiver(model_id="policy", model=models.medium())
        started = asyncio.get_running_loop().time()
        async with receiver:
            with pytest.raises(aiosync.ConnectTimeout):
                await receiver.connect(timeout=0.5)
        assert asyncio.get_running_loop().time() - started < 5.0


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
async def test_a_worker_that_dies_while_the_weights_are_copied_keeps_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = _making._copy_in_order
    begun, going = threading.Event(), threading.Event()

    def slowly(*args: Any) -> None:
        begun.set()
        assert going.wait(PATIENCE)
        copy(*args)

    monkeypatch.setattr(_making, "_copy_in_order", slowly)
    scheme, source = sending(models.big)
    far, far_model = receiving(scheme, models.big, shared_memory=False)
    async with scheme, far:
        await asyncio.gather(scheme.connect(), far.connect())
        for number in range(2, 7):
            begun.clear()
            going.clear()
            near = harness.start(scheme, models.big)
            try:
                await near.call(harness.join)
                models.fill(source, float(number))
                sent = asyncio.ensure_future(scheme.send(timeout=PATIENCE))
                await asyncio.to_thread(begun.wait, PATIENCE)
                near.kill()
                await harness.until(lambda: len(scheme._sender.peers) == 1)
                going.set()
                with pytest.raises(PartialSyncError):
                    await sent
            finally:
                near.end()
            assert models.filled(far_model, float(number))
        assert scheme._same_host.arena.num_slots <= 3


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_who_joins_while_the_weights_are_copied_gets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not one of those who were there when send() was called."""
    copy_into = Flattener.copy_into
    begun, going = threading.Event(), threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert going.wait(PATIENCE)
        copy_into(*args, **kwargs)

    scheme, source = sending(models.big)
    (near, near_model), (late, late_model) = (receiving(scheme, models.big) for _ in range(2))
    async with scheme, near, late:
        await asyncio.gather(scheme.connect(), near.connect())
        monkeypatch.setattr(Flattener, "copy_into", slowly)
        models.fill(source, 2.0)
        sent = asyncio.ensure_future(scheme.send())
        await asyncio.to_thread(begun.wait, PATIENCE)
        await late.connect()  # has the version before
        assert models.filled(late_model, 1.0)
        going.set()
        assert (await sent).acked == {0, 1}
        assert models.filled(near_model, 2.0)
        assert models.filled(late_model, 2.0)


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_room_for_large_weights_is_not_made_on_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []
    take = _segment.take_pages

    def noted(*args: int) -> None:
        threads.append(threading.current_thread())
        take(*args)

    monkeypatch.setattr(_segment, "take_pages", noted)
    scheme, source = sending(models.big)
    receiver, target = receiving(scheme, models.big)
    async with scheme, receiver:
        await asyncio.gather(scheme.connect(), receiver.connect())
        for number in (2.0, 3.0):
            models.fill(source, number)
            await scheme.send()
            assert models.filled(target, number)
        slots = scheme._same_host.arena.num_slots
    assert threading.main_thread() not in threads
    assert len(threads) == slots


@pytest.mark.asyncio
@pytest.mark.parametrize("shared_memory", [True, False])
async def test_who_refuses_what_is_sent_says_so_when_it_gives_up(shared_memory: bool) -> None:
    """And does not blame the trainer, which has no time to answer the last time it is dialled."""
    scheme, _ = sending(models.linear)
    limits = aiosync.Limits(max_payload_nbytes=2**20)
    changes = {"shared_memory": shared_memory, "limits": limits, "reconnect": 0.7}
    receiver, _ = receiving(scheme, models.linear, **changes)
    async with scheme, receiver:
        await asyncio.gather(scheme.connect(), receiver.connect())
        with pytest.raises(PartialSyncError):
            await scheme.send({"weight": torch.zeros(2**20), "bias": torch.zeros(2)})
        with pytest.raises(aiosync.PeerClosed, match="at most 1048576 are allowed"):
            await receiver.wait_for_version(2, timeout=PATIENCE)


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_a_trainer_without_descriptors_lets_workers_in_later() -> None:
    """And its loop does nothing else meanwhile than to look now and then."""

    class Full:
        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.calls, self.full = sock, 0, True

        def accept(self) -> Any:
            self.calls += 1
            if self.full:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return self.sock.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

    scheme = aiosync.SharedMemWeightSyncScheme(timeout=PATIENCE)
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source, num_workers=1)
    worker = harness.twin(scheme)
    worker.init_on_receiver(model=target)
    scheme._listener._sock = full = Full(scheme._listener._sock)  # type: ignore[assignment, union-attr]
    async with scheme, worker:
        both = asyncio.gather(scheme.connect(), worker.connect())
        await asyncio.sleep(0.5)
        assert 1 <= full.calls <= 10
        full.full = False
        await both
        assert models.filled(target, 1.0)


# -- who meets whom ----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_each_side_may_decline(side: str) -> None:
    scheme, source = sending(shared_memory=side != "sender")
    receiver, target = receiving(scheme, shared_memory=side != "receiver")
    async with scheme, receiver:
        await asyncio.gather(scheme.connect(), receiver.connect())
        assert kind(receiver) is DistributedTransport
        models.fill(source, 2.0)
        await scheme.send()
        assert models.filled(target, 2.0)


@pytest.mark.asyncio
async def test_a_store_leads_there() -> None:
    store = dist.HashStore()
    scheme, source = sending(store=store)
    receiver = aiosync.DistributedWeightSyncScheme(store=store, timeout=PATIENCE)
    target = models.medium()
    receiver.init_on_receiver(model_id="policy", model=target)
    async with scheme, receiver:
        await asyncio.gather(scheme.connect(), receiver.connect())
        assert kind(receiver) is SharedMemTransport
        models.fill(source, 2.0)
        await scheme.send()
        assert models.filled(target, 2.0)


@pytest.mark.asyncio
async def test_two_trainers_of_one_scheme_and_one_token() -> None:
    """Each listens for itself: a worker gets the weights of the one that it was copied from."""
    plain = aiosync.DistributedWeightSyncScheme(timeout=PATIENCE, token=TOKEN)
    trainers = [harness.twin(plain) for _ in range(2)]
    crew = []
    for number, trainer in enumerate(trainers):
        source = models.medium()
        models.fill(source, float(number))
        trainer.init_on_sender(model_id="policy", model=source)
        crew.append(receiving(trainer))
    async with trainers[0], trainers[1], crew[0][0], crew[1][0]:
        await asyncio.gather(*(each.connect() for each in (*trainers, crew[0][0], crew[1][0])))
        for number, (receiver, target) in enumerate(crew):
            assert kind(receiver) is SharedMemTransport
            assert models.filled(target, float(number))


@pytest.mark.asyncio
async def test_weights_are_for_those_who_have_the_token() -> None:
    scheme, _ = sending(token=TOKEN)
    address = Address.parse(scheme.address)
    elsewhere = Address.parse(f"tcp://127.0.0.2:{address.port}")
    right, wrong = Credentials(token=TOKEN.encode()), Credentials(token=b"another one of 16")
    async with scheme:
        await scheme.connect()
        link = await _same_host.dial_here(address, right)
        assert link is not None
        link.abort()
        assert await _same_host.dial_here(address, wrong) is None
        assert await _same_host.dial_here(address, Credentials()) is None
        assert await _same_host.dial_here(elsewhere, right) is None
        # One who lists the names of this host, and knows the format but no token.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(_same_host._name(address))
            thief = SharedMemTransport(sock.dup())
            await thief.send(Hello(role="receiver", model_id="policy", pid=os.getpid()))
            with pytest.raises((aiosync.PeerClosed, aiosync.TransportBroken)):
                while True:
                    message = (await thief.recv(timeout=PATIENCE)).message
                    assert isinstance(message, Challenge | Refuse)
            thief.abort()
        assert not scheme._sender.peers
    assert await _same_host.dial_here(address, right) is None


@pytest.mark.asyncio
@pytest.mark.parametrize("said", ["nothing", "something else", "another kind", "no name", "a name"])
async def test_what_follows_the_proof(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's name, before it is anybody; who does not say it is hung up on, in time."""
    scheme, _ = sending(token=TOKEN, handshake_timeout=0.3)
    address, credentials = Address.parse(scheme.address), Credentials(token=TOKEN.encode())
    send = SharedMemTransport.send

    async def instead(self: Any, message: Any, *args: Any, **kwargs: Any) -> None:
        if type(message) is not Setup:
            await send(self, message, *args, **kwargs)
        elif said == "something else":
            await send(self, Hello("receiver", "policy", os.getpid()))
        elif said != "nothing":
            kind = "there" if said == "another kind" else "here"
            await send(self, Setup(kind, "called", b"" if said == "no name" else b"an\r actor\xff"))

    monkeypatch.setattr(SharedMemTransport, "send", instead)
    async with scheme:
        await scheme.connect()
        link = await _same_host.dial_here(address, credentials)
        assert link is not None
        monkeypatch.undo()
        if said in ("no name", "a name"):
            await link.send(Hello("receiver", "policy", os.getpid(), strategy="any"))
            assert isinstance((await link.recv(timeout=PATIENCE)).message, Welcome)
            [peer] = scheme._sender.peers.values()
            known = "an_ actor_, " if said == "a name" else ""
            assert peer.name == f"{known}worker process {os.getpid()}"
        else:
            with pytest.raises((aiosync.PeerClosed, aiosync.TransportBroken)):
                await link.recv(timeout=PATIENCE)
            assert not scheme._sender.peers
        link.abort()


@pytest.mark.asyncio
async def test_a_name_that_is_taken_is_no_reason_to_fail() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
        taken.bind(_same_host._name(Address.parse(address)))  # and never listens
        scheme, source = sending(token=TOKEN, address=address)
        receiver, target = receiving(scheme)
        async with scheme, receiver:
            await asyncio.gather(scheme.connect(), receiver.connect())
            assert kind(receiver) is DistributedTransport
            models.fill(source, 2.0)
            await scheme.send()
            assert models.filled(target, 2.0)


@pytest.mark.parametrize("engine", ["Distributed", "RPC", "Ray"])
def test_on_other_systems_there_is_none(engine: str, monkeypatch: Any) -> None:
    if engine == "Ray":
        pytest.importorskip("ray")
    scheme = getattr(aiosync, f"{engine}WeightSyncScheme")()
    assert scheme._shares_memory is (sys.platform == "linux")
    monkeypatch.setattr("aiosync.schemes._engine.available", lambda: False)
    assert not scheme._shares_memory


@pytest.mark.asyncio
async def test_a_sandbox_that_forbids_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> int:
        raise PermissionError("memfd_create")

    for module in (_anonymous, _segment):
        monkeypatch.setattr(module, "anonymous_file", forbidden)
    _same_host.available.cache_clear()
    try:
        scheme, source = sending()
        receiver, target = receiving(scheme)
        async with scheme, receiver:
            await asyncio.gather(scheme.connect(), receiver.connect())
            assert kind(receiver) is DistributedTransport
            models.fill(source, 2.0)
            await scheme.send()
            assert models.filled(target, 2.0)
    finally:
        _same_host.available.cache_clear()


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    scheme, source = sending()
    receiver, target = receiving(scheme)
    async with scheme, receiver:
        await asyncio.gather(scheme.connect(), receiver.connect())
        with pytest.raises(PartialSyncError) as caught:
            await scheme.send({"other": source.block.detach()})
        assert isinstance(caught.value.failed[0], ApplyError)
        assert models.filled(target, 1.0)
        models.fill(source, 3.0)
        await scheme.send()
        assert models.filled(target, 3.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("closed", ["scheme", "receiver"])
async def test_a_model_outlives_its_scheme(closed: str) -> None:
    scheme, source = sending()
    receiver, target = receiving(scheme, reconnect=0.0)
    async with scheme, receiver:
        await asyncio.gather(scheme.connect(), receiver.connect())
        models.fill(source, 2.0)
        await scheme.send()
        await (scheme if closed == "scheme" else receiver).aclose()
        if closed == "receiver":
            late, _ = receiving(scheme)
            async with late:
                await late.connect()
                for number in (3.0, 4.0, 5.0):
                    models.fill(source, number)
                    await scheme.send(worker_ids=late.worker_idx)
                assert models.filled(target, 2.0)
    gc.collect()
    assert models.filled(target, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_fork_leaves_the_listener_alone(loop: str) -> None:
    async def main() -> None:
        scheme, source = sending()
        async with harness.workers(scheme, models.medium, 1, method="fork") as [worker]:
            assert (await worker.call(kind_there))[0] == "SharedMemTransport"
            models.fill(source, 2.0)
            await scheme.send()
            assert await value(worker) == 2.0

    harness.run(loop, main())


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.parametrize("lost", [False, True])
async def test_a_fork_keeps_its_weights_whatever_became_of_the_link(
    lost: bool, tmp_path: Path
) -> None:
    """The trainer takes a slot back when the process dies that read it; its child may live."""
    scheme, source = sending()
    async with scheme:
        await scheme.connect()
        worker = harness.start(scheme, models.medium)
        try:
            await worker.call(harness.join)
            models.fill(source, 2.0)
            await scheme.send()
            if lost:
                [peer] = scheme._sender.peers.values()
                peer.transport.channel.fail(aiosync.TransportBroken("for the test"))
                await harness.until(lambda: list(scheme._sender.peers.values()) not in ([], [peer]))
            await worker.call(look_later, str(tmp_path))
            worker.kill()
            await harness.until(lambda: not scheme._sender.peers)
            for number in range(3, 8):
                models.fill(source, float(number))
                with contextlib.suppress(PartialSyncError):
                    await scheme.send()
            (tmp_path / "go").touch()
            await harness.until((tmp_path / "seen").exists)
            assert (tmp_path / "seen").read_text() == "[2.0]"
        finally:
            (tmp_path / "go").touch()
            worker.end()


def look_later(worker: harness.State, folder: str) -> None:
    """Fork a child that writes down which weights it has, when it is told to."""
    if os.fork():
        return
    try:
        give_up = time.monotonic() + PATIENCE
        while not os.path.exists(f"{folder}/go") and time.monotonic() < give_up:
            time.sleep(0.01)
        with open(f"{folder}/being", "w") as file:
            file.write(str(worker.model.block.unique().tolist()))
        os.rename(f"{folder}/being", f"{folder}/seen")
    finally:
        os._exit(0)


def test_options_travel() -> None:
    for make in (aiosync.DistributedWeightSyncScheme, aiosync.RPCWeightSyncScheme):
        assert harness.twin(make()).shared_memory is True
        scheme = functools.partial(make, shared_memory=False)()
        assert harness.twin(scheme).shared_memory is False
    assert aiosync.sync.DistributedWeightSyncScheme(shared_memory=False).shared_memory is False
