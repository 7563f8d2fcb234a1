"""The wire format: bytes to messages and back, without any I/O.

Limits, framing, messages, the manifest, checksums and authentication. This package must never
import asyncio, anyio or torch, and pickles nothing. Its specification is
``docs/topics/wire-format.md``.
"""

from __future__ import annotations

from aiosync.wire._specs import MAX_WORKER_IDX
from aiosync.wire.auth import DialerAuth, ListenerAuth
from aiosync.wire.checksum import (
    CHECKSUM_NBYTES,
    RunningChecksum,
    checksum,
    state_checksum,
)
from aiosync.wire.events import EndOfStream, Event, Failed, FrameEnd, FrameStart, iter_events
from aiosync.wire.framing import (
    MAGIC,
    PREFIX_NBYTES,
    READ_AHEAD_NBYTES,
    WIRE_VERSION,
    FrameDecoder,
    encode_frame,
)
from aiosync.wire.manifest import (
    ALIGNMENT,
    DEFAULT_LIMITS,
    DIGEST_NBYTES,
    DTYPE_NBYTES,
    MANIFEST_VERSION,
    MAX_ALIASES,
    NO_LIMITS,
    LeafKind,
    LeafSpec,
    Manifest,
    ManifestEntry,
    plan_manifest,
)
from aiosync.wire.messages import (
    MAX_ERROR_TEXT_NBYTES,
    MAX_ERROR_TYPE_NBYTES,
    Ack,
    Challenge,
    Current,
    ExtValue,
    Fetch,
    Hello,
    ManifestMessage,
    Message,
    PageMessage,
    Promise,
    Proof,
    Refuse,
    Segment,
    Setup,
    Status,
    Take,
    Update,
    Welcome,
    decode_header,
    encode_header,
)
from aiosync.wire.packing import MAX_DEPTH, MAX_ITEMS, encode_values

__all__ = [
    "ALIGNMENT",
    "CHECKSUM_NBYTES",
    "DEFAULT_LIMITS",
    "DIGEST_NBYTES",
    "DTYPE_NBYTES",
    "MAGIC",
    "MANIFEST_VERSION",
    "MAX_ALIASES",
    "MAX_DEPTH",
    "MAX_ERROR_TEXT_NBYTES",
    "MAX_ERROR_TYPE_NBYTES",
    "MAX_ITEMS",
    "MAX_WORKER_IDX",
    "NO_LIMITS",
    "PREFIX_NBYTES",
    "READ_AHEAD_NBYTES",
    "WIRE_VERSION",
    "Ack",
    "Challenge",
    "Current",
    "DialerAuth",
    "EndOfStream",
    "Event",
    "ExtValue",
    "Failed",
    "Fetch",
    "FrameDecoder",
    "FrameEnd",
    "FrameStart",
    "Hello",
    "LeafKind",
    "LeafSpec",
    "ListenerAuth",
    "Manifest",
    "ManifestEntry",
    "ManifestMessage",
    "Message",
    "PageMessage",
    "Promise",
    "Proof",
    "Refuse",
    "RunningChecksum",
    "Segment",
    "Setup",
    "Status",
    "Take",
    "Update",
    "Welcome",
    "checksum",
    "decode_header",
    "encode_frame",
    "encode_header",
    "encode_values",
    "iter_events",
    "plan_manifest",
    "state_checksum",
]
