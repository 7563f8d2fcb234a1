"""Plain values as msgpack, with the same checks and bounds when encoding and when decoding.

This module builds only ``None``, bool, int, float, str, bytes, list and dict. It must never import
asyncio, anyio or torch. Its rules are specified in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import msgpack

from aiosync.errors import ConfigError

__all__ = [
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_ITEMS",
    "InvalidData",
    "counted",
    "encode_values",
    "pack",
    "refuse_ext",
    "unpack",
]

MAX_DEPTH = 16
"""Greatest depth of maps and lists inside each other, the outermost map included."""

MAX_ITEMS = 2**16
"""Greatest number of entries of one list or map.

The bound is needed because msgpack allocates a list when it reads the announced length, even if the
bytes of its entries never arrive.
"""

MAX_CONTAINERS = 2**18
"""Greatest number of lists and maps in one header.

An empty map takes one byte on the wire and more than sixty in memory, so the limit on the size of a
header does not bound the memory enough.
"""

_T = TypeVar("_T")
_MALFORMED = (ValueError, TypeError, OverflowError, RecursionError)


class InvalidData(ValueError):
    """An error about bytes or values that the wire format does not allow.

    Callers translate it to the public error that names the side at fault.
    """


def pack(value: Mapping[str, Any]) -> bytes:
    """Pack a map of plain values. Tuples become lists, and bytearrays become bytes.

    Raises:
        InvalidData: A value has another type, a string is not valid Unicode, or an integer does
            not fit into 64 bits.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_other_type, strict_types=True)
    except _MALFORMED as exc:
        raise InvalidData(str(exc) or type(exc).__name__) from exc
    return packed


def _other_type(value: object) -> list[Any]:
    """Return a tuple as a list, and raise for other types: msgpack asks for what it cannot pack."""
    if type(value) is tuple:
        return list(value)
    kind = type(value)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " "))


def counted(most: int) -> Callable[[_T], _T]:
    """Return a hook for an unpacker that refuses any list or map after the first ``most``."""
    count = itertools.count(1).__next__

    def hook(items: _T) -> _T:
        if count() > most:
            raise InvalidData(f"more than {most} lists and maps")
        return items

    return hook


def unpack(
    data: bytes | bytearray | memoryview,
    *,
    most: int = MAX_ITEMS,
    most_containers: int = MAX_CONTAINERS,
) -> dict[str, Any]:
    """Decode exactly one map with nothing after it. In every map the keys are distinct strings.

    Args:
        data: The encoded map. Nothing in the result refers to this memory.
        most: Greatest number of entries of one list or map.
        most_containers: Greatest number of lists and maps in total.

    Raises:
        InvalidData: The data is not exactly one such map, is cut short, has an extension type, or
            is over a bound.
    """
    # Each entry has at least one byte, so that a false length allocates no more than the data.
    most = min(len(data), most)
    list_of = counted(most_containers)

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
    _check_depth(value)
    return value


def _check_depth(value: dict[str, Any]) -> None:
    """Raise :class:`InvalidData` if lists and maps are nested too deeply."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for each in level
            for item in (each.values() if type(each) is dict else each)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise InvalidData(f"nested deeper than {MAX_DEPTH} levels")


def refuse_ext(code: int, data: bytes) -> NoReturn:
    """Refuse an extension type: the ``ext_hook`` of every unpacker."""
    raise InvalidData(f"extension type {code}")


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check non-tensor values and copy them into the plain form that travels.

    Use it when a snapshot is taken: the result shares no mutable object with ``values``, so
    the owner's later changes do not reach the message.

    Args:
        values: Values by name. A value is None, bool, int (64 bits), float, str, bytes, or
            a list, tuple or dict (string keys) of such values, at most 14 levels deep, each with
            at most :data:`MAX_ITEMS` entries.

    Returns:
        A new dict. Tuples have become lists, and bytearrays have become bytes, as on the wire.

    Raises:
        ConfigError: A value cannot travel; the message names its key. Instances of subclasses are
            refused as well, because the receiver would get another type. Or all values together
            have more than :data:`MAX_CONTAINERS` lists and maps.
    """
    result: dict[str, Any] = {}
    nbytes = 0
    for key, value in values.items():
        try:
            # The two outer maps put the value at the depth that it has in a header.
            packed = pack({"values": {key: value}})
            nbytes += len(packed)
            result |= unpack(packed)["values"]
        except InvalidData as exc:
            raise ConfigError(
                f"{key!r} cannot travel beside tensors: {exc}; only None, bool, int of "
                "64 bits, float, str, bytes, list, tuple and dict with str keys can"
            ) from exc
    # Each list or map has at least one byte, so that small values need no second look.
    if nbytes > MAX_CONTAINERS:
        try:
            # A header may have an extension map, too.
            unpack(pack({"values": result, "x": {}}))
        except InvalidData as exc:
            raise ConfigError(f"the values cannot travel together: {exc}") from exc
    return result
