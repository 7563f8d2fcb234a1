"""Links through shared memory: payloads in slots of one segment, messages over a Unix socket.

The sender writes a payload once into a slot, however many receivers read it, and wakes them
through the socket, beside which the segment's descriptor travelled before. Receivers read the
slot in place. Must not import torch or schemes. See ``docs/topics/shared-memory.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from aiosync.errors import (
    SendTimeout,
    TransportBroken,
    TransportBusy,
)
from aiosync.transports._buffers import flat_view, take_buffers
from aiosync.transports._channel import FramedChannel
from aiosync.transports._incoming import SlotReader
from aiosync.transports._io import SocketIo
from aiosync.transports._publishing import LAST, FrameCache, SlotPublisher
from aiosync.transports._segment import Arena, Slot
from aiosync.transports.base import (
    Again,
    Handler,
    Lender,
    Payload,
    Received,
    Transport,
    without_payload,
)
from aiosync.types import AckStatus, Cancellation, Capabilities, Limits
from aiosync.wire import (
    Message,
    Release,
    Repeat,
    Segment,
    encode_frame,
)

__all__ = ["SharedMemTransport"]

_INLINE_NBYTES = 4096  # payloads up to this size travel in the socket
_OWN_SLOTS = 4  # slots that plain send() may fill before it waits for the peer
_COPY_NBYTES = 4 * 2**20  # bytes copied between two looks at the loop


class SharedMemTransport(Transport):
    """A link between two processes of one host.

    Args:
        sock: A connected Unix stream socket; owned from now on.
        arena: Where outgoing payloads are; shared by the links of one sender. Without it the
            link has its own.
        limits: What the peer may announce.
        name: How errors and reprs call the peer.

    Attributes:
        publisher: Publishes slots that were filled by somebody else, for schemes.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="shm",
        zero_copy_recv=True,
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.SAFE,
    )

    def __init__(
        self,
        sock: socket.socket,
        *,
        arena: Arena | None = None,
        limits: Limits | None = None,
        name: str = "the peer",
    ) -> None:
        self._io = SocketIo(sock)
        self._own_arena = arena is None
        self._arena = arena if arena is not None else Arena()
        self._sending = self._receiving = False
        self._again: Received | None = None  # a slot whose copy was cancelled
        self._slot_free: asyncio.Future[None] | None = None
        self._handler: Handler | None = None
        if self._own_arena:
            self._arena.on_free = self._on_free
        self._channel = FramedChannel(
            self._io,
            limits=limits,
            name=name,
            intercept=self._intercept,
            whole_below=_INLINE_NBYTES,
        )
        self._channel.call_on_end(self._on_free)
        frames = FrameCache()
        self._reader = SlotReader(self._channel, self._io, frames)
        self.publisher: SlotPublisher = SlotPublisher(
            self, self._channel, self._io, self._arena, frames, self._on_free
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[SharedMemTransport, SharedMemTransport]]:
        """Two connected ends in this process, closed when the context ends."""
        left, right = socket.socketpair()
        async with (
            cls(left, limits=limits, name="the right end") as one,
            cls(right, limits=limits, name="the left end") as two,
        ):
            yield one, two

    @property
    def takes_segments(self) -> bool:
        """Whether the peer may announce segments. To take no descriptors saves system time."""
        return self._io.takes_fds

    @takes_segments.setter
    def takes_segments(self, value: bool) -> None:
        self._io.takes_fds = value

    @property
    def channel(self) -> FramedChannel:
        """The framed byte stream below, for schemes that watch the peer's process."""
        return self._channel

    # -- sending -------------------------------------------------------------------------------

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`; payloads above 4 KiB are always refused."""
        views = [flat_view(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)
        if nbytes > _INLINE_NBYTES or self._sending:
            self._channel.check()
            return False
        frame = encode_frame(message, nbytes, limits=self._channel.limits)
        return self._channel.send_now(frame, [view for view in views if view.nbytes])

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class B; safe while waiting for a slot."""
        views = [flat_view(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)
        if self._sending:
            raise TransportBusy(f"another send() is running on the link to {self._channel.name}")
        self._sending = True
        try:
            if nbytes <= _INLINE_NBYTES:
                frame = encode_frame(message, nbytes, limits=self._channel.limits)
                await self._channel.send(frame, [view for view in views if view.nbytes], timeout)
                return
            encode_frame(message, nbytes, limits=self._channel.limits)  # the limits, early
            slot = await self._copy_in(views, nbytes, timeout)
            try:
                await self.publisher.publish(message, slot, nbytes, timeout=timeout)
            finally:
                slot.release()
        finally:
            self._sending = False

    async def _copy_in(self, views: list[memoryview], nbytes: int, timeout: float | None) -> Slot:
        try:
            async with asyncio.timeout(timeout):
                slot = await self._acquire(nbytes)
        except TimeoutError as exc:
            raise SendTimeout(
                f"{self._channel.name} did not free a slot within {timeout:g} s"
            ) from exc
        try:
            offset = 0
            for view in views:
                await _copy(view, slot.view[offset : offset + view.nbytes])
                offset += view.nbytes
        except BaseException:  # goes on to the caller of send()
            slot.release()
            raise
        return slot

    async def _acquire(self, nbytes: int) -> Slot:
        while True:
            self._channel.check()
            slot = self._arena.free_slot(nbytes)
            if slot is None and self._arena.num_slots < _OWN_SLOTS:
                slot = self._arena.grow(nbytes)
            if slot is not None:
                return slot
            self._slot_free = asyncio.get_running_loop().create_future()
            try:
                await self._slot_free
            finally:
                self._slot_free = None

    def _on_free(self) -> None:
        if self._slot_free is not None and not self._slot_free.done():
            self._slot_free.set_result(None)

    # -- receiving -----------------------------------------------------------------------------

    def _intercept(self, message: Message, ext: Mapping[str, Any] | None) -> bool | Repeat:
        if isinstance(message, Segment):
            self._reader.announce(message)
            return True
        if isinstance(message, Release):
            if ext and ext.get(LAST) is True:
                self.publisher.on_last(message)
                return True
            on_release = functools.partial(
                self.publisher.on_release, (message.segment_id, message.slot), message.retained
            )
            on_release(message.serial)
            return on_release
        if self._handler is None:
            return False
        if ext and "seg" in ext:
            again = self._handler(self._reader.message(message, ext))
            return True if again is None else self._reader.repeated(again, ext)
        left = self.publisher.take_left(message, ext)
        again = self._handler(Received(message))
        if again is None:
            return True
        return without_payload(again) if left is None else self._repeated_ack(again, left)

    def _repeated_ack(self, again: Again, left: tuple[int, int]) -> Repeat:
        """Handle an acknowledgement that also says that the peer left a slot."""
        handle = without_payload(again)

        def repeat(version: int) -> None:
            handle(version)
            self.publisher.on_left(left, version)

        return repeat

    def subscribe(self, handler: Handler) -> bool:
        """See :meth:`Transport.subscribe`; for messages without payload and for slots."""
        self._handler = handler
        return True

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        limits = self._channel.limits
        frames = [encode_frame(message, 0, limits=limits) for message in messages]
        if not self._channel.send_now(b"".join([*frames, self._reader.pending()])):
            return False
        self._reader.sent()
        return True

    def ack_nowait(self, epoch: int, version: int, status: AckStatus) -> bool:
        """See :meth:`Transport.ack_nowait`."""
        if self._sending or not self._channel.send_now(self._reader.ack(epoch, version, status)):
            return False
        self._reader.sent()
        return True

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class A.

        Without ``into`` a payload above 4 KiB is the slot itself: a private view of shared
        memory, valid until ``release()``.
        """
        if self._receiving:
            raise TransportBusy(f"another recv() is waiting on the link to {self._channel.name}")
        self._receiving = True
        try:
            if self._again is None:
                message, ext, buffers, nbytes = await self._channel.recv(into, timeout)
                if not ext or "seg" not in ext:
                    self.publisher.take_left(message, ext)
                    return Received(message, [flat_view(buffer) for buffer in buffers], nbytes)
                received = self._reader.message(message, ext)
                if into is None:
                    return received
                self._again = received
            else:
                await asyncio.sleep(0)
            assert into is not None or self._again is not None
            return await self._copy_out(into)
        finally:
            self._receiving = False

    async def _copy_out(self, into: Lender | None) -> Received:
        """Copy a slot into lent buffers; when cancelled, the next ``recv()`` starts again."""
        received = self._again
        assert received is not None
        if into is None:
            self._again = None
            return received
        try:
            limits = self._channel.limits
            lent = take_buffers(into, received.message, received.nbytes, limits)
            buffers = [flat_view(buffer) for buffer in lent]
        except BaseException:  # goes on to the caller of recv()
            self._again = None
            received.release()
            self._channel.fail(TransportBroken("no buffer was lent for a payload"))
            raise
        offset = 0
        for buffer in buffers:
            await _copy(received.payload[0][offset : offset + buffer.nbytes], buffer)
            offset += buffer.nbytes
        self._again = None
        received.release()
        return Received(received.message, buffers, received.nbytes)

    def tell_retained(self, key: tuple[int, int]) -> None:
        """Tell the sender not to wait for a slot: something in this process still uses it."""
        self._reader.tell_retained(key)

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the link and the mappings; waiters see ``TransportClosed``."""
        self.abort()

    def abort(self) -> None:
        """The same as :meth:`aclose`, from synchronous code."""
        if self._channel.closed:
            return
        self._reader.flush()
        if self.takes_segments:
            self._reader.farewell()
        self.publisher.end()
        self._channel.close()
        self._on_free()
        self._reader.close()
        if self._own_arena:
            self._arena.close()

    def __repr__(self) -> str:
        return f"<SharedMemTransport to {self._channel.name}: {self._channel.describe()}>"


async def _copy(source: memoryview, target: memoryview) -> None:
    """Copy without holding the GIL, and let the loop run between two pieces."""
    for start in range(0, source.nbytes, _COPY_NBYTES):
        if start:
            await asyncio.sleep(0)
        piece = np.frombuffer(source[start : start + _COPY_NBYTES], np.uint8)
        np.copyto(np.frombuffer(target[start : start + piece.size], np.uint8), piece)
