"""Sends over ``torch.distributed.rpc``, aiosync beside TorchRL, in one run on one machine.

Run it with ``python -m tests.bench.rpc_vs_torchrl`` where ``torchrl==0.14.1`` is installed; it
is not collected by pytest. ``--json FILE`` writes the figures.

Equal terms: the same worker process of the same RPC group serves both libraries, weights differ
at every send and are checked in the worker after every block, blocks of the two are interleaved,
one torch thread everywhere, medians. Both calls return when the worker has applied the weights.
TorchRL moves them over its default Gloo group and signals by RPC, which is what its scheme does.
The last figure is how late a ticker of 5 ms on the trainer's loop came at worst while aiosync
sent. Not measured here: several hosts, several workers, workers that compute, peak memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import torch
from tensordict import TensorDict
from torch import distributed as dist
from torch import nn
from torch.distributed import rpc

import aiosync
from aiosync.schemes.rpc import RPCWeightSyncScheme

BLOCKS = 5
WAIT = 120.0


class Many(nn.Module):
    """``count`` parameters of ``numel`` float32 elements each."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(numel)))


MODELS = {
    "linear 4x2": (lambda: nn.Linear(4, 2), 100),
    "1,000 x 4 KiB": (lambda: Many(1000, 1024), 20),
    "64 MiB": (lambda: Many(16, 2**20), 8),
    "512 MiB": (lambda: Many(16, 8 * 2**20), 4),
}


def init(rank: int, port: int) -> None:
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    os.environ["MASTER_PORT"] = str(port + 1)
    rpc.init_rpc(["trainer", "worker"][rank], rank=rank, world_size=2)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def value_of(model: nn.Module) -> float:
    tensors = [p.detach().flatten() for p in model.parameters()]
    values = {float(tensor[index]) for tensor in tensors for index in (0, -1)}
    if len(values) != 1:
        raise AssertionError(f"the worker has a mix of versions: {sorted(values)[:4]}")
    return values.pop()


# -- the worker: called by RPC, aiosync on a loop of its own ------------------------------------

_loop: asyncio.AbstractEventLoop | None = None
_ours: Any = None
_model: nn.Module | None = None


def join(scheme: Any, name: str) -> None:
    global _ours, _model
    _ours, _model = scheme, MODELS[name][0]()

    async def connect() -> None:
        _ours.init_on_receiver(model_id="policy", model=_model)
        await _ours.connect()

    assert _loop is not None
    asyncio.run_coroutine_threadsafe(connect(), _loop).result(WAIT)


def our_value() -> float:
    assert _model is not None
    return value_of(_model)


def leave() -> None:
    assert _loop is not None
    asyncio.run_coroutine_threadsafe(_ours.aclose(), _loop).result(WAIT)


class Collector:
    """What TorchRL's scheme looks at in a remote collector."""

    def __init__(self, scheme: Any, name: str) -> None:
        self.policy = MODELS[name][0]()
        self.scheme = scheme
        scheme.init_on_receiver(model_id="policy", context=self, worker_idx=1)
        scheme.connect(worker_idx=1)

    def get_model(self, model_id: str) -> nn.Module:
        return self.policy

    def _receive_weights_scheme(self) -> None:
        self.scheme.receive()

    def value(self) -> float:
        return value_of(self.policy)


class Trainer:
    """What TorchRL's scheme looks at in the trainer's collector."""

    num_workers = 1
    collector_class = Collector

    def __init__(self, policy: nn.Module, rref: Any) -> None:
        self.policy = policy
        self.collector_infos = [rpc.get_worker_info("worker")]
        self.collector_rrefs = [rref]

    def get_model(self, model_id: str) -> nn.Module:
        return self.policy


def work(port: int) -> None:
    global _loop
    init(1, port)
    aiosync_loop = _loop = aiosync_new_loop()
    thread = threading.Thread(target=aiosync_loop.run_forever, daemon=True)
    thread.start()
    rpc.shutdown()
    aiosync_loop.call_soon_threadsafe(aiosync_loop.stop)
    thread.join()
    aiosync_loop.close()


def aiosync_new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


# -- the trainer -------------------------------------------------------------------------------


async def ask(function: Any, *args: Any) -> Any:
    return await asyncio.to_thread(rpc.rpc_sync, "worker", function, args=args, timeout=WAIT)


async def ticker(late: list[float]) -> None:
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(0.005)
        late.append(time.perf_counter() - begun - 0.005)


async def measure(name: str) -> dict[str, Any]:
    from torchrl.weight_update import RPCWeightSyncScheme as TheirScheme

    make, count = MODELS[name]
    model = make()
    fill(model, 1.0)
    ours = RPCWeightSyncScheme()
    ours.init_on_sender(model_id="policy", model=model, num_workers=1)
    joining = asyncio.ensure_future(ask(join, ours, name))
    await ours.connect()
    await joining

    theirs = TheirScheme("tensordict")
    rref = rpc.remote("worker", Collector, args=(TheirScheme("tensordict"), name), timeout=WAIT)
    context = Trainer(model, rref)
    theirs.init_on_sender(model_id="policy", context=context, num_workers=1)
    # TorchRL's connect() sends the weights of now as well.
    await asyncio.to_thread(theirs.connect)
    weights = TensorDict.from_module(model).data

    seconds: dict[str, list[float]] = {"aiosync": [], "torchrl": []}
    late: list[float] = []
    value = 1.0
    for block in range(BLOCKS + 1):  # the first block warms up and does not count
        for library in seconds:
            ticking = asyncio.ensure_future(ticker(late)) if library == "aiosync" else None
            times = []
            for _ in range(count):
                value += 1.0
                await asyncio.to_thread(fill, model, value)
                begun = time.perf_counter()
                if library == "aiosync":
                    await ours.send()
                else:
                    theirs.send(weights)
                times.append(time.perf_counter() - begun)
            if ticking is not None:
                ticking.cancel()
            if library == "aiosync":
                got = await ask(our_value)
            else:
                got = await asyncio.to_thread(rref.rpc_sync(WAIT).value)
            if got != value:
                raise AssertionError(f"{library}: the worker has {got}, not {value}")
            if block:
                seconds[library].extend(times)
        if not block:
            late.clear()
    await ask(leave)
    await ours.aclose()
    return {"seconds": seconds, "late": max(late)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS)[:2], choices=list(MODELS))
    parser.add_argument("--json")
    options = parser.parse_args()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.rpc_vs_torchrl", "--work", str(port)]
    )
    rows = []
    try:
        init(0, port)
        for name in options.models:
            row = aiosync.run(measure(name))
            ours, theirs = (
                statistics.median(row["seconds"][each]) for each in ("aiosync", "torchrl")
            )
            rows.append({"model": name, **row, "ratio": theirs / ours})
            print(
                f"{name:>14}: aiosync {ours * 1e3:8.3f} ms, TorchRL {theirs * 1e3:8.3f} ms, "
                f"ratio {theirs / ours:6.1f}; a 5 ms ticker was {row['late'] * 1e3:.1f} ms late "
                "at worst",
                flush=True,
            )
        rpc.shutdown()
        dist.destroy_process_group()
        worker.wait(30)
    finally:
        worker.kill()
        worker.wait()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        from tests.bench import rpc_vs_torchrl

        rpc_vs_torchrl.work(int(sys.argv[2]))
    else:
        from tests.bench import rpc_vs_torchrl

        sys.exit(rpc_vs_torchrl.main())
