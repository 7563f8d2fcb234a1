"""The older generation's transports over pipes: blocking, one object for each end.

Both ends are of the same class. They are the async transports of the same names, driven through
the portal; nothing is pickled. Must not import torch.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from aiosync import transports as aio
from aiosync.errors import (
    AckTimeout,
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
)
from aiosync.legacy._endpoint import Arrived, Endpoint
from aiosync.legacy._link import Closing, Link, is_up, poll, wait_for_any
from aiosync.legacy._pipe_view import PipeView
from aiosync.legacy._strategy import WeightStrategy, nested
from aiosync.tensors.tensordicts import is_tensordict
from aiosync.types import AckStatus
from aiosync.wire import Ack

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["MPTransport", "SharedMemTransport", "TransportBackend"]

_REGISTER_SECONDS = 10.0


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


def _pipe_endpoint(sock: socket.socket) -> Endpoint:
    return Endpoint(aio.MPTransport(sock), sock, newest_only=False, speaks="pipe")


def _memory_endpoint(sock: socket.socket) -> Endpoint:
    return Endpoint(aio.SharedMemTransport(sock), sock, newest_only=True, speaks="memory")


class _Pipe(PipeView):
    """The pipe of a transport."""

    def __init__(self, transport: MPTransport) -> None:
        self._transport = transport

    def poll(self, timeout: float | None = 0.0) -> bool:
        return poll(self._transport._link, timeout)

    def _take(self) -> tuple[str, Any] | None:
        return self._transport.receive_weights(timeout=None)


class MPTransport(Closing):
    """One end of a two-way pipe that carries weights and acknowledgements.

    Args:
        pipe_connection: ``multiprocessing`` connection of a two-way pipe; owned from now on.
        timeout: Seconds that acknowledgements are waited for.

    Attributes:
        pipe: To look for weights by hand: ``poll(timeout)``, and ``recv()``, which returns
            ``((model_id, weights), "update_weights")``. What was given is closed: what was
            below it belongs to the transport.
        timeout: As it was given; may be changed.

    Raises:
        ConfigError: The pipe is not two-way (a ``ValueError``).
    """

    def __init__(self, pipe_connection: Any, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self.pipe: PipeView = _Pipe(self)
        self._link = Link(pipe_connection, _pipe_endpoint)
        self._pending: deque[int] = deque()
        self._unanswered: deque[Arrived] = deque()

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights and wait until the other side said that it applied them.

        Args:
            model_id: Name of the model.
            weights: TensorDict, state dict or module; copied.

        Raises:
            AckTimeout: It did not within ``timeout`` seconds (a ``TimeoutError``).
            LocalProtocolError: It said something else (a ``RuntimeError``).
            PeerClosed: It went away.
            ConfigError: The weights cannot travel (a ``ValueError``).
        """
        version = self._post("send_weights", model_id, weights)
        self._wait(version, "updated")

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Copy weights and send them in the background; :meth:`wait_ack` waits."""
        self._pending.append(self._post("send_weights_async", model_id, weights))

    def _post(self, what: str, model_id: str, weights: Any) -> int:
        async def post(endpoint: Endpoint) -> int:
            return endpoint.post(model_id, weights)

        return self._link.call(what, post)

    def _drop_oldest(self) -> None:
        # For senders that stop waiting: the next wait_ack() must not wait for an older send.
        self._pending.popleft()

    def wait_ack(self) -> None:
        """Wait for the answer to the oldest :meth:`send_weights_async`.

        Raises:
            AckTimeout: None came within ``timeout`` seconds (a ``TimeoutError``).
            LocalProtocolError: No send is pending, or the other side could not apply it (a
                ``RuntimeError``).
            PeerClosed: The other side went away.
        """
        self.check_ack("updated")

    def check_ack(self, message: str = "updated") -> None:
        """As :meth:`wait_ack`, for an answer of another text."""
        if not self._pending:
            raise LocalProtocolError("No async send is pending. Call send_weights_async() first.")
        self._wait(self._pending.popleft(), message)

    def _wait(self, version: int, message: str) -> None:
        async def wait(endpoint: Endpoint) -> Ack:
            return await endpoint.wait_for_ack(version, self.timeout)

        ack = self._link.call("wait_ack", wait)
        said = ack.error_text if ack.status is AckStatus.NACK else "updated"
        if said != message:
            raise LocalProtocolError(f"Expected acknowledgment {message!r}, got {said!r}")

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
        arrived = self._link.call("receive_weights", lambda endpoint: endpoint.take(timeout))
        if arrived is None:
            return None
        self._unanswered.append(arrived)
        return arrived.model_id, arrived.weights

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

        async def answer(endpoint: Endpoint) -> None:
            await endpoint.acknowledge(self._unanswered.popleft(), error)

        self._link.call("send_ack", answer)

    def check_connection(self) -> bool:
        """Whether the link is open and the other side has not closed it.

        False in a process that was forked after the link was used.
        """
        return is_up(self._link)

    def close(self) -> None:
        """Close the link; the other side sees ``PeerClosed``. Idempotent."""
        self._link.close()


class SharedMemTransport(Closing):
    """Weights through shared memory, over any number of two-way pipes.

    The trainer registers a pipe for each worker and sends; a worker registers its own end and
    calls :meth:`receive_weights` where its weights may change. What is sent is copied, and what
    arrives is copied out: neither side ever sees what the other does with its tensors.

    Args:
        policy_weights: Model id -> TensorDict that is kept up to date, in place: on a trainer
            by :meth:`send_weights`, on a worker by :meth:`receive_weights`.
        auto_register: Register a model when it is first sent, or when it first arrives.

    Attributes:
        policy_weights: What is registered, as nested TensorDicts. Those that the program
            registered change in place; on a trainer the others are copies of what was sent.
    """

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | None = None,
        auto_register: bool = True,
    ) -> None:
        self.auto_register = auto_register
        self.policy_weights: dict[str, TensorDictBase] = {}
        self._of_program: set[str] = set()  # models whose tensors the program registered
        self._links: list[Link] = []
        for model_id, weights in (policy_weights or {}).items():
            self.register_weights(model_id, weights)

    def register_pipe(self, pipe: Any) -> None:
        """Add one end of a two-way pipe; owned from now on.

        Raises:
            ConfigError: It is not two-way (a ``ValueError``).
        """
        self._links.append(Link(pipe, _memory_endpoint))

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
        self._of_program.add(model_id)

    def _share(self, policy_weights: dict[str, TensorDictBase], of_program: set[str]) -> None:
        # Of a scheme, which sees what is registered by sending.
        self.policy_weights, self._of_program = policy_weights, of_program

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights to every worker, and wait until each has them in its memory.

        Args:
            model_id: Name of the model.
            weights: TensorDict, or mapping of tensors; copied.

        Raises:
            KeyError: The model is not registered, and ``auto_register`` is off.
            ConfigError: The weights are of another type, or cannot travel (a ``ValueError``).
            ManifestMismatch: They do not fit what the program registered (a ``ValueError``).
            AckTimeout: A worker did not answer within 10 seconds (a ``TimeoutError``).
            PeerClosed: A worker went away. The others were served.
        """
        if not (is_tensordict(weights) or isinstance(weights, Mapping)):
            raise ConfigError(f"Unsupported weights type: {type(weights)}")
        if model_id not in self.policy_weights and not self.auto_register:
            raise KeyError(f"model {model_id!r} is not registered")
        if model_id in self._of_program:
            WeightStrategy().apply_weights(self.policy_weights[model_id], weights)
            sending = self.policy_weights[model_id]
        else:
            sending = nested(weights)
        give_up = time.monotonic() + _REGISTER_SECONDS
        first: Exception | None = None
        sent: list[tuple[Link, int]] = []

        async def post(endpoint: Endpoint) -> int:
            return endpoint.post(model_id, weights)

        for link in self._links:
            try:
                sent.append((link, link.call("send_weights", post)))
            except Exception as exc:  # noqa: BLE001 - raised once all were served
                first = first or exc
        if not isinstance(first, ConfigError):
            self.policy_weights[model_id] = sending
        for link, version in sent:
            try:
                self._wait(link, version, max(0.0, give_up - time.monotonic()))
            except Exception as exc:  # noqa: BLE001 - raised once all were served
                first = first or exc
        if first is not None:
            raise first

    @staticmethod
    def _wait(link: Link, version: int, timeout: float) -> None:
        async def wait(endpoint: Endpoint) -> Ack:
            return await endpoint.wait_for_ack(version, timeout)

        try:
            ack = link.call("send_weights", wait)
        except AckTimeout as exc:
            raise AckTimeout(
                f"a worker did not answer within {_REGISTER_SECONDS:g} s", version=version
            ) from exc
        if ack.status is AckStatus.NACK:  # of a scheme, whose weights changed by themselves
            raise LocalProtocolError(f"Expected acknowledgment 'updated', got {ack.error_text!r}")

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
        if self._links and not self._apply_all():
            wait_for_any(self._links, timeout)
            self._apply_all()

    def _apply_all(self) -> bool:
        """Apply what is here; whether anything was."""
        ended: Exception | None = None
        count = 0
        for link in self._links:
            while True:
                try:
                    arrived = link.call("receive_weights", lambda endpoint: endpoint.take(0.0))
                except (TransportError, RemoteProtocolError) as exc:
                    ended = ended or exc
                    break
                if arrived is None:
                    break
                self._apply(arrived)
                count += 1
        if ended is not None and not count:
            raise ended
        return count > 0

    def send_ack(self, message: str = "updated") -> None:
        """Do nothing: what arrives is acknowledged by itself."""

    def check_ack(self, message: str = "updated") -> None:
        """Do nothing: :meth:`send_weights` has waited for the acknowledgements."""

    def _apply(self, arrived: Arrived) -> None:
        model_id = arrived.model_id
        if model_id in self.policy_weights:
            WeightStrategy().apply_weights(self.policy_weights[model_id], arrived.weights)
        elif self.auto_register:
            self.policy_weights[model_id] = nested(arrived.weights)
        else:
            raise KeyError(f"model {model_id!r} is not registered")

    def check_connection(self) -> bool:
        """Whether every registered pipe is open, and nobody has closed the other end."""
        return all(is_up(link) for link in self._links)

    def close(self) -> None:
        """Close every link. Idempotent."""
        for link in self._links:
            link.close()
