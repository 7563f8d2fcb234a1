"""One sender and its receivers with a proxy between them that harms the stream at every byte.

The weights of version n are all n, so a torn update shows. What has to hold at any time: a
receiver has one complete version; it gets the newest as soon as the proxy lets it; and no call
of the sender lasts longer than its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.testing import FaultProxy, Faults, Plan
from aiosync.transports.address import Address
from tests.faults._netns import goodput, in_netns, netns_available, shaped_link
from tests.schemes._harness import PATIENCE, run, twin, until
from tests.schemes._models import fill

STALL = 0.3
"""Seconds of ``stall_timeout`` and of the handshakes' deadlines."""

SEND = 10.0
"""Seconds that a call of the sender may last; far more than it needs."""

TRIES = 6
"""How often a time is taken on a machine that may be busy elsewhere; the bounds stay."""


def small() -> nn.Module:
    """Three tensors, the payload of which is cut into two chunks."""
    model = nn.Module()
    for name, size in (("a", 3), ("b", 5), ("c", 16)):
        model.register_parameter(name, nn.Parameter(torch.full((size,), -1.0)))
    return model


NBYTES = 3 * 64  # each tensor starts on a multiple of 64
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
    seen: list[float] = field(default_factory=list)
    harmed: Plan | None = None  # of the next connection

    def plan(self, _number: int) -> Plan | None:
        harmed, self.harmed = self.harmed, None
        return harmed

    def look(self) -> float:
        """Check that the model has one complete version, no older than the last time."""
        value = stamp(self.model)
        assert not self.seen or value >= self.seen[-1], f"{value} after {self.seen[-1]}"
        if not self.seen or value > self.seen[-1]:
            self.seen.append(value)
        return value


@dataclass
class Crowd:
    sender: Any
    model: nn.Module
    workers: list[Worker]
    value: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)

    async def send(self) -> Any:
        """Send the next version; what it raises is an error that is documented, and in time."""
        self.value += 1
        fill(self.model, self.value)
        try:
            async with asyncio.timeout(SEND):
                report = await self.sender.send()
            name = "sent"
        except aiosync.PartialSyncError as exc:
            assert all(isinstance(error, aiosync.AiosyncError) for error in exc.failed.values())
            report, name = exc, "partial"
        self.outcomes[name] = self.outcomes.get(name, 0) + 1
        return report

    async def settle(self) -> None:
        """Wait until everybody has the newest version, and look at everybody all the time."""

        async with asyncio.timeout(PATIENCE):
            while {worker.look() for worker in self.workers} != {self.value}:
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
            scheme = twin(sender)
            scheme._addresses = [Address.parse(proxy.url)]
            worker = Worker(proxy, scheme, build())
            fill(worker.model, 0.0)
            proxy.plan = worker.plan
            scheme.init_on_receiver("policy", worker_idx=idx, model=worker.model)
            stack.push_async_callback(scheme.aclose)
            workers.append(worker)
        await asyncio.gather(*(worker.scheme.connect(timeout=PATIENCE) for worker in workers))
        yield Crowd(sender, model, workers)


async def one_round(crowd: Crowd, plans: list[Plan], updates: int) -> None:
    """New links, each with its plan: an update goes with the welcome, and perhaps one after."""
    for worker, plan in zip(crowd.workers, plans, strict=False):
        worker.harmed = plan
    # Also those that have no plan any more get a new link.
    before = [worker.proxy.connections for worker in crowd.workers]
    for worker in crowd.workers:
        worker.proxy.cut()
    await until(lambda: not crowd.sender._sender.peers)
    await crowd.send()
    await until(
        lambda: all(
            worker.proxy.connections > number
            for worker, number in zip(crowd.workers, before, strict=True)
        )
    )
    await crowd.settle()
    for _ in range(updates - 1):
        await crowd.send()
        await crowd.settle()
    for worker in crowd.workers:
        worker.harmed = None


async def length_of_a_round(updates: int) -> tuple[int, int]:
    """Bytes that an unharmed connection carries in each direction, with some to spare."""
    async with crowd(1) as one:
        proxy = one.workers[0].proxy
        await one_round(one, [], updates)
        before = proxy.bytes_forward, proxy.bytes_back
        await one_round(one, [], updates)
        # Versions get longer as they grow: some bytes more.
        return proxy.bytes_forward - before[0] + 8, proxy.bytes_back - before[1] + 24


def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("_handshake", "tcp", "_stream_receiving"):
        monkeypatch.setattr(f"aiosync.schemes.{module}.HANDSHAKE_SECONDS", STALL)


FAULTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "cut": lambda at: {"cut_at": at},
    "reset": lambda at: {"reset_at": at},
    "half-close": lambda at: {"half_close_at": at},
    "corrupt": lambda at: {"corrupt_at": at, "corrupt_mask": 1 << at % 8},
    "duplicate": lambda at: {"duplicate": (at, at + 1)},
}


async def sweep(kind: str, direction: str, step: int) -> dict[str, Any]:
    updates = 2 if kind in ("cut", "corrupt") else 1  # that a harmed link carries
    lengths = await length_of_a_round(updates)
    every = range(0, lengths[0] if direction == "forward" else lengths[1], step)
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
        return {
            "faults": len(every),
            "links": sum(worker.proxy.connections for worker in many.workers),
            "rounds": -(-len(every) // CROWD),
            "damaged": sum(worker.scheme.damaged_chunks for worker in many.workers),
            "outcomes": many.outcomes,
        }


def _sweeps() -> list[Any]:
    """Every kind in both directions.

    By default a link is cut at every byte, every third one that a receiver gets is corrupted, and
    all else happens at every 7th, which puts it into every field; --heavy does it at every byte.
    """
    steps = {("cut", "forward"): 1, ("cut", "back"): 1, ("corrupt", "back"): 3}
    every = [(kind, direction) for kind in FAULTS for direction in ("forward", "back")]
    return [
        *(pytest.param(*each, steps.get(each, 7)) for each in every),
        *(pytest.param(*e, 1, marks=pytest.mark.heavy) for e in every if steps.get(e) != 1),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "direction", "step"), _sweeps())
def test_every_byte(kind: str, direction: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward is what a receiver sends (proof, Hello, acks), back is what it gets."""
    patched(monkeypatch)
    found: dict[str, Any] = {}

    async def main() -> None:
        found.update(await sweep(kind, direction, step))

    # One loop each: both would take twice as long, and the bytes are the same.
    run("uvloop" if (kind in ("cut", "corrupt")) == (direction == "back") else "asyncio", main())
    if (kind, direction) == ("corrupt", "back"):
        # Two updates cross a harmed link, and each byte of them was harmed once. On a busy
        # machine some links end before their fault.
        assert found["damaged"] > 1.2 * NBYTES / step
    elif kind != "duplicate":
        assert found["damaged"] == 0
    if kind != "corrupt":
        # Every fault cost its link, but for those beyond the last byte or that repeat nothing.
        extra = found["links"] - CROWD * (1 + found["rounds"])
        assert extra > found["faults"] * 0.5


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
        assert not one.sender._sender.peers
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
@pytest.mark.asyncio
async def test_a_stall_in_every_phase_of_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch)
    plans = [at * 12 for at in range(CROWD)]
    async with crowd(CROWD) as many:
        await one_round(many, [Plan(forward=Faults(stall_at=at)) for at in plans], 1)
        # Where the link stalls after the handshake the worker hears nothing more: the end of
        # the link stalls, too, until the proxy lets it go.
        loop = asyncio.get_running_loop()
        for worker in many.workers:
            loop.call_later(5 * STALL, worker.proxy.resume)
        await one_round(many, [Plan(back=Faults(stall_at=at)) for at in plans], 1)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_slow_link_is_not_taken_for_a_stalled_one() -> None:
    """A transfer of many times stall_timeout, as long as bytes move."""
    async with crowd(1, build=lambda: Block(300_000), chunk_nbytes=2**20) as one:
        (worker,) = one.workers
        worker.harmed = Plan(back=Faults(rate=300_000 / (5 * STALL)))
        worker.proxy.cut()
        await until(lambda: not one.sender._sender.peers)
        await one.send()
        await one.settle()
        assert worker.scheme.reconnects == 1


@pytest.mark.slow
@pytest.mark.asyncio
async def test_latency_costs_one_round_trip() -> None:
    async with crowd(1) as one:
        (worker,) = one.workers
        worker.harmed = Plan(forward=Faults(delay=0.05), back=Faults(delay=0.05))
        worker.proxy.cut()
        await until(lambda: not one.sender._sender.peers)
        await until(lambda: bool(one.sender._sender.peers))
        took = []
        for _ in range(TRIES):
            report = await one.send()
            assert report.acked == {0}
            assert report.elapsed > 0.095
            took.append(report.elapsed)
            if took[-1] < 0.2:
                break
        assert min(took) < 0.2, took  # there and back once


class Block(nn.Module):
    """One tensor of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.block = nn.Parameter(torch.full((nbytes // 4,), -1.0))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [4e6, 8e6])  # what the proxy itself takes is little beside that
@pytest.mark.asyncio
async def test_a_transfer_takes_as_long_as_its_bytes(rate: float) -> None:
    nbytes = int(rate / 2)
    async with crowd(1, build=lambda: Block(nbytes), chunk_nbytes=2**18, stall_timeout=5.0) as one:
        (worker,) = one.workers
        worker.harmed = Plan(back=Faults(rate=rate))
        worker.proxy.cut()
        await until(lambda: not one.sender._sender.peers)
        await until(lambda: bool(one.sender._sender.peers))
        took = []
        for _ in range(TRIES):
            report = await one.send()
            assert report.acked == {0} and report.nbytes >= nbytes - 64
            took.append(report.elapsed * rate / nbytes)
            assert took[-1] > 0.9
            if took[-1] < 1.1:
                break
        assert min(took) < 1.1, took


SENDER = """
import asyncio, sys, torch, aiosync
async def main():
    scheme = aiosync.TCPWeightSyncScheme(f"tcp://{sys.argv[1]}:5000", token="0123456789abcdef")
    weights = {"block": torch.zeros(int(sys.argv[2]) // 4)}
    scheme.init_on_sender("policy", weights=weights, num_workers=1)
    print("ready", flush=True)
    await scheme.connect()
    for value in range(5):
        weights["block"].fill_(value)
        report = await scheme.send()
        print(report.elapsed, flush=True)
    await scheme.aclose()
asyncio.run(main())
"""
RECEIVER = """
import asyncio, sys, torch, aiosync
async def main():
    scheme = aiosync.TCPWeightSyncScheme(
        f"tcp://{sys.argv[1]}:5000", token="0123456789abcdef", guard="reading"
    )
    weights = {"block": torch.full((int(sys.argv[2]) // 4,), -1.0)}
    scheme.init_on_receiver("policy", worker_idx=0, weights=weights)
    await scheme.connect()
    await scheme.wait_for_version(6)
    print(bool((scheme.weights["block"] == 4.0).all()))
    await scheme.aclose()
asyncio.run(main())
"""


@pytest.mark.slow
def test_over_a_real_slow_link_a_transfer_takes_as_long_as_its_bytes() -> None:
    reason = netns_available()
    if reason is not None:
        pytest.skip(reason)
    rate_bits, nbytes = 100_000_000, 6 * 2**20
    root = str(Path(aiosync.__file__).parents[1])
    with shaped_link(rate_bits) as (a, b, _, address), contextlib.ExitStack() as stack:

        def start(name: str, program: str) -> subprocess.Popen[str]:
            argv = [sys.executable, "-c", program, address, str(nbytes)]
            process = in_netns(name, argv, stdout=subprocess.PIPE, text=True, cwd=root)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        sender, receiver = start(b, SENDER), start(a, RECEIVER)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "ready\n"
        printed = receiver.communicate(timeout=40)[0]
        times = [float(line) for line in sender.communicate(timeout=40)[0].split()]
    assert printed.strip() == "True"
    expected = nbytes / goodput(rate_bits)
    assert min(times) == pytest.approx(expected, rel=0.1)
    assert sorted(times)[1] < 1.2 * expected


@pytest.mark.parametrize("at", [0, 40, 200, 260])
@pytest.mark.asyncio
async def test_connect_goes_on_after_a_link_that_was_lost_in_the_handshake(at: int) -> None:
    model = small()
    fill(model, 1.0)
    sender = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    sender.init_on_sender(model=model)
    async with FaultProxy(sender.address) as proxy:
        proxy.plan = lambda number: Plan(back=Faults(cut_at=at)) if number < 2 else None
        receiver, target = twin(sender), small()
        receiver._addresses = [Address.parse(proxy.url)]
        try:
            receiver.init_on_receiver(model=target)
            await sender.connect()
            await receiver.connect(timeout=PATIENCE)
            assert stamp(target) == 1.0
            assert proxy.connections == 3
        finally:
            await receiver.aclose()
            await sender.aclose()
