"""Engines' workers on the trainer's own host: shared memory instead of a group or calls."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
from aiosync.errors import PartialSyncError
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.wire import (
    Challenge,
    Hello,
    Refuse,
)
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_address

if TYPE_CHECKING:
    from torch import nn

PATIENCE = harness.PATIENCE
TOKEN = "a secret of the test"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
    pytest.mark.one_loop,
]


def sending(
    build: Any = models.medium, num_workers: int | None = None, **options: Any
) -> tuple[aiosync.DistributedWeightSyncScheme, nn.Module]:
    source = build()
    models.fill(source, 1.0)
    scheme = aiosync.DistributedWeightSyncScheme(**{"timeout": PATIENCE, **options})
    scheme.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    return scheme, source


def receiving(sender: Any, build: Any = models.medium, **changes: Any) -> Any:
    """A copy of the sender's scheme that is a receiver, not connected."""
    receiver = harness.twin(sender)
    for name, value in changes.items():
        setattr(receiver, name, value)
    receiver.init_on_receiver(model_id="policy", model=build())
    return receiver


def kind(scheme: Any) -> type:
    return type(scheme.receiver_transport)


def kind_there(worker: harness.State) -> tuple[str, list[str]]:
    gloo = [thread.name for thread in threading.enumerate() if "gloo" in thread.name]
    return kind(worker.scheme).__name__, gloo


# -- worker processes --------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
async def test_workers_get_every_version_without_a_group(method: str) -> None:
    """Whoever is killed is named at once, and another takes its place."""
    scheme, source = sending()
    async with harness.workers(scheme, models.medium, 2, method=method) as crew:
        for version in range(2, 8):
            models.fill(source, float(version))
            report = await scheme.send()
            assert (report.version, report.acked) == (version, {0, 1})
            models.fill(source, -9.0)  # an optimizer's step, which nobody may see
            assert [await worker.value() for worker in crew] == [version, version]
        assert [await worker.call(kind_there) for worker in crew] == [
            ("SharedMemTransport", [])
        ] * 2
        crew[1].stop()
        assert (await scheme.send(timeout=PATIENCE)).acked == {0, 1}  # the next thing that both see
        crew[1].kill()
        started = asyncio.get_running_loop().time()
        with pytest.raises(PartialSyncError) as caught:
            await scheme.send(timeout=PATIENCE)
        assert asyncio.get_running_loop().time() - started < 1.0
        assert (set(caught.value.failed), caught.value.acked) == ({1}, {0})
        crew.append(harness.start(scheme, models.medium, method=method))
        assert await crew[2].call(harness.join, 1) == 9
        models.fill(source, 9.0)
        assert (await scheme.send()).acked == {0, 1}
        assert await crew[2].value() == 9.0


# -- links that are lost -----------------------------------------------------------------------


async def lose_the_link(scheme: Any) -> None:
    """And wait for the next one."""
    [link] = scheme.sender_transports.values()
    link.abort()
    await harness.until(lambda: list(scheme.sender_transports.values()) not in ([], [link]))


def names() -> set[str]:
    """The abstract sockets of this process."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of this listing
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    fields = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()]
    return {
        "\0" + each[7][1:]
        for each in fields
        if each[7:] and each[7].startswith("@") and f"socket:[{each[6]}]" in mine
    }


async def name_of(address: str) -> str:
    """What the socket beside an address is called."""
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
            taken.bind(await name_of(address))  # by one who never listens
        scheme, source = sending(token=TOKEN, address=address)
        receiver = receiving(scheme)
        if trouble == "it is another user's":
            monkeypatch.setattr(os, "geteuid", lambda: -5)
        receiver.shared_memory = trouble != "no wish"
        async with scheme, receiver:
            await asyncio.gather(scheme.connect(), receiver.connect())
            assert kind(receiver) is DistributedTransport
            models.fill(source, 2.0)
            await scheme.send()
            assert models.holds(receiver, 2.0)
            await lose_the_link(scheme)
            assert kind(receiver) is DistributedTransport


@pytest.mark.asyncio
async def test_a_trainer_here_that_does_not_answer_costs_no_more_than_the_deadline() -> None:
    address = free_address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hung:
        hung.bind(await name_of(address))
        hung.listen()
        receiver = aiosync.DistributedWeightSyncScheme(token=TOKEN, address=address)
        receiver.init_on_receiver(model_id="policy", model=models.medium())
        started = asyncio.get_running_loop().time()
        async with receiver:
            with pytest.raises(aiosync.ConnectTimeout):
                await receiver.connect(timeout=0.5)
        assert asyncio.get_running_loop().time() - started < 5.0


@pytest.mark.asyncio
async def test_a_trainer_without_descriptors_lets_workers_in_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its loop does nothing else meanwhile than to look now and then."""
    scheme = aiosync.SharedMemWeightSyncScheme(timeout=PATIENCE)
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    scheme.init_on_sender(model=source, num_workers=1)
    worker = harness.twin(scheme)
    worker.init_on_receiver(model=target)
    calls: list[socket.socket] = []

    def full(sock: socket.socket) -> Any:
        calls.append(sock)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with scheme, worker:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", full)
            both = asyncio.gather(scheme.connect(), worker.connect())
            await asyncio.sleep(0.5)
        assert 1 <= len(calls) <= 10
        await both
        assert models.holds(worker, 1.0)


# -- who meets whom ----------------------------------------------------------------------------


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
        # One who lists the names of this host, and knows the format but no token.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(name)
            async with SharedMemTransport(sock.dup()) as thief:
                await thief.send(Hello(role="receiver", model_id="policy", pid=os.getpid()))
                with pytest.raises((aiosync.PeerClosed, aiosync.TransportBroken)):
                    while True:
                        message = (await thief.recv(timeout=PATIENCE)).message
                        assert isinstance(message, Challenge | Refuse)
        assert not scheme.sender_transports


@pytest.mark.asyncio
@pytest.mark.slow
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
            assert await worker.value() == 2.0
            if lost:
                await lose_the_link(scheme)
            await worker.call(look_later, str(tmp_path))
            worker.kill()
            await harness.until(lambda: not scheme.sender_transports)
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
