"""The sending side of shared memory: which slots a peer was told to read, and which it left.

Messages about slots travel over the framed channel; the slots belong to an arena that links may
share. Must not import asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from aiosync.errors import LocalProtocolError
from aiosync.transports._channel import FramedChannel
from aiosync.transports._io import SocketIo
from aiosync.transports._segment import Arena, Slot
from aiosync.wire import (
    Ack,
    CountedFrame,
    Message,
    Release,
    Segment,
    Update,
    counted_frame,
    encode_frame,
)

__all__ = ["LAST", "LEFT", "LEFT_SLOT", "FrameCache", "SlotPublisher"]

LEFT, LEFT_SLOT = "left", "left-slot"
"""Entries of an acknowledgement's extension map: segment and slot that its sender left."""

LAST = "last"
"""Entry of a release's extension map: the reader closes the link and reads nothing any more."""

_MAX_FRAMES = 64
_NEVER = (0, 0)


class FrameCache:
    """Frames that one link sends again and again, with another counter each time."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames: dict[Hashable, CountedFrame] = {}

    def get(self, key: Hashable) -> CountedFrame | None:
        """What :meth:`make` made for ``key``."""
        return self._frames.get(key)

    def make(
        self, key: Hashable, message: Message, ext: Mapping[str, int] | None = None
    ) -> CountedFrame:
        """Prepare a message of which only the counter changes."""
        if len(self._frames) >= _MAX_FRAMES:
            self._frames.clear()
        frame = counted_frame(message, ext=ext)
        assert frame is not None
        self._frames[key] = frame
        return frame


class SlotPublisher:
    """Tells one peer to read slots of an arena, and hears when it left them.

    Args:
        holder: Stands for the peer in :attr:`Slot.holders`.
        channel: Where messages go.
        io: Carries the segment's descriptor to the peer.
        arena: Owner of the slots.
        frames: Of this link.
        on_free: Called when the peer gave something back without leaving it.
    """

    def __init__(
        self,
        holder: Hashable,
        channel: FramedChannel,
        io: SocketIo,
        arena: Arena,
        frames: FrameCache,
        on_free: Callable[[], None],
    ) -> None:
        self._holder = holder
        self._channel = channel
        self._io = io
        self._arena = arena
        self._frames = frames
        self._on_free = on_free
        self._announced: set[int] = set()
        # How often each slot was published on this link, and last with which version.
        self._published: dict[tuple[int, int], tuple[int, int]] = {}
        # What the peer says as it leaves: the slots that it goes on using, and that this is all.
        self._kept: set[tuple[int, int]] = set()
        self._left_the_rest = False

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
        taken = False
        try:
            taken = self._channel.send_now(frame)
        finally:
            if not taken:  # also where the link has ended: nobody would give it back
                self._unlend(slot)
        return taken

    def _lend(self, slot: Slot, version: int) -> None:
        # Both ends count how often a slot was published on this link; a release says which.
        slot.holders[self._holder] = False
        count, _ = self._published.get(slot.key, _NEVER)
        self._published[slot.key] = count + 1, version

    def _unlend(self, slot: Slot) -> None:
        count, version = self._published[slot.key]
        self._published[slot.key] = count - 1, version
        slot.leave(self._holder)

    async def publish(
        self, message: Message, slot: Slot, nbytes: int, *, timeout: float | None = None
    ) -> None:
        """Tell the peer to read ``nbytes`` of ``slot``; otherwise as ``Transport.send()``."""
        frame = self._slot_frame(message, slot, nbytes)
        if not self._announce_nowait(slot):
            self._io.attach(slot.segment.read_only_fd)
            await self._channel.send(self._segment_frame(slot), [], timeout)
            self._announced.add(slot.segment.segment_id)
        self._channel.check()  # nobody gives back what is lent to a link that has ended
        self._lend(slot, getattr(message, "version", 0))
        try:
            await self._channel.send(frame, [], timeout)
        except BaseException:  # goes on to the caller
            if self._channel.error is None:
                self._unlend(slot)
            raise

    def _slot_frame(self, message: Message, slot: Slot, nbytes: int) -> bytes:
        limits = self._channel.limits
        if nbytes > limits.max_payload_nbytes:
            raise LocalProtocolError(
                f"a payload of {nbytes} bytes is over the limit of "
                f"{limits.max_payload_nbytes} (Limits.max_payload_nbytes)"
            )
        ext = {"seg": slot.segment.segment_id, "slot": slot.index, "n": nbytes}
        if type(message) is Update and message.is_plain:
            key = (Update, message.digest, slot.key, nbytes, message.epoch)
            self._frames.make(key, message, ext)
        return encode_frame(message, 0, ext=ext, limits=limits)

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

    # -- what the peer says --------------------------------------------------------------------

    def on_release(self, key: tuple[int, int], retained: bool, serial: int) -> None:
        """The peer left a slot, or said that something in its process goes on using it."""
        if self._published.get(key, _NEVER)[0] != serial:
            return  # of an earlier publication
        slot = self._arena.find(*key)
        if slot is not None and self._holder in slot.holders:
            if retained:
                slot.holders[self._holder] = True
                slot.arena.notify(slot)
                self._on_free()
            else:
                slot.leave(self._holder)

    def on_last(self, release: Release) -> None:
        """The peer closes the link, and goes on using this slot; or none that it did not name."""
        if release.retained:
            self._kept.add((release.segment_id, release.slot))
        else:
            self._left_the_rest = True

    def end(self) -> None:
        """The link is closed: have the arena take back what the peer has left, now or later."""
        if not self._arena.held_by(self._holder):
            return
        if not self._left_the_rest:  # a write may have failed before all was read
            for message, ext in self._channel.last_words():
                if isinstance(message, Release) and ext and ext.get(LAST) is True:
                    self.on_last(message)
        kept = self._kept if self._left_the_rest else None
        self._arena.drop_holder(self._holder, self._channel.take_pidfd, kept=kept)

    def on_left(self, key: tuple[int, int], version: int) -> None:
        """With its word on ``version`` the peer said that it left a slot of an older one."""
        count, published = self._published.get(key, _NEVER)
        if published < version:
            self.on_release(key, False, count)

    def take_left(self, message: Message, ext: Mapping[str, Any] | None) -> tuple[int, int] | None:
        """The slot that an acknowledgement says its sender left, besides what it says itself."""
        if not ext or not isinstance(message, Ack):
            return None
        segment_id, index = ext.get(LEFT), ext.get(LEFT_SLOT)
        if type(segment_id) is not int or type(index) is not int:
            return None
        self.on_left((segment_id, index), message.version)
        return segment_id, index
