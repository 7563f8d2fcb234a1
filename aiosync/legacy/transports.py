"""The older generation's transports over pipes: blocking, one object for each end.

Must not import torch or schemes.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import os
import queue
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    TransportBroken,
    TransportClosed,
)
from aiosync.legacy.endpoint import PROCESS, Copier, Endpoint, Weights
from aiosync.strategy import WeightStrategy
from aiosync.sync import InitialSyncTransport
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.tensors.values import is_tensordict
from aiosync.transports.stream import ByteStream
from aiosync.wire import Setup, encode_frame

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = [
    "Answered",
    "Backend",
    "Deliveries",
    "Finish",
    "MPTransport",
    "SharedMemTransport",
    "TransportBackend",
    "is_backend",
]

_T = TypeVar("_T")
Finish: TypeAlias = Callable[[float | None], None]
"""Waits for an answer for so many seconds, and raises what went wrong."""

_TIMEOUT = 60.0  # workers that are spawned import torch first, and machines are busy


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
        self._pending: deque[Finish] = deque()

    @abc.abstractmethod
    def begin(self, model_id: str, weights: Any) -> Finish:
        """Copy weights and begin to send them; returns what waits for the answer."""

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
        self.begin(model_id, weights)(self.timeout)

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Copy weights and send them in the background; :meth:`wait_ack` waits."""
        self._pending.append(self.begin(model_id, weights))

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
        self._pending.popleft()(self.timeout if timeout is None else timeout)

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Return ``None``: a remote object gets its weights by the call."""
        del timeout
        return None


class Deliveries:
    """Sends to several ends that are under way.

    Attributes:
        pending: What waits for those that have yet to answer.
        acked: Those that have the weights.
        failed: Those that never will, and why.
        began: From when on answers are waited for, by :func:`time.monotonic`.
    """

    def __init__(self) -> None:
        self.began: float = time.monotonic()
        self.pending: dict[int, Finish] = {}
        self.acked: set[int] = set()
        self.failed: dict[int, AiosyncError] = {}

    def begin(self, idx: int, begin: Callable[[], Finish]) -> None:
        """Begin with one of them.

        Raises:
            ConfigError: A mistake of the caller, and not of this end; like the next two.
            KeyError: As well.
            LocalProtocolError: As well.
        """
        try:
            self.pending[idx] = begin()
        except (ConfigError, KeyError, LocalProtocolError):
            raise
        except Exception as exc:  # noqa: BLE001 - raised once all were served
            self._fail(idx, exc)

    def finish(self, idx: int, timeout: float | None) -> None:
        """Wait for one of them, for so many seconds from :attr:`began` on."""
        left = None if timeout is None else max(0.0, self.began + timeout - time.monotonic())
        try:
            self.pending.pop(idx)(left)
            self.acked.add(idx)
        except Exception as exc:  # noqa: BLE001 - raised once all were waited for
            self._fail(idx, exc)

    def _fail(self, idx: int, error: Exception) -> None:
        cause = error.__cause__ if isinstance(error.__cause__, ApplyError) else error
        # Transports of users raise what they like.
        known = cause if isinstance(cause, AiosyncError) else TransportBroken(repr(cause))
        self.failed[idx] = known

    def finish_all(self, timeout: float | None) -> None:
        """Wait for all of them."""
        for idx in list(self.pending):
            self.finish(idx, timeout)

    def raise_failures(self) -> None:
        """Raise unless all have what was sent.

        Raises:
            PartialSyncError: Some do not.
        """
        if self.failed:
            raise PartialSyncError(acked=self.acked, failed=self.failed)


def is_backend(transport: Any) -> bool:
    """Whether a transport has TorchRL's present interface, and is asked for weights by keywords."""
    if isinstance(transport, InitialSyncTransport):
        return True
    receive = getattr(transport, "receive_weights", None)
    kinds = {} if receive is None else inspect.signature(receive).parameters
    return "model" in kinds or any(each.kind is each.VAR_KEYWORD for each in kinds.values())


class Backend:
    """Stands between a role and a transport that has TorchRL's present interface.

    Weights that the transport returns are put into the model between two forwards; it is given
    none to change by itself. The rest is that of the transport: ``send_weights(weights)`` or
    ``send_weights_async(weights)``, and ``receive_weights()``. ``wait_ack()``, ``send_ack(text)``,
    ``check_connection()``, ``close()`` and both ``setup_...()`` are optional.

    Args:
        inner: The transport.
        model_id: Name of the model.
        strategy: How the scheme takes weights out of a model.

    Attributes:
        inner: As given.
    """

    def __init__(self, inner: Any, model_id: str, strategy: WeightStrategy) -> None:
        self.inner = inner
        self._model_id = model_id
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def meet_worker(self) -> None:
        """Let the transport meet the worker, if it has to."""
        if hasattr(self.inner, "setup_connection_and_weights_on_sender"):
            self.inner.setup_connection_and_weights_on_sender()

    def meet_trainer(self, worker_idx: int) -> Any:
        """Let the transport meet the trainer, if it has to; the initial weights, or ``None``."""
        meet = getattr(self.inner, "setup_connection_and_weights_on_receiver", None)
        return None if meet is None else self._ask(meet, worker_idx=worker_idx)

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Begin to send the weights of a model."""
        del model_id
        begins = hasattr(self.inner, "send_weights_async")
        (self.inner.send_weights_async if begins else self.inner.send_weights)(weights)

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """See :class:`aiosync.legacy.TransportBackend`."""
        try:
            found = self._ask(self.inner.receive_weights, timeout=timeout)
        except (queue.Empty, TimeoutError):  # nothing came in time
            return None
        return None if found is None else (self._model_id, found)

    def _ask(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Call a method that returns weights, or puts them into what it is given."""
        try:
            return method(**arguments, weights=None, model=None, strategy=self._strategy)
        except (AttributeError, TypeError, ValueError) as exc:
            exc.add_note(
                f"{type(self.inner).__name__}.{method.__name__}() was given weights=None and "
                "model=None: it returns the weights, and aiosync puts them into the model between "
                "two forwards"
            )
            raise


class MPTransport(Answered):
    """One end of a two-way pipe that carries weights and acknowledgements.

    Its link is made by the first call that needs it.

    Args:
        pipe_connection: ``multiprocessing`` connection of a two-way pipe; owned from now on.
        timeout: Seconds that acknowledgements are waited for, while workers may still be starting.

    Attributes:
        timeout: As it was given; may be changed.
        end: What is below.

    Raises:
        ConfigError: The pipe is not two-way (a ``ValueError``).
    """

    def __init__(self, pipe_connection: Any, timeout: float | None = _TIMEOUT) -> None:
        super().__init__(timeout)
        try:
            if isinstance(pipe_connection, socket.socket):  # the program may close what it has
                pipe_connection = socket.socket(fileno=pipe_connection.detach())
            self.end: Endpoint = Endpoint(ByteStream(pipe_connection))
        except (AttributeError, OSError, ValueError) as exc:
            raise ConfigError(f"{pipe_connection!r} is no open end of a pipe: {exc}") from exc
        self._copier = Copier()
        self._unanswered: deque[Weights] = deque()
        self._lease: Lease | None = None
        self._pid = 0  # of its user
        self._closed = False

    def greet(self) -> None:
        """Say which process is at this end. Never waits; idempotent.

        Where the other end is gone nothing is said: what it wrote before is to be read.
        """
        if not self._pid:
            self._pid = os.getpid()
            greeting = encode_frame(Setup(PROCESS, str(self._pid)))
            with contextlib.suppress(OSError):
                self.end.sock.send(greeting, socket.MSG_DONTWAIT)

    def call(
        self, what: str, function: Callable[..., Coroutine[Any, Any, _T]], /, *args: Any
    ) -> _T:
        """Run a coroutine function on the portal's loop, with the link below."""
        refuse_inside_loop(what, "the transports of aiosync.transports")
        if self._closed:
            raise TransportClosed("this transport was closed")
        if self._inherited:
            raise LocalProtocolError(f"{what}(): this transport was used before the process forked")
        self.greet()
        if self._lease is None:
            self._lease = lease(self.end)
        return self._lease.call(self.end.run(function, *args))

    @property
    def _inherited(self) -> bool:
        """Whether it was used by the process that this one was forked from."""
        return self._pid not in (0, os.getpid())

    # -- sending -------------------------------------------------------------------------------

    def begin(self, model_id: str, weights: Any) -> Finish:
        """As for :class:`Answered`; the weights may be a copy already."""
        if not isinstance(weights, Weights):
            weights = self._copier.copy(weights)
        version = self.call("send_weights", self.end.post, model_id, weights, self.timeout)
        return functools.partial(self.call, "wait_ack", self.end.wait_for_ack, version)

    def check_ack(self, message: str = "updated") -> None:
        """The same as :meth:`wait_ack`: there is no success but ``"updated"``."""
        del message
        self.wait_ack()

    def wait_for_peer(self, timeout: float) -> bool:
        """Wait until the other side has used its end, or is gone; False when it did not in time."""
        end = self.end

        def known() -> bool:
            return end.heard or end.error is not None

        return known() or self.call("wait_ack", end.until, known, timeout)

    # -- receiving -----------------------------------------------------------------------------

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
        arrived = self.call("receive_weights", self.end.take, timeout)
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
        self.call("send_ack", self.end.acknowledge, self._unanswered.popleft(), error)

    # -- by hand -------------------------------------------------------------------------------

    @property
    def pipe(self) -> MPTransport:
        """To look for weights by hand, with :meth:`poll` and :meth:`recv`: this object.

        The connection that was given is closed: what was below it belongs to the transport.
        """
        return self

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether weights, or the end of the link, are there within ``timeout`` seconds.

        ``None`` waits as long as it takes.
        """
        end = self.end
        return self.call("poll", end.until, lambda: end.arrived or end.error is not None, timeout)

    def recv(self) -> tuple[tuple[str, Any], str]:
        """Wait for weights; ``receiver.apply_weights()`` or :meth:`send_ack` answers them.

        Returns:
            ``((model_id, weights), "update_weights")``; the weights on memory of their own.

        Raises:
            EOFError: The other side went away.
        """
        try:
            taken = self.receive_weights(timeout=None)
        except PeerClosed as exc:
            raise EOFError(str(exc)) from exc
        assert taken is not None
        return taken, "update_weights"

    # -- the link ------------------------------------------------------------------------------

    def check_connection(self) -> bool:
        """Whether the link is open and nobody has closed the other end.

        False in a process that was forked after the link was used.
        """
        if self._closed or self._inherited:
            return False
        with contextlib.suppress(AiosyncError):
            self.call("check_connection", self.end.until, lambda: True)
        return self.end.error is None

    def close(self) -> None:
        """Close the link; the other side sees ``PeerClosed``. Idempotent.

        In a forked child the parent's goes on.
        """
        held, self._lease, self._closed = self._lease, None, True
        try:
            if held is not None and held.valid:
                held.call(self.end.aclose())
        finally:
            if held is not None:
                held.release()
            if not self._inherited:
                self.end.say_goodbye()
            self.end.sock.close()

    def abort(self) -> None:
        """Close at once, for destructors and signal handlers."""
        self._closed = True
        if self._lease is not None:
            self._lease.abort()
        else:
            self.end.sock.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # the pipe was one
            self.abort()


class SharedMemTransport:
    """Weights that change in place, over two-way pipes.

    The trainer registers a pipe for each worker and sends; a worker registers its own end, and
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
        self._links: list[MPTransport] = []
        self._newest: dict[str, Weights] = {}  # of each model, what has come since the last look
        self._copier = Copier()
        for model_id, weights in (policy_weights or {}).items():
            self.register_weights(model_id, weights)

    def register_pipe(self, pipe: Any) -> None:
        """Add one end of a two-way pipe; owned from now on.

        Raises:
            ConfigError: It is not two-way (a ``ValueError``).
        """
        link = MPTransport(pipe)
        link.end.newest = self._newest
        self._links.append(link)

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
            self.policy_weights[model_id] = Copier().copy(weights).rebuild("tensordict")
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
        copied, sending = self._copier.copy(self.policy_weights[model_id]), Deliveries()
        for idx, link in enumerate(self._links):
            link.timeout = self.timeout
            sending.begin(idx, functools.partial(link.begin, model_id, copied))
        sending.finish_all(self.timeout)
        if sending.failed:
            raise next(iter(sending.failed.values()))

    def receive_weights(self, timeout: float | None = 1.0) -> None:
        """Copy the newest weights of each model into what is registered under its name.

        This is the only place where registered tensors change. Returns ``None`` as this
        generation did; look at :attr:`policy_weights`.

        Args:
            timeout: Seconds to wait for weights when none are here; ``None`` waits until the
                other side goes away.

        Raises:
            KeyError: The model is not registered, and ``auto_register`` is off.
            ManifestMismatch: The weights do not fit what is registered (a ``ValueError``).
            PeerClosed: The other side went away.
            LocalProtocolError: There are several pipes, as in a trainer (a ``RuntimeError``).
        """
        newest = self._newest
        if len(self._links) > 1:
            raise LocalProtocolError("receive_weights() is for a worker, which has one pipe")
        for link in self._links:
            if link.call("receive_weights", link.end.until, lambda: newest, timeout):
                link.call("receive_weights", link.end.all_left)  # this process may end with it
        while newest:
            model_id, arrived = newest.popitem()  # kept until it was copied, to be used again
            self.update_registered(model_id, arrived.rebuild())

    def send_ack(self, message: str = "updated") -> None:
        """Do nothing: what arrives is acknowledged by itself."""

    check_ack = send_ack  # send_weights() has waited

    def check_connection(self) -> bool:
        """Whether every link is up; see :class:`MPTransport`."""
        return all(link.check_connection() for link in self._links)

    def close(self) -> None:
        """Close every link; the other side sees ``PeerClosed``. Idempotent."""
        for link in self._links:
            link.close()
