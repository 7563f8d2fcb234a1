"""Weights over real Gloo groups, and through shared memory to workers on the trainer's host.

The contract suite, which runs over both, tests the promises of every scheme.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import distributed as dist
from torch import nn

import aiosync
from aiosync import sync
from aiosync.errors import ConfigError, ConnectTimeout, PartialSyncError
from aiosync.transports import DistributedTransport, SharedMemTransport, TCPTransport
from aiosync.wire import Challenge, Hello, Refuse, Update
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_address, wait_until

pytestmark = pytest.mark.one_loop

PATIENCE = harness.PATIENCE
TOKEN = "a secret of the test"


def sending(
    build: Any = models.medium, num_workers: int | None = None, **options: Any
) -> tuple[aiosync.DistributedWeightSyncScheme, nn.Module]:
    """Return a sender that is not connected, and its model, filled with 1."""
    source = build()
    models.fill(source, 1.0)
    scheme = aiosync.DistributedWeightSyncScheme(**{"timeout": PATIENCE, **options})
    scheme.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    return scheme, source


def state(worker: harness.State) -> tuple[type, bool, bool]:
    """Return the type of a worker's link, and True for a default group and for a Gloo thread."""
    gloo = any("gloo" in thread.name for thread in threading.enumerate())
    return type(worker.scheme.receiver_transport), dist.is_initialized(), gloo


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "near", "kind", "gloo"),
    [
        (models.medium, False, DistributedTransport, True),
        (models.linear, False, DistributedTransport, False),
        (models.medium, True, SharedMemTransport, False),
    ],
)
async def test_only_large_updates_to_other_hosts_take_a_group(
    build: Any, near: bool, kind: type, gloo: bool
) -> None:
    """No process ever makes a default group. A killed worker is named, and may be replaced."""
    scheme, source = sending(build, 2, shared_memory=near)
    async with harness.workers(scheme, build, 2) as crew:
        models.fill(source, 2.0)
        assert (await scheme.send()).acked == {0, 1}
        # No worker may see this later step of an optimizer.
        models.fill(source, -9.0)
        assert [await worker.value() for worker in crew] == [2.0, 2.0]
        assert [await worker.call(state) for worker in crew] == [(kind, False, gloo)] * 2
        crew[1].kill()
        with pytest.raises(PartialSyncError) as caught:
            await scheme.send(timeout=PATIENCE)
        assert (set(caught.value.failed), caught.value.acked) == ({1}, {0})
        crew.append(harness.start(scheme, build))
        await crew[2].call(harness.join, 1)
        models.fill(source, 9.0)
        assert (await scheme.send()).acked == {0, 1}
        assert await crew[2].value() == 9.0
    assert not dist.is_initialized()


def halt_in_mid_transfer(_worker: harness.State, how: int) -> None:
    """Halt this worker in the next payload, once some chunks have come and more were asked for."""
    recv, left = dist.ProcessGroupGloo.recv, 12

    def counted(*args: Any) -> Any:
        nonlocal left
        left -= 1
        # The thread signals itself: told by another thread, it might ask for all the rest before.
        if left == 0:
            signal.pthread_kill(threading.get_ident(), how)
        return recv(*args)

    dist.ProcessGroupGloo.recv = counted


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_worker_that_halts_in_mid_transfer_is_lost_after_one_patience(how: int) -> None:
    """The worker gets the missed update when it goes on, or another worker gets it in its place."""
    scheme, source = sending(models.big, 1, patience=1.0, shared_memory=False)
    async with harness.workers(scheme, models.big, 1) as crew:
        await crew[0].call(halt_in_mid_transfer, how)
        models.fill(source, 2.0)
        with pytest.raises(PartialSyncError) as caught:
            await scheme.send(timeout=PATIENCE)
        assert isinstance(caught.value.failed[0], (aiosync.TransportBroken, aiosync.PeerClosed))
        if how == signal.SIGSTOP:
            crew[0].cont()
            await crew[0].call(harness.wait_for_version, 2)
        else:
            crew.append(harness.start(scheme, models.big))
            assert await crew[1].call(harness.join, 0) == 2
        assert await crew[-1].value() == 2.0


@pytest.mark.asyncio
@pytest.mark.slow
async def test_what_broke_a_link_keeps_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports name a lost worker until it is back: that must not cost the memory of a model."""
    goes_on = threading.Event()

    def stalled(*_: Any) -> Any:
        goes_on.wait(PATIENCE)
        raise RuntimeError("it has stalled")

    monkeypatch.setattr(dist.ProcessGroupGloo, "recv", stalled)
    async with (
        TCPTransport.pair() as (left, right),
        DistributedTransport(left, rank=0, patience=0.1) as sender,
        DistributedTransport(right, rank=1) as receiver,
    ):
        weights = np.zeros(2**22, np.uint8)
        update = Update(epoch=1, version=1, digest=b"d" * 16)
        receiving = asyncio.create_task(receiver.recv())
        with pytest.raises(aiosync.TransportBroken, match="Gloo failed"):
            await sender.send(update, [memoryview(weights)])
        goes_on.set()
        with pytest.raises(aiosync.TransportBroken):
            await receiving
        gone = weakref.ref(weights)
        del weights
        await harness.until(lambda: gone() is None)
        assert left.error is not None


@pytest.mark.asyncio
async def test_large_updates_over_links_that_were_made_before_a_scheme_had_a_role() -> None:
    one, other = socket.socketpair()
    sender = aiosync.DistributedWeightSyncScheme(timeout=PATIENCE)
    receiver, source = harness.twin(sender), models.medium()
    models.fill(source, 1.0)
    sender.init_on_sender(model=source, transports={0: sender.create_transport(one)})
    receiver.init_on_receiver(model=models.medium(), transport=receiver.create_transport(other))
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        assert models.holds(receiver, 1.0)


def test_a_send_that_a_closed_loop_has_left_is_collected_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The send is collected like any coroutine that was not cancelled."""
    ends, heard = list[DistributedTransport](), list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", heard.append)

    async def leave() -> None:
        for rank, end in enumerate(socket.socketpair()):
            ends.append(DistributedTransport(TCPTransport(end), rank=rank))
        update = Update(epoch=1, version=1, digest=b"d" * 16)
        sending = asyncio.ensure_future(ends[0].send(update, [bytes(2**20)]))
        assert (await ends[1].channel.recv()).message == update
        # The send waits until the other end fetches the payload.
        assert not sending.done()

    loop = asyncio.SelectorEventLoop()
    # asyncio reports that the task was destroyed.
    loop.set_exception_handler(lambda *_: None)
    loop.run_until_complete(leave())
    for end in ends:
        end.abort()
    loop.close()
    del end
    ends.clear()
    wait_until(lambda: not any("gloo" in thread.name for thread in threading.enumerate()))
    gc.collect()
    assert not heard


# -- meeting in a store, on one host, and over the network -----------------------------------------


class BrokenStore(dist.Store):
    """Store whose server has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("connection reset by peer")


@pytest.mark.asyncio
@pytest.mark.parametrize("near", [True, False])
async def test_meeting_in_a_store(near: bool) -> None:
    options: dict[str, Any] = {"store": dist.HashStore(), "shared_memory": near}
    scheme, _ = sending(num_workers=1, **options)
    receiver = aiosync.DistributedWeightSyncScheme(timeout=PATIENCE, **options)
    receiver.init_on_receiver(model_id="policy", model=models.medium())
    async with scheme, receiver:
        await asyncio.gather(receiver.connect(), scheme.connect())
        assert models.holds(receiver, 1.0)
        kind = SharedMemTransport if near else DistributedTransport
        assert isinstance(receiver.receiver_transport, kind)


@pytest.mark.asyncio
@pytest.mark.parametrize("near", [True, False])
async def test_a_worker_that_comes_before_the_token_is_in_the_store(near: bool) -> None:
    """It knows the address, and has no other token than one of its own."""
    options: dict[str, Any] = {
        "store": dist.HashStore(),
        "address": free_address(),
        "shared_memory": near,
    }
    scheme, _ = sending(models.linear, 1, **options)
    receiver = aiosync.DistributedWeightSyncScheme(timeout=PATIENCE, **options)
    receiver.init_on_receiver(model_id="policy", model=models.linear())
    async with scheme, receiver:
        joining = asyncio.create_task(receiver.connect())
        # By then the worker has dialled.
        await asyncio.sleep(0.1)
        await asyncio.gather(joining, scheme.connect())
        assert models.holds(receiver, 1.0)


@pytest.mark.asyncio
async def test_a_token_of_the_user_is_no_guess() -> None:
    """A worker that has the wrong one gives up at once, unless the trainer published another."""
    address = free_address()
    scheme, _ = sending(models.linear, address=address)
    options: dict[str, Any] = {"store": dist.HashStore(), "address": address, "token": TOKEN}
    async with scheme, aiosync.DistributedWeightSyncScheme(**options) as wrong:
        await scheme.connect()
        wrong.init_on_receiver(model_id="policy", model=models.linear())
        with pytest.raises(aiosync.AuthError):
            await wrong.connect(timeout=PATIENCE)


def mirrored(scheme: aiosync.DistributedWeightSyncScheme) -> Any:
    """Return the scheme behind the synchronous twin of a scheme."""
    return sync.twin(sync.twin(scheme))


@pytest.mark.asyncio
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, mirrored])
async def test_only_a_pickle_leaves_the_store_behind(duplicate: Any) -> None:
    original = aiosync.DistributedWeightSyncScheme(timeout=PATIENCE, store=dist.HashStore())
    scheme, receiver, far = duplicate(original), duplicate(original), harness.twin(original)
    scheme.init_on_sender(model_id="policy", model=models.linear(1.0), num_workers=1)
    receiver.init_on_receiver(model_id="policy", model=models.linear())
    far.init_on_receiver(model_id="policy", model=models.linear())
    async with scheme, receiver, far:
        await asyncio.gather(receiver.connect(), scheme.connect())
        assert models.holds(receiver, 1.0)
        with pytest.raises(ConfigError, match="does not know where"):
            await far.connect()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("store", "error", "text"),
    [
        (dist.HashStore(), ConnectTimeout, "store"),
        (BrokenStore(), aiosync.ConnectError, "reset by peer"),
        (None, ConfigError, "after init_on_sender"),
    ],
)
async def test_nobody_to_meet(store: Any, error: type[Exception], text: str) -> None:
    scheme = aiosync.DistributedWeightSyncScheme(store=store)
    scheme.init_on_receiver(model=models.linear())
    with pytest.raises(error, match=text):
        await scheme.connect(timeout=0.2)


class FrozenStore(dist.Store):
    """Store whose server answers no longer once :attr:`answers` is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked, self._values = threading.Event(), 0, dict[str, bytes]()

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.answers.wait(PATIENCE)
        return self._values.keys() >= {*keys}

    def get(self, key: str) -> bytes:
        return self._values[key]


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_frozen_store_costs_no_more_than_the_deadline() -> None:
    store = FrozenStore()
    async with aiosync.DistributedWeightSyncScheme(store=store) as receiver:
        receiver.init_on_receiver(model=models.linear())
        try:
            async with asyncio.timeout(PATIENCE / 2):
                with pytest.raises(ConnectTimeout, match="did not answer"):
                    await receiver.connect(timeout=0.5)
        finally:
            store.answers.set()
    assert store.asked == 1


FROZEN = """
import asyncio, threading, torch, torch.distributed as dist
import aiosync
from aiosync import sync

class Frozen(dist.Store):
    def check(self, keys):
        threading.Event().wait()

async def main():
    async with aiosync.DistributedWeightSyncScheme(store=Frozen()) as worker:
        worker.init_on_receiver(model=torch.nn.Linear(1, 1))
        try:
            await worker.connect(timeout=0.5)
        except aiosync.ConnectTimeout:
            print("too late")

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_frozen_store_does_not_keep_the_process_from_ending() -> None:
    """The call that was given up still waits in its thread."""
    ended = subprocess.run(
        [sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert ended.stdout == "too late\n"


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_worker_finds_its_trainer_again_while_the_store_is_frozen() -> None:
    """The trainer is tried at its last address; without it the worker gives up in time."""
    store = FrozenStore()
    store.answers.set()
    scheme, source = sending(num_workers=1, store=store)
    receiver = aiosync.DistributedWeightSyncScheme(
        store=store, timeout=PATIENCE, reconnect=5.0, handshake_timeout=0.5
    )
    receiver.init_on_receiver(model_id="policy", model=models.medium())
    async with scheme, receiver:
        await asyncio.gather(receiver.connect(), scheme.connect())
        store.answers.clear()
        asked = store.asked
        try:
            async with asyncio.timeout(PATIENCE / 2):
                for value in (2.0, 3.0):
                    scheme.sender_transports[0].abort()
                    await harness.until(lambda: not scheme.sender_transports)
                    await harness.until(lambda: bool(scheme.sender_transports))
                    models.fill(source, value)
                    assert (await scheme.send()).acked == {0}
                    assert models.holds(receiver, value)
                await scheme.aclose()
                with pytest.raises(aiosync.PeerClosed, match="not restored within 5 s"):
                    await receiver.wait_for_version(99)
            # At most one thread hangs.
            assert store.asked == asked + 1
        finally:
            store.answers.set()


def names() -> set[str]:
    """Return the names of the abstract sockets of this process."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        # The descriptor of this listing is closed by now.
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    fields = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()]
    return {
        "\0" + each[7][1:]
        for each in fields
        if each[7:] and each[7].startswith("@") and f"socket:[{each[6]}]" in mine
    }


async def name_of(address: str) -> str:
    """Return the name of the abstract socket that a sender has beside its address."""
    before = names()
    async with sending(models.linear, address=address)[0]:
        [name] = names() - before
        return name


@pytest.mark.asyncio
@pytest.mark.parametrize("trouble", ["its name is taken", "it is another user's", "no wish"])
async def test_who_cannot_be_met_there_is_met_over_the_network(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = free_address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
        if trouble == "its name is taken":
            # The owner of the name never listens.
            taken.bind(await name_of(address))
        scheme, source = sending(token=TOKEN, address=address)
        receiver = harness.twin(scheme)
        if trouble == "it is another user's":
            monkeypatch.setattr(os, "geteuid", lambda: -5)
        receiver.shared_memory = trouble != "no wish"
        receiver.init_on_receiver(model_id="policy", model=models.medium())
        async with scheme, receiver:
            await asyncio.gather(scheme.connect(), receiver.connect())
            assert type(receiver.receiver_transport) is DistributedTransport
            models.fill(source, 2.0)
            await scheme.send()
            assert models.holds(receiver, 2.0)


@pytest.mark.asyncio
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 that takes IPv4 as well")
async def test_a_large_update_over_ipv4_from_a_trainer_that_listens_on_ipv6() -> None:
    options: dict[str, Any] = {"token": TOKEN, "shared_memory": False, "timeout": PATIENCE}
    scheme, _ = sending(num_workers=1, address="tcp://[::]:0", **options)
    address = scheme.address.replace("[::]", "127.0.0.1")
    receiver = aiosync.DistributedWeightSyncScheme(address=address, **options)
    receiver.init_on_receiver(model_id="policy", model=models.medium())
    async with scheme, receiver:
        await asyncio.gather(receiver.connect(), scheme.connect())
        assert models.holds(receiver, 1.0)


@pytest.mark.asyncio
async def test_a_trainer_here_that_does_not_answer_costs_no_more_than_the_deadline() -> None:
    address = free_address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hung:
        hung.bind(await name_of(address))
        hung.listen()
        async with aiosync.DistributedWeightSyncScheme(token=TOKEN, address=address) as receiver:
            receiver.init_on_receiver(model_id="policy", model=models.medium())
            with pytest.raises(ConnectTimeout):
                await receiver.connect(timeout=0.5)


@pytest.mark.asyncio
async def test_weights_are_for_those_who_have_the_token() -> None:
    before = names()
    scheme, _ = sending(token=TOKEN)
    [name] = names() - before
    async with scheme:
        await scheme.connect()
        wrong = aiosync.DistributedWeightSyncScheme(
            token="another one of 16", address=scheme.address
        )
        wrong.init_on_receiver(model_id="policy", model=models.medium())
        async with wrong:
            with pytest.raises(aiosync.AuthError):
                await wrong.connect(timeout=PATIENCE)
        # A thief may list the names of this host, and know the format but no token.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(name)
            async with SharedMemTransport(sock.dup()) as thief:
                await thief.send(Hello(role="receiver", model_id="policy", pid=os.getpid()))
                with pytest.raises((aiosync.PeerClosed, aiosync.TransportBroken)):
                    while True:
                        message = (await thief.recv(timeout=PATIENCE)).message
                        assert isinstance(message, Challenge | Refuse)
        assert not scheme.sender_transports


# -- beside other groups ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_is_sharded_over_two_ranks() -> None:
    command = [sys.executable, "-m", "tests.schemes._fsdp_trainer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for text in (
        "the worker has the values of the whole model",
        "the root was not sharded after a forward",
        "rank 0 has seen every form",
        "rank 1 has seen every form",
        "alone: SyncTimeout: not all 2 ranks",
        "alone: TransportBroken: the ranks of the mesh could not meet",
    ):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        (["mpi"], {}, "must be 'gloo'"),
        (["nccl"], {}, "not supported"),
        ([], {"patience": 0}, "patience"),
        ([], {"inline_nbytes": -1}, "inline_nbytes"),
    ],
)
def test_mistakes_are_said_early(args: Any, options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        aiosync.DistributedWeightSyncScheme(*args, **options)
