"""Workers that listen, and the trainer that dials them: who takes the place of whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiosync
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Hello, Refuse
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.one_loop


PATIENCE = harness.PATIENCE


def make(address: str, **options: Any) -> aiosync.TCPWeightSyncScheme:
    defaults: dict[str, Any] = {"dial": "sender", "timeout": PATIENCE}
    return aiosync.TCPWeightSyncScheme([address], **{**defaults, **options})


@contextlib.asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A trainer and a worker that listens; version 1 is there."""
    address, source = free_address(), models.linear()
    models.fill(source, 1.0)
    sender, receiver = make(address), make(address, **options)
    sender.init_on_sender(model=source)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        assert models.holds(receiver, 1.0)
        yield sender, receiver


@contextlib.asynccontextmanager
async def joining(**options: Any) -> AsyncIterator[tuple[Any, asyncio.Task[None]]]:
    """A worker that waits for a trainer."""
    receiver = make(free_address(), **options)
    receiver.init_on_receiver(model=models.linear(), worker_idx=0)
    async with receiver:
        task = asyncio.create_task(receiver.connect())
        await asyncio.sleep(0)  # it listens
        yield receiver, task


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
    async with connected() as (sender, receiver):
        links = [await dial(receiver.address) for _ in range(40)]
        for link in links[:25]:
            await ended(link)
        assert receiver.reconnects == 0
        assert (await sender.send()).acked == {0}
        for link in links[25:]:
            link.abort()


@pytest.mark.asyncio
async def test_a_link_of_no_trainer_is_closed_at_once() -> None:
    async with connected() as (sender, receiver):
        await ended(await dial(receiver.address, trainer_hello(role="receiver")))
        assert receiver.reconnects == 0
        assert (await sender.send()).acked == {0}


@pytest.mark.asyncio
async def test_without_reconnecting_the_link_in_use_stays() -> None:
    async with connected(reconnect=0) as (sender, receiver):
        epoch = (await sender.send()).epoch
        await ended(await dial(receiver.address, trainer_hello(epoch)))
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
    async with connected() as (first, receiver):
        source = models.linear()
        models.fill(source, 2.0)
        async with make(receiver.address) as second, make(receiver.address) as third:
            third.init_on_sender(model=source)
            with pytest.raises(
                aiosync.ConnectTimeout, match=rf"another trainer has .*127.*, process {os.getpid()}"
            ):
                await third.connect(timeout=0.1)
            second.init_on_sender(model=source)
            waiting = asyncio.ensure_future(second.connect())
            assert (await first.send()).acked == {0}
            assert receiver.reconnects == 0
            assert models.holds(receiver, 1.0)
            assert not waiting.done()
            await first.aclose()
            await waiting  # it went on trying
            assert models.holds(receiver, 2.0)
            assert (await second.send()).acked == {0}


@pytest.mark.asyncio
async def test_a_trainer_that_answers_keeps_its_place() -> None:
    """Though the limit is short: each question is answered before the next one comes."""
    async with connected(keepalive=0.05) as (first, receiver):
        pull = asyncio.ensure_future(receiver.pull(min_version=2, timeout=PATIENCE))
        for _ in range(8):
            text = await refused(await dial(receiver.address, trainer_hello()))
            assert "End one of the two" in text
            await asyncio.wait({pull}, timeout=0.02)
        assert receiver.reconnects == 0
        assert not pull.done()
        await first.send()
        assert await pull == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("reconnect", [0, 0.1])
async def test_a_worker_that_left_may_be_replaced_at_any_time(reconnect: float) -> None:
    address = free_address()
    async with make(address, reconnect=reconnect) as sender:
        sender.init_on_sender(model=models.linear(1.0), num_workers=1)
        for life in range(3):
            worker = make(address)
            worker.init_on_receiver(model=models.linear(), worker_idx=0)
            async with worker:
                meeting = [worker.connect()] if life else [worker.connect(), sender.connect()]
                await asyncio.gather(*meeting)
                report = await sender.send()
                assert (report.acked, report.left) == ({0}, set())
            assert (await sender.send()).left == {0}
            await asyncio.sleep(0.2)  # longer than a lost one would be looked for
            report = await sender.send()
            assert (report.acked, report.left, report.lost) == (set(), set(), {})


# -- the worker's side ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_worker_says_why_it_let_no_trainer_in() -> None:
    async with joining(token="one", timeout=1) as (receiver, task):
        async with make(receiver.address, token="another") as sender:
            sender.init_on_sender(model=models.linear())
            with pytest.raises(aiosync.PartialSyncError, match="tokens"):
                await sender.connect()
            with pytest.raises(aiosync.ConnectTimeout, match="last refusal: AuthError: .*token"):
                await task


@pytest.mark.asyncio
@pytest.mark.parametrize(("dial", "role"), [("sender", "sender"), ("receiver", "receiver")])
async def test_port_0_cannot_be_dialled(dial: Any, role: str) -> None:
    async with make("tcp://127.0.0.1:0", dial=dial, timeout=2) as scheme:
        getattr(scheme, f"init_on_{role}")(model=models.linear())
        with pytest.raises(aiosync.ConfigError, match="has no port to dial"):
            await scheme.connect()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("dial", "role", "says"),
    [
        ("sender", "sender", r"after 0.4 s worker 0 at.*init_on_receiver\(\) and connect\(\)"),
        ("both", "sender", "after 0.4 s the weight server at.*`aiosync serve` has to run"),
        ("receiver", "receiver", r"init_on_sender\(\) and connect\(\), or"),
        ("both", "receiver", "`aiosync serve` has to run"),
    ],
)
async def test_connect_has_its_own_timeout_and_says_what_the_other_side_has_to_do(
    dial: Any, role: str, says: str
) -> None:
    began = asyncio.get_running_loop().time()
    async with make(free_address(), dial=dial, timeout=0.1) as scheme:
        getattr(scheme, f"init_on_{role}")(model=models.linear())
        with pytest.raises(aiosync.ConnectTimeout, match=f"{says}.*the last attempt: ") as caught:
            await scheme.connect(timeout=0.4)
    assert caught.value.__cause__ is not None
    assert asyncio.get_running_loop().time() - began >= 0.35


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
