"""One sender and its receivers with a proxy between them that harms the stream at every byte.

The weights of version n are all n, so a torn update shows. What has to hold at any time: a
receiver has one complete version; it gets the newest as soon as the proxy lets it; and no call
of the sender lasts longer than its deadline.
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
    """Three tensors, the payload of which is cut into two chunks."""
    model = nn.Module()
    for name, size in (("a", 3), ("b", 5), ("c", 16)):
        model.register_parameter(name, nn.Parameter(torch.full((size,), -1.0)))
    return model


CHUNK = 128
CROWD = 32


def stamp(model: nn.Module) -> float:
    """The one value that every element has."""
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
    harmed: Plan | None = None  # of the next connection

    def plan(self, _number: int) -> Plan | None:
        harmed, self.harmed = self.harmed, None
        return harmed

    def look(self) -> float:
        """Check that the model has one complete version, no older than the last time."""
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
        """Send the next version; what it raises is an error that is documented, and in time."""
        self.value += 1
        fill(self.model, self.value)
        try:
            async with asyncio.timeout(SEND):
                return await self.sender.send()
        except aiosync.PartialSyncError as exc:
            assert all(isinstance(error, aiosync.AiosyncError) for error in exc.failed.values())
            return exc

    async def settle(self, *, impatient: bool = False) -> None:
        """Wait until everybody has the newest version, and look at everybody all the time.

        Impatient: end what waits for bytes that a fault took away, long before its 30 s are over.
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
    """A sender that listens, and connected receivers."""
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
    """New links, each with its plan: an update goes with the welcome, and perhaps one after."""
    for worker, plan in zip(crowd.workers, plans, strict=False):
        worker.harmed = plan
    # Also those that have no plan any more get a new link.
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
    """Bytes that an unharmed connection carries in each direction, with some to spare."""
    async with crowd(1) as one:
        proxy = one.workers[0].proxy
        await one_round(one, [], updates)
        before = proxy.bytes_forward, proxy.bytes_back
        await one_round(one, [], updates)
        # Versions get longer as they grow: some bytes more.
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
    """Forward is what a receiver sends (proof, Hello, acks), back is what it gets.

    At every seventh byte, which puts it into every field; --heavy does it at every byte.
    """

    async def main() -> None:
        updates = 1 if kind == "reset" else 2  # that a harmed link carries
        length = (await length_of_a_round(updates))[direction]
        every = range(0, length, step)
        async with crowd(CROWD) as many:
            for first in range(0, len(every), CROWD):
                offsets = every[first : first + CROWD]
                plans = [Plan(**{direction: Faults(**FAULTS[kind](at))}) for at in offsets]
                await one_round(many, plans, updates)
            # Once the last faults are over, everything is as it was.
            async with asyncio.timeout(SEND):
                while (await many.send()).acked != frozenset(range(CROWD)):
                    await many.settle()
            await many.settle()
            links = sum(worker.proxy.connections for worker in many.workers)
        # Every fault cost its link, but for those beyond the last byte or that repeat nothing.
        rounds = -(-len(every) // CROWD)
        assert links - CROWD * (1 + rounds) > len(every) * 0.5

    # One loop each: both would take twice as long, and the bytes are the same.
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
        # It is not waited for again, and the next send says that it is lost.
        report = await one.send()
        assert isinstance(report, aiosync.PartialSyncError)
        assert worker.look() == 1.0
        if direction == "back":
            worker.proxy.resume()  # the end of the link arrives, and with it a new one
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
            # Where the link stalls after the handshake the worker hears nothing more: the end of
            # the link stalls, too, until the proxy lets it go. An answer may take 30 s.
            loop.call_later(5 * STALL, setattr, loop, "time", lambda: now() + 31)
            for worker in many.workers:
                loop.call_later(5 * STALL, worker.proxy.resume)
            back = [Plan(back=Faults(stall_at=at)) for at in plans]
            await one_round(many, back, 1, impatient=False)

    run("asyncio", main())  # the clock of uvloop cannot be moved on


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_slow_link_is_not_taken_for_a_stalled_one() -> None:
    """A transfer of many times stall_timeout, as long as bytes move."""
    async with crowd(1, build=lambda: Block(300_000), chunk_nbytes=2**20) as one:
        (worker,) = one.workers
        worker.harmed = Plan(back=Faults(delay=STALL / 2))
        worker.proxy.cut()
        await until(lambda: not one.sender.sender_transports)
        await one.send()
        await one.settle()
        assert worker.scheme.reconnects == 1


class Block(nn.Module):
    """One tensor of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.block = nn.Parameter(torch.full((nbytes // 4,), -1.0))
