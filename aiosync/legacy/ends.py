"""The two ends of a scheme of the older generation: senders and receivers, which it hands out.

They own the transports that the scheme's ``create_transport()`` makes, both aiosync's and those of
users. Must not import schemes.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from aiosync._repr import in_every_state, text_of
from aiosync.errors import (
    ApplyError,
    ConfigError,
    LocalProtocolError,
    ManifestMismatch,
    SyncTimeout,
)
from aiosync.legacy.endpoint import Copier, Endpoint, Weights, clone_tensors
from aiosync.legacy.transports import Answered, Backend, Deliveries, Finish, MPTransport
from aiosync.receiver.forwards import why_unguarded
from aiosync.schemes.internal import life_of
from aiosync.schemes.sources import Given, is_per_worker, resolve_model, resolve_path
from aiosync.strategy import WeightStrategy
from aiosync.sync._portal import refuse_inside_loop
from aiosync.sync._schemes import Adapter, core_of, run_on_loop
from aiosync.tensors import Target
from aiosync.transports._forks import FORKING
from aiosync.transports.base import without_frames

if TYPE_CHECKING:
    from typing import Self

__all__ = ["WeightReceiver", "WeightSender"]

# Time from the first send on in which sends wait for workers that have not attached yet.
_GRACE_SECONDS = 2.0
_READ_SECONDS = 60.0  # longest time that an update waits for the forwards of other threads


class WeightSyncScheme(Adapter, Protocol):
    """A scheme of this generation, as its two ends use it; ``legacy.schemes`` has the class."""

    @property
    def strategy(self) -> Any: ...
    @property
    def strict(self) -> bool: ...
    @property
    def buffers(self) -> Literal["all", "persistent"]: ...
    @property
    def guard(self) -> Literal["forward", "reading"]: ...
    @property
    def apply_copy(self) -> bool: ...
    @property
    def model_id(self) -> str | None: ...
    @property
    def worker_idx(self) -> int | None: ...
    @property
    def context(self) -> Any: ...
    def make_transport(self, end: Any) -> Any: ...
    def prepare_weights(
        self, weights: Any, model_id: str | None, strategy: Any, context: Any
    ) -> Any: ...
    def register_sent(self, weights: Any) -> None: ...


class OfScheme:
    """Base class of senders and receivers, with the transports of a scheme.

    A pickle of it holds the scheme and nothing else.

    Attributes:
        connected: True if ``connect()`` of the scheme succeeded, or is under way.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        # By index of the worker; those with TorchRL's present interface are wrapped in a Backend.
        self._transports: dict[int, Any] = {}
        self.connected = False

    @property
    def transports(self) -> dict[int, Any]:
        """Transports by index of the worker, as the scheme made them."""
        found = self._transports.items()
        return {idx: each.inner if isinstance(each, Backend) else each for idx, each in found}

    def close(self, *, at_once: bool = False) -> None:
        """Close every transport that can be closed.

        Args:
            at_once: Close without waiting, for destructors and signal handlers.
        """
        for transport in self._transports.values():
            if at_once and isinstance(transport, MPTransport):
                transport.abort()
            elif hasattr(transport, "close"):  # a user's transport need not have close()
                transport.close()

    def __reduce__(self) -> tuple[type[Self], tuple[WeightSyncScheme]]:
        return type(self), (self._scheme,)

    @in_every_state
    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._scheme!r}>"


# -- sending --------------------------------------------------------------------------------------


class WeightSender(OfScheme):
    """Sender of a scheme; ``scheme.get_sender()`` returns it.

    One thread at a time, which runs no event loop, may call its methods. A pickle of it holds only
    the scheme's configuration: neither links, nor the context, nor a pending send.

    Args:
        scheme: The scheme to send for.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        super().__init__(scheme)
        self._copier = Copier()
        self._pending: Deliveries | None = None  # the deliveries of a pending send_async()
        self._give_up: float | None = None  # time from which on sends wait for no late workers
        self._lost: set[int] = set()  # workers whose end a send has reported

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Add a worker, with a transport of its own.

        It is for senders that :meth:`WeightSyncScheme.create_sender` made.

        Args:
            worker_idx: Index of the worker.
            pipe_or_context: Argument of the scheme's ``create_transport()``.
        """
        self.use(worker_idx, self._scheme.make_transport(pipe_or_context))

    def use(self, worker_idx: int, transport: Any) -> None:
        """Add a worker with an existing transport."""
        self._transports[worker_idx] = transport

    def meet(self, worker_idx: int | None = None) -> None:
        """Let transports that need a handshake meet their workers: all, or only that of one."""
        for idx, transport in self._transports.items():
            if worker_idx in (None, idx) and isinstance(transport, Backend):
                transport.meet_worker()

    @property
    def context(self) -> Any:
        """Owner of the model; ``None`` without one, or if it was garbage-collected."""
        return self._scheme.context

    def send(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Send a snapshot of the weights, and wait until the workers have applied it.

        The call waits for attached workers until the scheme's ``timeout``. For a worker that has
        not attached yet it waits only once, for about two seconds after the first send. Such a
        worker gets the newest weights when it attaches, and a warning names it until then.

        Args:
            weights: ``None`` for the registered model; or a module, a TensorDict, a state dict,
                or a dotted name in the context. The call never changes them, and they are not
                needed afterwards.
            worker_ids: Indices of the workers to update; ``None`` for all.

        Raises:
            PartialSyncError: A worker died, did not answer, or could not apply the weights; the
                others have them.
            ConfigError: There is no such worker, or the weights cannot travel (a
                ``ValueError``).
            KeyError: Shared memory without ``auto_register``: the model is not registered.
            LocalProtocolError: An async send is pending, or no worker was registered (a
                ``RuntimeError``).
        """
        if self._pending is not None:
            raise LocalProtocolError(
                "Cannot call send() while an async send is pending. Call wait_async() first."
            )
        self._wait(self._start(self._prepare(weights), self.chosen(worker_ids)))

    def send_async(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> None:
        """Take a snapshot now and send it in the background; :meth:`wait_async` waits for it.

        Args:
            weights: As for :meth:`send`; may change as soon as the call returns.
            worker_ids: As for :meth:`send`.

        Raises:
            LocalProtocolError: An async send is pending already, or no worker was registered (a
                ``RuntimeError``).
            ConfigError: As for :meth:`send`. The errors of workers are raised by
                :meth:`wait_async`.
        """
        if self._pending is not None:
            raise LocalProtocolError(
                "Cannot call send_async() again while a send is pending. Call wait_async() first."
            )
        chosen = self.chosen(worker_ids)
        for transport in chosen.values():
            if not hasattr(transport, "send_weights_async"):
                raise LocalProtocolError(
                    f"transport of type {type(transport)} does not support async send"
                )
        prepared = self._prepare(weights)
        if not all(getattr(each, "_takes_snapshot", False) for each in chosen.values()):
            # A user's transport may read the weights after this call, as queues do.
            prepared = clone_tensors(prepared)
        self._pending = self._start(prepared, chosen)

    def wait_async(self) -> None:
        """Wait for the pending :meth:`send_async`.

        Raises:
            LocalProtocolError: No send is pending (a ``RuntimeError``).
            PartialSyncError: As for :meth:`send`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            raise LocalProtocolError("No async send is pending. Call send_async() first.")
        self._wait(pending)

    def update_weights(self, weights: Any) -> None:
        """Send weights to all workers, as :meth:`send` does."""
        self.send(weights)

    def offer(self, weights: Any) -> None:
        """Offer weights to the workers that attach before the first send."""
        self._start(weights, self.chosen(None))

    def _prepare(self, weights: Any) -> Any:
        """Return the weights of a send, extracted as views, and let the scheme register them."""
        scheme = self._scheme
        if not self._transports:
            raise LocalProtocolError("there is no worker yet: call register_worker()")
        if is_per_worker(weights):
            raise ConfigError(
                "weights by worker need a scheme without pipes or actors: send those of one worker "
                "with worker_ids="
            )
        strategy = WeightStrategy(scheme.strategy)
        prepared = scheme.prepare_weights(weights, scheme.model_id, strategy, self.context)
        scheme.register_sent(prepared)
        return prepared

    def chosen(self, worker_ids: int | Iterable[int] | None) -> dict[int, Any]:
        """Return the transports of these workers, by index.

        ``None`` stands for all workers without those that are known to be lost; if all are lost,
        for all.

        Raises:
            ConfigError: There is no such worker (a ``ValueError``).
        """
        named = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        chosen = list(self._transports if named is None else named)
        for idx in chosen:
            if idx not in self._transports:
                raise ConfigError(f"Worker {idx} not registered")
        # If all are lost, a send to all of them raises, and does not succeed without a worker.
        there = [idx for idx in chosen if named is not None or idx not in self._lost]
        return {idx: self._transports[idx] for idx in there or chosen}

    def _start(self, weights: Any, chosen: Mapping[int, Any]) -> Deliveries:
        """Begin to send weights over these transports; :meth:`_wait` waits for the answers."""
        model_id = self._scheme.model_id or "policy"
        if all(isinstance(transport, MPTransport) for transport in chosen.values()):
            if weights is None:
                raise ConfigError(
                    "there is nothing to send: pass weights to send(), or model=, weights= or "
                    "context= to init_on_sender()"
                )
            weights = self._copier.copy(weights)  # one copy for all transports
        sending = Deliveries()
        try:
            for idx, transport in chosen.items():
                sending.begin(idx, functools.partial(_begin, transport, model_id, weights))
        except Exception:  # The caller of send() sees it.
            # The next send would take the answers of users' transports to this one for its own.
            for idx in sending.pending.copy():
                if not isinstance(chosen[idx], Answered):
                    sending.finish(idx, None)
            raise
        return sending

    def _wait(self, sending: Deliveries) -> None:
        """Wait for the answers of all workers, then raise their errors.

        Workers that have not attached yet are no failure: a warning names them.

        Raises:
            PartialSyncError: A worker failed.
        """
        # Deadlines count from now, also for an earlier send_async().
        late, sending.began = [], time.monotonic()
        if self._give_up is None:
            self._give_up = sending.began + _GRACE_SECONDS
        for idx in list(sending.pending):
            transport, grace = self._transports[idx], self._give_up - time.monotonic()
            if isinstance(transport, MPTransport) and not transport.wait_for_peer(max(0.0, grace)):
                late.append(idx)
                continue
            sending.finish(idx, transport.timeout if isinstance(transport, Answered) else None)
        self._mark_lost(sending.failed)
        sending.raise_failures()
        if late:
            warnings.warn(
                f"no worker has attached to the pipes of workers {late} yet: they get the newest "
                "weights when they call init_on_worker()",
                stacklevel=3,
            )

    def _mark_lost(self, failed: Iterable[int]) -> None:
        """Leave failed workers without a link out of later sends that name no workers."""
        for idx in failed:
            transport = self._transports[idx]
            if isinstance(transport, MPTransport) and not transport.check_connection():
                self._lost.add(idx)


def _begin(transport: Any, model_id: str, weights: Any) -> Finish:
    """Begin to send over a transport of any kind; return a function that waits for its answer."""
    if isinstance(transport, Answered):
        return transport.begin(model_id, weights)
    if not hasattr(transport, "send_weights_async"):
        transport.send_weights(model_id, weights)
        return lambda _: None
    transport.send_weights_async(model_id, weights)
    return lambda _: transport.wait_ack() if hasattr(transport, "wait_ack") else None


# -- receiving ------------------------------------------------------------------------------------


class WeightReceiver(OfScheme):
    """Receiver of a scheme; ``scheme.get_receiver()`` returns it.

    Args:
        scheme: The scheme to receive for.

    Attributes:
        version: Number of updates that the model got.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        super().__init__(scheme)
        self._given = Given(scheme.model_id)
        self._guard = life_of(core_of(scheme)).guard
        self._target: Target | None = None
        # The model's tensors view these weights. This reference only keeps their memory.
        self._viewed: Weights | None = None
        self.version = 0
        # True if the model shall change, or does change, without calls of receive().
        self._is_to_follow = self._follows = False
        # If it does: True for an update that receive() has not reported yet, or the error of one.
        self._news: Exception | bool = False

    @property
    def _transport(self) -> Any:  # has this name because programs used its `pipe`
        return self._transports.get(0)

    @property
    def context(self) -> Any:
        """Owner of the model; ``None`` without one.

        Raises:
            ConfigError: The owner has been garbage collected (a ``ValueError``).
        """
        if self._lost_context:
            raise ConfigError("Context has been garbage collected")
        return self._given.context

    @context.setter
    def context(self, value: Any) -> None:
        self._given.context = value

    @property
    def _lost_context(self) -> bool:
        """True if the owner of the model has been garbage collected."""
        return self._given.context_ref is not None and self._given.context is None

    def register_model(self, model: Any) -> None:
        """Set the model that weights are applied to.

        Args:
            model: A module; or a dotted name, which is looked up in the context whenever it is
                needed.
        """
        self._given.model = model
        self._begin_to_follow()

    @property
    def model(self) -> Any:
        """Registered model, found in the context if it was given by name; ``None`` without one.

        Raises:
            ConfigError: A name was given, and there is no context (a ``ValueError``).
        """
        target = self._find()
        return None if target is None else target.target

    def _find(self) -> Target | None:
        """Find the present model and guard its forwards from now on; ``None`` without a model."""
        model, scheme = self._find_model(), self._scheme
        if model is None:
            self._target = None
        elif self._target is None or self._target.target is not model:
            # Programs of this generation send TensorDict.from_module(), which has no extra state,
            # so missing extra state is only a warning.
            self._target = Target(model, strict=scheme.strict and "warn", buffers=scheme.buffers)
            if scheme.guard == "forward" and why_unguarded(model) is None:
                self._guard.install(model)
        return self._target

    def _find_model(self) -> Any:
        """Return the registered model, or that of the context; ``None`` if there is none yet."""
        model = self._given.model
        if model is not None and not isinstance(model, str):
            return model
        context = self.context
        if isinstance(model, str):
            if context is None:
                raise ConfigError("Context is required to resolve string references")
            return resolve_path(context, model)
        if context is not None:
            with contextlib.suppress(AttributeError):  # the context may not have the model yet
                return resolve_model(context, self._scheme.model_id or "policy")
        return None

    # -- the link ------------------------------------------------------------------------------

    def register_worker_transport(self, pipe_or_context: Any) -> None:
        """Receive over a new transport.

        It is for receivers that :meth:`WeightSyncScheme.create_receiver` made.

        Args:
            pipe_or_context: Argument of the scheme's ``create_transport()``.
        """
        self.use(self._scheme.make_transport(pipe_or_context), follows=False)

    def use(self, transport: Any, *, follows: bool) -> None:
        """Receive over an existing transport.

        Args:
            transport: The transport; an :class:`MPTransport` if ``follows`` is true.
            follows: Change the model without calls of :meth:`receive`.

        Raises:
            ConfigError: ``follows`` is true, and the model's forwards cannot be guarded.
        """
        self._transports[0], self._is_to_follow = transport, follows
        with contextlib.suppress(AttributeError, ConfigError):  # there may be no model yet
            self._find()
        self._begin_to_follow()

    def meet(self, worker_idx: int | None = None) -> None:
        """Let a transport that needs a handshake meet the trainer, and apply its first weights."""
        if isinstance(self._transport, Backend):
            idx = self._scheme.worker_idx if worker_idx is None else worker_idx
            weights = self._transport.meet_trainer(idx)
            if weights is not None:
                self._put(weights)

    def assign(self, name: str, value: Any) -> None:
        """Replace the context if ``name`` is ``"context"``; otherwise the model."""
        if name == "context":
            self.context = value
        else:
            self.register_model(value)

    def _begin_to_follow(self) -> None:
        """Start the task that applies updates without receive(), if there shall be one."""
        # Without a model every update would be refused, so start only when there is one.
        if not self._is_to_follow or self._follows or (model := self.model) is None:
            return
        why = why_unguarded(model) if self._scheme.guard == "forward" else None
        if why is not None:
            raise ConfigError(
                f"a {type(model).__name__} {why}: construct the scheme with guard='reading' "
                "and read inside `with scheme.reading():`, or with apply='manual' and call "
                "receive()"
            )
        end, reference = self._transport.end, weakref.ref(self)

        async def begin() -> None:
            end.tasks.start(self._follow(end, reference), "aiosync legacy follow")

        self._transport.call("init_on_worker", begin)
        self._follows = True

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, timeout: float | None = 0.001) -> bool:
        """Wait a moment for weights that this method has not reported yet.

        With ``MultiProcessWeightSyncScheme`` this call applies the weights, and no other does. With
        ``SharedMemWeightSyncScheme`` they were applied already, between two forward passes. Over a
        transport the trainer gets an answer in any case, also the error that this call raises.

        Args:
            timeout: Seconds to wait; ``None`` waits until weights come, or the trainer ends.

        Returns:
            True if there were such weights.

        Raises:
            PeerClosed: The trainer has ended.
            ApplyError: The weights do not fit the model, which keeps its previous weights; the
                trainer's ``send()`` raises, too.
            ConfigError: Weights have come, but ``No model registered``, or they are of another
                model (a ``ValueError``).
            LocalProtocolError: No transport was registered (a ``RuntimeError``).
        """
        transport = self._transport
        if transport is None:
            raise LocalProtocolError("there is no transport: call register_worker_transport()")
        # With a lost context this would raise, and leave the trainer without an answer.
        if not self._lost_context:
            self._begin_to_follow()
        if isinstance(transport, MPTransport):
            if not self._follows:
                self._guard.refuse_inside_read("receive")
            wait = self._wait_for_news if self._follows else self._take
            return transport.call("receive", wait, transport.end, timeout)
        received = transport.receive_weights(timeout=timeout)
        if received is None:
            return False
        self._put_and_answer(transport, received[1])
        return True

    def _put_and_answer(self, transport: Any, weights: Any) -> None:
        """Put weights into the model, pass them on, and answer the trainer, also after an error."""
        try:
            self._put(weights)
            if isinstance(transport, Backend):
                self._pass_on(weights)
        except BaseException as exc:  # the trainer gets it first, then the caller
            # Without an answer, the answer to the next weights would count for these.
            self._answer(f"{type(exc).__name__}: {text_of(exc)}")
            raise
        self._answer("updated")

    def _pass_on(self, weights: Any) -> None:
        """Let the context pass weights on, as TorchRL's collectors do to collectors below them."""
        # A given model needs no context: without it there is just no collector below.
        context, model_id = self._given.context, self._scheme.model_id or "policy"
        if not hasattr(context, "update_policy_weights_"):
            return
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            # TorchRL's collectors refuse the names of their own models, except the policy's.
            if model_id != "policy" and resolve_model(context, model_id) is self.model:
                return
        context.update_policy_weights_(policy_or_weights=weights, model_id=model_id)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the model by hand, between two forward passes.

        Args:
            weights: TensorDict or state dict; copied, never aliased.
            inplace: Keep the parameter objects; otherwise replace them.

        Raises:
            ConfigError: ``No model registered`` (a ``ValueError``).
            ApplyError: The weights do not fit the model; nothing was changed.
        """
        try:
            if inplace:
                self._put(weights)
            else:
                self._replace(weights)
        except BaseException as exc:  # the trainer gets it first, then the caller
            self._answer_if_owed(f"{type(exc).__name__}: {exc}")
            raise
        self._answer_if_owed("updated")

    def _put(self, weights: Any) -> None:
        """Copy weights into the model on the portal's loop, between two forwards."""
        refuse_inside_loop("receive", "a scheme of aiosync")
        self._guard.refuse_inside_read("receive")
        run_on_loop(self._scheme, self._change(Copier().copy(weights)))

    def _replace(self, weights: Any) -> None:
        """Replace the model's parameter objects by new ones with the weights, on this thread."""
        self._guard.refuse_inside_read("apply_weights")
        model = self.model
        if model is None:
            raise ConfigError("No model registered")
        apply = WeightStrategy(self._scheme.strategy).apply_weights
        self._guard.between_reads(
            functools.partial(apply, model, weights, inplace=False), method="apply_weights"
        )
        self._target = None  # it refers to the parameters that were replaced

    def _answer_if_owed(self, message: str) -> None:
        """Answer the trainer, unless the transport tells that it owes no answer."""
        if getattr(self._transport, "owes_ack", True):
            self._answer(message)

    def _answer(self, message: str) -> None:
        """Answer the trainer with ``"updated"`` or an error's text, if the transport can answer."""
        if hasattr(self._transport, "send_ack"):
            self._transport.send_ack(message)

    # -- coroutines on the portal's loop, where no signal handler interrupts them ----------------

    async def _change(self, weights: Weights) -> None:
        """Apply weights to the model, between two forwards.

        Raises:
            ApplyError: The weights do not fit the model; nothing was changed.
            ConfigError: There is no model.
            SyncTimeout: A forward of another thread did not end.
        """
        target, in_place = self._find(), self._scheme.apply_copy
        if target is None:
            raise ConfigError("No model registered")

        def change() -> None:
            # Unless they are copied in place, plain tensors then point at the new memory, all at
            # once. The old memory, which the program or another process may share, keeps its
            # values. A fork meanwhile would give the child parts of two versions.
            with FORKING:
                target.apply_(weights.layout, weights.flat, weights.values, copy=in_place)
            self._viewed = weights
            self.version += 1

        give_up = time.monotonic() + _READ_SECONDS
        try:
            while not self._guard.exclusively(change, timeout=0.0):
                if time.monotonic() > give_up:
                    raise SyncTimeout(f"a forward pass went on for {_READ_SECONDS:g} s")
                await self._guard.wait_free(1.0)
        except ManifestMismatch as exc:
            raise ApplyError(str(exc), remote_type=type(exc).__name__) from exc

    async def _take(self, end: Endpoint, timeout: float | None) -> bool:
        """Apply the next update of a link to the model, and answer it.

        Returns:
            True if an update was applied; False if none came in time.

        Raises:
            ConfigError: There is no model; or the update is of another model.
            ApplyError: The update does not fit.
            SyncTimeout: As for :meth:`_change`.
        """
        if not await end.until(lambda: end.arrived, timeout):
            return False
        # Without a model yet, the update stays for a later call. A lost context does not come
        # back: the trainer gets the error of _change() as the answer, unless a model was given.
        if not (self._follows or self._lost_context) and self._find() is None:
            raise ConfigError("No model registered")
        arrived, wanted = end.arrived[0], self._given.model_id
        try:
            if wanted not in (None, arrived.model_id):
                raise ConfigError(
                    f"weights of the model {arrived.model_id!r} came for the worker of {wanted!r}"
                )
            await self._change(arrived)
        except Exception as exc:  # both the trainer and the caller get the error
            await end.acknowledge(arrived, exc)
            raise
        self._news = True  # set before the trainer gets its answer
        await end.acknowledge(arrived)
        return True

    async def _wait_for_news(self, end: Endpoint, timeout: float | None) -> bool:
        """Wait until :meth:`_follow` applies an update; return True if so, or raise its error."""
        await end.until(lambda: self._news, timeout)
        news, self._news = self._news, False
        if isinstance(news, Exception):
            raise news
        return news

    @staticmethod
    async def _follow(end: Endpoint, reference: weakref.ref[WeightReceiver]) -> None:
        """Apply every update of a link until its receiver is deleted or the link ends."""
        while await end.until(lambda: end.arrived):
            receiver = reference()
            if receiver is None:
                return
            try:
                await receiver._take(end, 0.0)
            except Exception as exc:  # noqa: BLE001 - receive() raises it
                receiver._news = without_frames(exc)
            end.changed.notify()
            del receiver  # this task must not keep the receiver alive while it waits

    def close(self, *, at_once: bool = False) -> None:
        """Remove the guard from the model and close the link; see :meth:`WeightSender.close`."""
        self._guard.uninstall()
        super().close(at_once=at_once)
