"""Sends over Gloo, aiosync beside TorchRL, in one run on one machine.

Run it with ``python -m tests.bench.distributed_vs_torchrl`` where ``torchrl==0.14.1`` is
installed; it is not collected by pytest. ``--json FILE`` writes the figures.

Equal terms: as in ``shm_vs_torchrl``. Each library has worker processes of its own; TorchRL's
scheme takes the default process group, aiosync's groups of its own. The last figure is how late a
ticker of 5 ms on the trainer's loop came at worst while aiosync sent. Not measured here: several
hosts, NCCL, workers that compute, peak memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import sys
import time
import warnings
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

import aiosync
from tests.bench.shm_vs_torchrl import (
    BLOCKS,
    MODELS,
    Figures,
    aiosync_worker,
    ask,
    fill,
    start,
    value_of,
)

COUNTS = {"linear 4x2": 100, "1,000 x 4 KiB": 20, "64 MiB": 8, "512 MiB": 4}


class Context:
    """What TorchRL's scheme looks at in a collector."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def get_model(self, model_id: str) -> nn.Module:
        return self.policy


def torchrl_worker(scheme: Any, idx: int, name: str, pipe: Any) -> None:
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    context = Context(MODELS[name][0]())
    scheme.init_on_receiver(model_id="policy", context=context, worker_idx=idx + 1)
    scheme.connect(worker_idx=idx + 1)
    while pipe.recv() is not None:
        pipe.send(value_of(context.policy))
    os._exit(0)  # its receiver thread waits in a store for up to an hour


async def ticker(late: list[float]) -> None:
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(0.005)
        late.append(time.perf_counter() - begun - 0.005)


async def measure(name: str, workers: int) -> tuple[Figures, float]:
    """One model and number of workers, both libraries, blocks in turn."""
    from torchrl.weight_update import DistributedWeightSyncScheme as TheirScheme

    make, count = MODELS[name][0], COUNTS[name]
    model = make()
    figures = Figures()
    version = 1.0
    fill(model, version)

    ours = aiosync.DistributedWeightSyncScheme(reconnect=0.0)
    ours.init_on_sender(model_id="policy", model=model, num_workers=workers)
    our_processes, our_pipes = start(aiosync_worker, ours, name, workers)
    await ours.connect(processes=our_processes)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    theirs = TheirScheme()
    context = Context(model)
    theirs.init_on_sender(model_id="policy", context=context, num_workers=workers)
    their_processes, their_pipes = start(torchrl_worker, theirs, name, workers)
    theirs.connect()
    weights = TensorDict.from_module(model).data

    late: list[float] = []
    for block in range(BLOCKS + 1):  # the first block warms up and does not count
        seconds = []
        for _ in range(count):
            version += 1.0
            fill(model, version)
            ticking = asyncio.ensure_future(ticker(late)) if block else None
            await asyncio.sleep(0)
            begun = time.perf_counter()
            await ours.send()
            seconds.append(time.perf_counter() - begun)
            if ticking is not None:
                ticking.cancel()
        ask(our_pipes, version)
        if block:
            figures.add("aiosync", seconds)
        seconds = []
        for _ in range(count):
            version += 1.0
            fill(model, version)
            begun = time.perf_counter()
            theirs.send(weights)
            seconds.append(time.perf_counter() - begun)
        ask(their_pipes, version)
        if block:
            figures.add("torchrl", seconds)
    for pipe in [*our_pipes, *their_pipes]:
        pipe.send(None)
    await ours.aclose()
    for process in [*our_processes, *their_processes]:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    torch.distributed.destroy_process_group()
    return figures, max(late, default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS)[:2], choices=list(MODELS))
    parser.add_argument("--workers", nargs="*", type=int, default=[1])
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}")
    rows = []
    for name in options.models:
        for workers in options.workers:
            figures, late = aiosync.run(measure(name, workers))
            ours, theirs = figures.median("aiosync"), figures.median("torchrl")
            row = {"model": name, "workers": workers, "seconds": figures.seconds}
            rows.append({**row, "ratio": theirs / ours, "late": late})
            print(
                f"{name:>14}, {workers} workers: aiosync {ours * 1e3:8.3f} ms, "
                f"TorchRL {theirs * 1e3:8.3f} ms, ratio {theirs / ours:6.1f}; "
                f"a 5 ms ticker was {late * 1e3:.1f} ms late at worst",
                flush=True,
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
