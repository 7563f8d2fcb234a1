"""A short cut for the messages that are sent all the time: only one number in them changes.

The header of such a message is the map of any other, with its counter last and packed as a
64-bit unsigned integer. So the bytes before the counter can be reused when encoding, and a
decoder that has checked them once need not do it again: equal bytes decode equally. This module
must never import asyncio, anyio or torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["COUNTER_NBYTES", "Maker", "Templates", "counter_of", "join", "with_counter"]

COUNTER_NBYTES = 8
_MAX_TEMPLATES = 64
_UINT64 = 0xCF
_WIDE = 2**63  # packed as a 64-bit unsigned integer by msgpack
_MAX_COUNTER = 2**63 - 1
_pack_counter = struct.Struct(">Q").pack

Maker = Callable[[int], Any]
"""Makes the message again, with another counter."""


class Templates:
    """Bytes that were seen before a counter, with what they stand for. Bounded."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def get(self, key: object) -> Any:
        """What :meth:`put` stored, or ``None``."""
        return self._known.get(key)

    def put(self, key: object, value: object) -> None:
        """Remember one; all are forgotten when there are too many."""
        if len(self._known) >= _MAX_TEMPLATES:
            self._known.clear()
        self._known[key] = value


def with_counter(
    header: Mapping[str, Any], name: str, pack: Callable[[dict[str, Any]], bytes]
) -> bytes:
    """The bytes of a header up to its counter ``name``, which is moved to the end."""
    rest = {key: value for key, value in header.items() if key != name}
    return pack({**rest, name: _WIDE})[:-COUNTER_NBYTES]


def join(template: bytes, counter: object) -> bytes | None:
    """A whole header; ``None`` when the counter is not one that may travel."""
    if type(counter) is not int or not 0 < counter <= _MAX_COUNTER:
        return None
    return template + _pack_counter(counter)


def counter_of(header: memoryview) -> int:
    """The counter that ends ``header``, or 0 when it does not end with a 64-bit integer."""
    if len(header) <= COUNTER_NBYTES or header[-COUNTER_NBYTES - 1] != _UINT64:
        return 0
    counter = int.from_bytes(header[-COUNTER_NBYTES:])
    return counter if counter <= _MAX_COUNTER else 0
