"""An RPC group of processes that tests run in: a trainer with an event loop, and workers.

A scenario of :mod:`tests.schemes._rpc_scenarios` runs in the trainer's process, which is not that
of pytest: RPC keeps threads and sockets for as long as its process lives.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

from tests.schemes import _harness as harness

MAX_SECONDS = 40.0
LOOPS = ("uvloop", "asyncio")  # of the workers, in turn


def init(rank: int, world: int, port: int, name: str) -> None:
    warnings.simplefilter("ignore", UserWarning)  # torch's own, about its own deprecations
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=MAX_SECONDS)
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)
    torch.set_num_threads(1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


# -- models ------------------------------------------------------------------------------------


def block(mebibytes: int, value: float) -> nn.Module:
    model = nn.Module()
    model.block = nn.Parameter(torch.full((mebibytes, 2**18), value))
    return model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


# -- in a worker -------------------------------------------------------------------------------

_loop: asyncio.AbstractEventLoop | None = None
_schemes: dict[str, Any] = {}
_models: dict[str, nn.Module] = {}


def work(rank: int, world: int, port: int, loop: str) -> None:
    """Main of a worker: a loop in the main thread until the trainer shuts RPC down."""
    global _loop
    init(rank, world, port, f"worker{rank - 1}")
    with asyncio.Runner(loop_factory=harness.loop_factory(loop)) as runner:
        _loop = runner.get_loop()
        ended = threading.Thread(target=_until_shutdown)
        ended.start()
        runner.run(_serve())
    ended.join()


def _until_shutdown() -> None:
    rpc.shutdown()
    assert _loop is not None
    _loop.call_soon_threadsafe(_ended.set)


_ended = asyncio.Event()


async def _serve() -> None:
    await _ended.wait()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, left
    names = [each.name for each in threading.enumerate() if each.name.startswith("aiosync")]
    assert not names, names


def _on_loop(coroutine: Any) -> Any:
    assert _loop is not None
    return asyncio.run_coroutine_threadsafe(coroutine, _loop).result(MAX_SECONDS)


def hold(key: str, scheme: bytes) -> int:
    """Keep a copy of a scheme that was pickled at some time; returns the process id."""
    _schemes[key] = pickle.loads(scheme)
    return os.getpid()


def join(key: str, mebibytes: int, idx: int | None) -> int:
    """Become a receiver, with a model of -1."""
    return int(_on_loop(_join(_schemes[key], key, mebibytes, idx)))


async def _join(scheme: Any, key: str, mebibytes: int, idx: int | None) -> int:
    _models[key] = block(mebibytes, -1.0)
    scheme.init_on_receiver(model_id="policy", model=_models[key], worker_idx=idx)
    await scheme.connect(timeout=MAX_SECONDS)
    return int(scheme.version)


def state(key: str) -> tuple[int, list[float], int]:
    """Version, the distinct values of the weights, and the reconnects."""
    values = {float(each) for p in _models[key].parameters() for each in p.detach().aminmax()}
    return _schemes[key].version, sorted(values), _schemes[key].reconnects


def payloads_awaited() -> int:
    from aiosync.transports._rpc_landing import landings

    return len(landings)


def offered() -> int:
    from aiosync.transports._rpc_carrier import _offers

    return len(_offers)


def leave(key: str) -> None:
    _on_loop(_schemes.pop(key).aclose())


# -- in the trainer ----------------------------------------------------------------------------


class Group:
    """The workers' processes, from the trainer's side."""

    def __init__(self, workers: int) -> None:
        port = free_port()
        self.names = [f"worker{idx}" for idx in range(workers)]
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __name__,
                    *map(str, (rank, workers + 1, port)),
                    LOOPS[rank % 2],
                ]
            )
            for rank in range(1, workers + 1)
        ]
        init(0, workers + 1, port, "trainer")

    async def call(self, idx: int, function: Any, *args: Any) -> Any:
        return await asyncio.to_thread(
            rpc.rpc_sync, self.names[idx], function, args=args, timeout=MAX_SECONDS
        )

    async def all(self, function: Any, *args: Any) -> list[Any]:
        return list(
            await asyncio.gather(
                *(self.call(idx, function, *args) for idx in range(len(self.names)))
            )
        )

    def shut_down(self) -> None:
        """End RPC everywhere; it must not wait for anything of aiosync."""
        started = time.monotonic()
        rpc.shutdown()
        assert time.monotonic() - started < 5.0
        for process in self.processes:
            assert process.wait(10) == 0

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    from tests.schemes import _rpc_group

    _rpc_group.work(*map(int, sys.argv[1:4]), sys.argv[4])
