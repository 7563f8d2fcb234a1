"""TorchRL's scheme for Ray actors, which moves weights over Gloo and signals by calls of actors."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiosync.bench import PATIENCE, WORKLOADS, Case, Desk, Handle, fill
from tests.bench.compare.cluster import ActorHandle, end_actors, join_cluster, start_actors

if TYPE_CHECKING:
    from torch import nn

__all__ = ["RayTrainer", "ray"]


class _Collector:
    """The part of a collector that the scheme uses in a receiver."""

    def __init__(self, policy: nn.Module, idx: int) -> None:
        self.policy = policy
        self.worker_idx = idx

    def update_policy_weights_(self, **_: Any) -> None:
        """Do nothing; the scheme only needs the method to be there."""


class _Actor:
    """A worker, with the methods that the scheme calls."""

    def __init__(self, idx: int, workload: str) -> None:
        torch.set_num_threads(1)
        self._idx = idx
        self._collector = _Collector(WORKLOADS[workload].build(), idx)
        self._desk = Desk(self._collector.policy)

    def take(self, scheme: Any) -> None:
        self._scheme = scheme
        scheme.init_on_receiver(model_id="policy", context=self._collector, worker_idx=self._idx)

    def join(self) -> None:
        self._scheme.connect(worker_idx=self._idx)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        self._scheme.receive()

    def reply(self, question: str, argument: Any) -> tuple[bool, Any]:
        return self._desk.reply(question, argument)


class RayTrainer:
    """TorchRL's ``RayWeightSyncScheme``, which sends views of the model's own memory."""

    model: nn.Module

    def __init__(self) -> None:
        self._scheme: Any = None
        self._weights: Any = None
        self._actors: list[Any] = []

    def open(self, case: Case) -> Sequence[Handle]:
        """Start the actors and join them, which also sends the first weights."""
        ray = join_cluster()
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self._weights = (
            importlib.import_module("tensordict").TensorDict.from_module(self.model).data
        )
        self._scheme = importlib.import_module("torchrl.weight_update").RayWeightSyncScheme()
        self._actors = start_actors(_Actor, case.workers, case.workload)
        self._scheme.init_on_sender(
            model_id="policy", remote_collectors=self._actors, model=self.model
        )
        taking = [actor.take.remote(self._scheme) for actor in self._actors]
        ray.get(taking, timeout=PATIENCE)
        joining = [actor.join.remote() for actor in self._actors]
        # connect() gives up by itself after a minute.
        self._scheme.connect()
        ray.get(joining, timeout=PATIENCE)
        return [ActorHandle(actor) for actor in self._actors]

    def send(self) -> None:
        """Send the weights; return when every worker has applied them."""
        self._scheme.send(self._weights)

    def close(self) -> None:
        """End scheme and actors; the cluster stays until this process ends."""
        if self._scheme is not None:
            try:
                self._scheme.shutdown()
            finally:
                self._scheme = self._weights = None
                end_actors(self._actors)


def ray() -> RayTrainer:
    """Make a trainer with Gloo between actors."""
    return RayTrainer()
