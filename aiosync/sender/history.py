"""What workers that come late, or are slow, need of the updates before the newest.

With ``strict=False`` an update may hold a part of the names, such as the adapters of a model. It
replaces only those of which it holds every name; the others come before it, in order. Each stays
an update of its own: one that workers refuse must take no other with it. Must not import torch,
nor transports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiosync.sender.snapshots import Snapshot

__all__ = ["History", "lacking"]


def lacking(older: Iterable[Snapshot], names: Iterable[str]) -> list[Snapshot]:
    """Of updates, oldest first, those that hold something which nothing newer holds.

    So there are never more of them than names.

    Args:
        older: The updates.
        names: What the next one holds.
    """
    needed, newer = list[Snapshot](), set(names)
    for each in reversed([*older]):
        if not each.names <= newer:
            needed.append(each)
            newer |= each.names
    return needed[::-1]


class History:
    """Updates that together hold the newest of each name, for everybody and for some.

    Nearly always that is one. Names that were never sent before are other weights, or a mistake
    that no worker can take: they come along with older ones only where the sender says that it
    sends parts. Keeps references to snapshots, and with that their memory.

    Args:
        num_workers: How many workers there can be; ``None`` for any number.
        parts: Updates hold parts of the names, also when these are new.

    Attributes:
        parts: As given; may change.
    """

    def __init__(self, num_workers: int | None, *, parts: bool = False) -> None:
        self._num_workers = num_workers
        self.parts = parts
        self._common: list[Snapshot] = []
        self._own: dict[int, list[Snapshot]] = {}  # of workers that got others than the rest

    def add(self, key: int | None, snapshot: Snapshot) -> None:
        """Register what was sent, newest last; takes over a reference.

        Args:
            key: To which worker; ``None`` for all that got no other one of the same version.
            snapshot: The update.
        """
        common = self._common
        if key is None and not self._own and len(common) == 1:  # as good as always
            [old] = common
            if old.layout is snapshot.layout and old.values.keys() == snapshot.values.keys():
                common[0] = snapshot
                old.release()  # last: a signal's handler may raise in between
                return
        if key is None:
            for idx, own in list(self._own.items()):
                if own[-1].version < snapshot.version:
                    self._extend(own, snapshot.retain())
                    if len(own) == 1:  # as everybody has it
                        _release(self._own.pop(idx))
            self._extend(common, snapshot)
            return
        if key not in self._own:
            older = [each for each in common if each.version < snapshot.version]
            self._own[key] = [each.retain() for each in older]
        self._extend(self._own[key], snapshot)
        if len(self._own) == self._num_workers:
            _release(common)  # nobody is left who would get it

    def for_worker(self, idx: int) -> Sequence[Snapshot]:
        """What this worker gets when it joins, in the order in which it was sent."""
        return self._own.get(idx, self._common)

    def version_for(self, idx: int) -> int:
        """Version of the last one of these; 0 for none."""
        chain = self._own.get(idx, self._common)
        return chain[-1].version if chain else 0

    def needed_before(self, idx: int, snapshot: Snapshot) -> Sequence[Snapshot]:
        """What this worker would get as well if ``snapshot`` came next."""
        return self._needed(self._own.get(idx, self._common), snapshot)

    def clear(self) -> None:
        """Give everything back."""
        for chain in (self._common, *self._own.values()):
            _release(chain)
        self._own.clear()

    def _needed(self, chain: Sequence[Snapshot], snapshot: Snapshot) -> list[Snapshot]:
        known = frozenset[str]().union(*(each.names for each in chain))
        if not (self.parts or snapshot.names <= known):
            return []
        return lacking(chain, snapshot.names)

    def _extend(self, chain: list[Snapshot], snapshot: Snapshot) -> None:
        """Put ``snapshot`` at the end, and leave out what no name needs any more."""
        needed, before = self._needed(chain, snapshot), chain[:]
        chain[:] = [*needed, snapshot]
        for each in before:
            if each not in needed:
                each.release()


def _release(chain: list[Snapshot]) -> None:
    while chain:
        chain.pop().release()
