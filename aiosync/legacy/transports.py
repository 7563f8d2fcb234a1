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
from aiosync.legacy.endpoint import PROCESS, Copier, Endpoint, Weights, clone_tensors
from aiosync.strategy import WeightStrategy
from aiosync.sync._portal import Lease, lease, refuse_inside_loop
from aiosync.tensors.values import is_tensordict
from aiosync.transports.byte_stream import ByteStream
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
"""Function that waits for an answer for some seconds, and raises the error of the send."""

_TIMEOUT = 60.0  # long, because spawned workers import torch first and machines may be busy
# Handshakes of TorchRL's present interface, each of which is optional.
_MEETS_WORKER = "setup_connection_and_weights_on_sender"
_MEETS_TRAINER = "setup_connection_and_weights_on_receiver"


@runtime_checkable
class TransportBackend(Protocol):
    """Protocol of the older generation's transports.

    ``send_weights_async(model_id, weights)`` with ``wait_ack()``, ``send_ack()`` and ``close()``
    are optional: senders and receivers use them if a transport has them.
    """

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send the weights of a model."""

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Wait for weights; return ``(model_id, weights)``, or ``None`` if none came in time."""

    def check_connection(self) -> bool:
        """Return True if the other side is connected."""


class Answered(abc.ABC):
    """Base class of transports that get an answer to each send, in the order of the sends.

    Args:
        timeout: Seconds to wait for an answer.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._pending: deque[Finish] = deque()

    @property
    def _takes_snapshot(self) -> bool:
        """True if the weights may change as soon as :meth:`begin` has returned."""
        return True

    @abc.abstractmethod
    def begin(self, model_id: str, weights: Any) -> Finish:
        """Copy weights and begin to send them; return a function that waits for the answer."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights and wait until the other side has answered that it applied them.

        Args:
            model_id: Name of the model.
            weights: TensorDict or state dict; over pipes and stores also a module. Copied.

        Raises:
            AckTimeout: There was no answer within ``timeout`` seconds (a ``TimeoutError``).
            LocalProtocolError: The other side refused the weights (a ``RuntimeError``).
            ApplyError: A remote object raised an error.
            PeerClosed: The other side closed the link, or its process ended.
            TransportBroken: The store cannot be reached.
            ConfigError: The weights cannot travel (a ``ValueError``).
        """
        self.begin(model_id, weights)(self.timeout)

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Copy weights and send them in the background; :meth:`wait_ack` waits for the answer."""
        snapshot = weights if self._takes_snapshot else clone_tensors(weights)
        self._pending.append(self.begin(model_id, snapshot))

    def wait_ack(self, timeout: float | None = None) -> None:
        """Wait for the answer to the oldest :meth:`send_weights_async`.

        Args:
            timeout: Seconds; the transport's own by default.

        Raises:
            LocalProtocolError: No send is pending, or as for :meth:`send_weights` (a
                ``RuntimeError``). The other errors are those of :meth:`send_weights`, too.
        """
        if not self._pending:
            raise LocalProtocolError("No async send is pending. Call send_weights_async() first.")
        self._pending.popleft()(self.timeout if timeout is None else timeout)

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Return ``None``: a remote object gets its weights as an argument of a call."""
        del timeout
        return None


class Deliveries:
    """Sends to several workers that are under way, by index of the worker.

    Attributes:
        pending: Functions that wait for the workers that have not answered yet.
        acked: Workers that have the weights.
        failed: Workers that will not get the weights, with the error.
        began: Time from which the deadlines of answers count, by :func:`time.monotonic`.
    """

    def __init__(self) -> None:
        self.began: float = time.monotonic()
        self.pending: dict[int, Finish] = {}
        self.acked: set[int] = set()
        self.failed: dict[int, AiosyncError] = {}

    def begin(self, idx: int, begin: Callable[[], Finish]) -> None:
        """Begin the send to one worker.

        Other errors than these three count as a failure of the worker.

        Raises:
            ConfigError: The caller made a mistake.
            KeyError: The caller made a mistake.
            LocalProtocolError: The caller made a mistake.
        """
        try:
            self.pending[idx] = begin()
        except (ConfigError, KeyError, LocalProtocolError):
            raise
        except Exception as exc:  # noqa: BLE001 - raise_failures() raises it after all sends
            self._fail(idx, exc)

    def finish(self, idx: int, timeout: float | None) -> None:
        """Wait for the answer of one worker, for ``timeout`` seconds from :attr:`began` on."""
        left = None if timeout is None else max(0.0, self.began + timeout - time.monotonic())
        try:
            self.pending.pop(idx)(left)
            self.acked.add(idx)
        except Exception as exc:  # noqa: BLE001 - raise_failures() raises it after all answers
            self._fail(idx, exc)

    def _fail(self, idx: int, error: Exception) -> None:
        """Keep the error of a worker, for :meth:`raise_failures`; of a refusal only the cause."""
        cause = error.__cause__ if isinstance(error.__cause__, ApplyError) else error
        self.failed[idx] = cause if isinstance(cause, AiosyncError) else _as_broken(cause)

    def finish_all(self, timeout: float | None) -> None:
        """Wait for the answers of all workers."""
        for idx in list(self.pending):
            self.finish(idx, timeout)

    def raise_failures(self) -> None:
        """Raise unless all workers have the weights.

        Raises:
            PartialSyncError: Some workers failed.
        """
        if self.failed:
            raise PartialSyncError(acked=self.acked, failed=self.failed)


def is_backend(transport: Any) -> bool:
    """Return True if a transport has TorchRL's present interface.

    That interface has handshakes, takes keywords to receive, and sends without a model's name.
    """
    if hasattr(transport, _MEETS_WORKER) or hasattr(transport, _MEETS_TRAINER):
        return True
    receive = _parameters(transport, "receive_weights")
    if any(each.name == "model" or each.kind is each.VAR_KEYWORD for each in receive):
        return True
    for name in ("send_weights", "send_weights_async"):
        sends = [each.kind for each in _parameters(transport, name) if each.default is each.empty]
        positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        if sum(kind in positional for kind in sends) == 1:
            return True
    return False


def _parameters(transport: Any, name: str) -> list[inspect.Parameter]:
    """Return the parameters of a transport's method, or none if it has no such method."""
    method = getattr(transport, name, None)
    return [] if method is None else list(inspect.signature(method).parameters.values())


def _as_broken(cause: Exception) -> TransportBroken:
    """Wrap an error of a user's transport, as :class:`PartialSyncError` holds only aiosync's."""
    error = TransportBroken(repr(cause))
    error.__cause__ = cause
    return error


class Backend:
    """Adapter between a sender or receiver and a transport with TorchRL's present interface.

    The receiver applies the weights that the transport returns, between two forwards; the transport
    gets no model to change by itself. The transport has ``send_weights(weights)`` or
    ``send_weights_async(weights)``, and ``receive_weights()``. Its ``wait_ack()``,
    ``send_ack(text)``, ``check_connection()``, ``close()`` and both ``setup_...()`` are optional.

    Args:
        inner: The transport.
        model_id: Name of the model.
        strategy: Strategy with which the scheme extracts weights from a model.

    Attributes:
        inner: The transport.
    """

    def __init__(self, inner: Any, model_id: str, strategy: WeightStrategy) -> None:
        self.inner = inner
        self._model_id = model_id
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def meet_worker(self) -> None:
        """Let the transport meet the worker, if it has a handshake."""
        if hasattr(self.inner, _MEETS_WORKER):
            self.inner.setup_connection_and_weights_on_sender()

    def meet_trainer(self, worker_idx: int | None) -> Any:
        """Let the transport meet the trainer, if it has a handshake.

        Without an index the handshake gets ``None``, as in TorchRL: 0 is another worker's.

        Returns:
            The initial weights, or ``None``.
        """
        meet = getattr(self.inner, _MEETS_TRAINER, None)
        return None if meet is None else self._ask(meet, worker_idx=worker_idx)

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send weights: in the background if the transport can, or else before this returns."""
        del model_id
        begins = hasattr(self.inner, "send_weights_async")
        (self.inner.send_weights_async if begins else self.inner.send_weights)(weights)

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Wait for weights; see :class:`aiosync.legacy.TransportBackend`."""
        try:
            found = self._ask(self.inner.receive_weights, timeout=timeout)
        except (queue.Empty, TimeoutError):  # nothing came in time
            return None
        return None if found is None else (self._model_id, found)

    def _ask(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Call a method that returns weights; without a model it cannot apply them itself."""
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

    The first call that needs the link makes it.

    Args:
        pipe_connection: ``multiprocessing`` connection of a two-way pipe; owned from now on.
        timeout: Seconds to wait for acknowledgements, in which workers may still be starting.

    Attributes:
        timeout: As it was given; may be changed.
        end: The end of the link below this transport.

    Raises:
        ConfigError: The pipe is not two-way (a ``ValueError``).
    """

    def __init__(self, pipe_connection: Any, timeout: float | None = _TIMEOUT) -> None:
        super().__init__(timeout)
        try:
            if isinstance(pipe_connection, socket.socket):  # the program may close its object
                pipe_connection = socket.socket(fileno=pipe_connection.detach())
            self.end: Endpoint = Endpoint(ByteStream(pipe_connection))
        except (AttributeError, OSError, ValueError) as exc:
            raise ConfigError(f"{pipe_connection!r} is no open end of a pipe: {exc}") from exc
        self._copier = Copier()
        # Weights that were received and not answered, oldest first.
        self._unanswered: deque[Weights] = deque()
        self._lease: Lease | None = None
        self._pid = 0  # process that uses this transport; 0 before the first use
        self._closed = False

    def greet(self) -> None:
        """Send the id of the process at this end. Never waits; idempotent.

        An error of the send is ignored: if the other end has closed, the messages that it wrote
        before can still be read.
        """
        if not self._pid:
            self._pid = os.getpid()
            greeting = encode_frame(Setup(PROCESS, str(self._pid)))
            with contextlib.suppress(OSError):
                self.end.sock.send(greeting, socket.MSG_DONTWAIT)

    def call(
        self, what: str, function: Callable[..., Coroutine[Any, Any, _T]], /, *args: Any
    ) -> _T:
        """Run a coroutine function on the portal's loop, while the link runs there.

        ``what`` is the method that the program called, for the texts of errors.

        Raises:
            TransportClosed: This transport was closed.
            LocalProtocolError: This process was forked after the transport was used.
        """
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
        """True if another process, from which this one was forked, has used the transport."""
        return self._pid not in (0, os.getpid())

    # -- sending -------------------------------------------------------------------------------

    def begin(self, model_id: str, weights: Any) -> Finish:
        """Copy weights, unless they are a copy already, and send them; see :class:`Answered`."""
        if not isinstance(weights, Weights):
            weights = self._copier.copy(weights)
        version = self.call("send_weights", self.end.post, model_id, weights, self.timeout)
        return functools.partial(self.call, "wait_ack", self.end.wait_for_ack, version)

    def check_ack(self, message: str = "updated") -> None:
        """Wait like :meth:`wait_ack`; ``message`` is ignored, as only ``"updated"`` is success."""
        del message
        self.wait_ack()

    def wait_for_peer(self, timeout: float) -> bool:
        """Wait until the other side has used its end, or the link has ended.

        Asked before a wait for an ack: that a worker has not attached yet is no failure.

        Returns:
            False if neither happened within ``timeout`` seconds.
        """
        end = self.end

        def known() -> bool:
            return end.peer_was_used or end.error is not None

        return known() or self.call("wait_ack", end.until, known, timeout)

    # -- receiving -----------------------------------------------------------------------------

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Wait for the next weights, in the order in which they were sent; none is ever lost.

        Args:
            timeout: Seconds to wait; ``None`` waits until the link ends.

        Returns:
            ``(model_id, weights)``: a nested TensorDict or a state dict with dotted names, as
            it was sent, in memory of its own. ``None`` if none came in time.

        Raises:
            PeerClosed: The other side closed the link, or its process ended.
            RemoteProtocolError: The other side sent a message that is not of this format.
        """
        arrived = self.call("receive_weights", self.end.take, timeout)
        if arrived is None:
            return None
        self._unanswered.append(arrived)
        return arrived.model_id, arrived.rebuild()

    @property
    def owes_ack(self) -> bool:
        """True if weights were received and not answered."""
        return bool(self._unanswered)

    def send_ack(self, message: str = "updated") -> None:
        """Answer the oldest weights that were received and not answered.

        Returns when the answer is written, so that the process may end; after two seconds in any
        case, if the other side does not read.

        Args:
            message: ``"updated"`` for success; any other text is an error for the other side.

        Raises:
            LocalProtocolError: There are no such weights (a ``RuntimeError``).
        """
        if not self._unanswered:
            raise LocalProtocolError("there is nothing to acknowledge: call receive_weights()")
        error = None if message == "updated" else LocalProtocolError(message)
        self.call("send_ack", self.end.acknowledge, self._unanswered.popleft(), error)

    # -- calls of a connection -----------------------------------------------------------------

    @property
    def pipe(self) -> MPTransport:
        """This object, for programs that call :meth:`poll` and :meth:`recv` of the pipe.

        The connection that was given is closed; the transport owns its descriptor.
        """
        return self

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return True if weights, or the end of the link, come within ``timeout`` seconds.

        ``None`` waits as long as it takes.
        """
        end = self.end
        return self.call("poll", end.until, lambda: end.arrived or end.error is not None, timeout)

    def recv(self) -> tuple[tuple[str, Any], str]:
        """Wait for weights, and return them as ``transport.pipe.recv()`` does in TorchRL.

        ``receiver.apply_weights()`` or :meth:`send_ack` answers them.

        Returns:
            ``((model_id, weights), "update_weights")``; the weights in memory of their own.

        Raises:
            EOFError: The other side closed the link, or its process ended.
        """
        try:
            taken = self.receive_weights(timeout=None)
        except PeerClosed as exc:
            raise EOFError(str(exc)) from exc
        assert taken is not None
        return taken, "update_weights"

    # -- the link ------------------------------------------------------------------------------

    def check_connection(self) -> bool:
        """Return True if the link is open at both ends.

        Returns False in a process that was forked after the link was used.
        """
        if self._closed or self._inherited:
            return False
        with contextlib.suppress(AiosyncError):
            self.call("check_connection", self.end.until, lambda: True)
        return self.end.error is None

    def close(self) -> None:
        """Close the link; the other side sees ``PeerClosed``. Idempotent.

        A close in a forked child does not end the parent's link.
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
        if hasattr(self, "_closed"):  # otherwise __init__() refused the pipe
            self.abort()


class SharedMemTransport:
    """Transport that keeps registered weights up to date in place, over two-way pipes.

    The trainer registers a pipe for each worker and sends; a worker registers its own end, and
    calls :meth:`receive_weights` where its weights may change. Weights are copied when they are
    sent and when they arrive, so neither side sees changes that the other makes to its tensors.

    Args:
        policy_weights: Model id -> TensorDict that is kept up to date, in place: on a trainer
            by :meth:`send_weights`, on a worker by :meth:`receive_weights`.
        auto_register: Register a model when it is first sent, or when it first arrives.

    Attributes:
        auto_register: As it was given; may be changed.
        timeout: Seconds that :meth:`send_weights` waits for all workers; 60, and may be changed.
        policy_weights: Registered weights by model id, as nested TensorDicts, which change in
            place. Those that the program did not register are copies of the first weights sent.
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
        # Newest weights of each model since the last receive_weights().
        self._newest: dict[str, Weights] = {}
        self._copier = Copier()
        for model_id, weights in (policy_weights or {}).items():
            self.register_weights(model_id, weights)

    def register_pipe(self, pipe: Any) -> None:
        """Add one end of a two-way pipe; owned from now on.

        Raises:
            ConfigError: The pipe is not two-way (a ``ValueError``).
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
        """Copy weights that are sent, or have arrived, into the registered ones; send nothing.

        Raises:
            ConfigError: The weights are of another type (a ``ValueError``).
            KeyError: The model is not registered, and ``auto_register`` is off.
            ManifestMismatch: The weights do not fit the registered ones (a ``ValueError``).
        """
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
            ManifestMismatch: The weights do not fit the registered ones (a ``ValueError``).
            AckTimeout: A worker did not answer within :attr:`timeout` seconds (a
                ``TimeoutError``).
            PeerClosed: A worker closed its link, or its process ended. The others have the weights.
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
        """Copy the newest weights of each model into the weights registered under its name.

        In a worker, registered tensors change only here. Returns ``None``, as this generation did;
        look at :attr:`policy_weights`.

        Args:
            timeout: Seconds to wait for weights if none have come; ``None`` waits until the link
                ends.

        Raises:
            KeyError: The model is not registered, and ``auto_register`` is off.
            ManifestMismatch: The weights do not fit the registered ones (a ``ValueError``).
            PeerClosed: The other side closed the link, or its process ended.
            LocalProtocolError: There are several pipes, as in a trainer (a ``RuntimeError``).
        """
        newest = self._newest
        if len(self._links) > 1:
            raise LocalProtocolError("receive_weights() is for a worker, which has one pipe")
        for link in self._links:
            if link.call("receive_weights", link.end.until, lambda: newest, timeout):
                # The acks have to be written, because this process may end after the call.
                link.call("receive_weights", link.end.all_left)
        while newest:
            # `arrived` keeps the memory until the weights are copied out of it.
            model_id, arrived = newest.popitem()
            self.update_registered(model_id, arrived.rebuild())

    def send_ack(self, message: str = "updated") -> None:
        """Do nothing: weights are acknowledged when they arrive."""

    check_ack = send_ack  # send_weights() has waited for the acks already

    def check_connection(self) -> bool:
        """Return True if every link is open; see :class:`MPTransport`."""
        return all(link.check_connection() for link in self._links)

    def close(self) -> None:
        """Close every link; the other side sees ``PeerClosed``. Idempotent."""
        for link in self._links:
            link.close()
