"""Memory of simulated processes: the bytes that wait for somebody are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os

import pytest
import torch

import aiosync
from aiosync.server import WeightServer
from aiosync.testing.sim import Process, SimulationError, Weather, World, simulate

URL = "tcp://127.0.0.1:7000"
SERVER = "tcp://127.0.0.1:7100"
NUMEL = 2**18
MODEL_NBYTES = 4 * NUMEL
SENDS = 300
"""If each of them left its weights, those would take 300 MiB."""
MOST_MODELS = 32
"""Weights, copies of them, chunks and sockets of all processes may take this many times a model."""
EVERY = 500
"""Steps between two looks at the memory."""


def resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Tensor(torch.nn.Module):
    """Model with one parameter of a MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(NUMEL))


async def train(url: str, over: asyncio.Event) -> None:
    """Send without waiting for the workers, faster than they take it."""
    model = Tensor()
    scheme = aiosync.TCPWeightSyncScheme(
        url, dial="both" if url == SERVER else "receiver", delta="off"
    )
    scheme.init_on_sender(model_id="policy", model=model, num_workers=None)
    async with scheme:
        await scheme.connect(timeout=600)
        handles = []
        for number in range(SENDS):
            with torch.no_grad():
                model.weight.fill_(number)
            handles.append(scheme.send_nowait(timeout=60))
            await asyncio.sleep(0.02)
        for handle in handles:
            with contextlib.suppress(aiosync.AiosyncError):
                await handle
        over.set()


async def work(url: str, index: int, over: asyncio.Event, kept: list[torch.Tensor] | None) -> None:
    """Take what arrives, until the trainer has ended, and keep it where that is asked for."""
    model = Tensor()
    scheme = aiosync.TCPWeightSyncScheme(url, reconnect=None)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    async with scheme:
        await scheme.connect(timeout=600)
        while not over.is_set():
            if kept is not None:
                kept.append(model.weight.detach().clone())
            await asyncio.sleep(0.05)


async def serve(over: asyncio.Event) -> None:
    """Pass the weights on, until the trainer has ended."""
    async with WeightServer(SERVER):
        await over.wait()


def run(url: str, kept: list[torch.Tensor] | None = None) -> None:
    """Simulate workers that stop for seconds and lose links, while a trainer sends on."""

    async def main(world: World) -> None:
        over, begun = asyncio.Event(), 0

        def look(process: Process) -> None:
            nonlocal begun
            if world.steps % EVERY:
                return
            gc.collect()
            begun = begun or resident()
            more = resident() - begun
            if more > MOST_MODELS * MODEL_NBYTES:
                raise AssertionError(f"{more} bytes more than at the beginning")

        world.checks.append(look)
        processes = [world.start("server", serve(over))] if url == SERVER else []
        processes.append(world.start("trainer", train(url, over)))
        workers = [world.start(f"worker {i}", work(url, i, over, kept)) for i in range(3)]
        while not over.is_set():
            world.stop(world.random.choice(workers), world.random.uniform(0.5, 4.0))
            await asyncio.sleep(1.0)
        for process in [*processes, *workers]:
            await world.ended(process)

    simulate(main, seed=1, weather=Weather(cuts=0.3, within=40 * MODEL_NBYTES))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("url", [URL, SERVER], ids=["workers that dial", "a weight server"])
def test_bytes_that_wait_are_bounded(url: str) -> None:
    run(url)


def test_bytes_that_a_program_keeps_are_found() -> None:
    with pytest.raises(SimulationError, match="bytes more than at the beginning"):
        run(URL, kept=[])
