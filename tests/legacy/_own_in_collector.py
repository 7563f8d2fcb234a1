"""Program: a user's scheme for TorchRL in a collector, with TorchRL's base class or aiosync's."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import multiprocessing as mp

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import MultiSyncCollector

from tests.legacy._updater_workers import Line

if sys.argv[1] == "torchrl":
    from torchrl.weight_update import WeightSyncScheme
else:
    from aiosync.legacy import WeightSyncScheme  # type: ignore[assignment]

WORKERS = 2


class QueueTransport:
    def __init__(self, updates: Any, answers: Any) -> None:
        self.updates, self.answers = updates, answers

    def send_weights(self, weights: Any) -> None:
        self.updates.put(weights.data.clone())

    def wait_ack(self) -> None:
        assert self.answers.get(timeout=30) == "updated"

    def receive_weights(
        self, timeout: Any = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        found = self.updates.get(timeout=timeout)
        if model is not None:
            strategy.apply_weights(model, found)
        return found

    def send_ack(self, message: str = "updated") -> None:
        self.answers.put(message)

    def setup_connection_and_weights_on_sender(self) -> None:
        pass

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> Any:
        return self.updates.get(timeout=60)


class QueueScheme(WeightSyncScheme):
    def __init__(self) -> None:
        ctx = mp.get_context("spawn")
        self.queues = [[ctx.Queue() for _ in range(3)] for _ in range(WORKERS)]
        super().__init__("tensordict")

    def create_transport(self, **kwargs: Any) -> Any:
        return QueueTransport(**kwargs)

    def _init_on_sender_impl(self, *, model_id: str, context: Any, **_: Any) -> None:
        self.model_id, self.context = model_id, context
        for idx in range(context.num_workers):
            updates, answers, _orders = self.queues[idx]
            self._register_worker_sender(worker_idx=idx, updates=updates, answers=answers)

    def _init_on_receiver_impl(
        self, model_id: str, context: Any = None, *, worker_idx: int, model: Any = None, **_: Any
    ) -> None:
        self.model_id, self.worker_idx = model_id, worker_idx
        if context is not None:
            self.context = context
        if model is not None:
            self.model = model
        updates, answers, _orders = self.queues[worker_idx]
        self._register_transport_receiver(updates=updates, answers=answers)

    def _setup_connection_and_weights_on_sender_impl(self, **_: Any) -> None:
        first = self.prepare_weights(
            weights=None, model_id=self.model_id, strategy=self._strategy, context=self.context
        )
        for transport in self._iterate_transports():
            transport.send_weights(first)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        super()._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx)
        self._start_background_receiver()

    def _wait_for_instruction(self, timeout: float | None = None) -> Any:
        return self.queues[self.worker_idx][2].get()

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        for _, _, orders in self.queues:
            orders.put("receive")
        super().send(weights, worker_ids)


def main() -> None:
    policy = TensorDictModule(torch.nn.Linear(1, 1), ["observation"], ["action"])
    with torch.no_grad():
        policy.module.weight.zero_()
        policy.module.bias.zero_()
    collector = MultiSyncCollector(
        [Line] * WORKERS,
        policy,
        frames_per_batch=20,
        total_frames=60,
        weight_sync_schemes={"policy": QueueScheme()},
        track_policy_version=True,
    )
    try:
        for batch, data in enumerate(collector):
            versions = data["next", "policy_version"].unique().tolist()
            sys.stdout.write(f"{data['action'].unique().tolist()} {versions}\n")
            with torch.no_grad():
                policy.module.bias.fill_(batch + 1.0)
            collector.update_policy_weights_()
    finally:
        collector.shutdown()


if __name__ == "__main__":
    main()
