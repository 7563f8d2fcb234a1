"""aiosync over ``torch.distributed.rpc``: trainer and workers are one RPC group for each case."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import uvloop
from torch.distributed import rpc as torch_rpc

import aiosync
import aiosync.sync
from aiosync.bench import (
    PATIENCE,
    WORKLOADS,
    AsyncTrainer,
    Case,
    Crew,
    Handle,
    fill,
    work_async,
)
from tests.bench.contenders import work_facade

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AsyncRPCTrainer", "FacadeRPCTrainer", "rpc", "rpc_facade", "rpc_network"]

_LOOK_SECONDS = 0.01

_counter = itertools.count()


# -- groups -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """A trainer and its workers, which all have a copy of this.

    Attributes:
        port: Port of the trainer's store.
        names: Names of the members by rank, the trainer's first. No two groups of a process share
            any, as RPC numbers collectives by the names of their members.
        number: Number of groups that the trainer was in before.
    """

    port: int
    names: tuple[str, ...]
    number: int

    def join(self, rank: int) -> None:
        """Join the group, and wait until all members are there."""
        # RPC keys the messages between members by the number of groups that a process has been in,
        # and workers have been in none.
        torch_rpc._init_counter = self.number
        options = torch_rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{self.port}", rpc_timeout=PATIENCE
        )
        # The function has no types.
        init: Any = torch_rpc.init_rpc
        init(
            self.names[rank],
            rank=rank,
            world_size=len(self.names),
            rpc_backend_options=options,
        )


def _new_group(workers: int) -> _Group:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    number = next(_counter)
    names = [f"bench{number}-trainer", *(f"bench{number}-worker{idx}" for idx in range(workers))]
    return _Group(port, tuple(names), number)


def _leave() -> None:
    """Leave the group that this process is in."""
    # Leaving gracefully hangs in all groups of a process but the first, as RPC counts its barriers.
    torch_rpc.shutdown(graceful=False)


def _do(call: Callable[[], None], what: str, peers: Sequence[int]) -> None:
    """Make a call that has no deadline of its own; give it up when a peer ends or after a while.

    Args:
        call: Runs in a thread, which is left behind if the call does not end.
        what: Description for the error.
        peers: Sentinels of processes.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as exc:  # noqa: BLE001  # raised below
            errors.append(exc)

    thread = threading.Thread(target=run, name="aiosync-bench-rpc", daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if wait(peers, 0):
            # Perhaps the call notices the end of the peer, too, and says more about it.
            thread.join(1.0)
            if not errors:
                raise RuntimeError(f"{what}: a process ended meanwhile")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not done after {PATIENCE:g} s")
    if errors:
        raise errors[0]


class _Membership:
    """The trainer's side of one group after another."""

    def __init__(self) -> None:
        # Otherwise workers would warn of the trainer that leaves. Torch reads this variable when it
        # is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self.crew = Crew()
        self._joined = False
        self._broken = False

    def start(self, case: Case, target: Callable[..., None], *args: Any) -> Sequence[Handle]:
        """Start the workers, and make a group with them. Blocks."""
        if self._broken:
            raise RuntimeError("an RPC group of an earlier case was never complete")
        group = _new_group(case.workers)
        handles = self.crew.start(_work, case.workers, group, target, *args)
        self._broken = True
        peers = [process.sentinel for process in self.crew.processes]
        _do(lambda: group.join(0), "making an RPC group", peers)
        self._broken, self._joined = False, True
        return handles

    def end(self) -> None:
        """End the group and the workers. Blocks."""
        try:
            # The trainer leaves first, as it would complain of workers that left before.
            if self._joined:
                self._joined = False
                _do(_leave, "leaving an RPC group", [])
        finally:
            self.crew.stop()


# -- workers ------------------------------------------------------------------------------------


def _work(
    idx: int, pipe: Connection, group: _Group, target: Callable[..., None], *args: Any
) -> None:
    """Stay in the group while ``target(idx, pipe, *args)`` runs."""
    # torch warns about its own future.
    warnings.simplefilter("ignore")
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    _do(lambda: group.join(idx + 1), "joining an RPC group", [trainer.sentinel])
    try:
        target(idx, pipe, *args)
    finally:
        _leave()


# -- the trainer --------------------------------------------------------------------------------


class AsyncRPCTrainer(AsyncTrainer):
    """Trainer with the async API, also in the workers."""

    def __init__(self, *, shared_memory: bool = True) -> None:
        super().__init__("rpc")
        self._shared_memory = shared_memory
        self._membership = _Membership()
        self.crew = self._membership.crew

    async def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers, on loops of the same kind as this one, and join them."""
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self.scheme = aiosync.RPCWeightSyncScheme(
            address="tcp://127.0.0.1:0", shared_memory=self._shared_memory
        )
        self.scheme.init_on_sender(model_id="policy", model=self.model, num_workers=case.workers)
        loop: Callable[[], Any] = uvloop.new_event_loop
        if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            loop = asyncio.new_event_loop
        handles = await asyncio.to_thread(
            self._membership.start, case, work_async, self.scheme, case.workload, loop
        )
        await self.scheme.connect(processes=self.crew.processes, timeout=PATIENCE)
        return handles

    async def close(self) -> None:
        """End scheme, workers and group."""
        if self.scheme is not None:
            scheme, self.scheme = self.scheme, None
            try:
                await scheme.aclose()
            finally:
                await asyncio.to_thread(self._membership.end)


class FacadeRPCTrainer:
    """Trainer with ``aiosync.sync``, also in the workers."""

    model: nn.Module

    def __init__(self) -> None:
        self._membership = _Membership()
        self.scheme: Any = None

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers and join them."""
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self.scheme = aiosync.sync.RPCWeightSyncScheme(address="tcp://127.0.0.1:0")
        self.scheme.init_on_sender(model_id="policy", model=self.model, num_workers=case.workers)
        handles = self._membership.start(case, work_facade, self.scheme, case.workload)
        self.scheme.connect(processes=self._membership.crew.processes, timeout=PATIENCE)
        return handles

    def send(self) -> None:
        """Send the weights; return when every worker has applied them."""
        self.scheme.send()

    def close(self) -> None:
        """End scheme, workers and group."""
        if self.scheme is not None:
            scheme, self.scheme = self.scheme, None
            try:
                scheme.shutdown()
            finally:
                self._membership.end()


def rpc() -> AsyncRPCTrainer:
    """Make a trainer over torch.distributed.rpc."""
    return AsyncRPCTrainer()


def rpc_network() -> AsyncRPCTrainer:
    """Make a trainer over torch.distributed.rpc, with workers as if on other hosts."""
    return AsyncRPCTrainer(shared_memory=False)


def rpc_facade() -> FacadeRPCTrainer:
    """Make a blocking trainer over torch.distributed.rpc."""
    return FacadeRPCTrainer()
