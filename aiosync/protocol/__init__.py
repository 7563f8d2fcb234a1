"""Bookkeeping of senders and receivers, without any I/O; the time is an argument.

Versions, what is under way to each receiver, the sum over several receivers, and the chunks of an
update.
This package must never import asyncio, anyio or torch.
"""

from aiosync.protocol.chunks import Assembly, ChunkPlan
from aiosync.protocol.outbox import MAX_IN_FLIGHT, Outbox, Outcome, WorkerLeft
from aiosync.protocol.send_tracker import SendTracker, validate_require
from aiosync.protocol.timeouts import validate_seconds, validate_timeout
from aiosync.protocol.versions import MAX_VERSION, Inbox, VersionClock, new_epoch

__all__ = [
    "MAX_IN_FLIGHT",
    "MAX_VERSION",
    "Assembly",
    "ChunkPlan",
    "Inbox",
    "Outbox",
    "Outcome",
    "SendTracker",
    "VersionClock",
    "WorkerLeft",
    "new_epoch",
    "validate_require",
    "validate_seconds",
    "validate_timeout",
]
