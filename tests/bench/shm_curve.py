"""Time of a send through shared memory, for 1 to 32 workers that are idle or compute.

``python -m tests.bench.shm_curve`` sends one linear layer of 4x2, with a pause of a millisecond
between two sends, by the async API on uvloop and by the facade. The times are microseconds, and
TorchRL is not measured.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from typing import Any

import torch
import uvloop

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

_SECONDS = 3.0
_PAUSE = 0.001


def compute(state: harness.State) -> None:
    """Let a worker compute all the time from now on."""

    def run() -> None:
        inputs = torch.zeros(1, 4)
        with torch.no_grad():
            while True:
                state.model(inputs)

    threading.Thread(target=run, daemon=True).start()


def show(label: str, seconds: list[float]) -> None:
    """Print one line, without the first fifth, which warms up."""
    cuts = statistics.quantiles(seconds[len(seconds) // 5 :], n=10)
    p10, p50, p90 = (round(cuts[k] * 1e6) for k in (0, 4, 8))
    print(f"{label:>18}: p10 {p10:4d}  p50 {p50:4d}  p90 {p90:4d} us", flush=True)


async def by_async(num_workers: int, *, busy: bool) -> None:
    """Measure the async API."""
    scheme, model, seconds = aiosync.SharedMemWeightSyncScheme(), models.linear(), []
    scheme.init_on_sender(model=model, num_workers=num_workers)
    async with harness.workers(scheme, models.linear, num_workers) as crew:
        for worker in crew if busy else ():
            await worker.call(compute)
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            models.fill(model, float(len(seconds)))
            started = time.perf_counter()
            report = await scheme.send()
            seconds.append(time.perf_counter() - started)
            assert len(report.acked) == num_workers
            await asyncio.sleep(_PAUSE)
    show(f"{num_workers} {'busy' if busy else 'idle'}", seconds)


def by_facade(num_workers: int) -> None:
    """Measure the blocking API, with idle workers that asyncio drives."""
    scheme, model, seconds = aiosync.sync.SharedMemWeightSyncScheme(), models.linear(), []
    scheme.init_on_sender(model=model, num_workers=num_workers)
    context = torch.multiprocessing.get_context("spawn")
    over = context.Event()
    arguments = [(scheme, idx, over) for idx in range(num_workers)]
    processes = [context.Process(target=follow, args=each) for each in arguments]
    for process in processes:
        process.start()
    with scheme:
        scheme.connect(timeout=harness.PATIENCE * 3)
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            models.fill(model, float(len(seconds)))
            started = time.perf_counter()
            scheme.send()
            seconds.append(time.perf_counter() - started)
            time.sleep(_PAUSE)
        over.set()
        for process in processes:
            process.join()
    show(f"{num_workers} idle, facade", seconds)


def follow(scheme: Any, worker_idx: int, over: Any) -> None:
    """Run a worker of :func:`by_facade`."""
    scheme.init_on_receiver(model=models.linear(), worker_idx=worker_idx)
    with scheme:
        scheme.connect()
        over.wait()


def main() -> None:
    """Measure all cases."""
    for busy in (False, True):
        for num_workers in (1, 2, 4, 8, 16, 32):
            uvloop.run(by_async(num_workers, busy=busy))
    for num_workers in (1, 8):
        by_facade(num_workers)


if __name__ == "__main__":
    main()
