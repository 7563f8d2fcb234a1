"""TorchRL's scheme over torch.distributed.rpc: RPC signals, the default Gloo group carries.

A trainer's process can do this for one case only: torch's references to remote objects (RRef), by
which TorchRL signals, keep to the first RPC group that a process joins. Without them TorchRL would
look quicker than it is. The module imports torchrl when a case is opened, not before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import rpc as torch_rpc

from aiosync.bench import PATIENCE, WORKLOADS, Case, Crew, Desk, Handle, ask_all, fill
from tests.bench.compare.torchrl_local import PRELOAD, Context, free_port, greeted, leave_group

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Collector", "RPCTrainer", "collector", "rpc", "work_rpc"]

_LEAVE_SECONDS = 10.0


class Collector(Context):
    """The part of a remote collector that the scheme uses and calls."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(policy)
        self._scheme: Any = None

    def connect(self, rank: int) -> None:
        """Join the scheme."""
        from torchrl.weight_update import RPCWeightSyncScheme

        self._scheme = RPCWeightSyncScheme()
        self._scheme.init_on_receiver(model_id="policy", context=self, worker_idx=rank)
        self._scheme.connect(worker_idx=rank)

    def _receive_weights_scheme(self) -> None:
        self._scheme.receive()


class _Collectors(Context):
    """The part of the trainer's collector that the scheme uses."""

    collector_class = Collector

    def __init__(self, policy: nn.Module, names: Sequence[str]) -> None:
        super().__init__(policy)
        self.collector_infos = [torch_rpc.get_worker_info(name) for name in names]
        self.collector_rrefs = [
            torch_rpc.remote(name, collector, timeout=PATIENCE) for name in names
        ]


_collector: Collector | None = None


def collector() -> Collector:
    """Return the collector of this process; the trainer calls this by RPC."""
    assert _collector is not None
    return _collector


def _join(rank: int, workers: int, ports: tuple[int, int]) -> None:
    """Form both groups; the trainer has rank 0."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{ports[0]}",
        rank=rank,
        world_size=workers + 1,
        timeout=timedelta(seconds=PATIENCE),
    )
    # init_rpc has no annotations, which mypy does not accept.
    untyped: Any = torch_rpc
    untyped.init_rpc(
        _name(rank),
        rank=rank,
        world_size=workers + 1,
        rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{ports[1]}", rpc_timeout=PATIENCE
        ),
    )


def _name(rank: int) -> str:
    return f"worker-{rank}" if rank else "trainer"


class RPCTrainer:
    """The trainer's half of the scheme over RPC."""

    model: nn.Module

    def __init__(self) -> None:
        self._crew = Crew(PRELOAD)
        self._scheme: Any = None
        self._context: _Collectors | None = None
        self._weights: Any = None
        self._joined = False
        self._used = False

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers and form the groups with them."""
        from tensordict import TensorDict
        from torchrl.weight_update import RPCWeightSyncScheme

        if self._used:
            raise RuntimeError("this needs a new process for each case")
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self._weights = TensorDict.from_module(self.model).data
        ports = (free_port(), free_port())
        handles = self._crew.start(work_rpc, case.workers, case.workload, case.workers, ports)
        greeted(handles)
        self._joined = self._used = True
        _join(0, case.workers, ports)
        # A worker that answers has joined.
        ask_all(handles, "cpu")
        names = [_name(idx + 1) for idx in range(case.workers)]
        self._context = _Collectors(self.model, names)
        self._scheme = RPCWeightSyncScheme()
        self._scheme.init_on_sender(
            model_id="policy", context=self._context, num_workers=case.workers
        )
        self._scheme.connect()
        return handles

    def send(self) -> None:
        """Send the weights; return when every worker has applied them."""
        self._scheme.send(self._weights)

    def close(self) -> None:
        """Leave the groups together with the workers, and release everything."""
        # These also refer to objects of the workers.
        self._scheme = self._context = self._weights = None
        complete = all(process.is_alive() for process in self._crew.processes)
        # All sides leave at the same time: each waits for the others.
        stopping = Thread(target=self._crew.stop, args=(2 * _LEAVE_SECONDS,), daemon=True)
        stopping.start()
        if self._joined:
            # The trainer has left the group despite such an error.
            with suppress(RuntimeError):
                torch_rpc.shutdown(graceful=complete, timeout=_LEAVE_SECONDS)
            self._joined = False
        stopping.join()
        leave_group()


def work_rpc(
    idx: int, pipe: Connection, workload: str, workers: int, ports: tuple[int, int]
) -> None:
    """Run a worker that applies weights when the trainer calls it."""
    global _collector
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _collector = Collector(WORKLOADS[workload].build())
    _collector.connect(idx + 1)
    pipe.send((True, None))
    _join(idx + 1, workers, ports)
    Desk(_collector.policy).serve(pipe)
    try:
        torch_rpc.shutdown(timeout=_LEAVE_SECONDS)
    finally:
        # With threads of RPC and Gloo, there is no quicker way to end.
        os._exit(0)


def rpc() -> RPCTrainer:
    """Make a trainer with RPC and Gloo, for any number of workers."""
    return RPCTrainer()
