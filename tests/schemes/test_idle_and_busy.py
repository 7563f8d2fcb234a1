"""What a receiver costs: nothing while idle, and no long pause of its loop while bytes arrive."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

IDLE_SECONDS = 6.0
MAX_LATE_SECONDS = 0.02


def _wake_ups(pid: int) -> dict[str, int]:
    """Voluntary context switches of every thread of a process."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        switches = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", path.read_text(), re.M)
        found[path.parent.name] = int(switches[1])
    return found


def _join_blocking(state: harness.State) -> Any:
    """Run a blocking receiver in the worker process."""
    state.kept["facade"] = facade = state.scheme
    state.scheme = aiosync.NoWeightSyncScheme()  # closed at the end instead
    facade.init_on_receiver(model=models.linear())
    return asyncio.to_thread(facade.connect)


def _close_blocking(state: harness.State) -> Any:
    return asyncio.to_thread(state.kept["facade"].shutdown)


@pytest.mark.slow
def test_idle_receivers_never_wake_up() -> None:
    """Both schemes on both loops, and the facade of both, at the same time."""
    harness.run("asyncio", _count_wake_ups())


async def _count_wake_ups() -> None:
    crew: dict[str, harness.Worker] = {}
    loops = ["asyncio", "uvloop"]
    schemes = [(make(), loop) for make in harness.SCHEMES for loop in loops]
    facades = [getattr(aiosync.sync, make.__name__)() for make in harness.SCHEMES]
    try:
        for scheme, loop in schemes:
            scheme.init_on_sender(model=models.linear(), num_workers=1)
            worker = harness.start(scheme, models.linear, loop=loop)
            crew[f"{type(scheme).__name__} on {loop}"] = worker
            worker.post(harness.join)
            await scheme.connect()
            await worker.answer()
            await scheme.send()
        for facade in facades:
            facade.init_on_sender(model=models.linear(), num_workers=1)
            worker = crew[f"sync.{type(facade).__name__}"] = harness.start(facade)
            worker.post(_join_blocking)
            await asyncio.to_thread(facade.connect)
            await worker.answer()
            await asyncio.to_thread(facade.send)
        await asyncio.sleep(0.5)  # the last acknowledgements and releases
        before = {name: _wake_ups(worker.pid) for name, worker in crew.items()}
        await asyncio.sleep(IDLE_SECONDS)
        for name, worker in crew.items():
            after = _wake_ups(worker.pid)
            assert after.keys() == before[name].keys(), name
            woken = {thread: after[thread] - count for thread, count in before[name].items()}
            assert sum(woken.values()) <= 2, f"{name}: {woken}"
    finally:
        for scheme, _ in schemes:
            await scheme.aclose()
        for facade in facades:
            await asyncio.to_thread(facade.shutdown)
        for name, worker in crew.items():
            if name.startswith("sync."):
                await worker.call(_close_blocking)
            worker.end()


def _huge() -> torch.nn.Module:
    """256 MiB, in tensors of several sizes."""
    sizes = [2**22] * 15 + [2**14] * 256
    return torch.nn.ParameterList(torch.zeros(size) for size in sizes).requires_grad_(False)


async def _tick(state, until: int) -> tuple[float, int]:
    """The longest that a 1 ms ticker of the worker's loop is late, in seconds, and its ticks."""
    worst, ticks = 0.0, 0
    while state.scheme.version < until:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - due)
        ticks += 1
    return worst, ticks


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_the_loop_goes_on_while_a_big_model_arrives(make) -> None:
    source, scheme = _huge(), make()
    scheme.init_on_sender(model=source, num_workers=1)
    async with harness.workers(scheme, _huge, 1) as crew:
        found = []
        while min(found, default=(1.0, 0))[0] > MAX_LATE_SECONDS:
            assert len(found) < 4, found  # a busy machine may spoil some of them
            crew[0].post(_tick, scheme.version + 1)
            await scheme.send()
            found.append(await crew[0].answer())
