"""The updaters that send weights by a scheme of aiosync.

The trainer has the scheme's sender, and each worker a receiver for its policy. So an update is one
snapshot that all workers get at the same time. It is applied between two forwards, also while a
worker collects. A worker that dies, refuses or does not answer is named in a PartialSyncError. The
cost does not grow with the number of tensors.

TorchRL's own ways are not used. One is a message in the pipe of a multi-process collector, which
makes a collecting worker drop its batch and wait for an order that never comes. The other is to
call remote collectors with all weights, and the calls by Ray never check for success. Instead, a
worker is called once, and connects a receiver to its policy. Must not import torchrl, and Ray only
by its loader.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed import rpc

from aiosync._log import log
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ApplyError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
)
from aiosync.legacy.remote import finish_ray_call, finish_rpc_call
from aiosync.legacy.transports import Deliveries, Finish
from aiosync.legacy.updaters.base import AtOnceWeightUpdater
from aiosync.legacy.updaters.worker import WorkerCollector, receive, receive_by_rpc
from aiosync.protocol import finite_or_none
from aiosync.sync import (
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from aiosync.transports.ray import need_cluster
from aiosync.types import SendReport

__all__ = ["MultiProcessedWeightUpdater", "RPCWeightUpdater", "RayWeightUpdater"]


class _SchemeWeightUpdater(AtOnceWeightUpdater):
    """Base class of updaters that send by a scheme.

    A remote worker gets its receiver by a call, at its first update. A subclass whose workers have
    receivers already overrides :meth:`_connect`.

    Ownership:
        The scheme is closed by :meth:`shutdown`, or else when the collector is deleted.
    """

    last_report: SendReport | None = None
    """Report of the newest update, with the workers that applied it."""

    _scheme_class: ClassVar[type[WeightSyncScheme]]
    # Name of the attribute with the remote collectors, of this object and of the collector.
    _workers_name: ClassVar[str]

    def __init__(self, policy_weights: Any, timeout: float | None) -> None:
        super().__init__(timeout)
        self.policy_weights = policy_weights
        self._scheme: WeightSyncScheme | None = None
        self._closed = False
        self._installed: set[int] = set()  # workers that have a receiver

    def shutdown(self) -> None:
        """Close the links to the workers, which keep their weights. Idempotent."""
        self._closed = True
        scheme, self._scheme = self._scheme, None
        if scheme is not None:
            scheme.shutdown()

    def _open(self, make: Callable[..., WeightSyncScheme], **options: Any) -> WeightSyncScheme:
        """Make the scheme, by calling ``make``, and accept workers from now on."""
        self._check_open()
        # Updates are copied in place, because policies may be trained, and compiled or captured
        # graphs keep the addresses of the parameters.
        scheme = make(apply_copy=True, strict=False, timeout=self.timeout, **options)
        scheme.init_on_sender(model_id="policy")
        try:
            scheme.connect()
        except BaseException:  # raised again: the caller sees it
            scheme.abort()
            raise
        self._scheme = scheme
        # Collectors do not close their updaters, so the scheme ends with its collector.
        collector = self.collector
        owner = self if collector is None else collector
        weakref.finalize(owner, scheme.abort).atexit = False
        return scheme

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError("this weight updater was shut down")

    def _call(self, worker: Any, scheme: WeightSyncScheme, idx: int) -> Finish:
        """Begin to call :func:`receive` in a remote worker; return a function that waits for it.

        Raises:
            NotImplementedError: The workers of this class are not called.
        """
        raise NotImplementedError

    def _wait_for_first(self, indices: list[int]) -> None:
        """Wait for one of these workers, if all are busy since earlier updates."""

    def _workers(self) -> Sequence[Any]:
        """Return the remote collectors that this object was given, or those of its collector."""
        found: Sequence[Any] = self._known(self._workers_name, getattr(self, self._workers_name))
        return found

    def _num_workers(self) -> int:
        return len(self._workers())

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def _connect(self, indices: list[int]) -> tuple[WeightSyncScheme, dict[int, AiosyncError]]:
        """Connect the receivers of these workers, as far as needed.

        Returns the sending scheme, and the error of each worker that could not be connected.
        """
        scheme = self._scheme or self._open(self._scheme_class, reconnect=0.0)
        connecting = Deliveries()
        # A call that was given up may have connected its worker later.
        has_receiver = self._installed | set(scheme.sender_transports)
        if missing := [idx for idx in indices if idx not in has_receiver]:
            # The copy has no role, so that each worker can make it a receiver.
            workers, own = self._workers(), copy.copy(scheme)
            if len(missing) == len(indices):
                self._wait_for_first(missing)
            for idx in missing:
                connecting.begin(idx, functools.partial(self._call, workers[idx], own, idx))
            connecting.finish_all(self.timeout)
            self._installed |= connecting.acked
        return scheme, connecting.failed

    def _send_at_once(self, weights: Any, worker_ids: list[Any]) -> None:
        """Connect these workers if need be, and send them the weights, or else the policy's."""
        self._check_open()
        # The policy is the trainer's own. `_fallback_policy` may be a copy on another device, which
        # no optimizer changes.
        weights = self._known("policy", weights)
        indices = self._indices(worker_ids)
        scheme, unreached = self._connect(indices)
        reached = [idx for idx in indices if idx not in unreached]
        if not reached and unreached:
            raise PartialSyncError(failed=unreached)
        # A send to all workers reports a dead worker only once, so do not list the indices of all.
        everybody = set(indices) == set(range(self._num_workers()))
        chosen = None if everybody else reached
        seconds = math.inf if self.timeout is None else self.timeout
        try:
            self.last_report = report = scheme.send(weights, chosen, timeout=seconds)
        except PartialSyncError as exc:
            # A worker whose call was given up may have connected in time for the send to all.
            missed = {idx: unreached[idx] for idx in unreached.keys() - exc.acked}
            if not missed:
                raise
            failed = {**missed, **exc.failed}
            raise PartialSyncError(acked=exc.acked, failed=failed, version=exc.version) from exc
        if failed := {idx: unreached[idx] for idx in unreached.keys() - report.acked}:
            raise PartialSyncError(acked=report.acked, failed=failed, version=report.version)


class MultiProcessedWeightUpdater(_SchemeWeightUpdater):
    """Updater for the workers of a ``MultiSyncCollector`` or a ``MultiAsyncCollector``.

    Pass it to the collector's constructor, as ``weight_updater=``: the workers get their receivers
    when they start. Each then has a policy in memory of its own, which changes only with an update,
    and not in the middle of a forward. An update may come while a worker collects.

    Args:
        get_server_weights: Returns the weights for an update without weights. ``None`` takes the
            policy that the collector was given.
        policy_weights: Mapping whose keys are the workers: indices, or devices, each of which
            stands for all workers with that ``policy_device``. If it is empty, the workers are
            those of the collector. Its values are not used.
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
        super().__init__(policy_weights, timeout)
        self.weights_getter = get_server_weights

    def register_collector(self, collector: Any) -> None:
        """Start listening for the workers of a collector, which must not have started yet.

        Args:
            collector: The collector.

        Raises:
            ConfigError: A collector was registered before, or this one is of another class.
            LocalProtocolError: The workers of the collector run already.
        """
        self._check_collector(collector)
        super().register_collector(collector)
        # TorchRL calls `collector_class` in each worker to make its collector: wrap it, so that the
        # collector gets a receiver.
        scheme = copy.copy(self._open(SharedMemWeightSyncScheme))
        collector.collector_class = WorkerCollector(collector.collector_class, scheme)

    def all_worker_ids(self) -> Iterable[Any]:
        """Return the keys of ``policy_weights``, or all workers of the collector if it is empty."""
        return list(self.policy_weights) or list(range(self._num_workers()))

    def _num_workers(self) -> int:
        return int(self._known("num_workers"))

    def _connect(self, indices: list[int]) -> tuple[WeightSyncScheme, dict[int, AiosyncError]]:
        del indices  # the workers got their receivers when they started
        assert self._scheme is not None
        return self._scheme, {}

    def _get_server_weights(self) -> Any:
        return None if self.weights_getter is None else self.weights_getter()

    def _check_collector(self, collector: Any) -> None:
        """Raise if the collector is of another kind, or its workers have started already."""
        if all(cls.__name__ != "MultiCollector" for cls in type(collector).__mro__):
            raise ConfigError(
                f"a {type(collector).__name__} is no MultiSyncCollector or MultiAsyncCollector, "
                f"which a {type(self).__name__} is for"
            )
        if hasattr(collector, "procs") and not self._collector_wrs:
            raise LocalProtocolError(
                "the workers of this collector are already running: pass the "
                f"{type(self).__name__} to its constructor, as weight_updater="
            )

    def _indices(self, worker_ids: list[Any]) -> list[int]:
        """Return the indices of the workers with these indices or policy devices."""
        if self.collector is None:
            raise ConfigError(
                f"a {type(self).__name__} is for a MultiSyncCollector or MultiAsyncCollector: pass "
                "it to the constructor, as weight_updater="
            )
        devices = list(getattr(self.collector, "policy_device", ()))
        indices: set[int] = set()
        for worker_id in worker_ids:
            if isinstance(worker_id, int):
                meant = set(super()._indices([worker_id]))
            else:
                device = None if worker_id is None else torch.device(worker_id)
                meant = {idx for idx, each in enumerate(devices) if each == device}
            if not meant:
                raise ConfigError(f"{worker_id!r} is no policy device of a worker: {devices}")
            indices |= meant
        return sorted(indices)


class RPCWeightUpdater(_SchemeWeightUpdater):
    """Updater for the workers of an ``RPCCollector``.

    The remote collectors exist only when the ``RPCCollector`` does. So assign the updater to
    ``collector.weight_updater``, or pass it to the constructor and omit the arguments that the
    collector will have. The remote collectors have to step their policy themselves, as
    ``Collector`` does.

    Args:
        collector_infos: Kept for TorchRL's signature.
        collector_class: Kept for TorchRL's signature.
        collector_rrefs: References to the remote collectors; those of the registered collector, if
            omitted.
        policy_weights: Live weights for updates without weights; those of the collector's policy,
            if omitted.
        num_workers: Kept for TorchRL's signature: there are as many workers as references.
        timeout: Seconds for each update; ``None`` waits for ever.

    An update raises :class:`~aiosync.PartialSyncError`, which names each worker that died,
    refused the weights or did not answer in time.
    """

    _workers_name = "collector_rrefs"
    _scheme_class = RPCWeightSyncScheme

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
            worker_ids: Indices from 0; ``None`` for all workers.
            weights: Another name of ``policy_or_weights``.
            wait: Kept for TorchRL's signature: an update always waits.
        """
        del wait
        super().push_weights(
            weights if policy_or_weights is None else policy_or_weights, worker_ids
        )

    def _call(self, worker: Any, scheme: WeightSyncScheme, idx: int) -> Finish:
        # RPC waits for ever with a timeout of zero.
        done = rpc.rpc_async(
            worker.owner(), receive_by_rpc, args=(worker, scheme, idx), timeout=self.timeout or 0.0
        )
        return functools.partial(finish_rpc_call, done)


class RayWeightUpdater(_SchemeWeightUpdater):
    """Updater for the actors of a ``RayCollector``.

    The actors exist only when the collector does. So assign the updater to
    ``collector.weight_updater``, or pass it to the constructor and omit the arguments that the
    collector will have. The actors have to step their policy themselves, as ``Collector`` does.

    Args:
        policy_weights: Live weights for updates without weights; those of the collector's policy,
            if omitted.
        remote_collectors: Handles of the actors; those of the registered collector, if omitted.
        max_interval: Number of updates that each worker is left out of before one goes to it.
        timeout: Seconds for each update; ``None`` waits for ever.

    An update raises :class:`~aiosync.PartialSyncError`, which names each worker that died,
    refused the weights or did not answer in time. An actor that Ray has restarted gets the newest
    weights with one of the next updates. An actor that was too busy for one update holds up
    no later one for the others.
    """

    _workers_name = "remote_collectors"
    _scheme_class = RayWeightSyncScheme

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
        # Each worker is left out of max_interval updates before one goes to it: of how many so far.
        self._left_out: Counter[int] = Counter()
        # Ray's references to the calls of :func:`receive` that have not ended, by index.
        self._calls: dict[int, Any] = {}
        self._given_up: set[int] = set()  # workers whose call a whole update has waited for

    def _connect(self, indices: list[int]) -> tuple[WeightSyncScheme, dict[int, AiosyncError]]:
        """Connect the receivers as far as needed; call the actors that have lost theirs again."""
        scheme, unreached = super()._connect(indices)
        lost = self._installed.intersection(indices) - set(scheme.sender_transports)
        for idx in lost:
            if self._may_call_again(idx):
                # It is not waited for: a restarted actor connects by itself, and a dead one does
                # not keep the weights from the others.
                self._call(self._workers()[idx], copy.copy(scheme), idx)
        return scheme, unreached

    def _may_call_again(self, idx: int) -> bool:
        """Return True if no call of a lost actor is under way; log how the last one failed."""
        try:
            self._finish_call(idx, 0.0)
        except AckTimeout:
            return False
        except PeerClosed:
            pass  # The update that met its death has raised an error.
        except ApplyError as exc:
            text = f"the restarted actor {idx} gets no weights: {exc}"
            log(logging.WARNING, "updater", text, model="policy")
        return True

    def _skip_update(self, worker_id: int) -> bool:
        skip = self._left_out[worker_id] < self.max_interval
        self._left_out[worker_id] = self._left_out[worker_id] + 1 if skip else 0
        return skip

    def _call(self, worker: Any, scheme: WeightSyncScheme, idx: int) -> Finish:
        # A busy actor gets to the call of an earlier update later. If it were called once more, it
        # would have two receivers with one index.
        if idx not in self._calls:
            self._calls[idx] = worker.__ray_call__.remote(receive, scheme, idx)
            self._given_up.discard(idx)
        elif idx in self._given_up:
            return functools.partial(self._finish_earlier_call, idx)
        return functools.partial(self._finish_call, idx)

    def _wait_for_first(self, indices: list[int]) -> None:
        if self._calls.keys() & self._given_up >= set(indices):
            calls = [self._calls[idx] for idx in set(indices)]
            need_cluster().wait(calls, timeout=finite_or_none(self.timeout))

    def _finish_earlier_call(self, idx: int, timeout: float | None) -> None:
        """Take the answer to a call that an earlier update has waited for, without a wait."""
        del timeout
        try:
            self._finish_call(idx, 0.0)
        except AckTimeout as exc:
            text = "the actor is still too busy to answer the call of an earlier update"
            raise AckTimeout(text, worker_ids=[idx]) from exc

    def _finish_call(self, idx: int, timeout: float | None) -> None:
        """Wait for the end of a call that is under way, if there is one; then forget it."""
        if idx in self._calls:
            try:
                finish_ray_call(self._calls[idx], timeout)
            except AckTimeout:
                self._given_up.add(idx)
                raise
            except (PeerClosed, ApplyError):
                del self._calls[idx]
                raise
            del self._calls[idx]
