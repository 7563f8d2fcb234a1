"""Results of a scheme's calls: an applied update, a send under way, a condition to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import Any

from aiosync._repr import in_every_state
from aiosync.types import SendReport

__all__ = [
    "AppliedUpdate",
    "Ready",
    "SendHandle",
    "has_failed",
    "make_handle",
    "still_waiting",
    "weights_to_apply",
]


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """One update that the receiver applied.

    Attributes:
        epoch: Epoch of the sender.
        version: Version of the weights that the module now has.
        model_id: Name of the model.
    """

    epoch: int
    version: int
    model_id: str
    _read: Callable[[], Any] = field(default=lambda: None, repr=False, compare=False)

    @property
    def weights(self) -> Any:
        """The weights as the scheme's strategy extracts them from the module, read now."""
        return self._read()


def weights_to_apply(weights: Any, read: Callable[[], Any]) -> Any:
    """Return weights, or those of an update; ``None`` if it is of the model that ``read`` reads."""
    if not isinstance(weights, AppliedUpdate):
        return weights
    # Its own model has the update already, or a newer one.
    return None if weights._read == read else weights.weights


class SendHandle:
    """A send that is under way. Await it for its :class:`~aiosync.types.SendReport`.

    Awaiting raises what ``send()`` would have raised. It may be awaited any number of times;
    cancelling such an await stops the wait, not the transfer. A failure that is never awaited
    is reported by the event loop's exception handler.
    """

    # The targets that have not answered; shrinks as they do.
    _waiting: Collection[int] = ()

    def __init__(self, version: int, future: asyncio.Future[SendReport]) -> None:
        self.version = version
        """Version that is being sent."""
        self._future = future

    def done(self) -> bool:
        """Return True if the result is known: enough workers have answered, or cannot."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, SendReport]:
        return asyncio.shield(self._future).__await__()

    @in_every_state
    def __repr__(self) -> str:
        state = "done" if self._future.done() else "under way"
        return f"<SendHandle version {self.version}: {state}>"


def make_handle(
    version: int, future: asyncio.Future[SendReport], waiting: Collection[int]
) -> SendHandle:
    """Return a handle that also knows which targets have not answered."""
    handle = SendHandle(version, future)
    handle._waiting = waiting
    return handle


def has_failed(handle: SendHandle) -> bool:
    """Return True if a send is over and failed. The failure still counts as unseen afterwards."""
    # exception() would count as a caller that has seen the failure.
    return handle.done() and handle._future._exception is not None


def still_waiting(handle: SendHandle) -> frozenset[int]:
    """Return the targets of a send that have not answered yet."""
    return frozenset(handle._waiting)


class Ready:
    """The condition that there is a complete version: ``if scheme.ready``, ``await scheme.ready``.

    On a receiver: the model has one, or one is staged and waits for a model. On a sender: every
    expected worker is connected, and each that subscribes has one.
    """

    def __init__(
        self, is_set: Callable[[], bool], wait: Callable[[float | None], Awaitable[None]]
    ) -> None:
        self._is_set = is_set
        self._wait = wait

    def is_set(self) -> bool:
        """Return True if the condition holds now."""
        return self._is_set()

    __bool__ = is_set

    async def wait(self, *, timeout: float | None = None) -> None:
        """Wait until the condition holds.

        Args:
            timeout: Seconds; ``None`` takes the ``timeout`` of the scheme, or of a server's gate,
                ``math.inf`` waits for ever.

        Raises:
            RecvTimeout: Not in time.
            ConfigError: The timeout is not a number.
            PeerClosed: The trainer went away; TransportBroken if a last link broke in mid-message.
            LocalProtocolError: The scheme is not connected.
        """
        await self._wait(timeout)

    def __await__(self) -> Generator[Any, None, None]:
        return self.wait().__await__()

    @in_every_state
    def __repr__(self) -> str:
        return f"<{'ready' if self._is_set() else 'not ready'}>"
