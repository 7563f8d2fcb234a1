"""Making snapshots: planning the copy of a model and carrying it out, on the loop or on threads.

Must not import a transport, nor a concrete scheme.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.schemes._snapshots import Snapshot, SnapshotStore
from aiosync.tensors import (
    CastingFlattener,
    CastPrepared,
    CopyPool,
    Dtypes,
    FlatBuffer,
    Flattener,
    LiveBytes,
    Prepared,
    copy_bytes,
    sharded_names,
)
from aiosync.transports._carrier import COPYING, KEPT, Progress, outlast
from aiosync.transports._link import without_frames
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS

__all__ = ["Planned", "SnapshotMaker"]

# Copies up to this size run on the loop: a hop to a thread costs more than they do.
_INLINE_NBYTES = 4 * 2**20
_AHEAD_NBYTES = 2 * 2**20  # between two words of how far a copy is


class Planned(NamedTuple):
    """Weights that were looked at, and who planned their copy."""

    flattener: Flattener | CastingFlattener
    prepared: Prepared

    @property
    def is_cast(self) -> bool:
        """Whether the bytes that are sent are other ones than the tensors have."""
        return isinstance(self.prepared, CastPrepared)


class SnapshotMaker:
    """Copies weights into snapshots, on the loop when small and on plain threads when big.

    Args:
        store: Where the snapshots are kept.
        extract_as: What travels of a module.
        wire_dtype: What floating-point tensors are cast to on the way; ``None`` for nothing.
        limits: Bounds that the receivers are expected to have; ``None`` for the defaults.

    Attributes:
        has_slots: Other processes may read the snapshots.
    """

    def __init__(
        self,
        store: SnapshotStore,
        extract_as: Literal["tensordict", "state_dict"],
        wire_dtype: Dtypes | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or DEFAULT_LIMITS
        self._store = store
        self.has_slots: bool = store.has_slots
        self._extract_as = extract_as
        self._wire_dtype = wire_dtype
        self._flatteners: dict[int, Flattener | CastingFlattener] = {}
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
            more = f" and {len(sharded) - 3} more" if len(sharded) > 3 else ""
            raise ConfigError(
                f"these weights are sharded over the ranks of a mesh: {', '.join(sharded[:3])}"
                f"{more}. Call `weights = aiosync.gather_weights(model)` on every rank, and "
                "send(weights) on the one that sends"
            ) from exc

    def take_nowait(self, planned: Planned) -> Snapshot:
        """Copy now, on this thread."""
        snapshot = self._store.acquire_nowait(planned.prepared.layout.nbytes)
        return self._fill(snapshot, planned)

    def take_free(self, planned: Planned) -> Snapshot | None:
        """Copy now if the source is small, and memory for it is free."""
        nbytes = planned.prepared.layout.nbytes
        snapshot = self._store.acquire_free(nbytes) if nbytes <= _INLINE_NBYTES else None
        return None if snapshot is None else self._fill(snapshot, planned)

    async def take(self, planned: Planned) -> Snapshot:
        """Copy without holding the loop for long.

        Cancellation: safe; a copy under way on a thread is waited for, and its memory kept.
        """
        nbytes = planned.prepared.layout.nbytes
        snapshot = await self._store.acquire(nbytes, self._in_thread)
        if nbytes <= _INLINE_NBYTES:
            return self._fill(snapshot, planned)
        copying = self._start_copy(planned, snapshot.buffer)
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
        live = self._live(planned)
        if live is None:
            return await self.take(planned)
        snapshot = self._describe(
            self._store.acquire_private(planned.prepared.layout.nbytes), planned
        )
        snapshot.live, snapshot.planned = live, planned
        return snapshot

    @staticmethod
    def _live(planned: Planned) -> LiveBytes | None:
        layout = planned.prepared.layout
        if layout.nbytes <= _INLINE_NBYTES or planned.is_cast:
            return None
        return LiveBytes.of(layout, planned.prepared.tensors)

    async def copy_ahead(self, planned: Planned) -> Snapshot:
        """As :meth:`take`, but return while large tensors are still being copied, in order.

        The tensors must not change until :meth:`copy` was awaited.
        """
        live = self._live(planned)
        if live is None:
            return await self.take(planned)
        nbytes = planned.prepared.layout.nbytes
        snapshot = self._describe(await self._store.acquire(nbytes, self._in_thread), planned)
        snapshot.planned = planned
        snapshot.memo[COPYING] = progress = Progress()
        self._start_executor()
        loop = asyncio.get_running_loop()
        args = (live, snapshot.buffer, nbytes, progress)
        snapshot.copying = loop.run_in_executor(self._executor, _copy_in_order, *args)
        return snapshot

    async def copy(self, snapshot: Snapshot) -> None:
        """Copy what was borrowed; the tensors may change afterwards.

        Cancellation: waits for the copy all the same, and is raised then.
        """
        planned = snapshot.planned
        copying = snapshot.copying
        if copying is None:
            if snapshot.live is None or planned is None or self._closed:
                return
            if KEPT in snapshot.memo:
                snapshot.live = snapshot.planned = None
                snapshot.never_copied = True
                return
            copying = self._start_filling(snapshot, planned, snapshot.buffer)
        cancelled = await outlast(copying)
        snapshot.live = None  # a task that is cancelled again and again is quicker than callbacks
        copying.result()
        snapshot.planned = snapshot.copying = None
        snapshot.memo.pop(COPYING, None)
        if cancelled is not None:
            raise cancelled

    async def bring(self, snapshot: Snapshot) -> None:
        """Bring the bytes into a slot, for links that have them read where they are.

        Does nothing where the store has no slots. :meth:`copy` may run at the same time. The
        caller has a reference.

        Raises:
            LocalProtocolError: The bytes are nowhere any more, or could not be copied.

        Cancellation:
            Waits for a copy under way all the same, and is raised then.
        """
        if snapshot.slot is not None and snapshot.copying is None:
            return
        snapshot.bringing = snapshot.bringing or asyncio.Lock()
        async with snapshot.bringing:  # once for all links that want it
            if snapshot.lost is not None:
                raise LocalProtocolError(str(snapshot.lost)) from snapshot.lost
            if snapshot.slot is not None or not self.has_slots:
                if snapshot.copying is not None:
                    await _completed(snapshot.copying)
                return
            try:
                await self._bring_into_slot(snapshot)
            except LocalProtocolError:
                raise
            except (ConfigError, OSError, RuntimeError, MemoryError) as exc:
                # No descriptors, memory or threads: that must not end the sender.
                raise LocalProtocolError(
                    f"could not allocate memory for the weights: {exc}"
                ) from exc

    async def _bring_into_slot(self, snapshot: Snapshot) -> None:
        place = await self._store.acquire(snapshot.nbytes, self._in_thread)
        try:
            await self._fill_slot(place, snapshot)
        finally:
            place.release()

    async def _fill_slot(self, place: Snapshot, snapshot: Snapshot) -> None:
        copying, planned = snapshot.copying, snapshot.planned
        if copying is None and planned is not None and snapshot.live is not None:
            copying = self._start_filling(snapshot, planned, place.buffer)
            snapshot.move_to(place)
            await _completed(copying)
            return
        if copying is not None:
            await _completed(copying)
        pieces = [snapshot.payload()]
        if snapshot.never_copied:
            try:
                pieces = await snapshot.memo[KEPT]()
            except LocalProtocolError as exc:
                snapshot.lost = without_frames(exc)  # nobody else has to find out
                raise
        self._start_executor()
        loop = asyncio.get_running_loop()
        await _completed(loop.run_in_executor(self._executor, _join, pieces, place.buffer))
        snapshot.move_to(place)
        snapshot.never_copied = False

    def _start_executor(self) -> None:
        if self._closed:
            raise TransportClosed("this scheme was closed")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "aiosync-snapshot")
            self._pool = CopyPool()

    async def _in_thread(self, call: Callable[[], None]) -> None:
        self._start_executor()
        await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _start_copy(self, planned: Planned, flat: FlatBuffer) -> asyncio.Future[None]:
        self._start_executor()
        loop = asyncio.get_running_loop()
        copy_into = planned.flattener.copy_into
        call = functools.partial(copy_into, planned.prepared, flat, pool=self._pool)
        return loop.run_in_executor(self._executor, call)

    def _start_filling(
        self, snapshot: Snapshot, planned: Planned, flat: FlatBuffer
    ) -> asyncio.Future[None]:
        """Copy what is borrowed; whoever waits for that finds nothing borrowed any more."""

        def leave_tensors(_: asyncio.Future[None]) -> None:
            snapshot.live = None

        snapshot.copying = copying = self._start_copy(planned, flat)
        copying.add_done_callback(leave_tensors)  # before the caller's, which may change them
        return copying

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

    def close(self) -> None:
        """Join the copying threads and give the memory back."""
        self._closed = True
        if self._executor is not None and self._pool is not None:
            self._executor.shutdown(wait=True)
            self._pool.close()
            self._executor = self._pool = None
        self._store.close()


def _copy_in_order(live: LiveBytes, flat: FlatBuffer, nbytes: int, progress: Progress) -> None:
    """Copy a payload from its start on, and say how far it is."""
    target = flat.memoryview()
    try:
        for start in range(0, nbytes, _AHEAD_NBYTES):
            stop, at = min(start + _AHEAD_NBYTES, nbytes), start
            for view in live.views(start, stop):
                copy_bytes(target[at : at + view.nbytes], view)
                at += view.nbytes
            progress.advance(stop)
    except BaseException as exc:  # send() raises it, and so does every link that waits
        progress.fail(exc)
        raise


def _join(pieces: Sequence[memoryview], flat: FlatBuffer) -> None:
    target, at = flat.memoryview(), 0
    for piece in pieces:
        copy_bytes(target[at : at + piece.nbytes], piece)
        at += piece.nbytes


async def _completed(copying: asyncio.Future[None]) -> None:
    cancelled = await outlast(copying)
    if cancelled is not None:
        copying.exception()  # seen by nobody, on purpose
        raise cancelled
    error = copying.exception()
    if error is not None:
        raise LocalProtocolError(f"the weights could not be copied: {error}") from error


def _after_cancel(copying: asyncio.Future[None], snapshot: Snapshot) -> None:
    """The copy that nobody waits for any more has ended: its memory may be used again."""
    if not copying.cancelled():
        copying.exception()
    snapshot.release()
