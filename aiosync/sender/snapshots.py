"""Snapshots of the sender: one copy of the weights per update, how it is made and how long kept.

A :class:`Snapshot` is written once and then only read, until nobody needs it any more and its
memory becomes the next one. That is memory of this process, for links that carry bytes; or a slot
of an arena, which receivers read in place. :class:`History` keeps what workers get that join later.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, TypeVar

from aiosync.errors import ConfigError, LocalProtocolError, SendTimeout, TransportClosed
from aiosync.sender.steps import STEPS, STILL_STEPPING, steadily
from aiosync.tensors import (
    CopyPool,
    Dtypes,
    FlatBuffer,
    Flattener,
    Layout,
    LiveBytes,
    Prepared,
    copy_bytes,
)
from aiosync.transports.data_plane import CHANGED, COPYING, KEPT, STEADY, Progress, outlast
from aiosync.transports.shared_memory import MAX_SLOTS, Arena, Slot
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS

__all__ = [
    "STEP_SECONDS",
    "Chain",
    "Group",
    "History",
    "How",
    "Snapshot",
    "SnapshotCopier",
    "lacking",
]

STEP_SECONDS = 60.0
"""How long a copy waits for an optimizer's step, where its caller waits for ever."""

_T = TypeVar("_T")

# Copies up to this size run on the loop: a hop to a thread costs more than they do. The pages of
# larger slots are taken in a thread, too.
_INLINE_NBYTES = 4 * 2**20
_AHEAD_NBYTES = 2 * 2**20  # between two words of how far a copy is
# How long a send waits for a slot that its readers are about to leave, before it takes another.
_LEAVING_SECONDS = 0.02
_PAUSE_SECONDS = 0.0005  # between two looks
_SMALL_NBYTES = 16 * 2**20  # of all slots together


How: TypeAlias = Literal["copy", "borrow", "copy ahead"]


class Snapshot:
    """One version of the weights, flat. Reference-counted by the sender's bookkeeping.

    Args:
        layout: Where each tensor is in the payload.
        memory: For the payload; a slot is in use from now on.
        free: Called once, when nobody needs the memory any more.
        values: What is not a tensor.
        version: Which version.

    Attributes:
        filling: Until the bytes are in the memory; ``None`` where they are.
        live: The tensors where they are until then, and which must not change yet.
        kept: Brings them from where a transport keeps them, if they are nowhere else.
        checksums: Of the payload's first chunks, as far as links needed them.
        memo: What transports made of the payload, for all links.
        trace: The traceparent of the span of its send, if that has one.
    """

    __slots__ = (
        "_free",
        "_refs",
        "buffer",
        "checksums",
        "filling",
        "kept",
        "layout",
        "live",
        "memo",
        "nbytes",
        "slot",
        "trace",
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
        self.layout: Layout = layout
        self.nbytes: int = layout.nbytes
        self.values: dict[str, Any] = copy.deepcopy(dict(values)) if values else {}
        self.version: int = version
        self.filling: asyncio.Future[None] | None = None
        self.live: LiveBytes | None = None
        self.kept: Callable[[], Awaitable[Sequence[memoryview]]] | None = None
        self.checksums: list[bytes] = []
        self.memo: dict[Any, Any] = {}
        self.trace: str | None = None
        self.slot: Slot | None = None
        if isinstance(memory, FlatBuffer):
            self.buffer: FlatBuffer = memory
            return
        if memory.buffer is None:
            memory.buffer = FlatBuffer(memory.view, pinnable=True)
        self.slot, self.buffer = memory, memory.buffer
        memory.has_memory = memory.in_use = True

    def __del__(self) -> None:
        if getattr(self, "_refs", 0) > 0:  # nobody could keep or release it: a handler raised
            self._refs = 1
            self.release()

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Some bytes of the payload, as pieces in order; none for none."""
        if self.live is not None:
            return self.live.views(start, stop)
        return [self.buffer.memoryview()[start:stop]] if stop > start else []

    async def filled(self) -> None:
        """Wait until the bytes are in the memory.

        Raises:
            LocalProtocolError: They could not be copied.
        """
        filling = self.filling
        if filling is not None:
            await asyncio.wait({filling})
            if (error := filling.exception()) is not None:
                raise LocalProtocolError(f"there is no copy of the weights: {error}") from error

    async def fetched(self) -> None:
        """The same, also where only a transport has them by now."""
        await self.filled()
        if self.kept is not None:
            at, target, pieces = 0, self.buffer.memoryview(), await self.kept()
            for piece in pieces:
                copy_bytes(target[at : at + piece.nbytes], piece)
                at += piece.nbytes
            self.kept = None

    @property
    def names(self) -> Set[str]:
        """Every name that the update holds."""
        tensors = self.layout.index.keys()  # a copy of thousands of names takes its time
        return tensors | self.values.keys() if self.values else tensors

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
            self.buffer, self.slot, self.kept = _no_buffer, None, None
            self.memo.clear()
            if self.filling is None or self.filling.done() or self.live is not None:
                free()
            else:
                self.filling.add_done_callback(lambda _: free())


def _nothing() -> None:
    return None


_no_buffer = FlatBuffer(0)


# -- which of them are kept ------------------------------------------------------------------------


Group: TypeAlias = "tuple[Snapshot, ...]"
"""Updates that a worker applies as one, with the version of the last."""


def lacking(newest: Group, older: Sequence[Snapshot]) -> list[Snapshot]:
    """The older ones that hold something which nothing newer holds: never more than names.

    Args:
        newest: What comes next.
        older: Oldest first, as what is returned.
    """
    needed, newer = list[Snapshot](), set[str]()
    for each in reversed(older):
        if len(newest) == 1 and each.holds_same(newest[0]):  # mostly: to compare names is dear
            continue
        newer = newer or _names_of(newest)
        if not each.names <= newer:
            needed.append(each)
            newer |= each.names
    return needed[::-1]


def _names_of(snapshots: Iterable[Snapshot]) -> set[str]:
    return set[str]().union(*(each.names for each in snapshots))


class Chain:
    """Updates that come one after the other. Has a reference to each.

    Attributes:
        groups: Oldest first.
    """

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups: list[Group] = [*groups]
        for each in self.snapshots():
            each.retain()

    @property
    def version(self) -> int:
        """Of the last one; 0 for none."""
        return self.groups[-1][-1].version if self.groups else 0

    def snapshots(self) -> list[Snapshot]:
        """All of them, oldest first."""
        return [each for group in self.groups for each in group]

    def add(self, group: Group, needed: Sequence[Snapshot], *, parts: bool) -> list[int]:
        """Put a group at the end, and leave out what is not needed before it.

        Args:
            group: What comes; takes over a reference to each.
            needed: See :func:`lacking`.
            parts: What was between an update that is left out and this group comes with it.

        Returns:
            The versions of the groups that do not stay as they were.
        """
        groups, late, lost, replaced = list[Group](), list[Snapshot](), list[Snapshot](), []
        for each in self.groups:
            kept = [snapshot for snapshot in each if snapshot in needed]
            lost += [snapshot for snapshot in each if snapshot not in needed]
            if len(kept) == len(each) and not (lost and parts):
                groups.append(each)
            else:
                late += kept
                replaced.append(each[-1].version)
        self.groups = [*groups, (*late, *group)]
        for snapshot in lost:
            snapshot.release()
        return replaced

    def clear(self) -> None:
        """Give everything back."""
        snapshots, self.groups = self.snapshots(), []
        for each in snapshots:
            each.release()


class History:
    """Updates that together hold the newest of each name, for everybody and for some.

    Nearly always that is one. Names that were never sent before are other weights, or a mistake
    that no worker can take: they come along with older ones only where the sender says that it
    sends parts. Keeps references to snapshots, and with that their memory.

    Args:
        parts: Updates hold parts of the names, also when these are new.
        num_workers: How many workers there can be; ``None`` for any number.

    Attributes:
        parts: As given; may change.
    """

    def __init__(self, parts: bool, num_workers: int | None) -> None:
        self.parts = parts
        self._num_workers = num_workers
        self._common = Chain()
        self._own: dict[int, Chain] = {}  # of workers that got others than the rest

    def add(self, key: int | None, snapshot: Snapshot) -> None:
        """Register what was sent, newest last; takes over a reference.

        Args:
            key: To which worker; ``None`` for all that got no other one of the same version.
            snapshot: The update.
        """
        common = self._common
        groups = common.groups
        if key is None and not self._own and len(groups) == 1 and len(groups[0]) == 1:  # mostly
            [(old,)] = groups
            if old.layout is snapshot.layout and old.values.keys() == snapshot.values.keys():
                common.groups = [(snapshot,)]
                old.release()  # last: a signal's handler may raise in between
                return
        if key is None:
            for idx, own in list(self._own.items()):
                if own.version < snapshot.version:
                    self._extend(own, snapshot.retain())
                    if [*map(len, own.groups)] == [1]:  # as everybody has it
                        self._own.pop(idx).clear()
            self._extend(common, snapshot)
            return
        if key not in self._own:
            older = [each for each in common.groups if each[-1].version < snapshot.version]
            self._own[key] = Chain(older)
        self._extend(self._own[key], snapshot)
        if len(self._own) == self._num_workers:
            common.clear()  # nobody is left who would get it

    def for_worker(self, idx: int) -> Chain:
        """What this worker gets when it joins, in the order in which it was sent."""
        return self._own.get(idx, self._common)

    def needed_before(self, chain: Chain, snapshot: Snapshot) -> list[Snapshot]:
        """What somebody who gets a chain would get as well if ``snapshot`` came next."""
        known = self.parts or snapshot.names <= _names_of(chain.snapshots())
        return lacking((snapshot,), chain.snapshots()) if known else []

    def forget(self, idx: int) -> None:
        """A worker that comes again under this index gets what the others get."""
        self._own.pop(idx, Chain()).clear()

    def clear(self) -> None:
        """Give everything back."""
        for chain in (self._common, *self._own.values()):
            chain.clear()
        self._own.clear()

    def _extend(self, chain: Chain, snapshot: Snapshot) -> None:
        chain.add((snapshot,), self.needed_before(chain, snapshot), parts=self.parts)


# -- how they are made -----------------------------------------------------------------------------


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
        flatteners: Plan copies: by index those of workers that get weights of their own, and by -1
            that of what everybody gets.
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
        self.ring: Callable[[], object] = _nothing
        flattener = functools.partial(Flattener, extract_as, limits or DEFAULT_LIMITS, wire_dtype)
        self.flatteners: defaultdict[int, Flattener] = defaultdict(flattener)
        self._idle: list[FlatBuffer] = []
        self._closed = False
        STEPS.watch()
        self._growing: asyncio.Future[Slot] | None = None  # the arena, in a thread
        self._executor = ThreadPoolExecutor(1, "aiosync-snapshot")  # one copy after the other
        self._pool = CopyPool()
        self._has_thread = False

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
        if self._growing is not None:
            return False
        if arena.segment is None or arena.segment.slot_nbytes < nbytes:
            return True
        large = nbytes * (arena.num_links + 2) > _SMALL_NBYTES
        if at_once and large and arena.num_slots > 1:
            return False
        # Each worker may be in a read of another version, and on its way to the next.
        left = sum(not slot.is_needed for slot in arena.segment.taken)  # readers may need them
        return left < 2 * arena.num_links + 2 and arena.num_slots < MAX_SLOTS

    async def _acquire(self, prepared: Prepared) -> Snapshot:
        """Memory; waits a moment for a slot that is about to become free. One call at a time.

        Raises:
            ConfigError: Workers hold slots that they were not given.
        """
        arena = self.arena
        if arena is None:
            return self._private(prepared)
        nbytes = prepared.layout.nbytes
        if self._growing is not None:  # of a call that was cancelled
            await asyncio.wait({self._growing})
        until = time.monotonic() + _LEAVING_SECONDS
        while (slot := arena.take_slot(nbytes)) is None:
            late = time.monotonic() >= until
            if self._may_grow(arena, nbytes, at_once=not late):
                if nbytes <= _INLINE_NBYTES:
                    slot = arena.grow(nbytes)
                    break
                # Until it is here, nobody else makes one or takes one away.
                self._growing = self._start(functools.partial(arena.grow, nbytes))
                self._growing.add_done_callback(self._grown)  # cut, its slot is what is made next
                slot = await asyncio.shield(self._growing)
                break
            if arena.num_slots == MAX_SLOTS:
                return self._private(prepared)
            if late:
                raise ConfigError("workers hold more slots of shared memory than they were given")
            self.ring()
            await asyncio.sleep(_PAUSE_SECONDS)  # the kernel tells nobody of a lock given back
        return Snapshot(prepared.layout, slot, slot.release, prepared.values)

    def _grown(self, _: object) -> None:
        self._growing = None

    # -- copies --------------------------------------------------------------------------------

    def take_now(self, prepared: Prepared, timeout: float) -> Snapshot:
        """Copy on this thread, into memory of this process where no slot is free.

        Raises:
            SendTimeout: An optimizer's step in another thread did not end.
        """
        snapshot = self.take_free(prepared, timeout, always=True)
        if snapshot is None:
            raise SendTimeout(STILL_STEPPING.format(timeout))
        return snapshot

    def take_free(
        self,
        prepared: Prepared,
        timeout: float = 0.0,
        *,
        always: bool = False,
        may_wait: bool = False,
    ) -> Snapshot | None:
        """Copy on this thread what is small, where memory for it is free; or ``always``.

        Not what waits for an accelerator, unless the thread ``may_wait``.

        Returns:
            ``None`` also if an optimizer of another thread is in a step after ``timeout`` seconds.
        """
        arena, slot = self.arena, None
        nbytes = prepared.layout.nbytes
        if (nbytes > _INLINE_NBYTES or (prepared.waits and not may_wait)) and not always:
            return None
        if arena is not None:
            slot = arena.take_slot(nbytes, growing=self._growing is not None)
            if slot is None and self._may_grow(arena, nbytes, at_once=not always):
                slot = arena.grow(nbytes)
            if slot is None and not always:
                return None
        if slot is None:
            snapshot = self._private(prepared)
        else:
            snapshot = Snapshot(prepared.layout, slot, slot.release, prepared.values)
        copied = False
        try:
            copied = self._copy(prepared, snapshot, timeout)
        finally:
            if not copied:
                snapshot.release()
        return snapshot if copied else None

    @staticmethod
    def _copy(prepared: Prepared, snapshot: Snapshot, timeout: float = 0.0) -> bool:
        """Copy on this thread, unless an optimizer's step is open in another one by then."""
        try:
            STEPS.copies.add(snapshot)
            if STEPS.open and STEPS.wait(timeout) is None:
                return False
            prepared.copy_into(snapshot.buffer)
        finally:
            STEPS.copies.discard(snapshot)
            if STEPS.num_waiting:
                STEPS.end(snapshot)
        return True

    async def take(
        self, prepared: Prepared, how: How = "copy", timeout: float = STEP_SECONDS
    ) -> Snapshot:
        """Copy without holding the loop for long.

        Args:
            prepared: What to copy.
            how: ``"borrow"`` leaves the bytes of large tensors where they are, and ``"copy
                ahead"`` returns while they are still being copied, in order: these must not change
                until :meth:`settle` was awaited.
            timeout: Seconds to wait for an optimizer's step that is open in another thread.

        Raises:
            SendTimeout: It did not end.
            WeightsChanged: Somebody wrote to the weights meanwhile.

        Cancellation: safe; the memory is kept until a copy on a thread has ended.
        """
        source = None
        steady = functools.partial(
            steadily, prepared=prepared, timeout=timeout, gave_up=lambda: self._closed
        )
        large = prepared.waits or prepared.layout.nbytes > _INLINE_NBYTES
        if large and how != "copy" and prepared.signature is not None:
            source = LiveBytes.of(prepared.layout, prepared.tensors)
        if source is not None and how == "borrow":
            snapshot = self._private(prepared)
            snapshot.live, snapshot.filling = source, asyncio.get_running_loop().create_future()
            snapshot.memo[STEADY] = steady
            return snapshot
        snapshot = await self._acquire(prepared)
        try:
            if source is not None:
                STEPS.copies.add(snapshot)
                if STEPS.wait() is not False:  # who follows the copy would have to be told
                    STEPS.end(snapshot)
                    source = None
            if not large and self._copy(prepared, snapshot):
                pass
            elif source is None:
                flat = snapshot.buffer
                snapshot.filling = steady(
                    self._start, lambda: prepared.copy_into(flat, pool=self._pool)
                )
                await asyncio.shield(snapshot.filling)
                snapshot.filling = None
            else:
                progress = snapshot.memo[COPYING] = Progress()
                copy = functools.partial(_copy_in_order, source, snapshot, progress)
                snapshot.filling = self._start(copy)
        except BaseException:  # goes on to the caller of send()
            STEPS.end(snapshot)
            snapshot.release()
            raise
        return snapshot

    async def settle(self, snapshot: Snapshot) -> None:
        """Bring the bytes where they stay; the tensors may change afterwards.

        Cancellation: waits for the copy all the same, and is raised then.
        """
        filling, live, cancelled = snapshot.filling, snapshot.live, None
        if filling is None:
            return
        if live is None:
            cancelled = await outlast(filling)
        else:
            snapshot.live, snapshot.kept = None, snapshot.memo.get(KEPT)
            steady = snapshot.memo[STEADY]
            try:
                if snapshot.kept is None and not self._closed:
                    copy = functools.partial(_copy_in_order, live, snapshot, Progress())
                    copying = steady(self._start, copy)
                    cancelled = await outlast(copying)
                    copying.result()
            except BaseException as exc:  # noqa: BLE001 - raised below
                filling.set_exception(exc)
            else:
                filling.set_result(None)
            del snapshot.memo[STEADY]
        if cancelled is not None:
            filling.exception()  # the cut is the news
            raise cancelled
        filling.result()
        snapshot.filling = None
        if (changed := snapshot.memo.pop(CHANGED, None)) is not None:
            raise changed  # what is copied now is for who joins later

    # -- threads -------------------------------------------------------------------------------

    def _start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        if self._closed:
            raise TransportClosed("this scheme was closed")
        running = asyncio.get_running_loop().run_in_executor(self._executor, call)
        # Whoever waits for it raises it; when cut, the cut is the news.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._has_thread = True
        return running

    async def aclose(self) -> None:
        """The same as :meth:`close`, without holding the loop until copies have ended."""
        if self._has_thread:
            last = self._start(_nothing)  # of this loop, unlike what may be under way
            self._closed = True  # those that wait for an optimizer's step give up
            await outlast(last)
        self.close()

    def close(self) -> None:
        """Join the copying threads and give the memory back."""
        self._closed = True
        self._executor.shutdown()
        self._pool.close()
        self._idle.clear()
        if self.arena is not None:
            self.arena.close()


def _copy_in_order(source: LiveBytes, snapshot: Snapshot, progress: Progress) -> None:
    """Copy a payload from its start on, say how far it is, and let optimizers step."""
    target, at = snapshot.buffer.memoryview(), 0
    try:
        while at < snapshot.nbytes:
            for piece in source.views(at, min(at + _AHEAD_NBYTES, snapshot.nbytes)):
                copy_bytes(target[at : at + piece.nbytes], piece)
                at += piece.nbytes
            progress.advance(at)
    except BaseException as exc:  # send() raises it, and so does every link that waits
        progress.fail(exc)
        raise
    finally:
        STEPS.end(snapshot)
