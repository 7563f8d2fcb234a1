"""The sender's side of shared memory, and the layout of slots, words and locks for both sides.

A segment is a memfd, so that nothing is left behind however a process ends. The sender maps it
shared; receivers get a read-only descriptor and map it privately: their side is in ``reader``. Each
link has a page of three words. ``want`` names the slot that the worker is to compute with, and only
the sender writes it. ``holds`` is the version that the worker computes with, and ``bell`` asks for
a message about each new word; only the worker writes these two. No call frees a slot:
:meth:`Arena.take_slot` takes a slot that has no snapshot of the sender, that no link's word names,
that no reader has locked. If payloads are in memory of a device, a segment only has the headers. It
must not import asyncio, torch or anything above ``transports``.
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

from aiosync.device_memory import DeviceMemory, Driver
from aiosync.errors import ConfigError, TransportClosed
from aiosync.transports._forks import OPENING, close_in_child
from aiosync.transports._process_end import has_ended

__all__ = [
    "BELL",
    "DEVICE_SLOTS",
    "GONE",
    "HEADER",
    "HEADER_NBYTES",
    "HOLDS",
    "LEAVES",
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
"""Bytes of the header of a slot, before the payload."""

HEADER = struct.Struct("<QQ16sQ24s")
"""Header of a slot: version, bytes of the payload, digest of the manifest, time, trace and span.

The time is in nanoseconds since the Unix epoch. If there is a trace, the lowest bit of the time is
1 if it is recorded. The ids of the trace and span are 0 for no trace.
"""

WANT, HOLDS, BELL = 0, 8, 16
"""Places of the words of a page, counted in words. Each word has a cache line of its own.

``WANT`` holds a count, then the last byte of a segment's id, and in its last byte the index of a
slot; it is 0 before the first slot is named. ``HOLDS`` is a version; ``BELL`` is 0, 1,
:data:`GONE` or :data:`LEAVES`.
"""

GONE = 2
"""Value of the word ``BELL`` when the worker uses no slot any more, and will use none later."""

LEAVES = 3
"""Value of the word ``BELL`` when the worker takes no version that is named from now on."""

MAX_SLOTS = 256
"""Greatest number of slots of a segment, as a word has one byte for the index of a slot."""

DEVICE_SLOTS = 2
"""Greatest number of slots of a segment in device memory, which is scarce."""

SET_LOCK: int = fcntl.F_OFD_SETLK
"""Command of ``fcntl()`` that sets one of the following locks; it never waits.

These locks belong to open file descriptions.
"""

# A struct flock of one byte. Each slot has a byte for the lock of its content, at the slot's index.
_pack = struct.Struct("hhqqi4x").pack
SHARED, _EXCLUSIVE, UNLOCKED = (
    tuple(_pack(kind, 0, index, 1, 0) for index in range(MAX_SLOTS))
    for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK)
)

PINNED, _UNPINNED, _PIN_EXCLUSIVE = (
    tuple(_pack(kind, 0, MAX_SLOTS + index, 1, 0) for index in range(MAX_SLOTS))
    for kind in (fcntl.F_RDLCK, fcntl.F_UNLCK, fcntl.F_WRLCK)
)
"""Locks of a slot's pages, by the slot's index.

A reader sets ``PINNED`` before it registers the pages with an accelerator, so that the sender does
not take them away.
"""

_PAGE_NBYTES = 4096
_FIRST_FIT_SENDS = 32
# A slot gives its memory back after this many sends without use. One send gives back one slot.
_UNUSED_SENDS = 50


def reopen(fd: int, flags: int) -> int:
    """Return a descriptor of a new open file description of the same file, with its own locks.

    Raises:
        OSError: There is no ``/proc``, or no descriptor left.
    """
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _anonymous_file() -> int:
    """Return the descriptor of a file without a name.

    The file can grow and cannot shrink, so that no mapped page is ever beyond its end.
    """
    fd = os.memfd_create("aiosync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def map_page(fd: int) -> memoryview:
    """Return the words of a page. They stay mapped as long as the view exists.

    Raises:
        OSError: The file cannot be mapped.
        ValueError: The file is too short.
    """
    return memoryview(mmap.mmap(fd, _PAGE_NBYTES)).cast("Q")


def make_page() -> tuple[memoryview, int]:
    """Return the machine words of a new page, and its file's descriptor, which the caller closes.

    Raises:
        OSError: The system has no memory or descriptor left.
    """
    fd = _anonymous_file()
    try:
        os.ftruncate(fd, _PAGE_NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return map_page(fd), fd
    except BaseException:  # The error goes on to the caller.
        os.close(fd)
        raise


class Segment:
    """A growable run of equal slots that this process writes.

    Args:
        segment_id: Id of the segment for peers. Its last byte differs from that of every other
            segment in use.
        slot_nbytes: Bytes of the payload of one slot. The slot has its header as well, and is
            rounded up to whole pages.
        driver: Driver of the device that has the payloads; ``None`` if they are in the segment.

    Attributes:
        segment_id: Id of the segment for peers.
        slot_nbytes: Bytes of one slot in the segment, with its header.
        driver: As given.
        slots: The slots, by their index; some may have no memory.
        read_only_fd: A descriptor that peers may map but not write to.
        lock_fd: The descriptor whose open file description has the locks: no mapping and no peer
            keeps it open.

    Raises:
        ConfigError: The system has no memory for the segment, or the process has no descriptor
            left.
    """

    def __init__(self, segment_id: int, slot_nbytes: int, driver: Driver | None = None) -> None:
        self.segment_id: int = segment_id
        self.driver: Driver | None = driver
        page, here = mmap.ALLOCATIONGRANULARITY, slot_nbytes if driver is None else 0
        self.slot_nbytes: int = -(-(here + HEADER_NBYTES) // page) * page
        # Bytes of payload that a slot has room for.
        self._room = slot_nbytes if driver is not None else self.slot_nbytes - HEADER_NBYTES
        self.slots: list[Slot] = []
        self._fd = -1
        self.read_only_fd: int = -1
        self.lock_fd: int = -1
        try:
            self._fd = _anonymous_file()
            self.read_only_fd = reopen(self._fd, os.O_RDONLY)
            # The locks of the first descriptor would last as long as any mapping.
            self.lock_fd = reopen(self._fd, os.O_RDWR)
        except OSError as exc:
            self.close()
            raise ConfigError(f"no memory or no descriptor for shared memory: {exc}") from exc

    @property
    def taken(self) -> list[Slot]:
        """The slots that have memory."""
        return [slot for slot in self.slots if slot.has_memory]

    def fits(self, nbytes: int, driver: Driver | None) -> bool:
        """Return True if slots have room for so many bytes, in memory of the driver, or here."""
        return driver is self.driver and nbytes <= self._room

    def grow(self) -> Slot:
        """Give one more slot memory, and return that slot.

        ``has_memory`` of the slot is not set yet, so that no other call acquires it.

        Raises:
            ConfigError: The system, or the device, has no memory left for it.
        """
        index, nbytes = len(self.slots), self.slot_nbytes
        index = next((slot.index for slot in self.slots if not slot.has_memory), index)
        try:
            # If the memory were missing only at the first write, that write would be a SIGBUS.
            os.posix_fallocate(self._fd, index * nbytes, nbytes)
            if index == len(self.slots):
                mapping = mmap.mmap(self._fd, nbytes, offset=index * nbytes)
                # No fork may come before the slot is in the list, because the child closes the
                # descriptors of listed slots.
                with OPENING:
                    device = None
                    if self.driver is not None:
                        device = DeviceMemory.allocate(self.driver, self._room)
                    self.slots.append(Slot(self, index, mapping, device))
        except OSError as exc:
            raise ConfigError(
                f"cannot allocate shared memory for another slot of {nbytes} bytes: {exc}"
            ) from exc
        return self.slots[index]

    def shrink(self, slot: Slot) -> None:
        """Give the memory of a slot back to the system. The slot must be locked and not needed.

        If a reader has registered the slot's pages with an accelerator, the slot keeps its memory,
        because the accelerator would go on reading those pages.
        """
        try:
            fcntl.fcntl(self.lock_fd, SET_LOCK, _PIN_EXCLUSIVE[slot.index])
        except BlockingIOError:
            slot.release()
            return
        fcntl.fcntl(self.lock_fd, SET_LOCK, _UNPINNED[slot.index])
        slot.has_memory = False
        if slot.buffer is not None:
            # This process's accelerator would go on writing to pages that are gone.
            slot.buffer.unpin()
        # Some file systems cannot give memory back.
        with contextlib.suppress(OSError):
            slot.mapping.madvise(mmap.MADV_REMOVE)
        slot.release()
        # The mapping of a slot has a descriptor of its own, which goes with the slot.
        while self.slots and not self.slots[-1].has_memory:
            self.slots.pop()

    def close(self) -> None:
        """Close the descriptors. The memory is freed with its last mapping."""
        fds = self._fd, self.read_only_fd, self.lock_fd
        # Another thread may fork meanwhile, and the child closes what this object has.
        self._fd = self.read_only_fd = self.lock_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        while self.slots:
            slot = self.slots.pop()
            # Device memory goes with its last view, so that no copy under way loses it.
            slot.view, slot.buffer, slot.device = memoryview(b""), None, None
            # If a tensor still views the mapping, it is closed with that tensor.
            with contextlib.suppress(BufferError):
                slot.mapping.close()


class Slot:
    """A place for one snapshot in a segment.

    Attributes:
        segment: The segment that the slot is in.
        index: Index of the slot in its segment.
        place: What has to be announced to peers before they can read the slot: the segment; or, for
            device memory, the slot in it.
        address: The slot in a word that names it: the last byte of the segment's id, and the index.
        mapping: Mapping of the slot, its header included.
        device: Device memory for the payload; ``None`` if the payload is behind the header.
        view: Memory for the payload, writable by this process while the slot is locked.
        buffer: An object that the owner of the slot made of the view, kept so that it is made once.
        in_use: True if a snapshot of the sender is in the slot. The caller that acquired the slot
            sets it last of all, so that an exception of a signal's handler leaves the slot free.
        namers: Links whose word names the slot, or may name it; and each :class:`AbandonedSlots`
            with it.
        locked: True while this process fills the slot, so that no other process may read it.
        used_at: Time of the last acquisition, counted in acquisitions of the arena.
        has_memory: True if the slot has its pages; a slot without them is never acquired. It is set
            together with ``in_use`` for a new slot: until then the call that made the slot is about
            to use it.
    """

    def __init__(
        self, segment: Segment, index: int, mapping: mmap.mmap, device: DeviceMemory | None
    ) -> None:
        self.segment = segment
        self.index = index
        number = segment.segment_id
        self.place: int | tuple[int, int] = number if device is None else (number, index)
        self.address: int = (number & 255) << 8 | index
        self.mapping = mapping
        self.device = device
        self.view: memoryview = memoryview(mapping)[HEADER_NBYTES:]
        self.buffer: Any = None
        self.in_use: bool = False
        self.namers: set[object] = set()
        self.locked: bool = False
        self.used_at: int = 0
        self.has_memory: bool = False

    def lock(self) -> bool:
        """Keep other processes from reading the slot. Return False if one reads it."""
        try:
            fcntl.fcntl(self.segment.lock_fd, SET_LOCK, _EXCLUSIVE[self.index])
        except BlockingIOError:
            return False
        self.locked = True
        # The page of an ended link may still name this slot, so its header must name no version.
        HEADER.pack_into(self.mapping, 0, 0, 0, b"", 0, b"")
        return True

    def seal(self, version: int, digest: bytes, nbytes: int, trace: str | None = None) -> None:
        """Write the header of a filled slot, and allow other processes to read the slot.

        A second call does nothing, as does one after the segment was closed.

        Args:
            version: The version in the slot.
            digest: Digest of the version's manifest.
            nbytes: Bytes of the payload.
            trace: The traceparent of the sender's span, if it has one.
        """
        if self.locked and self.segment.lock_fd >= 0:
            now, ids = time.time_ns(), b""
            if trace is not None:
                # The last bit of the time says whether the trace is sampled.
                now = now & ~1 | int(trace[-1], 16) & 1
                ids = bytes.fromhex(trace[3:35] + trace[36:52])
            HEADER.pack_into(self.mapping, 0, version, nbytes, digest, now, ids)
            self.locked = False
            fcntl.fcntl(self.segment.lock_fd, SET_LOCK, UNLOCKED[self.index])

    def release(self) -> None:
        """Give the slot up, as the sender does not need the snapshot in it any more."""
        self.in_use = False
        if self.locked:
            self.locked = False
            if self.segment.lock_fd >= 0:
                fcntl.fcntl(self.segment.lock_fd, SET_LOCK, UNLOCKED[self.index])

    @property
    def version(self) -> int:
        """The version in the slot; 0 for none."""
        return int(HEADER.unpack_from(self.mapping, 0)[0])

    @property
    def is_needed(self) -> bool:
        """True if a snapshot of the sender or a link's word still refers to the slot."""
        return bool(self.in_use or self.namers)


@dataclass(frozen=True, slots=True, eq=False)
class AbandonedSlots:
    """The slots of a link that ended while the worker's process may still compute with them.

    The process's locks prove nothing: foreign code there may have closed the descriptors.

    Args:
        slots: The slots.
        words: The words of the link's page.
        pidfd: Descriptor of the worker's process; owned from now on.
    """

    slots: frozenset[Slot]
    words: memoryview
    pidfd: int

    def is_over(self) -> bool:
        """Return True if the process does not use the slots any more."""
        return self.words[BELL] == GONE or has_ended(self.pidfd)

    def release(self) -> None:
        """Allow the sender to write to the slots, and close the process's descriptor."""
        os.close(self.pidfd)
        for slot in self.slots:
            slot.namers.discard(self)


class Arena:
    """The slots of one sender, as many as its readers make necessary.

    Args:
        on_device: Payloads are in device memory, in at most :data:`DEVICE_SLOTS` slots.

    Attributes:
        on_device: As given.
        segment: The segment in which slots are acquired; ``None`` before the first slot.
        num_links: Number of links that can name slots to a peer.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        self.on_device: bool = on_device
        self.segment: Segment | None = None
        self.num_links: int = 0
        # Segments that were replaced by a larger one. Snapshots and links may still refer to them.
        self._retired: list[Segment] = []
        self._abandoned: list[AbandonedSlots] = []
        self._segment_ids = itertools.count(1)
        # The number of acquisitions so far; the indices of the slots of the last two.
        self._num_acquired = self._last = self._before_last = 0
        self._closed = False
        close_in_child(self)

    def close_after_fork(self) -> None:
        """Close the copies of the descriptors in a forked child."""
        for slot in [each for segment in self._segments for each in segment.slots]:
            if slot.device is not None:
                slot.device.forget()
        self.close()

    @property
    def num_slots(self) -> int:
        """Number of slots with memory in the current segment."""
        return len(self.segment.taken) if self.segment else 0

    def take_slot(
        self, nbytes: int, driver: Driver | None = None, *, growing: bool = False
    ) -> Slot | None:
        """Acquire a slot that no process reads. The caller sets its ``in_use``.

        Args:
            nbytes: Bytes of the payload.
            driver: Driver of the device that is to have it; ``None`` for memory of the host.
            growing: True if another thread is in :meth:`grow`; no slot gives its memory back then.

        Returns:
            The locked slot; ``None`` if none is free, or the slots are too small.

        Raises:
            TransportClosed: The arena was closed.
        """
        if self._closed:
            raise TransportClosed("this scheme was closed")
        if self._abandoned:
            self._release_abandoned()
        if self._retired:
            self._close_retired()
        segment = self.segment
        if segment is None or not segment.fits(nbytes, driver):
            return None
        self._num_acquired = now = self._num_acquired + 1
        # The slot before the last one is tried first, as workers are likely to have left it; each
        # slot that a worker still reads costs a call of the kernel. Now and then the first slot
        # comes first, so that slots that only slow workers made necessary become unused.
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
        # Each send checks one slot in turn, and gives its memory back if it is unused.
        old = segment.slots[now % len(segment.slots)]
        unused = old.used_at < now - _UNUSED_SENDS and old.has_memory and not old.is_needed
        if unused and not (growing or self.on_device) and old.lock():
            segment.shrink(old)
        return slot

    def _close_retired(self) -> None:
        """Close the replaced segments of which no slot is needed any more."""
        for retired in [*self._retired]:
            if not any(slot.is_needed for slot in retired.slots):
                self._retired.remove(retired)
                retired.close()

    def grow(self, nbytes: int, driver: Driver | None = None) -> Slot:
        """Acquire a new slot. The caller sets its ``in_use`` and ``has_memory``.

        Any thread may call this, one call at a time: clearing the pages of a large slot takes
        longer than an event loop may stall.

        Args:
            nbytes: Bytes of the payload.
            driver: Driver of the device that is to have it; ``None`` for memory of the host.

        Raises:
            ConfigError: The system has no memory left for a slot of this size, although it may have
                for a smaller one; or a worker has locked the new slot.
        """
        segment = self.segment
        if segment is None or not segment.fits(nbytes, driver):
            larger = Segment(next(self._segment_ids), nbytes, driver)
            try:
                slot = larger.grow()
            except BaseException:  # The error goes on to the caller.
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
        """Keep the slots that a worker's process may compute with after its link has ended.

        They are kept until that process says that it uses them no more, or has ended.

        Args:
            named: The slots that the link's word may name.
            version: The version that the worker has; 0 for none.
            words: The words of the link's page.
            pidfd: Descriptor of the worker's process; owned from now on.
        """
        has = (each for segment in self._segments for each in segment.taken)
        held = [each for each in has if version and each.version == version]
        abandoned = AbandonedSlots(frozenset((*named, *held)), words, pidfd)
        for slot in abandoned.slots:
            slot.namers.add(abandoned)
        self._abandoned.append(abandoned)
        self._release_abandoned()

    def _release_abandoned(self) -> None:
        """Let the sender write to the slots of workers' processes that use them no more."""
        for each in [*self._abandoned]:
            if self._closed or each.is_over():
                self._abandoned.remove(each)
                each.release()

    @property
    def _segments(self) -> list[Segment]:
        return [*self._retired, *([self.segment] if self.segment else [])]

    def close(self) -> None:
        """Close every segment. Readers keep the memory that they mapped."""
        self._closed = True
        while self._abandoned:
            self._abandoned.pop().release()
        for segment in self._segments:
            segment.close()
        self._retired.clear()
        self.segment = None
