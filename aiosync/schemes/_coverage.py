"""Which updates of one worker may replace which: one that lacks something of another may not.

With ``strict=False`` an update may hold a part of the names, such as the adapters of a model. An
update replaces only those of which it holds every name. Must not import torch, nor transports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiosync.protocol import Outbox
    from aiosync.sender.snapshots import Snapshot
    from aiosync.tensors import Layout

__all__ = ["Coverage", "names_of"]


class Coverage:
    """What the unresolved updates of one worker hold."""

    __slots__ = ("_layout", "_values", "_waiting")

    def __init__(self) -> None:
        # Of the newest that did not have to wait: it holds all that is on its way.
        self._layout: Layout | None = None
        self._values: frozenset[str] = frozenset()
        self._waiting: dict[int, frozenset[str]] = {}  # names, by version

    def keeps(self, snapshot: Snapshot, outbox: Outbox) -> frozenset[int] | None:
        """Whether ``snapshot``, which is offered next, has to wait for those before it.

        Returns:
            The waiting versions that it must not replace; ``None`` if it may replace all.
        """
        layout, known = snapshot.layout, self._layout
        if not self._waiting and snapshot.values.keys() == self._values:
            if layout is known or (known is not None and layout.digest == known.digest):
                return None
        if outbox.is_idle:
            self._set(snapshot)
            return None
        names = names_of(snapshot)
        kept, newer = set[int](), set(names)
        # Newer ones may hold all of an older one together: no more wait than there are names.
        for version, held in reversed(self._waiting.items()):
            if not held <= newer:
                kept.add(version)
                newer |= held
        under_way = frozenset[str]() if known is None else _names(known) | self._values
        if not kept and under_way <= names:
            self._set(snapshot)
            return None
        stay = {*kept, outbox.pending}  # which is on its way already
        self._waiting = {
            version: held for version, held in self._waiting.items() if version in stay
        }
        self._waiting[snapshot.version] = names
        return frozenset(kept)

    def take(self, snapshot: Snapshot) -> None:
        """It is on its way now, and alone there if it had to wait."""
        if self._waiting.pop(snapshot.version, None) is not None:
            self._layout, self._values = snapshot.layout, frozenset(snapshot.values)

    def _set(self, snapshot: Snapshot) -> None:
        self._layout, self._values = snapshot.layout, frozenset(snapshot.values)
        self._waiting.clear()


def names_of(snapshot: Snapshot) -> frozenset[str]:
    """Every name that an update holds."""
    return _names(snapshot.layout) | snapshot.values.keys()


def _names(layout: Layout) -> frozenset[str]:
    leaves = layout.manifest.leaves
    return frozenset(name for leaf in leaves for name in (leaf.name, *leaf.aliases))
