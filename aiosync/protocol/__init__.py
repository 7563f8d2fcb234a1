"""Bookkeeping of updates and checks of arguments, without any I/O.

The order of versions, the chunks of an update, and the times, counts and indices that users pass.
This package must never import asyncio, anyio or torch.
"""

from aiosync.protocol.arguments import (
    as_chunk_nbytes,
    as_count,
    as_index,
    as_indices,
    as_names,
    as_pids,
    as_version,
    finite_or_none,
    seconds_text,
    validate_require,
    validate_schemes,
    validate_seconds,
    validate_timeout,
)
from aiosync.protocol.assembly import Assembly
from aiosync.protocol.ledger import Answer, Ledger, Refusal
from aiosync.protocol.version_order import MAX_VERSION, Inbox, draw_epoch

__all__ = [
    "MAX_VERSION",
    "Answer",
    "Assembly",
    "Inbox",
    "Ledger",
    "Refusal",
    "as_chunk_nbytes",
    "as_count",
    "as_index",
    "as_indices",
    "as_names",
    "as_pids",
    "as_version",
    "draw_epoch",
    "finite_or_none",
    "seconds_text",
    "validate_require",
    "validate_schemes",
    "validate_seconds",
    "validate_timeout",
]
