"""A short cut for the messages that are sent all the time: only one number in them changes.

The header of such a message is the map of any other, with its counter last and packed as a
64-bit unsigned integer. So the bytes before the counter can be reused when encoding, and a
decoder that has checked them once need not do it again: equal bytes decode equally. This module
must never import asyncio, anyio or torch.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "COUNTER_NBYTES",
    "MAX_COUNTER",
    "CountedFrame",
    "Maker",
    "Repeat",
    "Templates",
    "counter_of",
    "join",
    "with_counter",
]

COUNTER_NBYTES = 8
_MAX_TEMPLATES = 64
_UINT64 = 0xCF
_WIDE = 2**63  # packed as a 64-bit unsigned integer by msgpack
MAX_COUNTER = 2**63 - 1
_pack_counter = struct.Struct(">Q").pack

Maker = Callable[[int], Any]
"""Makes the message again, with another counter."""

Repeat = Callable[[int], None]
"""Handles a message that is one seen before but for its counter."""

_CRC_AT, _PAYLOAD_AT, _HEADER_AT = 12, 16, 24  # in the prefix of a frame
_pack_crc = struct.Struct("<I").pack


class CountedFrame:
    """A frame without payload that is sent again and again with another counter.

    Args:
        frame: The frame, as ``encode_frame()`` made it; its header ends with the counter.
    """

    __slots__ = ("_crc", "_head", "_rest")

    def __init__(self, frame: bytes) -> None:
        self._head = frame[:_CRC_AT]
        self._rest = frame[_PAYLOAD_AT:-COUNTER_NBYTES]
        self._crc = zlib.crc32(frame[_HEADER_AT:-COUNTER_NBYTES])

    def encode(self, counter: int) -> bytes:
        """The frame with another counter, 1 to 2**63 - 1."""
        tail = _pack_counter(counter)
        return self._head + _pack_crc(zlib.crc32(tail, self._crc)) + self._rest + tail


class Templates(dict[Any, Any]):
    """Bytes that were seen before a counter, with what they stand for. Bounded."""

    def put(self, key: object, value: object) -> None:
        """Remember one; all are forgotten when there are too many."""
        if len(self) >= _MAX_TEMPLATES:
            self.clear()
        self[key] = value


def with_counter(
    header: Mapping[str, Any], name: str, pack: Callable[[dict[str, Any]], bytes]
) -> bytes:
    """The bytes of a header up to its counter ``name``, which is moved to the end."""
    rest = {key: value for key, value in header.items() if key != name}
    return pack({**rest, name: _WIDE})[:-COUNTER_NBYTES]


def join(template: bytes, counter: object) -> bytes | None:
    """A whole header; ``None`` when the counter is not one that may travel."""
    if type(counter) is not int or not 0 < counter <= MAX_COUNTER:
        return None
    return template + _pack_counter(counter)


def counter_of(header: memoryview) -> int:
    """The counter that ends ``header``, or 0 when it does not end with a 64-bit integer."""
    if len(header) <= COUNTER_NBYTES or header[-COUNTER_NBYTES - 1] != _UINT64:
        return 0
    counter = int.from_bytes(header[-COUNTER_NBYTES:])
    return counter if counter <= MAX_COUNTER else 0
