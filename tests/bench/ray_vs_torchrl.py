"""Weights from one driver to Ray actors: aiosync against TorchRL's RayWeightSyncScheme.

Both run in one process and on one cluster, in blocks that take turns; every update is checked in
the actors. Both are timed from the call of ``send()`` to its return, when every actor has applied
the update. Not measured: other hosts, GPUs, actors that compute meanwhile.

    python -m tests.bench.ray_vs_torchrl --models "1,000 x 4 KiB" "512 MiB" --workers 1 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from tensordict import TensorDict

import aiosync
from aiosync.schemes.ray import RayWeightSyncScheme
from tests.bench.shm_vs_torchrl import Many, value_of

BLOCKS = 3
MODELS = {
    "linear 4x2": (lambda: torch.nn.Linear(4, 2), 50),
    "1,000 x 4 KiB": (lambda: Many(1000, 1024), 10),
    "64 MiB": (lambda: Many(16, 2**20), 6),
    "512 MiB": (lambda: Many(16, 8 * 2**20), 4),
}


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


@ray.remote(num_cpus=0)
class Ours:
    async def join(self, scheme: RayWeightSyncScheme, idx: int, name: str) -> None:
        torch.set_num_threads(1)
        self.model = MODELS[name][0]()
        self.scheme = scheme
        scheme.init_on_receiver(model_id="policy", model=self.model, worker_idx=idx)
        await scheme.connect()

    async def value(self) -> float:
        return value_of(self.model)


class Holder:
    """What TorchRL's scheme looks for in a collector."""

    def __init__(self, model: torch.nn.Module, idx: int) -> None:
        self.policy = model
        self.worker_idx = idx

    def update_policy_weights_(self, **kwargs: Any) -> None:
        return None


@ray.remote(num_cpus=0)
class Theirs:
    def __init__(self, idx: int, name: str) -> None:
        torch.set_num_threads(1)
        self.holder = Holder(MODELS[name][0](), idx)
        self.idx = idx

    def take(self, scheme: Any) -> None:
        self.scheme = scheme
        scheme.init_on_receiver(model_id="policy", context=self.holder, worker_idx=self.idx)

    def join(self) -> None:
        self.scheme.connect(worker_idx=self.idx)

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> None:
        self.join()

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        self.scheme.receive()

    def value(self) -> float:
        return value_of(self.holder.policy)


def check(actors: list[Any], value: float) -> None:
    for got in ray.get([actor.value.remote() for actor in actors]):
        if got != value:
            raise AssertionError(f"an actor has {got}, the trainer sent {value}")


async def late_by(stop: asyncio.Event) -> float:
    """The most that a ticker of 5 ms was late, in seconds."""
    worst = 0.0
    while not stop.is_set():
        begun = time.perf_counter()
        await asyncio.sleep(0.005)
        worst = max(worst, time.perf_counter() - begun - 0.005)
    return worst


async def measure(name: str, workers: int, inline_nbytes: int | None, ours_only: bool) -> Any:
    make, count = MODELS[name]
    model = make()
    version = 1.0
    fill(model, version)
    options = {} if inline_nbytes is None else {"inline_nbytes": inline_nbytes}
    ours = RayWeightSyncScheme(**options)
    ours.init_on_sender(model_id="policy", model=model, num_workers=workers)
    our_actors = [Ours.remote() for _ in range(workers)]
    joining = [actor.join.remote(ours, idx, name) for idx, actor in enumerate(our_actors)]
    await ours.connect()
    await asyncio.gather(*joining)

    theirs, weights, their_actors = None, None, []
    if not ours_only:
        from torchrl.weight_update import RayWeightSyncScheme as TheirScheme

        their_actors = [Theirs.remote(idx, name) for idx in range(workers)]
        theirs = TheirScheme()
        theirs.init_on_sender(model_id="policy", remote_collectors=their_actors, model=model)
        weights = TensorDict.from_module(model).data
        ray.get([actor.take.remote(theirs) for actor in their_actors])
        their_joining = [actor.join.remote() for actor in their_actors]
        await asyncio.to_thread(theirs.connect)
        ray.get(their_joining)

    seconds: dict[str, list[float]] = {"aiosync": [], "torchrl": []}
    lag = 0.0
    for block in range(BLOCKS + 1):  # the first one warms up and does not count
        for _ in range(count):
            version += 1.0
            fill(model, version)
            stop = asyncio.Event()
            ticking = asyncio.ensure_future(late_by(stop))
            await asyncio.sleep(0)
            begun = time.perf_counter()
            await ours.send()
            took = time.perf_counter() - begun
            stop.set()
            late = await ticking
            if block:
                seconds["aiosync"].append(took)
                lag = max(lag, late)
        check(our_actors, version)
        for _ in range(0 if theirs is None else count):
            version += 1.0
            fill(model, version)
            begun = time.perf_counter()
            theirs.send(weights)
            if block:
                seconds["torchrl"].append(time.perf_counter() - begun)
        check(their_actors, version)
    await ours.aclose()
    for actor in [*our_actors, *their_actors]:
        ray.kill(actor)
    return seconds, lag


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["1,000 x 4 KiB"], choices=list(MODELS))
    parser.add_argument("--workers", nargs="*", type=int, default=[1])
    parser.add_argument("--inline-nbytes", type=int)
    parser.add_argument("--only-aiosync", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = str(Path(__file__).parents[2])
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        configure_logging=False,
        object_store_memory=3 * 2**30,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}")
    rows = []
    for name in options.models:
        for workers in options.workers:
            seconds, lag = aiosync.run(
                measure(name, workers, options.inline_nbytes, options.only_aiosync)
            )
            row: dict[str, Any] = {"model": name, "workers": workers, "seconds": seconds}
            row["lag"] = lag
            ours = statistics.median(seconds["aiosync"])
            line = f"{name:>14}, {workers} workers: aiosync {ours * 1e3:8.2f} ms"
            if seconds["torchrl"]:
                theirs = statistics.median(seconds["torchrl"])
                row["ratio"] = theirs / ours
                line += f", TorchRL {theirs * 1e3:8.2f} ms, ratio {theirs / ours:6.1f}"
            print(f"{line}; ticker late by {lag * 1e3:.1f} ms at most", flush=True)
            rows.append(row)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
