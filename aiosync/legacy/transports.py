"""The older generation's transports over pipes: blocking, one object for each end.

Must not import torch or schemes.
"""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from aiosync._tasks import Notifier
from aiosync.errors import (
    ApplyError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
    RemoteProtocolError,
    TransportError,
)
from aiosync.legacy.endpoint import Copier, Link, Weights
from aiosync.legacy.strategy import WeightStrategy, nested
from aiosync.tensors.tensordicts import is_tensordict
from aiosync.types import AckStatus
from aiosync.wire import Ack

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from tensordict import TensorDictBase

__all__ = ["Answered", "MPTransport", "SharedMemTransport", "TransportBackend", "is_patient"]

_TIMEOUT = 60.0  # workers that are spawned import torch first, and machines are busy
_Sent: TypeAlias = tuple[int, Weights | None]  # its version, and the memory if it is our own


@runtime_checkable
class TransportBackend(Protocol):
    """What a transport of this generation has to have.

    ``send_weights_async(model_id, weights)`` with ``wait_ack()``, ``send_ack()`` and ``close()``
    are optional: senders and receivers use them where they are there.
    """

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send the weights of a model."""

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Wait for weights; ``(model_id, weights)``, or ``None`` when none came in time."""

    def check_connection(self) -> bool:
        """Whether the other side is there."""


class Answered(abc.ABC):
    """Sends weights, each of which is answered, in order.

    Args:
        timeout: Seconds that answers are waited for.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._pending: deque[Any] = deque()

    @abc.abstractmethod
    def _post(self, model_id: str, weights: Any) -> Any:
        """Copy weights and begin to send them; returns what :meth:`_finish` waits for."""

    @abc.abstractmethod
    def _finish(self, sent: Any, timeout: float | None) -> None:
        """Wait for an answer, and raise what went wrong."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights and wait until the other side said that it applied them.

        Args:
            model_id: Name of the model.
            weights: TensorDict or state dict; over pipes and stores also a module. Copied.

        Raises:
            AckTimeout: It did not within ``timeout`` seconds (a ``TimeoutError``).
            LocalProtocolError: It said something else (a ``RuntimeError``).
            ApplyError: A remote object raised something.
            PeerClosed: It went away.
            TransportBroken: The store is gone.
            ConfigError: The weights cannot travel (a ``ValueError``).
        """
        self._finish(self._post(model_id, weights), self.timeout)

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Copy weights and send them in the background; :meth:`wait_ack` waits."""
        self._pending.append(self._post(model_id, weights))

    def wait_ack(self, timeout: float | None = None) -> None:
        """Wait for the answer to the oldest :meth:`send_weights_async`.

        Args:
            timeout: Seconds; the transport's own by default.

        Raises:
            LocalProtocolError: No send is pending, or as for :meth:`send_weights`, as all others
                are (a ``RuntimeError``).
        """
        if not self._pending:
            raise LocalProtocolError("No async send is pending. Call send_weights_async() first.")
        self._finish(self._pending.popleft(), self.timeout if timeout is None else timeout)

    def drop_oldest(self) -> None:
        """Have the next :meth:`wait_ack` not wait for the oldest :meth:`send_weights_async`."""
        self._pending.popleft()


class _Closing(abc.ABC):
    """``with transport:``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close every link; the other side sees ``PeerClosed``. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class PipeView:
    """Reads weights as if they were messages of a connection; no connection is below any more."""

    def __init__(self, transport: MPTransport) -> None:
        self._transport = transport

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether weights, or the end of the link, are there within ``timeout`` seconds.

        ``None`` waits as long as it takes.
        """
        link = self._transport.link
        return link.call("poll", lambda end: end.until(lambda: link.is_ready, timeout))

    def recv(self) -> tuple[tuple[str, Any], str]:
        """Wait for weights; ``receiver.apply_weights()`` or ``send_ack()`` answers them.

        Returns:
            ``((model_id, weights), "update_weights")``; the weights on memory of their own.

        Raises:
            EOFError: The other side went away.
        """
        try:
            taken = self._transport.receive_weights(timeout=None)
        except PeerClosed as exc:
            raise EOFError(str(exc)) from exc
        assert taken is not None
        return taken, "update_weights"


class MPTransport(Answered, _Closing):
    """One end of a two-way pipe that carries weights and acknowledgements.

    Args:
        pipe_connection: ``multiprocessing`` connection of a two-way pipe; owned from now on.
        timeout: Seconds that acknowledgements are waited for, while workers may still be starting.

    Attributes:
        pipe: To look for weights by hand: ``poll(timeout)``, and ``recv()``, which returns
            ``((model_id, weights), "update_weights")``. What was given is closed: what was
            below it belongs to the transport.
        timeout: As it was given; may be changed.
        link: What is below.

    Raises:
        ConfigError: The pipe is not two-way (a ``ValueError``).
    """

    def __init__(self, pipe_connection: Any, timeout: float | None = _TIMEOUT) -> None:
        super().__init__(timeout)
        self.pipe: PipeView = PipeView(self)
        is_link = isinstance(pipe_connection, Link)
        self.link: Link = pipe_connection if is_link else Link(pipe_connection)
        self._copier = Copier()
        self._unanswered: deque[Weights] = deque()

    def _post(self, model_id: str, weights: Any) -> _Sent:
        own = None if isinstance(weights, Weights) else self._copier.copy(weights)
        post = lambda end: end.post(model_id, own or weights, self.timeout)  # noqa: E731 - short
        return self.link.call("send_weights", post), own

    def _finish(self, sent: _Sent, timeout: float | None, message: str = "updated") -> None:
        version, own = sent
        ack = self.link.call("wait_ack", lambda end: end.wait_for_ack(version, timeout))
        if own is not None:
            own.give_back()
        said = _said(ack)
        if said != message:
            cause = ApplyError(ack.error_text, version=version, remote_type=ack.error_type)
            raise LocalProtocolError(
                f"Expected acknowledgment {message!r}, got {said!r}"
            ) from cause

    def check_ack(self, message: str = "updated") -> None:
        """As :meth:`wait_ack`, for an answer of another text."""
        if not self._pending:
            self.wait_ack()  # says so
        self._finish(self._pending.popleft(), self.timeout, message)

    def wait_for_peer(self, timeout: float) -> bool:
        """Wait until the other side has used its end; False when it did not in time."""
        if (endpoint := self.link.endpoint) is not None and endpoint.heard:
            return True
        return self.link.call("wait_ack", lambda end: end.until(lambda: end.heard, timeout))

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Wait for the next weights, in the order in which they were sent; none is ever lost.

        Args:
            timeout: Seconds; ``None`` waits until the other side goes away.

        Returns:
            ``(model_id, weights)``: a nested TensorDict or a state dict with dotted names, as
            it was sent, on memory of its own. ``None`` when none came in time.

        Raises:
            PeerClosed: The other side went away.
            RemoteProtocolError: It sent something that is not of this format.
        """
        arrived = self.link.call("receive_weights", lambda end: end.take(timeout))
        if arrived is None:
            return None
        self._unanswered.append(arrived)
        return arrived.model_id, arrived.rebuild()

    @property
    def owes_ack(self) -> bool:
        """Whether weights were received and not answered."""
        return bool(self._unanswered)

    def send_ack(self, message: str = "updated") -> None:
        """Answer the oldest weights that were received and not answered.

        Returns when the answer has left, so that the process may end; after two seconds in any
        case, if the other side does not read.

        Args:
            message: ``"updated"`` for success; anything else is an error to the other side.

        Raises:
            LocalProtocolError: There are none (a ``RuntimeError``).
        """
        if not self._unanswered:
            raise LocalProtocolError("there is nothing to acknowledge: call receive_weights()")
        error = None if message == "updated" else LocalProtocolError(message)
        arrived = self._unanswered.popleft()
        self.link.call("send_ack", lambda end: end.acknowledge(arrived, error))

    def check_connection(self) -> bool:
        """Whether the link is open and the other side has not closed it.

        False in a process that was forked after the link was used.
        """
        return self.link.is_up

    def close(self) -> None:
        """Close the link; the other side sees ``PeerClosed``. Idempotent."""
        self.link.close()


def is_patient(transport: Any) -> bool:
    """Whether the worker at the other end may come later."""
    return isinstance(transport, MPTransport) and transport.link.patient


def _said(ack: Ack) -> str:
    if ack.status is not AckStatus.NACK:
        return "updated"
    if ack.error_type == LocalProtocolError.__name__:  # of send_ack(message)
        return ack.error_text
    return f"{ack.error_type}: {ack.error_text}"


class SharedMemTransport(_Closing):
    """Weights that change in place, over any number of two-way pipes.

    The trainer registers a pipe for each worker and sends; a worker registers its own end and
    calls :meth:`receive_weights` where its weights may change. What is sent is copied, and what
    arrives is copied out: neither side ever sees what the other does with its tensors.

    Args:
        policy_weights: Model id -> TensorDict that is kept up to date, in place: on a trainer
            by :meth:`send_weights`, on a worker by :meth:`receive_weights`.
        auto_register: Register a model when it is first sent, or when it first arrives.

    Attributes:
        auto_register: As it was given; may be changed.
        timeout: Seconds that :meth:`send_weights` waits for all workers; 60, and may be changed.
        policy_weights: What is registered, as nested TensorDicts, which change in place. Those
            that the program did not register are copies of what was sent first.
    """

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | None = None,
        auto_register: bool = True,
    ) -> None:
        self.auto_register = auto_register
        self.timeout: float = _TIMEOUT
        self.policy_weights: dict[str, TensorDictBase] = {}
        self._ends: list[MPTransport] = []
        self._changed = Notifier()
        self._copier = Copier()
        for model_id, weights in (policy_weights or {}).items():
            self.register_weights(model_id, weights)

    def register_pipe(self, pipe: Any) -> None:
        """Add one end of a two-way pipe; owned from now on.

        Raises:
            ConfigError: It is not two-way (a ``ValueError``).
        """
        self._ends.append(MPTransport(Link(pipe, settles=True, changed=self._changed)))

    def register_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Register a model, whose tensors are kept up to date in place.

        Raises:
            ConfigError: The weights are not a TensorDict (a ``ValueError``).
            LocalProtocolError: The model is registered already (a ``RuntimeError``).
        """
        if not is_tensordict(weights):
            raise ConfigError(f"the weights of {model_id!r} must be a TensorDict: {type(weights)}")
        if model_id in self.policy_weights:
            raise LocalProtocolError(f"the weights of {model_id!r} are registered already")
        self.policy_weights[model_id] = weights

    def update_registered(self, model_id: str, weights: Any) -> None:
        """Have what is registered be these weights, as :meth:`send_weights` does; send nothing."""
        if not (is_tensordict(weights) or isinstance(weights, Mapping)):
            raise ConfigError(f"Unsupported weights type: {type(weights)}")
        if model_id in self.policy_weights:
            WeightStrategy().apply_weights(self.policy_weights[model_id], weights)
        elif self.auto_register:
            self.policy_weights[model_id] = nested(weights)
        else:
            raise KeyError(
                f"model {model_id!r} is not registered: register its weights, or use "
                "auto_register=True"
            )

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights to every worker, and wait until each has them in its memory.

        Args:
            model_id: Name of the model.
            weights: TensorDict, or mapping of tensors; copied.

        Raises:
            KeyError: The model is not registered, and ``auto_register`` is off.
            ConfigError: The weights are of another type, or cannot travel (a ``ValueError``).
            ManifestMismatch: They do not fit what is registered (a ``ValueError``).
            AckTimeout: A worker did not answer within :attr:`timeout` seconds (a
                ``TimeoutError``).
            PeerClosed: A worker went away. The others were served.
        """
        self.update_registered(model_id, weights)
        copied = self._copier.copy(self.policy_weights[model_id])
        give_up = time.monotonic() + self.timeout
        sent, errors = [], []
        for end in self._ends:
            try:
                end.send_weights_async(model_id, copied)
                sent.append(end)
            except Exception as exc:  # noqa: BLE001 - raised once all were served
                errors.append(exc)
        for end in sent:
            try:
                end.wait_ack(max(0.0, give_up - time.monotonic()))
            except Exception as exc:  # noqa: BLE001 - raised once all were served
                errors.append(exc)
        if errors:
            raise errors[0]
        copied.give_back()

    def receive_weights(self, timeout: float | None = 1.0) -> None:
        """Copy the newest weights of each model into what is registered under its name.

        This is the only place where registered tensors change. Returns ``None`` as this
        generation did; look at :attr:`policy_weights`.

        Args:
            timeout: Seconds to wait for weights from any pipe when none are here; ``None``
                waits until another side goes away.

        Raises:
            KeyError: The model is not registered, and ``auto_register`` is off.
            ManifestMismatch: The weights do not fit what is registered (a ``ValueError``).
            PeerClosed: Another side went away, and nothing has come from the others.
        """
        if self._ends and not self._apply_all():

            def ready() -> bool:
                return any(end.link.is_ready for end in self._ends)

            self._ends[0].link.call("receive_weights", lambda end: end.until(ready, timeout))
            self._apply_all()

    def _apply_all(self) -> bool:
        """Apply what is here; whether anything was."""
        ended: Exception | None = None
        count = 0
        for each in self._ends:
            try:
                while arrived := each.link.call("receive_weights", lambda end: end.take(0.0)):
                    self.update_registered(arrived.model_id, arrived.rebuild())
                    count += 1
            except (TransportError, RemoteProtocolError) as exc:
                ended = exc
        if ended is not None and not count:
            raise ended
        return count > 0

    def send_ack(self, message: str = "updated") -> None:
        """Do nothing: what arrives is acknowledged by itself."""

    def check_ack(self, message: str = "updated") -> None:
        """Do nothing: :meth:`send_weights` has waited for the acknowledgements."""

    def check_connection(self) -> bool:
        """Whether every registered pipe is open, and nobody has closed the other end."""
        return all(end.check_connection() for end in self._ends)

    def close(self) -> None:
        """Close every link. Idempotent."""
        for end in self._ends:
            end.close()
