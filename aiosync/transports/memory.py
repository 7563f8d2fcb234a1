"""Links inside one event loop, for tests and for a trainer and a worker that share a process.

Payload bytes are copied when they are sent, and again into buffers that the receiver lends; the
two ends never share memory. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

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
from aiosync.transports._link import again, wake
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
        self._queued_nbytes = 0
        self._closed = False
        self._error: AiosyncError | None = None
        self._arrival: asyncio.Future[None] | None = None  # of a message, for recv()
        self._room: asyncio.Future[None] | None = None  # in the inbox, for the peer's send()
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

    def _check_peer(self) -> MemoryTransport:
        self._check()
        if self._peer is None or self._peer._closed or self._peer._error is not None:
            raise PeerClosed("the other end of the memory link was closed")
        return self._peer

    # -- sending -------------------------------------------------------------------------------

    def _put(self, messages: Sequence[Message], payload: Payload) -> bool:
        """Queue messages, of which a payload belongs to the only one; False without room."""
        peer = self._check_peer()
        views = [flat_view(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)
        for message in messages:
            encode_frame(message, nbytes, limits=self._limits)  # the checks of a real link
        full = len(peer._inbox) + len(messages) > _QUEUE_MESSAGES
        if full or (peer._queued_nbytes and peer._queued_nbytes + nbytes > _QUEUE_NBYTES):
            return False
        peer._queued_nbytes += nbytes
        peer._inbox.extend((message, bytearray().join(views)) for message in messages)
        wake(peer._arrival)
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
                    peer = self._check_peer()
                    peer._room = asyncio.get_running_loop().create_future()
                    await peer._room
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
        late = timeout is not None and timeout <= 0
        try:
            if self._inbox or late:
                await asyncio.sleep(0)
            try:
                async with asyncio.timeout(None if late else timeout):
                    while not self._ready() and not late:
                        self._arrival = asyncio.get_running_loop().create_future()
                        await self._arrival
            except TimeoutError:
                late = True
            if late and not self._ready():
                raise RecvTimeout(f"no message within {timeout:g} s")
            return self._take(into)
        finally:
            self._receiving = False

    def _ready(self) -> bool:
        if self._closed or not self._inbox:
            self._check()
            if self._peer is None or self._peer._closed:
                raise PeerClosed("the other end of the memory link was closed")
        return bool(self._inbox)

    def _take(self, into: Lender | None) -> Received:
        message, data = self._inbox[0]
        nbytes = len(data)
        if nbytes > self._limits.max_payload_nbytes:
            self._fail(FrameTooLarge(f"a payload of {nbytes} bytes is over the limit"))
            self._check()
        buffers: list[Any] = []
        if nbytes:
            try:
                buffers = take_buffers(into, message, nbytes, self._limits)
            except BaseException:  # goes on to the caller of recv()
                self._fail(TransportBroken("no buffer was lent for a payload"))
                raise
            self._check()  # whoever lent may have closed this end
        self._inbox.popleft()
        self._queued_nbytes -= nbytes
        wake(self._room)
        views = [flat_view(buffer) for buffer in buffers]
        start = 0
        for view in views:
            view[:] = memoryview(data)[start : start + view.nbytes]
            start += view.nbytes
        return Received(message, views, nbytes)

    # -- closing -------------------------------------------------------------------------------

    def _fail(self, error: AiosyncError) -> None:
        self._error = self._error or error
        self._inbox.clear()
        wake(self._room)

    async def aclose(self) -> None:
        """Close this end; what it had sent before can still be received."""
        self.abort()

    def abort(self) -> None:
        """The same as :meth:`aclose`, from synchronous code."""
        if self._closed:
            return
        self._closed = True
        self._inbox.clear()
        for end in (self, self._peer):
            if end is not None:
                wake(end._arrival)
                wake(end._room)
        self._peer = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._error else "open"
        return f"<MemoryTransport: {state}>"
