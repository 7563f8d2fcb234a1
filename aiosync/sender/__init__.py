"""The trainer's runtime: what a scheme does while it is a sender."""

from __future__ import annotations

from aiosync.sender.snapshots import Planned, Snapshot, SnapshotCopier

__all__ = ["Planned", "Snapshot", "SnapshotCopier"]
