"""Snapshots of the sender: one copy of the weights per update, in memory that is reused.

A :class:`Snapshot` is written once and then only read, until nobody needs it any more and its
memory becomes the next snapshot. :class:`PrivateStore` keeps them in this process's memory, for
links that carry bytes; :class:`ArenaStore` in shared slots that receivers read in place.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol

from aiosync.tensors import CopyPool, FlatBuffer, Flattener, Layout, LiveBytes, Prepared
from aiosync.transports._beside import KEPT
from aiosync.transports._incoming import LAZY_NBYTES
from aiosync.transports._segment import Arena, Slot

__all__ = ["ArenaStore", "Planned", "PrivateStore", "Snapshot", "SnapshotMaker", "SnapshotStore"]

# Copies up to this size run on the loop: a hop to a thread costs more than they do.
_INLINE_NBYTES = 4 * 2**20
# How long a send waits for a slot that its readers are about to leave.
_LEAVING_SECONDS = 0.05


class Snapshot:
    """One version of the weights, flat. Reference-counted by the sender's bookkeeping."""

    __slots__ = (
        "_refs",
        "_release",
        "buffer",
        "checksums",
        "layout",
        "live",
        "memo",
        "nbytes",
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
        # What carriers made of it, for all links; KEPT in it says that they need no bytes of it.
        self.memo: dict[Any, Any] = {}
        self._refs = 1
        self._release = release

    def payload(self) -> memoryview:
        """The payload, for links that carry bytes."""
        return self.buffer.memoryview()[: self.nbytes]

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Some bytes of the payload, as pieces in order; none for none."""
        if self.live is not None:
            return self.live.views(start, stop)
        return [self.buffer.memoryview()[start:stop]] if stop > start else []

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
            self.live = self.planned = None
            self.memo.clear()
            release()


def _nothing() -> None:
    return None


_no_buffer = FlatBuffer(0)


class SnapshotStore(Protocol):
    """Where snapshots are made."""

    def acquire_nowait(self, nbytes: int) -> Snapshot:
        """Memory for a snapshot now, growing if none is free."""

    def acquire_free(self, nbytes: int) -> Snapshot | None:
        """Memory for a snapshot if there is some now, without growing."""

    async def acquire(self, nbytes: int) -> Snapshot:
        """Memory for a snapshot; waits a moment for memory that is about to become free."""

    def close(self) -> None:
        """Give all memory back."""


class PrivateStore:
    """Snapshots in private memory. Keeps at most two idle buffers of the size last used."""

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

    async def acquire(self, nbytes: int) -> Snapshot:
        """See :class:`SnapshotStore`; never waits."""
        return self.acquire_nowait(nbytes)

    def _put_back(self, buffer: FlatBuffer) -> None:
        if not self._closed and len(self._idle) < 2:
            self._idle.append(buffer)

    def close(self) -> None:
        """See :class:`SnapshotStore`."""
        self._closed = True
        self._idle.clear()


class ArenaStore:
    """Snapshots in the slots of an arena: two in the steady state, more while a reader lags.

    Args:
        arena: Where the slots are.
        leaving: Whether every reader of a slot has moved on, so that it becomes free at once.
    """

    def __init__(self, arena: Arena, leaving: Callable[[Slot], bool]) -> None:
        self.arena = arena
        self._leaving = leaving
        self._buffers: dict[tuple[int, int], FlatBuffer] = {}
        self._freed: asyncio.Future[None] | None = None
        arena.on_free = self._on_free

    def _on_free(self) -> None:
        if self._freed is not None and not self._freed.done():
            self._freed.set_result(None)

    def acquire_nowait(self, nbytes: int) -> Snapshot:
        """See :class:`SnapshotStore`."""
        return self._wrap(self.arena.free_slot(nbytes) or self._grow(nbytes))

    def acquire_free(self, nbytes: int) -> Snapshot | None:
        """See :class:`SnapshotStore`."""
        slot = self.arena.free_slot(nbytes)
        return None if slot is None else self._wrap(slot)

    async def acquire(self, nbytes: int) -> Snapshot:
        """See :class:`SnapshotStore`."""
        give_up = time.monotonic() + _LEAVING_SECONDS
        while True:
            slot = self.arena.free_slot(nbytes)
            if slot is not None:
                return self._wrap(slot)
            left = give_up - time.monotonic()
            enough = 3 if nbytes <= LAZY_NBYTES else 2
            if self.arena.num_slots < enough or left <= 0 or not self._any_leaving():
                return self._wrap(self._grow(nbytes))
            self._freed = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(left):
                    await self._freed
            except TimeoutError:
                pass  # not as close to leaving as it looked: grow
            finally:
                self._freed = None

    def _any_leaving(self) -> bool:
        segment = self.arena.segment
        return segment is not None and any(self._leaving(slot) for slot in segment.slots)

    def _grow(self, nbytes: int) -> Slot:
        segment = self.arena.segment
        slot = self.arena.grow(nbytes)
        if slot.segment is not segment:
            self._buffers.clear()
        return slot

    def _wrap(self, slot: Slot) -> Snapshot:
        buffer = self._buffers.get(slot.key)
        if buffer is None:
            buffer = self._buffers[slot.key] = FlatBuffer.wrap(slot.view)
        return Snapshot(buffer, slot=slot, release=slot.release)

    def close(self) -> None:
        """See :class:`SnapshotStore`."""
        self._buffers.clear()
        self.arena.close()


class Planned(NamedTuple):
    """Weights that were looked at, and who planned their copy."""

    flattener: Flattener
    prepared: Prepared


class SnapshotMaker:
    """Copies weights into snapshots, on the loop when small and on plain threads when big."""

    def __init__(
        self, store: SnapshotStore, extract_as: Literal["tensordict", "state_dict"]
    ) -> None:
        self._store = store
        self._extract_as = extract_as
        self._flatteners: dict[int, Flattener] = {}
        self._closed = False
        self._executor: ThreadPoolExecutor | None = None
        self._pool: CopyPool | None = None

    def prepare(self, source: object, key: int = -1) -> Planned:
        """Look at ``source`` and plan its copy; cheap when it is the same as last time.

        Args:
            source: Module, TensorDict or mapping.
            key: Worker index for per-worker sources, each of which has its own plan.
        """
        flattener = self._flatteners.get(key)
        if flattener is None:
            flattener = self._flatteners[key] = Flattener(self._extract_as)
        return Planned(flattener, flattener.prepare(source))

    def take_nowait(self, planned: Planned) -> Snapshot:
        """Copy now, on this thread."""
        snapshot = self._store.acquire_nowait(planned.prepared.layout.nbytes)
        return self._fill(snapshot, planned)

    def take_free(
        self, planned: Mapping[int | None, Planned]
    ) -> Mapping[int | None, Snapshot] | None:
        """Copy now if there is one source, it is small, and memory for it is free."""
        if len(planned) != 1:
            return None
        [(key, plan)] = planned.items()
        nbytes = plan.prepared.layout.nbytes
        snapshot = self._store.acquire_free(nbytes) if nbytes <= _INLINE_NBYTES else None
        return None if snapshot is None else {key: self._fill(snapshot, plan)}

    async def take(self, planned: Planned) -> Snapshot:
        """Copy without holding the loop for long.

        Cancellation: safe; a copy under way on a thread is waited for, and its memory kept.
        """
        nbytes = planned.prepared.layout.nbytes
        snapshot = await self._store.acquire(nbytes)
        if nbytes <= _INLINE_NBYTES:
            return self._fill(snapshot, planned)
        copying = self._start_copy(snapshot, planned)
        try:
            await asyncio.shield(copying)
        except BaseException:  # goes on to the caller of send()
            copying.add_done_callback(lambda done: _after_cancel(done, snapshot))
            raise
        return self._describe(snapshot, planned)

    async def borrow(self, planned: Planned) -> Snapshot:
        """As :meth:`take`, but leave the bytes of large tensors where they are.

        The tensors must not change until :meth:`copy` was awaited.
        """
        layout = planned.prepared.layout
        live = None
        if layout.nbytes > _INLINE_NBYTES:
            live = LiveBytes.of(layout, planned.prepared.tensors)
        if live is None:
            return await self.take(planned)
        snapshot = self._describe(await self._store.acquire(layout.nbytes), planned)
        snapshot.live, snapshot.planned = live, planned
        return snapshot

    async def copy(self, snapshot: Snapshot) -> None:
        """Copy what was borrowed; the tensors may change afterwards.

        Cancellation: waits for the copy all the same, and is raised then.
        """
        planned = snapshot.planned
        if snapshot.live is None or planned is None or self._closed:
            return
        if KEPT in snapshot.memo:
            snapshot.live = snapshot.planned = None
            return
        copying = self._start_copy(snapshot, planned)
        cancelled: asyncio.CancelledError | None = None
        while not copying.done():
            try:
                await asyncio.wait({copying})
            except asyncio.CancelledError as exc:
                cancelled = exc
        copying.result()
        snapshot.live = snapshot.planned = None
        if cancelled is not None:
            raise cancelled

    def _start_copy(self, snapshot: Snapshot, planned: Planned) -> asyncio.Future[None]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "aiosync-snapshot")
            self._pool = CopyPool()
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, self._copy, snapshot, planned, self._pool)

    def _fill(self, snapshot: Snapshot, planned: Planned) -> Snapshot:
        try:
            planned.flattener.copy_into(planned.prepared, snapshot.buffer)
        except BaseException:  # goes on to the caller of send()
            snapshot.release()
            raise
        return self._describe(snapshot, planned)

    @staticmethod
    def _describe(snapshot: Snapshot, planned: Planned) -> Snapshot:
        snapshot.layout = planned.prepared.layout
        snapshot.nbytes = snapshot.layout.nbytes
        if planned.prepared.values:
            snapshot.values = copy.deepcopy(planned.prepared.values)
        return snapshot

    def _copy(self, snapshot: Snapshot, planned: Planned, pool: CopyPool | None) -> None:
        planned.flattener.copy_into(planned.prepared, snapshot.buffer, pool=pool)

    def close(self) -> None:
        """Join the copying threads and give the memory back."""
        self._closed = True
        if self._executor is not None and self._pool is not None:
            self._executor.shutdown(wait=True)
            self._pool.close()
            self._executor = self._pool = None
        self._store.close()


def _after_cancel(copying: asyncio.Future[None], snapshot: Snapshot) -> None:
    """The copy that nobody waits for any more has ended: its memory may be used again."""
    if not copying.cancelled():
        copying.exception()
    snapshot.release()
