"""What updaters share that send by a scheme of aiosync.

The trainer has the scheme's sender, and each worker a receiver beside its policy. So an update is
one snapshot that all workers get at the same time; it is applied between two forwards; a worker
that dies, refuses or does not answer is named in a PartialSyncError; and the price does not grow
with the number of tensors. Must not import torchrl.
"""

from __future__ import annotations

import abc
import math
import weakref
from typing import Any

from torch import nn

from aiosync.errors import LocalProtocolError
from aiosync.legacy.updaters._base import WeightUpdaterBase
from aiosync.protocol import validate_seconds
from aiosync.sync import WeightSyncScheme
from aiosync.types import SendReport

__all__ = ["SchemeWeightUpdater"]


class SchemeWeightUpdater(WeightUpdaterBase):
    """Sends by a scheme. What a subclass adds is how workers get their receivers.

    Args:
        timeout: Seconds for each update; ``None`` waits for ever.

    Ownership:
        The scheme is closed by :meth:`shutdown`, and otherwise with the collector.
    """

    last_report: SendReport | None = None
    """Who applied the newest update."""

    def __init__(self, *, timeout: float | None = 60.0) -> None:
        validate_seconds("timeout", timeout, endless=True, none=True)
        self.timeout: float | None = timeout
        self._scheme: WeightSyncScheme | None = None
        self._closed = False

    def shutdown(self) -> None:
        """Close the links to the workers, which keep the weights they have. Idempotent."""
        self._closed = True
        scheme, self._scheme = self._scheme, None
        if scheme is not None:
            scheme.shutdown()

    def _open(self, scheme: WeightSyncScheme) -> None:
        """Let workers in from now on."""
        if self._closed:
            raise LocalProtocolError("this weight updater was shut down")
        scheme.init_on_sender(model_id="policy")
        try:
            scheme.connect()
        except BaseException:  # goes on to the caller
            scheme.abort()
            raise
        self._scheme = scheme
        # Collectors do not close their updaters.
        collector = self.collector
        owner = self if collector is None else collector
        weakref.finalize(owner, scheme.abort).atexit = False

    @abc.abstractmethod
    def _connected_scheme(self, workers: list[int]) -> WeightSyncScheme | None:
        """The sender, with the receivers of these workers connected; ``None`` without workers.

        Raises:
            PartialSyncError: Some worker has no receiver.
        """

    def _worker_indices(self, worker_ids: list[Any]) -> list[int]:
        """The workers that ids mean.

        Raises:
            ConfigError: One means none.
        """
        return [int(worker_id) for worker_id in worker_ids]

    def _num_workers(self) -> int:
        return len(list(self.all_worker_ids() or ()))

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        own = type(self)._sync_weights_with_worker
        if own is not SchemeWeightUpdater._sync_weights_with_worker:
            super()._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
            return
        weights = self._resolve_weights(policy_or_weights)
        workers = self._resolve_workers(worker_ids)
        chosen = [each for each in workers or () if not self._skip_update(each)]
        if chosen:
            self._send(weights, chosen)

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self._send(server_weights, [worker_id])

    def _send(self, weights: Any, worker_ids: list[Any]) -> None:
        if weights is None:
            weights = self._weights_of_collector()
        scheme = self._connected_scheme(self._worker_indices(worker_ids))
        if scheme is None:
            self._copy_locally(weights, worker_ids)
            return
        indices = self._worker_indices(worker_ids)
        # Somebody who is dead is reported once to who wants everybody.
        everybody = set(indices) == set(range(self._num_workers()))
        self._dispatch(scheme, weights, None if everybody else indices)

    def _dispatch(
        self, scheme: WeightSyncScheme, weights: Any, worker_ids: list[int] | None
    ) -> None:
        self.last_report = scheme.send(weights, worker_ids, timeout=self._seconds)

    @property
    def _seconds(self) -> float:
        return math.inf if self.timeout is None else self.timeout

    def _copy_locally(self, weights: Any, worker_ids: list[Any]) -> None:
        """Update where there are no workers to send to."""
        raise LocalProtocolError(f"{type(self).__name__}: there are no workers {worker_ids}")

    def _weights_of_collector(self) -> Any:
        for name in ("_fallback_policy", "policy"):
            policy = getattr(self.collector, name, None)
            if isinstance(policy, nn.Module):
                return policy
        raise LocalProtocolError(
            f"{type(self).__name__}: there is nothing to send: pass weights to "
            "update_policy_weights_()"
        )
