"""What a worker that joins later gets: the newest update of each name.

Nearly always that is one update. With ``strict=False`` an update may hold a part of the names;
then it is the newest that holds the others, and this one after it. Names that were never sent
before are other weights, or a mistake that no worker can take: they come along with older ones
only where the sender says that it sends parts. Must not import torch, nor transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiosync.schemes._coverage import names_of

if TYPE_CHECKING:
    from aiosync.sender.snapshots import Snapshot

__all__ = ["Latest"]


class _Kept(NamedTuple):
    snapshot: Snapshot
    names: frozenset[str] | None  # taken when somebody asks


class Latest:
    """Updates that together hold the newest of each name, for everybody and for some.

    Keeps references to snapshots, and with that their memory: no more of them than there are
    names.

    Args:
        num_workers: How many workers there can be; ``None`` for any number.
        parts: Updates hold parts of the names, also when these are new.

    Attributes:
        parts: As given; may change.
    """

    def __init__(self, num_workers: int | None, *, parts: bool = False) -> None:
        self._num_workers = num_workers
        self.parts = parts
        self._common: list[_Kept] = []
        self._own: dict[int, list[_Kept]] = {}  # of workers that got others than the rest

    def add(self, key: int | None, snapshot: Snapshot) -> None:
        """Register what was sent, newest last; takes over a reference.

        Args:
            key: To which worker; ``None`` for all that got no other one of the same version.
            snapshot: The update.
        """
        if key is None and not self._own and len(self._common) == 1:  # as good as always
            only = self._common[0]
            same_layout = only.snapshot.layout is snapshot.layout
            if (same_layout and not snapshot.values) or _same_names(only.snapshot, snapshot):
                self._common[0] = _Kept(snapshot, only.names)
                only.snapshot.release()  # last: a signal's handler may raise in between
                return
        if key is not None:
            own = self._own.get(key)
            if own is None:
                own = [each for each in self._common if each.snapshot.version < snapshot.version]
                for each in own:
                    each.snapshot.retain()
            self._own[key] = self._extended(own, snapshot)
            if len(self._own) == self._num_workers:
                self._common = _released(self._common)  # nobody is left who would get it
            return
        for idx, own in list(self._own.items()):
            if own[-1].snapshot.version < snapshot.version:
                own = self._own[idx] = self._extended(own, snapshot.retain())
                if len(own) == 1:  # as everybody has it
                    _released(self._own.pop(idx))
        self._common = self._extended(self._common, snapshot)

    def for_worker(self, idx: int) -> Sequence[Snapshot]:
        """What this worker gets when it joins, in the order in which it was sent."""
        return [each.snapshot for each in self._own.get(idx, self._common)]

    def newest_for(self, idx: int) -> Snapshot | None:
        """The last one of these."""
        chain = self._own.get(idx, self._common)
        return chain[-1].snapshot if chain else None

    def needed_before(self, idx: int, snapshot: Snapshot) -> Sequence[Snapshot]:
        """What this worker would get as well if ``snapshot`` came next."""
        chain = self._own.get(idx, self._common)
        return [each.snapshot for each in self._needed(chain, snapshot)]

    def clear(self) -> None:
        """Give everything back."""
        for own in self._own.values():
            _released(own)
        self._own.clear()
        self._common = _released(self._common)

    def _extended(self, chain: list[_Kept], snapshot: Snapshot) -> list[_Kept]:
        """The chain with ``snapshot`` at its end, without those that no name needs any more."""
        kept = self._needed(chain, snapshot)
        needed = [each.snapshot for each in kept]
        _released([each for each in chain if each.snapshot not in needed])
        return [*kept, _Kept(snapshot, None)]

    def _needed(self, chain: list[_Kept], snapshot: Snapshot) -> list[_Kept]:
        if not chain:
            return []
        names = names_of(snapshot)
        chain = [_Kept(each, held or names_of(each)) for each, held in chain]
        if not self.parts and not names <= {name for _, held in chain for name in held or ()}:
            return []
        kept, newer = list[_Kept](), set(names)
        for each in reversed(chain):
            if each.names and not each.names <= newer:
                kept.append(each)
                newer |= each.names
        return kept[::-1]


def _same_names(one: Snapshot, other: Snapshot) -> bool:
    layout, values = one.layout, one.values
    return (
        layout is other.layout or layout.digest == other.layout.digest
    ) and values.keys() == other.values.keys()


def _released(chain: list[_Kept]) -> list[_Kept]:
    for each in chain:
        each.snapshot.release()
    return []
