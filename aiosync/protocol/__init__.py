"""Bookkeeping of senders and receivers, without any I/O; the time is an argument.

Versions, what is under way to each receiver, the sum over several receivers, the chunks of an
update, and what users may pass as times, counts and indices. This package must never import
asyncio, anyio or torch.
"""

from aiosync.protocol.arguments import (
    as_count,
    as_index,
    as_indices,
    validate_require,
    validate_seconds,
    validate_timeout,
)
from aiosync.protocol.chunks import Assembly, ChunkPlan
from aiosync.protocol.outbox import MAX_IN_FLIGHT, Outbox, Outcome, WorkerLeft
from aiosync.protocol.send_tracker import SendTracker
from aiosync.protocol.versions import MAX_VERSION, Inbox, VersionClock

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
    "as_count",
    "as_index",
    "as_indices",
    "validate_require",
    "validate_seconds",
    "validate_timeout",
]
