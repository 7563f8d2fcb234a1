"""Strict msgpack for message headers: one plain map, bounded, without surprises.

Nothing here builds anything but ``None``, bool, int, float, str, bytes, list and dict, and
nothing is allocated for a count before it was compared with the bytes that are there. This
module must never import asyncio, anyio or torch. The rules it enforces are written down in
``docs/topics/wire-format.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import msgpack

from aiosync.errors import ConfigError

__all__ = [
    "MAX_DEPTH",
    "MAX_OBJECTS",
    "InvalidData",
    "check_structure",
    "check_value",
    "encode_values",
    "pack_header",
    "refuse_ext",
    "unpack_header",
]

MAX_DEPTH = 16
"""Maps and lists inside each other, the header map included."""

MAX_OBJECTS = 2**18
"""Values in one header, keys and containers included. An empty map costs one byte on the wire
and more than sixty in memory, so the size of a header alone bounds too little."""

_SCAN_FROM_NBYTES = 512
"""Shorter headers are too small for a lie about counts to cost memory; see check_structure()."""

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_CACHED_PACK_NBYTES = 65536
_INT_MIN = -(2**63)
_INT_MAX = 2**64 - 1


class InvalidData(ValueError):
    """Bytes or values that the wire format does not allow.

    Internal to :mod:`aiosync.wire`: callers translate it to the error of the side at fault.
    """


# -- packing --------------------------------------------------------------------------------

_pack = msgpack.Packer(use_bin_type=True, buf_size=_CACHED_PACK_NBYTES).pack


def pack_header(header: dict[str, Any], *, large: bool = False) -> bytes:
    """Pack one header map whose values were checked already.

    Args:
        header: String keys; values of the types that :func:`check_value` accepts.
        large: The result may be large: use a packer that is thrown away afterwards, so that
            its buffer does not stay allocated.

    Raises:
        InvalidData: A string is not valid Unicode, an integer does not fit into 64 bits, or
            there are more than :data:`MAX_OBJECTS` values.
    """
    try:
        packed: bytes = msgpack.packb(header, use_bin_type=True) if large else _pack(header)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidData(str(exc)) from exc
    if len(packed) > MAX_OBJECTS:  # a value takes a byte at least
        check_structure(packed)
    return packed


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check non-tensor values and copy them into the plain form that travels.

    Use it when a snapshot is taken: the result shares no mutable object with ``values``, so
    later changes by the owner do not reach the message.

    Args:
        values: Names and values; a value is None, bool, int (64 bits), float, str, bytes, or
            a list, tuple or dict (string keys) of such values, at most 14 levels deep.

    Returns:
        A new dict. Tuples have become lists, as they do on the wire.

    Raises:
        ConfigError: A value of another type; the message names its key and its type.
            Subclasses are refused too, because the receiver would get another type.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        if type(key) is not str:
            raise ConfigError(f"the name {key!r} of a value is a {_type_name(key)}, not a str")
        try:
            result[key] = _copy_value(value, key, 3)
        except InvalidData as exc:
            raise ConfigError(
                f"{exc}; only None, bool, int, float, str, bytes, list, tuple and "
                "dict with str keys can travel beside tensors"
            ) from exc
    return result


def _copy_value(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        if kind is int and not _INT_MIN <= value <= _INT_MAX:
            raise InvalidData(f"the int at {where!r} does not fit into 64 bits")
        if kind is str:
            try:
                value.encode()
            except UnicodeEncodeError as exc:
                raise InvalidData(f"the str at {where!r} is not valid Unicode") from exc
        return value
    if kind is not list and kind is not tuple and kind is not dict:
        raise InvalidData(f"the value at {where!r} is a {_type_name(value)}")
    if depth > MAX_DEPTH:
        raise InvalidData(f"the value at {where!r} is nested deeper than {MAX_DEPTH} levels")
    if kind is not dict:
        return [_copy_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    result = {}
    for key, item in value.items():
        if type(key) is not str:
            raise InvalidData(f"the key {key!r} in {where!r} is a {_type_name(key)}, not a str")
        _copy_value(key, where, depth)
        result[key] = _copy_value(item, f"{where}.{key}", depth + 1)
    return result


def _type_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )


# -- unpacking ------------------------------------------------------------------------------


def unpack_header(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Decode one header: exactly one map with distinct keys, and nothing after it.

    Args:
        data: The whole header. Nothing in the result refers to it.

    Returns:
        The map. Keys are str or bytes; the caller checks them against the names it knows.

    Raises:
        InvalidData: Not msgpack, cut short, trailing bytes, an extension type, a duplicate
            key, a string that is not UTF-8, or nesting deeper than :data:`MAX_DEPTH` in a
            header of more than 512 bytes (see :func:`check_value` for the shorter ones).
    """
    if len(data) > _SCAN_FROM_NBYTES:
        check_structure(data)
    try:
        header = msgpack.unpackb(data, object_pairs_hook=_pairs, ext_hook=refuse_ext, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise InvalidData(f"malformed msgpack: {str(exc) or type(exc).__name__}") from exc
    if type(header) is not dict:
        raise InvalidData(f"the header is a {type(header).__name__}, not a map")
    return header


def _pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise InvalidData("duplicate map key")
    return result


def refuse_ext(code: int, data: bytes) -> NoReturn:
    """The ``ext_hook`` of every unpacker."""
    raise InvalidData(f"extension type {code}")


def check_value(value: Any, depth: int = 3) -> None:
    """Check a decoded value: plain types, string keys, nesting.

    Args:
        value: What :func:`unpack_header` returned for some key.
        depth: The level that a container at this place is on; the header map is level 1.

    Raises:
        InvalidData: Another type, a key that is no string, or nesting too deep.
    """
    kind = type(value)
    if kind in _SCALARS:
        return
    if kind is not dict and kind is not list:
        raise InvalidData(f"a {kind.__name__} is not allowed")
    if depth > MAX_DEPTH:
        raise InvalidData(f"nested deeper than {MAX_DEPTH} levels")
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise InvalidData("a map key is not a string")
            check_value(item, depth + 1)
    else:
        for item in value:
            check_value(item, depth + 1)


# For each first byte of a msgpack object: (bytes of the length or count field, what it is).
# Everything that is not listed is a scalar of fixed size, or illegal.
_FIXED_NBYTES = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_BLOB_LENGTH_NBYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_CONTAINER = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_structure(data: bytes | bytearray | memoryview) -> None:
    """Walk over one packed object without building it: bounds, counts and nesting.

    A msgpack decoder allocates a list when it reads its announced length. A chain of nested
    lists that all announce millions of items would make it allocate far more than the header
    is long. This check refuses every count that the bytes which follow cannot hold, so what
    is allocated afterwards is proportional to the header, and bounded by the number of
    objects. Costs about 0.2 us per object.

    Raises:
        InvalidData: Cut short, trailing bytes, an extension or unknown type, a count larger
            than the rest of the header, more than :data:`MAX_OBJECTS` values, or nesting
            deeper than :data:`MAX_DEPTH`.
    """
    size = len(data)
    pos = 0
    open_items = 1  # objects still expected on this level
    outer: list[int] = []
    needed = 1  # objects still expected on all levels; each takes a byte at least
    total = 1  # objects announced so far
    while needed:
        if needed > size - pos:
            raise InvalidData("a count is larger than the header, or the header is cut short")
        while not open_items:
            open_items = outer.pop()
        first = data[pos]
        pos += 1
        open_items -= 1
        needed -= 1
        items = -1
        if first < 0x80 or first >= 0xE0:  # small integers
            continue
        if 0xA0 <= first < 0xC0:
            pos += first & 0x1F
        elif first < 0x90:
            items = 2 * (first & 0x0F)
        elif first < 0xA0:
            items = first & 0x0F
        elif first in _FIXED_NBYTES:
            pos += _FIXED_NBYTES[first]
        elif first in _BLOB_LENGTH_NBYTES:
            stop = pos + _BLOB_LENGTH_NBYTES[first]
            pos = stop + int.from_bytes(data[pos:stop], "big")
        elif first in _CONTAINER:
            nbytes, per_item = _CONTAINER[first]
            items = per_item * int.from_bytes(data[pos : pos + nbytes], "big")
            pos += nbytes
        else:
            raise InvalidData(f"msgpack type 0x{first:02x} is not allowed")
        if pos > size:
            raise InvalidData("the header is cut short")
        if items >= 0:
            outer.append(open_items)
            if len(outer) > MAX_DEPTH:
                raise InvalidData(f"nested deeper than {MAX_DEPTH} levels")
            open_items = items
            needed += items
            total += items
            if total > MAX_OBJECTS:
                raise InvalidData(f"more than {MAX_OBJECTS} values")
    if pos != size:
        raise InvalidData(f"{size - pos} bytes after the header map")
