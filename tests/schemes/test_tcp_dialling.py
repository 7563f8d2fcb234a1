"""Workers that listen, and the trainer that dials them: who takes the place of whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiosync
from aiosync.schemes import _arriving
from aiosync.server import WeightServer
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Hello, Refuse, Welcome
from tests._certificates import certificates
from tests.schemes import _harness as harness
from tests.schemes import _models as models

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATIENCE = harness.PATIENCE


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def make(address: str, **options: Any) -> aiosync.TCPWeightSyncScheme:
    defaults: dict[str, Any] = {"dial": "sender", "timeout": PATIENCE}
    return aiosync.TCPWeightSyncScheme([address], **{**defaults, **options})


@contextlib.asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A trainer, a worker that listens, and the worker's model; version 1 is there."""
    address = free_address()
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    sender, receiver = make(address), make(address, **options)
    sender.init_on_sender(model=source)
    receiver.init_on_receiver(model=target, worker_idx=0)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        assert models.filled(target, 1.0)
        yield sender, receiver, target


def listen(receiver: Any) -> None:
    """What connect() does first; a link that comes now waits until it takes one."""
    [address] = receiver._addresses
    receiver._listen(address).start(receiver._on_sender, receiver._on_listener_crash)


def trainer_hello(epoch: int | None = 7, **changes: Any) -> Hello:
    said: dict[str, Any] = {"role": "sender", "model_id": "policy", "pid": os.getpid()}
    return Hello(**{**said, "epoch": epoch, "version": 0, **changes})


async def dial(address: str, hello: Hello | None = None) -> TCPTransport:
    """A link to a worker that listens, as a trainer opens it."""
    link = await TCPTransport.connect(address)
    if hello is not None:
        await link.send(hello, timeout=PATIENCE)
    return link


async def ended(link: TCPTransport) -> None:
    """Until the other side has closed a link."""
    with pytest.raises(aiosync.TransportError):
        await link.recv(timeout=PATIENCE)
    link.abort()


@pytest.mark.asyncio
async def test_links_that_say_nothing_do_not_pile_up() -> None:
    async with connected() as (sender, receiver, _):
        links = [await dial(receiver.address) for _ in range(40)]
        await harness.until(lambda: receiver._listener.counts.accepted == 41)
        assert receiver._listener.num_open < 20
        for link in links:
            link.abort()
        await harness.until(lambda: receiver._listener.num_open == 1)
        assert receiver.reconnects == 0
        assert (await sender.send()).acked == {0}


@pytest.mark.asyncio
async def test_a_link_that_says_nothing_is_closed_after_the_deadline(monkeypatch) -> None:
    monkeypatch.setattr(_arriving, "HANDSHAKE_SECONDS", 0.05)
    async with connected() as (_, receiver, _):
        await ended(await dial(receiver.address))
        await harness.until(lambda: receiver._listener.num_open == 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["receiver", "status"])
async def test_a_link_of_no_trainer_is_closed_at_once(role) -> None:
    async with connected() as (sender, receiver, _):
        await ended(await dial(receiver.address, trainer_hello(role=role)))
        assert receiver.reconnects == 0
        assert (await sender.send()).acked == {0}


@pytest.mark.asyncio
async def test_links_that_end_while_they_wait_are_handed_to_nobody() -> None:
    address = free_address()
    receiver = make(address, max_connections=8)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with receiver:
        listen(receiver)
        for _ in range(20):
            (await dial(address, trainer_hello())).abort()
        await harness.until(lambda: receiver._listener.num_open == 0)
        assert receiver._arrived is None


@pytest.mark.asyncio
async def test_only_the_newest_link_waits() -> None:
    address = free_address()
    receiver = make(address)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with receiver:
        listen(receiver)
        first = await dial(address, trainer_hello())
        await harness.until(lambda: receiver._arrived is not None)
        second = await dial(address, trainer_hello())
        await ended(first)
        assert receiver._listener.num_open == 1
        joining = asyncio.ensure_future(receiver.connect())
        assert isinstance((await second.recv(timeout=PATIENCE)).message, Hello)
        await second.send(Welcome(7, 0, 0, 1), timeout=PATIENCE)
        await joining
        second.abort()


@pytest.mark.asyncio
async def test_connecting_ends_when_a_trainer_that_took_over_is_refused() -> None:
    address = free_address()
    receiver, sender = make(address), make(address, timeout=PATIENCE)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    sender.init_on_sender(model=models.wide())
    async with receiver, sender:
        listen(receiver)
        first = await dial(address, trainer_hello())
        joining = asyncio.ensure_future(receiver.connect(timeout=10 * PATIENCE))
        assert isinstance((await first.recv(timeout=PATIENCE)).message, Hello)
        await first.send(Welcome(7, 3, 0, 1), timeout=PATIENCE)  # and never sends version 3
        await harness.until(lambda: receiver._greeted is not None)
        first.abort()
        with pytest.raises(aiosync.PartialSyncError):
            await sender.connect()
        with pytest.raises(aiosync.ApplyError, match="ManifestMismatch"):
            await asyncio.wait_for(joining, PATIENCE)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["aclose", "abort"])
async def test_closing_closes_the_links_that_wait(how) -> None:
    address = free_address()
    receiver = make(address)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    listen(receiver)
    waiting, silent = await dial(address, trainer_hello()), await dial(address)
    await harness.until(lambda: receiver._arrived is not None and receiver._listener.num_open == 2)
    if how == "aclose":
        await receiver.aclose()
    else:
        receiver.abort()
    await ended(waiting)
    await ended(silent)


@pytest.mark.asyncio
async def test_a_trainer_takes_the_place_of_one_that_died_silently(monkeypatch) -> None:
    """The old one would look alive until the kernel's keep-alive gave it up."""
    monkeypatch.setattr(_arriving, "_SILENT_SECONDS", 0.05)
    address = free_address()
    target = models.linear()
    receiver = make(address, keepalive=None)
    receiver.init_on_receiver(model=target, worker_idx=0)
    async with receiver:
        joining = asyncio.ensure_future(receiver.connect())
        await harness.until(lambda: receiver._listener is not None)
        silent = await dial(address, trainer_hello())
        assert isinstance((await silent.recv(timeout=PATIENCE)).message, Hello)
        await silent.send(Welcome(7, 0, 0, 1), timeout=PATIENCE)
        await joining
        source = models.linear()
        models.fill(source, 2.0)
        async with make(address) as sender:
            sender.init_on_sender(model=source)
            await sender.connect()
            assert receiver.reconnects == 1
            assert models.filled(target, 2.0)
        silent.abort()


@pytest.mark.asyncio
async def test_a_new_link_takes_over_within_the_handshake() -> None:
    address = free_address()
    receiver = make(address)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with receiver:
        joining = asyncio.ensure_future(receiver.connect())
        await harness.until(lambda: receiver._listener is not None)
        silent = await dial(address, trainer_hello())
        assert isinstance((await silent.recv(timeout=PATIENCE)).message, Hello)
        newer = await dial(address, trainer_hello())
        assert isinstance((await newer.recv(timeout=PATIENCE)).message, Hello)
        await newer.send(Welcome(7, 0, 0, 1), timeout=PATIENCE)
        await joining
        await ended(silent)
        newer.abort()


@pytest.mark.asyncio
async def test_without_reconnecting_the_link_in_use_stays() -> None:
    async with connected(reconnect=0) as (sender, receiver, _):
        await ended(await dial(receiver.address, trainer_hello(sender._clock.epoch)))
        await refused(await dial(receiver.address, trainer_hello()))
        assert (await sender.send()).acked == {0}


# -- two trainers --------------------------------------------------------------------------------


async def refused(link: TCPTransport) -> str:
    """What the worker says to a trainer that it does not take."""
    message = (await link.recv(timeout=PATIENCE)).message
    assert isinstance(message, Refuse)
    assert message.error_type == "ConnectError"  # it may try again
    await ended(link)
    return message.error_text


@pytest.mark.asyncio
async def test_a_second_trainer_is_refused_until_the_first_one_leaves() -> None:
    async with connected() as (first, receiver, target):
        source = models.linear()
        models.fill(source, 2.0)
        async with make(receiver.address) as second, make(receiver.address) as third:
            third.init_on_sender(model=source)
            with pytest.raises(
                aiosync.ConnectTimeout, match=rf"another trainer has .*127.*, process {os.getpid()}"
            ):
                await third.connect(timeout=0.1)
            second.init_on_sender(model=source)
            joining = asyncio.ensure_future(second.connect())
            await harness.until(lambda: second._sender and second._sender.workers._refused)
            assert receiver.reconnects == 0
            assert models.filled(target, 1.0)
            assert (await first.send()).acked == {0}
            await first.aclose()
            await joining  # it went on trying
            assert models.filled(target, 2.0)
            assert (await second.send()).acked == {0}


@pytest.mark.asyncio
async def test_a_trainer_whose_worker_another_one_has_says_so_in_send() -> None:
    async with connected() as (first, receiver, _):
        [peer] = first._sender.peers.values()
        rival = trainer_hello()
        receiver._hellos[receiver._taken] = rival  # as if it had come while the link was lost
        with contextlib.suppress(aiosync.PartialSyncError):
            peer.transport.abort()
            await first.send()
        waits = await dial(receiver.address, rival)
        await harness.until(lambda: "another trainer" in str(first._sender.workers.lost.get(0)))
        with pytest.raises(aiosync.PartialSyncError, match="another trainer has this worker"):
            await first.send()
        waits.abort()
        await harness.until(lambda: first._sender.peers)
        assert (await first.send()).acked == {0}


@pytest.mark.asyncio
async def test_a_trainer_that_answers_keeps_its_place() -> None:
    """Though the limit is short: each question is answered before the next one comes."""
    async with connected(keepalive=0.05) as (first, receiver, _):
        pull = asyncio.ensure_future(receiver.pull(min_version=2, timeout=PATIENCE))
        for _ in range(5):
            text = await refused(await dial(receiver.address, trainer_hello()))
            assert "End one of the two" in text
            progress = receiver._receiver.progress
            await refused(await dial(receiver.address, trainer_hello()))
            await harness.until(lambda now=progress: receiver._receiver.progress > now)
        assert receiver.reconnects == 0
        assert not pull.done()
        await first.send()
        assert await pull == 2


@pytest.mark.asyncio
async def test_a_worker_that_only_pulls_is_given_nothing_by_the_question() -> None:
    address = free_address()
    sender, receiver = make(address), make(address, subscribe=False)
    sender.init_on_sender(model=models.linear())
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        await refused(await dial(receiver.address, trainer_hello()))
        await refused(await dial(receiver.address, trainer_hello()))
        assert await receiver.pull() == 1
        assert receiver._receiver.progress == 1  # that was the first that came


@pytest.mark.asyncio
async def test_a_second_trainer_is_refused_while_the_first_one_waits() -> None:
    address = free_address()
    receiver = make(address)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with receiver:
        listen(receiver)
        first = await dial(address, trainer_hello(7))
        await harness.until(lambda: receiver._arrived is not None)
        assert "another trainer" in await refused(await dial(address, trainer_hello(8)))
        assert "another trainer" in await refused(await dial(address, trainer_hello(None)))
        assert receiver._holder() is not None
        first.abort()
        await harness.until(lambda: receiver._holder() is None)
        second = await dial(address, trainer_hello(8))
        await harness.until(lambda: receiver._arrived is not None)
        second.abort()


# -- the trainer's side --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def answering(answer: Any) -> AsyncIterator[tuple[str, list[int]]]:
    """A worker by hand, and a list that grows with each link of the trainer."""
    count: list[int] = []
    served = aiosync.schemes.listening.StreamListener("tcp://127.0.0.1:0")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(link: TCPTransport) -> None:
        try:
            await answer(link)
        except aiosync.TransportError:
            pass  # the trainer ended it
        finally:
            link.abort()

    def on_link(link: TCPTransport) -> None:
        count.append(1)
        task = asyncio.ensure_future(serve(link))
        tasks.add(task)

    served.start(on_link, lambda error: None)
    try:
        yield served.url, count
    finally:
        await served.aclose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_worker_that_refused_for_good_is_not_dialled_again() -> None:
    first, leave = True, asyncio.Event()

    async def refuse_the_second(link: TCPTransport) -> None:
        nonlocal first
        await link.recv(timeout=PATIENCE)
        if first:
            first = False
            await link.send(trainer_hello(None, role="receiver"), timeout=PATIENCE)
            await link.recv(timeout=PATIENCE)
            await leave.wait()
            return
        await link.send(Refuse("ConfigError", "not this trainer"), timeout=PATIENCE)
        await link.recv(timeout=PATIENCE)  # until the trainer closes it

    async with answering(refuse_the_second) as (url, count), make(url) as sender:
        sender.init_on_sender(num_workers=1)
        await sender.connect()
        assert _dialling_tasks()
        leave.set()
        await harness.until(lambda: not _dialling_tasks())
        assert len(count) == 2
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sender.send(weights={"weight": torch.zeros(2)})
        assert "not this trainer" in str(caught.value.failed[0])


@pytest.mark.asyncio
async def test_links_of_no_use_are_dialled_ever_more_slowly(monkeypatch) -> None:
    """Although the trainer goes on sending to others, which drew new versions."""
    pauses: list[float] = []
    enough = asyncio.Event()

    async def wait(self: Any) -> None:
        pauses.append(self._pause)
        self._pause *= 2
        if len(pauses) == 6:
            enough.set()
        await asyncio.sleep(0.01)

    async def leave(link: TCPTransport) -> None:
        await link.recv(timeout=PATIENCE)
        sender._clock.next()

    sender: Any = None
    async with answering(leave) as (url, _):
        sender = make(url)
        async with sender:
            sender.init_on_sender(model=models.linear())
            monkeypatch.setattr("aiosync.schemes._dialling.Backoff.wait", wait)
            connecting = asyncio.ensure_future(sender.connect())
            async with asyncio.timeout(PATIENCE):
                await enough.wait()
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
    assert pauses[:6] == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64]


# -- the worker's side ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_worker_does_not_dial_again_after_a_mistake_of_its_own() -> None:
    async with make("tcp://127.0.0.1:0", dial="receiver") as sender:
        sender.init_on_sender(model=models.linear())
        await sender.connect()
        limits = aiosync.Limits(max_name_nbytes=10)  # enough for its role
        async with make(sender.address, dial="receiver", limits=limits) as receiver:
            receiver.init_on_receiver(model_id="policy" * 2, model=models.linear())
            with pytest.raises(aiosync.LocalProtocolError, match="model_id"):
                async with asyncio.timeout(PATIENCE / 2):
                    await receiver.connect(timeout=PATIENCE)


@pytest.mark.asyncio
async def test_a_worker_says_what_became_of_its_links_when_time_is_up() -> None:
    async def leave(link: TCPTransport) -> None:
        await link.recv(timeout=PATIENCE)

    async with answering(leave) as (url, count), make(url, dial="receiver") as receiver:
        receiver.init_on_receiver(model=models.linear())
        with pytest.raises(aiosync.ConnectTimeout, match="before it answered, and .* in time"):
            await receiver.connect(timeout=0.5)
        assert count


def _dialling_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "aiosync link to worker 0"]


@pytest.mark.asyncio
async def test_a_worker_says_why_it_let_no_trainer_in() -> None:
    address = free_address()
    receiver = make(address, token="one", timeout=1)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    sender = make(address, token="another")
    sender.init_on_sender(model=models.linear())
    async with receiver, sender:
        waiting = asyncio.ensure_future(receiver.connect())
        with pytest.raises(aiosync.PartialSyncError, match="tokens"):
            await sender.connect()
        with pytest.raises(
            aiosync.ConnectTimeout,
            match="no trainer was accepted on .*; last refusal: AuthError: .*token",
        ):
            await waiting


@pytest.mark.asyncio
async def test_port_0_of_a_worker_that_listens_asks_for_a_port() -> None:
    sender = make("tcp://127.0.0.1:0", timeout=2)
    sender.init_on_sender(model=models.linear())
    async with sender:
        with pytest.raises(aiosync.ConfigError, match="has no port to dial: choose one: ") as found:
            await sender.connect()
        assert "pickle" not in str(found.value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("dial", "says", "advice"),
    [
        ("sender", "worker 0 at", r"init_on_receiver\(\) and connect\(\), with dial='sender'"),
        ("both", "the weight server at", "`aiosync serve` has to run there"),
    ],
)
async def test_connect_has_its_own_timeout_for_those_it_dials(
    dial: Any, says: str, advice: str
) -> None:
    """And not the scheme's; it is the documented error, and says who has to do what."""
    sender = make(free_address(), dial=dial, timeout=0.1)
    sender.init_on_sender(model=models.linear())
    began = asyncio.get_running_loop().time()
    async with sender:
        with pytest.raises(
            aiosync.ConnectTimeout, match=rf"after 0.8 s {says}.*{advice}"
        ) as caught:
            await sender.connect(timeout=0.8)
        assert "init_on_sender" not in str(caught.value)
        assert "the last attempt: " in str(caught.value)
    assert asyncio.get_running_loop().time() - began >= 0.7


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("dial", "advice"),
    [
        ("receiver", r"init_on_sender\(\) and connect\(\), or"),
        ("both", "`aiosync serve` has to run"),
    ],
)
async def test_a_worker_that_dials_says_what_the_other_side_has_to_do(
    dial: Any, advice: str
) -> None:
    receiver = make(free_address(), dial=dial)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with receiver:
        with pytest.raises(aiosync.ConnectTimeout, match=rf"not reached within 0.3 s: .*{advice}"):
            await receiver.connect(timeout=0.3)


@pytest.mark.asyncio
async def test_a_worker_that_listens_may_come_after_connect_has_given_up() -> None:
    where = [free_address(), free_address()]
    sender = aiosync.TCPWeightSyncScheme(where, dial="sender", timeout=PATIENCE, reconnect=0)
    sender.init_on_sender(model=models.linear())
    workers = [aiosync.TCPWeightSyncScheme(where, dial="sender", timeout=PATIENCE) for _ in where]
    for idx, worker in enumerate(workers):
        worker.init_on_receiver(model=models.linear(), worker_idx=idx)
    async with sender, workers[0], workers[1]:
        connecting = asyncio.ensure_future(sender.connect(timeout=1.0))
        await workers[0].connect()
        with pytest.raises(aiosync.ConnectTimeout, match="worker 1 at"):
            await connecting
        await workers[1].connect()
        await harness.until(lambda: len(sender.worker_versions) == 2)
        assert (await sender.send(models.linear())).acked == {0, 1}


@pytest.mark.parametrize(
    ("where", "dial", "init", "advice"),
    [
        (["tcp://a:1"], "sender", {"num_workers": 2}, "a list of addresses, one for each"),
        (["tcp://a:1", "tcp://b:1"], "sender", {"num_workers": 3}, "only 2 addresses"),
        (["tcp://a:1"], "sender", {"params_map": {1: {"a": torch.ones(1)}}}, "only 1 addresses"),
        ("tcp://a:1", "both", {"num_workers": 2}, "leave num_workers out"),
    ],
)
def test_more_workers_than_can_be_dialled_are_refused(
    where: Any, dial: Any, init: Any, advice: str
) -> None:
    sender = aiosync.TCPWeightSyncScheme(where, dial=dial)
    with pytest.raises(aiosync.ConfigError, match=f"workers are expected, but .*{advice}"):
        sender.init_on_sender(**init)
    sender.init_on_sender(num_workers=1)  # it has no role yet


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_what_can_never_be_said_is_not_tried_again(role: str) -> None:
    """A Hello that is beyond the scheme's own limits."""
    limits = aiosync.Limits(max_name_nbytes=5)
    async with WeightServer("tcp://127.0.0.1:0") as server:
        scheme = aiosync.TCPWeightSyncScheme(server.url, dial="both", limits=limits)
        if role == "sender":
            scheme.init_on_sender(model_id="policy", weights={"w": torch.ones(2)})
        else:
            scheme.init_on_receiver(model_id="policy", model=models.linear())
        async with scheme:
            with pytest.raises(aiosync.AiosyncError, match="cannot encode Hello"):
                await scheme.connect(timeout=PATIENCE)


# -- certificate files -------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def with_own_ca(
    folder: Path, role: str, **options: Any
) -> AsyncIterator[tuple[Any, Path, Any]]:
    """A connected side that dials over TLS, its file of authorities, and what ends its link."""
    made, ca = certificates(), folder / "ca.pem"
    shutil.copy(made.folder / "ca.pem", ca)
    async with WeightServer("tcp://127.0.0.1:0", tls=made.listening) as server:
        options = {"dial": "both", "timeout": PATIENCE, "tls": aiosync.TLS(ca=ca), **options}
        scheme = aiosync.TCPWeightSyncScheme(server.url, **options)
        if role == "sender":
            scheme.init_on_sender(model=models.linear())
        else:
            scheme.init_on_receiver(model=models.linear())

        def cut() -> None:
            for link in list(server._listener._open):
                link.abort()

        async with scheme:
            await scheme.connect()
            yield scheme, ca, cut


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_certificate_file_may_be_incomplete_for_a_moment(
    tmp_path: Path, role: str, monkeypatch: Any
) -> None:
    tries = 0

    async def wait(self: Any) -> None:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0.01)

    monkeypatch.setattr("aiosync.schemes._dialling.Backoff.wait", wait)
    async with with_own_ca(tmp_path, role, reconnect=None) as (scheme, ca, cut):
        whole = ca.read_bytes()
        ca.write_bytes(whole[:100])
        cut()
        await harness.until(lambda: tries > 3)
        ca.write_bytes(whole)
        if role == "sender":
            await harness.until(lambda: scheme._sender.peers)
            assert (await scheme.send()).acked == {0}
        else:
            await harness.until(lambda: scheme.reconnects == 1)
            assert scheme.link_lost is None


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_certificate_file_that_stays_broken_is_named_in_the_end(
    tmp_path: Path, role: str
) -> None:
    async with with_own_ca(tmp_path, role, reconnect=0.1) as (scheme, ca, cut):
        ca.unlink()
        cut()
        if role == "sender":
            gone = scheme._sender.workers.lost
            await harness.until(lambda: "was not reached within" in str(gone.get(0)))
            with pytest.raises(aiosync.PartialSyncError, match="file .*ca.pem cannot be used"):
                await scheme.send()
        else:
            with pytest.raises(aiosync.PeerClosed, match="file .*ca.pem cannot be used"):
                await scheme.wait_for_version(9)


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_broken_certificate_file_is_an_error_at_once_at_first(
    tmp_path: Path, role: str
) -> None:
    async with make(free_address(), dial="both", tls=aiosync.TLS(ca=tmp_path / "no")) as scheme:
        if role == "sender":
            scheme.init_on_sender(model=models.linear())
        else:
            scheme.init_on_receiver(model=models.linear())
        with pytest.raises(aiosync.AiosyncError, match="file .* cannot be used") as caught:
            await scheme.connect()
        assert "within" not in str(caught.value)
