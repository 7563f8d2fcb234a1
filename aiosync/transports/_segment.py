"""Anonymous shared memory in slots: the sender's writable side.

A segment is a memfd (on Linux; elsewhere a file that was unlinked when it was made), so that
nothing is left behind however a process ends. The sender maps it shared; receivers get a
read-only descriptor and map it privately: their side is in ``_segment_view``. Must not import
asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import Any

from aiosync.errors import ConfigError, TransportClosed
from aiosync.transports._anonymous import anonymous_file, take_pages
from aiosync.transports._fork import close_in_child
from aiosync.transports._page import EXCLUSIVE, MAX_SLOTS, SET_LOCK, UNLOCKED, fcntl, reopen

__all__ = ["HEADER", "HEADER_NBYTES", "MAX_SLOTS", "Arena", "Segment", "Slot"]

HEADER_NBYTES = 64
"""Bytes before the payload of a slot."""

HEADER = struct.Struct("<QQ16sQ24x")
"""Version, bytes of the payload, digest of the manifest, time in nanoseconds; the rest is 0."""

_UNUSED_SENDS = 100  # until the last slot is given back
_FIRST_FIT_SENDS = 32  # between two that take the first free slot: so the last become free

_segment_ids = itertools.count(1)


class Segment:
    """A growable run of equal slots that this process writes.

    Args:
        slot_nbytes: Bytes of one slot; rounded up to whole pages.

    Attributes:
        read_only_fd: A descriptor that peers may map but not write.

    Raises:
        ConfigError: The system has no memory for it, or the process no descriptor left.
    """

    def __init__(self, slot_nbytes: int) -> None:
        self.segment_id: int = next(_segment_ids)
        page = mmap.ALLOCATIONGRANULARITY
        self.slot_nbytes: int = -(-(slot_nbytes + HEADER_NBYTES) // page) * page
        try:
            self.fd: int = anonymous_file()
        except OSError as exc:
            raise ConfigError(f"cannot create shared memory: {exc}") from exc
        self.read_only_fd: int = -1
        try:  # now, as a link could not say that there is no descriptor left
            self.read_only_fd = _reopened(self.fd, os.O_RDONLY)
            # Locks belong to a description: one that no mapping and no peer keeps open.
            self.lock_fd: int = _reopened(self.fd, os.O_RDWR)
        except OSError as exc:
            for fd in {self.fd, self.read_only_fd} - {-1}:
                os.close(fd)
            raise ConfigError(
                f"cannot open a descriptor for readers of shared memory: {exc}"
            ) from exc
        self.slots: list[Slot] = []
        self.taken_nbytes: int = 0  # bytes of the file whose pages are there
        self._maps: list[mmap.mmap] = []

    def grow(self, arena: Arena) -> Slot:
        """Add one slot.

        Raises:
            ConfigError: The system has no memory left for it.
        """
        offset = len(self.slots) * self.slot_nbytes
        try:
            if self.taken_nbytes < offset + self.slot_nbytes:
                take_pages(self.fd, offset, self.slot_nbytes)
                self.taken_nbytes = offset + self.slot_nbytes
            mapping = mmap.mmap(self.fd, self.slot_nbytes, offset=offset)
        except OSError as exc:
            raise ConfigError(
                f"cannot allocate shared memory for another slot of {self.slot_nbytes} bytes: {exc}"
            ) from exc
        self._maps.append(mapping)
        slot = Slot(arena, self, len(self.slots), memoryview(mapping))
        self.slots.append(slot)
        return slot

    def shrink(self) -> None:
        """Give the memory of the last slot back, which is locked and needed by nobody."""
        slot = self.slots.pop()
        mapping = self._maps.pop()
        self.taken_nbytes = min(self.taken_nbytes, len(self.slots) * self.slot_nbytes)
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # a file system that keeps what it has
                mapping.madvise(mmap.MADV_REMOVE)
        slot.release()

    def reserve(self) -> Callable[[], None]:
        """What makes the next :meth:`grow` quick; to be called once, in any thread.

        Clearing the pages of a large slot takes longer than an event loop should stall.
        """
        return _Reservation(self)

    def close(self) -> None:
        """Close the descriptors; the memory goes when its last mapping does."""
        for fd in (self.fd, self.read_only_fd, self.lock_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.read_only_fd = self.lock_fd = -1
        for slot in self.slots:
            slot.view, slot.buffer = memoryview(b""), None
        self.slots.clear()
        while self._maps:
            with contextlib.suppress(BufferError):  # a tensor still views it: it goes with that
                self._maps.pop().close()


class Slot:
    """One place for a snapshot.

    Attributes:
        key: (segment id, slot index).
        view: Bytes for the payload, writable by this process while the slot is locked.
        buffer: What its owner made of the view, to make it once.
        in_use: A snapshot of the sender is in it. Set by whoever acquired it, last of all, so that
            an exception of a signal's handler leaves it free.
        namers: Links whose word names it, or may.
        locked: Nobody else may read it: it is being filled.
        used_at: When it was last acquired, in acquisitions of its arena.
    """

    def __init__(self, arena: Arena, segment: Segment, index: int, view: memoryview) -> None:
        self._arena = arena
        self.segment = segment
        self.index = index
        self.key: tuple[int, int] = (segment.segment_id, index)
        self.view: memoryview = view[HEADER_NBYTES:]
        self._header: memoryview = view[:HEADER_NBYTES]
        self.buffer: Any = None
        self.in_use: bool = False
        self.namers: set[object] = set()
        self.locked: bool = False
        self.used_at: int = 0

    def acquire(self) -> bool:
        """Take the slot to write to it, if nobody in this process or another one needs it."""
        if self.in_use or self.namers:
            return False
        try:
            fcntl.fcntl(self.segment.lock_fd, SET_LOCK, EXCLUSIVE[self.index])
        except BlockingIOError:
            return False
        self.locked = True
        HEADER.pack_into(self._header, 0, 0, 0, b"", 0)  # the page of an ended link may name it yet
        return True

    def seal(self, version: int, digest: bytes, nbytes: int) -> None:
        """Say what is in the slot, and let others read it. Does nothing the second time."""
        if self.locked:
            HEADER.pack_into(self._header, 0, version, nbytes, digest, time.time_ns())
            self.locked = False
            if self.segment.lock_fd >= 0:
                fcntl.fcntl(self.segment.lock_fd, SET_LOCK, UNLOCKED[self.index])

    def release(self) -> None:
        """The snapshot in it is not needed by the sender any more."""
        self.in_use = False
        if self.locked and self.segment.lock_fd >= 0:
            self.locked = False
            fcntl.fcntl(self.segment.lock_fd, SET_LOCK, UNLOCKED[self.index])
        if self._arena.retired:
            self._arena.reap()

    @property
    def is_needed(self) -> bool:
        """Whether the sender, or a link's word, still refers to the slot."""
        return bool(self.in_use or self.namers)


class Arena:
    """The slots of one sender: as many as its readers make necessary.

    Attributes:
        num_links: How many links read slots.
        retired: Segments that were replaced, and that something may still refer to.
    """

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.num_links: int = 0
        self._num_acquired = 0
        self._last_two: tuple[Slot | None, Slot | None] = (None, None)
        self.retired: list[Segment] = []
        self._closed = False
        close_in_child(self)

    def close_after_fork(self) -> None:
        """In a forked child: close its copies of the descriptors."""
        self.close()

    @property
    def num_slots(self) -> int:
        """Slots of the current segment."""
        return len(self.segment.slots) if self.segment else 0

    @property
    def num_left(self) -> int:
        """Slots of the current segment that only readers may still need."""
        return sum(not slot.is_needed for slot in self.segment.slots) if self.segment else 0

    def free_slot(self, nbytes: int) -> Slot | None:
        """Acquire a slot that no process reads, or ``None``. The caller says that it is in use."""
        if self._closed:
            raise TransportClosed("this scheme was closed")
        segment = self.segment
        if segment is None:
            return None
        if segment.slot_nbytes < nbytes + HEADER_NBYTES:
            self.retired.append(segment)
            self.segment = None
            self.reap()
            return None
        self._num_acquired += 1
        slots = segment.slots
        if self._last_two[0] in slots and self._num_acquired % _FIRST_FIT_SENDS:
            # Mostly free: who computed with it has gone on to the one that is named now.
            slots = [self._last_two[0], *slots]
        for slot in slots:
            if slot.acquire():
                slot.used_at = self._num_acquired
                if slot is not self._last_two[1]:
                    self._last_two = self._last_two[1], slot
                last = segment.slots[-1]
                if self._num_acquired - last.used_at > _UNUSED_SENDS and last.acquire():
                    segment.shrink()
                return slot
        return None

    def grow(self, nbytes: int) -> Slot:
        """Acquire a new slot. The caller says that it is in use.

        Raises:
            ConfigError: The system has no memory left for it; smaller ones may still be had.
        """
        segment = self._segment_for(nbytes)
        try:
            slot = segment.grow(self)
        except ConfigError:
            if not segment.slots:  # or every update to come would have to be as large
                self.segment = None
                segment.close()
            raise
        if not slot.acquire():
            raise ConfigError("a worker holds a slot of shared memory that it was never given")
        slot.used_at = self._num_acquired
        self._last_two = self._last_two[1], slot
        return slot

    def reserve(self, nbytes: int) -> Callable[[], None]:
        """What makes the next :meth:`grow` quick; to be called once, in any thread."""
        return self._segment_for(nbytes).reserve()

    def _segment_for(self, nbytes: int) -> Segment:
        segment = self.segment
        if segment is None or segment.slot_nbytes < nbytes + HEADER_NBYTES:
            if segment is not None:
                self.retired.append(segment)
            segment = self.segment = Segment(nbytes)
        return segment

    def reap(self) -> None:
        """Close what was replaced, once nothing refers to it. Readers keep what they mapped."""
        for segment in list(self.retired):
            if not any(slot.is_needed for slot in segment.slots):
                self.retired.remove(segment)
                segment.close()

    def close(self) -> None:
        """Close every segment. Readers keep what they mapped."""
        if self._closed:
            return
        self._closed = True
        for segment in [*self.retired, *([self.segment] if self.segment else [])]:
            segment.close()
        self.retired.clear()
        self.segment = None
        self._last_two = (None, None)


def _reopened(fd: int, flags: int) -> int:
    try:
        return reopen(fd, flags)
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return os.dup(fd)  # no /proc: the writable one; receivers map it privately


class _Reservation:
    """Takes the pages of a slot to come, whatever becomes of the segment, and of the call."""

    _fd = -1  # where there was no descriptor left: grow() meets that again, and says so

    def __init__(self, segment: Segment) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.dup(segment.fd)
        self._segment = segment
        self._offset = len(segment.slots) * segment.slot_nbytes

    def __call__(self) -> None:
        end = self._offset + self._segment.slot_nbytes
        try:
            with contextlib.suppress(OSError):  # of memory as of descriptors
                take_pages(self._fd, self._offset, self._segment.slot_nbytes)
                self._segment.taken_nbytes = max(self._segment.taken_nbytes, end)
        finally:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self._close()  # an executor may let go of a call that it never made
