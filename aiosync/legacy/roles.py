"""What this generation sends and receives with: objects that a scheme hands out.

They have the transports that the scheme's ``create_transport()`` makes, aiosync's own and those of
users alike; or none, where a scheme has links of the newer generation. Must not import schemes.
"""

from __future__ import annotations

import abc
import contextlib
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    LocalProtocolError,
    ManifestMismatch,
    PartialSyncError,
    SyncTimeout,
    TransportBroken,
)
from aiosync.legacy.endpoint import Arrived, Copier, Endpoint, Snapshot
from aiosync.legacy.strategy import WeightStrategy, hint
from aiosync.legacy.transports import MPTransport
from aiosync.receiver.guard import Guard, why_unguarded
from aiosync.schemes.inside import guard_of
from aiosync.schemes.sources import is_per_worker, resolve_model, resolve_path
from aiosync.sync._schemes import core_of
from aiosync.tensors import Target
from aiosync.transports._fork import FORKING
from aiosync.transports._kept_errors import without_frames

if TYPE_CHECKING:
    from aiosync.legacy.schemes import WeightSyncScheme

__all__ = ["WeightReceiver", "WeightSender"]

_GRACE_SECONDS = 2.0  # that sends wait for workers that never attached, from the first one on
_READ_SECONDS = 60.0  # that an update waits for the forwards of other threads


class OfScheme(abc.ABC):
    """What has transports of a scheme. A pickle has the scheme and nothing else."""

    _scheme: WeightSyncScheme

    @abc.abstractmethod
    def _ends(self) -> Iterable[Any]:
        """The transports."""

    def close(self, *, at_once: bool = False) -> None:
        """Close every transport that can be closed.

        Args:
            at_once: Without waiting, for destructors and signal handlers.
        """
        for transport in self._ends():
            if at_once and isinstance(transport, MPTransport):
                transport.link.abort()
            elif hasattr(transport, "close"):  # what users bring need not have it
                transport.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_scheme": self._scheme}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_scheme"])  # type: ignore[misc]  # subclasses have the same arguments

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._scheme!r}>"


# -- sending --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Started:
    """A send that is under way: who has yet to answer, who has the weights, who never will."""

    pending: dict[int, Any] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    failed: dict[int, Exception] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # nobody has attached
    refused: Exception | None = None  # the caller's mistake, not a worker's
    snapshots: list[Snapshot] = field(default_factory=list)

    def drop(self) -> None:
        """Let no later send take the answers to this one for its own."""
        while self.pending:
            getattr(self.pending.popitem()[1], "drop_oldest", lambda: None)()


def _as_failure(idx: int, error: Exception) -> AiosyncError:
    cause = error.__cause__
    if isinstance(cause, ApplyError):
        return ApplyError(
            f"worker {idx} could not apply the weights: {cause}",
            worker_idx=idx,
            version=cause.version,
            remote_type=cause.remote_type,
        )
    # Transports of users raise what they like.
    return error if isinstance(error, AiosyncError) else TransportBroken(repr(error))


class WeightSender(OfScheme):
    """Sends weights for a scheme; ``scheme.get_sender()`` has one.

    Methods may be called from one thread at a time that runs no event loop. A pickle of it has
    the scheme's configuration only: neither links, nor the context, nor a pending send.

    Args:
        scheme: What it sends for.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._transports: dict[int, Any] = {}
        self._copier = Copier()
        self._pending: _Started | None = None
        self._give_up: float | None = None  # when nobody waits for late workers any more
        self._lost: set[int] = set()  # of whose end a send has told

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Send to one more worker, over a transport of its own.

        For senders that :meth:`WeightSyncScheme.create_sender` made.

        Args:
            worker_idx: Its index.
            pipe_or_context: What the scheme's ``create_transport()`` takes.
        """
        self.use(worker_idx, self._scheme.create_transport(pipe_or_context))

    def use(self, worker_idx: int, transport: Any) -> None:
        """Send to one more worker, over this transport."""
        self._transports[worker_idx] = transport

    @property
    def context(self) -> Any:
        """Owner of the model, or ``None`` when there is none or it is gone."""
        return self._scheme.context

    def send(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Send a snapshot of the weights, and wait until the workers have applied it.

        Workers that have attached are waited for until the scheme's ``timeout``; a worker that
        never attached for about two seconds after the first send, once. It gets the newest
        weights when it attaches, and a warning names it until then.

        Args:
            weights: ``None`` for the registered model; or a module, a TensorDict, a state dict,
                or a dotted name in the context. Never changed, and not needed afterwards.
            worker_ids: Only these workers change; ``None`` for all.

        Raises:
            PartialSyncError: A worker died, did not answer, or could not apply the weights; the
                others have them. With transports and one worker: the error itself.
            ConfigError: There is no such worker, or the weights cannot travel (a
                ``ValueError``).
            KeyError: Shared memory without ``auto_register``: the model is not registered.
            LocalProtocolError: An async send is pending (a ``RuntimeError``).
        """
        if self._pending is not None:
            raise LocalProtocolError(
                "Cannot call send() while an async send is pending. Call wait_async() first."
            )
        if self._transports:
            self._wait(self._start(self._prepare(weights), worker_ids))
        else:
            self._scheme.send(self._prepare(weights), worker_ids)

    def send_async(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> None:
        """Take a snapshot now and send it in the background; :meth:`wait_async` waits for it.

        Args:
            weights: As for :meth:`send`; may change as soon as this returns.
            worker_ids: As for :meth:`send`.

        Raises:
            LocalProtocolError: An async send is pending already (a ``RuntimeError``).
            ConfigError: As for :meth:`send`. What is wrong with a worker, :meth:`wait_async`
                raises.
        """
        if self._pending is not None:
            raise LocalProtocolError(
                "Cannot call send_async() again while a send is pending. Call wait_async() first."
            )
        for transport in self._chosen(worker_ids).values() if self._transports else ():
            if not hasattr(transport, "send_weights_async"):
                raise LocalProtocolError(
                    f"transport of type {type(transport)} does not support async send"
                )
        prepared, started = self._prepare(weights), _Started()
        if self._transports:
            started = self._start(prepared, worker_ids)
            if started.refused is not None and not started.pending:
                raise started.refused
        else:
            self._scheme.send_async(prepared, worker_ids)
        self._pending = started

    def wait_async(self) -> None:
        """Wait for the pending :meth:`send_async`.

        Raises:
            LocalProtocolError: None is pending (a ``RuntimeError``).
            PartialSyncError: As for :meth:`send`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            raise LocalProtocolError("No async send is pending. Call send_async() first.")
        if self._transports:
            self._wait(pending)
        else:
            self._scheme.wait_async()

    def update_weights(self, weights: Any) -> None:
        """The same as :meth:`send` to all workers."""
        self.send(weights)

    def offer(self, weights: Any) -> None:
        """Have workers that attach before the first send get these."""
        self._start(weights, None).drop()

    def _prepare(self, weights: Any) -> Any:
        scheme = self._scheme
        strategy = WeightStrategy(scheme.strategy)
        prepared = scheme.prepare_weights(weights, scheme.model_id, strategy, self.context)
        scheme.register_sent(prepared)
        return prepared

    def _chosen(self, worker_ids: int | Iterable[int] | None) -> dict[int, Any]:
        named = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        chosen = list(self._transports if named is None else named)
        for idx in chosen:
            if idx not in self._transports:
                raise ConfigError(f"Worker {idx} not registered")
        if named is None and not self._lost.issuperset(chosen):
            chosen = [idx for idx in chosen if idx not in self._lost]
        return {idx: self._transports[idx] for idx in chosen}

    def _start(self, weights: Any, worker_ids: int | Iterable[int] | None) -> _Started:
        each_its_own = is_per_worker(weights)
        if each_its_own and worker_ids is None:
            worker_ids = weights
        chosen, model_id = self._chosen(worker_ids), self._scheme.model_id or "policy"
        if each_its_own and (missing := chosen.keys() - weights.keys()):
            raise ConfigError(f"no weights were given for worker {min(missing)}")
        each = {idx: weights[idx] if each_its_own else weights for idx in chosen}
        started = _Started()
        if all(isinstance(transport, MPTransport) for transport in chosen.values()):
            if weights is None:
                raise ConfigError(
                    "there is nothing to send: pass weights to send(), or model=, weights= or "
                    "context= to init_on_sender()"
                )
            given = {id(value): value for value in each.values()}  # one copy of what is the same
            copies = {key: self._copier.copy(value) for key, value in given.items()}
            each = {idx: copies[id(value)] for idx, value in each.items()}
            started.snapshots += copies.values()
        for idx, transport in chosen.items():
            try:
                if hasattr(transport, "send_weights_async"):
                    transport.send_weights_async(model_id, each[idx])
                    started.pending[idx] = transport
                else:
                    transport.send_weights(model_id, each[idx])
                    started.acked.add(idx)
            except (ConfigError, KeyError, LocalProtocolError) as exc:
                started.refused = started.refused or exc
            except Exception as exc:  # noqa: BLE001 - raised once all were served
                started.failed[idx] = exc
            except BaseException:  # Ctrl-C goes on to the caller
                started.drop()
                raise
        return started

    @property
    def _has_pipes(self) -> bool:
        """Whether workers may attach later, and may be lost: the transports are the scheme's."""
        return all(
            isinstance(transport, MPTransport) and transport.link.patient
            for transport in self._transports.values()
        )

    def _wait(self, started: _Started) -> None:
        """Wait for all, then raise what went wrong."""
        began, limit, late = time.monotonic(), self._scheme.timeout, []
        if self._give_up is None:
            self._give_up = began + _GRACE_SECONDS
        try:
            for idx, transport in list(started.pending.items()):
                now = time.monotonic()
                patience = [] if limit is None else [max(0.0, began + limit - now)]
                try:
                    grace = max(0.0, self._give_up - now)
                    if self._has_pipes and not transport.wait_for_peer(grace):
                        late.append(idx)
                        continue
                    del started.pending[idx]
                    if self._has_pipes:
                        transport.wait_ack(*patience)
                    elif hasattr(transport, "wait_ack"):
                        transport.wait_ack()
                    started.acked.add(idx)
                except Exception as exc:  # noqa: BLE001 - raised once all were waited for
                    started.failed[idx] = exc
        finally:
            started.drop()  # of who is late; and after Ctrl-C
        if started.refused is not None:
            raise started.refused
        if self._has_pipes:
            self._lost.update(
                idx for idx in started.failed if not self._transports[idx].check_connection()
            )
        elif len(started.failed) == 1 and not started.acked:
            raise next(iter(started.failed.values()))
        if started.failed:
            failed = {idx: _as_failure(idx, error) for idx, error in started.failed.items()}
            error = PartialSyncError(acked=started.acked, failed=failed)
            hint(error)
            raise error
        for snapshot in () if late else started.snapshots:
            self._copier.free(snapshot)
        if late:
            warnings.warn(
                f"no worker has attached to the pipes of workers {late} yet: they get the newest "
                "weights when they call init_on_worker()",
                stacklevel=3,
            )

    def _ends(self) -> Iterable[Any]:
        return self._transports.values()


# -- receiving ------------------------------------------------------------------------------------


class _Destination:
    """What weights are put into, and the guard of its forwards. Refers to no scheme.

    Args:
        scheme: Its options, and its guard.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self.model: Any = None  # or a dotted name
        self.context_ref: weakref.ref[Any] | None = None
        self._model_id = scheme.model_id
        self._options = (scheme.strict, scheme.apply_copy)
        self.guard: Guard = guard_of(core_of(scheme))
        self._hooks = scheme.guard == "forward"
        self._target: Target | None = None
        self._current: Snapshot | Arrived | None = None  # what the model views
        self._count = self._reported = 0  # updates that were taken
        self._refused: Exception | None = None

    @property
    def context(self) -> Any:
        """Owner of the model; ``None`` without one."""
        if self.context_ref is None:
            return None
        context = self.context_ref()
        if context is None:
            raise ConfigError("Context has been garbage collected")
        return context

    def find(self) -> Any:
        """The model as it is now, whose forwards are guarded from then on; or ``None``."""
        context, model = self.context, self.model
        if isinstance(model, str):
            if context is None:
                raise ConfigError("Context is required to resolve string references")
            model = resolve_path(context, model)
        elif model is None and context is not None:
            with contextlib.suppress(AttributeError):  # the context has no such model yet
                model = resolve_model(context, self._model_id or "policy")
        if self._target is None or self._target.target is not model:
            strict, _ = self._options
            self._target = None if model is None else Target(model, strict=strict)
            if self._hooks and why_unguarded(model) is None:
                self.guard.install(model)
        return model

    def prepare(self) -> None:
        """Guard the forwards of a model that is there already, before weights are."""
        with contextlib.suppress(AttributeError, ConfigError):
            self.find()

    def check_guarded(self) -> None:
        """Raise unless weights can change between two forwards without a call of the program."""
        model = self.find()
        why = None if model is None else why_unguarded(model)
        if why is not None and self._hooks:
            raise ConfigError(
                f"a {type(model).__name__} {why}: construct the scheme with guard='reading' and "
                "read inside `with scheme.reading():`, or with apply='manual' and call receive()"
            )

    def _change(self, weights: Snapshot | Arrived) -> Callable[[], None]:
        if self.find() is None or self._target is None:
            raise ConfigError("No model registered")
        target, (_, in_place) = self._target, self._options

        def change() -> None:
            # All that is plain points at the new memory then, at once: what the program, or
            # another process, shares of the old one stays as it is.
            with FORKING:
                target.apply_(weights.layout, weights.flat, weights.values, copy=in_place)
            before, self._current = self._current, weights
            if isinstance(before, Arrived) and before.flat.exclusive():
                before.give_back()

        return change

    def put(self, weights: Snapshot) -> None:
        """Change the model, between two forwards, and not on a thread that signals interrupt.

        Raises:
            ManifestMismatch: They do not fit; nothing was changed.
            ConfigError: There is no model.
            LocalProtocolError: This thread is in a forward.
            SyncTimeout: One of another thread did not end.
        """
        self.guard.refuse_inside_read("receive")
        change = self._change(weights)
        other = ThreadPoolExecutor(1)
        try:
            guard, patience = self.guard, _READ_SECONDS
            other.submit(guard.between_reads, change, advice="", patience=patience).result()
        finally:
            other.shutdown(wait=False)  # after Ctrl-C it goes on, and splits nothing

    async def take(self, endpoint: Endpoint, timeout: float | None) -> bool:
        """Change the model to the next update of a link, on the portal's loop, and answer it.

        Returns:
            False when none came in time.

        Raises:
            ConfigError: There is no model, or the update is of another one.
            Exception: As for :meth:`put`.
        """
        arrived = await endpoint.peek(timeout)
        if arrived is None:
            return False
        give_up = time.monotonic() + _READ_SECONDS
        try:
            if self._model_id not in (None, arrived.model_id):
                raise ConfigError(
                    f"weights of the model {arrived.model_id!r} came for the worker of "
                    f"{self._model_id!r}"
                )
            change = self._change(arrived)
            while not self.guard.exclusively(change, timeout=0.0):
                if time.monotonic() > give_up:
                    raise SyncTimeout(f"a forward pass went on for {_READ_SECONDS:g} s")
                await self.guard.wait_free(1.0)
        except Exception as exc:  # the trainer hears it, and so does who waits
            await endpoint.acknowledge(arrived, exc)
            raise
        self._count += 1
        await endpoint.acknowledge(arrived)
        return True

    async def follow(self, endpoint: Endpoint) -> None:
        """Take all that comes, without a call of the program, for as long as the link lives."""
        endpoint.tasks.start(self._follow(endpoint), "aiosync legacy follow")

    async def _follow(self, endpoint: Endpoint) -> None:
        while endpoint.error is None:
            try:
                await self.take(endpoint, None)
            except Exception as exc:  # noqa: BLE001 - receive() raises it
                if endpoint.error is None:  # else that is raised
                    self._refused = without_frames(exc)
            endpoint.notify()

    async def news(self, endpoint: Endpoint, timeout: float | None) -> bool:
        """Whether there is an update that was not reported, within ``timeout`` seconds."""
        if not await endpoint.until(
            lambda: self._refused is not None or self._count > self._reported, timeout
        ):
            return False
        if self._count > self._reported:
            self._reported = self._count
            return True
        error, self._refused = self._refused, None
        assert error is not None
        raise error


class WeightReceiver(OfScheme):
    """Receives weights for a scheme; ``scheme.get_receiver()`` has one.

    Args:
        scheme: What it receives for.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._transport: Any = None  # programs looked at its pipe
        self._destination = _Destination(scheme)
        self._is_to_follow = self._follows = False

    @property
    def context(self) -> Any:
        """Owner of the model; ``None`` without one.

        Raises:
            ConfigError: It has been garbage collected (a ``ValueError``).
        """
        return self._destination.context

    @context.setter
    def context(self, value: Any) -> None:
        self._destination.context_ref = None if value is None else weakref.ref(value)

    def register_model(self, model: Any) -> None:
        """Choose what weights are applied to.

        Args:
            model: A module; or a dotted name, which is looked up in the context whenever it is
                needed.
        """
        self._destination.model = model
        self._begin_to_follow()

    def register_worker_transport(self, pipe_or_context: Any) -> None:
        """Receive over a transport.

        For receivers that :meth:`WeightSyncScheme.create_receiver` made.

        Args:
            pipe_or_context: What the scheme's ``create_transport()`` takes.
        """
        self.use(self._scheme.create_transport(pipe_or_context), follows=False)

    def use(self, transport: Any, *, follows: bool) -> None:
        """Receive over this transport.

        Args:
            transport: The transport; an :class:`MPTransport`, if it follows.
            follows: The model changes without :meth:`receive`.
        """
        self._transport = transport
        self._destination.prepare()
        if follows:
            self._destination.check_guarded()
            self._is_to_follow = True
            self._begin_to_follow()

    def _begin_to_follow(self) -> None:
        # Not before there is a model: what comes would be refused.
        if self._is_to_follow and not self._follows and self.model is not None:
            self._transport.link.call("init_on_worker", self._destination.follow)
            self._follows = True

    @property
    def model(self) -> Any:
        """The registered model, found in the context if it was given by name; or ``None``.

        Raises:
            ConfigError: A name was given, and there is no context (a ``ValueError``).
        """
        return self._destination.find()

    def receive(self, timeout: float | None = 0.001) -> bool:
        """Look for weights that this has not reported yet, and wait a moment for them.

        With ``MultiProcessWeightSyncScheme`` they are applied here, and only here; with
        ``SharedMemWeightSyncScheme`` they were applied already, between two forward passes.
        Over a transport they are answered in any case: what this raises, the trainer is told.

        Args:
            timeout: Seconds; ``None`` waits until there are some, or the trainer goes away.

        Returns:
            Whether there were.

        Raises:
            PeerClosed: The trainer went away.
            ApplyError: The weights do not fit the model, which kept what it had; ``send()`` of
                the trainer says so, too.
            ConfigError: Weights have come, but ``No model registered``, or they are of another
                model (a ``ValueError``).
        """
        transport = self._transport
        if transport is None:
            return self._scheme.receive(timeout=timeout) is not None
        try:
            self._begin_to_follow()
            if self._follows:
                news = self._destination.news
                return bool(transport.link.call("receive", lambda end: news(end, timeout)))
            if isinstance(transport, MPTransport):
                return self._receive_from(transport, timeout)
            return self._receive_by(transport, timeout)
        except ManifestMismatch as exc:
            error = ApplyError(str(exc), remote_type=type(exc).__name__)
            hint(error)
            raise error from exc

    def _receive_from(self, transport: MPTransport, timeout: float | None) -> bool:
        taken, call = self._destination, transport.link.call
        taken.guard.refuse_inside_read("receive")
        if self.model is not None:
            return call("receive", lambda end: taken.take(end, timeout))
        if call("receive", lambda end: end.peek(timeout)) is None:
            return False
        raise ConfigError("No model registered")  # what has come stays

    def _receive_by(self, transport: Any, timeout: float | None) -> bool:
        received = transport.receive_weights(timeout=timeout)
        if received is None:
            return False
        try:
            self._destination.put(Copier().copy(received[1]))
        except BaseException as exc:  # goes on to the caller, after the trainer
            # Left without an answer, they would take the one to the next weights.
            try:
                self._answer(transport, f"{type(exc).__name__}: {exc}")
            except Exception as other:  # noqa: BLE001 - goes to the caller with the first error
                exc.add_note(f"the trainer could not be notified: {type(other).__name__}: {other}")
            raise
        self._answer(transport, "updated")
        return True

    @staticmethod
    def _answer(transport: Any, message: str) -> None:
        if hasattr(transport, "send_ack"):
            transport.send_ack(message)

    def apply_weights(self, weights: Any) -> None:
        """Put weights into the model by hand, between two forward passes.

        Args:
            weights: TensorDict or state dict; copied, never aliased.

        Raises:
            ConfigError: ``No model registered`` (a ``ValueError``).
            ManifestMismatch: They do not fit; nothing was changed.
        """
        scheme, transport = self._scheme, self._transport
        if transport is None and scheme.initialized_on_receiver:
            scheme.apply_weights(weights)
            return
        self._destination.put(Copier().copy(weights))
        if not isinstance(transport, MPTransport) or transport.owes_ack:
            self._answer(transport, "updated")

    def _ends(self) -> Iterable[Any]:
        return [self._transport]

    def close(self, *, at_once: bool = False) -> None:
        """See :meth:`WeightSender.close`."""
        self._destination.guard.uninstall()
        super().close(at_once=at_once)
