"""Making snapshots: planning the copy of a model and carrying it out, on the loop or on threads.

Must not import a transport, nor a concrete scheme.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from aiosync.errors import ConfigError, TransportClosed
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
from aiosync.transports._carrier import COPYING, KEPT, Progress

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
    """

    def __init__(
        self,
        store: SnapshotStore,
        extract_as: Literal["tensordict", "state_dict"],
        wire_dtype: Dtypes | None = None,
    ) -> None:
        self._store = store
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
                Flattener(self._extract_as)
                if self._wire_dtype is None
                else CastingFlattener(self._extract_as, self._wire_dtype)
            )
        try:
            return Planned(flattener, flattener.prepare(source))
        except ConfigError as exc:
            # Gathering here would wait for ranks that may never come.
            sharded = sharded_names(source, self._extract_as)
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
        snapshot = await self._store.acquire(nbytes, self._in_thread)
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
        if layout.nbytes > _INLINE_NBYTES and not planned.is_cast:
            live = LiveBytes.of(layout, planned.prepared.tensors)
        if live is None:
            return await self.take(planned)
        snapshot = self._describe(
            await self._store.acquire(layout.nbytes, self._in_thread), planned
        )
        snapshot.live, snapshot.planned = live, planned
        return snapshot

    async def copy_ahead(self, planned: Planned) -> Snapshot:
        """As :meth:`take`, but return while large tensors are still being copied, in order.

        The tensors must not change until :meth:`copy` was awaited.
        """
        snapshot = await self.borrow(planned)
        live, snapshot.live = snapshot.live, None
        if live is not None:
            snapshot.memo[COPYING] = progress = Progress()
            self._start_executor()
            loop = asyncio.get_running_loop()
            args = (live, snapshot.buffer, snapshot.nbytes, progress)
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
                return
            copying = self._start_copy(snapshot, planned)
        cancelled: asyncio.CancelledError | None = None
        while not copying.done():
            try:
                await asyncio.wait({copying})
            except asyncio.CancelledError as exc:
                cancelled = exc
        copying.result()
        snapshot.live = snapshot.planned = snapshot.copying = None
        snapshot.memo.pop(COPYING, None)
        if cancelled is not None:
            raise cancelled

    def _start_executor(self) -> None:
        if self._closed:
            raise TransportClosed("this scheme was closed")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "aiosync-snapshot")
            self._pool = CopyPool()

    async def _in_thread(self, call: Callable[[], None]) -> None:
        self._start_executor()
        await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _start_copy(self, snapshot: Snapshot, planned: Planned) -> asyncio.Future[None]:
        self._start_executor()
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


def _after_cancel(copying: asyncio.Future[None], snapshot: Snapshot) -> None:
    """The copy that nobody waits for any more has ended: its memory may be used again."""
    if not copying.cancelled():
        copying.exception()
    snapshot.release()
