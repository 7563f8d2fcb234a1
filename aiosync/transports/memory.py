"""Links inside one event loop, for tests and for a trainer and a worker that share a process.

Payload bytes are copied when they are sent, and again into buffers that the receiver lends; the
two ends never share memory. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from aiosync._tasks import Notifier
from aiosync.errors import (
    AiosyncError,
    FrameTooLarge,
    PeerClosed,
    RecvTimeout,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.transports._buffers import flat_view, take_buffers
from aiosync.transports._kept_errors import again
from aiosync.transports.base import Lender, Payload, Received, Transport
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import DEFAULT_LIMITS, Message, encode_frame

__all__ = ["MemoryTransport"]

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
        self._closed = False
        self._error: AiosyncError | None = None
        self._changes = Notifier()
        self._sending = self._receiving = False

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
        return left, right

    def _check(self) -> None:
        if self._closed:
            raise TransportClosed("this end of the memory link was closed")
        if self._error is not None:
            raise again(self._error)

    def _wake(self) -> None:
        for end in (self, self._peer):
            if end is not None:
                end._changes.notify()

    # -- sending -------------------------------------------------------------------------------

    def _put(self, messages: Sequence[Message], payload: Payload) -> bool:
        """Queue messages, of which a payload belongs to the only one; False without room."""
        self._check()
        peer = self._peer
        if peer is None or peer._closed or peer._error is not None:
            raise PeerClosed("the other end of the memory link was closed")
        views = [flat_view(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)
        for message in messages:
            encode_frame(message, nbytes, limits=self._limits)  # the checks of a real link
        if len(peer._inbox) + len(messages) > _QUEUE_MESSAGES:
            return False
        queued_nbytes = sum(len(each) for _, each in peer._inbox)
        if queued_nbytes and queued_nbytes + nbytes > _QUEUE_NBYTES:
            return False
        peer._inbox.extend((message, bytearray().join(views)) for message in messages)
        self._wake()
        return True

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`."""
        return self._put([message], payload) if not self._sending else False

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        return self._put(messages, ()) if not self._sending else False

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class A."""
        if self._sending:
            raise TransportBusy("another send() is running on this memory link")
        self._sending = True
        try:
            await asyncio.sleep(0)
            async with asyncio.timeout(timeout) as deadline:
                while not self._put([message], payload):
                    await self._changes.wait()
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise SendTimeout(
                f"the memory link did not take the message within {timeout:g} s"
            ) from exc
        finally:
            self._sending = False

    # -- receiving -----------------------------------------------------------------------------

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class A."""
        if self._receiving:
            raise TransportBusy("another recv() is waiting on this memory link")
        self._receiving = True
        poll = timeout is not None and timeout <= 0
        try:
            if self._inbox or poll:
                await asyncio.sleep(0)
            async with asyncio.timeout(None if poll else timeout) as deadline:
                while not self._inbox:
                    self._check()
                    if self._peer is None or self._peer._closed:
                        raise PeerClosed("the other end of the memory link was closed")
                    if poll:
                        raise RecvTimeout(f"no message within {timeout:g} s")
                    await self._changes.wait()
            self._check()
            return self._take(into)
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise RecvTimeout(f"no message within {timeout:g} s") from exc
        finally:
            self._receiving = False

    def _take(self, into: Lender | None) -> Received:
        message, data = self._inbox[0]
        if len(data) > self._limits.max_payload_nbytes:
            self._fail(FrameTooLarge(f"a payload of {len(data)} bytes is over the limit"))
            self._check()
        views: list[memoryview] = []
        if data:
            try:
                views = [*map(flat_view, take_buffers(into, message, len(data), self._limits))]
            except BaseException:  # goes on to the caller of recv()
                self._fail(TransportBroken("no buffer was lent for a payload"))
                raise
            self._check()  # whoever lent may have closed this end
        self._inbox.popleft()
        self._wake()
        start = 0
        for view in views:
            view[:] = memoryview(data)[start : start + view.nbytes]
            start += view.nbytes
        return Received(message, views, len(data))

    # -- closing -------------------------------------------------------------------------------

    def _fail(self, error: AiosyncError) -> None:
        self._error = self._error or error
        self._inbox.clear()
        self._wake()

    async def aclose(self) -> None:
        """Close this end; what it had sent before can still be received."""
        self.abort()

    def abort(self) -> None:
        """The same as :meth:`aclose`, from synchronous code."""
        self._closed = True
        self._inbox.clear()
        self._wake()
        self._peer = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._error else "open"
        return f"<MemoryTransport: {state}>"
