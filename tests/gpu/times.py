"""Times of a send: trainer and worker are two processes with their models on one GPU."""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import statistics
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import aiosync
from aiosync.bench import PATIENCE, Crew, Desk, Handle, fill
from tests.gpu.report import begin, row

MODELS = {"1,000 x 4 KiB": (1000, 1024), "16 MiB": (16, 2**18), "512 MiB": (16, 2**23)}
"""Number of float32 tensors, and of elements in each, by name."""
SCHEMES = {
    "shared memory": aiosync.SharedMemWeightSyncScheme,
    "GPU memory": lambda: aiosync.SharedMemWeightSyncScheme(memory="device"),
    "pipe": aiosync.MultiProcessWeightSyncScheme,
    "TCP": lambda: aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0"),
}
_COLUMNS = (
    "weights",
    "scheme",
    "send(), ms: median (least to most)",
    "until the worker has it",
    "trainer's loop held",
)
_SECONDS = 1.5
_MOST = 200


def build(name: str, device: str) -> nn.Module:
    """Make the model of this name."""
    count, numel = MODELS[name]
    return nn.ParameterList(torch.zeros(numel, device=device) for _ in range(count))


def work(idx: int, pipe: Connection, scheme: Any, name: str, device: str) -> None:
    """Run a worker of aiosync."""
    with asyncio.Runner() as runner:
        runner.run(_work(idx, pipe, scheme, build(name, device)))


async def _work(idx: int, pipe: Connection, scheme: Any, model: nn.Module) -> None:
    async with scheme:
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        await scheme.connect()
        desk = Desk(model, scheme.reading)
        while True:
            await asyncio.to_thread(pipe.poll, None)
            question, argument = pipe.recv()
            if question == "end":
                return
            if question == "wait":
                await scheme.wait_for_version(argument, timeout=PATIENCE)
                with scheme.reading():
                    _synchronize()
                pipe.send((True, time.perf_counter()))
            else:
                pipe.send(desk.reply(question, argument))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


async def _timed(
    send: Callable[[], Awaitable[object]],
    model: nn.Module,
    ask: Callable[[], Callable[[], float]] | None = None,
) -> tuple[list[float], list[float]]:
    """Return the times in milliseconds of sends, and those until the worker has the new values.

    The first five are not counted.
    """
    taken, arrived = list[float](), list[float]()
    until = time.perf_counter() + _SECONDS
    for turn in range(_MOST):
        if turn > 8 and time.perf_counter() > until:
            break
        fill(model, float(turn % 7 + 2))
        answer = ask() if ask is not None else time.perf_counter
        # The worker begins to wait meanwhile.
        await asyncio.sleep(0.002)
        _synchronize()
        start = time.perf_counter()
        await send()
        taken.append((time.perf_counter() - start) * 1e3)
        arrived.append((await asyncio.to_thread(answer) - start) * 1e3)
    return taken[5:], arrived[5:]


def _shown(taken: Sequence[float]) -> str:
    if not taken:
        return "no send"
    return f"{statistics.median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f})"


async def _loop_gap(stop: asyncio.Event) -> float:
    """Return the longest time, in milliseconds, in which the loop did not turn."""
    longest, before = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return longest * 1e3


async def _one(scheme: str, name: str, device: str) -> str:
    """Start a worker, measure sends, and check each element that arrived."""
    model = build(name, device)
    fill(model, 1.0)
    crew = Crew([__name__])
    sender: Any = SCHEMES[scheme]()
    sender.init_on_sender(model_id="policy", model=model, num_workers=1)
    try:
        [handle] = crew.start(work, 1, sender, name, device)
        await sender.connect(processes=crew.processes, timeout=PATIENCE)

        def ask() -> Callable[[], float]:
            handle.ask("wait", sender.version + 1)
            return handle.answer

        taken, arrived = await _timed(sender.send, model, ask)
        stop = asyncio.Event()
        watch = asyncio.create_task(_loop_gap(stop))
        await asyncio.sleep(0.01)
        for turn in range(3):
            fill(model, 100.0 + turn)
            await sender.send()
        stop.set()
        gap = await watch
        handle.ask("check", 102.0)
        await asyncio.to_thread(handle.answer)
    finally:
        await asyncio.to_thread(crew.stop)
        await sender.aclose()
    return f"{_shown(taken)} | {_shown(arrived)} | {gap:.1f}"


async def _all(device: str, names: Sequence[str]) -> None:
    for name in names:
        for scheme in SCHEMES:
            try:
                async with asyncio.timeout(40):
                    found = await _one(scheme, name, device)
            except Exception as exc:  # noqa: BLE001 - the table shows it
                found = f"{type(exc).__name__}: {' '.join(str(exc).split())[:150]} | |"
            row(name, f"aiosync, {scheme}", found)


def run(device: str = "cuda", names: Sequence[str] = tuple(MODELS)) -> None:
    """Print the times of aiosync."""
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    begin(
        f"times of a send on one {where}, torch {torch.__version__}",
        *_COLUMNS,
    )
    asyncio.run(_all(device, names))


# -- TorchRL ---------------------------------------------------------------------------------------


def work_torchrl(idx: int, pipe: Connection, scheme: Any, name: str, device: str) -> None:
    """Run a worker of TorchRL, which applies updates in a thread of its own."""
    warnings.simplefilter("ignore")
    model = build(name, device)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    scheme.connect(worker_idx=idx)
    Desk(model).serve(pipe)
    # TorchRL's thread waits in a queue, so the process ends without it.
    os._exit(0)


async def _one_torchrl(kind: str, name: str, device: str) -> str:
    import torchrl.weight_update
    from tensordict import TensorDict

    model = build(name, device)
    fill(model, 1.0)
    weights = TensorDict.from_module(model).data
    scheme = getattr(torchrl.weight_update, kind)()
    context = get_context("forkserver")
    if kind.startswith("Shared"):
        shared = weights.clone()
        shared = shared if device == "cuda" else shared.share_memory_()
        scheme.init_on_sender(params_map={0: shared}, ctx=context)
        scheme.model_id = "policy"
    else:
        scheme.init_on_sender(
            model_id="policy",
            weights=weights,
            device_map_fn=lambda _, weights: weights.clone(),
            num_workers=1,
            ctx=context,
        )
    scheme.connect()
    theirs = copy.copy(scheme)
    vars(theirs).pop("_device_mapping_info", None)
    if theirs._shared_transport is not None:
        theirs._shared_transport = copy.copy(theirs._shared_transport)
        theirs._shared_transport._params_map = None
        theirs._shared_transport._unique_weights = None
    theirs._is_shutdown = True
    crew = Crew([__name__, "torchrl.weight_update", "torchrl.collectors.utils"])
    handles: list[Handle] = crew.start(work_torchrl, 1, theirs, name, device)
    handles[0].ask("cpu")
    handles[0].answer()

    async def send() -> None:
        scheme.send(weights if kind.startswith("Shared") else weights.clone())

    taken, _ = await _timed(send, model)
    crew.stop(1)
    return f"{_shown(taken)} | the same | all of it"


def run_torchrl(device: str = "cuda", names: Sequence[str] = tuple(MODELS)) -> None:
    """Print the times of TorchRL."""
    begin(
        "TorchRL's schemes, likewise",
        *_COLUMNS,
    )
    warnings.simplefilter("ignore")
    for name in names:
        for kind in ("SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"):
            try:
                found = asyncio.run(_one_torchrl(kind, name, device))
            except Exception as exc:  # noqa: BLE001 - the table shows it
                found = f"{type(exc).__name__}: {' '.join(str(exc).split())[:150]} | |"
            row(name, f"TorchRL, {kind}", found)
    # TorchRL's threads and queues wait for ever, so the process ends without them.
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--torchrl", action="store_true")
    parser.add_argument("names", nargs="*", default=tuple(MODELS))
    args = parser.parse_args()
    (run_torchrl if args.torchrl else run)(args.device, args.names)
