"""Sends through shared memory, which are over once their version is visible, without answers."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import mmap
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from tests.contract.bench import small
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import wake_ups

pytestmark = pytest.mark.asyncio

SHM = aiosync.SharedMemWeightSyncScheme


def _forward(state: harness.State) -> tuple[float, float]:
    """Return the values that a forward sees at both ends of the model."""
    first, last = state.model()
    return float(first), float(last)


def _forward_at_last(state: harness.State, begun: Path, told: Path) -> tuple[float, float]:
    """Compute after a while in which the event loop does not run and so takes no version."""
    begun.touch()
    while not told.exists():
        time.sleep(0.001)
    return _forward(state)


def _looked_at(state: harness.State) -> set[float]:
    """Return the values of the parameters outside of any read."""
    return {float(x) for parameter in state.model.parameters() for x in parameter.unique()}


class Slow(nn.Module):
    """Model whose forward looks at its weights repeatedly, and returns all values that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))
        self.end: Any = lambda: True

    def forward(self) -> set[float]:
        seen = set[float]()
        while True:
            seen.update(self.weight.detach()[::100].tolist())
            if self.end():
                return seen


@pytest.mark.slow
async def test_a_stopped_worker_is_not_waited_for_and_sees_the_newest_when_it_goes_on(
    tmp_path: Path,
) -> None:
    begun, told = tmp_path / "begun", tmp_path / "told"
    scheme, source = SHM(timeout=harness.PATIENCE), small()
    scheme.init_on_sender(model=source, num_workers=2)
    async with harness.workers(scheme, small, 2) as crew:
        # A worker promises to take versions in its reads only after a read.
        await crew[0].call(_forward)
        crew[0].post(_forward_at_last, begun, told)
        await harness.until(begun.exists)
        crew[0].stop()
        for value in range(2, 102):
            models.fill(source, float(value))
            assert (await scheme.send()).acked == {0, 1}
        assert await crew[1].call(_forward) == (101.0, 101.0)
        crew[0].cont()
        told.touch()
        assert await crew[0].answer() == (101.0, 101.0)
        assert scheme.worker_versions == {0: 101, 1: 101}


@pytest.mark.slow
async def test_whoever_seldom_computes_follows_soon_and_is_seldom_woken() -> None:
    scheme, source = SHM(timeout=harness.PATIENCE), models.linear()
    scheme.init_on_sender(model=source, num_workers=1)
    async with harness.workers(scheme, models.linear) as [worker]:
        woken, seconds = 0, 0.0
        for value in range(1000):
            # A worker that never computes would answer each send.
            if value % 20 == 0:
                await worker.call(harness.version)
                before, begun = sum(wake_ups(worker.pid).values()), time.monotonic()
            models.fill(source, float(value))
            await scheme.send()
            if value % 20 == 19:
                woken += sum(wake_ups(worker.pid).values()) - before
                seconds += time.monotonic() - begun
        ended = time.monotonic()
        await harness.until(lambda: scheme.worker_versions == {0: scheme.version})
        # On a quiet machine this takes 0.02 s.
        assert time.monotonic() - ended < harness.PATIENCE / 2
        # A worker is woken once in 5 ms; on a busy machine a burst of sends may take long.
        assert woken < 50 + seconds / 0.005
        assert await worker.call(_looked_at) == {999.0}


@pytest.mark.slow
async def test_a_worker_follows_soon_whatever_another_one_does() -> None:
    scheme, source = SHM(timeout=harness.PATIENCE), models.linear()
    scheme.init_on_sender(model=source, num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        # A worker promises to take versions in its reads only after a read.
        await crew[0].call(harness.version)
        crew[0].stop()
        took = list[float]()
        for value in range(100):
            models.fill(source, float(value))
            begun = time.monotonic()
            await scheme.send()
            await harness.until(lambda: scheme.worker_versions[1] == scheme.version)
            took.append(time.monotonic() - begun)
        # 0.01 s on a quiet machine, and 0.1 s if a worker is rung as seldom as the other one.
        assert sorted(took)[50] < harness.PATIENCE / 600
        crew[0].cont()


async def test_what_a_forward_reads_is_not_written_over() -> None:
    source, target = Slow(), Slow()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        value = 2.0
        await harness.deliver(sender, receiver, value)
        # The forwards read different slots.
        for _ in range(5):
            begun, over = threading.Event(), threading.Event()
            found = value
            target.end = lambda begun=begun, over=over: begun.set() or over.is_set()
            reading = asyncio.ensure_future(asyncio.to_thread(target))
            try:
                await harness.until(begun.is_set)
                for _ in range(40):
                    value += 1.0
                    models.fill(source, value)
                    assert (await sender.send()).acked == {0}
                    await asyncio.sleep(0)
            finally:
                over.set()
            assert await reading == {found}
            assert target() == {value}


ASKING: dict[str, Any] = {
    "receive": lambda receiver, version: receiver.receive(),
    "receive(0)": lambda receiver, version: receiver.receive(timeout=0),
    "wait_for_version": lambda receiver, version: receiver.wait_for_version(version),
    "wait_lag_below": lambda receiver, version: receiver.wait_lag_below(1),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
async def test_a_worker_that_asks_for_what_is_there_says_nothing(ask: Any) -> None:
    """After a message of the worker the next ``send()`` would give the loop a turn first."""
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 1.0)
        # The earlier messages of the worker arrive meanwhile.
        for _ in range(5):
            version = (await sender.send()).version
            await asyncio.sleep(0.01)
        for _ in range(20):
            await ask(receiver, version)
            assert receiver.version == version
            with pytest.raises(StopIteration) as ended:
                sender.send().send(None)
            version = ended.value.value.version


async def test_workers_whose_reads_overlap_answer() -> None:
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        with harness.read_elsewhere(receiver):
            # This read overlaps the other one, so the worker tells the trainer to wait for answers.
            target(torch.zeros(1, 4))

            async def told() -> aiosync.SendHandle:
                while (handle := sender.send_nowait()).done():
                    # The trainer has not received the worker's message yet.
                    await asyncio.sleep(0.001)
                return handle

            handle = await told()
            await receiver.wait_staged(handle.version, timeout=harness.PATIENCE)
            assert not handle.done()
        assert (await handle).acked == {0}
        assert receiver.version == handle.version


async def test_the_first_send_after_reads_overlapped_waits_for_an_answer() -> None:
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        with harness.read_elsewhere(receiver):
            target(torch.zeros(1, 4))
            await asyncio.sleep(0.1)  # The worker's message arrives, and no send rings the worker.
            handle = sender.send_nowait()
            assert not handle.done()
        assert (await handle).acked == {0}


async def test_versions_that_are_taken_inside_of_inference_mode_can_be_trained() -> None:
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        for value in (3.0, 4.0):
            models.fill(source, value)
            assert (await sender.send()).acked == {0}
            with torch.inference_mode():
                assert float(target(torch.ones(4))[0]) == 5 * value
            target(torch.ones(4)).sum().backward()
            assert not target.weight.is_inference()


@pytest.mark.one_loop
@pytest.mark.parametrize("seed", range(4))
async def test_a_send_that_returned_is_seen_whatever_happened_to_the_model(seed: int) -> None:
    """The model may be replaced, get a new manifest, or be used by other threads or torch.func."""
    chance, source, target = random.Random(seed), models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        for number in range(150):
            value, what = float(number), chance.randrange(8)
            models.fill(source, value)
            weights: Any = None
            if what == 0:
                receiver.model = models.linear()
            elif what == 1:
                # Names in another order are another manifest.
                weights = dict(reversed(list(source.state_dict().items())))
            elif what == 2:
                with harness.read_elsewhere(receiver):
                    handle = sender.send_nowait()
                    for _ in range(chance.randrange(3)):
                        await asyncio.sleep(0)
                    with receiver.reading():
                        # This read overlaps the other one.
                        pass
                assert (await handle).acked == {0}
                assert models.holds(receiver, value)
                continue
            assert (await sender.send(weights)).acked == {0}
            if what == 3:
                try:
                    out = torch.vmap(receiver.model)(torch.ones(2, 4))
                except aiosync.ApplyError:
                    # The forward was refused, so the loop applies the version.
                    await asyncio.sleep(0.01)
                else:
                    assert bool((out == 5 * value).all())
            elif what == 4:
                out = await asyncio.to_thread(receiver.model, torch.ones(4))
                assert bool((out == 5 * value).all())
            assert models.holds(receiver, value)


async def test_a_write_that_ends_after_its_version_was_left_is_gone_with_the_next() -> None:
    """Such a write is a step of an optimizer in another thread while updates come."""
    scheme, target = aiosync.SharedMemWeightSyncScheme(), models.linear()
    async with harness.here(scheme, target, sender={"model": models.linear()}) as ends:
        seen = set()
        for version in range(2, 12):
            stale = (ctypes.c_float * target.weight.numel()).from_address(target.weight.data_ptr())
            seen.add(target.weight.data_ptr())
            await harness.deliver(*ends, version)
            stale[:] = [-1.0] * len(stale)
            assert models.holds(ends[1], version)
        # Some slots were used several times.
        assert len(seen) < 9


async def test_what_no_longer_fits_raises_where_it_is_read_and_is_told_afterwards() -> None:
    target, options = models.linear(), {"model": models.linear()}
    make = aiosync.SharedMemWeightSyncScheme
    async with harness.here(make(), target, sender=options) as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        weight = target.weight
        target.weight = nn.Parameter(torch.full((3, 3), 7.0))
        # No read has met the version yet.
        assert (await sender.send()).acked == {0}
        with pytest.raises(aiosync.ApplyError, match="weight"):
            target(torch.zeros(1, 4))
        assert torch.equal(target.weight, torch.full((3, 3), 7.0))
        with pytest.raises(aiosync.PartialSyncError, match="weight"):
            while await sender.wait_for_version(3, timeout=harness.PATIENCE):
                # The worker's refusal has not arrived yet.
                await asyncio.sleep(0.001)
        # From now on the worker answers each update.
        with pytest.raises(aiosync.PartialSyncError, match="weight"):
            await sender.send()
        target.weight = weight
        await harness.deliver(sender, receiver, 4.0)


async def test_weights_in_another_order_end_no_forward() -> None:
    """A worker whose loop has had no turn yet computes with the weights that it has."""
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        await harness.deliver(sender, receiver, 3.0)
        for value in range(4, 10):
            # The worker takes versions in its forwards.
            assert sender.send_nowait().done()
            models.fill(source, float(value))
            names = list(source.state_dict())[:: 1 if value % 2 else -1]
            handle = sender.send_nowait({name: source.state_dict()[name] for name in names})
            for _ in range(100):
                assert float(target(torch.ones(4)).detach()[0]) in (5.0 * value, 5.0 * (value - 1))
                await asyncio.sleep(0)
            assert (await handle).acked == {0}
            assert models.holds(receiver, float(value))
            await harness.deliver(sender, receiver, float(value), weights=source)
            await harness.deliver(sender, receiver, float(value))


async def test_an_update_that_is_too_large_does_no_harm_to_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take, most = os.posix_fallocate, 2**20

    def limited(fd: int, offset: int, nbytes: int) -> None:
        if nbytes > most:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        take(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    init = {"weights": {"small": torch.zeros(16), "large": torch.zeros(2**22)}}
    source = {"weights": {"small": torch.ones(16)}}
    scheme = SHM(strict=False, guard="reading", timeout=harness.PATIENCE)
    async with harness.here(scheme, None, sender=source, receiver=init) as (sender, receiver):
        large = {"large": torch.full((2**22,), 3.0)}
        for call in (sender.send, sender.send_nowait):
            with pytest.raises(aiosync.ConfigError, match="cannot allocate shared memory"):
                await call(large)
        assert (await sender.send({"small": torch.full((16,), 3.0)})).acked == {0}
        most = 2**30
        assert (await sender.send(large)).acked == {0}
        async with receiver.reading():
            found = receiver.weights.values()
            assert {float(x) for each in found for x in each.aminmax()} == {3.0}


async def test_a_worker_without_room_for_a_slot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not blame the trainer, and has the size."""
    take = mmap.mmap

    def limited(fd: int, nbytes: int, *args: Any, **options: Any) -> mmap.mmap:
        if args[:1] == (mmap.MAP_PRIVATE,) and nbytes > 2**20:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return take(fd, nbytes, *args, **options)

    monkeypatch.setattr(mmap, "mmap", limited)
    weights = {"weights": {"large": torch.zeros(2**20)}}
    scheme = SHM(guard="reading", timeout=harness.PATIENCE)
    scheme.init_on_sender(**weights)
    worker = harness.twin(scheme)
    worker.init_on_receiver(**weights)
    async with scheme, worker:
        await scheme.connect()
        with pytest.raises(aiosync.TransportBroken, match="cannot map a slot of 4198400 bytes"):
            await worker.connect()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (SHM, "the thread that copies weights cannot start"),
        (
            lambda **options: aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", **options),
            "no memory",
        ),
    ],
)
async def test_a_trainer_without_memory_or_threads_says_so(
    make: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sends that fail change nothing, also not in the sends after them."""
    take, start = mmap.mmap, threading.Thread.start

    def mapping(fd: int, nbytes: int, *args: Any, **options: Any) -> mmap.mmap:
        if fd < 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return take(fd, nbytes, *args, **options)

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith("aiosync-snapshot"):
            raise RuntimeError("can't start new thread")
        start(thread)

    init = {"weights": {"small": torch.zeros(16), "large": torch.zeros(2**22)}}
    source = {"weights": {"small": torch.ones(16)}}
    scheme = make(strict=False, guard="reading", timeout=harness.PATIENCE)
    async with harness.here(scheme, None, sender=source, receiver=init) as (sender, receiver):
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", mapping)
            patch.setattr(threading.Thread, "start", starting)
            for _ in range(2):
                with pytest.raises(aiosync.ConfigError, match=text):
                    await sender.send({"large": torch.full((2**22,), 2.0)})
        assert (await sender.send({"large": torch.full((2**22,), 3.0)})).acked == {0}
        async with receiver.reading():
            assert {float(x) for x in receiver.weights["large"].aminmax()} == {3.0}


def reordered(model: nn.Module) -> dict[str, Any]:
    """Return the weights in another order, which is another manifest."""
    return dict(reversed(list(model.state_dict().items())))


async def _compute_at_each_turn(state: harness.State, told: Path) -> int:
    """Compute a few times in each turn of the loop, and return the number of turns."""
    turns = 0
    while not told.exists():  # noqa: ASYNC240 - it takes no longer than a forward
        for _ in range(turns % 7):
            state.model(torch.zeros(4))
        turns += 1
        await asyncio.sleep(0)
    return turns


@pytest.mark.one_loop
async def test_workers_that_compute_at_each_turn_get_weights_in_another_order(
    tmp_path: Path,
) -> None:
    """They may promise anew right after they have withdrawn, and nobody may wait for more."""
    source, told = models.linear(), tmp_path / "told"
    scheme = SHM(timeout=harness.PATIENCE)
    scheme.init_on_sender(model=source, num_workers=2)
    async with harness.workers(scheme, models.linear, 2) as crew:
        for worker in crew:
            worker.post(_compute_at_each_turn, told)
        try:
            for number in range(300):
                models.fill(source, float(number))
                weights = reordered(source) if number % 3 == 2 else None
                assert (await scheme.send(weights, timeout=10.0)).acked == {0, 1}
        finally:
            told.touch()
        assert all([await worker.answer() for worker in crew])
        assert {await worker.value() for worker in crew} == {299.0}


async def test_a_promise_that_the_trainer_does_not_know_ends_no_forward() -> None:
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        models.fill(source, 3.0)
        handle = sender.send_nowait(reordered(source))
        # The manifest waits in the socket, as the loop has no turn. These forwards promise to take
        # versions of the old one.
        for _ in range(3):
            assert float(target(torch.ones(4))[0].detach()) == 10.0
        assert (await handle).acked == {0}
        assert float(target(torch.ones(4))[0].detach()) == 15.0


@pytest.mark.slow
async def test_two_sends_at_a_time_never_have_one_slot() -> None:
    """One of them waits for new memory while the other one asks for memory at each turn."""
    for number in range(6):
        scheme, target = SHM(timeout=harness.PATIENCE), nn.Linear(2**21, 1, bias=False)
        source = nn.Linear(2**21, 1, bias=False)
        models.fill(source, 3.0)
        async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
            values, seen = dict[int, float](), set[tuple[int, float]]()

            def look(receiver: Any = receiver, target: Any = target, seen: Any = seen) -> None:
                with receiver.reading():
                    found = target.weight.detach().flatten()[:: 2**19].unique().tolist()
                    seen.update((receiver.version, value) for value in found)

            look()
            values[sender.version] = 3.0
            models.fill(source, 1.0)
            sending = asyncio.ensure_future(sender.send())
            more = {"weight": torch.full((1, 2**21), 2.0)}
            handles = []
            for turn in itertools.count():
                await asyncio.sleep(0)
                if sending.done():
                    break
                if turn > 3 * number and len(handles) < 100:
                    handles.append(sender.send_nowait(more))
                look()
            values[(await sending).version] = 1.0
            values |= {handle.version: 2.0 for handle in handles}
            await asyncio.gather(*handles)
            await receiver.wait_for_version(sender.version, timeout=harness.PATIENCE)
            look()
            assert {(version, values[version]) for version, _ in seen} == seen, number


@pytest.mark.one_loop
@pytest.mark.parametrize("first", ["worker", "trainer", "abort"])
async def test_a_worker_that_closes_has_the_version_that_was_named(first: str) -> None:
    """Its last checkpoint is of the version that the trainer's report says it has."""
    sender, source, target = SHM(timeout=harness.PATIENCE), small(), small()
    async with harness.here(sender, target, sender={"model": source}) as (_, receiver):
        for value in (2.0, 3.0, 4.0):
            models.fill(source, value)
            report = await sender.send()
            target()
        models.fill(source, 5.0)
        report = await sender.send()
        assert report.acked == {0}
        if first == "abort":
            receiver.abort()
        elif first == "worker":
            await receiver.aclose()
        else:
            await sender.aclose()
            await receiver.aclose()
        assert receiver.version == report.version
        assert all(float(each.min()) == 5.0 for each in target.state_dict().values())


class Owner:
    """Object that has a model."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy


@pytest.mark.one_loop
@pytest.mark.parametrize("lost", ["the context's", "the assigned one"])
async def test_a_version_that_was_named_keeps_no_read_once_its_model_is_gone(lost: str) -> None:
    source, target = models.linear(), models.linear()
    owner, is_context = Owner(target), lost == "the context's"
    init = {"context": owner, "model": None} if is_context else {"model": target}
    ends = harness.here(SHM(), None, sender={"model": source}, receiver=init)
    async with ends as (sender, receiver):
        for value in (2.0, 3.0, 4.0):
            await harness.deliver(sender, receiver, value)
            await asyncio.sleep(0.01)
        assert sender.send_nowait(models.linear(5.0)).done()
        owner.policy = None
        if not is_context:
            receiver.model = None
        seen = list[float]()

        def read() -> None:
            with receiver.reading():
                seen.extend(target.bias.tolist())

        # The loop has no turn, so that it cannot end the promise meanwhile.
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(harness.PATIENCE / 4)
        assert seen == [4.0, 4.0]
        if is_context:
            owner.policy = target
            assert models.holds(receiver, 5.0)


async def test_a_version_that_is_named_right_after_a_refused_one_ends_no_link() -> None:
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        for value in (2.0, 3.0, 4.0):
            await harness.deliver(sender, receiver, value)
            await asyncio.sleep(0.01)
        weight, target.weight = target.weight, nn.Parameter(torch.zeros(3, 4))
        assert sender.send_nowait().done()
        with pytest.raises(aiosync.ApplyError, match="weight"):
            target(torch.ones(4))
        # The refusal is on its way, and the trainer counts on the promise still.
        assert sender.send_nowait().done()
        with pytest.raises(aiosync.PartialSyncError, match="weight"):
            await sender.send()
        assert receiver.link_lost is None
        target.weight = weight
        await harness.deliver(sender, receiver, 5.0)
