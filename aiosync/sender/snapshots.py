"""Snapshots of the sender: one copy of the weights per update, in memory that is reused.

A :class:`Snapshot` is written once and then only read, until nobody needs it any more and its
memory becomes the next one. That is memory of this process, for links that carry bytes; or a slot
of an arena, which receivers read in place.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.tensors import (
    CastingFlattener,
    CastPrepared,
    CopyPool,
    Dtypes,
    FlatBuffer,
    Flattener,
    Layout,
    LiveBytes,
    Prepared,
    copy_bytes,
    sharded_names,
)
from aiosync.transports._kept_errors import without_frames
from aiosync.transports.data_plane import COPYING, KEPT, Progress, outlast
from aiosync.transports.shared_memory import MAX_SLOTS, Arena, Slot
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS

__all__ = ["FILLED", "Copying", "Gone", "Kept", "Live", "Planned", "Snapshot", "SnapshotCopier"]

# Copies up to this size run on the loop: a hop to a thread costs more than they do. The pages of
# larger slots are taken in a thread, too.
_INLINE_NBYTES = 4 * 2**20
_AHEAD_NBYTES = 2 * 2**20  # between two words of how far a copy is
# How long a send waits for a slot that its readers are about to leave, before it takes another.
_LEAVING_SECONDS = 0.02
_PAUSE_SECONDS = (0.0002, 0.01)  # the first one and the longest between two looks
_SMALL_NBYTES = 16 * 2**20  # of all slots together


class Planned(NamedTuple):
    """Weights that were looked at, and who planned their copy."""

    flattener: Flattener | CastingFlattener
    prepared: Prepared


# -- where the bytes of a snapshot are -------------------------------------------------------------


class Live(NamedTuple):
    """In the tensors it is made of, which must not change yet."""

    planned: Planned
    source: LiveBytes


class Copying(NamedTuple):
    """A thread copies them into the snapshot's memory, from its start on."""

    done: asyncio.Future[None]


class Kept(NamedTuple):
    """What moves payloads beside the links has them, and nobody else."""

    fetch: Callable[[], Awaitable[Sequence[memoryview]]]


class Gone(NamedTuple):
    """Nowhere: the copy failed, or who kept them does not have them any more."""

    error: BaseException


FILLED: Final = "filled"
"""In the snapshot's memory."""

State: TypeAlias = Live | Copying | Kept | Gone | Literal["filled"]


class Snapshot:
    """One version of the weights, flat. Reference-counted by the sender's bookkeeping.

    Args:
        layout: Where each tensor is in the payload.
        memory: For the payload; a slot is in use from now on.
        free: Called once, when nobody needs the memory any more.
        values: What is not a tensor.
        version: Which version.

    Attributes:
        state: Where the bytes are.
        checksums: Of the payload's chunks, where a link needs them.
        memo: What carriers made of the payload, for all links.
    """

    __slots__ = (
        "_free",
        "_names",
        "_refs",
        "buffer",
        "checksums",
        "layout",
        "memo",
        "nbytes",
        "slot",
        "state",
        "values",
        "version",
    )

    def __init__(
        self,
        layout: Layout,
        memory: FlatBuffer | Slot,
        free: Callable[[], None],
        values: Mapping[str, Any] | None = None,
        version: int = 0,
    ) -> None:
        self._free = free
        self._refs = 1
        self._names: frozenset[str] | None = None
        self.layout: Layout = layout
        self.nbytes: int = layout.nbytes
        self.values: dict[str, Any] = copy.deepcopy(dict(values)) if values else {}
        self.version: int = version
        self.state: State = FILLED
        self.checksums: list[bytes | None] = []
        self.memo: dict[Any, Any] = {}
        if isinstance(memory, FlatBuffer):
            self.slot: Slot | None = None
            self.buffer: FlatBuffer = memory
            return
        if memory.buffer is None:
            memory.buffer = FlatBuffer.wrap(memory.view)
        self.slot, self.buffer = memory, memory.buffer
        memory.in_use = True

    def __del__(self) -> None:
        if getattr(self, "_refs", 0) > 0:  # nobody could keep or release it: a handler raised
            self._refs = 1
            self.release()

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Some bytes of the payload, as pieces in order; none for none."""
        if isinstance(self.state, Live):
            return self.state.source.views(start, stop)
        return [self.buffer.memoryview()[start:stop]] if stop > start else []

    @property
    def names(self) -> frozenset[str]:
        """Every name that the update holds."""
        if self._names is None:
            leaves = self.layout.manifest.leaves
            tensors = frozenset(name for leaf in leaves for name in (leaf.name, *leaf.aliases))
            self._names = tensors | self.values.keys()
        return self._names

    def holds_same(self, other: Snapshot) -> bool:
        """Whether the other update holds the same names, of the same shapes."""
        same = self.layout is other.layout or self.layout.digest == other.layout.digest
        return same and self.values.keys() == other.values.keys()

    def retain(self) -> Snapshot:
        """Add a reference."""
        self._refs += 1
        return self

    def release(self) -> None:
        """Drop a reference; the last one gives the memory back, if need be after a copy."""
        self._refs -= 1
        if not self._refs:
            # An exception that somebody keeps may keep this object: it must not keep the memory.
            free, self._free = self._free, _nothing
            self.buffer, self.slot = _no_buffer, None
            state, self.state = self.state, FILLED
            self.memo.clear()
            if isinstance(state, Copying) and not state.done.done():
                state.done.add_done_callback(lambda _: free())
            else:
                free()

    # -- its states ----------------------------------------------------------------------------

    def begin_copy(self, done: asyncio.Future[None]) -> None:
        """A thread fills the memory until ``done``."""
        self.state = state = Copying(done)
        # Before what waits for it goes on: the tensors may change then.
        done.add_done_callback(lambda _: self.end_copy(state))

    def end_copy(self, state: Copying) -> None:
        """That has ended. Does nothing the second time."""
        cancelled = state.done.cancelled()
        error = asyncio.CancelledError() if cancelled else state.done.exception()
        if self.state is state:
            self.state = FILLED if error is None else Gone(error)
            self.memo.pop(COPYING, None)

    async def copied(self) -> None:
        """Wait until no copy is under way.

        Raises:
            LocalProtocolError: The bytes are nowhere any more.
        """
        state = self.state
        if isinstance(state, Copying):
            await asyncio.wait({state.done})
            self.end_copy(state)
            state = self.state
        if isinstance(state, Gone):
            raise LocalProtocolError(f"there is no copy of the weights: {state.error}") from (
                state.error
            )

    def move_to(self, other: Snapshot) -> None:
        """Take over the memory of ``other``, which nobody else has; keep this one's as long.

        Links may still be reading it.
        """
        mine, theirs = self._free, other._free
        other._free = _nothing

        def free() -> None:
            mine()
            theirs()

        self.buffer, self.slot, self._free = other.buffer, other.slot, free


def _nothing() -> None:
    return None


_no_buffer = FlatBuffer(0)


class SnapshotCopier:
    """Copies weights into snapshots, on the loop when small and on plain threads when big.

    In slots, beside those that are named to workers, or kept for workers that join, there are as
    many as workers hold at most: one that computes for long keeps its slot, and nobody else waits
    for it. Where all together are not small there is another one only when none has become free
    for a moment: mostly there are two. Of its own memory it keeps at most two buffers that are
    not in use.

    Args:
        arena: Where the slots are; ``None`` for snapshots in memory of this process.
        extract_as: What travels of a module.
        wire_dtype: What floating-point tensors are cast to on the way; ``None`` for nothing.
        limits: Bounds that the receivers are expected to have; ``None`` for the defaults.

    Attributes:
        arena: As given.
        ring: Has workers look who compute with an older version.
    """

    def __init__(
        self,
        arena: Arena | None,
        extract_as: Literal["tensordict", "state_dict"],
        wire_dtype: Dtypes | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.arena: Arena | None = arena
        self.ring: Callable[[], None] = _nothing
        self._extract_as = extract_as
        self._wire_dtype = wire_dtype
        self._limits = limits or DEFAULT_LIMITS
        self._flatteners: dict[int, Flattener | CastingFlattener] = {}
        self._idle: list[FlatBuffer] = []
        self._growing = asyncio.Lock()
        self._bringing = asyncio.Lock()
        self._closed = False
        self._executor: ThreadPoolExecutor | None = None
        self._pool: CopyPool | None = None

    def prepare(self, source: object, key: int = -1) -> Planned:
        """Look at ``source`` and plan its copy; cheap when it is the same as last time.

        Args:
            source: Module, TensorDict or mapping.
            key: Worker index for per-worker sources, each of which has its own plan.

        Raises:
            ConfigError: Something in the source cannot travel, or is sharded over several ranks.
        """
        flattener = self._flatteners.get(key)
        if flattener is None:
            flattener = self._flatteners[key] = (
                Flattener(self._extract_as, self._limits)
                if self._wire_dtype is None
                else CastingFlattener(self._extract_as, self._wire_dtype, self._limits)
            )
        try:
            return Planned(flattener, flattener.prepare(source))
        except ConfigError as exc:
            # Gathering here would wait for ranks that may never come.
            sharded = sharded_names(source)
            if not sharded:
                raise
            raise ConfigError(
                f"these weights are sharded over the ranks of a mesh ({', '.join(sharded[:3])}): "
                "call `weights = aiosync.gather_weights(model)` on every rank, and send(weights) "
                "on the one that sends"
            ) from exc

    # -- memory --------------------------------------------------------------------------------

    def _private(self, prepared: Prepared) -> Snapshot:
        buffer = self._idle.pop() if self._idle else None
        if buffer is None or buffer.nbytes != prepared.layout.nbytes:
            self._idle.clear()
            buffer = FlatBuffer(prepared.layout.nbytes)
        free = functools.partial(self._put_back, buffer)
        return Snapshot(prepared.layout, buffer, free, prepared.values)

    def _put_back(self, buffer: FlatBuffer) -> None:
        if self.arena is None and not self._closed and len(self._idle) < 2:
            self._idle.append(buffer)

    def _may_grow(self, arena: Arena, nbytes: int, *, at_once: bool) -> bool:
        """Whether there may be another slot; ``at_once``: without waiting for one to be left."""
        if arena.segment is None or arena.segment.slot_nbytes < nbytes:
            return True
        large = nbytes * (arena.num_links + 2) > _SMALL_NBYTES
        if at_once and large and arena.num_slots > 1:
            return False
        # Each worker may be in a read of another version, and on its way to the next.
        return arena.num_left < 2 * arena.num_links + 2 and arena.num_slots < MAX_SLOTS

    async def _acquire(self, prepared: Prepared) -> Snapshot:
        """Memory; waits a moment for a slot that is about to become free.

        Raises:
            ConfigError: Workers hold slots that they were not given.
        """
        arena = self.arena
        if arena is None:
            return self._private(prepared)
        nbytes = prepared.layout.nbytes
        async with self._growing:
            pause, until = _PAUSE_SECONDS[0], time.monotonic() + _LEAVING_SECONDS
            while (slot := arena.free_slot(nbytes)) is None:
                late = time.monotonic() >= until
                if self._may_grow(arena, nbytes, at_once=not late):
                    if nbytes > _INLINE_NBYTES:
                        await self._start(arena.reserve(nbytes))
                        slot = arena.free_slot(nbytes)  # somebody may have left one meanwhile
                    slot = slot or arena.grow(nbytes)
                    break
                if late:
                    raise ConfigError(
                        "workers hold more slots of shared memory than they were given"
                    )
                self.ring()
                await asyncio.sleep(pause)  # the kernel tells nobody of a lock that was given back
                pause = min(2 * pause, _PAUSE_SECONDS[1])
            return Snapshot(prepared.layout, slot, slot.release, prepared.values)

    # -- copies --------------------------------------------------------------------------------

    def take_nowait(self, planned: Planned) -> Snapshot:
        """Copy now, on this thread."""
        arena, prepared = self.arena, planned.prepared
        if arena is None:
            return self._fill(self._private(prepared), planned)
        slot = arena.free_slot(prepared.layout.nbytes)
        if slot is None and self._may_grow(arena, prepared.layout.nbytes, at_once=False):
            slot = arena.grow(prepared.layout.nbytes)
        if slot is None:
            return self._fill(self._private(prepared), planned)
        return self._fill(Snapshot(prepared.layout, slot, slot.release, prepared.values), planned)

    def take_free(self, planned: Planned) -> Snapshot | None:
        """Copy now if the source is small, and memory for it is free."""
        arena, prepared = self.arena, planned.prepared
        nbytes = prepared.layout.nbytes
        if nbytes > _INLINE_NBYTES:
            return None
        if arena is None:
            return self._fill(self._private(prepared), planned)
        slot = arena.free_slot(nbytes)
        if slot is None and self._may_grow(arena, nbytes, at_once=True):
            slot = arena.grow(nbytes)
        if slot is None:
            return None
        return self._fill(Snapshot(prepared.layout, slot, slot.release, prepared.values), planned)

    @staticmethod
    def _fill(snapshot: Snapshot, planned: Planned) -> Snapshot:
        try:
            planned.flattener.copy_into(planned.prepared, snapshot.buffer)
        except BaseException:  # goes on to the caller of send()
            snapshot.release()
            raise
        return snapshot

    async def take(
        self, planned: Planned, how: Literal["copy", "borrow", "copy ahead"] = "copy"
    ) -> Snapshot:
        """Copy without holding the loop for long.

        Args:
            planned: What to copy.
            how: ``"borrow"`` leaves the bytes of large tensors where they are, and ``"copy
                ahead"`` returns while they are still being copied, in order: these must not change
                until :meth:`copy` was awaited.

        Cancellation: safe; the memory is kept until a copy on a thread has ended.
        """
        prepared, source = planned.prepared, None
        if prepared.layout.nbytes <= _INLINE_NBYTES:
            return self._fill(await self._acquire(prepared), planned)
        if how != "copy" and not isinstance(prepared, CastPrepared):
            source = LiveBytes.of(prepared.layout, prepared.tensors)
        if source is not None and how == "borrow":
            snapshot = self._private(prepared)
            snapshot.state = Live(planned, source)
            return snapshot
        snapshot = await self._acquire(prepared)
        try:
            if source is not None:
                progress = snapshot.memo[COPYING] = Progress()
                target = snapshot.buffer.memoryview()[: snapshot.nbytes]
                call = functools.partial(_copy_in_order, source, target, progress)
                snapshot.begin_copy(self._start(call))
                return snapshot
            done = self._start_copy(planned, snapshot.buffer)
            snapshot.begin_copy(done)
            await asyncio.shield(done)
        except BaseException:  # goes on to the caller of send()
            snapshot.release()
            raise
        return snapshot

    async def copy(self, snapshot: Snapshot) -> None:
        """Copy what was borrowed; the tensors may change afterwards.

        Cancellation: waits for the copy all the same, and is raised then.
        """
        state, cancelled = snapshot.state, None
        if isinstance(state, Live) and not self._closed:
            fetch = snapshot.memo.get(KEPT)
            if fetch is not None:
                snapshot.state = Kept(fetch)
                return
            snapshot.begin_copy(self._start_copy(state.planned, snapshot.buffer))
            state = snapshot.state
        if isinstance(state, Copying):
            cancelled = await outlast(state.done)
            snapshot.end_copy(state)  # a task that is cancelled again is quicker than callbacks
        if isinstance(snapshot.state, Gone):
            raise snapshot.state.error
        if cancelled is not None:
            raise cancelled

    async def bring(self, snapshot: Snapshot) -> None:
        """Bring the bytes into a slot, for links that have them read where they are.

        Does nothing where there are no slots. :meth:`copy` may run at the same time. The caller
        has a reference.

        Raises:
            LocalProtocolError: The bytes are nowhere any more, or could not be copied.
        """
        async with self._bringing:  # once for all links that want it
            if snapshot.slot is None and self.arena is not None:
                try:
                    await self._move_into_slot(snapshot)
                except (ConfigError, OSError, RuntimeError, MemoryError) as exc:
                    if isinstance(exc, LocalProtocolError):
                        raise
                    # No descriptors, memory or threads: that must not end the sender.
                    raise LocalProtocolError(f"no memory for a copy of the weights: {exc}") from exc
            await snapshot.copied()

    async def _move_into_slot(self, snapshot: Snapshot) -> None:
        place = await self._acquire(Prepared(snapshot.layout, ()))
        try:
            state = snapshot.state
            if isinstance(state, Live):
                snapshot.begin_copy(self._start_copy(state.planned, place.buffer))
                snapshot.move_to(place)
                return
            await snapshot.copied()
            pieces: Sequence[memoryview] = snapshot.views(0, snapshot.nbytes)
            if isinstance(state, Kept):
                try:
                    pieces = await state.fetch()
                except LocalProtocolError as exc:
                    snapshot.state = Gone(without_frames(exc))  # nobody else has to find out
                    raise
            call = functools.partial(_join, pieces, place.buffer.memoryview())
            place.begin_copy(self._start(call))
            await place.copied()
            snapshot.move_to(place)
            snapshot.state = FILLED
        finally:
            place.release()

    # -- threads -------------------------------------------------------------------------------

    def _start(self, call: Callable[[], None]) -> asyncio.Future[None]:
        if self._closed:
            raise TransportClosed("this scheme was closed")
        if self._executor is None:
            self._executor, self._pool = ThreadPoolExecutor(1, "aiosync-snapshot"), CopyPool()
        return asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _start_copy(self, planned: Planned, flat: FlatBuffer) -> asyncio.Future[None]:
        copy_into = planned.flattener.copy_into
        return self._start(lambda: copy_into(planned.prepared, flat, pool=self._pool))

    async def aclose(self) -> None:
        """The same as :meth:`close`, without holding the loop until copies have ended."""
        if self._executor is not None:
            await outlast(self._start(_nothing))
        self.close()

    def close(self) -> None:
        """Join the copying threads and give the memory back."""
        self._closed = True
        if self._executor is not None and self._pool is not None:
            self._executor.shutdown(wait=True)
            self._pool.close()
            self._executor = self._pool = None
        self._idle.clear()
        if self.arena is not None:
            self.arena.close()


def _copy_in_order(source: LiveBytes, target: memoryview, progress: Progress) -> None:
    """Copy a payload from its start on, and say how far it is."""
    try:
        for start in range(0, len(target), _AHEAD_NBYTES):
            stop = min(start + _AHEAD_NBYTES, len(target))
            _join(source.views(start, stop), target[start:stop])
            progress.advance(stop)
    except BaseException as exc:  # send() raises it, and so does every link that waits
        progress.fail(exc)
        raise


def _join(pieces: Sequence[memoryview], target: memoryview) -> None:
    at = 0
    for piece in pieces:
        copy_bytes(target[at : at + piece.nbytes], piece)
        at += piece.nbytes
