"""Anonymous shared memory in slots, words and locks: what the sender has, and both sides agree on.

A segment is a memfd, so that nothing is left behind however a process ends. The sender maps it
shared; receivers get a read-only descriptor and map it privately: their side is in ``reader``. Each
link has a page of three words: ``want`` names the slot that the worker is to compute with, and only
the sender writes it; ``holds`` is the version that the worker computes with, and ``bell`` says that
somebody there waits: these only the worker writes. Nobody frees a slot: :meth:`Arena.take_slot`
takes one that no snapshot is in, no link's word names and no reader has locked. Must not import
asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiosync.errors import ConfigError, TransportClosed
from aiosync.transports._processes import close_in_child, has_ended

__all__ = [
    "BELL",
    "GONE",
    "HEADER",
    "HEADER_NBYTES",
    "HOLDS",
    "MAX_SLOTS",
    "PINNED",
    "SET_LOCK",
    "SHARED",
    "UNLOCKED",
    "WANT",
    "Arena",
    "Segment",
    "Slot",
    "make_page",
    "map_page",
    "reopen",
]

HEADER_NBYTES = 64
"""Bytes before the payload of a slot."""

HEADER = struct.Struct("<QQ16sQ24s")
"""Version, bytes of the payload, digest of the manifest, time in nanoseconds, trace and span.

Of a trace the lowest bit of the time says whether it is recorded; 0 for no trace.
"""

WANT, HOLDS, BELL = 0, 8, 16
"""Where the words of a page are, counted in words: each has a cache line of its own.

``WANT`` is a count, the last byte of a segment's id, and in the last byte the number of a slot;
0 for none yet. ``HOLDS`` is a version, ``BELL`` 0, 1 or :data:`GONE`.
"""

GONE = 2
"""In the word ``BELL``: the worker uses no slot any more, and will not again."""

MAX_SLOTS = 256
"""Slots of a segment, as a word names them."""

SET_LOCK: int = fcntl.F_OFD_SETLK
"""Command of ``fcntl()`` that takes one of the next at a slot's index; never waits.

These locks belong to open file descriptions.
"""

_pack = struct.Struct("hhqqi4x").pack
SHARED, _EXCLUSIVE, UNLOCKED = (
    tuple(_pack(kind, 0, index, 1, 0) for index in range(MAX_SLOTS))
    for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK)
)

PINNED, _UNPINNED, _PIN_EXCLUSIVE = (
    tuple(_pack(kind, 0, MAX_SLOTS + index, 1, 0) for index in range(MAX_SLOTS))
    for kind in (fcntl.F_RDLCK, fcntl.F_UNLCK, fcntl.F_WRLCK)
)
"""Locks of readers whose accelerator was told of the pages of a slot: these must stay."""

_PAGE_NBYTES = 4096
_FIRST_FIT_SENDS = 32
_UNUSED_SENDS = 50  # until the memory of a slot is given back, one at each send


def reopen(fd: int, flags: int) -> int:
    """Another open file description of the same file, to which locks belong.

    Raises:
        OSError: There is no ``/proc``, or no descriptor left.
    """
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _anonymous_file() -> int:
    """A file without a name. It can grow, but not shrink: no mapped page is taken away."""
    fd = os.memfd_create("aiosync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def map_page(fd: int) -> memoryview:
    """The words of a page, mapped as long as somebody has them.

    Raises:
        OSError: It cannot be mapped.
        ValueError: The file is too short.
    """
    return memoryview(mmap.mmap(fd, _PAGE_NBYTES)).cast("Q")


def make_page() -> tuple[memoryview, int]:
    """The words of a new page, and the descriptor of its file, which the caller closes.

    Raises:
        OSError: The system has no memory or descriptor left.
    """
    fd = _anonymous_file()
    try:
        os.ftruncate(fd, _PAGE_NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return map_page(fd), fd
    except BaseException:  # goes on to the caller
        os.close(fd)
        raise


class Segment:
    """A growable run of equal slots that this process writes.

    Args:
        segment_id: Names it to peers; its last byte is that of no other one in use.
        slot_nbytes: Bytes of one slot; rounded up to whole pages.

    Attributes:
        read_only_fd: A descriptor that peers may map but not write.
        lock_fd: Its description has the locks: no mapping and no peer keeps it open.

    Raises:
        ConfigError: The system has no memory for it, or the process no descriptor left.
    """

    def __init__(self, segment_id: int, slot_nbytes: int) -> None:
        self.segment_id: int = segment_id
        page = mmap.ALLOCATIONGRANULARITY
        self.slot_nbytes: int = -(-(slot_nbytes + HEADER_NBYTES) // page) * page
        self.slots: list[Slot] = []
        self._fd = -1
        self.read_only_fd: int = -1
        self.lock_fd: int = -1
        try:
            self._fd = _anonymous_file()
            self.read_only_fd = reopen(self._fd, os.O_RDONLY)
            self.lock_fd = reopen(self._fd, os.O_RDWR)
        except OSError as exc:
            self.close()
            raise ConfigError(f"no memory or no descriptor for shared memory: {exc}") from exc

    @property
    def taken(self) -> list[Slot]:
        """The slots that have memory."""
        return [slot for slot in self.slots if slot.has_memory]

    def grow(self) -> Slot:
        """Give one more slot memory, which is not said of it yet.

        Raises:
            ConfigError: The system has none left for it.
        """
        index, nbytes = len(self.slots), self.slot_nbytes
        index = next((slot.index for slot in self.slots if not slot.has_memory), index)
        try:
            os.posix_fallocate(self._fd, index * nbytes, nbytes)  # without, it would be a SIGBUS
            if index == len(self.slots):
                mapping = mmap.mmap(self._fd, nbytes, offset=index * nbytes)
                self.slots.append(Slot(self, index, mapping))
        except OSError as exc:
            raise ConfigError(
                f"cannot allocate shared memory for another slot of {nbytes} bytes: {exc}"
            ) from exc
        return self.slots[index]

    def shrink(self, slot: Slot) -> None:
        """Give the memory of a slot back, which is locked and needed by nobody.

        Not where a reader has told an accelerator of its pages: that would go on reading those.
        """
        try:
            fcntl.fcntl(self.lock_fd, SET_LOCK, _PIN_EXCLUSIVE[slot.index])
        except BlockingIOError:
            slot.release()
            return
        fcntl.fcntl(self.lock_fd, SET_LOCK, _UNPINNED[slot.index])
        slot.has_memory = False
        if slot.buffer is not None:  # an accelerator would go on writing to pages that are gone
            slot.buffer.unpin()
        with contextlib.suppress(OSError):  # a file system that keeps what it has
            slot.mapping.madvise(mmap.MADV_REMOVE)
        slot.release()
        while self.slots and not self.slots[-1].has_memory:
            self.slots.pop()  # and its mapping, with that its descriptor

    def close(self) -> None:
        """Close the descriptors; the memory goes when its last mapping does."""
        for fd in (self._fd, self.read_only_fd, self.lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self.read_only_fd = self.lock_fd = -1
        while self.slots:
            slot = self.slots.pop()
            slot.view, slot.buffer = memoryview(b""), None
            with contextlib.suppress(BufferError):  # a tensor still views it: it goes with that
                slot.mapping.close()


class Slot:
    """One place for a snapshot.

    Attributes:
        view: Bytes for the payload, writable by this process while the slot is locked.
        buffer: What its owner made of the view, to make it once.
        in_use: A snapshot of the sender is in it. Set by whoever acquired it, last of all, so that
            an exception of a signal's handler leaves it free.
        namers: Links whose word names it, or may.
        locked: Nobody else may read it: it is being filled.
        used_at: When it was last acquired, in acquisitions of its arena.
        has_memory: Its pages are there: nobody acquires it without. Said together with ``in_use``
            of a new one, as until then whoever had it made is on its way to it.
    """

    def __init__(self, segment: Segment, index: int, mapping: mmap.mmap) -> None:
        self.segment = segment
        self.index = index
        self.mapping = mapping
        self.view: memoryview = memoryview(mapping)[HEADER_NBYTES:]
        self.buffer: Any = None
        self.in_use: bool = False
        self.namers: set[object] = set()
        self.locked: bool = False
        self.used_at: int = 0
        self.has_memory: bool = False

    def lock(self) -> bool:
        """Keep others from reading it, if nobody does."""
        try:
            fcntl.fcntl(self.segment.lock_fd, SET_LOCK, _EXCLUSIVE[self.index])
        except BlockingIOError:
            return False
        self.locked = True
        # The page of an ended link may name it yet.
        HEADER.pack_into(self.mapping, 0, 0, 0, b"", 0, b"")
        return True

    def seal(self, version: int, digest: bytes, nbytes: int, trace: str | None = None) -> None:
        """Say what is in the slot, and let others read it. Does nothing the second time."""
        if self.locked and self.segment.lock_fd >= 0:
            now, ids = time.time_ns(), b""
            if trace is not None:
                now = now & ~1 | int(trace[-1], 16) & 1
                ids = bytes.fromhex(trace[3:35] + trace[36:52])
            HEADER.pack_into(self.mapping, 0, version, nbytes, digest, now, ids)
            self.locked = False
            fcntl.fcntl(self.segment.lock_fd, SET_LOCK, UNLOCKED[self.index])

    def release(self) -> None:
        """The snapshot in it is not needed by the sender any more."""
        self.in_use = False
        if self.locked:
            self.locked = False
            if self.segment.lock_fd >= 0:
                fcntl.fcntl(self.segment.lock_fd, SET_LOCK, UNLOCKED[self.index])

    @property
    def version(self) -> int:
        """What is in it; 0 for nothing."""
        return int(HEADER.unpack_from(self.mapping, 0)[0])

    @property
    def is_needed(self) -> bool:
        """Whether the sender, or a link's word, still refers to the slot."""
        return bool(self.in_use or self.namers)


@dataclass(frozen=True, slots=True, eq=False)
class Abandoned:
    """Slots of a link that ended without a farewell: its process may compute with them yet.

    Its locks say nothing: foreign code may have closed the descriptors there.

    Args:
        slots: Those.
        words: Of the page of the link.
        pidfd: Of the process; owned from now on.
    """

    slots: frozenset[Slot]
    words: memoryview
    pidfd: int

    def is_over(self) -> bool:
        """Whether the process uses them no more."""
        return self.words[BELL] == GONE or has_ended(self.pidfd)

    def release(self) -> None:
        """Let them be written to."""
        os.close(self.pidfd)
        for slot in self.slots:
            slot.namers.discard(self)


class Arena:
    """The slots of one sender: as many as its readers make necessary.

    Attributes:
        segment: Where the next slots are; ``None`` before the first.
        num_links: How many links read slots.
    """

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.num_links: int = 0
        self._retired: list[Segment] = []  # were replaced; something may still refer to them
        self._abandoned: list[Abandoned] = []
        self._segment_ids = itertools.count(1)
        self._num_acquired = self._last = self._before_last = 0
        self._closed = False
        close_in_child(self)

    def close_after_fork(self) -> None:
        """In a forked child: close its copies of the descriptors."""
        self.close()

    @property
    def num_slots(self) -> int:
        """Slots of the current segment."""
        return len(self.segment.taken) if self.segment else 0

    def take_slot(self, nbytes: int, *, growing: bool = False) -> Slot | None:
        """Acquire a slot that no process reads, or ``None``. The caller says that it is in use.

        Args:
            nbytes: Of the payload.
            growing: Another thread is in :meth:`grow`.
        """
        if self._closed:
            raise TransportClosed("this scheme was closed")
        if self._abandoned:
            self._look_at_abandoned()
        if self._retired:
            for retired in [*self._retired]:
                if not any(slot.is_needed for slot in retired.slots):
                    self._retired.remove(retired)
                    retired.close()
        segment = self.segment
        if segment is None or segment.slot_nbytes < nbytes + HEADER_NBYTES:
            return None
        self._num_acquired = now = self._num_acquired + 1
        # The last but one: to ask for one that a worker reads costs a call of the kernel. Now and
        # then the first: what only slow workers made necessary comes to be unused.
        slots = segment.slots
        if now % _FIRST_FIT_SENDS and self._before_last < len(slots):
            slots = [slots[self._before_last], *slots]
        for slot in slots:
            if slot.has_memory and not (slot.in_use or slot.namers) and slot.lock():
                if slot.index != self._last:
                    self._before_last, self._last = self._last, slot.index
                slot.used_at = now
                break
        else:
            return None
        old = segment.slots[now % len(segment.slots)]  # each comes to its turn
        unused = old.used_at < now - _UNUSED_SENDS and old.has_memory and not old.is_needed
        if unused and not growing and old.lock():
            segment.shrink(old)
        return slot

    def grow(self, nbytes: int) -> Slot:
        """Acquire a new slot, in any thread, one call at a time. The caller says that it is in use.

        Clearing the pages of a large one takes longer than an event loop should stall.

        Raises:
            ConfigError: The system has no memory left for it; smaller ones may still be had.
        """
        segment = self.segment
        if segment is None or segment.slot_nbytes < nbytes + HEADER_NBYTES:
            larger = Segment(next(self._segment_ids), nbytes)
            try:
                slot = larger.grow()
            except ConfigError:
                larger.close()
                raise
            self._retired += [] if segment is None else [segment]
            self.segment = larger
        else:
            slot = segment.grow()
        if not slot.lock():
            raise ConfigError("a worker holds a slot of shared memory that it was never given")
        slot.used_at = self._num_acquired
        return slot

    def abandon(self, named: Iterable[Slot], version: int, words: memoryview, pidfd: int) -> None:
        """Keep what a process may compute with yet, though its link has ended, until it is dead.

        Args:
            named: The slots that its word may name.
            version: What it has.
            words: Of the page of the link.
            pidfd: Of the process; owned from now on.
        """
        has = (each for segment in self._segments for each in segment.taken)
        held = [each for each in has if version and each.version == version]
        abandoned = Abandoned(frozenset((*named, *held)), words, pidfd)
        for slot in abandoned.slots:
            slot.namers.add(abandoned)
        self._abandoned.append(abandoned)
        self._look_at_abandoned()

    def _look_at_abandoned(self) -> None:
        for each in [*self._abandoned]:
            if self._closed or each.is_over():
                self._abandoned.remove(each)
                each.release()

    @property
    def _segments(self) -> list[Segment]:
        return [*self._retired, *([self.segment] if self.segment else [])]

    def close(self) -> None:
        """Close every segment. Readers keep what they mapped."""
        self._closed = True
        while self._abandoned:
            self._abandoned.pop().release()
        for segment in self._segments:
            segment.close()
        self._retired.clear()
        self.segment = None
