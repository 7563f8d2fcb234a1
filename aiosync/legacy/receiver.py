"""The older generation's receiver, which a scheme hands out. Must not import schemes."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from typing import TYPE_CHECKING, Any

from aiosync.errors import (
    ApplyError,
    ConfigError,
    LocalProtocolError,
    ManifestMismatch,
    SyncTimeout,
)
from aiosync.legacy.endpoint import Copier, Endpoint, Weights
from aiosync.legacy.transports import Backend, MPTransport
from aiosync.receiver.forwards import why_unguarded
from aiosync.schemes.internal import life_of
from aiosync.schemes.sources import Given, resolve_model, resolve_path
from aiosync.strategy import WeightStrategy
from aiosync.sync._portal import refuse_inside_loop
from aiosync.sync._schemes import core_of, run_on_loop
from aiosync.tensors import Target
from aiosync.transports._forks import FORKING
from aiosync.transports.base import without_frames

if TYPE_CHECKING:
    from aiosync.legacy.schemes import WeightSyncScheme

from aiosync.legacy.scheme_end import SchemeEnd

__all__ = ["WeightReceiver"]

_READ_SECONDS = 60.0  # longest time that an update waits for the forwards of other threads


class WeightReceiver(SchemeEnd):
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
        self._current: Weights | None = None  # the weights that the model's tensors view
        self.version = 0
        # True if the model shall change, or does change, without calls of receive().
        self._is_to_follow = self._follows = False
        # An update, or the error of one, that receive() has not reported yet in that case.
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
        context = self._given.context
        if context is None and self._given.context_ref is not None:
            raise ConfigError("Context has been garbage collected")
        return context

    @context.setter
    def context(self, value: Any) -> None:
        self._given.context = value

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
        context, model, scheme = self.context, self._given.model, self._scheme
        if isinstance(model, str):
            if context is None:
                raise ConfigError("Context is required to resolve string references")
            model = resolve_path(context, model)
        elif model is None and context is not None:
            with contextlib.suppress(AttributeError):  # the context may not have the model yet
                model = resolve_model(context, self._scheme.model_id or "policy")
        if model is None:
            self._target = None
        elif self._target is None or self._target.target is not model:
            # Programs of this generation send TensorDict.from_module(), which has no extra state,
            # so missing extra state is only a warning.
            self._target = Target(model, strict=scheme.strict and "warn", buffers=scheme.buffers)
            if scheme.guard == "forward" and why_unguarded(model) is None:
                self._guard.install(model)
        return self._target

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
            weights = self._transport.meet_trainer(idx or 0)
            if weights is not None:
                self._put(weights)

    def assign(self, name: str, value: Any) -> None:
        """Replace the model, or the context if ``name`` is ``"context"``."""
        if name == "context":
            self.context = value
        else:
            self.register_model(value)

    def _begin_to_follow(self) -> None:
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
        end, found = self._transport.end, weakref.ref(self)

        async def begin() -> None:
            end.tasks.start(self._follow(end, found), "aiosync legacy follow")

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
        self._begin_to_follow()
        if isinstance(transport, MPTransport):
            if not self._follows:
                self._guard.refuse_inside_read("receive")
            return transport.call(
                "receive", self._tell if self._follows else self._take, transport.end, timeout
            )
        received = transport.receive_weights(timeout=timeout)
        if received is None:
            return False
        try:
            self._put(received[1])
            if isinstance(transport, Backend):
                self._pass_on(received[1])
        except BaseException as exc:  # the trainer gets it first, then the caller
            # Without an answer, the answer to the next weights would count for these.
            self._answer(f"{type(exc).__name__}: {exc}")
            raise
        self._answer("updated")
        return True

    def _pass_on(self, weights: Any) -> None:
        """Let the context pass weights on, as TorchRL's collectors do to collectors below them."""
        context, model_id = self.context, self._scheme.model_id or "policy"
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
        if inplace:
            self._put(weights)
        else:
            self._replace(weights)
        if getattr(self._transport, "owes_ack", True):
            self._answer("updated")

    def _put(self, weights: Any) -> None:
        refuse_inside_loop("receive", "a scheme of aiosync")
        self._guard.refuse_inside_read("receive")
        run_on_loop(self._scheme, self._change(Copier().copy(weights)))

    def _replace(self, weights: Any) -> None:
        self._guard.refuse_inside_read("apply_weights")
        model = self.model
        if model is None:
            raise ConfigError("No model registered")
        apply = WeightStrategy(self._scheme.strategy).apply_weights
        self._guard.between_reads(
            functools.partial(apply, model, weights, inplace=False), method="apply_weights"
        )
        self._target = None  # it refers to the parameters that were replaced

    def _answer(self, message: str) -> None:
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
            # Plain tensors point at the new memory then, all at once. The old memory, which the
            # program or another process may share, keeps its values.
            with FORKING:
                target.apply_(weights.layout, weights.flat, weights.values, copy=in_place)
            self._current = weights
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
        if not self._follows and self._find() is None:
            raise ConfigError("No model registered")  # the update stays for a later call
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

    async def _tell(self, end: Endpoint, timeout: float | None) -> bool:
        """Wait for an update that was not reported; return True if one came, or raise its error."""
        await end.until(lambda: self._news, timeout)
        news, self._news = self._news, False
        if isinstance(news, Exception):
            raise news
        return news

    @staticmethod
    async def _follow(end: Endpoint, found: weakref.ref[WeightReceiver]) -> None:
        """Apply every update of a link until its receiver is deleted or the link ends."""
        while await end.until(lambda: end.arrived):
            receiver = found()
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
