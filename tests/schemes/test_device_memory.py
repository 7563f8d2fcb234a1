"""Slots in the memory of a device, which a fake driver imitates, with copies that end late."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from aiosync.device_memory import DeviceMemory
from aiosync.tensors.accelerator import accelerator, use_accelerator
from aiosync.wire import (
    DeviceSlot,
    ManifestMessage,
    PageMessage,
    Segment,
    Take,
    Welcome,
    encode_frame,
    plan_manifest,
)
from tests.schemes import _harness as harness
from tests.support.accelerator import Deferred, deferred
from tests.support.fake_driver import FakeDriver
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

NUMEL = 50_000


@pytest.fixture
def device() -> Iterator[Deferred]:
    with deferred() as fake:
        yield fake
    driver = fake.fake_driver
    assert not (driver.mapped or driver.reserved or driver.handles), "device memory is left"


def net(value: float, numel: int = NUMEL) -> nn.Module:
    return nn.ParameterList(torch.full((numel,), value) for _ in range(4))


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(value)


def values_of(tensor: torch.Tensor) -> set[float]:
    return {float(x) for x in tensor.detach().aminmax()}


def values(model: nn.Module) -> set[float]:
    return {float(x) for p in model.parameters() for x in p.detach().aminmax()}


@contextlib.asynccontextmanager
async def pair(
    source: Any, target: Any, num_workers: int | None = 1
) -> AsyncIterator[tuple[Any, Any]]:
    """A connected sender and receiver in this process."""
    sender = aiosync.SharedMemWeightSyncScheme(timeout=30, memory="device")
    sender.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver(model_id="policy", worker_idx=0, model=target)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        yield sender, receiver


async def test_weights_do_not_pass_the_host(device: Deferred) -> None:
    source, target = net(1.0), net(0.0)
    async with pair(source, target) as (sender, receiver):
        for value in map(float, range(2, 12)):
            fill(source, value)
            await sender.send()
            with receiver.reading():
                assert values(target) == {value}
        assert device.num_transfers == 0
        # Two slots, each mapped by both sides.
        assert len(device.fake_driver.mapped) == 4


async def test_two_slots_for_each_size_and_none_of_older_sizes(device: Deferred) -> None:
    sizes = [1000 * 2**n for n in range(9)]
    target: Any = nn.ParameterList()
    async with pair(net(1.0, 10), net(0.0, 10)) as (sender, receiver):
        for value, numel in enumerate(sizes, 2):
            receiver.model = None
            sender.model = net(float(value), numel)
            receiver.model = target = net(0.0, numel)
            await sender.send()
            await sender.send()
            await receiver.wait_for_version(sender.version)
            assert values(target) == {float(value)}
        # The trainer gives older slots up when it needs the next one.
        await sender.send()
        assert len(device.fake_driver.mapped) == 4


def blocked(device: Deferred, skips: int) -> threading.Event:
    """Let some waits for the device end, and no later one before the event."""
    device.skips, device.is_busy = skips, threading.Event()
    return device.is_busy


async def test_what_other_streams_have_to_do_yet_is_done_before(device: Deferred) -> None:
    source, target = net(1.0), net(0.0)
    async with pair(source, target) as (sender, _):
        # The write was queued before the send, and is no change during the copy.
        device.elsewhere.append(lambda: [each.data.fill_(2.0) for each in source.parameters()])
        await sender.send()
        assert values(target) == {2.0}
        # A forward on another stream of the worker.
        seen: list[Any] = []
        fill(source, 3.0)
        busy = blocked(device, 2)
        sending = asyncio.create_task(sender.send())
        await until(lambda: device.skips == 0)
        device.elsewhere.append(lambda: seen.append(values(target)))
        busy.set()
        await sending
        assert seen == [{2.0}]
        assert values(target) == {3.0}


async def test_a_busy_device_holds_no_loop(device: Deferred) -> None:
    source, target = net(1.0), net(0.0)
    async with pair(source, target) as (sender, _):
        for skips in range(4):
            busy = blocked(device, skips)
            sending = asyncio.create_task(sender.send())
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert not sending.done()
            busy.set()
            await sending


# -- refusals and failures ------------------------------------------------------------------------


async def test_weights_on_the_cpu_are_refused() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme(memory="device")
    scheme.init_on_sender(model=net(1.0))
    async with scheme:
        with pytest.raises(aiosync.ConfigError, match="one GPU, and these are on the CPU"):
            await scheme.connect()


async def test_a_device_that_is_full(device: Deferred) -> None:
    driver = device.fake_driver
    driver.room = 100
    source, target = net(1.0), net(0.0)
    with pytest.raises(aiosync.ConfigError, match="851968 bytes are wanted, and 100 are free"):
        async with pair(source, target):
            pass
    # Memory that torch caches is given back first.
    driver.cached = 2**30
    async with pair(source, target):
        assert values(target) == {1.0}


@pytest.mark.parametrize("call", ["create", "export", "reserve", "map"])
async def test_a_call_of_the_trainer_that_fails(call: str, device: Deferred) -> None:
    refused = pytest.raises(aiosync.ConfigError, match=f"for a slot .{call}: FAKE_ERROR")
    device.fake_driver.left[call] = 0
    with refused:
        async with pair(net(1.0), net(0.0)):
            pass
    device.fake_driver.left.clear()
    target = net(0.0)
    async with pair(net(1.0), target) as (sender, _):
        device.fake_driver.left[call] = 0
        with refused:
            await sender.send()  # it needs the second slot
        device.fake_driver.left.clear()
        await sender.send()
        assert values(target) == {1.0}


@pytest.mark.parametrize("call", ["make_room", "release"])
async def test_a_call_that_rarely_fails(call: str, device: Deferred) -> None:
    device.fake_driver.room = 0 if call == "make_room" else None
    device.fake_driver.left[call] = 0
    with pytest.raises(aiosync.ConfigError, match=f"{call}: FAKE_ERROR"):
        async with pair(net(1.0), net(0.0)):
            pass
    while device.fake_driver.handles:  # the driver has them, as they could not be given back
        os.close(device.fake_driver.handles.popitem()[1])


async def test_an_update_of_values_alone(device: Deferred) -> None:
    sender = aiosync.SharedMemWeightSyncScheme(memory="device", guard="reading", timeout=30)
    sender.init_on_sender(model_id="policy", weights={"note": "hi", "w": torch.ones(3)})
    receiver, kept = pickle.loads(pickle.dumps(sender)), {"note": "", "w": torch.zeros(3)}
    receiver.init_on_receiver(model_id="policy", weights=kept, worker_idx=0)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        assert kept["note"] == "hi" and values_of(kept["w"]) == {1.0}
        # The next one fits a slot, and is copied there, too.
        await sender.send({"w": torch.full((3,), 2.0), "note": "ho"})
        assert kept["note"] == "ho" and values_of(kept["w"]) == {2.0}


class Counted(nn.Module):
    """A model whose extra state is a tensor on the CPU."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w, self.state = nn.Parameter(torch.full((5,), value)), torch.tensor(value)

    def get_extra_state(self) -> torch.Tensor:
        return self.state

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.state = state


async def test_an_update_with_extra_state_goes_through_the_host(device: Deferred) -> None:
    source, target = Counted(1.0), Counted(0.0)
    async with pair(source, target) as (sender, _):
        for value in (2.0, 3.0):
            source.state = torch.tensor(value)
            await sender.send()
            assert float(target.state) == value
    assert not device.fake_driver.mapped and device.num_transfers


@pytest.mark.parametrize("call", ["import_fd", "reserve", "map"])
async def test_a_call_of_a_worker_that_fails(call: str, device: Deferred) -> None:
    device.fake_driver.left[call] = 0 if call == "import_fd" else 1
    with pytest.raises(aiosync.AiosyncError, match=f"cannot map .*{call}: FAKE_ERROR"):
        async with pair(net(1.0), net(0.0)):
            pass
    device.fake_driver.left.clear()


async def test_a_worker_that_was_told_to_point_at_slots(device: Deferred) -> None:
    sender = aiosync.SharedMemWeightSyncScheme(timeout=30, memory="device")
    sender.init_on_sender(model_id="policy", model=net(1.0), num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.memory = "host"
    receiver.init_on_receiver(model_id="policy", model=net(0.0), worker_idx=0)
    async with sender, receiver:
        connecting = asyncio.gather(sender.connect(), receiver.connect(), return_exceptions=True)
        error = (await connecting)[0]
        assert isinstance(error, aiosync.PartialSyncError)
        assert "construct its scheme with memory='device'" in str(error)


async def test_an_option_that_is_no_memory() -> None:
    with pytest.raises(aiosync.ConfigError, match="memory must be 'host' or 'device', got 'gpu'"):
        aiosync.SharedMemWeightSyncScheme(memory="gpu")  # type: ignore[arg-type]
    scheme = aiosync.sync.SharedMemWeightSyncScheme(memory="device")
    assert scheme.memory == "device"


GRANULE = FakeDriver.granularity
# The weights would fit behind the header of a slot.
MANIFEST = plan_manifest([("0", "float32", (100,), "param", ())])
NAMED = {
    "another kind of device": DeviceSlot(1, 0, "cuda", FakeDriver().uuid, 4 * GRANULE),
    "another device": DeviceSlot(1, 0, "fake", bytes(16), 4 * GRANULE),
    "more than there is": DeviceSlot(1, 0, "fake", FakeDriver().uuid, 5 * GRANULE),
    "less than the weights": DeviceSlot(1, 0, "fake", FakeDriver().uuid, 0),
    "no whole granules": DeviceSlot(1, 0, "fake", FakeDriver().uuid, 4 * GRANULE - 1),
    "no memory of a device": DeviceSlot(1, 0, "fake", FakeDriver().uuid, 4 * GRANULE),
    "another segment": DeviceSlot(2, 0, "fake", FakeDriver().uuid, 4 * GRANULE),
    "no announcement": PageMessage(),
}


@pytest.mark.parametrize("case", NAMED)
async def test_what_was_never_given_is_never_taken(case: str, device: Deferred) -> None:
    header = struct.pack("<QQ16sQ24x", 1, MANIFEST.nbytes, MANIFEST.digest, 0)
    want = (1 << 16 | 1 << 8).to_bytes(8, "little")
    name = "weights" if case == "no memory of a device" else "fake device memory"
    files = {"page": (want, 4096), "segment": (header, 4096), name: (b"", 4 * GRANULE)}
    with contextlib.ExitStack() as stack:
        fds = []
        for each, (content, nbytes) in files.items():
            fds.append(os.memfd_create(each))
            stack.callback(os.close, fds[-1])
            os.truncate(fds[-1], nbytes)
            os.pwrite(fds[-1], content, 0)
        mine, its = socket.socketpair()
        stack.enter_context(mine)
        mine.setblocking(False)
        target = nn.ParameterList([torch.zeros(100)])
        worker = aiosync.SharedMemWeightSyncScheme(timeout=1, memory="device")
        worker.init_on_receiver(model=target, pipe=its)
        async with worker:
            joining = asyncio.ensure_future(worker.connect())
            await asyncio.get_running_loop().sock_recv(mine, 65536)
            mine.sendall(encode_frame(Welcome(5, 1, 0)))
            mine.sendall(encode_frame(ManifestMessage(MANIFEST)))
            socket.send_fds(mine, [encode_frame(PageMessage())], fds[:1])
            socket.send_fds(mine, [encode_frame(Segment(1, 4096, 1, True))], fds[1:2])
            if case != "no announcement":
                socket.send_fds(mine, [encode_frame(NAMED[case])], fds[2:])
            mine.sendall(encode_frame(Take(5, 1)))
            with pytest.raises(aiosync.AiosyncError):
                await joining
    assert values(target) == {0.0}


# -- processes ------------------------------------------------------------------------------------


def pretend(state: harness.State, uuid: bytes | None = None) -> None:
    """Use a fake accelerator in this process."""
    fake = Deferred()
    if uuid is not None:
        fake.fake_driver = FakeDriver(uuid)
    use_accelerator(fake)


async def join(state: harness.State, scheme: Any, transforms: bool = False) -> None:
    state.scheme, state.model = scheme, net(0.0)
    seen = state.kept["seen"] = list[tuple[float, set[float]]]()
    hooks = aiosync.SchemeHooks(applied=lambda _, version: seen.append((version, values(model))))
    model = state.model
    given: dict[str, Any] = {"transform": lambda weights: weights} if transforms else {}
    scheme.init_on_receiver(model_id="policy", model=model, hooks=hooks, **given)
    await scheme.connect(timeout=30)


async def join_and_stay(state: harness.State, scheme: Any, step: str) -> None:
    """Join with a hook, or a transform, that does not end for version 2 before :func:`end`."""
    model, stays, free = net(0.0), threading.Event(), threading.Event()
    state.scheme, state.model = scheme, model
    state.kept["stays"], state.kept["free"] = stays, free
    took = 0

    async def before(epoch: int, version: int) -> None:
        if version == 2 and step == "hook":
            stays.set()
            await asyncio.Event().wait()

    def transform(weights: Any) -> Any:
        nonlocal took
        took += 1
        if took == 2:
            stays.set()
            assert free.wait(harness.PATIENCE)
        return weights

    given: dict[str, Any] = {"hooks": aiosync.SchemeHooks(before_apply=before)}
    if step == "transform":
        given["transform"] = transform
    scheme.init_on_receiver(model_id="policy", model=model, **given)
    await scheme.connect(timeout=30)


def stays(state: harness.State) -> bool:
    return bool(state.kept["stays"].is_set())


def end_transform(state: harness.State) -> None:
    """Let the transform end in its thread, while the loop does not go on."""
    state.kept["free"].set()
    time.sleep(0.2)


async def end(state: harness.State, way: str) -> None:
    """End the scheme before the loop hears of the transform's end."""
    end_transform(state)
    if way == "abort":
        state.scheme.abort()
    else:
        await state.scheme.aclose()


def block(state: harness.State, skips: int) -> None:
    """Let some waits for the device end, and no later one until :func:`go_on`."""
    state.kept["busy"] = blocked(accelerator(), skips)  # type: ignore[arg-type]


def is_blocked(state: harness.State) -> bool:
    return accelerator().skips == 0  # type: ignore[attr-defined]


def go_on(state: harness.State) -> None:
    state.kept["busy"].set()


def abort(state: harness.State) -> None:
    state.scheme.abort()


def has_nothing(state: harness.State) -> bool:
    """Return True if no descriptor of shared memory and no device memory is left here."""
    return has_none_of(state, "memfd")


def has_none_of(state: harness.State, kind: str) -> bool:
    """Return True if no descriptor of this kind of file and no device memory is left here."""
    gc.collect()
    names = list[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very list
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    left = [name for name in names if kind in name]
    return not left and not accelerator().fake_driver.mapped  # type: ignore[attr-defined]


async def until_worker(worker: Any, condition: Any) -> None:
    async with asyncio.timeout(harness.PATIENCE):
        while not await worker.call(condition):
            await asyncio.sleep(0.01)


async def seen_until(state: harness.State, version: int) -> list[tuple[float, set[float]]]:
    """Return each version that the model had, with the values that it had then."""
    await until(lambda: bool(state.kept["seen"]) and state.kept["seen"][-1][0] >= version)
    found: list[tuple[float, set[float]]] = state.kept["seen"]
    return found


def look(state: harness.State) -> set[float]:
    with state.scheme.reading():
        return values(state.model)


def write_to_a_slot(state: harness.State) -> None:
    address = next(iter(accelerator().fake_driver.mapped))  # type: ignore[attr-defined]
    ctypes.memset(address, 1, 1)


@contextlib.asynccontextmanager
async def trainer(source: nn.Module, num_workers: int | None) -> AsyncIterator[Any]:
    sender = aiosync.SharedMemWeightSyncScheme(timeout=30, memory="device")
    sender.init_on_sender(model_id="policy", model=source, num_workers=num_workers)
    async with sender:
        yield sender


class Halves(nn.Module):
    """A model whose second half comes in an update of its own, for which there is no room yet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.zeros(size)) for size in (4, 4096))

    def forward(self) -> torch.Tensor:
        return self.first.sum() + self.last.sum()


async def test_another_model_gets_parts_in_two_segments(device: Deferred) -> None:
    sender = aiosync.SharedMemWeightSyncScheme(timeout=30, memory="device", strict=False)
    sender.init_on_sender("policy", weights={"first": torch.ones(4)}, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver("policy", model=Halves())
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        await sender.send({"last": torch.ones(4096)})
        for _ in range(3):
            receiver.model = None
            receiver.model = other = Halves()
            assert await receiver.pull(timeout=20) == 2
            assert values(other) == {1.0}


@contextlib.asynccontextmanager
async def process(uuid: bytes | None = None) -> AsyncIterator[Any]:
    worker = harness.start(None, None)
    try:
        await worker.call(pretend, uuid)
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        worker.end()


async def test_workers_in_other_processes(device: Deferred) -> None:
    source = net(1.0)
    async with trainer(source, 2) as sender, process() as one, process() as two:
        twins = [pickle.loads(pickle.dumps(sender)) for _ in range(2)]
        joining = [w.call(join, t) for w, t in zip((one, two), twins, strict=True)]
        await asyncio.gather(sender.connect(), *joining)
        for value in (2.0, 3.0, 4.0):
            fill(source, value)
            await sender.send()
            assert await one.call(look) == await two.call(look) == {value}
        # A worker that is killed in the middle of its life gives its slot back.
        one.kill()
        for value in (5.0, 6.0, 7.0, 8.0):
            fill(source, value)
            with contextlib.suppress(aiosync.PartialSyncError):
                await sender.send()
            assert await two.call(look) == {value}
        assert device.num_transfers == 0
        assert len(device.fake_driver.mapped) == 2


async def test_a_slot_stays_until_the_copy_from_it_has_ended(device: Deferred) -> None:
    source = net(1.0)
    async with trainer(source, 1) as sender, process() as worker:
        twin = pickle.loads(pickle.dumps(sender))
        await asyncio.gather(sender.connect(), worker.call(join, twin))
        for first in (2.0, 7.0, 12.0):
            # The wait before the copy ends at once, and that after it does not.
            await worker.call(block, 1)
            handles = []
            for value in (first, first + 1, first + 2, first + 3, first + 4):
                fill(source, value)
                handles.append(sender.send_nowait())
                await asyncio.sleep(0.02)
            await worker.call(go_on)
            await asyncio.gather(*handles)
        seen = await worker.call(seen_until, 16)
        assert len(seen) > 3
        assert [had for _, had in seen] == [{float(version)} for version, _ in seen]


async def test_a_slot_stays_when_the_link_ends_in_the_middle_of_a_copy(device: Deferred) -> None:
    source = net(1.0)
    async with trainer(source, 2) as sender, process() as worker, process() as other:
        twins = [pickle.loads(pickle.dumps(sender)) for _ in range(2)]
        joining = [w.call(join, t) for w, t in zip((worker, other), twins, strict=True)]
        await asyncio.gather(sender.connect(), *joining)
        await worker.call(block, 1)
        fill(source, 2.0)
        sending = asyncio.create_task(sender.send())
        await other.call(seen_until, 2)
        await until_worker(worker, is_blocked)
        await worker.call(abort)
        with contextlib.suppress(aiosync.PartialSyncError):
            await sending
        for value in (3.0, 4.0, 5.0, 6.0):
            fill(source, value)
            with contextlib.suppress(aiosync.PartialSyncError):
                await sender.send()
        assert await other.call(look) == {6.0}
        await worker.call(go_on)
        seen = await worker.call(seen_until, 2)
        assert [had for _, had in seen] == [{float(version)} for version, _ in seen]
        # Then the worker gives the slot and all descriptors back.
        await until_worker(worker, has_nothing)
        before = device.num_transfers
        for value in (7.0, 8.0, 9.0):
            fill(source, value)
            await sender.send()
        assert await other.call(look) == {9.0}
        assert device.num_transfers == before


@pytest.mark.parametrize("when", ["idle", "copying", "behind"])
async def test_slots_of_a_lost_trainer_are_given_back_before_there_is_another(
    when: str, device: Deferred
) -> None:
    source = net(1.0)
    async with trainer(source, 1) as sender, process() as worker:
        twin = pickle.loads(pickle.dumps(sender))
        await asyncio.gather(sender.connect(), worker.call(join, twin))
        for value in (2.0, 3.0, 4.0, 5.0):
            fill(source, value)
            await sender.send()
            if when == "behind":
                # Reads then take later versions from the word, without an answer.
                assert await worker.call(look) == {value}
        fill(source, 6.0)
        if when == "copying":
            await worker.call(block, 1)
            sending = sender.send_nowait()
            await until_worker(worker, is_blocked)
            sender.abort()
            await worker.call(go_on)
            await asyncio.gather(sending, return_exceptions=True)
        elif when == "behind":
            await sender.send()
            sender.abort()
            await until_worker(worker, has_no_link)
            assert await worker.call(look) == {6.0}
        else:
            sender.abort()
        await until_worker(worker, has_no_device_memory)


def has_no_device_memory(state: harness.State) -> bool:
    return has_none_of(state, "fake device memory")


def has_no_link(state: harness.State) -> bool:
    return state.scheme.link_lost is not None


async def test_a_worker_that_leaves_in_the_middle_of_a_transform(device: Deferred) -> None:
    source = net(1.0)
    async with trainer(source, 2) as sender, process() as worker, process() as other:
        twins = [pickle.loads(pickle.dumps(sender)) for _ in range(2)]
        joining = [worker.call(join, twins[0], True), other.call(join, twins[1])]
        await asyncio.gather(sender.connect(), *joining)
        await worker.call(block, 1)
        sending = asyncio.create_task(sender.send())
        await until_worker(worker, is_blocked)
        await worker.call(abort)
        with pytest.raises(aiosync.PartialSyncError):
            await sending
        await worker.call(go_on)
        await until_worker(worker, has_nothing)
        await sender.send()
        before = device.num_transfers
        for _ in range(3):
            await sender.send()
        assert device.num_transfers == before


async def test_a_slot_of_the_host_is_given_back_after_a_copy_that_outlives_its_link(
    device: Deferred,
) -> None:
    source = net(1.0)
    sender = aiosync.SharedMemWeightSyncScheme(timeout=30)
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    async with sender, process() as worker:
        twin = pickle.loads(pickle.dumps(sender))
        await asyncio.gather(sender.connect(), worker.call(join, twin))
        # From the second use of a slot on, the accelerator reads it directly.
        for _ in range(8):
            await sender.send()
        await worker.call(block, 1)
        sending = asyncio.create_task(sender.send())
        await until_worker(worker, is_blocked)
        await worker.call(abort)
        await worker.call(go_on)
        await until_worker(worker, has_nothing)
        with contextlib.suppress(aiosync.PartialSyncError):
            await sending


async def test_a_slot_of_the_host_is_not_written_while_a_copy_outlives_its_link(
    device: Deferred,
) -> None:
    source = net(1.0)
    sender = aiosync.DistributedWeightSyncScheme(timeout=30)
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    async with sender, process() as worker:
        twin = pickle.loads(pickle.dumps(sender))
        await asyncio.gather(sender.connect(), worker.call(join, twin))
        for version in range(2, 10):
            fill(source, float(version))
            await sender.send()
        await worker.call(block, 1)
        fill(source, 10.0)
        handles = [sender.send_nowait()]
        await until_worker(worker, is_blocked)
        sender.sender_transports[0].abort()
        await until_worker(worker, has_redialled)
        for version in range(11, 15):
            fill(source, float(version))
            handles.append(sender.send_nowait())
            await asyncio.sleep(0.05)
        await worker.call(go_on)
        seen = await worker.call(seen_until, 14)
        assert [had for _, had in seen] == [{float(version)} for version, _ in seen]
        await asyncio.gather(*handles, return_exceptions=True)
        await worker.call(close)
        await until_worker(worker, has_nothing)


def has_redialled(state: harness.State) -> bool:
    return bool(state.scheme.reconnects)


async def close(state: harness.State) -> None:
    await state.scheme.aclose()


@pytest.mark.parametrize("way", ["abort", "aclose"])
@pytest.mark.parametrize("step", ["hook", "transform"])
async def test_a_worker_that_leaves_before_its_update_is_offered(
    step: str, way: str, device: Deferred
) -> None:
    async with trainer(net(1.0), 1) as sender, process() as worker:
        twin = pickle.loads(pickle.dumps(sender))
        await asyncio.gather(sender.connect(), worker.call(join_and_stay, twin, step))
        sending = asyncio.create_task(sender.send())
        await until_worker(worker, stays)
        await worker.call(end, way)
        await until_worker(worker, has_nothing)
        with contextlib.suppress(aiosync.PartialSyncError):
            await sending


async def test_two_slots_are_enough_after_a_send_to_one_worker(device: Deferred) -> None:
    source = net(1.0)
    async with trainer(source, 2) as sender, process() as one, process() as two:
        twins = [pickle.loads(pickle.dumps(sender)) for _ in range(2)]
        joining = [w.call(join, t) for w, t in zip((one, two), twins, strict=True)]
        await asyncio.gather(sender.connect(), *joining)
        await sender.send()
        await sender.send(worker_ids=[0])
        for _ in range(3):
            await sender.send()
        before = device.num_transfers
        for value in (5.0, 6.0, 7.0, 8.0):
            fill(source, value)
            await sender.send()
            assert await one.call(look) == await two.call(look) == {value}
        assert device.num_transfers == before


async def test_a_worker_on_another_device(device: Deferred) -> None:
    async with trainer(net(1.0), 1) as sender, process(b"another device!!") as worker:
        joining = asyncio.create_task(worker.call(join, pickle.loads(pickle.dumps(sender))))
        with pytest.raises(aiosync.PartialSyncError, match="this process has no such device"):
            await sender.connect()
        with pytest.raises(aiosync.AiosyncError):
            await joining


def stay_on_the_cpu(state: harness.State) -> None:
    fake = Deferred()
    fake.has = lambda tensor: False  # type: ignore[method-assign]
    use_accelerator(fake)


async def test_a_worker_on_the_cpu(device: Deferred) -> None:
    async with trainer(net(1.0), 1) as sender, process() as worker:
        await worker.call(stay_on_the_cpu)
        joining = asyncio.create_task(worker.call(join, pickle.loads(pickle.dumps(sender))))
        with pytest.raises(aiosync.PartialSyncError, match="this worker's model is on the CPU"):
            await sender.connect()
        with pytest.raises(aiosync.AiosyncError):
            await joining


async def test_no_worker_can_write_to_a_slot(device: Deferred) -> None:
    source = net(1.0)
    async with trainer(source, 1) as sender, process() as worker:
        twin = pickle.loads(pickle.dumps(sender))
        await asyncio.gather(sender.connect(), worker.call(join, twin))
        with pytest.raises((EOFError, ConnectionError, OSError)):
            await worker.call(write_to_a_slot)


async def test_a_forked_child_calls_no_driver(device: Deferred) -> None:
    driver = device.fake_driver
    memory: list[DeviceMemory] = []
    async with pair(net(1.0), net(0.0)):
        memory.append(DeviceMemory.allocate(driver, 10))
        fd = memory[0].fd
        pid = os.fork()
        if pid == 0:
            # The child gives back what it can. Pytest must not go on here.
            memory.clear()
            gc.collect()
            is_open = os.path.exists(f"/proc/self/fd/{fd}")  # noqa: ASYNC240 - it only looks
            os._exit(len(driver.strays) + is_open)
        assert os.waitpid(pid, 0)[1] == 0  # noqa: ASYNC222 - the child ends at once
        memory.clear()
