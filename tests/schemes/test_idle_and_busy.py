"""What a receiver costs: nothing while idle, and no long pause of its loop while bytes arrive."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

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
        text = path.read_text()
        for line in text.splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                found[path.parent.name] = int(line.split()[1])
    return found


def _blocking_worker(conn, scheme) -> None:
    with scheme:
        scheme.init_on_receiver(model=models.linear())
        scheme.connect()
        conn.send("ready")
        conn.recv()


@pytest.mark.slow
def test_idle_receivers_never_wake_up() -> None:
    """Both schemes on both loops, and the facade of both, at the same time."""
    harness.run("asyncio", _count_wake_ups())


async def _count_wake_ups() -> None:
    crew, processes, pids = [], [], {}
    loops = ["asyncio", "uvloop"]
    schemes = [(make(), loop) for make in harness.SCHEMES for loop in loops]
    facades = [
        aiosync.sync.SharedMemWeightSyncScheme(),
        aiosync.sync.MultiProcessWeightSyncScheme(),
    ]
    try:
        for scheme, loop in schemes:
            scheme.init_on_sender(model=models.linear(), num_workers=1)
            worker = harness.start(scheme, models.linear, loop=loop)
            crew.append(worker)
            worker.post(harness.join)
            await scheme.connect()
            await worker.answer()
            await scheme.send()
            pids[f"{type(scheme).__name__} on {loop}"] = worker.pid
        for facade in facades:
            facade.init_on_sender(model=models.linear(), num_workers=1)
            ctx = harness.context("forkserver")
            mine, theirs = ctx.Pipe()
            process = ctx.Process(target=_blocking_worker, args=(theirs, facade), daemon=True)
            process.start()
            theirs.close()
            processes.append((process, mine))
            await asyncio.to_thread(facade.connect)
            assert await asyncio.to_thread(mine.recv) == "ready"
            await asyncio.to_thread(facade.send)
            pids[f"sync.{type(facade).__name__}"] = process.pid
        await asyncio.sleep(0.5)  # the last acknowledgements and releases
        before = {name: _wake_ups(pid) for name, pid in pids.items()}
        await asyncio.sleep(IDLE_SECONDS)
        for name, pid in pids.items():
            after = _wake_ups(pid)
            assert after.keys() == before[name].keys(), name
            woken = {thread: after[thread] - count for thread, count in before[name].items()}
            assert sum(woken.values()) <= 2, f"{name}: {woken}"
    finally:
        for scheme, _ in schemes:
            await scheme.aclose()
        for facade in facades:
            await asyncio.to_thread(facade.shutdown)
        for worker in crew:
            worker.end()
        for process, conn in processes:
            conn.close()
            process.join(harness.PATIENCE)
            process.kill()
            process.join()
            process.close()


def _huge() -> torch.nn.Module:
    """256 MiB, in tensors of several sizes."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.zeros(2**22), requires_grad=False) for _ in range(15)]
        + [torch.nn.Parameter(torch.zeros(2**14), requires_grad=False) for _ in range(256)]
    )
    return model


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
        for _ in range(4):  # a busy machine may spoil some of them
            crew[0].post(_tick, scheme.version + 1)
            await scheme.send()
            found.append(await crew[0].answer())
            if min(worst for worst, _ in found) < MAX_LATE_SECONDS:
                break
        assert min(worst for worst, _ in found) < MAX_LATE_SECONDS, found
