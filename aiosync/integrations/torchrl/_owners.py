"""How TorchRL's collectors call a scheme, in the trainer and in the workers."""

from __future__ import annotations

import asyncio
import functools
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    SyncTimeout,
    TransportClosed,
)
from aiosync.integrations.torchrl._workers import (
    Cascade,
    Labels,
    guard_policy,
    has_workers,
    is_stamped,
    stamp,
)
from aiosync.protocol import as_indices
from aiosync.schemes.inside import (
    belongs_to_torchrl,
    change_hooks,
    check_open,
    guard_of,
    life_of,
    sender_of,
    separate,
    sources_of,
)
from aiosync.schemes.sources import is_per_worker, resolve_model
from aiosync.sync import (
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    WeightSyncScheme,
)
from aiosync.sync._schemes import core_of, is_copy, rpc_runs
from aiosync.tensors import lacks_memory

__all__ = ["CollectorOwner"]

# Their workers find the sender by a name in the cluster, of which nobody sees that it is taken.
_MET_ELSEWHERE = (RayWeightSyncScheme, RPCWeightSyncScheme)
_POSITIONAL = {
    "init_on_sender": ("model_id", "context"),
    "init_on_receiver": ("model_id", "context"),
    "init_on_worker": ("model_id", "context"),
    "send": ("weights", "worker_ids"),
}
_LAST_WORDS_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 2.0


class CollectorOwner:
    """Between a collector and a scheme: the trainer's collector, or that of a worker.

    Args:
        collector: The collector; referred to weakly.
        scheme: The scheme that it calls.
    """

    blocks_loops = True  # as its iterator does: a notebook runs a loop, and calls it all the same

    def __init__(self, collector: Any, scheme: WeightSyncScheme) -> None:
        self._collector = weakref.ref(collector)
        self._scheme = weakref.ref(scheme)
        self._connecting: threading.Thread | None = None
        self._stamps = True  # who gets the data takes more than what it finds without a scheme
        self._made = False  # by factories: what the workers began with
        self._counted = scheme.version  # what the trainer's tracker stands for
        self._lock = threading.Lock()
        belongs_to_torchrl(core_of(scheme))
        if scheme.initialized_on_receiver:
            self._attach(scheme, collector)  # it had begun before there was a collector

    def call(
        self,
        name: str,
        proceed: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """See :class:`aiosync.sync._schemes.Owner`."""
        scheme, collector = self._scheme(), self._collector()
        if scheme is None or collector is None:
            return proceed(*args, **kwargs)
        given = {**dict(zip(_POSITIONAL.get(name, ()), args, strict=False)), **kwargs}
        if name == "init_on_sender":
            return self._init_on_sender(scheme, collector, proceed, given)
        if name in ("init_on_receiver", "init_on_worker"):
            return self._init_on_receiver(scheme, collector, proceed, given)
        if name == "connect" and scheme.initialized_on_sender:
            return self._connect_sender(scheme, collector, proceed, given)
        if name == "connect":
            return self._connect_receiver(scheme, proceed, given)
        if name == "send":
            return self._send(scheme, collector, proceed, given)
        return proceed(*args, **kwargs)

    def stands_for(self, context: object) -> bool:
        """See :class:`aiosync.sync._schemes.Owner`."""
        return self._collector() is context

    # -- the trainer ---------------------------------------------------------------------------

    def _init_on_sender(
        self,
        scheme: WeightSyncScheme,
        collector: Any,
        proceed: Callable[..., Any],
        given: dict[str, Any],
    ) -> None:
        if not isinstance(scheme, RayWeightSyncScheme):
            actors = given.pop("remote_collectors", None)
            if actors is not None:
                given.setdefault("num_workers", len(actors))
        model_id = given.get("model_id") or "policy"
        if not isinstance(scheme, NoWeightSyncScheme):
            _refuse_ranks(collector)
            if model_id == "policy" and (policy := find_model(collector, model_id)) is not None:
                refuse_no_module(policy)
        if len(set(map(id, factories_of(collector)))) > 1:
            scheme.per_worker_weights = True
        # Nested collectors: each of them has a copy of one scheme for workers of its own, which
        # get theirs later. But RPCCollector has given its workers theirs already.
        may_separate = not hasattr(collector, "collector_rrefs")
        if may_separate and is_copy(scheme) and isinstance(scheme, _MET_ELSEWHERE):
            separate(core_of(scheme))
        try:
            proceed(**given)
        except ConfigError:
            if not may_separate or scheme.initialized_on_sender:
                raise
            separate(core_of(scheme))  # another copy listens already
            proceed(**given)
        finalizer = weakref.finalize(collector, _abort, weakref.ref(scheme))
        finalizer.atexit = False
        sources = sources_of(core_of(scheme))
        if sources.weights is None and not sources.per_worker:
            if find_model(collector, model_id) is None and model_id == "policy":
                made = from_factories(collector, sources.num_workers)
                self._made = made is not None
                if isinstance(made, nn.Module):
                    sources.weights = made
                elif made is not None:
                    sources.per_worker = made
        if isinstance(scheme, NoWeightSyncScheme):
            scheme.carry(find_model(collector, model_id))

    def _connect_sender(
        self,
        scheme: WeightSyncScheme,
        collector: Any,
        proceed: Callable[..., Any],
        given: dict[str, Any],
    ) -> None:
        processes = getattr(collector, "procs", None) or getattr(collector, "jobs", None) or ()
        if all(isinstance(getattr(process, "pid", None), int) for process in processes):
            given.setdefault("processes", processes)
        if (scheme.model_id or "policy") == "policy" and hasattr(collector, "procs"):
            refuse_missing_buffers(scheme, collector)
        acts = acts_itself(scheme, collector)
        if acts:
            guard_forwards(scheme, collector)
        try:
            proceed(**given)
        except PartialSyncError as exc:
            if not _will_say_why(collector, exc):
                raise
        finally:
            self._counted = scheme.version
            if acts:
                note_version(scheme, scheme.version)
            core = core_of(scheme)
            sender, loop = sender_of(core), life_of(core).loop
            if sender is not None:
                owned = (self._collector, self._scheme)
                close = sender.workers.on_empty = functools.partial(_close_after, owned)
                if acts and scheme.synchronized_on_sender and loop is not None:
                    loop.call_soon_threadsafe(close)  # it may never have a worker to lose

    def _send(
        self,
        scheme: WeightSyncScheme,
        collector: Any,
        proceed: Callable[..., Any],
        given: dict[str, Any],
    ) -> Any:
        if acts_itself(scheme, collector):
            return send_to_itself(scheme, collector, proceed, given)
        try:
            result = proceed(**given)
        finally:
            self._count(scheme, collector)
        if self._made and not isinstance(given.get("weights"), str | None):
            # Where nothing is given, what was given last is sent, not what the factories made.
            sources = sources_of(core_of(scheme))
            sources.follow(given["weights"], given.get("worker_ids"))
        return result

    def _count(self, scheme: WeightSyncScheme, collector: Any) -> None:
        """Have the trainer's collector say the version that its workers label their data with.

        TorchRL's collectors of local processes never change theirs; the others have none, or
        count by themselves.
        """
        tracker: Any = getattr(collector, "policy_version_tracker", None)
        if not hasattr(collector, "procs") or (scheme.model_id or "policy") != "policy":
            return
        if isinstance(getattr(tracker, "version", None), int):
            with self._lock:
                now, counted = scheme.version, self._counted or scheme.first_version - 1
                if now > counted:
                    self._counted = now
                    tracker.version += now - counted

    # -- a worker ------------------------------------------------------------------------------

    def _init_on_receiver(
        self,
        scheme: WeightSyncScheme,
        collector: Any,
        proceed: Callable[..., Any],
        given: dict[str, Any],
    ) -> None:
        rank = given.get("worker_idx")
        if rank and _own_idx(collector) is None:
            given["worker_idx"] = rank - 1  # a collector without an index: this is a rank, from 1
            self._stamps = False
        model_id = given.get("model_id") or "policy"
        model = find_model(collector, model_id)
        if has_workers(collector) and model is None and given.get("model") is None:
            if model_id == "policy":
                # The workers make theirs; this one is only what they are sent.
                made = from_factories(collector, 1)
                given["model"] = made.get(0) if isinstance(made, dict) else made
        if isinstance(scheme, RayWeightSyncScheme):
            scheme.apply_copy = True  # Ray's memory is read-only; load_state_dict() writes to it
        proceed(**given)
        self._attach(scheme, collector)

    def _attach(self, scheme: WeightSyncScheme, collector: Any) -> None:
        core = core_of(scheme)
        model_id = scheme.model_id or "policy"
        if has_workers(collector):
            change_hooks(core, relay=Cascade(collector, scheme).pass_on)
        elif model_id == "policy":
            labels = Labels(
                collector,
                guard_of(core),
                scheme.version,
                sees_forwards=scheme.guard == "forward",
                stamps=self._stamps,
            )
            change_hooks(core, applied=labels.flipped)

    def _connect_receiver(
        self, scheme: WeightSyncScheme, proceed: Callable[..., Any], given: dict[str, Any]
    ) -> None:
        if scheme.synchronized_on_receiver or self._connecting is not None:
            return
        if not rpc_runs() or lacks_memory(scheme.model):
            proceed(**given)
            return
        # RPCCollector's trainer waits for this call before it begins to connect.
        connect = functools.partial(_connect, proceed, given)
        self._connecting = threading.Thread(target=connect, name="aiosync-connect", daemon=True)
        self._connecting.start()


def _connect(proceed: Callable[..., Any], given: dict[str, Any]) -> None:
    try:
        proceed(**given)
    except TransportClosed:
        return  # shut down: the collector registers another copy of the scheme
    except AiosyncError as exc:  # the trainer, who waits for this worker, says who is missing
        warnings.warn(f"this worker gets no weights: {exc}", RuntimeWarning, stacklevel=1)


def _will_say_why(collector: Any, error: PartialSyncError) -> bool:
    """Whether the collector looks after the workers that failed, and raises what ended them.

    A worker of its own that fails while it is set up ends, and has told the collector why.
    """
    pipes = getattr(collector, "pipes", None)
    if pipes is None or not hasattr(collector, "procs"):
        return False
    return all(
        isinstance(each, (ConnectError, PeerClosed)) and pipes[idx].poll(_LAST_WORDS_SECONDS)
        for idx, each in error.failed.items()
    )


def _close_after(
    owned: tuple[weakref.ref[Any], weakref.ref[WeightSyncScheme]], pause: float = 0.1
) -> None:
    """No worker is left: close the scheme once the collector is shut down. On the loop."""
    collector, scheme = (reference() for reference in owned)
    if scheme is None or life_of(core_of(scheme)).closed or scheme.worker_versions:
        return
    if collector is None or getattr(collector, "closed", False):
        scheme.abort()
        return
    loop = asyncio.get_running_loop()
    loop.call_later(pause, _close_after, owned, min(2 * pause, _MAX_PAUSE_SECONDS))


def _abort(scheme: weakref.ref[WeightSyncScheme]) -> None:
    """The collector is gone, and with it what the scheme was for."""
    found = scheme()
    if found is not None:
        found.abort()


def _own_idx(collector: Any) -> int | None:
    try:
        idx: int | None = collector.worker_idx
    except RuntimeError:
        return None  # it was given none
    return idx


def _refuse_ranks(collector: Any) -> None:
    """Raise if a ``DistributedCollector`` would name workers by their ranks, from 1."""
    if all(cls.__name__ != "DistributedCollector" for cls in type(collector).__mro__):
        return
    each = collector.update_after_each_batch and not collector._sync
    if each or collector.max_weight_update_interval > -1:
        raise ConfigError(
            "a DistributedCollector with max_weight_update_interval=, or with sync=False and "
            "update_after_each_batch=True, updates workers by their ranks, which schemes do not "
            "know: use update_interval=, or call update_policy_weights_()"
        )


# -- policies, and those that factories make ----------------------------------------------------


def find_model(collector: Any, model_id: str) -> Any:
    """The model of that id, or ``None`` where the collector has none."""
    try:
        return resolve_model(collector, model_id)
    except (AttributeError, ValueError):
        return None


class _NotAModule(ConfigError, TypeError):
    """A policy has no weights that could be sent."""


def refuse_no_module(policy: Any) -> None:
    """Raise if a policy is not a module.

    Raises:
        ConfigError: It is not (a ``TypeError``, too).
    """
    if not isinstance(policy, nn.Module):
        raise _NotAModule(
            f"the policy is a {type(policy).__name__} and not an nn.Module: it needs no weight "
            "synchronization. Omit weight_sync_schemes=; a Collector also accepts "
            "NoWeightSyncScheme"
        )


def refuse_missing_buffers(scheme: WeightSyncScheme, collector: Any) -> None:
    """Raise if workers would wait for buffers that nothing brings them.

    TorchRL's collectors of processes send their workers the policy on the meta device, and leave
    the rest to the scheme.

    Raises:
        ConfigError: The policy has buffers that are in no state dict, and the strategy sends that.
    """
    if scheme.strategy_str != "state_dict" or isinstance(scheme, NoWeightSyncScheme):
        return
    policy = find_model(collector, "policy")
    if not isinstance(policy, nn.Module) or factories_of(collector):
        return
    sent = policy.state_dict()
    if hidden := sorted(name for name, _ in policy.named_buffers() if name not in sent):
        raise ConfigError(
            "the policy has buffers that are not in its state dict, and a collector's workers get "
            f"it on the meta device: {', '.join(hidden)}. Make the scheme with "
            "strategy='tensordict', which sends them"
        )


def factories_of(collector: Any) -> list[Callable[[], Any]]:
    """The policy factory of each worker; empty where there is none."""
    found = getattr(collector, "policy_factory", None)
    if found is None:
        return []
    listed = list(found) if isinstance(found, Sequence) else [found]
    return [factory for factory in listed if factory is not None]


def from_factories(collector: Any, num_workers: int | None) -> nn.Module | dict[int, Any] | None:
    """What the workers shall begin with where only factories are given.

    Returns:
        One module for all workers where they share a factory; otherwise one for each; ``None``
        without factories, or where what they make has no parameters.

    Raises:
        ConfigError: One makes something that is not a module (a ``TypeError``, too).
    """
    factories = factories_of(collector)
    if not factories:
        return None
    if len(set(map(id, factories))) == 1:
        made = factories[0]()
        return made if _has_parameters(made) else None
    each = {idx: factory() for idx, factory in enumerate(factories[:num_workers])}
    return each if all(map(_has_parameters, each.values())) else None


def _has_parameters(policy: nn.Module) -> bool:
    refuse_no_module(policy)
    return any(True for _ in policy.parameters())


# -- a collector that has no workers ---------------------------------------------------------------


def acts_itself(scheme: WeightSyncScheme, collector: Any) -> bool:
    """Whether this is the scheme of a collector that steps its environments itself."""
    torchrl: Any = sys.modules["torchrl.collectors"]
    return isinstance(collector, torchrl.Collector) and not isinstance(scheme, NoWeightSyncScheme)


def send_to_itself(
    scheme: WeightSyncScheme, collector: Any, proceed: Callable[..., Any], given: dict[str, Any]
) -> Any:
    """Apply what is sent to the collector's own policy, all of it or nothing.

    Raises:
        ConfigError: Another index than 0, the collector's, is named, or none; or there are weights
            by index.
        SyncTimeout: A forward pass of the policy did not end in time.
    """
    check_open(core_of(scheme))  # before anything changes
    worker_ids = given.pop("worker_ids", None)
    named = {0} if worker_ids is None else as_indices("worker_ids", worker_ids)
    if not named:
        raise ConfigError("worker_ids names nobody: leave it out")
    for idx in named - {0}:
        raise ConfigError(
            f"Worker {idx} not registered: a collector without workers is index 0 itself"
        )
    if is_per_worker(given.get("weights")):
        raise ConfigError("a collector without workers takes weights as they are, not by index")
    _apply(scheme, collector, given.get("weights"), given.get("timeout"))
    return proceed(**given)


def _apply(scheme: WeightSyncScheme, collector: Any, weights: Any, timeout: float | None) -> None:
    model = find_model(collector, scheme.model_id or "policy")
    coming = scheme.version + 1 if scheme.version else scheme.first_version
    if weights is None or isinstance(weights, str) or model is weights:
        note_version(scheme, coming)
        return  # the model is the source
    if not isinstance(model, nn.Module):
        return
    core = core_of(scheme)
    guard, limit = guard_of(core), scheme.timeout if timeout is None else timeout
    if guard.reading_here:  # which exclusively() does not wait for
        raise LocalProtocolError(
            "update_policy_weights_() was called inside a forward pass of the policy or a "
            "reading() block; call it between two of them"
        )
    given = scheme.strategy.extract_weights(weights)

    def apply() -> None:
        scheme.strategy.apply_weights(model, given, strict=scheme.strict and "warn")
        note_version(scheme, coming)

    if not guard.exclusively(apply, timeout=math.inf if limit is None else limit):
        raise SyncTimeout(
            f"the collector collects in another thread, where a forward pass of its policy did not "
            f"end within {limit:g} s; nothing was changed. Give the scheme a longer timeout=, or "
            "update once the policy has answered"
        )


def guard_forwards(scheme: WeightSyncScheme, collector: Any) -> None:
    """Have the forward passes of the collector's policy be reads of the scheme's guard.

    ``Collector.start()`` collects in a thread of its own, and the trainer updates in another.
    """
    core = core_of(scheme)
    if (scheme.model_id or "policy") == "policy" and core.guard == "forward":
        guard_policy(guard_of(core), collector)
        if is_stamped(collector):
            stamp(collector)


def note_version(scheme: WeightSyncScheme, version: int) -> None:
    """The collector's own policy has a version, which may be about to be drawn."""
    guard_of(core_of(scheme)).held = scheme.epoch, version
