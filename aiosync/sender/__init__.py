"""The trainer's runtime: what a scheme does while it is a sender."""

from aiosync.sender.chunks import Streaming
from aiosync.sender.sender import WeightSender
from aiosync.sender.snapshots import How, Planned, Snapshot, SnapshotCopier
from aiosync.sender.workers import WorkerRegistry

__all__ = [
    "How",
    "Planned",
    "Snapshot",
    "SnapshotCopier",
    "Streaming",
    "WeightSender",
    "WorkerRegistry",
]
