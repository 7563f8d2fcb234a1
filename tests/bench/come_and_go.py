"""Memory and descriptors of a trainer while workers come and go, as a picture.

``python -m tests.bench.come_and_go --picture docs/benchmarks/come_and_go.png`` has one trainer send
three models, through shared memory and over TCP, without a pause, to about eight workers. Each
worker stays for some seconds, and then leaves or is killed. Every value of version v is the number
v, so that a forward which sees two numbers is torn. Each second the program notes how much memory
the trainer has, how much of it in segments, and how many descriptors.

It exits with 1 if a forward was torn, a send failed for another reason than a killed worker, or the
second half of the time has more than a fifth above the second minute's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import aiosync

SIZES = {"4x2": (4, 2), "1000 x 4 KiB": (1000, 1024), "16 MiB": (4, 2**20)}
_WORKERS, _STAYS_SECONDS, _KILL_SECONDS = 8, (4.0, 40.0), 30.0


class Stack(nn.Module):
    """Parameters that hold one number; a forward returns the numbers that it finds."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(count))

    def fill(self, value: float) -> None:
        """Set all parameters, like an optimizer's step."""
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.fill_(value)

    def forward(self) -> set[float]:
        found = {float(each.detach()[0]) for each in self.each}
        return found | {float(each.detach()[-1]) for each in self.each}


def act(scheme: Any, size: tuple[int, int], index: int, seconds: float, told: Any) -> None:
    """Run a worker, which computes for some seconds and leaves."""
    torch.set_num_threads(1)
    told.send(asyncio.run(_act(scheme, Stack(*size), index, seconds)))


async def _act(scheme: Any, model: Stack, index: int, seconds: float) -> tuple[int, int]:
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    forwards = torn = 0
    async with scheme:
        await scheme.connect()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            torn += len(model()) > 1
            forwards += 1
            await asyncio.sleep(0.005)
    return forwards, torn


def held() -> dict[str, float]:
    """Return what this process holds: memory in MB, the MB of it in segments, and descriptors."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    segments, names = {}, os.listdir("/proc/self/fd")
    for name in names:
        with contextlib.suppress(OSError):
            if "memfd:aiosync" in os.readlink(f"/proc/self/fd/{name}"):
                state = os.stat(f"/proc/self/fd/{name}")
                segments[state.st_ino] = state.st_blocks * 512
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "segments": sum(segments.values()) / 1e6,
        "descriptors": len(names),
    }


class Run:
    """One trainer with its schemes, and its present workers."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.count: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self._random = random.Random(seed)
        self._until = time.monotonic() + seconds
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "aiosync"])
        self._schemes: list[tuple[Any, Stack, tuple[int, int]]] = []
        self._workers: dict[int, tuple[Any, Any]] = {}

    async def main(self) -> None:
        """Run the sends, the workers and the samples until the time is over."""
        async with contextlib.AsyncExitStack() as stack:
            for kind in (aiosync.SharedMemWeightSyncScheme, aiosync.TCPWeightSyncScheme):
                for size in SIZES.values():
                    scheme, model = kind(timeout=60.0), Stack(*size)
                    scheme.init_on_sender(model_id="policy", model=model)
                    await stack.enter_async_context(scheme)
                    await scheme.connect()
                    self._schemes.append((scheme, model, size))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._come_and_go())
                group.create_task(self._sample())
                for scheme, model, _ in self._schemes:
                    group.create_task(self._send(scheme, model))
            for process, _ in self._workers.values():
                process.kill()
                await asyncio.to_thread(process.join)

    async def _send(self, scheme: Any, model: Stack) -> None:
        while time.monotonic() < self._until:
            model.fill(float(scheme.version + 1))
            try:
                await scheme.send()
                self.count["sends"] += 1
            except aiosync.PartialSyncError as exc:
                self.count["sends that told of a killed worker"] += 1
                for error in exc.failed.values():
                    if not isinstance(error, aiosync.PeerClosed | aiosync.TransportBroken):
                        self.count[f"failed: {error}"] += 1
            await asyncio.sleep(0.02)

    async def _come_and_go(self) -> None:
        index, kills_at = 0, time.monotonic() + _KILL_SECONDS
        while time.monotonic() < self._until:
            for each, (process, told) in list(self._workers.items()):
                if process.is_alive():
                    continue
                with contextlib.suppress(EOFError):
                    if told.poll():
                        forwards, torn = told.recv()
                        self.count["forwards"] += forwards
                        self.count["torn"] += torn
                told.close()
                process.close()
                del self._workers[each]
            if time.monotonic() > kills_at and self._workers:
                kills_at += _KILL_SECONDS
                self._random.choice([*self._workers.values()])[0].kill()
                self.count["killed"] += 1
            while len(self._workers) < _WORKERS:
                scheme, _, size = self._random.choice(self._schemes)
                mine, theirs = self._context.Pipe(duplex=False)
                stays = self._random.uniform(*_STAYS_SECONDS)
                args = (scheme, size, index, stays, theirs)
                process = self._context.Process(target=act, args=args)
                await asyncio.to_thread(process.start)
                theirs.close()
                self._workers[index] = (process, mine)
                self.count["came"] += 1
                index += 1
            await asyncio.sleep(0.2)

    async def _sample(self) -> None:
        while time.monotonic() < self._until:
            self.samples.append(held())
            await asyncio.sleep(1.0)


def draw(samples: list[dict[str, float]], path: str) -> None:
    """Draw the samples as three panels."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(7, 6), sharex=True, layout="constrained")
    units = {"memory": "trainer, MB", "segments": "segments, MB", "descriptors": "descriptors"}
    minutes = [index / 60 for index in range(len(samples))]
    for axis, (name, unit) in zip(axes, units.items(), strict=True):
        axis.plot(minutes, [each[name] for each in samples], linewidth=1)
        axis.set_ylabel(unit)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes in which workers join, leave and are killed")
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run the trainer, print the findings, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(arguments.seconds, arguments.seed)
    asyncio.run(run.main())
    grew, half = [], run.samples[len(run.samples) // 2 :]
    for name in run.samples[0]:
        first = max(each[name] for each in run.samples[60:120] or run.samples)
        last = max(each[name] for each in half)
        print(f"{name}: most in the second minute {first:.0f}, in the second half {last:.0f}")
        grew += [name] if last > 1.2 * first else []
    print(json.dumps(run.count, indent=1))
    if arguments.picture:
        draw(run.samples, arguments.picture)
    bad = [name for name in run.count if name.startswith("failed:")]
    return int(bool(bad or grew or run.count["torn"]))


if __name__ == "__main__":
    sys.exit(main())
