"""How late a 5 ms ticker of the trainer's loop comes while a large update is awaited.

For torch.distributed, RPC and Ray, each with workers on the trainer's host as they come, and as if
they were on other hosts. The weights change before each send, while nothing ticks. Not measured:
the loops of the workers.

    python -m tests.bench.engine_loop --workload 512MiB --workers 1 --sends 8
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import time
from typing import Any

import uvloop

from aiosync.bench import _aiosync_local, _aiosync_ray, _aiosync_rpc
from aiosync.bench._results import Case
from aiosync.bench._workloads import WORKLOADS, fill

ENGINES = {
    "gloo": _aiosync_local.gloo,
    "gloo/network": _aiosync_local.gloo_network,
    "rpc": _aiosync_rpc.rpc,
    "rpc/network": _aiosync_rpc.rpc_network,
    "ray": _aiosync_ray.ray,
    "ray/network": _aiosync_ray.ray_network,
}
TICK_SECONDS = 0.005


async def tick(late: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        late.append((time.perf_counter() - began - TICK_SECONDS) * 1e3)


async def measure(engine: str, case: Case, sends: int) -> dict[str, Any]:
    trainer = ENGINES[engine]()
    late: list[float] = []
    seconds = []
    try:
        await trainer.open(case)
        for number in range(sends):
            fill(trainer.model, float(number))
            ticking = asyncio.ensure_future(tick(late))
            await asyncio.sleep(0)
            began = time.perf_counter()
            await trainer.send()
            seconds.append((time.perf_counter() - began) * 1e3)
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
    finally:
        await trainer.close()
    return {
        "engine": engine,
        "send_ms": round(statistics.median(seconds), 1),
        "slowest_send_ms": round(max(seconds), 1),
        "ticks": len(late),
        "late_ms_median": round(statistics.median(late), 2),
        "late_ms_most": round(max(late), 2),
    }


def one(engine: str, case: Case, sends: int) -> None:
    print(json.dumps(uvloop.run(measure(engine, case, sends))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--workload", choices=WORKLOADS, default="512MiB")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sends", type=int, default=8)
    args = parser.parse_args()
    for engine in args.engine or ENGINES:
        case = Case(engine.partition("/")[0], args.workload, args.workers)
        # References of RPC, and a process group, belong to the process for good.
        run = multiprocessing.get_context("spawn").Process(
            target=one, args=(engine, case, args.sends)
        )
        run.start()
        run.join()
        if run.exitcode:
            raise SystemExit(f"{engine}: exit status {run.exitcode}")


if __name__ == "__main__":
    main()
