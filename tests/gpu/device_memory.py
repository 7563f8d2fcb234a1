"""Slots in device memory: torn forwards, with the waits and without, and the memory of the GPU."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import aiosync
from aiosync.bench import PATIENCE, Crew, fill
from aiosync.tensors.accelerator import accelerator, use_accelerator
from tests.gpu.report import begin, row

_COUNT, _NUMEL, _SECONDS, _CYCLES = 4, 2**22, 4.0, 1_000_000
_CPU = "cpu"  # for a trial of this program on the accelerator of tests.support.accelerator


def _build(device: str) -> nn.Module:
    return nn.ParameterList(torch.zeros(_NUMEL, device=device) for _ in range(_COUNT))


def _prepare(device: str) -> None:
    if device == _CPU:
        from tests.support.accelerator import Deferred

        use_accelerator(Deferred())


class _NoWaits:
    """The accelerator, but nobody waits for what is queued there."""

    def __init__(self) -> None:
        self._real = accelerator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def synchronize(self, device: torch.device) -> None:
        """Return at once."""


# -- the worker ------------------------------------------------------------------------------------


def work(idx: int, pipe: Connection, scheme: Any, device: str, fenced: bool) -> None:
    """Run a worker that computes on two streams, until it is asked how many forwards were torn."""
    with asyncio.Runner() as runner:
        runner.run(_work(idx, pipe, scheme, device, fenced))


async def _work(idx: int, pipe: Connection, scheme: Any, device: str, fenced: bool) -> None:
    _prepare(device)
    model, rows = _build(device), list[torch.Tensor]()
    on_gpu = device != _CPU
    streams = [torch.cuda.Stream() if on_gpu else None for _ in range(2)]
    async with scheme:
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        await scheme.connect()
        if not fenced:
            use_accelerator(_NoWaits())  # type: ignore[arg-type]
        first, last = list(model.parameters())[:: _COUNT - 1]
        while not pipe.poll():
            for stream in streams:
                with scheme.reading(), _on(stream):
                    begun = first.amax()
                    if on_gpu:
                        torch.cuda._sleep(_CYCLES)
                    rows.append(torch.stack([begun, last.amin()]).detach())
            if len(rows) % 64 == 0 and on_gpu:
                torch.cuda.synchronize()  # this bounds the work that is queued
            await asyncio.sleep(0)
        if on_gpu:
            torch.cuda.synchronize()
        seen = torch.stack(rows).cpu()
        torn = int((seen[:, 0] != seen[:, 1]).sum())
        pipe.recv()
        pipe.send((True, f"{torn} of {len(seen)} | {len(seen[:, 0].unique())}"))
        await asyncio.to_thread(pipe.recv)


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        yield


# -- the trainer -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _pair(
    device: str, fenced: bool = True
) -> AsyncIterator[tuple[Any, nn.Module, Crew, Any]]:
    model, crew = _build(device), Crew([__name__])
    sender: Any = aiosync.SharedMemWeightSyncScheme(memory="device")
    sender.init_on_sender(model_id="policy", model=model, num_workers=1)
    try:
        [handle] = crew.start(work, 1, sender, device, fenced)
        await sender.connect(processes=crew.processes, timeout=PATIENCE)
        yield sender, model, crew, handle
    finally:
        await asyncio.to_thread(crew.stop)
        await sender.aclose()


async def _stress(device: str, fenced: bool) -> str:
    async with _pair(device, fenced) as (sender, model, _, handle):
        value, end = 0.0, time.monotonic() + _SECONDS
        while time.monotonic() < end:
            value = value % 1000 + 1
            fill(model, value)
            await sender.send()
        handle.ask("torn")
        found = await asyncio.to_thread(handle.answer)
        return f"{found} | {sender.version}"


async def _many(device: str) -> str:
    before = _used(device)
    async with _pair(device) as (sender, model, _, _handle):
        for value in range(100):
            fill(model, float(value))
            await sender.send()
        started = _used(device)
        for value in range(2000):
            fill(model, float(value % 100))
            await sender.send()
        grown = _used(device) - started
    return f"{grown} during 2,000 sends, {_used(device) - before} after the end | |"


async def _killed(device: str) -> str:
    before = _used(device)
    async with _pair(device) as (sender, _, crew, _handle):
        await sender.send()
        crew.processes[0].kill()
        with contextlib.suppress(aiosync.AiosyncError):
            while True:
                await sender.send(timeout=5)
        crew.processes[0].join(PATIENCE)
    return f"{_used(device) - before} more bytes in use than before | |"


def _used(device: str) -> int:
    if device == _CPU:
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def run(device: str = "cuda") -> None:
    """Print the table."""
    _prepare(device)
    begin(
        f"slots in device memory, {_COUNT * _NUMEL * 4 // 2**20} MiB, one worker on two streams",
        *("what", "torn forwards", "versions seen", "sends"),
    )
    for what, call in (
        ("as it is", lambda: _stress(device, True)),
        ("the worker does not wait for its GPU", lambda: _stress(device, False)),
        ("GPU memory, bytes", lambda: _many(device)),
        ("GPU memory after kill -9 of the worker", lambda: _killed(device)),
    ):
        try:
            found = asyncio.run(call())
        except Exception as exc:  # noqa: BLE001 - the table shows it
            found = f"{type(exc).__name__}: {' '.join(str(exc).split())[:150]} | |"
        row(what, found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    run(parser.parse_args().device)
