"""The sending side of shared memory: it names slots to one peer by the link's word.

Must not import asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Protocol

from aiosync.errors import TransportBroken, TransportClosed
from aiosync.transports.shared_memory.slots import (
    BELL,
    GONE,
    HOLDS,
    WANT,
    Arena,
    Slot,
    make_page,
)
from aiosync.wire import DeviceSlot, Message, PageMessage, Segment

__all__ = ["SlotPublisher"]


class PublishingLink(Protocol):
    """A link as its publisher sees it."""

    name: str
    pidfd: int

    def check(self) -> None:
        """Raise the error that ended the link, if it has ended."""


class SlotPublisher:
    """The sending side of a link: it names slots of an arena to one peer.

    Args:
        link: The link for messages to the peer.
        attach: Sends a copy of a descriptor beside the next bytes on the link; ``None`` sends none.
        arena: Owner of the slots.

    Attributes:
        announced: The segments, and the places of slots in device memory, that the peer can read.
        promised: Digest of the manifest whose versions the peer promised to take without a message
            about each one; ``None`` while it promises nothing.
        version: Version that the word names; 0 for none.
    """

    def __init__(
        self, link: PublishingLink, attach: Callable[[int | None], None], arena: Arena
    ) -> None:
        self.announced: set[int | tuple[int, int]] = set()
        self.promised: bytes | None = None
        self.version: int = 0
        # The link; None once it has ended.
        self._link: PublishingLink | None = link
        self._attach = attach
        self._arena = arena
        self._words: memoryview | None = None
        # The descriptor of the page until it was sent, then -1.
        self._page_fd = -1
        # The slots that the word may name, the newest last.
        self._slots: tuple[Slot, ...] = ()
        # The number of words stored so far; the version of ``holds`` once the link has ended.
        self._count = self._held = 0
        arena.num_links += 1

    def announcements(self, slot: Slot) -> Generator[tuple[Message, tuple[()]]]:
        """Return the messages that the peer needs to read a slot, each with a descriptor attached.

        The caller asks for the next message once it has sent the last one. It closes the generator
        if a send fails.

        Raises:
            TransportClosed: The link has ended.
            TransportBroken: There is no memory or descriptor left for a page.
        """
        if slot.place in self.announced:
            return
        segment, device = slot.segment, slot.device
        link = self._link
        if link is None:
            raise TransportClosed("the link has ended")
        link.check()
        if self._words is None:
            self._make_page(link.name)
        try:
            if self._page_fd >= 0:
                self._attach(self._page_fd)
                yield PageMessage(), ()
                self._close_page_fd()
            if segment.segment_id not in self.announced:
                self._attach(segment.read_only_fd)
                about = segment.segment_id, segment.slot_nbytes, 1, device is not None
                yield Segment(*about), ()
                self.announced.add(segment.segment_id)
            if device is not None:
                of, nbytes = device.driver, device.nbytes
                self._attach(device.fd)
                yield DeviceSlot(segment.segment_id, slot.index, of.kind, of.uuid, nbytes), ()
                self.announced.add(slot.place)
        finally:
            self._attach(None)

    def _make_page(self, name: str) -> None:
        """Make the page of this link, on which words name slots."""
        try:
            self._words, self._page_fd = make_page()
        except OSError as exc:
            raise TransportBroken(f"no page of shared memory for {name}: {exc.strerror}") from exc

    def _close_page_fd(self) -> None:
        # The descriptor is -1 if the link ended right after it took the message.
        if self._page_fd >= 0:
            os.close(self._page_fd)
            self._page_fd = -1

    def store(self, slot: Slot, version: int) -> bool:
        """Name a slot to the peer, whose next read then uses it; return False if it reads no more.

        Args:
            slot: A sealed slot of a segment that was announced to the peer.
            version: The version in the slot.
        """
        words = self._words
        if words is None:
            return False
        # The word names this version already.
        if self._slots and slot is self._slots[-1] and version == self.version:
            return words[BELL] < GONE
        # An exception of a signal's handler may end this between any two steps. In this order, the
        # slot that the word names is in ``_slots``, and this object in its ``namers``, at any time.
        old, self._slots = self._slots, (*self._slots, slot)
        slot.namers.add(self)
        self._count += 1
        self.version = version
        # The count makes each word of a link different, and greater than the last one.
        words[WANT] = self._count << 16 | slot.address
        for each in old:
            if each is not slot:
                each.namers.discard(self)
        self._slots = (slot,)
        # This check comes after the word, as the peer says that it leaves before it looks at the
        # word for the last time.
        return words[BELL] < GONE

    def overtaken(self) -> None:
        """Free the named slots in device memory: the worker has a newer version, from a message.

        It has taken or refused the version that its word names. Device memory has only two slots,
        and a slot that is named is not free.
        """
        for slot in self._slots:
            if slot.device is not None:
                slot.namers.discard(self)
        self._slots = tuple(slot for slot in self._slots if slot.device is None)

    @property
    def holds(self) -> int:
        """Version that the peer computes with, of those that the word named; 0 for none.

        Once the link has ended, this is the last such version.
        """
        # The peer writes the word, so a version that was never named does not count.
        words = self._words
        return self._held if words is None else min(words[HOLDS], self.version)

    def forget(self) -> None:
        """Store the next word even for the same version: the peer says that it holds none.

        It may have closed segments in which it held nothing, so all are announced again.
        """
        self.version = 0
        self.announced.clear()
        if self._words is not None:
            # A peer that refuses that version leaves the word as it is.
            self._words[HOLDS] = 0

    @property
    def leaves(self) -> bool:
        """True if the peer takes no version any more."""
        return self._words is None or self._words[BELL] >= GONE

    @property
    def bell(self) -> bool:
        """True if the peer asks for a message about each new word."""
        return self._words is not None and self._words[BELL] == 1

    def end(self) -> None:
        """Withdraw the link's slots once the link has ended. Idempotent.

        If the peer's process may still compute with them, the arena keeps them until it has ended.
        """
        link, words, named = self._link, self._words, self._slots
        if link is None:
            return
        self._held = self.holds
        self._link = self._words = self.promised = None
        self._close_page_fd()
        if words is not None and link.pidfd >= 0:
            pidfd, link.pidfd = link.pidfd, -1
            self._arena.abandon(named, self._held, words, pidfd)
        for slot in named:
            slot.namers.discard(self)
        self._slots = ()
        self._arena.num_links -= 1
