"""Updates that wait: for the link of a slow worker, and for workers that join later.

With ``strict=False`` an update may hold a part of the names, such as the adapters of a model. It
replaces the updates whose names it holds, mostly those of the same part; the others stay, and come
before it. There are never more of them than names. Each is delivered alone, as an update that
workers refuse must take no other with it. But where an older update was replaced, those after it
come together with the newest: a worker never has weights that the trainer never had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from aiosync._tasks import in_pool_thread
from aiosync.errors import ConfigError, LocalProtocolError, TransportBroken
from aiosync.sender.snapshots import Snapshot
from aiosync.tensors.joining import join_parts
from aiosync.types import Limits

__all__ = ["LateJoinerUpdates", "UpdateQueue", "still_needed"]


def still_needed(older: Sequence[Snapshot], newest: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the older snapshots that hold a name which nothing newer holds.

    Args:
        older: Oldest first; the result has the same order.
        newest: The snapshots that come next, delivered as one.
    """
    needed, newer = list[Snapshot](), set[str]()
    for each in reversed(older):
        # Updates mostly hold the same names, and comparing names is expensive.
        if len(newest) == 1 and each.holds_same(newest[0]):
            continue
        newer = newer or _names_of(newest)
        if not each.names <= newer:
            needed.append(each)
            newer |= each.names
    return needed[::-1]


def _names_of(snapshots: Iterable[Snapshot]) -> set[str]:
    return set[str]().union(*(each.names for each in snapshots))


class UpdateQueue:
    """Updates in the order in which they were sent. Holds a reference to each. Not thread-safe.

    Attributes:
        groups: The snapshots, oldest first; those of one tuple are delivered as one update, with
            the version of the last.
    """

    def __init__(self, groups: Iterable[tuple[Snapshot, ...]] = ()) -> None:
        self.groups: list[tuple[Snapshot, ...]] = [*groups]
        for each in self.snapshots():
            each.retain()

    @property
    def version(self) -> int:
        """Version of the last update; 0 for none."""
        return self.groups[-1][-1].version if self.groups else 0

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots, oldest first."""
        return [each for group in self.groups for each in group]

    def add(self, group: tuple[Snapshot, ...], *, parts: bool) -> list[int]:
        """Append an update, and release the older snapshots that it replaces.

        Args:
            group: The next update; the queue takes over a reference to each snapshot.
            parts: Updates hold parts of the names. If not, names that the update lacks are a
                mistake or another model, and are never delivered together with it.

        Returns:
            The versions that are not delivered any more, or only together with this one.
        """
        older = self.snapshots()
        needed = still_needed(older, group)
        alone, together, replaced = list[tuple[Snapshot, ...]](), list[Snapshot](), list[int]()
        for each in self.groups:
            kept = [snapshot for snapshot in each if snapshot in needed]
            if len(kept) == len(each) and not (replaced and parts):
                alone.append(each)
            else:
                together += kept
                replaced.append(each[-1].version)
        self.groups = [*alone, (*together, *group)]
        for snapshot in older:
            if snapshot not in needed:
                snapshot.release()
        return replaced

    def replace(self, snapshot: Snapshot) -> None:
        """Hold only this snapshot; take over a reference."""
        self._set([(snapshot,)])

    def clear(self) -> None:
        """Release every snapshot."""
        self._set([])

    def _set(self, groups: list[tuple[Snapshot, ...]]) -> None:
        # Release the snapshots last: a signal's handler may raise in between.
        older, self.groups = self.snapshots(), groups
        for each in older:
            each.release()


class LateJoinerUpdates:
    """Updates for workers that join later: the common ones, and those of single workers.

    Nearly always that is one update. Names that were never sent before are other weights, or a
    mistake that no worker can take: they replace all older updates, unless the sender says that it
    sends parts. Keeps references to snapshots, and thereby their memory.

    Args:
        parts: Updates hold parts of the names, even if the names are new.
        num_workers: Largest number of workers, if no client beside them can pull; ``None`` for any
            number.

    Attributes:
        parts: As given; may change.
    """

    def __init__(self, parts: bool, num_workers: int | None) -> None:
        self.parts = parts
        self._num_workers = num_workers
        self._common = UpdateQueue()
        # Queues of workers that got other updates than the rest.
        self._own: dict[int, UpdateQueue] = {}
        # Joins that some link sends or waits for.
        self._joins: WeakValueDictionary[tuple[Snapshot, ...], Snapshot] = WeakValueDictionary()
        self._turns: WeakValueDictionary[tuple[Snapshot, ...], asyncio.Lock] = WeakValueDictionary()

    async def join(self, snapshots: Sequence[Snapshot], limits: Limits) -> Snapshot:
        """Return one update that holds the newest of each name, in memory of its own if need be.

        Calls for the same snapshots share that memory, as long as it is used.

        Args:
            snapshots: Oldest first; at least one. The caller keeps its references to them.
            limits: Bounds on the whole.

        Returns:
            A snapshot with the version of the last; the caller owns a reference to it.

        Raises:
            LocalProtocolError: Together the updates exceed the limits.
            TransportBroken: There is no memory for the whole, or no thread.
        """
        newest, group = snapshots[-1], tuple(snapshots)
        if len(snapshots) == 1:
            return newest.retain()
        for each in snapshots:
            await each.in_memory()
        async with self._turns.setdefault(group, asyncio.Lock()):
            joined = self._joins.get(group)
            if joined is not None and joined.in_use:
                return joined.retain()
            try:
                layout, buffer, values = await in_pool_thread(join_parts, snapshots, limits)
            except ConfigError as exc:
                text = f"updates that waited cannot be put together: {exc}"
                raise LocalProtocolError(text) from exc
            except (MemoryError, RuntimeError) as exc:
                text = f"updates that waited cannot be put together: {exc}"
                raise TransportBroken(text) from exc
            self._joins[group] = joined = Snapshot(
                layout, buffer, lambda: None, values, newest.version
            )
            joined.trace = newest.trace
            return joined

    def add(
        self, snapshots: Mapping[int | None, Snapshot], targets: Iterable[int] | None = None
    ) -> None:
        """Register the updates of a version that was sent, the newest; take over references.

        Args:
            snapshots: Updates by worker; under ``None`` that of workers without one of their own.
            targets: Workers that got the version, also lost ones, which get it when they come
                back; ``None`` for all.
        """
        if targets is not None:
            self._add_for(targets, snapshots)
            return
        groups = self._common.groups
        for key, snapshot in snapshots.items():
            # The usual case first: one update, replaced by another one of the same names.
            if key is None and not self._own and len(groups) == 1 and len(groups[0]) == 1:
                [(old,)] = groups
                if old.layout is snapshot.layout and old.values.keys() == snapshot.values.keys():
                    self._common.groups = [(snapshot,)]
                    # Release it last: a signal's handler may raise in between.
                    old.release()
                    continue
            if key is None:
                self._add_for_all(snapshot)
            else:
                self._add_for_one(key, snapshot)

    def _add_for_all(self, snapshot: Snapshot) -> None:
        """Add an update to the common queue, and to each worker's own queue that lacks it."""
        for idx, own in list(self._own.items()):
            if own.version < snapshot.version:
                self._extend(own, snapshot.retain())
                # The worker needs no queue of its own that holds only the update for all.
                if own.snapshots() == [snapshot]:
                    self._own.pop(idx).clear()
        self._extend(self._common, snapshot)

    def _add_for_one(self, idx: int, snapshot: Snapshot) -> None:
        """Add an update to a worker's own queue, which begins with the common updates before."""
        if idx not in self._own:
            # The common update of the same version may be there already: it is for the others.
            older = [each for each in self._common.groups if each[-1].version < snapshot.version]
            self._own[idx] = UpdateQueue(older)
        self._extend(self._own[idx], snapshot)
        if len(self._own) == self._num_workers:
            # Every worker has a queue of its own, so no worker would get the common one.
            self._common.clear()

    def _add_for(self, targets: Iterable[int], snapshots: Mapping[int | None, Snapshot]) -> None:
        """Add its update to the own queue of each target; release the caller's references."""
        for idx in targets:
            mine = snapshots.get(idx, snapshots.get(None))
            if mine is not None:
                self._add_for_one(idx, mine.retain())
        for snapshot in snapshots.values():
            snapshot.release()

    def for_worker(self, idx: int) -> UpdateQueue:
        """Return the updates that this worker gets when it joins, in the order of the sends."""
        return self._own.get(idx, self._common)

    def is_in_parts_for(self, idx: int) -> bool:
        """Return True if this worker would get several updates, alone or joined, when it joins."""
        return len(self.for_worker(idx).snapshots()) > 1

    def whole(self, newest: Snapshot) -> list[Snapshot]:
        """Return the snapshots that together are the whole model once ``newest`` was added."""
        return self._with_needed(self._common, newest)

    def lacked(self, idx: int, has: int, newest: Snapshot) -> list[Snapshot]:
        """Return ``newest`` after those older ones that it needs and a worker was not offered.

        Args:
            idx: Index of the worker.
            has: Newest version that the worker was offered.
            newest: The next update, which is not added yet.
        """
        needed = self._with_needed(self.for_worker(idx), newest)
        return [each for each in needed if each.version > has]

    def _with_needed(self, queue: UpdateQueue, newest: Snapshot) -> list[Snapshot]:
        """Return the snapshots that a queue would hold with ``newest``, which is the last."""
        older = queue.snapshots()
        return [*(still_needed(older, [newest]) if self._adds(older, newest) else ()), newest]

    def forget(self, idx: int) -> None:
        """Drop a worker's own queue: the next worker of this index gets what the others get."""
        self._own.pop(idx, UpdateQueue()).clear()

    def clear(self) -> None:
        """Release every snapshot."""
        for queue in (self._common, *self._own.values()):
            queue.clear()
        self._own.clear()

    def _extend(self, queue: UpdateQueue, snapshot: Snapshot) -> None:
        """Add an update to a queue, or put it in place of all there if it is of another model."""
        if self._adds(queue.snapshots(), snapshot):
            queue.add((snapshot,), parts=self.parts)
        else:
            queue.replace(snapshot)

    def _adds(self, older: Sequence[Snapshot], newest: Snapshot) -> bool:
        """Return True if an update adds to the older ones, False if it is of another model."""
        return self.parts or newest.names <= _names_of(older)
