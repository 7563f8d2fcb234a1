"""Comparison of an older commit with this checkout, by public names alone, in turns.

``python -m tests.bench.against ec10b18`` takes the package of that commit out of git, and runs
every case with the one package and with the other, five times each. It prints the medians of their
medians and the ratio. The times are seconds from a call to what it waits for, with one worker
process that computes little.

    python -m tests.bench.against ec10b18 --turns 5 --only tcp
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aiosync
import aiosync.sync

PATIENCE = 120.0
SECONDS = 1.0
PAUSE = 0.005
"""Seconds between two reads of a worker."""


class Tensors(nn.Module):
    """Model with ``count`` parameters of ``numel`` elements each."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(numel)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "4x2": lambda: nn.Linear(4, 2),
    "1000x4KiB": lambda: Tensors(1000, 1024),
    "1000 layers": lambda: nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(1000)]),
    "64 MiB": lambda: Tensors(16, 2**20),
    "512 MiB": lambda: Tensors(16, 2**23),
}
SCHEMES: dict[str, Callable[[Any], Any]] = {
    "shm": lambda of: of.SharedMemWeightSyncScheme(),
    "pipe": lambda of: of.MultiProcessWeightSyncScheme(),
    "tcp": lambda of: of.TCPWeightSyncScheme("tcp://127.0.0.1:0"),
    "gloo": lambda of: of.DistributedWeightSyncScheme(shared_memory=False),
    "gloo, one host": lambda of: of.DistributedWeightSyncScheme(),
}
SENDS = [
    (transport, api, model)
    for transport in ("shm", "pipe", "tcp")
    for api in ("async", "facade")
    for model in MODELS
    if api == "async" or model in ("4x2", "1000x4KiB")
]
SENDS += [
    (transport, "async", model)
    for transport in ("gloo", "gloo, one host")
    for model in ("4x2", "64 MiB")
]
CASES = [", ".join(each) for each in SENDS]
CASES += ["forward, guarded", "connect, 4 workers"]


def fill(model: nn.Module, value: float) -> None:
    """Set all parameters, like an optimizer's step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


# -- workers -------------------------------------------------------------------------------------


def follow(scheme: Any, api: str, model: str, worker_idx: int, over: Any) -> None:
    """Receive until ``over`` is set, and read now and then."""
    torch.set_num_threads(1)
    if api == "async":
        aiosync.run(follow_async(scheme, model, worker_idx, over))
        return
    with scheme:
        scheme.init_on_receiver(model_id="policy", model=MODELS[model](), worker_idx=worker_idx)
        scheme.connect()
        while not over.wait(PAUSE):
            with scheme.reading():
                pass


async def follow_async(scheme: Any, model: str, worker_idx: int, over: Any) -> None:
    """Receive until ``over`` is set, and read now and then, on the loop of this thread."""
    async with scheme:
        scheme.init_on_receiver(model_id="policy", model=MODELS[model](), worker_idx=worker_idx)
        await scheme.connect()
        while not over.is_set():
            with scheme.reading():
                pass
            await asyncio.sleep(PAUSE)


def hire(scheme: Any, api: str, model: str, num_workers: int) -> tuple[Any, list[Any]]:
    """Start the workers; return the event that ends them, and their processes."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    processes = [
        context.Process(target=follow, args=(scheme, api, model, idx, over), daemon=True)
        for idx in range(num_workers)
    ]
    for process in processes:
        process.start()
    return over, processes


# -- cases ---------------------------------------------------------------------------------------


def is_over(seconds: list[float], started: float) -> bool:
    """Return True if there are enough sends, of which the first fifth warms up."""
    return len(seconds) >= 5 and time.monotonic() - started > SECONDS * (
        3 if seconds[-1] > 0.1 else 1
    )


async def send_async(transport: str, name: str) -> list[float]:
    """Return the seconds that each ``await send()`` took."""
    model, scheme, seconds = MODELS[name](), SCHEMES[transport](aiosync), []
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    async with scheme:
        over, (process,) = hire(scheme, "async", name, 1)
        await scheme.connect(processes=[process], timeout=PATIENCE)
        begun = time.monotonic()
        while not is_over(seconds, begun):
            fill(model, float(len(seconds)))
            started = time.perf_counter()
            await scheme.send()
            seconds.append(time.perf_counter() - started)
        over.set()
        await asyncio.to_thread(process.join, PATIENCE)
    return seconds


def send_facade(transport: str, name: str) -> list[float]:
    """Return the seconds that each blocking ``send()`` took."""
    model, scheme, seconds = MODELS[name](), SCHEMES[transport](aiosync.sync), []
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    with scheme:
        over, (process,) = hire(scheme, "facade", name, 1)
        scheme.connect(processes=[process], timeout=PATIENCE)
        begun = time.monotonic()
        while not is_over(seconds, begun):
            fill(model, float(len(seconds)))
            started = time.perf_counter()
            scheme.send()
            seconds.append(time.perf_counter() - started)
        over.set()
        process.join(PATIENCE)
    return seconds


async def connect_four() -> list[float]:
    """Return the seconds of a trainer's ``connect()``, from the start of its workers on."""
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=nn.Linear(4, 2), num_workers=4)
    async with scheme:
        started = time.perf_counter()
        over, processes = hire(scheme, "async", "4x2", 4)
        await scheme.connect(processes=processes, timeout=PATIENCE)
        seconds = time.perf_counter() - started
        over.set()
        for process in processes:
            await asyncio.to_thread(process.join, PATIENCE)
    return [seconds] * 5


async def forward() -> list[float]:
    """Return the seconds of guarded forwards of a small layer, without new versions."""
    trainer, inputs, seconds = nn.Linear(4, 2), torch.ones(1, 4), []
    first = aiosync.SharedMemWeightSyncScheme()
    first.init_on_sender(model_id="policy", model=trainer, num_workers=1)
    second = copy.copy(first)
    model = nn.Linear(4, 2)
    second.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    async with first, second:
        await asyncio.gather(first.connect(), second.connect())
        with torch.no_grad():
            for _ in range(500):
                started = time.perf_counter()
                for _ in range(100):
                    model(inputs)
                seconds.append((time.perf_counter() - started) / 100)
    return seconds


def measure(case: str) -> float:
    """Return the median seconds of one case, with the package that this interpreter has."""
    torch.set_num_threads(1)
    if case.startswith("forward"):
        seconds = aiosync.run(forward())
    elif case.startswith("connect"):
        seconds = aiosync.run(connect_four())
    else:
        transport, api, model = case.rsplit(", ", 2)
        if api == "async":
            seconds = aiosync.run(send_async(transport, model))
        else:
            seconds = send_facade(transport, model)
    return statistics.median(seconds[len(seconds) // 5 :])


def ask(tree: Path, case: str) -> float:
    """Return the median seconds of one case, with the package in ``tree``, in its own process."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--measure", case],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=10 * PATIENCE,
    )
    return float(done.stdout.split()[-1])


def take_out(revision: str, folder: Path) -> None:
    """Extract the package of a commit into a folder."""
    packed = subprocess.run(
        ["git", "archive", revision, "aiosync"], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)


def main() -> None:
    """Measure all cases, or those that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="?", default="ec10b18")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(measure(given.measure))
        return
    here = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        take_out(given.revision, Path(folder))
        for case in CASES:
            if given.only not in case:
                continue
            before, now = [], []
            for _ in range(given.turns):
                before.append(ask(Path(folder), case))
                now.append(ask(here, case))
            old, new = statistics.median(before), statistics.median(now)
            print(
                f"{case:>30}: {old * 1e6:11.1f} -> {new * 1e6:11.1f} us  {new / old:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
