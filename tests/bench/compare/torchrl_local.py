"""TorchRL's schemes whose workers are processes of the trainer: shared memory, queues and Gloo.

Each is set up as TorchRL's own collectors set it up, as far as that goes with trainer memory and
worker memory apart. It applies in a thread of each worker and acknowledges from there, so that a
send returns when the workers have the weights. The module imports torchrl when a case is opened,
not before.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import resource
import socket
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from aiosync.bench import PATIENCE, WORKLOADS, Case, Crew, Desk, Handle, ask_all, fill

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "PRELOAD",
    "Context",
    "GlooTrainer",
    "QueueTrainer",
    "free_port",
    "gloo",
    "greeted",
    "leave_group",
    "pipe",
    "pipe_aliased",
    "shm",
    "shm_aliased",
    "work_gloo",
    "work_queues",
]

PRELOAD = ("torchrl.weight_update", "torchrl.collectors.utils")
"""Modules that a worker of TorchRL needs; the schemes import the second at their first use."""

_OPEN_FILES = 65536
_LOOK_SECONDS = 5.0


class Context:
    """The part of a collector that a scheme uses: the scheme asks it for the policy.

    Args:
        policy: The model. Schemes keep weak references to this context, so that somebody must keep
            it.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def get_model(self, model_id: str) -> nn.Module:
        """Return the policy, the only model there is."""
        return self.policy


def free_port() -> int:
    """Return a TCP port of the loopback interface on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def leave_group() -> None:
    """Destroy the default process group of torch.distributed, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


# -- shared memory and queues -------------------------------------------------------------------


class QueueTrainer:
    """The trainer's half of the schemes that signal and acknowledge by queues of processes.

    Args:
        scheme: Name of TorchRL's class.
        aliased: Give workers handles to the trainer's own memory, as TorchRL does on CPU by
            default. Nothing is copied then, and workers see values that were not sent.
    """

    model: nn.Module

    def __init__(self, scheme: str, *, aliased: bool) -> None:
        self._name = scheme
        self._aliased = aliased
        self._crew = Crew(PRELOAD)
        self._scheme: Any = None
        self._weights: Any = None
        self._watch: _Watch | None = None

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers and join them."""
        from tensordict import TensorDict

        _allow_open_files()
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self._weights = TensorDict.from_module(self.model).data
        self._scheme = self._make(case.workers)
        # connect() does not wait: it puts the present weights into queues.
        self._scheme.connect()
        handles = self._crew.start(
            work_queues, case.workers, _for_workers(self._scheme), case.workload
        )
        # A worker that answers has joined.
        ask_all(handles, "cpu")
        self._watch = _Watch(self._scheme, self._crew)
        self._watch.start()
        return handles

    def _make(self, workers: int) -> Any:
        import torchrl.weight_update

        scheme = getattr(torchrl.weight_update, self._name)()
        context = multiprocessing.get_context("forkserver")
        if self._aliased:
            devices = [torch.device("cpu")] * workers
            scheme.init_on_sender(model_id="policy", model=self.model, devices=devices, ctx=context)
            return scheme
        if self._name == "SharedMemWeightSyncScheme":
            # All workers share one memory, to which only sends write.
            shared = self._weights.clone().share_memory_()
            scheme.init_on_sender(params_map=dict.fromkeys(range(workers), shared), ctx=context)
            scheme.model_id = "policy"
        else:
            # The workers' models keep the tensors that come first, so each worker gets its own.
            scheme.init_on_sender(
                model_id="policy",
                weights=self._weights,
                device_map_fn=lambda _, weights: weights.clone(),
                num_workers=workers,
                ctx=context,
            )
        return scheme

    def send(self) -> None:
        """Send the weights; return when every worker has applied them.

        Raises:
            RuntimeError: A worker is gone, or has not acknowledged in time.
        """
        watch = self._watch
        assert watch is not None
        weights = self._weights
        if not self._aliased and self._name == "MultiProcessWeightSyncScheme":
            # Handles of tensors go through a queue, and their memory becomes shared the first time.
            # Only weights in fresh memory move bytes, and leave the trainer its own.
            weights = weights.clone()
        watch.since = time.monotonic()
        if watch.error is None:
            self._scheme.send(weights)
        watch.since = None
        if watch.error is not None:
            raise RuntimeError(watch.error)

    def close(self) -> None:
        """End the workers and the scheme."""
        if self._watch is not None:
            self._watch.stop()
        self._crew.stop()
        if self._scheme is not None:
            for queue in _queues(self._scheme):
                # Messages that no worker has read must not delay the end.
                queue.cancel_join_thread()
            self._scheme.shutdown()
        self._watch = self._scheme = self._weights = None


def _queues(scheme: Any) -> list[Any]:
    names = ("_weight_init_queues", "_instruction_queues", "_ack_queues")
    return [queue for name in names for queue in getattr(scheme, name).values()]


def _for_workers(scheme: Any) -> Any:
    """Return the scheme without weights, which come through its queues.

    A fork server passes on 256 file descriptors at most, and each tensor would need one.
    """
    # The copy has the same state as a pickle.
    mine = copy.copy(scheme)
    vars(mine).pop("_device_mapping_info", None)
    if mine._shared_transport is not None:
        mine._shared_transport = copy.copy(mine._shared_transport)
        mine._shared_transport._params_map = None
        mine._shared_transport._unique_weights = None
    # A scheme that is garbage-collected tells all workers to stop. This copy must not, here or
    # there.
    mine._is_shutdown = True
    return mine


def _allow_open_files() -> None:
    """Raise the limit of open files: a tensor in a queue is one, in trainer and workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Watch(Thread):
    """Thread that ends a send whose acknowledgements will not come; TorchRL waits for ever.

    Attributes:
        since: Time at which the present send began; ``None`` without one.
        error: Reason why there will be no acknowledgement.
    """

    def __init__(self, scheme: Any, crew: Crew) -> None:
        super().__init__(name="watch", daemon=True)
        self.since: float | None = None
        self.error: str | None = None
        self._scheme = scheme
        self._sentinels = [process.sentinel for process in crew.processes]
        self._told, self._tell = multiprocessing.Pipe(duplex=False)

    def run(self) -> None:
        """Watch the workers until there is an error, or :meth:`stop`."""
        missing: list[int] = []
        while not missing:
            ready = wait([self._told, *self._sentinels], _LOOK_SECONDS)
            if self._told in ready:
                return
            since = self.since
            if ready:
                self.error = "a worker ended"
                missing = [idx for idx, each in enumerate(self._sentinels) if each in ready]
            elif since is not None and time.monotonic() - since > PATIENCE:
                self.error = f"a worker did not acknowledge in {PATIENCE:g} s"
                missing = [*range(len(self._sentinels))]
        for idx in missing:
            # This does not use put(), as a worker that was killed may have kept the lock.
            self._scheme._ack_queues[idx]._writer.send("gone")

    def stop(self) -> None:
        """End the thread."""
        self._tell.send(None)
        self.join(PATIENCE)
        self._told.close()
        self._tell.close()


def work_queues(idx: int, pipe: Connection, scheme: Any, workload: str) -> None:
    """Run a worker that applies weights when an instruction comes through a queue."""
    _begin_worker()
    _allow_open_files()
    model = WORKLOADS[workload].build()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    scheme.connect(worker_idx=idx)
    Desk(model).serve(pipe)
    # The receiver thread waits in a queue, so the process ends without it.
    os._exit(0)


def _begin_worker() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


# -- torch.distributed --------------------------------------------------------------------------


class GlooTrainer:
    """The trainer's half of the scheme that sends over the default process group, with Gloo."""

    model: nn.Module

    def __init__(self) -> None:
        self._crew = Crew(PRELOAD)
        self._scheme: Any = None
        self._context: Context | None = None
        self._weights: Any = None

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers and form the group with them."""
        from tensordict import TensorDict
        from torchrl.weight_update import DistributedWeightSyncScheme

        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self._weights = TensorDict.from_module(self.model).data
        self._context = Context(self.model)
        # The scheme's timeout is also how long a worker waits for an instruction before it asks
        # again.
        self._scheme = DistributedWeightSyncScheme(timeout=PATIENCE)
        self._scheme.init_on_sender(
            model_id="policy", context=self._context, num_workers=case.workers
        )
        port = free_port()
        handles = self._crew.start(work_gloo, case.workers, self._scheme, case.workload, port)
        greeted(handles)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=0,
            world_size=case.workers + 1,
            timeout=timedelta(seconds=PATIENCE),
        )
        self._scheme.connect()
        # A worker that answers has joined.
        ask_all(handles, "cpu")
        return handles

    def send(self) -> None:
        """Send the weights; return when every worker has applied them."""
        self._scheme.send(self._weights)

    def close(self) -> None:
        """End the workers, the group and the scheme."""
        self._crew.stop()
        leave_group()
        if self._scheme is not None:
            self._scheme.shutdown()
        self._scheme = self._context = self._weights = None


def greeted(handles: Sequence[Handle]) -> None:
    """Wait until every worker is about to join: a rendezvous does not notice a missing member."""
    for handle in handles:
        handle.answer()


def work_gloo(idx: int, pipe: Connection, scheme: Any, workload: str, port: int) -> None:
    """Run a worker that applies weights when an instruction comes through a store."""
    _begin_worker()
    context = Context(WORKLOADS[workload].build())
    rank = idx + 1
    scheme.init_on_receiver(model_id="policy", context=context, worker_idx=rank)
    pipe.send((True, None))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=scheme._num_workers + 1,
        timeout=timedelta(seconds=PATIENCE),
    )
    scheme.connect(worker_idx=rank)
    Desk(context.policy).serve(pipe)
    # The receiver thread waits in a store, so the process ends without it.
    os._exit(0)


# -- the contenders -----------------------------------------------------------------------------


def shm() -> QueueTrainer:
    """Make a trainer with shared memory, apart from its model's memory."""
    return QueueTrainer("SharedMemWeightSyncScheme", aliased=False)


def shm_aliased() -> QueueTrainer:
    """Make a trainer with shared memory that is its model."""
    return QueueTrainer("SharedMemWeightSyncScheme", aliased=True)


def pipe() -> QueueTrainer:
    """Make a trainer with queues, and with weights in fresh memory at each send."""
    return QueueTrainer("MultiProcessWeightSyncScheme", aliased=False)


def pipe_aliased() -> QueueTrainer:
    """Make a trainer with queues that carry handles to its model."""
    return QueueTrainer("MultiProcessWeightSyncScheme", aliased=True)


def gloo() -> GlooTrainer:
    """Make a trainer with torch.distributed over Gloo, on the default process group."""
    return GlooTrainer()
