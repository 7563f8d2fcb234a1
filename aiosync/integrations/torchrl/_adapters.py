"""Owners: adapters for the calls that TorchRL's collectors and servers make to a scheme.

An owner stands between an object of TorchRL's (a collector in the trainer or in a worker, or a
server) and the scheme that it calls. It handles the calls that need more than the scheme does, and
passes all others on unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import nn

from aiosync import schemes as aio
from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    SyncTimeout,
    TransportClosed,
)
from aiosync.integrations.torchrl._policies import (
    factories_of,
    find_model,
    from_factories,
    original_of,
    refuse_missing_buffers,
    refuse_no_module,
)
from aiosync.integrations.torchrl._workers import (
    Cascade,
    Labels,
    guard_policy,
    has_workers,
    is_stamped,
    stamp,
    watch_loading,
)
from aiosync.protocol import as_indices
from aiosync.receiver.guard import Guard
from aiosync.receiver.scheme_hooks import Labelled, SchemeHooks, run_hook
from aiosync.schemes.internal import (
    belongs_to_torchrl,
    change_hooks,
    is_ranked,
    leave_applying,
    life_of,
    name_by_rank,
    separate,
)
from aiosync.schemes.sources import is_per_worker
from aiosync.sync import (
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    WeightSyncScheme,
)
from aiosync.sync._schemes import core_of, is_copy, rpc_runs, run_on_loop
from aiosync.tensors import lacks_memory

__all__ = ["CollectorOwner", "ServerOwner"]

# Workers of these schemes find the sender by a name in the cluster, and nothing reports that
# another sender has the name already.
_MET_ELSEWHERE = (RayWeightSyncScheme, RPCWeightSyncScheme)
# Time for the error of a worker's set-up to arrive in the collector's pipe.
_LAST_WORDS_SECONDS = 1.0
# Longest pause between two checks whether the object of an owner was shut down.
_MAX_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that an object of TorchRL's makes to a scheme.

    Attributes:
        scheme: The scheme.
        owned: The object.
        method: The method of the scheme that the object calls.
        given: The arguments by name, which handlers may change.
    """

    scheme: WeightSyncScheme
    owned: Any
    method: Callable[..., Any]
    given: dict[str, Any]

    def proceed(self) -> Any:
        """Pass the call on to the scheme, with the arguments as they are now."""
        return self.method(**self.given)


_Handler: TypeAlias = Callable[[Any, _Call], Any]


class TorchRLOwner:
    """Base class of the adapters between an object of TorchRL's and the scheme that it calls.

    Args:
        owned: The object of TorchRL's; referred to weakly.
        scheme: The scheme that the object calls; referred to weakly.
    """

    blocks_loops: ClassVar[bool]
    """True if the object blocks the loop of its caller anyway, so that the scheme may, too."""
    _handlers: ClassVar[dict[str, tuple[_Handler, tuple[str, ...]]]]
    """Handlers by the name of the method, with the names of its positional arguments."""

    def __init__(self, owned: Any, scheme: WeightSyncScheme) -> None:
        self._owned = weakref.ref(owned)
        self._scheme = weakref.ref(scheme)
        belongs_to_torchrl(core_of(scheme))

    def call(
        self,
        name: str,
        proceed: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Handle a call of the scheme's method ``name``, or ``proceed`` as for any other caller."""
        scheme, owned = self._scheme(), self._owned()
        if scheme is None or owned is None or name not in self._handlers:
            return proceed(*args, **kwargs)
        handler, positional = self._handlers[name]
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        return handler(self, _Call(scheme, owned, proceed, given))

    def stands_for(self, context: object) -> bool:
        """Return True for the owned object, which then needs no other owner."""
        return self._owned() is context

    def is_over(self, owned: Any) -> bool:
        """Return True if the object was shut down."""
        return getattr(owned, "closed", False)

    def close_when_over(self, pause: float = 0.1) -> None:
        """Close the scheme once its object is shut down, unless it still has workers.

        Call it on the loop. It calls itself later, after ``pause`` seconds at first, until then.
        """
        scheme, owned = self._scheme(), self._owned()
        if scheme is None or life_of(core_of(scheme)).closed or scheme.worker_versions:
            return
        if owned is None or self.is_over(owned):
            scheme.abort()
            return
        loop = asyncio.get_running_loop()
        loop.call_later(pause, self.close_when_over, min(2 * pause, _MAX_PAUSE_SECONDS))


class CollectorOwner(TorchRLOwner):
    """Adapter between a scheme and a collector, that of the trainer or that of a worker.

    Args:
        collector: The collector.
        scheme: The scheme that it calls.
    """

    # A collector's iterator blocks a running loop, too: a notebook runs a loop and calls it anyway.
    blocks_loops = True

    def __init__(self, collector: Any, scheme: WeightSyncScheme) -> None:
        super().__init__(collector, scheme)
        # The thread in which a worker connects, once there is one.
        self._connecting: threading.Thread | None = None
        # False if the frames go into memory that has no place for versions.
        self._stamps = True
        self._made = False  # True if factories made the weights that the workers began with
        # Version that the trainer's tracker stands for.
        self._tracked_version = scheme.version
        self._lock = threading.Lock()
        if scheme.initialized_on_receiver:
            self._attach(scheme, collector)  # the scheme got its role before the collector

    # -- the trainer ---------------------------------------------------------------------------

    def _init_on_sender(self, call: _Call) -> None:
        """Make the scheme a sender of the collector's model, to as many workers as it has."""
        scheme, collector, given = call.scheme, call.owned, call.given
        if not isinstance(scheme, RayWeightSyncScheme):
            # Only Ray's schemes reach actors by themselves. The others need their number.
            _count_actors(given)
        model_id = given.get("model_id") or "policy"
        model = find_model(collector, model_id)
        _refuse_path(collector, model_id)
        # A nested collector may have a copy of the scheme of a collector with ranks.
        name_by_rank(core_of(scheme), _has_ranks(collector))
        if not isinstance(scheme, NoWeightSyncScheme):
            _refuse_ranks(collector)
            if model_id == "policy" and _has_no_weights(model):
                _choose_model(collector, model, given)
        if len(set(map(id, factories_of(collector)))) > 1:
            # Policies that different factories make begin with different weights.
            scheme.per_worker_weights = True
        _init_separately(call)
        weakref.finalize(collector, _abort, weakref.ref(scheme)).atexit = False
        if model_id == "policy" and model is None:
            self._begin_with_factories(scheme, collector)
        if isinstance(scheme, NoWeightSyncScheme):
            scheme.carry(model)

    def _begin_with_factories(self, scheme: WeightSyncScheme, collector: Any) -> None:
        """Send the weights that the policy factories make, unless others were given."""
        sources = life_of(core_of(scheme)).given.sources
        if sources.weights is None and not sources.per_worker:
            made = from_factories(collector, sources.num_workers)
            self._made = made is not None
            if isinstance(made, dict):
                sources.per_worker = made
            else:
                sources.weights = made

    def _connect(self, call: _Call) -> None:
        """Connect the scheme; that of a worker in a thread if the trainer waits for this call."""
        scheme = call.scheme
        if scheme.initialized_on_sender:
            self._connect_sender(call)
        elif scheme.synchronized_on_receiver or self._connecting is not None:
            return
        elif not rpc_runs() or lacks_memory(scheme.model):
            call.proceed()
        else:
            # The trainer's RPCCollector waits for this call before it begins to connect, so the
            # worker connects in a thread. It may outlive the collector, and does not keep it.
            connect = functools.partial(
                _connect_in_thread, functools.partial(call.method, **call.given)
            )
            name = "aiosync-connect"
            self._connecting = threading.Thread(target=connect, name=name, daemon=True)
            self._connecting.start()

    def _connect_sender(self, call: _Call) -> None:
        """Connect the trainer's scheme, and guard the policy if the collector has no workers."""
        scheme, collector, given = call.scheme, call.owned, call.given
        core, of_policy = core_of(scheme), _model_id_of(scheme) == "policy"
        processes = _processes_of(collector)
        if processes is not None:
            given.setdefault("processes", processes)
        if of_policy and hasattr(collector, "procs"):
            refuse_missing_buffers(scheme, collector)
        is_only_worker = collects_itself(scheme, collector)
        if is_only_worker and of_policy and core.guard == "forward":
            # Collector.start() collects in a thread of its own while the trainer's thread updates
            # the policy.
            guard_policy(life_of(core).guard, collector)
            watch_loading(life_of(core).guard, collector)
            if is_stamped(collector):
                stamp(collector)
        try:
            _connect_to_workers(call)
        except PartialSyncError as exc:
            if not _collector_reports(collector, exc):
                raise
        finally:
            self._tracked_version = scheme.version
            if is_only_worker:
                life_of(core).guard.held = scheme.epoch, scheme.version
            self._close_without_workers(scheme, is_only_worker)

    def _close_without_workers(self, scheme: WeightSyncScheme, is_only_worker: bool) -> None:
        """Close the scheme once its object is shut down and the last worker has left."""
        life = life_of(core_of(scheme))
        if life.sender is not None:
            life.sender.workers.on_empty = self.close_when_over
            if is_only_worker and scheme.synchronized_on_sender and life.loop is not None:
                # Without workers on_empty never happens.
                life.loop.call_soon_threadsafe(self.close_when_over)

    def _send(self, call: _Call) -> Any:
        """Send; a collector that has no workers first applies the weights to its own policy."""
        scheme, collector, given = call.scheme, call.owned, call.given
        if collects_itself(scheme, collector):
            _apply_to_itself(scheme, collector, given)
        weights, before = given.get("weights"), scheme.version
        # A later send without weights has to send these, and not those of the factories.
        keep: Callable[..., None] | None = None
        if self._made and not isinstance(weights, str | None):
            keep = life_of(core_of(scheme)).given.sources.follow
            if given.get("worker_ids") is not None:
                given["worker_ids"] = as_indices("worker_ids", given["worker_ids"])
        try:
            result = call.proceed()
        except PartialSyncError as exc:
            # Without sync it may be the error of a send before, and then this one sent nothing.
            if keep is not None and scheme.version > before:
                if got := _weights_of(exc.acked, weights):
                    keep(got, None)
            raise
        finally:
            self._advance_tracker(scheme, collector)
        if keep is not None:
            keep(weights, given.get("worker_ids"))
        return result

    def _advance_tracker(self, scheme: WeightSyncScheme, collector: Any) -> None:
        """Advance the version of the trainer's collector to that on the workers' data.

        TorchRL's collectors of local processes never change their version; other collectors have
        none, or count by themselves.
        """
        tracker: Any = getattr(collector, "policy_version_tracker", None)
        if not hasattr(collector, "procs") or _model_id_of(scheme) != "policy":
            return
        if isinstance(getattr(tracker, "version", None), int):
            with self._lock:
                now = scheme.version
                tracked = self._tracked_version or scheme.first_version - 1
                if now > tracked:
                    self._tracked_version = now
                    tracker.version += now - tracked

    # -- a worker ------------------------------------------------------------------------------

    def _init_on_receiver(self, call: _Call) -> None:
        """Make the scheme a receiver of the collector's model, or of weights to pass on."""
        scheme, collector, given = call.scheme, call.owned, call.given
        rank = given.get("worker_idx")
        if rank and is_ranked(core_of(scheme)):
            given["worker_idx"] = rank - 1
            self._stamps = False
        model_id = given.get("model_id") or "policy"
        if model_id == "policy" and given.get("model") is None:
            policy = find_model(collector, model_id)
            if policy is None and has_workers(collector):
                # The workers make policies of their own; this one only holds the weights to pass
                # on.
                made = from_factories(collector, 1)
                given["model"] = made.get(0) if isinstance(made, dict) else made
            elif _has_no_weights(policy):
                # It has no weights, as in the trainer. Nothing is passed on; frames get no label.
                given["model"] = nn.Module()
                call.proceed()
                return
        if isinstance(scheme, RayWeightSyncScheme):
            scheme.apply_copy = True  # Ray's memory is read-only; load_state_dict() writes to it
        call.proceed()
        self._attach(scheme, collector)

    def _attach(self, scheme: WeightSyncScheme, collector: Any) -> None:
        """Pass versions on to the collector's own workers; without any, label its frames."""
        core = core_of(scheme)
        given = change_hooks(core).applied  # the program's own hook
        if has_workers(collector):
            cascade = Cascade(collector, scheme)

            async def pass_on(epoch: int, version: int) -> None:
                if given is not None:
                    await run_hook(given, epoch, version)
                await cascade.pass_on(epoch, version)

            change_hooks(core, applied=pass_on)
        elif _model_id_of(scheme) == "policy":
            labels = Labels(
                collector,
                life_of(core).guard,
                scheme.epoch,
                scheme.version,
                sees_forwards=scheme.guard == "forward",
                stamps=self._stamps,
            )
            applied = labels.flipped if given is None else _chain(labels.flipped, given)
            change_hooks(core, applied=applied)

    _handlers: ClassVar = {
        "init_on_sender": (_init_on_sender, ("model_id", "context")),
        "init_on_receiver": (_init_on_receiver, ("model_id", "context")),
        "init_on_worker": (_init_on_receiver, ("model_id", "context")),
        "connect": (_connect, ()),
        "send": (_send, ("weights", "worker_ids")),
    }


def _chain(
    label: Callable[[int, int], None], given: Callable[[int, int], object]
) -> Callable[[int, int], object]:
    """Return a hook that labels first and then calls another one; async if the other one is."""
    if SchemeHooks(applied=given).awaited is None:

        def applied(epoch: int, version: int) -> object:
            label(epoch, version)
            return given(epoch, version)

        return applied

    return Labelled(label, given)


def _count_actors(given: dict[str, Any]) -> None:
    """Replace the actors among the arguments of a call by their number."""
    actors = given.pop("remote_collectors", None)
    if actors is not None:
        given.setdefault("num_workers", len(actors))


def _connect_to_workers(call: _Call) -> None:
    """Connect the trainer's scheme to the actors of a collector, or to its other workers."""
    actors = getattr(call.owned, "remote_collectors", None)
    if actors:
        core = core_of(call.scheme)
        run_on_loop(call.scheme, _connect_to_actors(core, actors, call.given))
    else:
        call.proceed()


def _init_separately(call: _Call) -> None:
    """Make the scheme a sender; give a copy of another scheme a meeting point of its own.

    Nested collectors each have a copy of one scheme for workers of their own. Those workers get
    their copies later, so the copy may have a meeting point of its own. RPCCollector has given its
    workers their copies already.
    """
    scheme, may_separate = call.scheme, not hasattr(call.owned, "collector_rrefs")
    if may_separate and is_copy(scheme) and isinstance(scheme, _MET_ELSEWHERE):
        separate(core_of(scheme))
    try:
        call.proceed()
    except ConfigError:
        if not may_separate or scheme.initialized_on_sender:
            raise
        separate(core_of(scheme))  # another copy listens at the meeting point already
        call.proceed()


def _model_id_of(scheme: WeightSyncScheme) -> str:
    """Return the id of the scheme's model; that of a collector's policy by default."""
    return scheme.model_id or "policy"


def _processes_of(collector: Any) -> Sequence[Any] | None:
    """Return the processes that a collector started; ``None`` for jobs that are no processes."""
    started = getattr(collector, "procs", None) or getattr(collector, "jobs", None) or ()
    are_local = all(isinstance(getattr(each, "pid", None), int) for each in started)
    return started if are_local else None


def _connect_in_thread(connect: Callable[[], Any]) -> None:
    """Connect a worker's scheme; an error is only a warning, as no caller waits for it."""
    try:
        connect()
    except TransportClosed:
        return  # the scheme was shut down, because the collector registers another copy of it
    except AiosyncError as exc:  # the trainer waits for this worker and reports it as missing
        warnings.warn(f"this worker gets no weights: {exc}", RuntimeWarning, stacklevel=1)


async def _connect_to_actors(
    core: aio.WeightSyncScheme, actors: Sequence[Any], given: dict[str, Any]
) -> None:
    """Connect the sender; fail at once if an actor ends before it has connected.

    An actor of a ``RayCollector`` ends with its first error, which the failure names.
    """

    def fail(idx: int, ready: asyncio.Future[Any]) -> None:
        """Fail the connection of a worker if its actor has ended with an error."""
        sender = life_of(core).sender
        if ready.cancelled() or (why := ready.exception()) is None or sender is None:
            return
        workers, reason = sender.workers, str(why).strip().partition("\n")[0]
        if idx not in workers.links:
            error = ConnectError(f"the actor of worker {idx} ended before it connected: {reason}")
            error.__cause__ = why
            workers.record(idx).fail(error, reported=False)
            workers.changed.notify()

    # An actor answers its calls in order. RayCollector has called its connect() already, so that
    # the answer to this call comes once that has ended.
    asked = [asyncio.wrap_future(actor.__ray_ready__.remote().future()) for actor in actors]
    for idx, ready in enumerate(asked):
        ready.add_done_callback(functools.partial(fail, idx))
    try:
        await core.connect(**given)
    finally:
        for ready in asked:
            ready.cancel()


def _collector_reports(collector: Any, error: PartialSyncError) -> bool:
    """Return True if the collector itself will raise the errors of the failed workers.

    A worker of the collector that fails during its set-up sends the error through the collector's
    pipe, and ends. This waits for what it sends, a moment for each failed worker.
    """
    pipes: Any = getattr(collector, "pipes", None)
    has_pipes = pipes is not None and hasattr(collector, "procs")
    return has_pipes and all(
        isinstance(each, (ConnectError, PeerClosed)) and pipes[idx].poll(_LAST_WORDS_SECONDS)
        for idx, each in error.failed.items()
    )


def _abort(scheme: weakref.ref[WeightSyncScheme]) -> None:
    """Abort the scheme of a collector that was garbage-collected."""
    found = scheme()
    if found is not None:
        found.abort()


def _refuse_path(collector: Any, model_id: str) -> None:
    """Raise if a ``RayCollector`` would not find the scheme of a model in its actors.

    Raises:
        ConfigError: The model's id is a path and not a plain name.
    """
    if hasattr(collector, "remote_collectors") and ("." in model_id or "[" in model_id):
        raise ConfigError(
            f"a RayCollector knows models by plain names only, and {model_id!r} is a path: give "
            "the collectors of its actors an attribute for this model (collector_class=), and the "
            "scheme its name"
        )


def _is_distributed(collector: Any) -> bool:
    """Return True for one of TorchRL's distributed collectors."""
    return any(
        kind.__module__.startswith("torchrl.collectors.distributed")
        for kind in type(collector).__mro__
    )


def _has_ranks(collector: Any) -> bool:
    """Return True for a ``DistributedCollector``, whose workers give schemes their ranks."""
    return any(cls.__name__ == "DistributedCollector" for cls in type(collector).__mro__)


def _refuse_ranks(collector: Any) -> None:
    """Raise if a ``DistributedCollector`` would name workers by their ranks, from 1.

    Raises:
        ConfigError: The collector's options make it update its workers by itself.
    """
    if not _has_ranks(collector):
        return
    each = collector.update_after_each_batch and not collector._sync
    if each or collector.max_weight_update_interval > -1:
        raise ConfigError(
            "a DistributedCollector with max_weight_update_interval=, or with sync=False and "
            "update_after_each_batch=True, updates workers by their ranks, which schemes do not "
            "know: use update_interval=, or call update_policy_weights_()"
        )


# -- policies without weights ---------------------------------------------------------------------


def _choose_model(collector: Any, policy: Any, given: dict[str, Any]) -> None:
    """Send an empty module instead of a policy without weights, so that its workers connect."""
    # Only TorchRL's distributed collectors have schemes for a RandomPolicy, too.
    if not _is_distributed(collector):
        refuse_no_module(policy)
    given["model"] = nn.Module()


def _has_no_weights(policy: Any) -> bool:
    """Return True for a policy that is no module, such as a ``RandomPolicy``."""
    return policy is not None and not isinstance(policy, nn.Module)


# -- a collector that has no workers ---------------------------------------------------------------


def collects_itself(scheme: WeightSyncScheme, collector: Any) -> bool:
    """Return True if the collector steps its environments itself, and the scheme sends weights."""
    torchrl: Any = sys.modules["torchrl.collectors"]
    return isinstance(collector, torchrl.Collector) and not isinstance(scheme, NoWeightSyncScheme)


def _weights_of(workers: Iterable[int], weights: Any) -> dict[int, Any]:
    """Return what each of the workers was sent, by index."""
    if is_per_worker(weights):
        return {idx: weights[idx] for idx in workers if idx in weights}
    return dict.fromkeys(workers, weights)


def _apply_to_itself(scheme: WeightSyncScheme, collector: Any, given: dict[str, Any]) -> None:
    """Apply the weights to be sent to the collector's own policy, all of them or none.

    Raises:
        ConfigError: ``worker_ids`` names an index other than 0, which is the collector, or is
            empty; or the weights are given by index.
        LocalProtocolError: The call comes from inside a forward pass or a ``reading()`` block.
        SyncTimeout: A forward pass of the policy did not end in time.
    """
    core, weights, timeout = core_of(scheme), given.get("weights"), given.get("timeout")
    life_of(core).check_here()  # has to raise before anything changes
    _refuse_other_ids(given.pop("worker_ids", None))
    if is_per_worker(weights):
        raise ConfigError("a collector without workers takes weights as they are, not by index")
    guard, model = life_of(core).guard, find_model(collector, _model_id_of(scheme))
    if weights is None:
        weights = original_of(collector, model)
    coming = scheme.epoch, scheme.version + 1 if scheme.version else scheme.first_version
    if weights is None or isinstance(weights, str) or model is weights:
        guard.held = coming  # the model has these weights already
        return
    if not isinstance(model, nn.Module):
        return
    if guard.reading_here:  # exclusively() does not wait for the reads of this thread
        raise LocalProtocolError(
            "update_policy_weights_() was called inside a forward pass of the policy or a "
            "reading() block; call it between two of them"
        )
    # This takes the strategy from the core, because the legacy API's `strategy` is a name.
    extracted = core.strategy.extract_weights(weights)

    def apply() -> None:
        core.strategy.apply_weights(model, extracted, strict=scheme.strict and "warn")
        guard.held = coming  # inside the exclusive section: a read that follows needs the version

    _apply_between_reads(guard, apply, scheme.timeout if timeout is None else timeout)


def _apply_between_reads(guard: Guard, apply: Callable[[], None], limit: float | None) -> None:
    """Apply weights while no forward of a collector's own policy runs, or raise SyncTimeout."""
    if not guard.exclusively(apply, timeout=math.inf if limit is None else limit):
        raise SyncTimeout(
            f"the collector collects in another thread, where a forward pass of its policy did not "
            f"end within {limit:g} s; nothing was changed. Give the scheme a longer timeout=, or "
            "update once the policy has answered"
        )


def _refuse_other_ids(worker_ids: Any) -> None:
    """Raise if ``worker_ids`` is given and is not 0, the index of the collector itself."""
    named = {0} if worker_ids is None else as_indices("worker_ids", worker_ids)
    if not named:
        raise ConfigError("worker_ids names nobody: leave it out")
    for idx in named - {0}:
        raise ConfigError(
            f"Worker {idx} not registered: a collector without workers is index 0 itself"
        )


# -- an inference server, which polls for updates under the lock of its model ---------------------


class ServerOwner(TorchRLOwner):
    """Adapter between an ``InferenceServer`` and the scheme that receives its weights.

    Updates wait until the server asks for them, between two batches and under its lock, so that
    every answer is computed by one version and labelled with it. The end of the trainer, and an
    update that does not fit, are warnings: the server goes on with the version that it has, and the
    trainer gets the error of the update that does not fit.

    Args:
        server: The server.
        scheme: The scheme that it calls.
    """

    blocks_loops = False  # the server calls the scheme in a thread of its own

    def __init__(self, server: Any, scheme: WeightSyncScheme) -> None:
        super().__init__(server, scheme)
        self._known = (0, 0)  # epoch and version of the newest label
        self._ended = False  # True once a warning has said that the trainer is gone
        # Updates have to be applied under the server's lock, whoever gave the scheme its role.
        scheme.apply = "manual"
        leave_applying(core_of(scheme))
        if getattr(server, "static_batch_size", None) is not None:
            scheme.apply_copy = True  # a CUDA graph reads the weights at fixed addresses
        receiver = life_of(core_of(scheme)).receiver
        if receiver is not None:
            receiver.applier.apply_by_hand()
            self._count_new_versions(scheme)

    def is_over(self, owned: Any) -> bool:
        """Return True if the server was shut down.

        It applies no updates then, so the trainer would wait for each until its deadline.
        """
        return bool(owned._shutdown_event.is_set())

    def _init(self, call: _Call) -> None:
        """Give the scheme its role, with the server as its context unless the call has one."""
        if call.given.get("context") is None:
            call.given["context"] = call.owned
            self._drop_constant(call)
        call.proceed()

    def _drop_constant(self, call: _Call) -> None:
        """Drop the index 0 of every server, which is not its own if the trainer has several."""
        if call.given.get("worker_idx") == 0:
            del call.given["worker_idx"]

    def _connect(self, call: _Call) -> None:
        """Connect, and have the scheme closed once the server is shut down."""
        self._drop_constant(call)
        call.proceed()
        self._count_new_versions(call.scheme)
        loop = life_of(core_of(call.scheme)).loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(self.close_when_over)

    def _count_new_versions(self, scheme: WeightSyncScheme) -> int:
        """Return the number of versions since that of the last call; 1 for a new epoch."""
        receiver = life_of(core_of(scheme)).receiver
        if receiver is None:
            return 0
        (epoch, version), inbox = self._known, receiver.ledger.inbox
        self._known = (inbox.epoch or 0, inbox.version)
        return inbox.version - version if self._known[0] == epoch else 1

    def _has_no_news(self, scheme: WeightSyncScheme) -> bool:
        """Return True if there is neither an update to apply nor an error to warn of."""
        receiver = life_of(core_of(scheme)).receiver
        if receiver is None or receiver.applier.has_staged:
            return False
        return receiver.error is None or self._ended

    def _receive(self, call: _Call) -> Any:
        """Apply the staged update and return it; ``None`` without one, or after a warning."""
        scheme, server = call.scheme, call.owned
        # The server asks before every batch, so return without a call to the other thread if there
        # is nothing to apply.
        is_polling = call.given.get("timeout") == 0
        if is_polling and self._has_no_news(scheme):
            return None
        try:
            receiver = life_of(core_of(scheme)).receiver
            if is_polling and receiver is not None:
                # A forward outside of the server's lock is not waited for: the server asks again.
                with contextlib.suppress(SyncTimeout):
                    receiver.applier.apply_pending(patience=0.0)
            update = call.proceed()
        except ApplyError as exc:
            warnings.warn(f"the server refused an update: {exc}", RuntimeWarning, stacklevel=2)
            return None
        except AiosyncError as exc:  # an error raised from here would end the server
            self._ended = True
            warnings.warn(
                f"the trainer is gone; the server continues with version {scheme.version}: {exc}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        num_new = self._count_new_versions(scheme) if update is not None else 0
        # A server that is the scheme's context counts no versions for its label by itself.
        if scheme.context is server:
            for _ in range(num_new):
                server.update_policy_weights_(model_id=scheme.model_id)
        return update

    _handlers: ClassVar = {
        "init_on_receiver": (_init, ("model_id", "context")),
        "init_on_worker": (_init, ("model_id", "context")),
        "connect": (_connect, ()),
        "receive": (_receive, ("timeout",)),
    }
