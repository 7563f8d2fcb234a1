"""Links inside one event loop, for tests and for a trainer and a worker that share a process.

Payload bytes are copied once, from the sender's buffers into the receiver's; the two ends never
share memory. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)
class _Parcel:
    message: Message
    views: list[memoryview]
    nbytes: int
    taken: asyncio.Future[None] | None = None  # set when the sender waits for the receiver


class MemoryTransport(Transport):
    """One end of an in-process link. Make both with :meth:`pair`.

    Small messages are queued (64 messages, 256 KiB in all); a larger payload waits in its
    sender's buffers until the receiver takes it.
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
        self._inbox: deque[_Parcel] = deque()
        self._queued_nbytes = 0
        self._closed = False
        self._error: AiosyncError | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
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

    def _check_closed(self) -> None:
        if self._closed:
            raise TransportClosed("this end of the memory link was closed")

    def _check_open(self) -> None:
        self._check_closed()
        if self._error is not None:
            raise again(self._error)

    def _target(self) -> MemoryTransport:
        self._check_open()
        peer = self._peer
        if peer is None or peer._closed or peer._error is not None:
            raise PeerClosed("the other end of the memory link was closed")
        return peer

    def _parcel(self, message: Message, payload: Payload) -> _Parcel:
        views = [flat_view(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)
        encode_frame(message, nbytes, limits=self._limits)  # the same checks as on a real link
        return _Parcel(message, views, nbytes)

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`."""
        peer = self._target()
        parcel = self._parcel(message, payload)
        if self._sending or not peer._has_room(parcel.nbytes):
            return False
        peer._put(parcel, own=True)
        return True

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        peer = self._target()
        if self._sending or len(peer._inbox) + len(messages) > _QUEUE_MESSAGES:
            return False
        for message in messages:
            peer._put(self._parcel(message, ()), own=True)
        return True

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class A."""
        if self._sending:
            raise TransportBusy("another send() is running on this memory link")
        self._sending = True
        try:
            await asyncio.sleep(0)
            peer = self._target()
            parcel = self._parcel(message, payload)
            try:
                async with asyncio.timeout(timeout):
                    await self._deliver(peer, parcel)
            except TimeoutError as exc:
                raise SendTimeout(
                    f"the memory link did not take the message within {timeout:g} s"
                ) from exc
        finally:
            self._sending = False

    async def _deliver(self, peer: MemoryTransport, parcel: _Parcel) -> None:
        loop = asyncio.get_running_loop()
        while len(peer._inbox) >= _QUEUE_MESSAGES:
            peer._room = loop.create_future()
            await peer._room
            peer = self._target()
        if peer._has_room(parcel.nbytes):
            peer._put(parcel, own=True)
            return
        parcel.taken = loop.create_future()
        peer._put(parcel, own=False)
        try:
            await parcel.taken
        except BaseException:  # goes on to the caller of send()
            with contextlib.suppress(ValueError):
                peer._inbox.remove(parcel)
            if parcel.taken.done() and not parcel.taken.cancelled():
                parcel.taken.exception()
            raise

    def _has_room(self, nbytes: int) -> bool:
        fits = not nbytes or self._queued_nbytes + nbytes <= _QUEUE_NBYTES
        return fits and len(self._inbox) < _QUEUE_MESSAGES

    def _put(self, parcel: _Parcel, *, own: bool) -> None:
        if own:
            parcel.views = [memoryview(bytes(view)) for view in parcel.views]
            self._queued_nbytes += parcel.nbytes
        self._inbox.append(parcel)
        wake(self._arrival)

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class A."""
        if self._receiving:
            raise TransportBusy("another recv() is waiting on this memory link")
        self._receiving = True
        try:
            if self._inbox or (timeout is not None and timeout <= 0):
                await asyncio.sleep(0)
            try:
                async with asyncio.timeout(timeout):
                    while not self._ready():
                        self._arrival = asyncio.get_running_loop().create_future()
                        await self._arrival
            except TimeoutError as exc:
                if not self._ready():
                    raise RecvTimeout(f"no message within {timeout:g} s") from exc
            return self._take(into)
        finally:
            self._receiving = False

    def _ready(self) -> bool:
        if self._closed:
            self._check_open()
        if self._inbox:
            return True
        self._check_open()
        if self._peer is None or self._peer._closed:
            raise PeerClosed("the other end of the memory link was closed")
        return False

    def _take(self, into: Lender | None) -> Received:
        parcel = self._inbox[0]
        if parcel.nbytes > self._limits.max_payload_nbytes:
            self._fail(FrameTooLarge(f"a payload of {parcel.nbytes} bytes is over the limit"))
            self._check_open()
        buffers: list[Any] = []
        if parcel.nbytes:
            buffers = self._borrow(into, parcel)
            if not self._inbox or self._inbox[0] is not parcel:
                # The peer went away while the buffers were lent, and its payload with it.
                self._check_closed()
                self._fail(TransportBroken("the other end went away in mid-message"))
                self._check_open()
        self._inbox.popleft()
        if parcel.taken is None:
            self._queued_nbytes -= parcel.nbytes
        else:
            wake(parcel.taken)
        wake(self._room)
        views = [flat_view(buffer) for buffer in buffers]
        _copy(parcel.views, views)
        return Received(parcel.message, views, parcel.nbytes)

    def _borrow(self, into: Lender | None, parcel: _Parcel) -> list[Any]:
        try:
            buffers = take_buffers(into, parcel.message, parcel.nbytes, self._limits)
        except BaseException:  # goes on to the caller of recv()
            self._fail(TransportBroken("no buffer was lent for a payload"))
            raise
        return buffers

    def _fail(self, error: AiosyncError) -> None:
        self._error = self._error or error
        self._drop_inbox(PeerClosed("the other end of the memory link failed"))

    def _drop_inbox(self, error: AiosyncError) -> None:
        for parcel in self._inbox:
            if parcel.taken is not None and not parcel.taken.done():
                parcel.taken.set_exception(error)
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
        self._drop_inbox(PeerClosed("the other end of the memory link was closed"))
        wake(self._arrival)
        if self._peer is not None:
            peer = self._peer
            for parcel in [item for item in peer._inbox if item.taken is not None]:
                # A payload that still lay in our buffers ends with us, before its first byte.
                assert parcel.taken is not None
                if not parcel.taken.done():
                    parcel.taken.set_exception(TransportClosed("this end was closed"))
                peer._inbox.remove(parcel)
            wake(peer._arrival)
            wake(peer._room)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._error else "open"
        return f"<MemoryTransport: {state}>"


def _copy(sources: list[memoryview], targets: list[memoryview]) -> None:
    """Copy the bytes of ``sources`` into ``targets``, whose cuts may differ."""
    targets = [target for target in targets if target.nbytes]
    index = offset = 0
    for source in sources:
        done = 0
        while done < source.nbytes:
            target = targets[index]
            step = min(source.nbytes - done, target.nbytes - offset)
            target[offset : offset + step] = source[done : done + step]
            done += step
            offset += step
            if offset == target.nbytes:
                index, offset = index + 1, 0
