"""Contenders: aiosync to Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

import aiosync
import aiosync.sync
from aiosync.bench import PATIENCE, WORKLOADS, AsyncTrainer, Case, Desk, Handle, fill
from tests.bench.compare.cluster import ActorHandle, end_actors, join_cluster, start_actors

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AsyncRayTrainer", "FacadeRayTrainer", "ray", "ray_facade", "ray_network"]


class _AsyncActor:
    """A worker on Ray's event loop, on which updates arrive."""

    def __init__(self, idx: int, workload: str) -> None:
        torch.set_num_threads(1)
        self._idx = idx
        self._desk = Desk(WORKLOADS[workload].build())

    async def join(self, scheme: Any) -> None:
        self._scheme = scheme
        scheme.init_on_receiver(model_id="policy", model=self._desk.model, worker_idx=self._idx)
        await scheme.connect(timeout=PATIENCE)

    async def reply(self, question: str, argument: Any) -> tuple[bool, Any]:
        return self._desk.reply(question, argument)


class _FacadeActor:
    """A worker of classic code: Ray runs its methods one by one, without a loop."""

    def __init__(self, idx: int, workload: str) -> None:
        torch.set_num_threads(1)
        self._idx = idx
        self._model = WORKLOADS[workload].build()

    def join(self, scheme: Any) -> None:
        self._scheme = scheme
        self._desk = Desk(self._model, scheme.reading)
        scheme.init_on_receiver(model_id="policy", model=self._model, worker_idx=self._idx)
        scheme.connect(timeout=PATIENCE)

    def reply(self, question: str, argument: Any) -> tuple[bool, Any]:
        return self._desk.reply(question, argument)


class AsyncRayTrainer(AsyncTrainer):
    """Trainer with the async API, also in the actors."""

    def __init__(self, *, shared_memory: bool = True) -> None:
        super().__init__("ray")
        self._shared_memory = shared_memory
        self._actors: list[Any] = []

    async def open(self, case: Case) -> Sequence[Handle]:
        """Start the actors, on loops of the same kind as this one, and join them."""
        plain = isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
        variables = {"RAY_USE_UVLOOP": "0"} if plain else None
        # This blocks, but nothing else runs on this loop yet.
        join_cluster()
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self.scheme = aiosync.RayWeightSyncScheme(shared_memory=self._shared_memory)
        self.scheme.init_on_sender(model_id="policy", model=self.model, num_workers=case.workers)
        self._actors = start_actors(_AsyncActor, case.workers, case.workload, variables=variables)
        joining = [actor.join.remote(self.scheme) for actor in self._actors]
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(self.scheme.connect(timeout=PATIENCE), *joining)
        return [ActorHandle(actor) for actor in self._actors]

    async def close(self) -> None:
        """End scheme and actors; the cluster stays until this process ends."""
        if self.scheme is not None:
            try:
                await self.scheme.aclose()
            finally:
                self.scheme = None
                end_actors(self._actors)


class FacadeRayTrainer:
    """Trainer with ``aiosync.sync``, also in the actors."""

    model: nn.Module

    def __init__(self) -> None:
        self.scheme: Any = None
        self._actors: list[Any] = []

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the actors and join them."""
        ray = join_cluster()
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self.scheme = aiosync.sync.RayWeightSyncScheme()
        self.scheme.init_on_sender(model_id="policy", model=self.model, num_workers=case.workers)
        self._actors = start_actors(_FacadeActor, case.workers, case.workload)
        joining = [actor.join.remote(self.scheme) for actor in self._actors]
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(self.scheme.connect, timeout=PATIENCE)
            try:
                ray.get(joining, timeout=PATIENCE)
            except ray.exceptions.RayError:
                # An actor that fails must not cost all the patience.
                self.scheme.abort()
                raise
            connecting.result()
        return [ActorHandle(actor) for actor in self._actors]

    def send(self) -> None:
        """Send the weights; return when every worker has applied them."""
        self.scheme.send()

    def close(self) -> None:
        """End scheme and actors; the cluster stays until this process ends."""
        if self.scheme is not None:
            try:
                self.scheme.shutdown()
            finally:
                self.scheme = None
                end_actors(self._actors)


def ray() -> AsyncRayTrainer:
    """Make a trainer of Ray actors on its own host."""
    return AsyncRayTrainer()


def ray_network() -> AsyncRayTrainer:
    """Make a trainer of actors as if on other hosts, over Ray's object store."""
    return AsyncRayTrainer(shared_memory=False)


def ray_facade() -> FacadeRayTrainer:
    """Make a blocking trainer of Ray actors."""
    return FacadeRayTrainer()
