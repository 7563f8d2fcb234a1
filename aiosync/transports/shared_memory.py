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
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from aiosync.errors import (
    FrameTooLarge,
    LocalProtocolError,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
    TransportBusy,
)
from aiosync.transports._channel import FramedChannel
from aiosync.transports._io import SocketIo
from aiosync.transports._reader import flat_view
from aiosync.transports._segment import Arena, SegmentView, Slot
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
    Ack,
    CountedFrame,
    Message,
    Release,
    Repeat,
    Segment,
    Update,
    counted_frame,
    encode_frame,
)

__all__ = ["LAZY_NBYTES", "SharedMemTransport"]

_INLINE_NBYTES = 4096  # payloads up to this size travel in the socket
_OWN_SLOTS = 4  # slots that plain send() may fill before it waits for the peer
_COPY_NBYTES = 4 * 2**20  # bytes copied between two looks at the loop
_MAX_SEGMENTS = 8
_MAX_FRAMES = 64
_LEFT, _LEFT_SLOT = "left", "left-slot"  # entries of the ext map of an acknowledgement
_NEVER = (0, 0)
# The release of a slot up to this size may wait for the next message to the peer, which then
# needs no system call of its own; senders keep one such slot more.
LAZY_NBYTES = 8 * 2**20
"""Bytes up to which the release of a slot may ride along with the next message."""


class SharedMemTransport(Transport):
    """A link between two processes of one host.

    Args:
        sock: A connected Unix stream socket; owned from now on.
        arena: Where outgoing payloads are; shared by the links of one sender. Without it the
            link has its own.
        limits: What the peer may announce.
        name: How errors and reprs call the peer.
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
        self._loop = asyncio.get_running_loop()
        self._io = SocketIo(sock)
        self._own_arena = arena is None
        self._arena = arena if arena is not None else Arena()
        self._announced: set[int] = set()
        # How often each slot was published on this link, and last with which version.
        self._published: dict[tuple[int, int], tuple[int, int]] = {}
        self._incoming: dict[int, SegmentView] = {}
        self._sending = self._receiving = False
        self._again: Received | None = None  # a slot whose copy was cancelled
        self._slot_free: asyncio.Future[None] | None = None
        self._handler: Handler | None = None
        self._frames: dict[Hashable, CountedFrame] = {}
        self._flushing = False
        # What rides along with the next write: releases that the peer does not wait for.
        self._releases: list[Release] = []
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

    def take_no_segments(self) -> None:
        """Take no descriptors from the peer: it may not announce segments. Saves system time."""
        self._io.takes_fds = False

    @property
    def channel(self) -> FramedChannel:
        """The framed byte stream below, for schemes that watch the peer's process."""
        return self._channel

    # -- sending -------------------------------------------------------------------------------

    def publish_nowait(self, message: Message, slot: Slot, nbytes: int) -> bool:
        """Tell the peer to read ``nbytes`` of ``slot``, without waiting.

        The peer holds the slot from now on, until it releases it.

        Returns:
            False when the socket took nothing; use :meth:`publish` then.
        """
        frame = self._slot_frame(message, slot, nbytes)
        return self._publish_frame(frame, slot, getattr(message, "version", 0))

    def publish_plain_nowait(
        self, epoch: int, version: int, digest: bytes, slot: Slot, nbytes: int
    ) -> bool:
        """Publish an update with nothing beside its payload; otherwise as publish_nowait()."""
        known = self._frames.get((Update, digest, slot.key, nbytes, epoch))
        if known is None:
            return self.publish_nowait(Update(epoch, version, digest), slot, nbytes)
        return self._publish_frame(known.encode(version), slot, version)

    def _publish_frame(self, frame: bytes, slot: Slot, version: int) -> bool:
        if not self._announce_nowait(slot):
            return False
        self._lend(slot, version)
        if self._channel.send_now(frame):
            return True
        self._unlend(slot)
        return False

    def _lend(self, slot: Slot, version: int) -> None:
        # Both ends count how often a slot was published on this link; a release says which.
        slot.holders[self] = False
        count, _ = self._published.get(slot.key, _NEVER)
        self._published[slot.key] = count + 1, version

    def _unlend(self, slot: Slot) -> None:
        count, version = self._published[slot.key]
        self._published[slot.key] = count - 1, version
        slot.leave(self)

    async def publish(
        self, message: Message, slot: Slot, nbytes: int, *, timeout: float | None = None
    ) -> None:
        """Tell the peer to read ``nbytes`` of ``slot``; otherwise as :meth:`send`."""
        frame = self._slot_frame(message, slot, nbytes)
        if not self._announce_nowait(slot):
            self._io.attach(slot.segment.read_only_fd)
            await self._channel.send(self._segment_frame(slot), [], timeout)
            self._announced.add(slot.segment.segment_id)
        self._lend(slot, getattr(message, "version", 0))
        try:
            await self._channel.send(frame, [], timeout)
        except BaseException:
            if self._channel.error is None:
                self._unlend(slot)
            raise

    def _slot_frame(self, message: Message, slot: Slot, nbytes: int) -> bytes:
        if nbytes > self._channel.limits.max_payload_nbytes:
            raise LocalProtocolError(
                f"a payload of {nbytes} bytes is over the limit of "
                f"{self._channel.limits.max_payload_nbytes} (Limits.max_payload_nbytes)"
            )
        ext = {"seg": slot.segment.segment_id, "slot": slot.index, "n": nbytes}
        if type(message) is Update and message.is_plain:
            self._new_frame((Update, message.digest, slot.key, nbytes, message.epoch), message, ext)
        return encode_frame(message, 0, ext=ext, limits=self._channel.limits)

    def _segment_frame(self, slot: Slot) -> bytes:
        segment = slot.segment
        message = Segment(segment.segment_id, segment.slot_nbytes, len(segment.slots))
        return encode_frame(message, 0, limits=self._channel.limits)

    def _announce_nowait(self, slot: Slot) -> bool:
        if slot.segment.segment_id in self._announced:
            return True
        self._io.attach(slot.segment.read_only_fd)
        if self._channel.send_now(self._segment_frame(slot)):
            self._announced.add(slot.segment.segment_id)
            return True
        self._io.attach(None)
        return False

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
                await self.publish(message, slot, nbytes, timeout=timeout)
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
        except BaseException:
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
            self._map(message)
            return True
        if isinstance(message, Release):
            on_release = functools.partial(
                self._on_release, (message.segment_id, message.slot), message.retained
            )
            on_release(message.serial)
            return on_release
        if self._handler is None:
            return False
        if ext and "seg" in ext:
            again = self._handler(self._slot_message(message, ext))
            return True if again is None else self._repeated_slot(again, ext)
        left = self._take_left(message, ext)
        again = self._handler(Received(message))
        if again is None:
            return True
        return without_payload(again) if left is None else self._repeated_ack(again, left)

    def _repeated_ack(self, again: Again, left: tuple[int, int]) -> Repeat:
        """Handle an acknowledgement that also says that the peer left a slot."""
        handle = without_payload(again)

        def repeat(version: int) -> None:
            handle(version)
            self._on_left(left, version)

        return repeat

    def _take_left(self, message: Message, ext: Mapping[str, Any] | None) -> tuple[int, int] | None:
        """The slot that an acknowledgement says its sender left, besides what it says itself."""
        if not ext or not isinstance(message, Ack):
            return None
        segment_id, index = ext.get(_LEFT), ext.get(_LEFT_SLOT)
        if type(segment_id) is not int or type(index) is not int:
            return None
        self._on_left((segment_id, index), message.version)
        return segment_id, index

    def _on_left(self, key: tuple[int, int], version: int) -> None:
        """With its word on ``version`` the peer said that it left a slot of an older one."""
        count, published = self._published.get(key, _NEVER)
        if published < version:
            self._on_release(key, False, count)

    def _on_release(self, key: tuple[int, int], retained: bool, serial: int) -> None:
        if self._published.get(key, _NEVER)[0] != serial:
            return  # of an earlier publication
        slot = self._arena.find(*key)
        if slot is not None and self in slot.holders:
            if retained:
                slot.holders[self] = True
                slot.arena.notify(slot)
                self._on_free()
            else:
                slot.leave(self)

    def _repeated_slot(self, again: Again, ext: Mapping[str, Any]) -> Repeat:
        """Handle the same slot, of the same segment, with another version."""
        view = self._incoming[ext["seg"]]
        index: int = ext["slot"]

        def repeat(version: int) -> None:
            if view.closed:  # dropped meanwhile
                raise _never_announced()
            serial = view.count(index)
            view.held.add((index, serial))
            release = functools.partial(self._release, view, index, serial)
            again(version, view.view(index), release)

        return repeat

    def subscribe(self, handler: Handler) -> bool:
        """See :meth:`Transport.subscribe`; for messages without payload and for slots."""
        self._handler = handler
        return True

    def _slot_message(self, message: Message, ext: Mapping[str, Any]) -> Received:
        """A message whose payload is a slot, read in place."""
        view, index, serial = self._locate(ext)
        payload = view.view(index)[: ext["n"]]
        release = functools.partial(self._release, view, index, serial)
        return Received(message, [payload], payload.nbytes, release, (view.segment_id, index))

    def _map(self, message: Segment) -> None:
        if not self._io.received_fds:
            raise RemoteProtocolError("the peer announced a segment without its descriptor")
        fd = self._io.received_fds.popleft()
        old = self._incoming.pop(message.segment_id, None)
        if old is not None:
            old.close()
        view = SegmentView(fd, message.segment_id, message.slot_nbytes)
        self._incoming[message.segment_id] = view
        self._drop_old_segments()

    def _drop_old_segments(self) -> None:
        if len(self._incoming) < 2:
            return
        newest = next(reversed(self._incoming), None)
        for segment_id, view in list(self._incoming.items()):
            if segment_id != newest and not view.held:
                del self._incoming[segment_id]
                view.close()
        if len(self._incoming) > _MAX_SEGMENTS:
            raise RemoteProtocolError("the peer announced too many segments")

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        limits = self._channel.limits
        frames = [encode_frame(message, 0, limits=limits) for message in messages]
        if not self._channel.send_now(b"".join([*frames, *map(self._encode, self._releases)])):
            return False
        self._releases.clear()
        return True

    def ack_nowait(self, epoch: int, version: int, status: AckStatus) -> bool:
        """See :meth:`Transport.ack_nowait`."""
        releases = self._releases
        left = releases[0] if len(releases) == 1 and not releases[0].retained else None
        if left is None:
            key: Hashable = (Ack, epoch, status)
            frame = self._frames.get(key) or self._new_frame(key, Ack(epoch, version, status))
            data = frame.encode(version)
            if releases:
                data = b"".join([data, *map(self._encode, releases)])
        else:
            key = (Ack, epoch, status, left.segment_id, left.slot)
            frame = self._frames.get(key) or self._new_frame(
                key, Ack(epoch, version, status), {_LEFT: left.segment_id, _LEFT_SLOT: left.slot}
            )
            data = frame.encode(version)
        if self._sending or not self._channel.send_now(data):
            return False
        self._releases.clear()
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
                    self._take_left(message, ext)
                    return Received(message, [flat_view(buffer) for buffer in buffers], nbytes)
                received = self._slot_message(message, ext)
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
            buffers = [flat_view(buffer) for buffer in into(received.message, received.nbytes)]
            total = sum(buffer.nbytes for buffer in buffers)
            if total != received.nbytes:
                raise LocalProtocolError(f"lent {total} bytes for a payload of {received.nbytes}")
        except BaseException:
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

    def _locate(self, ext: Mapping[str, Any]) -> tuple[SegmentView, int, int]:
        segment_id, index, nbytes = ext.get("seg"), ext.get("slot"), ext.get("n")
        if not (
            type(segment_id) is int
            and type(index) is int
            and type(nbytes) is int
            and index >= 0 <= nbytes
        ):
            raise self._refuse(RemoteProtocolError("the peer's slot reference is malformed"))
        view = self._incoming.get(segment_id)
        if view is None or nbytes > view.slot_nbytes:
            raise self._refuse(_never_announced())
        if nbytes > self._channel.limits.max_payload_nbytes:
            raise self._refuse(FrameTooLarge(f"a payload of {nbytes} bytes is over the limit"))
        try:
            view.view(index)
        except RemoteProtocolError as exc:
            raise self._refuse(exc) from None
        serial = view.count(index)
        view.held.add((index, serial))
        return view, index, serial

    def _refuse(self, error: RemoteProtocolError) -> RemoteProtocolError:
        self._channel.fail(error)
        return error

    def _release(self, view: SegmentView, index: int, serial: int) -> None:
        if (index, serial) not in view.held:
            return
        view.held.discard((index, serial))
        view.forget_writes(index)
        if not self._channel.ended:
            self._queue_release(view.segment_id, index, serial, retained=False)
            if view.slot_nbytes > LAZY_NBYTES or len(self._releases) > 1:
                self._flush_soon()
            self._drop_old_segments()

    def _queue_release(self, segment_id: int, index: int, serial: int, *, retained: bool) -> None:
        if self._loop.is_closed():
            return  # a destructor after the end of the program: nobody is left to be told
        self._releases.append(Release(segment_id, index, serial, retained))

    def _encode(self, release: Release) -> bytes:
        key = (Release, release.segment_id, release.slot, release.retained)
        return (self._frames.get(key) or self._new_frame(key, release)).encode(release.serial)

    def _new_frame(
        self, key: Hashable, message: Message, ext: Mapping[str, int] | None = None
    ) -> CountedFrame:
        """Prepare a frame that is sent again and again."""
        if len(self._frames) >= _MAX_FRAMES:
            self._frames.clear()
        frame = counted_frame(message, ext=ext, limits=self._channel.limits)
        assert frame is not None
        self._frames[key] = frame
        return frame

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush_releases)

    def _flush_releases(self) -> None:
        self._flushing = False
        if self._releases and not self._channel.ended:
            self._channel.queue(b"".join(map(self._encode, self._releases)))
        self._releases.clear()

    def tell_retained(self, key: tuple[int, int]) -> None:
        """Tell the sender not to wait for a slot: something in this process still uses it."""
        view = self._incoming.get(key[0])
        if view is not None and not self._channel.ended:
            for index, serial in view.held:
                if index == key[1]:
                    self._queue_release(key[0], index, serial, retained=True)
                    self._flush_soon()

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the link and the mappings; waiters see ``TransportClosed``."""
        self.abort()

    def abort(self) -> None:
        """The same as :meth:`aclose`, from synchronous code."""
        if self._channel.closed:
            return
        pidfd = self._channel.pidfd
        self._flush_releases()
        self._arena.drop_holder(self, None if pidfd < 0 else pidfd, ended=False)
        self._channel.close()
        self._on_free()
        for view in self._incoming.values():
            view.close()
        self._incoming.clear()
        if self._own_arena:
            self._arena.close()

    def __repr__(self) -> str:
        return f"<SharedMemTransport to {self._channel.name}: {self._channel.describe()}>"


def _never_announced() -> RemoteProtocolError:
    return RemoteProtocolError("the peer named a slot that it never announced")


async def _copy(source: memoryview, target: memoryview) -> None:
    """Copy without holding the GIL, and let the loop run between two pieces."""
    for start in range(0, source.nbytes, _COPY_NBYTES):
        if start:
            await asyncio.sleep(0)
        piece = np.frombuffer(source[start : start + _COPY_NBYTES], np.uint8)
        np.copyto(np.frombuffer(target[start : start + piece.size], np.uint8), piece)
