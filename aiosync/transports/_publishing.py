"""The sending side of shared memory: which slot the word of one link names, and for whom it counts.

Descriptors travel over the framed channel; the slots belong to an arena that links share. Must not
import asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

import os

from aiosync.errors import TransportBroken, TransportClosed
from aiosync.transports._io import DescriptorStream
from aiosync.transports._page import BELL, HOLDS, WANT, Page
from aiosync.transports._segment import Arena, Slot
from aiosync.transports.stream import FramedTransport
from aiosync.wire import Message, PageMessage, Segment

__all__ = ["SlotPublisher"]


class SlotPublisher:
    """Names slots of an arena to one peer.

    Args:
        channel: Where messages go.
        io: Carries descriptors to the peer.
        arena: Owner of the slots.

    Attributes:
        announced: Ids of the segments that the peer can read.
        promised: Digest of the manifest whose versions the peer promised to take without being
            told; ``None`` while it promises nothing.
        version: Version that the word names; 0 for none.
    """

    def __init__(self, channel: FramedTransport, io: DescriptorStream, arena: Arena) -> None:
        self._channel: FramedTransport | None = channel
        self._io = io
        self._page: Page | None = None
        self._page_fd = -1  # until it was sent
        self.announced: set[int] = set()
        self._slots: tuple[Slot, ...] = ()  # those that the word may name, the newest last
        self._count = self._held = 0
        self._arena = arena
        self._ended = False
        self.promised: bytes | None = None
        self.version: int = 0
        arena.num_links += 1

    def announce_nowait(self, slot: Slot) -> bool:
        """Give the peer the descriptors that it needs to read a slot; False if not all were sent.

        Raises:
            TransportBroken: There is no memory or descriptor left for a page.
        """
        if slot.segment.segment_id in self.announced:
            return True
        channel = self._open_channel()
        for fd, message in self._missing(slot, channel):
            self._io.attach(fd)
            if not channel.send_nowait(message):
                self._io.attach(None)
                return False
            self._sent(message)
        return True

    async def announce(self, slot: Slot) -> None:
        """The same, waiting for the link."""
        channel = self._open_channel()
        for fd, message in self._missing(slot, channel):
            self._io.attach(fd)
            await channel.send(message)
            self._sent(message)

    def _open_channel(self) -> FramedTransport:
        if self._channel is None:
            raise TransportClosed("this end of a link was closed")
        self._channel.check()
        return self._channel

    def _missing(self, slot: Slot, channel: FramedTransport) -> list[tuple[int, Message]]:
        messages: list[tuple[int, Message]] = []
        if slot.segment.segment_id in self.announced:
            return messages
        if self._page is None:
            try:
                self._page, self._page_fd = Page.make()
            except OSError as exc:
                raise TransportBroken(
                    f"no page of shared memory for {channel.name}: {exc.strerror}"
                ) from exc
        if self._page_fd >= 0:
            messages.append((self._page_fd, PageMessage()))
        segment = slot.segment
        return [
            *messages,
            (segment.read_only_fd, Segment(segment.segment_id, segment.slot_nbytes, 1)),
        ]

    def _sent(self, message: Message) -> None:
        if isinstance(message, Segment):
            self.announced.add(message.segment_id)
        else:
            self._close_page_fd()

    def _close_page_fd(self) -> None:
        if self._page_fd >= 0:  # else the link ended right after it took the message
            os.close(self._page_fd)
            self._page_fd = -1

    def store(self, slot: Slot, version: int) -> None:
        """Have the peer's next read use a slot, which is sealed and which it can read."""
        if self._ended or (self._slots and slot is self._slots[-1] and version == self.version):
            return
        assert self._page is not None
        # An exception of a signal's handler may end this between any two steps: the slot that the
        # word names is never taken for one that it does not.
        old, self._slots = self._slots, (*self._slots, slot)
        slot.namers.add(self)
        self._count += 1
        self.version = version
        segment_id, index = slot.key
        # Never the same twice on a link, and each greater than the last.
        self._page.words[WANT] = self._count << 16 | (segment_id & 255) << 8 | index
        for each in old:
            if each is not slot:
                each.namers.discard(self)
        self._slots = (slot,)
        if self._arena.retired:
            self._arena.reap()

    @property
    def holds(self) -> int:
        """Version that the peer computes with, of those that a word named; 0 for none."""
        return self._held if self._page is None else min(self._page.words[HOLDS], self.version)

    @property
    def bell(self) -> bool:
        """Whether the peer wants to be told of each new word."""
        return self._page is not None and self._page.words[BELL] != 0

    def end(self) -> None:
        """The link has ended: its word names nothing any more. Idempotent."""
        if self._ended:
            return
        self._ended, self._channel = True, None  # which knows this object
        self.promised = None
        page, self._page = self._page, None
        if page is not None:
            self._held = min(page.words[HOLDS], self.version)
            page.close()
        self._arena.num_links -= 1
        self._close_page_fd()
        for slot in self._slots:
            slot.namers.discard(self)
        self._slots = ()
        self._arena.reap()
