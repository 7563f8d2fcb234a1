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
from collections.abc import Callable, Container, Hashable

from aiosync.errors import ConfigError, TransportClosed
from aiosync.transports._anonymous import anonymous_file, take_pages
from aiosync.transports._fork import close_in_child
from aiosync.transports._processes import has_ended

__all__ = ["Arena", "Segment", "Slot"]

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
        self.slot_nbytes: int = max(page, -(-slot_nbytes // page) * page)
        try:
            self.fd: int = anonymous_file()
        except OSError as exc:
            raise ConfigError(f"cannot create shared memory: {exc}") from exc
        try:  # now, as a link could not say that there is no descriptor left
            self.read_only_fd: int = _read_only(self.fd)
        except OSError as exc:
            os.close(self.fd)
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

    def reserve(self) -> Callable[[], None]:
        """What makes the next :meth:`grow` quick; to be called once, in any thread.

        Clearing the pages of a large slot takes longer than an event loop should stall.
        """
        return _Reservation(self)

    def close(self) -> None:
        """Close the descriptors; the memory goes when its last mapping does."""
        for fd in (self.fd, self.read_only_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.read_only_fd = -1
        for slot in self.slots:
            slot.view = memoryview(b"")
        self.slots.clear()
        while self._maps:
            with contextlib.suppress(BufferError):  # a tensor still views it: it goes with that
                self._maps.pop().close()


class Slot:
    """One place for a snapshot.

    Attributes:
        key: (segment id, slot index).
        view: The slot's bytes, writable by this process while nobody reads the slot.
        refs: References inside the sender.
        holders: Readers that were told to read it, and whether each said that something in its
            process goes on using the memory.
        num_orphans: Readers whose link has ended, but not the process that may still use it.
    """

    def __init__(self, arena: Arena, segment: Segment, index: int, view: memoryview) -> None:
        self.arena = arena
        self.segment = segment
        self.index = index
        self.key: tuple[int, int] = (segment.segment_id, index)
        self.view = view
        self.refs: int = 0
        self.holders: dict[Hashable, bool] = {}
        self.num_orphans: int = 0

    def retain(self) -> None:
        """Add a reference inside the sender."""
        self.refs += 1

    def release(self) -> None:
        """Drop a reference inside the sender."""
        self.refs -= 1
        self.arena.notify(self)

    def leave(self, holder: Hashable) -> None:
        """A reader no longer reads the slot."""
        if self.holders.pop(holder, None) is not None:
            self.arena.notify(self)

    def is_free(self) -> bool:
        """Whether nobody reads the slot."""
        return not (self.refs or self.holders or self.num_orphans)


class Arena:
    """The slots of one sender: as many as its readers make necessary, two in the steady state."""

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self._retired: list[Segment] = []
        # Slots of readers that were lost, by the descriptor that tells of the process's end.
        self._orphaned: list[tuple[int, list[Slot]]] = []
        self._closed = False
        self.on_free: Callable[[], None] | None = None
        close_in_child(self)

    def close_after_fork(self) -> None:
        """In a forked child: close its copies of the descriptors."""
        self.close()

    @property
    def num_slots(self) -> int:
        """Slots of the current segment."""
        return len(self.segment.slots) if self.segment else 0

    def free_slot(self, nbytes: int) -> Slot | None:
        """Acquire a slot that no process reads, or ``None``. The caller owns one reference."""
        if self._closed:
            raise TransportClosed("this scheme was closed")
        self.bury()
        if self.segment is not None and self.segment.slot_nbytes < nbytes:
            self._retired.append(self.segment)
            self.segment = None
            self._reap()
        if self.segment is None:
            return None
        for slot in self.segment.slots:
            if slot.is_free():
                return self._acquire(slot)
        return None

    def grow(self, nbytes: int) -> Slot:
        """Acquire a new slot. The caller owns one reference.

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
        return self._acquire(slot)

    def reserve(self, nbytes: int) -> Callable[[], None]:
        """What makes the next :meth:`grow` quick; to be called once, in any thread."""
        return self._segment_for(nbytes).reserve()

    def _segment_for(self, nbytes: int) -> Segment:
        segment = self.segment
        if segment is None or segment.slot_nbytes < nbytes:
            if segment is not None:
                self._retired.append(segment)
            segment = self.segment = Segment(nbytes)
        return segment

    @staticmethod
    def _acquire(slot: Slot) -> Slot:
        slot.refs = 1
        return slot

    def notify(self, slot: Slot) -> None:
        """Something left ``slot``."""
        if slot.refs or slot.holders:
            return
        if self._retired:
            self._reap()
        if self.on_free is not None:
            self.on_free()

    def _reap(self) -> None:
        for segment in list(self._retired):
            if all(slot.is_free() for slot in segment.slots):
                self._retired.remove(segment)
                segment.close()

    def _segments(self) -> list[Segment]:
        return [*self._retired, *([self.segment] if self.segment else [])]

    def held_by(self, holder: Hashable) -> list[Slot]:
        """The slots that a reader was told to read, and did not leave."""
        slots = [slot for segment in self._segments() for slot in segment.slots]
        return [slot for slot in slots if holder in slot.holders]

    def drop_holder(
        self,
        holder: Hashable,
        take_pidfd: Callable[[], int],
        *,
        kept: Container[tuple[int, int]] | None = None,
    ) -> None:
        """A reader's link is gone. What it may still use waits for the end of its process.

        Args:
            holder: The reader.
            take_pidfd: Hands over a descriptor that tells when its process ends; -1 for none, and
                then it never ends.
            kept: The slots that it goes on using, if it said so as it left; ``None``: any.
        """
        held = self.held_by(holder)
        orphaned = [slot for slot in held if kept is None or slot.key in kept]
        if orphaned:  # before anybody is told that a slot is free
            self._orphaned.append((take_pidfd(), orphaned))
            for slot in orphaned:
                slot.num_orphans += 1
        for slot in held:
            slot.leave(holder)
        self.bury()

    def bury(self) -> None:
        """Give back what readers used whose process has ended."""
        if not self._orphaned:
            return
        ended = [each for each in self._orphaned if each[0] >= 0 and has_ended(each[0])]
        self._orphaned = [each for each in self._orphaned if each not in ended]
        for pidfd, slots in ended:
            os.close(pidfd)
            for slot in slots:
                slot.num_orphans -= 1
        for _, slots in ended:
            for slot in slots:
                self.notify(slot)

    def find(self, segment_id: int, index: int) -> Slot | None:
        """The slot that a peer names, if it exists."""
        for segment in self._segments():
            if segment.segment_id == segment_id and 0 <= index < len(segment.slots):
                return segment.slots[index]
        return None

    def close(self) -> None:
        """Close every segment. Readers keep what they mapped."""
        if self._closed:
            return
        self._closed = True
        self.on_free = None
        for pidfd, _ in self._orphaned:
            if pidfd >= 0:
                os.close(pidfd)
        self._orphaned.clear()
        for segment in self._segments():
            segment.close()
        self._retired.clear()
        self.segment = None


def _read_only(fd: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
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
