"""Send round trips over shared memory, aiosync beside TorchRL, in one run on one machine.

Run it with ``python -m tests.bench.shm_vs_torchrl`` where ``torchrl==0.14.1`` is installed; it
is not collected by pytest. ``--json FILE`` writes the figures.

Equal terms: real worker processes (spawn), applied acknowledgements on both sides, weights that
differ at every send and are checked in the workers after every block, one torch thread
everywhere, blocks of the two libraries interleaved, medians. TorchRL's trainer gets memory of
its own: otherwise workers would see optimizer steps that nobody sent. The third figure is a limit
of the machine: only copying the same tensors, just as freshly written, into memory that this has
written before. Not measured here: workers that compute meanwhile, other transports, peak memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

import aiosync

BLOCKS = 5


class Many(nn.Module):
    """``count`` parameters of ``numel`` float32 elements each."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(numel)))


MODELS = {
    "linear 4x2": (lambda: nn.Linear(4, 2), 300),
    "1,000 x 4 KiB": (lambda: Many(1000, 1024), 30),
    "64 MiB": (lambda: Many(16, 2**20), 20),
    "512 MiB": (lambda: Many(16, 8 * 2**20), 6),
}


@dataclass
class Figures:
    """Seconds of each send, per library."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, library: str, seconds: list[float]) -> None:
        self.seconds.setdefault(library, []).extend(seconds)

    def median(self, library: str) -> float:
        return statistics.median(self.seconds[library])


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        torch._foreach_fill_(list(model.parameters()), value) if hasattr(
            torch, "_foreach_fill_"
        ) else [p.fill_(value) for p in model.parameters()]


class OnlyCopy:
    """What no send can be faster than: the bytes of every tensor, copied to one place."""

    def __init__(self, model: nn.Module) -> None:
        self.sources = [memoryview(p.detach().numpy()).cast("B") for p in model.parameters()]
        self.target = memoryview(bytearray(sum(source.nbytes for source in self.sources)))
        ends = list(itertools.accumulate(source.nbytes for source in self.sources))
        self.places = [
            slice(end - source.nbytes, end) for end, source in zip(ends, self.sources, strict=True)
        ]
        self()

    def __call__(self) -> None:
        deque(map(self.target.__setitem__, self.places, self.sources), maxlen=0)


def value_of(model: nn.Module) -> float:
    tensors = [p.detach().flatten() for p in model.parameters()]
    values = {float(tensor[index]) for tensor in tensors for index in (0, -1)}
    if len(values) != 1:
        raise AssertionError(f"the worker has a mix of versions: {sorted(values)[:4]}")
    return values.pop()


def aiosync_worker(scheme: Any, idx: int, name: str, pipe: Any) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        import asyncio

        model = MODELS[name][0]()
        async with scheme:
            scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
            await scheme.connect()
            loop = asyncio.get_running_loop()
            asked = asyncio.Event()
            loop.add_reader(pipe.fileno(), asked.set)
            while True:
                await asked.wait()
                asked.clear()
                if pipe.recv() is None:
                    return
                pipe.send(value_of(model))

    aiosync.run(main())


def torchrl_worker(scheme: Any, idx: int, name: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    model = MODELS[name][0]()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    scheme.connect(worker_idx=idx)
    while pipe.recv() is not None:
        pipe.send(value_of(model))


def ask(pipes: list[Any], value: float) -> None:
    for pipe in pipes:
        pipe.send("value")
    for pipe in pipes:
        if not pipe.poll(60):
            raise TimeoutError("a worker did not answer")
        got = pipe.recv()
        if got != value:
            raise AssertionError(f"the worker has {got}, the trainer sent {value}")


def start(target: Any, scheme: Any, name: str, workers: int) -> tuple[list[Any], list[Any]]:
    ctx = mp.get_context("spawn")
    processes, pipes = [], []
    for idx in range(workers):
        ours, theirs = ctx.Pipe()
        process = ctx.Process(target=target, args=(scheme, idx, name, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


async def measure(name: str, workers: int) -> Figures:
    """One model and number of workers, both libraries, blocks in turn."""
    from torchrl.weight_update import SharedMemWeightSyncScheme as TheirScheme

    make, count = MODELS[name]
    model = make()
    figures = Figures()
    version = 1.0
    fill(model, version)

    ours = aiosync.SharedMemWeightSyncScheme()
    ours.init_on_sender(model_id="policy", model=model, num_workers=workers)
    our_processes, our_pipes = start(aiosync_worker, ours, name, workers)
    await ours.connect(processes=our_processes)

    theirs = TheirScheme()
    weights = TensorDict.from_module(model).data
    theirs.init_on_sender(params_map=dict.fromkeys(range(workers), weights.clone().share_memory_()))
    theirs.model_id = "policy"
    their_processes, their_pipes = start(torchrl_worker, theirs, name, workers)
    theirs.connect()

    only_copy = OnlyCopy(model)
    for block in range(BLOCKS + 1):  # the first block warms up and does not count
        seconds = []
        for _ in range(count):
            version += 1.0
            fill(model, version)
            begun = time.perf_counter()
            await ours.send()
            seconds.append(time.perf_counter() - begun)
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
        seconds = []
        for _ in range(count):
            fill(model, version)
            begun = time.perf_counter()
            only_copy()
            seconds.append(time.perf_counter() - begun)
        if block:
            figures.add("copy", seconds)
    for pipe in [*our_pipes, *their_pipes]:
        pipe.send(None)
    await ours.aclose()
    for process in [*our_processes, *their_processes]:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS)[:2], choices=list(MODELS))
    parser.add_argument("--workers", nargs="*", type=int, default=[1])
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}")
    rows = []
    for name in options.models:
        for workers in options.workers:
            figures = aiosync.run(measure(name, workers))
            ours, theirs = figures.median("aiosync"), figures.median("torchrl")
            rows.append(
                {
                    "model": name,
                    "workers": workers,
                    "seconds": figures.seconds,
                    "ratio": theirs / ours,
                }
            )
            print(
                f"{name:>14}, {workers} workers: aiosync {ours * 1e3:8.3f} ms, "
                f"TorchRL {theirs * 1e3:8.3f} ms, ratio {theirs / ours:6.1f}; "
                f"only the copy {figures.median('copy') * 1e3:8.3f} ms",
                flush=True,
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
