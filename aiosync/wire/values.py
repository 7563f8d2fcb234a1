"""Plain values as msgpack, strict in both directions: bounded, and without surprises.

Nothing here builds anything but ``None``, bool, int, float, str, bytes, list and dict. This
module must never import asyncio, anyio or torch. Its rules are written down in
``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NoReturn

import msgpack

from aiosync.errors import ConfigError

__all__ = [
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_ITEMS",
    "InvalidData",
    "encode_values",
    "pack",
    "refuse_ext",
    "unpack",
]

MAX_DEPTH = 16
"""Maps and lists inside each other, the outermost map included."""

MAX_ITEMS = 2**16
"""Entries of one list or map. msgpack allocates a list when it reads its announced length, also
where the bytes for it never come."""

MAX_CONTAINERS = 2**18
"""Lists and maps in one header. An empty map costs one byte on the wire and more than sixty in
memory, so the size of a header alone bounds too little."""

_MALFORMED = (ValueError, TypeError, OverflowError, RecursionError)


class InvalidData(ValueError):
    """Bytes or values that the wire format does not allow.

    Callers translate it to the error of the side at fault.
    """


def pack(value: Mapping[str, Any]) -> bytes:
    """Pack a map of plain values. Tuples become lists, and bytearrays bytes.

    Raises:
        InvalidData: A value of another type, a string that is not valid Unicode, or an integer
            that does not fit into 64 bits.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_other_type, strict_types=True)
    except _MALFORMED as exc:
        raise InvalidData(str(exc) or type(exc).__name__) from exc
    return packed


def _other_type(value: object) -> list[Any]:
    if type(value) is tuple:
        return list(value)
    kind = type(value)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " "))


def unpack(
    data: bytes | bytearray | memoryview,
    *,
    most: int = MAX_ITEMS,
    most_containers: int = MAX_CONTAINERS,
) -> dict[str, Any]:
    """Decode exactly one map with nothing after it; keys are distinct strings, in every map.

    Args:
        data: The whole map. Nothing in the result refers to it.
        most: Entries that one list or map may have.
        most_containers: Lists and maps that there may be.

    Raises:
        InvalidData: Not that, cut short, an extension type, or over a bound.
    """
    most = min(len(data), most)
    count = itertools.count(1).__next__

    def list_of(items: list[Any]) -> list[Any]:
        if count() > most_containers:
            raise InvalidData(f"more than {most_containers} lists and maps")
        return items

    def map_of(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        result = dict(list_of(pairs))
        if len(result) != len(pairs) or not all(type(key) is str for key in result):
            raise InvalidData("a map key is a duplicate, or not a string")
        return result

    try:
        value = msgpack.unpackb(
            data,
            object_pairs_hook=map_of,
            list_hook=list_of,
            ext_hook=refuse_ext,
            max_ext_len=0,
            max_array_len=most,
            max_map_len=most,
        )
    except _MALFORMED as exc:
        raise InvalidData(f"malformed msgpack: {str(exc) or type(exc).__name__}") from exc
    if type(value) is not dict:
        raise InvalidData(f"a {type(value).__name__}, not a map")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for each in level
            for item in (each.values() if type(each) is dict else each)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return value
    raise InvalidData(f"nested deeper than {MAX_DEPTH} levels")


def refuse_ext(code: int, data: bytes) -> NoReturn:
    """The ``ext_hook`` of every unpacker."""
    raise InvalidData(f"extension type {code}")


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check non-tensor values and copy them into the plain form that travels.

    Use it when a snapshot is taken: the result shares no mutable object with ``values``, so
    later changes by the owner do not reach the message.

    Args:
        values: Names and values; a value is None, bool, int (64 bits), float, str, bytes, or
            a list, tuple or dict (string keys) of such values, at most 14 levels deep, each with
            at most :data:`MAX_ITEMS` entries.

    Returns:
        A new dict. Tuples have become lists, and bytearrays bytes, as they do on the wire.

    Raises:
        ConfigError: A value of another type; the message names its key.
            Subclasses are refused too, because the receiver would get another type.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        try:
            # On the levels that they have in a header.
            result |= unpack(pack({"values": {key: value}}))["values"]
        except InvalidData as exc:
            raise ConfigError(
                f"{key!r} cannot travel beside tensors: {exc}; only None, bool, int of "
                "64 bits, float, str, bytes, list, tuple and dict with str keys can"
            ) from exc
    return result
