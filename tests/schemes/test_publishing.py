"""Through shared memory a send is over once its version is visible; nobody has to answer."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.asyncio

SHM = aiosync.SharedMemWeightSyncScheme


def _forward(state: harness.State) -> tuple[float, float]:
    """What a forward sees at both ends of the model."""
    first, last = state.model()
    return float(first), float(last)


def _looked_at(state: harness.State) -> set[float]:
    """What is there, outside of any read."""
    return {float(x) for parameter in state.model.parameters() for x in parameter.unique()}


class Slow(nn.Module):
    """A forward that looks at its weights again and again, and says what it saw."""

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
async def test_a_stopped_worker_is_not_waited_for_and_sees_the_newest_when_it_goes_on() -> None:
    scheme, source = SHM(timeout=harness.PATIENCE), models.stack()
    scheme.init_on_sender(model=source, num_workers=2)
    async with harness.workers(scheme, models.stack, 2) as crew:
        crew[0].stop()
        started = time.monotonic()
        for value in range(2, 102):
            models.fill(source, float(value))
            assert (await scheme.send()).acked == {0, 1}
        assert time.monotonic() - started < harness.PATIENCE / 10
        assert await crew[1].call(_forward) == (101.0, 101.0)
        crew[0].cont()
        assert await crew[0].call(_forward) == (101.0, 101.0)
        assert scheme.worker_versions == {0: 101, 1: 101}


@pytest.mark.slow
async def test_whoever_does_not_compute_follows_soon() -> None:
    scheme, source = SHM(timeout=harness.PATIENCE), models.linear()
    scheme.init_on_sender(model=source, num_workers=1)
    async with harness.workers(scheme, models.linear) as [worker]:
        for value in range(1000):
            models.fill(source, float(value))
            await scheme.send()
        await harness.until(lambda: scheme.worker_versions == {0: scheme.version})
        assert await worker.call(_looked_at) == {999.0}


async def test_what_a_forward_reads_is_not_written_over() -> None:
    source, target = Slow(), Slow()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        begun, over = threading.Event(), threading.Event()

        def end() -> bool:
            begun.set()
            return over.is_set()

        target.end = end
        reading = asyncio.ensure_future(asyncio.to_thread(target))
        try:
            await harness.until(begun.is_set)
            for value in range(3, 103):
                models.fill(source, float(value))
                assert (await sender.send()).acked == {0}
                await asyncio.sleep(0)
        finally:
            over.set()
        assert await reading == {2.0}
        assert target() == {102.0}


async def test_workers_whose_reads_overlap_answer() -> None:
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        with harness.read_elsewhere(receiver):
            target(torch.zeros(1, 4))  # beside that one: it says so

            async def told() -> aiosync.SendHandle:
                while (handle := sender.send_nowait()).done():
                    await asyncio.sleep(0.001)  # until the trainer has heard that
                return handle

            handle = await told()
            await receiver.wait_staged(handle.version, timeout=harness.PATIENCE)
            assert not handle.done()
        assert (await handle).acked == {0}
        assert receiver.version == handle.version


async def test_a_trainer_that_goes_leaves_the_newest_version_behind() -> None:
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        models.fill(source, 7.0)
        await sender.send()
        await sender.aclose()
        with pytest.raises(aiosync.PeerClosed):
            await receiver.wait_for_version(9, timeout=harness.PATIENCE)
        assert models.holds(receiver, 7.0)


async def test_a_model_that_grows_is_told_and_then_followed_again() -> None:
    source, target = models.linear(), models.linear()
    ends = harness.here(SHM(timeout=harness.PATIENCE), target, sender={"model": source})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        receiver.model = None
        wide = receiver.model = models.wide()
        for value in (3.0, 4.0, 5.0):
            given = models.wide()
            models.fill(given, value)
            assert (await sender.send(given)).acked == {0}
            assert models.holds(receiver, value)
        assert models.filled(wide, 5.0)
        assert models.filled(target, 2.0)


async def test_whoever_reads_for_long_keeps_nobody_waiting() -> None:
    """Each is in a read of another version, and keeps its slot."""
    source, targets = models.medium(), [models.medium() for _ in range(6)]
    ends = harness.crowd(SHM(timeout=harness.PATIENCE), targets, sender={"model": source})
    async with ends as (sender, others):
        entered, leave, found = [], threading.Event(), list[tuple[bool, bool]]()

        def read(receiver: Any, value: float) -> None:
            with receiver.reading():
                before = models.filled(receiver.model, value)
                entered.append(receiver)
                leave.wait(harness.PATIENCE)
                found.append((before, models.filled(receiver.model, value)))

        reading = []
        try:
            for number, other in enumerate(others):
                models.fill(source, float(number))
                assert len((await sender.send(timeout=harness.PATIENCE)).acked) == 6
                there = asyncio.to_thread(read, other, float(number))
                reading.append(asyncio.ensure_future(there))
                await harness.until(lambda number=number: len(entered) == number + 1)
            for value in range(10, 20):
                models.fill(source, float(value))
                assert len((await sender.send(timeout=harness.PATIENCE)).acked) == 6
        finally:
            leave.set()
        await asyncio.gather(*reading)
        assert found == [(True, True)] * 6
        assert all(models.holds(other, 19.0) for other in others)


async def test_those_that_answer_and_those_that_look_are_in_one_report() -> None:
    source, targets = models.linear(), [models.linear(), models.linear()]
    scheme = SHM(timeout=harness.PATIENCE, per_worker_weights=True)
    async with harness.crowd(scheme, targets, sender={"model": source}) as (sender, others):
        for value in (2.0, 3.0):
            models.fill(source, value)
            await sender.send()
        with harness.read_elsewhere(others[1]), others[1].reading():
            pass  # its reads overlap, so it answers from now on
        given = [models.linear(4.0), models.linear(5.0)]
        for _ in range(20):
            report = await sender.send(dict(enumerate(given)))
            assert (report.acked, report.failed) == ({0, 1}, {})
            assert models.holds(others[0], 4.0)
            assert models.holds(others[1], 5.0)


class Stateful(nn.Linear):
    """With an extra state where it is given one: such updates come by message."""

    extra: dict[str, int] | None = None

    def get_extra_state(self) -> dict[str, int]:
        return self.extra or {}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state


async def test_what_is_kept_stays_where_updates_come_either_way() -> None:
    source, target = models.linear(), Stateful(4, 2)
    given = Stateful(4, 2)
    make = SHM(timeout=harness.PATIENCE, strict=False)
    async with harness.here(make, target, sender={"model": source}) as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        with receiver.reading():
            kept = {name: p.detach() for name, p in target.named_parameters()}
        given.extra = {"step": 1}
        models.fill(given, 3.0)
        assert (await sender.send(given)).acked == {0}
        for value in range(4, 12):
            await harness.deliver(sender, receiver, float(value))
            assert all((each == 2.0).all() for each in kept.values()), value
