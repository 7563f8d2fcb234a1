"""What moves large payloads beside the stream of a link: the contract, and what goes with it.

Must not import torch, ray, schemes or a concrete transport.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from aiosync.errors import LocalProtocolError, RemoteProtocolError
from aiosync.transports.stream import FramedTransport
from aiosync.wire import ExtValue, Setup, encode_frame

__all__ = [
    "COPYING",
    "KEPT",
    "Carrier",
    "Fetched",
    "Progress",
    "SharedPayload",
    "handed_over",
    "outlast",
]

_T = TypeVar("_T")

COPYING = "copying"
"""Key of :attr:`SharedPayload.memo`: the :class:`Progress` of the copy that fills the payload."""

KEPT = "kept"
"""Key of :attr:`SharedPayload.memo`: some carrier keeps the bytes.

A call that brings them back, as buffers in order: an awaitable of ``Sequence[memoryview]``, which
raises :class:`~aiosync.errors.LocalProtocolError` where they are gone.
"""


def handed_over(call: Callable[[], _T]) -> Callable[[], _T]:
    """The same call for an executor to make, once: what it holds is let go as it returns.

    An executor lets go of a call only some time after it has told its outcome, and the buffers of
    a payload must be their owner's again by then.
    """
    calls = [call]

    def make() -> _T:
        return calls.pop()()

    return make


async def outlast(
    running: asyncio.Future[Any], on_cancel: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait until ``running`` has ended, as it uses memory of others, also when cancelled.

    Args:
        running: Not cancelled by this.
        on_cancel: Called at once whenever this is cancelled.

    Returns:
        What cancelled this, for the caller to raise.
    """
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as exc:
            cancelled = exc
            if on_cancel is not None:
                on_cancel()
    return cancelled


class SharedPayload(list[memoryview]):
    """A payload that goes over several links, with a place for what carriers make of it once.

    Attributes:
        memo: Entries of carriers, by keys of their own; cleared when the payload's memory is
            about to be used for another.
    """

    def __init__(self, views: Iterable[memoryview], memo: dict[Any, Any]) -> None:
        super().__init__(views)
        self.memo = memo


class Progress:
    """How much of a payload is in place while it is still being copied, from its start on.

    One thread copies, any threads wait.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def advance(self, nbytes: int) -> None:
        """So many bytes from the start are in place."""
        with self._changed:
            self._nbytes = nbytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, nbytes: int) -> None:
        """Block until so many bytes are in place.

        Raises:
            LocalProtocolError: The copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._nbytes >= nbytes or self._error is not None)
            if self._error is not None:
                raise LocalProtocolError(f"the weights could not be copied: {self._error}")


@dataclass(slots=True)
class Fetched:
    """A payload that arrived beside the stream.

    Attributes:
        payload: Its bytes.
        release: Gives memory of the carrier back; see :class:`Received`.
        key: See :class:`Received`; ``None`` when the bytes lie in lent buffers.
    """

    payload: Sequence[memoryview]
    release: Callable[[], None] | None = None
    key: Hashable | None = None


class Carrier(abc.ABC):
    """Moves payloads of one link, one at a time in each direction.

    Its coroutines run on the loop of the link and may raise
    :class:`~aiosync.errors.TransportError`, which ends the link. When one of them is cancelled it
    must not return before nothing reads from or writes to the memory that it was given.
    """

    kind: str
    """Names the way in :class:`~aiosync.wire.Setup` messages."""

    follows_copies: ClassVar[bool] = False
    """Whether :meth:`push` waits for the parts of a payload that are not in place yet."""

    control: FramedTransport
    """The control stream; set before anything else is called."""

    @abc.abstractmethod
    async def offer(
        self, payload: list[memoryview], nbytes: int, memo: dict[Any, Any]
    ) -> Mapping[str, ExtValue]:
        """Prepare to send; returns what the peer has to know. It is told after this.

        Args:
            payload: The bytes, in order.
            nbytes: How many in total.
            memo: Belongs to the payload, see :class:`SharedPayload`.

        Raises:
            LocalProtocolError: It cannot be sent; the link is as it was.
        """

    @abc.abstractmethod
    async def push(self, payload: list[memoryview], nbytes: int) -> None:
        """Send, once the peer was told. Returns when the payload's memory may change."""

    @abc.abstractmethod
    async def fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> Fetched:
        """Receive what the peer told of.

        Args:
            ext: What the peer's :meth:`offer` returned, unchecked.
            nbytes: Size of the payload.
            lend: Gives the buffers that the payload has to land in; ``None`` where memory of the
                carrier is welcome.
        """

    def hear(self, message: Setup) -> None:
        """The peer set something up. May raise ``RemoteProtocolError``, which ends the link."""
        raise RemoteProtocolError(f"unexpected set-up of {message.kind!r}")

    async def settle(self) -> None:
        """Bring what is being set up to its end while the peer can still be heard. Bounded."""
        return None

    @abc.abstractmethod
    def end(self) -> None:
        """The link has ended: make what is under way fail soon. Never waits."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Give everything back. Bounded."""

    def hint(self) -> str:
        """What the peer may have ended the link for, as far as this side can tell; or nothing."""
        return ""

    def say(self, key: str, value: bytes = b"") -> None:
        """Tell the peer's carrier something, as soon as the stream is between two frames."""
        if not self.control.ended:
            self.control.queue(encode_frame(Setup(self.kind, key, value)))
