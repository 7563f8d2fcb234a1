"""Links inside one event loop, for tests and for a trainer and a worker that share a process.

Payload bytes are copied when they are sent, and again into buffers that the receiver lends; the
two ends never share memory. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import ClassVar, TypeVar

from aiosync._tasks import Notifier
from aiosync.errors import (
    AiosyncError,
    PeerClosed,
    RecvTimeout,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.transports.base import (
    Lender,
    Payload,
    Received,
    Transport,
    again,
    flat_view,
    take_buffers,
)
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import DEFAULT_LIMITS, Message, encode_frame

__all__ = ["MemoryTransport"]

_T = TypeVar("_T")

_QUEUE_MESSAGES = 64
_QUEUE_NBYTES = 256 * 2**10


class MemoryTransport(Transport):
    """One end of an in-process link. Make both with :meth:`pair`.

    What was sent is queued: up to 64 messages and 256 KiB, or one larger payload.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="memory",
        cross_process=False,
        send_cancellation=Cancellation.SAFE,
        recv_cancellation=Cancellation.SAFE,
    )

    def __init__(self, *, limits: Limits | None = None) -> None:
        self._limits = limits or DEFAULT_LIMITS
        self._peer: MemoryTransport | None = None
        self._inbox: deque[tuple[Message, bytearray]] = deque()
        self._error: AiosyncError | None = None  # what ended this end
        self._changes = Notifier()  # of both ends
        self._running: set[str] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[MemoryTransport, MemoryTransport]]:
        """Two connected ends, closed when the context ends."""
        left, right = cls.connected_pair(limits=limits)
        async with left, right:
            yield left, right

    @classmethod
    def connected_pair(
        cls, *, limits: Limits | None = None
    ) -> tuple[MemoryTransport, MemoryTransport]:
        """Two connected ends that the caller closes."""
        left, right = cls(limits=limits), cls(limits=limits)
        left._peer, right._peer = right, left
        right._changes = left._changes
        return left, right

    def _check(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def _living_peer(self) -> MemoryTransport:
        if self._peer is None or self._peer._error is not None:
            raise PeerClosed("the other end of the memory link was closed")
        return self._peer

    async def _within(
        self, timeout: float | None, name: str, attempt: Callable[[], _T | None], late: AiosyncError
    ) -> _T:
        """Try until something comes of it, again after each change; once at a time for a name."""
        if name in self._running:
            raise TransportBusy(f"another {name}() is running on this memory link")
        self._running.add(name)
        try:
            await asyncio.sleep(0)
            async with asyncio.timeout(timeout) as deadline:
                while (found := attempt()) is None:
                    await self._changes.wait()
                return found
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise late from exc
        finally:
            self._running.discard(name)

    # -- sending -------------------------------------------------------------------------------

    def _put(self, messages: Sequence[Message], payload: Payload) -> bool:
        """Queue messages, of which a payload belongs to the only one; False without room."""
        self._check()
        inbox = self._living_peer()._inbox
        views = [flat_view(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)
        for message in messages:
            encode_frame(message, nbytes, limits=self._limits)  # the checks of a real link
        queued_nbytes = sum(len(each) for _, each in inbox)
        too_large = queued_nbytes and queued_nbytes + nbytes > _QUEUE_NBYTES
        if too_large or len(inbox) + len(messages) > _QUEUE_MESSAGES:
            return False
        inbox.extend((message, bytearray().join(views)) for message in messages)
        self._changes.notify()
        return True

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`."""
        return "send" not in self._running and self._put([message], payload)

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        return "send" not in self._running and self._put(messages, ())

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class A."""
        late = SendTimeout(f"the memory link did not take the message within {timeout} s")
        await self._within(timeout, "send", lambda: self._put([message], payload) or None, late)

    # -- receiving -----------------------------------------------------------------------------

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class A."""
        late = RecvTimeout(f"no message within {timeout} s")
        return await self._within(timeout, "recv", lambda: self._take(into), late)

    def _take(self, into: Lender | None) -> Received | None:
        self._check()
        if not self._inbox:
            self._living_peer()
            return None
        message, data = self._inbox[0]
        views: list[memoryview] = []
        try:
            if data:
                views = take_buffers(into, message, len(data), self._limits)
        except BaseException:  # goes on to the caller of recv()
            self._end(TransportBroken("no buffer was lent for a payload"))
            raise
        self._check()  # whoever lent may have closed this end
        self._inbox.popleft()
        self._changes.notify()
        start = 0
        for view in views:
            view[:] = memoryview(data)[start : start + view.nbytes]
            start += view.nbytes
        return Received(message, views, len(data))

    # -- closing -------------------------------------------------------------------------------

    def _end(self, error: AiosyncError) -> None:
        self._error = error
        self._inbox.clear()
        self._changes.notify()

    async def aclose(self) -> None:
        """Close this end; what it had sent before can still be received."""
        self.abort()

    def abort(self) -> None:
        """The same as :meth:`aclose`, from synchronous code."""
        self._end(TransportClosed("this end of the memory link was closed"))
        self._peer = None

    def __repr__(self) -> str:
        return f"<MemoryTransport: {'open' if self._error is None else type(self._error).__name__}>"
