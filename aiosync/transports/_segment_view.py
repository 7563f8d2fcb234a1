"""Anonymous shared memory in slots: the receivers' private side of a segment.

It is mapped privately from a read-only descriptor: what a receiver writes stays its own, and is
dropped when it leaves the slot. Must not import asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from aiosync.errors import RemoteProtocolError

__all__ = ["SegmentView"]


class SegmentView:
    """A receiver's private mapping of a peer's segment. Owns the descriptor."""

    def __init__(self, fd: int, segment_id: int, slot_nbytes: int) -> None:
        self.segment_id = segment_id
        self.slot_nbytes = slot_nbytes
        self.held: set[tuple[int, int]] = set()  # (slot, serial) that this side still reads
        self.closed: bool = False
        self._counts: dict[int, int] = {}
        self._fd = fd
        self._maps: dict[int, tuple[mmap.mmap, memoryview]] = {}

    def view(self, index: int) -> memoryview:
        """The bytes of one slot; writes stay private to this process.

        Raises:
            RemoteProtocolError: The segment has no such slot.
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

    def reads(self, index: int) -> bool:
        """Whether this side still reads a slot."""
        return any(index == held for held, _ in self.held)

    def count(self, index: int) -> int:
        """Count one more publication of a slot; returns how many there were."""
        serial = self._counts[index] = self._counts.get(index, 0) + 1
        return serial

    def forget_writes(self, index: int) -> None:
        """Drop what this process wrote into the slot, so that the next version shows."""
        known = self._maps.get(index)
        if known is not None and hasattr(mmap, "MADV_DONTNEED"):
            known[0].madvise(mmap.MADV_DONTNEED)

    def keep_held(self) -> None:
        """Give every slot that is read memory of this process, at the address it has.

        The sender may then write to the slot without this process, or a fork of it, seeing it.
        """
        for index in {index for index, _ in self.held} & self._maps.keys():
            pages = np.frombuffer(self._maps[index][1], np.uint8)[:: mmap.PAGESIZE]
            pages[:] = pages.copy()  # writing to a page of a private mapping copies it

    def close_descriptor(self) -> None:
        """Close the descriptor, but keep what is mapped."""
        self.closed = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Close the descriptor; mappings go when the last view of them does.

        A fork has to find those that are still read.
        """
        self.close_descriptor()
        for index in list(self._maps):
            mapping, view = self._maps.pop(index)
            try:
                view.release()
                mapping.close()
            except BufferError:  # a tensor still views it: it goes with that
                if self.reads(index):
                    self._maps[index] = mapping, memoryview(mapping)
