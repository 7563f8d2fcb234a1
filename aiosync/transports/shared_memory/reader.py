"""The receiving side of shared memory: the slot that this link's word names, read in place.

A segment is mapped privately from a read-only descriptor: what a receiver writes stays its own, and
is dropped before it reads another version there. Slots are locked through another description,
which nobody else has and nothing maps: with the process its locks go. Used by the thread that
applies an update, whichever that is: one at a time. Must not import asyncio, torch or anything
above ``transports``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from aiosync.errors import ApplyError, RemoteProtocolError, TransportBroken
from aiosync.transports._processes import FORKING, close_in_child, keep_across_fork
from aiosync.transports.shared_memory.slots import (
    BELL,
    GONE,
    HEADER,
    HEADER_NBYTES,
    HOLDS,
    PINNED,
    SET_LOCK,
    SHARED,
    UNLOCKED,
    WANT,
    map_page,
    reopen,
)
from aiosync.wire import PageMessage, Segment, is_traceparent

__all__ = ["NamedSlot", "SlotReader"]

_MAX_SEGMENTS = 64  # a descriptor or two each, while something in this process uses one
_QUICK_TRIES = 100
_PAUSE_SECONDS = 0.001
_PATIENCE_SECONDS = 5.0
_CLOSED = (
    "other code of this process has closed a descriptor of aiosync's shared memory (a double "
    "close, os.closerange()): no update can be read over this link"
)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)


class _SegmentView:
    """A private mapping of a peer's segment. Owns the descriptor.

    Raises:
        OSError: There is no ``/proc``, or no descriptor left.
    """

    def __init__(self, fd: int, segment_id: int, slot_nbytes: int) -> None:
        self.segment_id = segment_id
        self.locked: set[int] = set()  # maybe more than are locked, never fewer
        self._slot_nbytes = slot_nbytes
        self._fd = fd
        self._file = _file_of(fd)
        self._lock_fd = reopen(fd, os.O_RDONLY)
        self.maps: dict[int, tuple[mmap.mmap, memoryview]] = {}

    def map(self, index: int) -> tuple[mmap.mmap, memoryview]:
        """One slot with its header; writes stay private to this process.

        Raises:
            RemoteProtocolError: The segment has no such slot.
            TransportBroken: Foreign code has closed the descriptor.
            OSError: There is no room for the mapping.
        """
        known = self.maps.get(index)
        if known is None:
            nbytes, offset = self._slot_nbytes, index * self._slot_nbytes
            fd = self._source()
            if os.fstat(fd).st_size < offset + nbytes:
                raise RemoteProtocolError(f"the peer's segment has no slot {index}")
            access = mmap.PROT_READ | mmap.PROT_WRITE
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, access, offset=offset)
            known = self.maps[index] = mapping, memoryview(mapping)
        return known

    def share(self, index: int) -> memoryview:
        """One slot, which is locked, with its header as the sender sees it; read-only.

        The sender takes no page of it away as long as this view is open, so that an accelerator
        may be told of them.

        Raises:
            TransportBroken: The view was closed, or foreign code has closed the descriptor.
            OSError: There is no room for the mapping.
        """
        fd = self._source()
        fcntl.fcntl(self._lock_fd, SET_LOCK, PINNED[index])
        nbytes, offset = self._slot_nbytes, index * self._slot_nbytes
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
        return memoryview(mapping)

    def lock(self, index: int) -> bool:
        """Keep the sender from writing to a slot; False if it is at that."""
        self.locked.add(index)  # first: an interrupt may come in between, so none is taken for done
        try:
            fcntl.fcntl(self._lock_fd, SET_LOCK, SHARED[index])
        except BlockingIOError:
            self.locked.discard(index)
            return False
        except (OSError, ValueError):
            self.check_locked(index)
            raise
        return True

    def check_locked(self, index: int) -> None:
        """Raise unless what :meth:`lock` locked is the segment.

        Raises:
            TransportBroken: Foreign code has closed the descriptor, and with it gave back every
                lock; another file may have its number.
        """
        if _file_of(self._lock_fd) == self._file:
            return
        with contextlib.suppress(OSError, ValueError):  # of the other file
            fcntl.fcntl(self._lock_fd, SET_LOCK, UNLOCKED[index])
        self._lock_fd = -1
        for each in self.locked:
            self.keep(each)  # the sender may write there
        raise TransportBroken(_CLOSED)

    def _source(self) -> int:
        """What to map."""
        if _file_of(self._fd) != self._file:
            raise TransportBroken(_CLOSED)
        return self._fd

    def unlock(self, index: int) -> None:
        """Let the sender write to a slot. Idempotent."""
        if index in self.locked and self._lock_fd >= 0:
            fcntl.fcntl(self._lock_fd, SET_LOCK, UNLOCKED[index])
        self.locked.discard(index)

    def keep(self, index: int) -> None:
        """Give a slot memory of this process, at the address it has: what views it stays as it is.

        The kernel copies, without the GIL; before Linux 5.14 this process does.
        """
        known = self.maps.get(index)
        if known is None:  # a fork came between locking it and mapping it
            return
        array = np.frombuffer(known[1], np.uint8)
        if _madvise is not None:
            size = ctypes.c_size_t(array.nbytes)
            if _madvise(ctypes.c_void_p(array.ctypes.data), size, _POPULATE_WRITE) == 0:
                return
        pages = array[:: mmap.PAGESIZE]
        pages[:] = pages.copy()  # writing to a page of a private mapping copies it

    def close(self) -> None:
        """Close the descriptors, and with them give every lock back; views keep what they see."""
        for fd in (self._fd, self._lock_fd):
            if _file_of(fd) == self._file:  # else another file has that number
                os.close(fd)
        self._fd = self._lock_fd = -1
        self.locked.clear()
        self.maps.clear()


@dataclass(frozen=True, slots=True, eq=False)
class NamedSlot:
    """A slot that a word named, locked.

    Attributes:
        want: The word.
        version: What is in it.
        digest: Of the manifest of that.
        nbytes: Of the payload.
        sent_at: When it was named, in nanoseconds since the Unix epoch.
        ids: Of the sender's trace and span; 0 for none.
        memory: What the payload is the beginning of.
        key: Names the mapping that this lies in.
    """

    want: int
    version: int
    digest: bytes
    nbytes: int
    sent_at: int
    ids: bytes
    memory: memoryview
    key: tuple[int, int, int]
    view: _SegmentView
    index: int

    def share(self) -> memoryview:
        """The same memory, read-only, for an accelerator to read directly.

        Raises:
            OSError: It cannot be mapped.
        """
        return self.view.share(self.index)[HEADER_NBYTES:]

    @property
    def trace(self) -> str | None:
        """The traceparent of the sender's span, if it has one."""
        trace = f"00-{self.ids[:16].hex()}-{self.ids[16:].hex()}-{self.sent_at & 1:02x}"
        return trace if is_traceparent(trace) else None


class SlotReader:
    """The segments and the page that one peer announced.

    Args:
        descriptors: Those of the peer, in the order of its messages.

    Attributes:
        words: The words of the page, the first of which names a slot; ``None`` before it came.
        segments: Those that the peer announced and that are in use, by the last byte of their id.
        outlives_link: Whoever reads here closes it, and not the link.
    """

    def __init__(self, descriptors: deque[int]) -> None:
        self.words: memoryview | None = None
        self.outlives_link: bool = False
        self._descriptors = descriptors
        self.segments: dict[int, _SegmentView] = {}
        self._held: NamedSlot | None = None
        self._seen = 0  # the word that was dealt with
        self._closed = False
        keep_across_fork(self)
        close_in_child(self)

    def before_fork(self) -> None:
        """Copy what this side reads: it will leave it, but a child would go on reading it.

        Another thread may apply updates: :data:`FORKING` keeps it from doing so before the fork.
        """
        for view in list(self.segments.values()):
            for index in list(view.locked):
                view.keep(index)

    def close_after_fork(self) -> None:
        """In a forked child: close its copies of the descriptors, and read no words."""
        self.words = None
        for view in self.segments.values():
            view.close()
        self.segments.clear()

    def announce(self, message: Segment | PageMessage) -> None:
        """Take over the descriptor of a new segment, or of the page.

        Raises:
            RemoteProtocolError: There came none, or too many are in use.
            TransportBroken: It cannot be mapped: no room, no descriptor, or no ``/proc``.
        """
        if not self._descriptors:
            raise RemoteProtocolError("the peer announced shared memory without its descriptor")
        fd = self._descriptors.popleft()
        try:
            if self._closed:  # nobody reads here any more
                return
            if isinstance(message, PageMessage):
                if self.words is not None:
                    raise RemoteProtocolError("the peer announced a second page")
                self.words = map_page(fd)
            elif message.segment_id & 255 in self.segments:
                raise RemoteProtocolError("the peer announced a segment twice")
            else:
                view = _SegmentView(fd, message.segment_id, message.slot_nbytes)
                self.segments[message.segment_id & 255] = view
                fd = -1
        except (OSError, ValueError) as exc:
            raise TransportBroken(f"shared memory cannot be mapped here: {exc}") from exc
        finally:
            if fd >= 0:
                os.close(fd)
        self._drop_old_segments()

    def _drop_old_segments(self) -> None:
        with FORKING:  # or another thread is about to lock a slot of one
            for key, view in list(self.segments.items())[:-1]:
                if not view.locked:
                    del self.segments[key]
                    view.close()
        if len(self.segments) > _MAX_SEGMENTS:
            raise RemoteProtocolError("the peer announced too many segments")

    @property
    def is_behind(self) -> bool:
        """Whether the word names something that was not dealt with yet."""
        return self.words is not None and self.words[WANT] != self._seen

    @property
    def named(self) -> tuple[int, bytes]:
        """Version and manifest's digest of what the word names, if it was not dealt with yet.

        Else version 0. Nothing is locked.
        """
        words = self.words
        want = self._seen if words is None else words[WANT]
        view = None if words is None or want == self._seen else self.segments.get(want >> 8 & 255)
        if words is None or view is None:
            return 0, b""
        try:
            version, _, digest, _, _ = HEADER.unpack_from(view.map(want & 255)[1], 0)
        except (OSError, RemoteProtocolError):
            return 0, b""
        return version if words[WANT] == want else 0, digest  # else it may be that of another one

    def ring_me(self, wanted: bool) -> None:
        """Have the sender tell of each new word from now on, or not any more."""
        if self.words is not None:
            self.words[BELL] = int(wanted)

    def open(self) -> NamedSlot | None:
        """Lock the slot that the word names; ``None`` if that was dealt with.

        Also where its segment was not announced yet: a message that is on its way does, and
        then asks for it.

        Raises:
            ApplyError: The sender writes to it, and does not stop.
            TransportBroken: Foreign code has closed a descriptor.
            RemoteProtocolError: What the word names is no slot.
            OSError: There is no room for a mapping.
        """
        words, held, tries, until = self.words, self._held, 0, 0.0
        if words is None or words[WANT] == self._seen:
            return None
        while True:
            want = words[WANT]
            index = want & 255
            with FORKING:
                view = self.segments.get(want >> 8 & 255)
                if view is None:
                    return None
                held_here = held is not None and held.view is view and held.index == index
                locked = view.lock(index)
                if locked and words[WANT] == want:
                    break
                if locked and not held_here:
                    view.unlock(index)
            tries += 1
            if tries > _QUICK_TRIES:
                until = until or time.monotonic() + _PATIENCE_SECONDS
                if time.monotonic() > until:
                    raise ApplyError("the trainer was stopped while it wrote a version")
                time.sleep(_PAUSE_SECONDS)
        view.check_locked(index)
        mapping, mapped = view.maps.get(index) or view.map(index)
        if not held_here:
            # An operation of another thread that began on an older version, an optimizer's step,
            # may have written here since the slot was left.
            mapping.madvise(mmap.MADV_DONTNEED)
        version, nbytes, digest, sent_at, ids = HEADER.unpack_from(mapped, 0)
        memory = mapped[HEADER_NBYTES:]
        if not version or nbytes > len(memory):
            view.unlock(index)
            raise RemoteProtocolError("the peer named a slot that holds nothing")
        key = (view.segment_id, index, id(mapping))
        return NamedSlot(want, version, digest, nbytes, sent_at, ids, memory, key, view, index)

    def hold(self, slot: NamedSlot) -> None:
        """The model has what is in this slot."""
        self._held, self._seen = slot, slot.want
        if self.words is not None:
            self.words[HOLDS] = slot.version

    def refuse(self, slot: NamedSlot) -> None:
        """What is in this slot is not for the model: do not open it again."""
        self._seen = slot.want

    def leave(self, slot: NamedSlot, *, keep: bool) -> None:
        """Give a slot back, which may be done already.

        Args:
            slot: Which one.
            keep: Something in this process goes on using the memory: it stays as it is.
        """
        with FORKING:
            # The same slot may have been named again, and be held for that.
            held = self._held
            if held is not None and held is not slot:
                if held.view is slot.view and held.index == slot.index:
                    return
            if slot.index not in slot.view.locked:
                return
            if keep:
                slot.view.keep(slot.index)
                slot.view.maps.pop(slot.index, None)  # goes with its last view; the next is new
            slot.view.unlock(slot.index)
            if self._held is slot:
                self._held = None

    def leave_others(self) -> None:
        """Give back what an interrupt left locked."""
        for view in self.segments.values():
            for index in view.locked - {self._held.index if self._held else -1}:
                view.unlock(index)
        if len(self.segments) > 1:
            self._drop_old_segments()

    def close(self) -> None:
        """Give everything back; what views the memory keeps it, and what another thread took."""
        words = self.words
        self._closed = True
        self.words = self._held = None
        with FORKING:
            self.before_fork()
            for view in self.segments.values():
                view.close()
            self.segments.clear()
        if words is not None:
            words[BELL] = GONE


def _file_of(fd: int) -> tuple[int, int] | None:
    """Which file a descriptor is one of; ``None`` if it is none."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
