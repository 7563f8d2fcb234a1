"""The receiving side of shared memory: the slot that this link's word names, read in place.

A segment is mapped privately from a read-only descriptor: the writes of a receiver stay its own,
and are dropped before it reads another version in that slot. Slots are locked through another open
file description, which no other process has and no mapping keeps open, so that its locks end with
the process. The thread that applies an update uses this module; there is one such thread at a time.
Must not import asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from aiosync._interrupts import is_interrupt
from aiosync.device_memory import file_of
from aiosync.errors import ApplyError, RemoteProtocolError, TransportBroken
from aiosync.transports._forks import FORKING, OPENING, close_in_child, keep_across_fork
from aiosync.transports.shared_memory.slots import (
    BELL,
    GONE,
    HEADER,
    HEADER_NBYTES,
    HOLDS,
    LEAVES,
    PINNED,
    SET_LOCK,
    SHARED,
    UNLOCKED,
    WANT,
    map_page,
    reopen,
)
from aiosync.wire import DeviceSlot, PageMessage, Segment, is_traceparent

__all__ = ["NamedSlot", "SharedBlock", "SlotReader"]

# Each segment takes a descriptor or two as long as this process uses one of its slots.
_MAX_SEGMENTS = 64
_QUICK_TRIES = 100
_PAUSE_SECONDS = 0.001
_PATIENCE_SECONDS = 5.0
_CLOSED = (
    "other code of this process has closed a descriptor of aiosync's shared memory (a double "
    "close, os.closerange()): no update can be read over this link"
)
# MADV_POPULATE_WRITE, since Linux 5.14.
_POPULATE_WRITE = 23
_madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)


@dataclass(frozen=True, slots=True, eq=False)
class SharedBlock:
    """A slot's device memory, as the peer announced it.

    Attributes:
        fd: Descriptor of the memory; the segment's view closes it.
        about: The announcement.
        file: Device and inode of the descriptor's file.
    """

    fd: int
    about: DeviceSlot
    file: tuple[int, int] | None

    @property
    def is_open(self) -> bool:
        """True unless this process, perhaps by foreign code, has closed the descriptor."""
        return self.file is not None and file_of(self.fd) == self.file

    def close(self) -> None:
        """Close the descriptor."""
        # If it is closed, another file may have its number.
        if self.is_open:
            os.close(self.fd)


class _SegmentView:
    """The private mappings of a peer's segment. Owns the descriptor.

    Args:
        fd: The descriptor.
        about: The announcement of the segment.

    Raises:
        OSError: There is no ``/proc``, or no descriptor left.
    """

    def __init__(self, fd: int, about: Segment) -> None:
        self.segment_id: int = about.segment_id
        self.on_device: bool = about.on_device
        # True if an accelerator may read slots elsewhere than in the private mappings: keep() does
        # not preserve that content, so close() leaves such locked slots to leave().
        self.is_read_directly: bool = about.on_device
        # Indices of all slots that are locked; after an interrupt perhaps of more.
        self.locked: set[int] = set()
        self._slot_nbytes = about.slot_nbytes
        self._fd = fd
        self._file = file_of(fd)
        self._lock_fd = reopen(fd, os.O_RDONLY)
        # No code reads or writes through this open file: its position is a mark of it. To look at
        # the mark takes a quarter of the time of os.fstat().
        self._mark = os.lseek(self._lock_fd, secrets.randbits(62), os.SEEK_SET)
        # The private mapping, and the device memory, of slots, by the slot's index.
        self.maps: dict[int, tuple[mmap.mmap, memoryview]] = {}
        self.blocks: dict[int, SharedBlock] = {}

    def map(self, index: int) -> tuple[mmap.mmap, memoryview]:
        """Return the mapping of one slot with its header. Writes stay private to this process.

        Raises:
            RemoteProtocolError: The segment has no such slot.
            TransportBroken: There is no room for the mapping, or foreign code has closed the
                descriptor.
        """
        known = self.maps.get(index)
        if known is None:
            nbytes, offset = self._slot_nbytes, index * self._slot_nbytes
            fd = self._source()
            if os.fstat(fd).st_size < offset + nbytes:
                raise RemoteProtocolError(f"the peer's segment has no slot {index}")
            access = mmap.PROT_READ | mmap.PROT_WRITE
            try:
                mapping = mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, access, offset=offset)
            except OSError as exc:
                if is_interrupt(exc):
                    raise
                raise TransportBroken(
                    f"this process cannot map a slot of {nbytes} bytes in shared memory: {exc}"
                ) from exc
            # Another thread may have mapped the slot meanwhile. All have to use one mapping, as
            # keep() copies only that one.
            known = self.maps.setdefault(index, (mapping, memoryview(mapping)))
        return known

    def read_header(self, index: int) -> bytes | memoryview:
        """Return a slot's header, as the sender sees it; less than that without such a slot."""
        # In the private mapping, a page that this process wrote to has an old version's header.
        if file_of(self._fd) == self._file:
            return os.pread(self._fd, HEADER.size, index * self._slot_nbytes)
        # Foreign code has closed the descriptor. Any version makes the caller open the slot, which
        # raises the error.
        known = self.maps.get(index)
        return b"" if known is None else known[1]

    def share(self, index: int) -> memoryview:
        """Return a read-only view of one locked slot, with its header, as the sender sees it.

        The sender does not take away the slot's pages as long as this segment view is open, so that
        they may be registered with an accelerator.

        Raises:
            TransportBroken: This segment view was closed, or foreign code has closed the
                descriptor.
            OSError: There is no room for the mapping.
        """
        fd = self._source()
        fcntl.fcntl(self._lock_fd, SET_LOCK, PINNED[index])
        self.is_read_directly = True
        nbytes, offset = self._slot_nbytes, index * self._slot_nbytes
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
        return memoryview(mapping)

    def lock(self, index: int) -> bool:
        """Keep the sender from writing to a slot. Return False if the sender is writing to it."""
        # The index is added before the lock is taken: an interrupt in between must not leave a
        # locked slot that is not in the set.
        self.locked.add(index)
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
        """Raise unless :meth:`lock` locked the open file that has all locks of this segment view.

        Raises:
            TransportBroken: Foreign code has closed the descriptor, and has released every lock
                with it; another file may have its number now.
        """
        try:
            if os.lseek(self._lock_fd, 0, os.SEEK_CUR) == self._mark:
                return
        except OSError as exc:
            # The number is of no file any more, or of one that has no position.
            if is_interrupt(exc):
                raise
        # The lock may have been taken on that other file, so it is released there.
        with contextlib.suppress(OSError, ValueError):
            fcntl.fcntl(self._lock_fd, SET_LOCK, UNLOCKED[index])
        self._lock_fd = -1
        for each in self.locked:
            # The sender may write to these slots now.
            self.keep(each)
        raise TransportBroken(_CLOSED)

    def _source(self) -> int:
        """Return the descriptor to map.

        Raises:
            TransportBroken: Foreign code has closed it.
        """
        if file_of(self._fd) != self._file:
            raise TransportBroken(_CLOSED)
        return self._fd

    def unlock(self, index: int) -> None:
        """Allow the sender to write to a slot. Idempotent."""
        if index in self.locked and self._lock_fd >= 0:
            fcntl.fcntl(self._lock_fd, SET_LOCK, UNLOCKED[index])
        self.locked.discard(index)

    def keep(self, index: int) -> None:
        """Copy a slot into memory of this process at the same address, so that views of it stay.

        The kernel copies, without the GIL; before Linux 5.14 this process does.
        """
        known = self.maps.get(index)
        # A fork came after the slot was locked and before it was mapped.
        if known is None:
            return
        array = np.frombuffer(known[1], np.uint8)
        if _madvise is not None:
            size = ctypes.c_size_t(array.nbytes)
            if _madvise(ctypes.c_void_p(array.ctypes.data), size, _POPULATE_WRITE) == 0:
                return
        pages = array[:: mmap.PAGESIZE]
        # A write to a page of a private mapping makes the kernel copy it.
        pages[:] = pages.copy()

    def close(self) -> None:
        """Close the descriptors, which releases every lock. Views of slots keep their memory."""
        for fd in (self._fd, self._lock_fd):
            # If foreign code has closed a descriptor, another file may have its number.
            if file_of(fd) == self._file:
                os.close(fd)
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()
        self._fd = self._lock_fd = -1
        self.locked.clear()
        self.maps.clear()


# Not frozen: setting the fields of a frozen one costs a microsecond for each version.
@dataclass(slots=True, eq=False)
class NamedSlot:
    """A locked slot that the word of a link named.

    Attributes:
        want: The word.
        version: The version in the slot.
        digest: Digest of the version's manifest.
        nbytes: Bytes of the payload.
        sent_at: Time at which the slot was sealed, in nanoseconds since the Unix epoch.
        ids: Ids of the sender's trace and span, 24 bytes; zeros for none.
        memory: Memory of the slot behind its header; the payload is at its beginning.
        block: The device memory that has the payload instead; ``None`` for none.
        key: Key of the mapping with that memory.
        view: The segment that the slot is in.
        index: Index of the slot in its segment.
    """

    want: int
    version: int
    digest: bytes
    nbytes: int
    sent_at: int
    ids: bytes
    memory: memoryview
    block: SharedBlock | None
    key: tuple[int, int, int]
    view: _SegmentView
    index: int

    def share(self) -> memoryview:
        """Return a read-only view of the same memory, for an accelerator to read directly.

        Raises:
            TransportBroken: The segment was closed, or foreign code has closed the descriptor.
            OSError: The memory cannot be mapped.
        """
        return self.view.share(self.index)[HEADER_NBYTES:]

    @property
    def trace(self) -> str | None:
        """The traceparent of the sender's span; ``None`` without one."""
        trace = f"00-{self.ids[:16].hex()}-{self.ids[16:].hex()}-{self.sent_at & 1:02x}"
        return trace if is_traceparent(trace) else None


class SlotReader:
    """The segments and the page that one peer announced.

    Args:
        descriptors: Descriptors that arrived from the peer, in the order of its messages.

    Attributes:
        words: The words of the page, the first of which names a slot; ``None`` before the page
            arrived.
        segments: The announced segments that are in use, by the last byte of their id.
        unread: The last word that :meth:`open` saw, if the message that announces its segment, its
            device memory or its manifest was not read yet; else 0.
        outlives_link: True if the receiver closes this object, and not the link.
    """

    def __init__(self, descriptors: deque[int]) -> None:
        self.words: memoryview | None = None
        self.unread: int = 0
        self.outlives_link: bool = False
        self._descriptors = descriptors
        self.segments: dict[int, _SegmentView] = {}
        # The slot with the version that the model has.
        self._held: NamedSlot | None = None
        # The last word that was handled: its slot was applied or refused.
        self._seen = 0
        self._closed = False
        # True once the page was mapped, the descriptor of which comes before all others.
        self._has_page = False
        # The words, while close() still has to tell the sender that no slot is used any more.
        self._page: memoryview | None = None
        # Before a fork the locked slots are copied, as the child goes on reading them. The child
        # then closes its copies of the descriptors.
        keep_across_fork(self)
        close_in_child(self)

    def before_fork(self) -> None:
        """Copy the locked slots, because a child goes on reading them after this process.

        This process will give them back to the sender, which then writes to them. Another thread
        may apply updates; :data:`FORKING` keeps it from locking another slot before the fork.
        """
        for view in list(self.segments.values()):
            for index in list(view.locked):
                view.keep(index)

    def close_after_fork(self) -> None:
        """Close the descriptors of a forked child, which then reads no words."""
        self.words = None
        for view in self.segments.values():
            view.close()
        self.segments.clear()

    def announce(self, message: Segment | DeviceSlot | PageMessage) -> None:
        """Take over the descriptor of a new segment, of a slot's device memory, or of the page.

        Raises:
            RemoteProtocolError: No descriptor arrived, the same was announced before, the device
                memory is for no slot, or too many segments are in use.
            TransportBroken: The memory cannot be mapped: there is no room, no descriptor left, or
                no ``/proc``.
        """
        if not self._descriptors:
            raise RemoteProtocolError("the peer announced shared memory without its descriptor")
        if self._closed:
            self.decline_page()
        # No fork comes before the descriptor is one that a child closes.
        with OPENING:
            fd, is_kept = self._descriptors.popleft(), False
            try:
                if not self._closed:
                    is_kept = self._take_over(fd, message)
            except (OSError, ValueError) as exc:
                raise TransportBroken(f"shared memory cannot be mapped here: {exc}") from exc
            finally:
                if not is_kept:
                    os.close(fd)
        self._drop_old_segments()

    def decline_page(self) -> None:
        """Tell the sender that no slot is used, if the page has come and is read too late."""
        if self._descriptors and not self._has_page:
            self._has_page = True
            # The sender then keeps the slots until this process ends.
            with contextlib.suppress(OSError, ValueError):
                map_page(self._descriptors[0])[BELL] = GONE

    def _take_over(self, fd: int, message: Segment | DeviceSlot | PageMessage) -> bool:
        """Open the memory of a descriptor; return True if the descriptor has to stay open."""
        if isinstance(message, PageMessage):
            if self.words is not None:
                raise RemoteProtocolError("the peer announced a second page")
            self.words, self._has_page = map_page(fd), True
            return False
        key = message.segment_id & 255
        known = self.segments.get(key)
        is_same = known is not None and known.segment_id == message.segment_id
        if isinstance(message, DeviceSlot):
            if known is None or not is_same:
                raise RemoteProtocolError("the peer announced device memory for no slot")
            if message.index in known.blocks:
                return False
            known.blocks[message.index] = SharedBlock(fd, message, file_of(fd))
        elif known is None:
            self.segments[key] = _SegmentView(fd, message)
        elif is_same:
            # The peer announces all segments again if this side may have closed some. Now it is
            # the newest one, which stays open.
            self.segments[key] = self.segments.pop(key)
            return False
        else:
            raise RemoteProtocolError("the peer announced two segments by one number")
        return True

    def _drop_old_segments(self) -> None:
        """Close older segments in which no slot is locked; raise if too many segments are left."""
        # Without this lock, another thread could lock a slot of a segment that is being closed.
        with FORKING:
            for key, view in list(self.segments.items())[:-1]:
                if not view.locked:
                    del self.segments[key]
                    view.close()
        if len(self.segments) > _MAX_SEGMENTS:
            raise RemoteProtocolError("the peer announced too many segments")

    @property
    def is_behind(self) -> bool:
        """True if the word names a slot that was neither applied nor refused yet."""
        return self.words is not None and self.words[WANT] != self._seen

    @property
    def next_unread(self) -> int:
        """:attr:`unread`, if it is the first word since a slot was applied or refused; else 0.

        The sender named no version in between, so reads may go on with the version before it.
        """
        return self.unread if (self.unread >> 16) - (self._seen >> 16) == 1 else 0

    @property
    def named_version(self) -> tuple[int, bytes]:
        """Version in the slot that the word names, and the digest of that version's manifest.

        The version is 0 if the slot was applied or refused already, or cannot be read. This locks
        nothing.
        """
        words = self.words
        want = self._seen if words is None else words[WANT]
        view = None if words is None or want == self._seen else self.segments.get(want >> 8 & 255)
        if words is None or view is None:
            return 0, b""
        if view.on_device and want & 255 not in view.blocks:
            # The announcement of the slot's memory is on its way, as in open().
            return 0, b""
        try:
            header = view.read_header(want & 255)
        except (OSError, OverflowError) as exc:
            if is_interrupt(exc):
                raise
            return 0, b""
        if len(header) < HEADER.size:
            return 0, b""
        version, _, digest, _, _ = HEADER.unpack_from(header, 0)
        # If the word has changed meanwhile, the header may be that of another version.
        return version if words[WANT] == want else 0, digest

    def ring_me(self, wanted: bool) -> None:
        """Ask the sender for a message about each new word from now on, or for none any more."""
        if self.words is not None:
            self.words[BELL] = int(wanted)

    def take_no_more(self) -> None:
        """Tell the sender that no version is taken but those that were named before."""
        if self.words is not None:
            self.words[BELL] = LEAVES

    def open(self) -> NamedSlot | None:
        """Lock the slot that the word names, and return it.

        Returns:
            The slot; ``None`` if it was applied or refused already. It is also ``None`` if its
            segment was not announced yet: the announcement is on its way, and a message that asks
            for the slot follows it.

        Raises:
            ApplyError: The sender writes to the slot, and does not finish.
            TransportBroken: There is no room for a mapping, or foreign code has closed a
                descriptor.
            RemoteProtocolError: The word names no slot, or an empty one.
        """
        words = self.words
        self.unread = 0
        if words is None or words[WANT] == self._seen:
            return None
        found = self._lock_named(words)
        if found is None:
            return None
        want, index, view, held_here = found
        # Otherwise a close() of another thread could come in between. The slot would not be locked
        # any more, and be mapped only then, or the copy that close() has made be dropped here.
        with FORKING:
            view.check_locked(index)
            mapping, mapped = view.maps.get(index) or view.map(index)
            if not held_here:
                # Drop private writes to these pages. An operation of another thread that began on
                # an older version, such as an optimizer's step, may have written here after the
                # slot was given back.
                mapping.madvise(mmap.MADV_DONTNEED)
        version, nbytes, digest, sent_at, ids = HEADER.unpack_from(mapped, 0)
        memory, block = mapped[HEADER_NBYTES:], view.blocks.get(index)
        if not version or nbytes > (len(memory) if block is None else block.about.nbytes):
            view.unlock(index)
            raise RemoteProtocolError("the peer named a slot that holds nothing")
        key = (view.segment_id, index, id(mapping))
        return NamedSlot(
            want, version, digest, nbytes, sent_at, ids, memory, block, key, view, index
        )

    def _lock_named(self, words: memoryview) -> tuple[int, int, _SegmentView, bool] | None:
        """Lock the slot that the word names.

        Returns:
            The word, the slot's index, its segment, and True if the model uses this slot; ``None``
            if the segment was not announced yet.
        """
        held, tries, until = self._held, 0, 0.0
        while True:
            want = words[WANT]
            index = want & 255
            with FORKING:
                view = self.segments.get(want >> 8 & 255)
                if view is None or (view.on_device and index not in view.blocks):
                    self.unread = want
                    return None
                # The word may name the slot that the model uses: its lock and content stay then.
                held_here = held is not None and held.view is view and held.index == index
                locked = view.lock(index)
                if locked and words[WANT] == want:
                    return want, index, view, held_here
                if locked and not held_here:
                    view.unlock(index)
            tries += 1
            if tries > _QUICK_TRIES:
                until = until or time.monotonic() + _PATIENCE_SECONDS
                _pause(until)

    def hold(self, slot: NamedSlot) -> None:
        """Register that the model has the version in this slot, and write it to the page."""
        self._held, self._seen = slot, slot.want
        if self.words is not None:
            self.words[HOLDS] = slot.version

    def refuse(self, slot: NamedSlot) -> None:
        """Register that the version in this slot was refused, so that it is not opened again."""
        self._seen = slot.want

    def leave(self, slot: NamedSlot, *, keep: bool) -> None:
        """Give a slot back to the sender. Does nothing if that was done already.

        Args:
            slot: The slot.
            keep: True if this process goes on using the memory; its content is kept.
        """
        view, index = slot.view, slot.index
        with FORKING:
            held = self._held
            # The word may have named the same slot for a newer version, which the model holds now.
            if index in view.locked and (
                held is None or held is slot or held.view is not view or held.index != index
            ):
                if keep:
                    view.keep(index)
                    # This mapping goes with its last view. The next version there gets a new one.
                    view.maps.pop(index, None)
                view.unlock(index)
                if self._held is slot:
                    self._held = None
        if self._closed:
            # close() left the rest to this call, as an accelerator was reading the memory directly.
            self.close()

    def leave_others(self) -> None:
        """Give back slots that an interrupt left locked: all but the one that the model holds."""
        held = self._held
        # The loop may announce a segment meanwhile.
        for view in [*self.segments.values()]:
            kept = {held.index} if held is not None and held.view is view else set()
            for index in view.locked - kept:
                view.unlock(index)
        if len(self.segments) > 1:
            self._drop_old_segments()

    def close(self) -> None:
        """Give every slot back to the sender, and close the segments.

        Views keep their memory, even those of a slot that another thread has just locked. Nothing
        keeps what an accelerator reads directly: while another thread waits for such a copy, this
        leaves the rest to :meth:`leave`.
        """
        self._closed = True
        self._page, self.words, self._held = self.words or self._page, None, None
        with FORKING:
            if any(view.is_read_directly and view.locked for view in self.segments.values()):
                return
            self.before_fork()
            for view in self.segments.values():
                view.close()
            self.segments.clear()
        page, self._page = self._page, None
        if page is not None:
            page[BELL] = GONE


def _pause(until: float) -> None:
    """Wait a moment for the sender to finish a slot.

    Raises:
        ApplyError: The time is over.
    """
    if time.monotonic() > until:
        raise ApplyError("the trainer was stopped while it wrote a version")
    time.sleep(_PAUSE_SECONDS)
