"""Delay of tickers on the loops of trainer and workers while a large update is awaited.

The engines are torch.distributed, RPC and Ray, each with workers on the trainer's host as they
come, and as if they were on other hosts. The trainer's ticker sleeps 5 ms, those of the workers 2
ms. The weights change before each send, while nothing ticks.

A virtual machine that its host stops for a while makes every ticker late. If the program may use
the scheduler's real-time policy, a control process finds those pauses: it sleeps a millisecond at a
time and needs no loop, no GIL and no turn. ``late_ms_most`` counts the pauses, ``own_ms_most`` does
not.

    python -m tests.bench.engine_loop --workload 512MiB --workers 1 --sends 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from aiosync.bench import WORKLOADS, AsyncTrainer, Case, ask_all, fill
from tests.bench.compare import aiosync_ray, aiosync_rpc
from tests.bench.compare.figures import start_ticking, stop_ticking
from tests.bench.compare.lag import Tick, Ticker
from tests.bench.contenders import NetworkTrainer

ENGINES = {
    "gloo": partial(AsyncTrainer, "gloo"),
    "gloo/network": NetworkTrainer,
    "rpc": aiosync_rpc.rpc,
    "rpc/network": aiosync_rpc.rpc_network,
    "ray": aiosync_ray.ray,
    "ray/network": aiosync_ray.ray_network,
}
TICK_SECONDS = 0.005
PAUSE_SECONDS = 0.003

Pause = tuple[float, float]
"""Start and end of a pause."""


def control(pipe: Connection) -> None:
    """Find the machine's pauses, and report them when asked."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except PermissionError:
        # Without the policy this would find the processes that had the cores before it.
        pipe.send(False)
        return
    pipe.send(True)
    pauses: list[Pause] = []
    last = time.perf_counter()
    while not pipe.poll():
        time.sleep(0.001)
        now = time.perf_counter()
        if now - last > PAUSE_SECONDS:
            pauses.append((last, now))
        last = now
    pipe.send(pauses)


def own(tick: Tick, interval: float, pauses: Sequence[Pause]) -> float:
    """Return by how many seconds a tick was late while the machine ran."""
    end = tick.began + interval + tick.late
    paused = sum(max(0.0, min(end, to) - max(tick.began, since)) for since, to in pauses)
    return max(0.0, tick.late - paused)


def figures(ticks: Sequence[Tick], interval: float, pauses: Sequence[Pause]) -> dict[str, Any]:
    late = [tick.late * 1e3 for tick in ticks] or [0.0]
    return {
        "ticks": len(ticks),
        "late_ms_median": round(statistics.median(late), 2),
        "late_ms_most": round(max(late), 2),
        "own_ms_most": round(
            max((own(tick, interval, pauses) * 1e3 for tick in ticks), default=0), 2
        ),
    }


async def measure(engine: str, case: Case, sends: int, pipe: Connection) -> dict[str, Any]:
    controlled = pipe.recv()
    trainer = ENGINES[engine]()
    ticks: list[Tick] = []
    theirs: list[Tick] = []
    seconds = []
    try:
        handles = await trainer.open(case)
        for number in range(sends):
            fill(trainer.model, float(number))
            await asyncio.to_thread(ask_all, handles, "call", start_ticking)
            ticker = Ticker(TICK_SECONDS)
            ticker.start()
            await asyncio.sleep(0)
            began = time.perf_counter()
            await trainer.send()
            seconds.append((time.perf_counter() - began) * 1e3)
            ticks += ticker.stop()
            for each in await asyncio.to_thread(ask_all, handles, "call", stop_ticking):
                theirs += each
    finally:
        await trainer.close()
    pauses: list[Pause] = []
    if controlled:
        pipe.send(None)
        pauses = pipe.recv()
    return {
        "engine": engine,
        "send_ms": round(statistics.median(seconds), 1),
        "slowest_send_ms": round(max(seconds), 1),
        "trainer": figures(ticks, TICK_SECONDS, pauses),
        "workers": figures(theirs, Ticker.INTERVAL, pauses),
        "pauses": len(pauses) if controlled else None,
        "longest_pause_ms": round(max((b - a for a, b in pauses), default=0) * 1e3, 1),
    }


def one(engine: str, case: Case, sends: int, pipe: Connection) -> None:
    print(json.dumps(uvloop.run(measure(engine, case, sends, pipe))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--workload", choices=WORKLOADS, default="512MiB")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sends", type=int, default=8)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for engine in args.engine or ENGINES:
        case = Case(engine.partition("/")[0], args.workload, args.workers)
        ours, theirs = context.Pipe()
        watch = context.Process(target=control, args=(theirs,), daemon=True)
        watch.start()
        # Each engine has a process of its own, as references of RPC, and a process group, belong to
        # a process for good.
        run = context.Process(target=one, args=(engine, case, args.sends, ours))
        run.start()
        run.join()
        watch.kill()
        watch.join()
        if run.exitcode:
            raise SystemExit(f"{engine}: exit status {run.exitcode}")


if __name__ == "__main__":
    main()
