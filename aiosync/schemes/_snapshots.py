"""Snapshots of the sender: one copy of the weights per update, in memory that is reused.

A :class:`Snapshot` is written once and then only read, until nobody needs it any more and its
memory becomes the next snapshot. :class:`PrivateStore` keeps them in this process's memory, for
links that carry bytes; :class:`ArenaStore` in shared slots that receivers read in place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aiosync.errors import AiosyncError, ConfigError
from aiosync.tensors import FlatBuffer, Layout, LiveBytes
from aiosync.transports._segment import MAX_SLOTS, Arena, Slot

if TYPE_CHECKING:
    from aiosync.schemes._making import Planned

__all__ = ["ArenaStore", "PrivateStore", "Snapshot", "SnapshotStore"]

InThread: TypeAlias = "Callable[[Callable[[], None]], Awaitable[None]]"

# How long a send waits for a slot that its readers are about to leave, before it takes another.
_LEAVING_SECONDS = 0.02
_PAUSE_SECONDS = (0.0002, 0.01)  # the first one and the longest between two looks
_SMALL_NBYTES = 16 * 2**20  # of all slots together
# The pages of larger slots are taken in a thread.
_QUICK_NBYTES = 4 * 2**20


class Snapshot:
    """One version of the weights, flat. Reference-counted by the sender's bookkeeping."""

    __slots__ = (
        "_refs",
        "_release",
        "bringing",
        "buffer",
        "checksums",
        "copying",
        "layout",
        "live",
        "lost",
        "memo",
        "nbytes",
        "never_copied",
        "planned",
        "slot",
        "values",
        "version",
    )

    def __init__(
        self,
        buffer: FlatBuffer,
        *,
        slot: Slot | None,
        release: Callable[[], None],
    ) -> None:
        self.buffer: FlatBuffer = buffer
        self.slot: Slot | None = slot
        self.layout: Layout
        self.values: dict[str, object] = {}
        self.version: int = 0
        self.nbytes: int = 0  # of the payload
        self.checksums: list[bytes | None] = []  # of its chunks, where a link needs them
        # Until it is copied, links send from the tensors themselves.
        self.live: LiveBytes | None = None
        self.planned: Planned | None = None
        self.copying: asyncio.Future[None] | None = None  # while links send already
        self.never_copied: bool = False  # a carrier has the bytes, and nobody else
        self.lost: AiosyncError | None = None  # why that carrier does not have them any more
        self.bringing: asyncio.Lock | None = None
        # What carriers made of it, for all links.
        self.memo: dict[Any, Any] = {}
        self._release = release
        self._refs = 1
        if slot is not None:
            slot.in_use = True

    def __del__(self) -> None:
        if getattr(self, "_refs", 0) > 0:  # nobody could keep or release it: a handler raised
            self._refs = 1
            self.release()

    def payload(self) -> memoryview:
        """The payload, for links that carry bytes."""
        return self.buffer.memoryview()[: self.nbytes]

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Some bytes of the payload, as pieces in order; none for none."""
        if self.live is not None:
            return self.live.views(start, stop)
        return [self.buffer.memoryview()[start:stop]] if stop > start else []

    @property
    def is_borrowed(self) -> bool:
        """Whether the tensors it was made of must not change yet."""
        return self.live is not None or self.copying is not None

    def move_to(self, other: Snapshot) -> None:
        """Take over the memory of ``other``, which nobody else has; keep this one's as long.

        Links may still be reading it.
        """
        mine, theirs = self._release, other._release
        other._release = _nothing

        def release() -> None:
            mine()
            theirs()

        self.buffer, self.slot, self._release = other.buffer, other.slot, release

    def retain(self) -> Snapshot:
        """Add a reference."""
        self._refs += 1
        return self

    def release(self) -> None:
        """Drop a reference; the last one gives the memory back."""
        self._refs -= 1
        if not self._refs:
            # An exception that somebody keeps may keep this object: it must not keep the memory.
            release, self._release = self._release, _nothing
            self.buffer, self.slot = _no_buffer, None
            copying, self.copying = self.copying, None
            self.live = self.planned = None
            self.memo.clear()
            if copying is None or copying.done():
                release()
            else:
                copying.add_done_callback(lambda _: release())


def _nothing() -> None:
    return None


_no_buffer = FlatBuffer(0)


class SnapshotStore(Protocol):
    """Where snapshots are made.

    Attributes:
        has_slots: Other processes can read the snapshots that :meth:`acquire` returns.
    """

    has_slots: bool

    def acquire_private(self, nbytes: int) -> Snapshot:
        """Memory of this process alone for a snapshot that may never be filled."""

    def acquire_nowait(self, nbytes: int) -> Snapshot:
        """Memory for a snapshot now, growing if none is free."""

    def acquire_free(self, nbytes: int) -> Snapshot | None:
        """Memory for a snapshot if there is some now, without growing."""

    async def acquire(self, nbytes: int, in_thread: InThread) -> Snapshot:
        """Memory for a snapshot; waits a moment for memory that is about to become free.

        Args:
            nbytes: How much.
            in_thread: Makes a call that would hold the loop.
        """

    def close(self) -> None:
        """Give all memory back."""


class PrivateStore:
    """Snapshots in private memory. Keeps at most two idle buffers of the size last used."""

    has_slots: bool = False

    def __init__(self) -> None:
        self._idle: list[FlatBuffer] = []
        self._closed = False

    def acquire_nowait(self, nbytes: int) -> Snapshot:
        """See :class:`SnapshotStore`."""
        self._idle = [buffer for buffer in self._idle if buffer.nbytes == nbytes]
        buffer = self._idle.pop() if self._idle else FlatBuffer(nbytes)
        return Snapshot(buffer, slot=None, release=lambda: self._put_back(buffer))

    def acquire_free(self, nbytes: int) -> Snapshot | None:
        """See :class:`SnapshotStore`."""
        return self.acquire_nowait(nbytes)

    async def acquire(self, nbytes: int, in_thread: InThread) -> Snapshot:
        """See :class:`SnapshotStore`; never waits."""
        del in_thread
        return self.acquire_nowait(nbytes)

    def acquire_private(self, nbytes: int) -> Snapshot:
        """See :class:`SnapshotStore`."""
        return self.acquire_nowait(nbytes)

    def _put_back(self, buffer: FlatBuffer) -> None:
        if not self._closed and len(self._idle) < 2:
            self._idle.append(buffer)

    def forget(self) -> None:
        """Keep no idle buffers."""
        self._idle.clear()

    def close(self) -> None:
        """See :class:`SnapshotStore`."""
        self._closed = True
        self.forget()


class ArenaStore:
    """Snapshots in the slots of an arena.

    Beside those that are named to workers, or kept for workers that join, there are as many as
    workers hold at most: one that computes for long keeps its slot, and nobody else waits for it.
    Where all together are not small there is another one only when none has become free for a
    moment: mostly there are two.

    Args:
        arena: Where the slots are.
        ring: Has workers look who compute with an older version.
    """

    has_slots: bool = True

    def __init__(self, arena: Arena, ring: Callable[[], None]) -> None:
        self.arena = arena
        self._private = PrivateStore()
        self._ring = ring
        self._growing = asyncio.Lock()

    def _may_grow(self, nbytes: int) -> bool:
        arena = self.arena
        segment = arena.segment
        if segment is None or segment.slot_nbytes < nbytes:
            return True
        # Each worker may be in a read of another version, and on its way to the next.
        return arena.num_left < 2 * arena.num_links + 2 and arena.num_slots < MAX_SLOTS

    def _is_slow(self, nbytes: int) -> bool:
        """Whether to wait a moment before there is another slot."""
        return nbytes * (self.arena.num_links + 2) > _SMALL_NBYTES and self.arena.num_slots > 1

    def acquire_nowait(self, nbytes: int) -> Snapshot:
        """See :class:`SnapshotStore`."""
        slot = self.arena.free_slot(nbytes)
        if slot is None and not self._may_grow(nbytes):
            return self._private.acquire_nowait(nbytes)
        self._private.forget()
        return self._wrap(slot or self.arena.grow(nbytes))

    def acquire_free(self, nbytes: int) -> Snapshot | None:
        """See :class:`SnapshotStore`."""
        slot = self.arena.free_slot(nbytes)
        if slot is None and self._may_grow(nbytes) and not self._is_slow(nbytes):
            slot = self.arena.grow(nbytes)
        return None if slot is None else self._wrap(slot)

    async def acquire(self, nbytes: int, in_thread: InThread) -> Snapshot:
        """See :class:`SnapshotStore`.

        Raises:
            ConfigError: Workers hold slots that they were not given.
        """
        self._private.forget()
        async with self._growing:
            return self._wrap(await self._acquire(nbytes, in_thread))

    async def _acquire(self, nbytes: int, in_thread: InThread) -> Slot:
        pause, until = _PAUSE_SECONDS[0], time.monotonic() + _LEAVING_SECONDS
        while True:
            slot = self.arena.free_slot(nbytes)
            if slot is not None:
                return slot
            if self._may_grow(nbytes) and (not self._is_slow(nbytes) or time.monotonic() >= until):
                if nbytes > _QUICK_NBYTES:
                    await in_thread(self.arena.reserve(nbytes))
                    slot = self.arena.free_slot(nbytes)  # somebody may have left one meanwhile
                return slot or self.arena.grow(nbytes)
            if time.monotonic() > until:
                raise ConfigError("workers hold more slots of shared memory than they were given")
            self._ring()
            await asyncio.sleep(pause)  # the kernel tells nobody of a lock that was given back
            pause = min(2 * pause, _PAUSE_SECONDS[1])

    def acquire_private(self, nbytes: int) -> Snapshot:
        """See :class:`SnapshotStore`."""
        return self._private.acquire_nowait(nbytes)

    def _wrap(self, slot: Slot) -> Snapshot:
        if slot.buffer is None:
            slot.buffer = FlatBuffer.wrap(slot.view)
        return Snapshot(slot.buffer, slot=slot, release=slot.release)

    def close(self) -> None:
        """See :class:`SnapshotStore`."""
        self._private.close()
        self.arena.close()
