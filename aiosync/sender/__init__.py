"""The trainer's side at run time: snapshots, links to the workers, and sends."""

from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.sender import WeightSender
from aiosync.sender.snapshots import How, Snapshot, SnapshotCopier
from aiosync.sender.update_chunks import Streaming

__all__ = [
    "How",
    "Snapshot",
    "SnapshotCopier",
    "Streaming",
    "WeightSender",
    "WorkerRegistry",
]
