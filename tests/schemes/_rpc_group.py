"""An RPC group of processes, a trainer with an event loop and workers, and its scenarios.

The trainer is not pytest's process: RPC keeps threads and sockets for as long as its process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed import rpc

import aiosync
from aiosync import RPCWeightSyncScheme
from aiosync.testing import assert_no_leaks
from tests.contract.bench import PATIENCE, Hooks, fill, large, until
from tests.contract.remote import Remote, act
from tests.contract.suite import ANYWHERE
from tests.schemes import _harness as harness
from tests.schemes._driver import free_port

MAX_SECONDS = 40.0
# Loops of the workers, in turn.
LOOPS = ("uvloop", "asyncio")


def init(rank: int, world: int, port: int, name: str) -> None:
    # torch warns of its own deprecations.
    warnings.simplefilter("ignore", UserWarning)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=MAX_SECONDS)
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)
    torch.set_num_threads(1)


# -- in a worker -------------------------------------------------------------------------------

_loop: Any = None


def work(rank: int, world: int, port: int) -> None:
    """Run a worker: a loop in the main thread until the trainer shuts RPC down."""
    global _loop
    with asyncio.Runner(loop_factory=harness.loop_factory(LOOPS[rank % 2])) as runner:
        _loop = runner.get_loop()
        init(rank, world, port, f"worker{rank - 1}")
        runner.run(serve())


async def serve() -> None:
    async with assert_no_leaks(kinds=("tasks",)):
        await asyncio.to_thread(rpc.shutdown)


def obey(*args: Any) -> Any:
    """Run :func:`act` on the worker's loop; called on a thread of RPC."""
    return asyncio.run_coroutine_threadsafe(act(*args), _loop).result(MAX_SECONDS)


# -- in the trainer ----------------------------------------------------------------------------


class Group:
    """The workers' processes, from the trainer's side."""

    def __init__(self, workers: int) -> None:
        port, ctx = free_port(), harness.context("forkserver")
        self.names = [f"worker{idx}" for idx in range(workers)]
        ranks = range(1, workers + 1)
        self.processes = [
            ctx.Process(target=work, args=(rank, workers + 1, port)) for rank in ranks
        ]
        for process in self.processes:
            process.start()
        init(0, workers + 1, port, "trainer")
        self._turns = itertools.cycle(range(workers))

    def hire(self, scheme: Any, init: dict[str, Any]) -> Any:
        """Make a worker in the next one of the workers' processes."""
        idx = next(self._turns)

        async def call(*args: Any) -> Any:
            there = partial(rpc.rpc_sync, self.names[idx], obey, args=args, timeout=MAX_SECONDS)
            return await asyncio.to_thread(there)

        return Remote(scheme, init, call)

    def shut_down(self) -> None:
        """End RPC in all processes; RPC must not wait for anything of aiosync."""
        started = time.monotonic()
        rpc.shutdown()
        assert time.monotonic() - started < 5.0
        for process in self.processes:
            process.join(10)
            assert process.exitcode == 0


group: Group


@contextlib.contextmanager
def grouped(workers: int) -> Iterator[None]:
    """A context in which this process is the trainer of :data:`group`."""
    global group
    group = Group(workers)
    try:
        yield
        group.shut_down()
    finally:
        for process in group.processes:
            process.kill()
            process.join()


# -- scenarios of ``test_rpc``, which run in the trainer -----------------------------------------


async def contract(number: int) -> None:
    make = partial(aiosync.RPCWeightSyncScheme, timeout=PATIENCE, shared_memory=False)
    await ANYWHERE[number].run(make, Hooks(hire=group.hire), leaks=("tasks",))


class Collector:
    """The attributes of TorchRL's RPCCollector that a scheme reads."""

    def __init__(self, infos: list[Any], policy: Any) -> None:
        self.collector_infos, self.policy = infos, policy


async def told_where() -> None:
    """The trainer tells named workers, which connect first, where it is; also after a lost link.

    The workers have copies that were made before init_on_sender().
    """
    names, model = group.names, large()
    collector = Collector([rpc.get_worker_info(name) for name in names], model)
    # A name without a worker delays no other worker.
    nobody = [*names, "nobody"]
    for shared, known in (
        (True, {"context": collector}),
        (False, {"model": model, "workers": nobody, "num_workers": 3}),
    ):
        fill(model, 5.0)
        async with RPCWeightSyncScheme("state_dict", shared_memory=shared) as scheme:
            init = {"model_id": "policy", "model": large(), "worker_idx": None}
            workers = [group.hire(scheme, init) for _ in names]
            joining = asyncio.gather(*(worker.connect() for worker in workers))
            scheme.init_on_sender(model_id="policy", **known)
            await scheme.connect(timeout=MAX_SECONDS)
            await joining
            assert [await worker.value() for worker in workers] == [5.0] * 3
            scheme.sender_transports[1].abort()
            await until(lambda scheme=scheme: 1 not in scheme.sender_transports)
            await until(lambda scheme=scheme: 1 in scheme.sender_transports)
            fill(model, 6.0)
            assert (await scheme.send()).acked == {0, 1, 2}
            assert [await worker.value() for worker in workers] == [6.0] * 3
            for worker in workers:
                await worker.leave()
