"""The table of all messages: their names on the wire and their fields. Internal to the package.

The messages are written down in ``docs/topics/wire-format.md``. This module must never import
asyncio, anyio or torch.
"""

from __future__ import annotations

from typing import NamedTuple

from aiosync.wire._fields import (
    MAX_ERROR_TEXT_NBYTES,
    MAX_ERROR_TYPE_NBYTES,
    REQUIRED,
    Convert,
    Field,
    bool_field,
    bytes_field,
    chunk_field,
    clipped_field,
    int_field,
    manifest_field,
    status_field,
    str_field,
    values_field,
)
from aiosync.wire._message_types import (
    Ack,
    Challenge,
    Current,
    Fetch,
    Hello,
    ManifestMessage,
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
)
from aiosync.wire.manifest import DIGEST_NBYTES

__all__ = [
    "FIELDS",
    "MAX_CHECKSUM_NBYTES",
    "MAX_MAC_NBYTES",
    "MAX_SETUP_NBYTES",
    "MAX_WORKER_IDX",
    "NONCE_NBYTES",
    "SESSION_NBYTES",
    "SPECS",
    "Spec",
]

MAX_CHECKSUM_NBYTES = 64
"""Bytes of a payload's checksum."""

MAX_MAC_NBYTES = 64
"""Bytes of an authentication code."""

NONCE_NBYTES = 32
"""Bytes of a nonce."""

SESSION_NBYTES = 16
"""Bytes of a session's name."""

MAX_SETUP_NBYTES = 32768
"""Bytes of one step of a set-up."""

MAX_WORKER_IDX = 2**31 - 1
"""The highest index of a worker, and number of workers."""

_U32 = 2**32 - 1
_SLOTS = 65535

_EPOCH = int_field("epoch", 1)
_VERSION = int_field("version", 1)
_NONCE = bytes_field("nonce", NONCE_NBYTES, NONCE_NBYTES)


def _checksum(name: str) -> Field:
    return bytes_field(name, 1, MAX_CHECKSUM_NBYTES, None)


FIELDS: dict[type, tuple[str, tuple[Field, ...]]] = {
    Hello: (
        "hello",
        (
            str_field("role"),
            str_field("model_id", empty=True),
            int_field("pid", 0, _U32),
            int_field("worker_idx", 0, MAX_WORKER_IDX, default=None),
            str_field("strategy", "tensordict"),
            bool_field("has_target", True),
            int_field("epoch", 1, default=None),
            int_field("version", 0, default=None),
            bytes_field("session", SESSION_NBYTES, SESSION_NBYTES, None),
            bool_field("subscribe", True),
            int_field("partial_epoch", 1, default=None),
            int_field("partial_version", 1, default=None),
            int_field("partial_nbytes", 0, default=0),
            bool_field("parts", False),
            bool_field("slots", False),
        ),
    ),
    Welcome: (
        "welcome",
        (
            _EPOCH,
            int_field("version", 0),
            int_field("worker_idx", 0, MAX_WORKER_IDX),
            int_field("num_workers", 0, MAX_WORKER_IDX, default=None),
        ),
    ),
    Refuse: (
        "refuse",
        (
            clipped_field("error_type", MAX_ERROR_TYPE_NBYTES),
            clipped_field("error_text", MAX_ERROR_TEXT_NBYTES),
        ),
    ),
    ManifestMessage: ("manifest", (manifest_field("manifest"),)),
    Update: (
        "update",
        (
            _EPOCH,
            _VERSION,
            bytes_field("digest", DIGEST_NBYTES, DIGEST_NBYTES),
            str_field("codec", "dense"),
            values_field("values"),
            chunk_field("chunk"),
            _checksum("checksum"),
            _checksum("state"),
        ),
    ),
    Ack: (
        "ack",
        (
            _EPOCH,
            _VERSION,
            status_field("status"),
            clipped_field("error_type", MAX_ERROR_TYPE_NBYTES, ""),
            clipped_field("error_text", MAX_ERROR_TEXT_NBYTES, ""),
        ),
    ),
    Segment: (
        "segment",
        (
            int_field("segment_id", 0),
            int_field("slot_nbytes", 0),
            int_field("num_slots", 1, _SLOTS),
        ),
    ),
    PageMessage: ("page", ()),
    Take: ("take", (_EPOCH, int_field("version", 0))),
    Promise: ("promise", (bytes_field("digest", 0, DIGEST_NBYTES),)),
    Challenge: ("challenge", (_NONCE, bool_field("required", True))),
    Proof: ("proof", (_NONCE, bytes_field("mac", 0, MAX_MAC_NBYTES))),
    Fetch: ("fetch", (int_field("min_version", 0),)),
    Current: ("current", (_EPOCH, int_field("version", 0))),
    Status: ("status", (values_field("values"),)),
    Setup: (
        "setup",
        (
            str_field("kind"),
            str_field("key", "", empty=True),
            bytes_field("value", 0, MAX_SETUP_NBYTES, b""),
        ),
    ),
}
"""For each message its name on the wire, and its fields in the order of the constructor."""


class Spec(NamedTuple):
    """How a message is read.

    Attributes:
        cls: The message's type.
        loads: For each field, what checks and converts it.
        required: Fields without a default.
    """

    cls: type
    loads: dict[str, Convert]
    required: frozenset[str]


SPECS: dict[str, Spec] = {
    name: Spec(
        cls,
        {each.name: each.load for each in fields},
        frozenset(each.name for each in fields if each.default is REQUIRED),
    )
    for cls, (name, fields) in FIELDS.items()
}
"""For each name on the wire, how to read the message."""
