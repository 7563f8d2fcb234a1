"""One sender and its receivers with a proxy between them that harms the stream at every byte.

The weights of version n are all n, so a torn update shows. At any time a receiver has one complete
version; it gets the newest version as soon as the proxy lets it pass; and no call of the sender
lasts longer than its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.testing import FaultProxy, Faults, Plan
from tests.schemes._harness import PATIENCE, run, until
from tests.schemes._models import fill

STALL = 0.3
"""Seconds of ``stall_timeout`` and of the handshakes' deadlines."""

SEND = 10.0
"""Seconds that a call of the sender may last; far more than it needs."""


def small() -> nn.Module:
    """Return a model of three tensors, whose payload is cut into two chunks."""
    model = nn.Module()
    for name, size in (("a", 3), ("b", 5), ("c", 16)):
        model.register_parameter(name, nn.Parameter(torch.full((size,), -1.0)))
    return model


CHUNK = 128
CROWD = 32


def stamp(model: nn.Module) -> float:
    """Return the one value that every element of the model has."""
    values = {value for each in model.parameters() for value in each.detach().tolist()}
    assert len(values) == 1, f"torn: {sorted(values)}"
    return values.pop()


@dataclass
class Worker:
    """A receiver behind a proxy of its own."""

    proxy: FaultProxy
    scheme: Any
    model: nn.Module
    seen: float = 0.0
    # Plan of the faults of the next connection.
    harmed: Plan | None = None

    def plan(self, _number: int) -> Plan | None:
        harmed, self.harmed = self.harmed, None
        return harmed

    def look(self) -> float:
        """Check that the model has one complete version, no older than at the last check."""
        before, self.seen = self.seen, stamp(self.model)
        assert self.seen >= before, f"{self.seen} after {before}"
        return self.seen


@dataclass
class Crowd:
    sender: Any
    model: nn.Module
    workers: list[Worker]
    value: float = 0.0

    async def send(self) -> Any:
        """Send the next version; return its report, or the documented error that it raises."""
        self.value += 1
        fill(self.model, self.value)
        try:
            async with asyncio.timeout(SEND):
                return await self.sender.send()
        except aiosync.PartialSyncError as exc:
            assert all(isinstance(error, aiosync.AiosyncError) for error in exc.failed.values())
            return exc

    async def settle(self, *, impatient: bool = False) -> None:
        """Wait until each worker has the newest version, and check all workers meanwhile.

        Args:
            impatient: True to cut the links of late workers. They may wait for bytes that a fault
                took away, and would otherwise do so for 30 s.
        """
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE):
            while late := [each for each in self.workers if each.look() != self.value]:
                if impatient and time.monotonic() > began + 2 * STALL:
                    began = time.monotonic()
                    for worker in late:
                        worker.proxy.cut()
                await asyncio.sleep(0.003)


@contextlib.asynccontextmanager
async def crowd(
    number: int, build: Callable[[], nn.Module] = small, **options: Any
) -> AsyncIterator[Crowd]:
    """A sender that listens, and ``number`` connected receivers."""
    options = {
        "chunk_nbytes": CHUNK,
        "stall_timeout": STALL,
        "handshake_timeout": STALL,
        "timeout": SEND,
        **options,
    }
    sender = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", **options)
    model = build()
    fill(model, 0.0)
    sender.init_on_sender("policy", model=model, num_workers=None)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(sender.aclose)
        await sender.connect()
        workers = []
        for idx in range(number):
            proxy = await stack.enter_async_context(FaultProxy(sender.address))
            scheme = aiosync.TCPWeightSyncScheme(proxy.url, **options)
            worker = Worker(proxy, scheme, build())
            fill(worker.model, 0.0)
            proxy.plan = worker.plan
            scheme.init_on_receiver("policy", worker_idx=idx, model=worker.model)
            stack.push_async_callback(scheme.aclose)
            workers.append(worker)
        await asyncio.gather(*(worker.scheme.connect(timeout=PATIENCE) for worker in workers))
        yield Crowd(sender, model, workers)


async def one_round(
    crowd: Crowd, plans: list[Plan], updates: int, *, impatient: bool = True
) -> None:
    """Give each worker a new link with its plan, and send ``updates`` updates.

    The first update goes with the Welcome.
    """
    for worker, plan in zip(crowd.workers, plans, strict=False):
        worker.harmed = plan
    # Workers without a plan in this round get a new link, too.
    before = [worker.proxy.connections for worker in crowd.workers]
    for worker in crowd.workers:
        worker.proxy.cut()
    await until(lambda: not crowd.sender.sender_transports)
    await crowd.send()
    await until(
        lambda: all(
            worker.proxy.connections > number
            for worker, number in zip(crowd.workers, before, strict=True)
        )
    )
    await crowd.settle(impatient=impatient)
    for _ in range(updates - 1):
        await crowd.send()
        await crowd.settle(impatient=impatient)
    for worker in crowd.workers:
        worker.harmed = None


async def length_of_a_round(updates: int) -> dict[str, int]:
    """Return the bytes that an unharmed connection carries in each direction, and a few more."""
    async with crowd(1) as one:
        proxy = one.workers[0].proxy
        await one_round(one, [], updates)
        before = proxy.bytes_forward, proxy.bytes_back
        await one_round(one, [], updates)
        # A version is encoded in more bytes as it grows.
        forward, back = proxy.bytes_forward - before[0], proxy.bytes_back - before[1]
        return {"forward": forward + 8, "back": back + 24}


FAULTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "cut": lambda at: {"cut_at": at},
    "reset": lambda at: {"reset_at": at},
    "corrupt": lambda at: {"corrupt_at": at, "corrupt_mask": 1 << at % 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "back"])
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.heavy)])
def test_every_byte(kind: str, direction: str, step: int) -> None:
    """A fault at any byte neither tears an update nor blocks the sender.

    Forward is what a receiver sends (proof, Hello, acks), back is what it gets. There is a fault
    at every seventh byte, which puts one into every field; with --heavy it is every byte.
    """

    async def main() -> None:
        # Number of updates that a harmed link carries.
        updates = 1 if kind == "reset" else 2
        length = (await length_of_a_round(updates))[direction]
        every = range(0, length, step)
        async with crowd(CROWD) as many:
            for first in range(0, len(every), CROWD):
                offsets = every[first : first + CROWD]
                plans = [Plan(**{direction: Faults(**FAULTS[kind](at))}) for at in offsets]
                await one_round(many, plans, updates)
            # After the last faults all workers take updates as before.
            async with asyncio.timeout(SEND):
                while (await many.send()).acked != frozenset(range(CROWD)):
                    await many.settle()
            await many.settle()
            links = sum(worker.proxy.connections for worker in many.workers)
        # Each fault costs its link, except beyond the last byte or where nothing is repeated.
        rounds = -(-len(every) // CROWD)
        assert links - CROWD * (1 + rounds) > len(every) * 0.5

    # Each case runs on one loop: both would take twice as long, and the bytes are the same.
    run("uvloop" if (kind == "reset") == (direction == "forward") else "asyncio", main())


# -- time --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "back"])
@pytest.mark.asyncio
async def test_a_silent_link_is_dropped_after_stall_timeout(direction: str) -> None:
    async with crowd(1) as one:
        (worker,) = one.workers
        await one.send()
        worker.proxy.stall()
        began = time.monotonic()
        report = await one.send()
        took = time.monotonic() - began
        assert isinstance(report, aiosync.PartialSyncError)
        assert isinstance(report.failed[0], aiosync.AckTimeout)
        assert "stall_timeout" in str(report.failed[0])
        assert STALL <= took < SEND / 3
        assert not one.sender.sender_transports
        # The next send does not wait for the lost worker, and reports it as lost.
        report = await one.send()
        assert isinstance(report, aiosync.PartialSyncError)
        assert worker.look() == 1.0
        if direction == "back":
            # The end of the link reaches the worker now, which then makes a new one.
            worker.proxy.resume()
        else:
            worker.proxy.cut()
        await one.settle()
        assert worker.scheme.reconnects == 1


@pytest.mark.slow
def test_a_stall_in_every_phase_of_the_handshake() -> None:
    async def main() -> None:
        loop, plans = asyncio.get_running_loop(), range(0, 12 * CROWD, 12)
        now = loop.time
        async with crowd(CROWD, reconnect=None) as many:
            forward = [Plan(forward=Faults(stall_at=at)) for at in plans]
            await one_round(many, forward, 1, impatient=False)
            # A worker whose link stalls after the handshake gets nothing more: the end of the link
            # stalls, too, until the proxy resumes. The worker waits 30 s for an answer, so the
            # clock is moved on.
            loop.call_later(5 * STALL, setattr, loop, "time", lambda: now() + 31)
            for worker in many.workers:
                loop.call_later(5 * STALL, worker.proxy.resume)
            back = [Plan(back=Faults(stall_at=at)) for at in plans]
            await one_round(many, back, 1, impatient=False)

    # uvloop's clock cannot be moved on.
    run("asyncio", main())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_slow_link_is_not_taken_for_a_stalled_one() -> None:
    """A transfer may take many times stall_timeout as long as bytes move."""
    async with crowd(1, build=lambda: Block(300_000), chunk_nbytes=2**20) as one:
        (worker,) = one.workers
        worker.harmed = Plan(back=Faults(delay=STALL / 2))
        worker.proxy.cut()
        await until(lambda: not one.sender.sender_transports)
        await one.send()
        await one.settle()
        assert worker.scheme.reconnects == 1


class Block(nn.Module):
    """A model with one tensor of ``nbytes`` bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.block = nn.Parameter(torch.full((nbytes // 4,), -1.0))
