"""What is on its way to a weight server's disk. Must not import the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiosync.schemes._snapshots import Snapshot
from aiosync.server._merging import Part, merged
from aiosync.server._store import StoredUpdate, WeightStore
from aiosync.transports.tcp import TCPTransport

__all__ = ["Unsaved", "save_whole"]


@dataclass(slots=True, eq=False)
class Unsaved:
    """A version that has to reach the disk before it is served.

    Attributes:
        link: Who brought it, and is told what became of it.
        snapshot: The version; a reference is held.
        update: The same, as the store takes it.
        overtaken: Versions of this link that waited, and that this one replaced.
    """

    link: TCPTransport
    snapshot: Snapshot
    update: StoredUpdate
    overtaken: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def save_whole(
    store: WeightStore, model_id: str, update: StoredUpdate, older: Sequence[Part]
) -> None:
    """Write a version, with what it lacks of those before it. Blocking.

    Args:
        store: Where to.
        model_id: Whose version it is.
        update: The version.
        older: What else is served, oldest first.

    Raises:
        StoreError: It cannot be written.
    """
    if older:  # an update of some names is no whole model
        part = Part(update.layout, update.buffer, update.values)
        update = dataclasses.replace(update, **merged([*older, part], store.limits)._asdict())
    store.save(model_id, update)
