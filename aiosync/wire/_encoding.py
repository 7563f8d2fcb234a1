"""Making frames: the fixed prefix, and the header of a message behind it.

This module must never import asyncio, anyio or torch.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from aiosync.errors import LocalProtocolError
from aiosync.types import Limits
from aiosync.wire.manifest import DEFAULT_LIMITS
from aiosync.wire.messages import ExtValue, Message, encode_header

__all__ = [
    "MAGIC",
    "PREFIX",
    "PREFIX_NBYTES",
    "WIRE_VERSION",
    "encode_frame",
]

WIRE_VERSION = 1
"""Version of the wire format."""

MAGIC = b"AIOS"
"""The first bytes of every frame."""

PREFIX_NBYTES = 24
"""Bytes of the fixed prefix of a frame."""

PREFIX = struct.Struct("<4sBBHIIQ")
"""Magic, wire version, flags, reserved, header_nbytes, CRC-32 of the header, payload_nbytes."""

_pack_prefix = PREFIX.pack
_crc32 = zlib.crc32


def encode_frame(
    message: Message,
    payload_nbytes: int = 0,
    *,
    ext: Mapping[str, ExtValue] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """Encode prefix and header of one frame; the payload follows them on the link.

    Args:
        message: What to send.
        payload_nbytes: Bytes of the payload that will follow.
        ext: Entries that a transport adds for its peer, at most 64.
        limits: Bounds that the receiver is expected to have.

    Raises:
        LocalProtocolError: A field is illegal, or the header or payload is over the limits.
        ConfigError: A value in ``Update.values`` cannot travel.
    """
    if not 0 <= payload_nbytes <= limits.max_payload_nbytes:
        raise LocalProtocolError(
            f"a payload of {payload_nbytes} bytes is not allowed; "
            f"the limit is {limits.max_payload_nbytes}"
        )
    header = encode_header(message, ext=ext, limits=limits)
    prefix = _pack_prefix(MAGIC, WIRE_VERSION, 0, 0, len(header), _crc32(header), payload_nbytes)
    return prefix + header
