"""Models on a slow accelerator whose copies happen only when a call waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import aiosync
from aiosync.serving import WeightFeed
from tests.schemes._harness import until
from tests.support.accelerator import Deferred, deferred
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

SCHEMES = {
    "shm": aiosync.SharedMemWeightSyncScheme,
    "pipe": aiosync.MultiProcessWeightSyncScheme,
    "tcp": aiosync.TCPWeightSyncScheme,
}


@pytest.fixture
def device() -> Iterator[Deferred]:
    with deferred() as fake:
        yield fake


def net(value: float, size: int) -> nn.Module:
    return nn.ParameterList(torch.full((size,), value) for _ in range(4))


async def turns_while(task: asyncio.Task[Any], seconds: float) -> int:
    """Return how often the loop turns in some seconds, in which a task must not end."""
    turns, end = 0, time.monotonic() + seconds
    # A busy machine makes fewer turns in that time, and gets more. A wait on the loop takes 30 s.
    while (now := time.monotonic()) < end or (turns <= 5 and now < end + 20):
        await asyncio.sleep(0.001)
        turns += 1
    assert not task.done()
    return turns


@contextlib.asynccontextmanager
async def pair(
    name: str, source: nn.Module, target: nn.Module, **options: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """A connected sender and receiver in this process."""
    sender: Any = SCHEMES[name](timeout=60, **options)
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        yield sender, receiver


def values(receiver: Any, model: nn.Module) -> set[float]:
    with receiver.reading():
        return {float(x) for p in model.parameters() for x in p.detach().aminmax()}


@pytest.mark.parametrize("size", [100, 2_000_000])
@pytest.mark.parametrize("name", SCHEMES)
async def test_a_busy_accelerator_delays_a_send_and_no_loop(
    name: str, size: int, device: Deferred
) -> None:
    source, target = net(1.0, size), net(0.0, size)
    async with pair(name, source, target) as (sender, receiver):
        for value in (2.0, 3.0, 4.0):
            with torch.no_grad():
                for each in source.parameters():
                    each.fill_(value)
            busy = device.is_busy = threading.Event()
            sending = asyncio.create_task(sender.send())
            assert await turns_while(sending, 0.1) > 5
            busy.set()
            await sending
            await receiver.wait_for_version(sender.version, timeout=20)
            assert values(receiver, target) == {value}


@pytest.mark.parametrize("name", SCHEMES)
async def test_a_worker_waits_on_no_loop(name: str, device: Deferred) -> None:
    """After the trainer's copy a busy accelerator of the worker delays the send and no loop."""
    source, target = net(1.0, 100), net(0.0, 100)
    async with pair(name, source, target) as (sender, _):
        # The waits of the sender, before its copy and after it, end at once.
        device.skips = 2
        busy = device.is_busy = threading.Event()
        sending = asyncio.create_task(sender.send())
        assert await turns_while(sending, 0.1) > 5
        busy.set()
        await sending


def spread(value: float) -> torch.Tensor:
    """Return a tensor that :func:`on_spread_ones` takes for one of the accelerator."""
    return torch.full((200,), value)[::2]


def on_spread_ones(device: Deferred) -> None:
    """Have only tensors with gaps on the accelerator; those of the trainer have none."""
    device.has = lambda tensor: not tensor.is_contiguous()  # type: ignore[method-assign]


@pytest.mark.parametrize("name", SCHEMES)
async def test_a_worker_whose_model_was_moved_waits_on_no_loop(name: str, device: Deferred) -> None:
    on_spread_ones(device)
    source, target = net(1.0, 100), net(0.0, 100)
    async with pair(name, source, target) as (sender, receiver):
        # As module.to() does: the parameters stay the same objects.
        for each in target.parameters():
            each.data = spread(0.0)
        busy = device.is_busy = threading.Event()
        sending = asyncio.create_task(sender.send())
        assert await turns_while(sending, 0.1) > 5
        busy.set()
        await sending
        assert values(receiver, target) == {1.0}


@pytest.mark.parametrize("kind", [dict, TensorDict, nn.ParameterDict])
@pytest.mark.parametrize("name", SCHEMES)
async def test_the_first_update_waits_on_no_loop(name: str, kind: Any, device: Deferred) -> None:
    on_spread_ones(device)
    target = kind({"w": spread(0.0)})
    sender: Any = SCHEMES[name](timeout=60, guard="reading")
    sender.init_on_sender(model_id="policy", model={"w": torch.ones(100)}, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    async with sender, receiver:
        busy = device.is_busy = threading.Event()
        connecting: Any = asyncio.gather(sender.connect(), receiver.connect())
        assert await turns_while(connecting, 0.3) > 5
        busy.set()
        await connecting
        with receiver.reading():
            assert target["w"].tolist() == [1.0] * 100


@pytest.mark.parametrize("timeout", [0, 0.001])
@pytest.mark.parametrize("name", SCHEMES)
async def test_a_poll_applies_by_hand(name: str, timeout: float, device: Deferred) -> None:
    """One poll is enough, though a thread waits for the accelerator, and the loop goes on."""
    source, target = net(1.0, 100), net(0.0, 100)
    async with pair(name, source, target, apply="manual") as (sender, receiver):
        assert await receiver.receive(timeout=timeout) is None
        sending = asyncio.create_task(sender.send())
        await until(lambda: receiver.staged_version == sender.version > 1)
        busy = device.is_busy = threading.Event()
        polling = asyncio.create_task(receiver.receive(timeout=timeout))
        assert await turns_while(polling, 0.1) > 5
        busy.set()
        update = await polling
        assert update is not None and update.version == sender.version
        await sending
        assert await receiver.receive(timeout=timeout) is None


@pytest.mark.parametrize("name", SCHEMES)
async def test_a_poll_ends_with_its_scheme(name: str, device: Deferred) -> None:
    """Though the accelerator still works."""
    async with pair(name, net(1.0, 100), net(0.0, 100), apply="manual") as (sender, receiver):
        sending = asyncio.create_task(sender.send())
        await until(lambda: receiver.staged_version > 1)
        busy = device.is_busy = threading.Event()
        polling = asyncio.create_task(receiver.receive(timeout=0))
        await turns_while(polling, 0.05)
        receiver.abort()
        with pytest.raises(aiosync.TransportClosed):
            await asyncio.wait_for(polling, 20)
        busy.set()
        with contextlib.suppress(aiosync.PartialSyncError):  # the update may have come too late
            await sending


@pytest.mark.parametrize("name", SCHEMES)
async def test_another_model_has_the_weights_at_the_next_read(name: str, device: Deferred) -> None:
    async with pair(name, net(1.0, 100), net(0.0, 100)) as (_, receiver):
        receiver.model = target = net(0.0, 100)
        assert values(receiver, target) == {1.0}


@pytest.mark.parametrize("name", SCHEMES)
async def test_a_model_of_another_shape_after_none(name: str, device: Deferred) -> None:
    """Also while a thread still copies an update into the model before."""
    source, target = net(1.0, 100), net(0.0, 100)
    async with pair(name, source, target) as (sender, receiver):
        device.skips = 2
        busy = device.is_busy = threading.Event()
        sending = asyncio.create_task(sender.send())
        await turns_while(sending, 0.1)
        receiver.model = None
        receiver.model = other = net(0.0, 7)
        busy.set()
        device.is_busy = None
        with contextlib.suppress(aiosync.PartialSyncError):  # the new model refuses it
            await sending
        sender.model = net(2.0, 7)
        await sender.send()
        assert values(receiver, other) == {2.0}


@pytest.mark.parametrize("name", ["pipe", "shm"])
@pytest.mark.slow
async def test_two_copies_at_once_do_not_mix(name: str, device: Deferred) -> None:
    """A send_nowait() copies on the loop; the thread of a send() that was cancelled copies, too."""
    # Each parameter fills a block of the device's memory.
    size, expected = 5_000_000, [1.0, 2.0, 3.0, 4.0]
    source, target = net(0.0, size), net(0.0, size)
    copy, the_loop = device.copy, threading.get_ident()
    began, other_began, went_on = (threading.Event() for _ in range(3))

    def take_turns(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.get_ident() == the_loop:
            copy(targets, sources)
            other_began.set()
            went_on.wait(0.5)
        elif not began.is_set():
            began.set()
            other_began.wait(0.5)
            copy(targets, sources)
        else:
            copy(targets, sources)
            went_on.set()

    async with pair(name, source, target) as (sender, receiver):
        with torch.no_grad():
            for each, value in zip(source.parameters(), expected, strict=True):
                each.fill_(value)
        device.copy = take_turns  # type: ignore[method-assign]
        sending = asyncio.create_task(sender.send())
        await until(began.is_set)
        sending.cancel()
        await asyncio.wait({sending})
        handle = sender.send_nowait()
        device.copy = copy  # type: ignore[method-assign]
        assert (await handle).acked == {0}
        with receiver.reading():
            assert [{*map(float, p.detach().aminmax())} for p in target.parameters()] == [
                {value} for value in expected
            ]


@pytest.mark.slow
@pytest.mark.parametrize("sends", [0, 8])
async def test_another_model_after_a_lost_link_has_the_weights(
    sends: int, device: Deferred
) -> None:
    """The new model reads memory of its process, and not the slot, which was given back."""
    source, target, other = (net(1.0, 100_000) for _ in range(3))
    sender = aiosync.DistributedWeightSyncScheme(timeout=60)
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.apply = "manual" if sends else "auto"
    receiver.init_on_receiver(model_id="policy", model=target)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        handles = []
        for value in range(sends):
            fill(source, float(value))
            handles.append(sender.send_nowait())
            await receiver.receive()
        before = values(receiver, target)
        sender.sender_transports[0].abort()
        await until(lambda: receiver.reconnects == 1 and bool(sender.worker_versions))
        for _ in range(sends // 2):
            fill(source, 9.0)
            handles.append(sender.send_nowait())
            await asyncio.sleep(0.02)
        receiver.model = other
        assert values(receiver, other) == before
    await asyncio.gather(*handles, return_exceptions=True)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(value)


async def test_a_call_by_hand_ends_in_a_stream_of_updates(device: Deferred) -> None:
    wait = device.synchronize

    def synchronize(on: torch.device) -> None:
        time.sleep(0.03)
        wait(on)

    sender = aiosync.TCPWeightSyncScheme(apply="manual")
    sender.init_on_sender(model_id="policy", model=net(1.0, 100), num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver(model_id="policy", model=net(0.0, 100))
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        device.synchronize = synchronize  # type: ignore[method-assign]

        async def stream() -> None:
            while True:
                handles.append(sender.send_nowait())
                await asyncio.sleep(0.005)

        handles: list[Any] = []
        streaming = asyncio.create_task(stream())
        with pytest.raises(aiosync.RecvTimeout):
            await asyncio.wait_for(receiver.wait_for_version(10**6, timeout=0.1), 10)
        streaming.cancel()
    await asyncio.gather(*handles, return_exceptions=True)


def wait_for_thread(receiver: Any) -> None:
    """Wait for the thread that applies version 2, without a turn of the loop."""
    wait_until(lambda: receiver.version == 2)
    # It has let reads in, too.
    time.sleep(0.1)


@pytest.mark.parametrize("name", SCHEMES)
async def test_another_model_pulls_what_the_loop_has_not_heard_of(
    name: str, device: Deferred
) -> None:
    async with pair(name, net(1.0, 100), net(0.0, 100)) as (sender, receiver):
        device.skips, busy = 2, threading.Event()
        device.is_busy = busy
        sending = asyncio.create_task(sender.send())
        await turns_while(sending, 0.1)
        busy.set()
        wait_for_thread(receiver)
        receiver.model = None
        receiver.model = other = net(0.0, 100)
        assert await receiver.pull(timeout=20) == 2
        assert values(receiver, other) == {1.0}
        await sending


class Odd(BaseException):
    """An error that is no Exception."""


class Picky(nn.Module):
    """A model that refuses its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.refuses = False

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if self.refuses:
            raise Odd("odd")


async def test_an_odd_error_in_the_thread_reaches_the_trainer(device: Deferred) -> None:
    source, target = Picky(), Picky()
    async with pair("pipe", source, target) as (sender, _):
        target.refuses = True
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        with pytest.raises(aiosync.PartialSyncError, match="Odd: odd"):
            await sender.send(timeout=10)


@pytest.mark.parametrize("name", ["shm", "tcp"])
async def test_the_gate_of_a_server_on_an_accelerator(name: str, device: Deferred) -> None:
    """Queued work of requests precedes a switch; a busy accelerator holds back no loop."""
    source, target = net(1.0, 100), net(0.0, 100)
    sender: Any = SCHEMES[name](timeout=60)
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    feed = WeightFeed(pickle.loads(pickle.dumps(sender)), model=target, model_id="policy")
    seen: list[tuple[int, set[float]]] = []

    def forward(version: int) -> None:
        # It may run on the accelerator after its request has ended.
        device.elsewhere.append(
            lambda: seen.append((version, {float(p.detach()[0]) for p in target.parameters()}))
        )

    async def answer() -> int:
        async with feed.request() as version:
            forward(version)
            return version

    async with sender, feed:
        await asyncio.gather(sender.connect(), feed.ready)
        for value in (2.0, 3.0, 4.0):
            async with feed.request() as version:
                with torch.no_grad():
                    for each in source.parameters():
                        each.fill_(value)
                sending = asyncio.create_task(sender.send())
                await until(lambda: feed.status.newest == sender.version > version)
                forward(version)
                device.is_busy = threading.Event()
            answering = asyncio.create_task(answer())
            assert await turns_while(answering, 0.1) > 5
            device.is_busy.set()
            assert await answering == sender.version
            await sending
        device.synchronize(torch.device("cpu"))
    assert [version for version, _ in seen] == [1, 2, 2, 3, 3, 4]
    assert all(values == {float(version)} for version, values in seen), seen
