"""Bookkeeping of senders and receivers, without any I/O; the time is an argument.

Versions, the chunks of an update, and what users may pass as times, counts and indices. This
package must never import asyncio, anyio or torch.
"""

from aiosync.protocol.arguments import (
    as_chunk_nbytes,
    as_count,
    as_index,
    as_indices,
    as_version,
    seconds_text,
    validate_require,
    validate_seconds,
    validate_timeout,
)
from aiosync.protocol.updates import MAX_VERSION, Assembly, Inbox, draw_epoch

__all__ = [
    "MAX_VERSION",
    "Assembly",
    "Inbox",
    "as_chunk_nbytes",
    "as_count",
    "as_index",
    "as_indices",
    "as_version",
    "draw_epoch",
    "seconds_text",
    "validate_require",
    "validate_seconds",
    "validate_timeout",
]
