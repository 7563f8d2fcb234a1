"""What workers that come late, or are slow, need of the updates before the newest.

With ``strict=False`` an update may hold a part of the names, such as the adapters of a model. It
replaces only those of which it holds every name; the others come before it, in order. Each stays
an update of its own, as one that workers refuse must take no other with it; but where one was
replaced that is older than others, these come together with the newest: a worker never has what
the trainer never had. Must not import transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.sender.snapshots import Snapshot
from aiosync.tensors.buffer import merged
from aiosync.types import Limits

__all__ = ["Chain", "Group", "History", "names_of", "together"]

Group: TypeAlias = "tuple[Snapshot, ...]"
"""Updates that a worker applies as one, with the version of the last."""


def names_of(snapshots: Iterable[Snapshot]) -> set[str]:
    """Every name that some updates hold."""
    return set[str]().union(*(each.names for each in snapshots))


async def together(group: Group, limits: Limits) -> Snapshot:
    """One update that holds the newest of each name, in memory of its own.

    Raises:
        LocalProtocolError: Together they are beyond the limits.
    """
    for each in group:
        await each.fetched()
    try:
        layout, buffer, values = await asyncio.to_thread(merged, group, limits)
    except ConfigError as exc:
        raise LocalProtocolError(f"updates that waited cannot be put together: {exc}") from exc
    snapshot = Snapshot(layout, buffer, lambda: None, values, group[-1].version)
    snapshot.trace = group[-1].trace
    return snapshot


class Chain:
    """Updates that come one after the other. Has a reference to each.

    Attributes:
        groups: Oldest first.
    """

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups: list[Group] = [*groups]
        for group in self.groups:
            for each in group:
                each.retain()

    @property
    def version(self) -> int:
        """Of the last one; 0 for none."""
        return self.groups[-1][-1].version if self.groups else 0

    def snapshots(self) -> list[Snapshot]:
        """All of them, oldest first."""
        return [each for group in self.groups for each in group]

    def lacking(self, names: Collection[str]) -> list[Snapshot]:
        """Those that hold something which nothing newer holds: never more of them than names.

        Args:
            names: What the next one holds.
        """
        needed, newer = list[Snapshot](), set(names)
        for each in reversed(self.snapshots()):
            if not each.names <= newer:
                needed.append(each)
                newer |= each.names
        return needed[::-1]

    def add(self, group: Group, needed: Sequence[Snapshot], *, parts: bool) -> list[int]:
        """Put a group at the end, and leave out what is not needed before it.

        Args:
            group: What comes; takes over a reference to each.
            needed: See :meth:`lacking`.
            parts: What was between an update that is left out and this group comes with it.

        Returns:
            The versions of the groups that stay as they were.
        """
        groups, late, lost = list[Group](), list[Snapshot](), list[Snapshot]()
        for each in self.groups:
            kept = [snapshot for snapshot in each if snapshot in needed]
            lost += [snapshot for snapshot in each if snapshot not in needed]
            if len(kept) == len(each) and not (lost and parts):
                groups.append(each)
            else:
                late += kept
        self.groups = [*groups, (*late, *group)]
        for snapshot in lost:
            snapshot.release()
        return [each[-1].version for each in groups]

    def clear(self) -> None:
        """Give everything back."""
        groups, self.groups = self.groups, []
        for group in groups:
            for each in group:
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
        known = self.parts or snapshot.names <= names_of(chain.snapshots())
        return chain.lacking(snapshot.names) if known else []

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
