"""The updater of distributed collectors.

The loop of a worker is TorchRL's, and there is no place for a receiver of ours. So this sends by
the older generation's transport, which speaks with that loop: from a snapshot, to all workers at
the same time, with deadlines, and looking whether the workers live. Must not import torchrl.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.legacy.remote import DistributedTransport, is_free
from aiosync.legacy.transports import Deliveries
from aiosync.legacy.updaters.base import AtOnceWeightUpdater, copy_weights
from aiosync.legacy.updaters.worker import make_private

__all__ = ["DistributedWeightUpdater"]

_PAUSE_SECONDS = 0.005  # between two looks at who may be given an order


class DistributedWeightUpdater(AtOnceWeightUpdater):
    """Sends weights to the workers of a ``DistributedCollector``.

    Pass it to the collector's constructor, and leave out what the collector will know; or assign
    it to ``collector.weight_updater``. Only in the constructor can it see to it that policies of
    workers on this host share no memory with the trainer's. A worker takes an update when it has
    collected its batch.

    Args:
        store: The store of the collector.
        policy_weights: Live weights of updates that bring none, with the names that the workers
            have; of the collector's policy, if omitted.
        num_workers: How many workers there are.
        sync: Kept for TorchRL's signature: an update always waits for the workers.
        timeout: Seconds for each update; ``None`` waits for ever.

    Raises:
        ConfigError: The timeout is not positive.

    An update raises :class:`~aiosync.PartialSyncError`, which names each worker that died or did
    not answer in time. Nothing is known of how workers of a cluster's scheduler live: those are
    only waited for.
    """

    def __init__(
        self,
        store: Any = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
        sync: bool = True,
        *,
        timeout: float | None = 60.0,
    ) -> None:
        del sync
        super().__init__(timeout)
        self._store = store
        self.policy_weights = policy_weights
        self.num_workers = num_workers
        self._transports: dict[int, DistributedTransport] = {}

    def register_collector(self, collector: Any) -> None:
        """Remember the collector, and have its workers get policies of their own.

        Args:
            collector: The collector.

        Raises:
            ConfigError: There is a collector already.
        """
        super().register_collector(collector)
        policy = getattr(collector, "_policy_to_send", None)
        if isinstance(policy, nn.Module) and not hasattr(collector, "jobs"):
            collector._policy_to_send = _private_when_unpickled(policy)

    def all_worker_ids(self) -> Iterable[int]:
        """Indices of the workers, from 0."""
        if self.num_workers is not None:
            return range(self.num_workers)
        return range(getattr(self.collector, "num_workers", 0))

    def _get_server_weights(self) -> Any:
        return self._known("policy_weights", self.policy_weights)

    def _resolve_workers(self, worker_ids: Any) -> list[int]:
        # TorchRL's collectors pass a rank, which counts from 1; lists are of indices from 0.
        if isinstance(worker_ids, int):
            if worker_ids < 1:
                raise LocalProtocolError(f"a worker's rank is at least 1, got {worker_ids}")
            worker_ids = [worker_ids - 1]
        every = list(self.all_worker_ids())
        chosen = every if worker_ids is None else [int(each) for each in worker_ids]
        if wrong := [idx for idx in chosen if idx not in every]:
            raise ConfigError(f"there are no workers {wrong}: there are {len(every)}")
        return chosen

    def _send(self, weights: Any, workers: list[int]) -> None:
        # Workers receive what their policy has, in an order of TorchRL's: so a part of the
        # weights, or another order, is brought into that form first.
        factories = getattr(self.collector, "policy_factory", None) or ()
        if any(factory is not None for factory in factories):
            raise ConfigError(
                "workers that make their policy with policy_factory= receive nothing from a "
                "DistributedWeightUpdater: use weight_sync_schemes= instead"
            )
        snapshot = self._known("policy_weights", self.policy_weights).detach().clone()
        copy_weights(snapshot, weights)
        sending, waiting = Deliveries(), {idx: self._transport(idx) for idx in workers}
        while waiting:
            left = math.inf
            if self.timeout is not None:
                left = sending.began + self.timeout - time.monotonic()
            # Nobody waits for another one, who may never take the last order.
            for idx in [idx for idx, each in waiting.items() if is_free(each) or left <= 0]:
                transport = waiting.pop(idx)
                transport.timeout = None if self.timeout is None else max(0.0, left)
                sending.begin(idx, functools.partial(transport.order, snapshot))
            if waiting:
                time.sleep(_PAUSE_SECONDS)
        sending.finish_all(self.timeout)
        sending.raise_failures()

    def _transport(self, idx: int) -> DistributedTransport:
        if idx not in self._transports:
            store, jobs = self._known("_store", self._store), getattr(self.collector, "jobs", ())
            made = DistributedTransport(store, idx + 1, timeout=self.timeout)
            if idx < len(jobs):
                made.is_alive = getattr(jobs[idx], "is_alive", made.is_alive)
            self._transports[idx] = made
        return self._transports[idx]


def _private_when_unpickled(policy: nn.Module) -> nn.Module:
    """A copy of a policy, each unpickled copy of which has memory of its own.

    torch pickles tensors for a process of this host as references to memory that all share.
    """
    twin = make_private(copy.deepcopy(policy))
    twin.__dict__["__reduce_ex__"] = functools.partial(_reduced, twin)
    return cast("nn.Module", twin)


def _reduced(twin: nn.Module, protocol: int) -> tuple[Any, ...]:
    del protocol
    plain = object.__new__(type(twin))
    plain.__dict__.update(twin.__dict__)
    del plain.__dict__["__reduce_ex__"]
    return make_private, (plain,)
