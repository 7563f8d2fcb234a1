"""The updater of multi-process collectors.

TorchRL's worker loop has a message for updates, ``(weights, "update")`` in its pipe. It is not
used here: an update that arrives while a worker of a ``MultiAsyncCollector`` collects makes that
worker drop its batch, and then wait for an order that never comes. Besides, TorchRL puts the
trainer's policy into memory that the workers share, so that every optimizer step would show in
their actions without any update.

Instead, what TorchRL calls in each worker to make its collector is put in brackets (see
:mod:`aiosync.legacy.updaters._worker`): the policy gets memory of its own, and the receiver of a
shared-memory scheme, which carries all updates. Must not import torchrl.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.legacy.updaters._local import copy_weights
from aiosync.legacy.updaters._sending import SchemeWeightUpdater
from aiosync.legacy.updaters._worker import WorkerCollector
from aiosync.sync import SharedMemWeightSyncScheme, WeightSyncScheme

__all__ = ["MultiProcessedWeightUpdater"]


class MultiProcessedWeightUpdater(SchemeWeightUpdater):
    """Sends weights to the workers of a ``MultiSyncCollector`` or a ``MultiAsyncCollector``.

    Pass it to the collector's constructor, as ``weight_updater=``: its workers get what they
    need for it as they start. Each then has a policy in memory of its own, that changes with an
    update and never before, and not in the middle of a forward. An update may come while a
    worker collects.

    Without a collector of this kind, weights are copied into ``policy_weights``, which whoever
    shares that memory sees.

    Args:
        get_server_weights: Returns the weights of an update that brings none. ``None`` takes
            the policy that the collector was given.
        policy_weights: Its keys are the workers: indices, or devices, each of which means all
            workers with that ``policy_device``. Left empty, the workers of the collector.
        timeout: Seconds for each update; ``None`` waits for ever.

    Raises:
        ConfigError: The timeout is not positive.

    An update raises :class:`~aiosync.PartialSyncError`, which names each worker that died,
    refused the weights or did not answer in time; the others have them.
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], Any] | None,
        policy_weights: Mapping[Any, Any],
        timeout: float | None = 60.0,
    ) -> None:
        super().__init__(timeout=timeout)
        self.weights_getter = get_server_weights
        self._policy_weights = policy_weights

    def register_collector(self, collector: Any) -> None:
        """Get ready for a collector whose workers have not started. Starts listening.

        Args:
            collector: The collector.

        Raises:
            ConfigError: There is a collector already.
            LocalProtocolError: Its workers run already.
        """
        if self._collector_wrs:
            raise ConfigError(f"this {type(self).__name__} already has a collector")
        multi = any(cls.__name__ == "MultiCollector" for cls in type(collector).__mro__)
        if multi and hasattr(collector, "procs"):
            raise LocalProtocolError(
                "the workers of this collector are already running: pass the "
                f"{type(self).__name__} to its constructor, as weight_updater="
            )
        super().register_collector(collector)
        if not multi:
            return
        # In place: graphs that were captured or compiled go on with the addresses they have.
        scheme = SharedMemWeightSyncScheme(apply_copy=True, strict=False, timeout=self.timeout)
        self._open(scheme)
        collector.collector_class = WorkerCollector(collector.collector_class, copy.copy(scheme))

    def all_worker_ids(self) -> Iterable[Any]:
        """The keys of ``policy_weights``, or all workers of the collector if it is empty."""
        return list(self._policy_weights) or list(range(self._num_workers()))

    def _num_workers(self) -> int:
        return int(getattr(self.collector, "num_workers", 0))

    def _get_server_weights(self) -> Any:
        return None if self.weights_getter is None else self.weights_getter()

    def _connected_scheme(self, workers: list[int]) -> WeightSyncScheme | None:
        del workers  # they connected before the collector was ready
        if self._closed:
            raise LocalProtocolError("this weight updater was shut down")
        return self._scheme

    def _worker_indices(self, worker_ids: list[Any]) -> list[int]:
        if self._scheme is None:
            return []
        devices = list(getattr(self.collector, "policy_device", ()))
        indices: list[int] = []
        for worker_id in worker_ids:
            if isinstance(worker_id, int):
                meant = [worker_id] if 0 <= worker_id < self._num_workers() else []
            else:
                device = None if worker_id is None else torch.device(worker_id)
                meant = [idx for idx, each in enumerate(devices) if each == device]
            if not meant:
                raise ConfigError(
                    f"{worker_id!r} is not a worker: there are {self._num_workers()}, with the "
                    f"policy devices {devices}"
                )
            indices += meant
        return sorted(set(indices))

    def _copy_locally(self, weights: Any, worker_ids: list[Any]) -> None:
        for worker_id in worker_ids:
            if worker_id not in self._policy_weights:
                raise ConfigError(f"policy_weights has no weights for worker {worker_id!r}")
        for worker_id in worker_ids:
            copy_weights(self._policy_weights[worker_id], weights)
