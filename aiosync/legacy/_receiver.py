"""What this generation receives with: the object that a scheme hands out.

It holds no link itself; the scheme does. Must not import torch or a transport.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from aiosync.errors import ConfigError
from aiosync.legacy._pipe_view import PipeView
from aiosync.legacy._strategy import WeightStrategy
from aiosync.schemes.sources import resolve_model, resolve_path

if TYPE_CHECKING:
    from aiosync.legacy._schemes import WeightSyncScheme

__all__ = ["OfScheme", "WeightReceiver", "close_transport"]


class OfScheme:
    """A pickle has the scheme and nothing else."""

    _scheme: WeightSyncScheme

    def __getstate__(self) -> dict[str, Any]:
        return {"_scheme": self._scheme}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_scheme"])  # type: ignore[misc]  # subclasses have the same arguments

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._scheme!r}>"


class _Attached:
    """What programs find where receivers had their transport: the scheme's own link."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self.pipe = _Pipe(receiver)

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """As that of a transport; ``receiver.apply_weights()`` answers."""
        return self.pipe._take() if self.pipe.poll(timeout) else None

    def check_connection(self) -> bool:
        return self.pipe.receiver._scheme._is_up()


class _Pipe(PipeView):
    def __init__(self, receiver: WeightReceiver) -> None:
        self.receiver = receiver

    def poll(self, timeout: float | None = 0.0) -> bool:
        return self.receiver._scheme._poll(timeout)

    def _take(self) -> tuple[str, Any]:
        taken = self.receiver._scheme._peek()
        self.receiver._taken = taken[1]
        return taken


class WeightReceiver(OfScheme):
    """Receives weights for a scheme; ``scheme.get_receiver()`` has one.

    Args:
        scheme: What it receives for.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._forget()

    def _forget(self) -> None:
        self._context_ref: weakref.ref[Any] | None = None
        self._model: Any = None
        self._own: Any = None
        self._owes_answer = False
        self._taken: Any = None  # weights that were read by hand and not applied yet

    @property
    def context(self) -> Any:
        """Owner of the model; ``None`` without one.

        Raises:
            ConfigError: It has been garbage collected (a ``ValueError``).
        """
        if self._context_ref is None:
            return None
        context = self._context_ref()
        if context is None:
            raise ConfigError("Context has been garbage collected")
        return context

    @context.setter
    def context(self, value: Any) -> None:
        self._context_ref = None if value is None else weakref.ref(value)

    def register_model(self, model: Any) -> None:
        """Choose what weights are applied to.

        Args:
            model: A module; or a dotted name, which is looked up in the context whenever it is
                needed.
        """
        self._model = model

    def _register_worker_transport(self, pipe_or_context: Any) -> None:
        self._own = self._scheme.create_transport(pipe_or_context)

    def register_worker_transport(self, pipe_or_context: Any) -> None:
        """Receive over a transport.

        For receivers that :meth:`WeightSyncScheme.create_receiver` made.

        Args:
            pipe_or_context: What the scheme's ``create_transport()`` takes.
        """
        self._register_worker_transport(pipe_or_context)

    @property
    def _transport(self) -> Any:
        # Programs looked at its pipe, whether or not it is theirs.
        if self._own is None and self._scheme._reads_by_hand:
            return _Attached(self)
        return self._own

    @_transport.setter
    def _transport(self, value: Any) -> None:
        self._own = value

    @property
    def model(self) -> Any:
        """The registered model, found in the context if it was given by name; or ``None``.

        Raises:
            ConfigError: A name was given, and there is no context (a ``ValueError``).
        """
        if isinstance(self._model, str):
            context = self.context
            if context is None:
                raise ConfigError("Context is required to resolve string references")
            return resolve_path(context, self._model)
        context = self.context
        if self._model is not None or context is None:
            return self._model
        try:
            return resolve_model(context, self._scheme.model_id or "policy")
        except AttributeError:
            return None  # the context has no such model yet

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
            ConfigError: Weights have come, but ``No model registered`` (a ``ValueError``).
            ConnectError: The trainer refused this worker.
        """
        if self._own is None:
            return self._scheme._look(self.model, timeout)
        received = self._own.receive_weights(timeout=timeout)
        if received is None:
            return False
        self._owes_answer = True
        try:
            self.apply_weights(received[1])
        except BaseException as exc:  # goes on to the caller, after the trainer
            self._refuse(exc)
            raise
        return True

    def _refuse(self, error: BaseException) -> None:
        # Left without an answer, they would take the one to the next weights.
        owes, self._owes_answer = self._owes_answer, False
        if not owes or not hasattr(self._own, "send_ack"):
            return
        try:
            self._own.send_ack(f"{type(error).__name__}: {error}")
        except Exception as exc:  # noqa: BLE001 - goes to the caller with the first error
            error.add_note(f"the trainer could not be notified: {type(exc).__name__}: {exc}")

    def apply_weights(self, weights: Any) -> None:
        """Put weights into the model by hand, between two forward passes.

        Args:
            weights: TensorDict or state dict; copied, never aliased.

        Raises:
            ConfigError: ``No model registered`` (a ``ValueError``).
            ManifestMismatch: They do not fit; nothing was changed.
        """
        model = self.model
        if self._taken is not None:
            taken, self._taken = self._taken, None
            if taken is weights and self._scheme._look(model, 0.0):
                return  # and the trainer was told
        strict = self._scheme.strict
        if self._scheme.initialized_on_receiver and self._scheme.model is model is not None:
            self._scheme.apply_weights(weights)
        elif model is None and self._scheme.model is None:
            raise ConfigError("No model registered")
        else:
            WeightStrategy(self._scheme.strategy).apply_weights(
                self._scheme.model if model is None else model, weights, strict=strict
            )
        self._owes_answer = False
        if hasattr(self._own, "send_ack"):
            self._own.send_ack()

    def _close(self) -> None:
        close_transport(self._own)


def close_transport(transport: Any) -> None:
    """Close a transport, if it can be closed."""
    if hasattr(transport, "close"):  # what users bring need not have it
        transport.close()
