"""Strict msgpack for message headers: one plain map, bounded, without surprises.

Nothing here builds anything but ``None``, bool, int, float, str, bytes, list and dict. This
module must never import asyncio, anyio or torch. The rules it enforces are written down in
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
    "check_value",
    "encode_values",
    "pack_header",
    "refuse_ext",
    "unpack_header",
]

MAX_DEPTH = 16
"""Maps and lists inside each other, the header map included."""

MAX_ITEMS = 2**16
"""Entries of one list or map. msgpack allocates a list when it reads its announced length, also
where the bytes for it never come."""

MAX_CONTAINERS = 2**18
"""Lists and maps in one header. An empty map costs one byte on the wire and more than sixty in
memory, so the size of a header alone bounds too little."""

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
        InvalidData: A string is not valid Unicode, or an integer does not fit into 64 bits.
    """
    try:
        packed: bytes = msgpack.packb(header, use_bin_type=True) if large else _pack(header)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidData(str(exc)) from exc
    return packed


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check non-tensor values and copy them into the plain form that travels.

    Use it when a snapshot is taken: the result shares no mutable object with ``values``, so
    later changes by the owner do not reach the message.

    Args:
        values: Names and values; a value is None, bool, int (64 bits), float, str, bytes, or
            a list, tuple or dict (string keys) of such values, at most 14 levels deep, each with
            at most :data:`MAX_ITEMS` entries.

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
    if len(value) > MAX_ITEMS:
        raise InvalidData(f"the value at {where!r} has more than {MAX_ITEMS} entries")
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
            key, a string that is not UTF-8, more than :data:`MAX_ITEMS` entries in one list or
            map, or more than :data:`MAX_CONTAINERS` of these.
    """
    most = min(len(data), MAX_ITEMS)
    count = itertools.count(1).__next__

    def list_of(items: list[Any]) -> list[Any]:
        if count() > MAX_CONTAINERS:
            raise InvalidData(f"more than {MAX_CONTAINERS} lists and maps")
        return items

    def map_of(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise InvalidData("duplicate map key")
        list_of(pairs)
        return result

    try:
        header = msgpack.unpackb(
            data,
            object_pairs_hook=map_of,
            list_hook=list_of,
            ext_hook=refuse_ext,
            max_ext_len=0,
            max_array_len=most,
            max_map_len=most,
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise InvalidData(f"malformed msgpack: {str(exc) or type(exc).__name__}") from exc
    if type(header) is not dict:
        raise InvalidData(f"the header is a {type(header).__name__}, not a map")
    return header


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
