"""Anonymous shared memory in slots: the receivers' private side of a segment.

It is mapped privately from a read-only descriptor: what a receiver writes stays its own, and is
dropped before it reads another version there. Slots are locked through another description, which
nobody else has and nothing maps: with the process its locks go. Must not import asyncio, torch or
anything above ``transports``.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from aiosync.errors import RemoteProtocolError
from aiosync.transports._page import SET_LOCK, SHARED, UNLOCKED, fcntl, reopen

__all__ = ["SegmentView"]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)


class SegmentView:
    """A receiver's private mapping of a peer's segment. Owns the descriptor.

    Raises:
        OSError: There is no ``/proc``, or no descriptor left.
    """

    def __init__(self, fd: int, segment_id: int, slot_nbytes: int) -> None:
        self.segment_id = segment_id
        self.slot_nbytes = slot_nbytes
        self.locked: set[int] = set()  # maybe more than are locked, never fewer
        self._fd = fd
        self._lock_fd = reopen(fd, os.O_RDONLY)
        self._maps: dict[int, tuple[mmap.mmap, memoryview]] = {}

    def view(self, index: int) -> memoryview:
        """The bytes of one slot with its header; writes stay private to this process.

        Raises:
            RemoteProtocolError: The segment has no such slot.
            OSError: There is no room for the mapping.
        """
        known = self._maps.get(index)
        if known is not None:
            return known[1]
        offset = index * self.slot_nbytes
        if self._fd < 0 or os.fstat(self._fd).st_size < offset + self.slot_nbytes:
            raise RemoteProtocolError(f"the peer's segment has no slot {index}")
        mapping = mmap.mmap(
            self._fd,
            self.slot_nbytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )
        view = memoryview(mapping)
        self._maps[index] = (mapping, view)
        return view

    def fresh(self, index: int) -> tuple[memoryview, tuple[int, int, int]]:
        """The bytes of a slot without what this process wrote into it, and what names the mapping.

        Raises:
            RemoteProtocolError: As :meth:`view`.
            OSError: As :meth:`view`.
        """
        if index not in self._maps:
            self.view(index)
        mapping, view = self._maps[index]
        mapping.madvise(mmap.MADV_DONTNEED)
        return view, (self.segment_id, index, id(mapping))

    def held(self, index: int) -> tuple[memoryview, tuple[int, int, int]]:
        """The bytes of a slot that is in use, as they are, and what names the mapping."""
        mapping, view = self._maps[index]
        return view, (self.segment_id, index, id(mapping))

    def lock(self, index: int) -> bool:
        """Keep the sender from writing to a slot; False if it is at that."""
        self.locked.add(index)  # first: an interrupt may come in between, so none is taken for done
        try:
            fcntl.fcntl(self._lock_fd, SET_LOCK, SHARED[index])
        except BlockingIOError:
            self.locked.discard(index)
            return False
        return True

    def unlock(self, index: int) -> None:
        """Let the sender write to a slot. Idempotent."""
        if index in self.locked and self._lock_fd >= 0:
            fcntl.fcntl(self._lock_fd, SET_LOCK, UNLOCKED[index])
        self.locked.discard(index)

    def keep(self, index: int) -> None:
        """Give a slot memory of this process, at the address it has: what views it stays as it is.

        The kernel copies, without the GIL; before Linux 5.14 this process does.
        """
        known = self._maps.get(index)
        if known is None:  # a fork came between locking it and mapping it
            return
        array = np.frombuffer(known[1], np.uint8)
        if _madvise is not None:
            size = ctypes.c_size_t(array.nbytes)
            if _madvise(ctypes.c_void_p(array.ctypes.data), size, _POPULATE_WRITE) == 0:
                return
        pages = array[:: mmap.PAGESIZE]
        pages[:] = pages.copy()  # writing to a page of a private mapping copies it

    def abandon(self, index: int) -> None:
        """Forget the mapping of a slot, which goes with its last view; the next one is new."""
        self._maps.pop(index, None)

    def close_descriptors(self) -> None:
        """Close the descriptors, and with them give every lock back; keep what is mapped."""
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def close(self) -> None:
        """The same; mappings go when the last view of them does."""
        self.close_descriptors()
        self.locked.clear()
        self._maps.clear()
