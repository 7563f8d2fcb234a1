"""The updaters of collectors whose workers are called from afar: over RPC, and in Ray.

TorchRL's own classes call ``update_policy_weights_()`` of each remote collector with all weights,
and in Ray never look whether it worked. Here the first update calls a function of aiosync there,
which connects a receiver to the policy; all weights then go by aiosync's scheme for that engine.
Updates therefore arrive while a worker collects, too, and between two forwards. Must not import
torchrl, and Ray only by its loader.
"""

from __future__ import annotations

import abc
import copy
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed import rpc

from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ApplyError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
)
from aiosync.legacy.updaters._sending import SchemeWeightUpdater
from aiosync.legacy.updaters._worker import receive
from aiosync.sync import RayWeightSyncScheme, RPCWeightSyncScheme, WeightSyncScheme
from aiosync.transports._ray_store import need_cluster
from aiosync.types import SendReport

__all__ = ["RPCWeightUpdater", "RayWeightUpdater"]


class _RemoteWeightUpdater(SchemeWeightUpdater):
    """Connects receivers by calls of an engine, when they are needed for the first time."""

    _pending = False

    def __init__(self, policy_weights: Any, timeout: float | None) -> None:
        super().__init__(timeout=timeout)
        self.policy_weights = policy_weights
        self._installed: set[int] = set()

    @abc.abstractmethod
    def _make_scheme(self) -> WeightSyncScheme:
        """A scheme of the engine."""

    @abc.abstractmethod
    def _install(self, workers: list[int], scheme: WeightSyncScheme) -> dict[int, AiosyncError]:
        """Connect receivers in these workers; says why it failed where it did."""

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def all_worker_ids(self) -> Iterable[int]:
        """Indices of the workers, from 0."""
        return range(self._num_workers())

    def _worker_indices(self, worker_ids: list[Any]) -> list[int]:
        indices = super()._worker_indices(worker_ids)
        if wrong := [idx for idx in indices if not 0 <= idx < self._num_workers()]:
            raise ConfigError(f"there are no workers {wrong}: there are {self._num_workers()}")
        return indices

    def _connected_scheme(self, workers: list[int]) -> WeightSyncScheme:
        if self._scheme is None:
            self._open(self._make_scheme())
            self._installed.clear()
        scheme = self._scheme
        assert scheme is not None
        missing = [idx for idx in workers if idx not in self._installed]
        if missing:
            failed = self._install(missing, copy.copy(scheme))
            self._installed.update(set(missing) - failed.keys())
            if failed:
                raise PartialSyncError(failed=failed)
        return scheme


class RPCWeightUpdater(_RemoteWeightUpdater):
    """Sends weights to the workers of an ``RPCCollector``.

    The nodes exist only when the collector does: assign the updater to
    ``collector.weight_updater``, or pass it to the constructor and leave out what the collector
    will know. The remote collectors have to step their policy themselves, as ``Collector`` does.

    Args:
        collector_infos: Kept for TorchRL's signature.
        collector_class: Kept for TorchRL's signature.
        collector_rrefs: References to the remote collectors; those of the collector that is
            registered, if omitted.
        policy_weights: Live weights of updates that bring none; of the collector's policy, if
            omitted.
        num_workers: How many remote collectors there are; as many as references, if omitted.
        timeout: Seconds for each update; ``None`` waits for ever.

    An update raises :class:`~aiosync.PartialSyncError`, which names each worker that died,
    refused the weights or did not answer in time.
    """

    def __init__(
        self,
        collector_infos: Sequence[Any] | None = None,
        collector_class: Any = None,
        collector_rrefs: Sequence[Any] | None = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
        *,
        timeout: float | None = 60.0,
    ) -> None:
        super().__init__(policy_weights, timeout)
        self.collector_infos = collector_infos
        self.collector_class = collector_class
        self.collector_rrefs = collector_rrefs
        self.num_workers = num_workers

    def push_weights(
        self,
        policy_or_weights: Any = None,
        worker_ids: Any = None,
        *,
        weights: Any = None,
        wait: bool = True,
    ) -> None:
        """Update the workers, then call the post hooks.

        Args:
            policy_or_weights: As for :meth:`WeightUpdaterBase.push_weights`.
            worker_ids: Indices from 0; ``None`` for all.
            weights: The same as ``policy_or_weights``.
            wait: Otherwise a snapshot is sent in the background, and the next update raises
                what went wrong with it.
        """
        scheme, pending = self._scheme, self._pending
        self._pending = False
        if pending and scheme is not None:
            self.last_report: SendReport | None = scheme.wait_async()
        self._waits = wait
        super().push_weights(
            policy_or_weights if policy_or_weights is not None else weights, worker_ids
        )

    _waits = True

    def _dispatch(
        self, scheme: WeightSyncScheme, weights: Any, worker_ids: list[int] | None
    ) -> None:
        if self._waits:
            super()._dispatch(scheme, weights, worker_ids)
        else:
            scheme.send_async(weights, worker_ids, timeout=self._seconds)
            self._pending = True

    def _references(self) -> Sequence[Any]:
        found = self.collector_rrefs
        if found is None:
            found = getattr(self.collector, "collector_rrefs", None)
        if found is None:
            raise LocalProtocolError(
                "RPCWeightUpdater: there are no remote collectors: pass collector_rrefs=, or "
                "register an RPCCollector"
            )
        return found

    def _num_workers(self) -> int:
        return len(self._references()) if self.num_workers is None else self.num_workers

    def _make_scheme(self) -> WeightSyncScheme:
        return RPCWeightSyncScheme(
            apply_copy=True, strict=False, timeout=self.timeout, reconnect=0.0
        )

    def _install(self, workers: list[int], scheme: WeightSyncScheme) -> dict[int, AiosyncError]:
        references = self._references()
        futures: dict[int, Any] = {}
        failed: dict[int, AiosyncError] = {}
        for idx in workers:
            reference = references[idx]
            args = (reference, scheme, idx)
            # Zero is for ever.
            seconds = self.timeout or 0.0
            try:
                futures[idx] = rpc.rpc_async(
                    reference.owner(), receive_by_rpc, args=args, timeout=seconds
                )
            except RuntimeError as exc:
                failed[idx] = _translated(idx, exc)
        for idx, future in futures.items():
            try:
                future.wait()
            except Exception as exc:  # noqa: BLE001 - of any type; in the PartialSyncError
                failed[idx] = _translated(idx, exc)
        return failed


class RayWeightUpdater(_RemoteWeightUpdater):
    """Sends weights to the actors of a ``RayCollector``.

    The remote collectors have to step their policy themselves, as ``Collector`` does. An actor
    does one thing after the other: the first update waits for the batch that it collects.

    Args:
        policy_weights: Live weights of updates that bring none; of the collector's policy, if
            omitted.
        remote_collectors: The actors; those of the collector that is registered, if omitted.
        max_interval: How many updates of a worker may be left out between two that reach it.
        timeout: Seconds for each update; ``None`` waits for ever.

    An update raises :class:`~aiosync.PartialSyncError`, which names each worker that died,
    refused the weights or did not answer in time.
    """

    def __init__(
        self,
        policy_weights: Any = None,
        remote_collectors: Sequence[Any] | None = None,
        max_interval: int = 0,
        *,
        timeout: float | None = 60.0,
    ) -> None:
        super().__init__(policy_weights, timeout)
        self.remote_collectors = remote_collectors
        self.max_interval: int = max(0, max_interval)
        self._batches_since_weight_update: Counter[int] = Counter()

    def _skip_update(self, worker_id: int) -> bool:
        self._batches_since_weight_update[worker_id] += 1
        if self._batches_since_weight_update[worker_id] <= self.max_interval:
            return True
        self._batches_since_weight_update[worker_id] = 0
        return False

    def _actors(self) -> Sequence[Any]:
        found = self.remote_collectors
        if found is None:
            found = getattr(self.collector, "remote_collectors", None)
        if found is None:
            raise LocalProtocolError(
                "RayWeightUpdater: there are no remote collectors: pass remote_collectors=, or "
                "register a RayCollector"
            )
        return found

    def _num_workers(self) -> int:
        return len(self._actors())

    def _make_scheme(self) -> WeightSyncScheme:
        # In place: the object store's memory is read-only, and policies may be trained.
        return RayWeightSyncScheme(
            apply_copy=True, strict=False, timeout=self.timeout, reconnect=0.0
        )

    def _install(self, workers: list[int], scheme: WeightSyncScheme) -> dict[int, AiosyncError]:
        ray = need_cluster()
        actors = self._actors()
        give_up = None if self.timeout is None else time.monotonic() + self.timeout
        calls = {idx: actors[idx].__ray_call__.remote(receive, scheme, idx) for idx in workers}
        failed: dict[int, AiosyncError] = {}
        for idx, call in calls.items():
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            try:
                ray.get(call, timeout=left)
            except ray.exceptions.GetTimeoutError:
                failed[idx] = AckTimeout(
                    f"the actor of worker {idx} did not answer within {self.timeout:g} s",
                    worker_ids=[idx],
                )
            except ray.exceptions.RayActorError as exc:
                failed[idx] = PeerClosed(f"the actor of worker {idx} has ended: {_line(exc)}")
            except ray.exceptions.RayTaskError as exc:
                failed[idx] = _translated(idx, exc.cause)
            except ray.exceptions.RayError as exc:
                failed[idx] = _translated(idx, exc)
        return failed


def receive_by_rpc(reference: Any, scheme: WeightSyncScheme, worker_idx: int) -> None:
    """In an RPC worker: keep the policy of the collector behind a reference up to date."""
    receive(reference.local_value(), scheme, worker_idx)


def _translated(idx: int, error: Exception) -> AiosyncError:
    if isinstance(error, AiosyncError):
        return error
    text = _line(error)
    if "RPC ran for more than" in text:
        return AckTimeout(f"worker {idx} did not answer: {text}", worker_ids=[idx])
    if isinstance(error, RuntimeError) and ("closed" in text or "eof" in text.lower()):
        return PeerClosed(f"worker {idx} has ended: {text}")
    return ApplyError(
        f"no receiver could be made in worker {idx}: {text}",
        worker_idx=idx,
        remote_type=type(error).__name__,
    )


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
