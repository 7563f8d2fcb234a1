"""Checks of single message fields, in both directions. Internal to :mod:`aiosync.wire`.

This module must never import asyncio, anyio or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from aiosync.errors import RemoteProtocolError
from aiosync.types import AckStatus, Limits
from aiosync.wire.manifest import Manifest
from aiosync.wire.packing import InvalidData, check_value, encode_values

__all__ = [
    "MAX_ERROR_TEXT_NBYTES",
    "MAX_ERROR_TYPE_NBYTES",
    "MAX_EXT_ENTRIES",
    "REQUIRED",
    "Convert",
    "Field",
    "bool_field",
    "bytes_field",
    "check_ext",
    "chunk_field",
    "clipped_field",
    "int_field",
    "manifest_field",
    "status_field",
    "str_field",
    "values_field",
]

MAX_ERROR_TYPE_NBYTES = 256
"""UTF-8 bytes of the name of an exception's type; longer ones are clipped when encoding."""

MAX_ERROR_TEXT_NBYTES = 4096
"""UTF-8 bytes of an error's text; longer ones are clipped when encoding."""

MAX_EXT_ENTRIES = 64
"""Entries of the extension map of a header."""

REQUIRED: Final = object()
"""Default of a field that has none."""

Convert = Callable[[Any, Limits], Any]

_INT_MAX = 2**63 - 1
_STATUS = {int(status): status for status in AckStatus}
_EXT_TYPES = frozenset({int, str, bytes, bool})


class Field(NamedTuple):
    """One field of a message.

    Attributes:
        name: Name of the attribute, and key in the header map.
        load: Check a decoded value and turn it into the attribute's value.
        dump: Check an attribute's value and turn it into what travels.
        default: Value that does not travel, or :data:`REQUIRED`.
    """

    name: str
    load: Convert
    dump: Convert
    default: Any = REQUIRED


def int_field(name: str, low: int, high: int = _INT_MAX, default: Any = REQUIRED) -> Field:
    """An integer in a closed range; a bool is none."""

    def check(value: Any, limits: Limits) -> int:
        if type(value) is not int or value < low or value > high:
            raise _wrong(value, f"an integer from {low} to {high}")
        return value

    return Field(name, check, check, default)


def bool_field(name: str, default: Any = REQUIRED) -> Field:
    """True or False, and not 0 or 1."""

    def check(value: Any, limits: Limits) -> bool:
        if value is not True and value is not False:
            raise _wrong(value, "a bool")
        return bool(value)

    return Field(name, check, check, default)


def str_field(name: str, default: Any = REQUIRED, *, empty: bool = False) -> Field:
    """A name: valid Unicode, bounded by ``limits.max_name_nbytes``."""

    def check(value: Any, limits: Limits) -> str:
        if type(value) is not str or not (value or empty):
            raise _wrong(value, "a string" if empty else "a string that is not empty")
        if 4 * len(value) > limits.max_name_nbytes and _utf8_nbytes(value) > limits.max_name_nbytes:
            raise InvalidData(f"longer than {limits.max_name_nbytes} bytes")
        return value

    return Field(name, check, check, default)


def clipped_field(name: str, max_nbytes: int, default: Any = REQUIRED) -> Field:
    """A text for humans, clipped when it is sent and bounded when it is received."""

    def load(value: Any, limits: Limits) -> str:
        if type(value) is not str:
            raise _wrong(value, "a string")
        if 4 * len(value) > max_nbytes and _utf8_nbytes(value) > max_nbytes:
            raise InvalidData(f"longer than {max_nbytes} bytes")
        return value

    def dump(value: Any, limits: Limits) -> str:
        if type(value) is not str:
            raise _wrong(value, "a string")
        # An error's text must travel whatever it holds; lone surrogates become "?".
        data = value[:max_nbytes].encode(errors="replace")
        return data[:max_nbytes].decode(errors="ignore")

    return Field(name, load, dump, default)


def bytes_field(name: str, low: int, high: int, default: Any = REQUIRED) -> Field:
    """A byte string of ``low`` to ``high`` bytes."""
    expected = f"{low} bytes" if low == high else f"{low} to {high} bytes"

    def check(value: Any, limits: Limits) -> bytes:
        if type(value) is not bytes or not low <= len(value) <= high:
            raise _wrong(value, expected)
        return value

    return Field(name, check, check, default)


def status_field(name: str) -> Field:
    """A member of :class:`~aiosync.types.AckStatus`, as its integer."""

    def load(value: Any, limits: Limits) -> AckStatus:
        status = _STATUS.get(value) if type(value) is int else None
        if status is None:
            raise _wrong(value, f"one of {', '.join(map(str, _STATUS))}")
        return status

    def dump(value: Any, limits: Limits) -> int:
        if type(value) is not AckStatus:
            raise _wrong(value, "an AckStatus")
        return int(value)

    return Field(name, load, dump)


def chunk_field(name: str) -> Field:
    """Optional (index, count) with ``0 <= index < count < 2**32``."""

    def load(value: Any, limits: Limits) -> tuple[int, int]:
        if type(value) is not list:
            raise _wrong(value, "a list of two integers")
        return check(value)

    def dump(value: Any, limits: Limits) -> list[int]:
        if type(value) is not tuple:
            raise _wrong(value, "a tuple of two integers")
        return list(check(value))

    def check(value: Any) -> tuple[int, int]:
        if len(value) != 2 or type(value[0]) is not int or type(value[1]) is not int:
            raise _wrong(value, "two integers")
        index, count = value
        if not 0 <= index < count < 2**32:
            raise InvalidData("the index is not in 0 <= index < count < 2**32")
        return (index, count)

    return Field(name, load, dump, None)


def manifest_field(name: str) -> Field:
    """A manifest, as its canonical encoding."""

    def load(value: Any, limits: Limits) -> Manifest:
        if type(value) is not bytes:
            raise _wrong(value, "bytes")
        try:
            return Manifest.decode(value, limits)
        except RemoteProtocolError as exc:
            raise InvalidData(str(exc)) from exc

    def dump(value: Any, limits: Limits) -> bytes:
        if not isinstance(value, Manifest):
            raise _wrong(value, "a Manifest")
        return value.encode()

    return Field(name, load, dump)


_NO_VALUES: Mapping[str, Any] = {}


def values_field(name: str) -> Field:
    """Non-tensor values by name; see :func:`aiosync.wire.encode_values`."""

    def load(value: Any, limits: Limits) -> dict[str, Any]:
        if type(value) is not dict:
            raise _wrong(value, "a map")
        check_value(value, 2)
        return value

    def dump(value: Any, limits: Limits) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(value, "a mapping")
        return encode_values(value)

    return Field(name, load, dump, _NO_VALUES)


def check_ext(ext: Any) -> dict[str, int | str | bytes | bool]:
    """Check the extension map of a header.

    Raises:
        InvalidData: Too many entries, a key that is no string, or a value of another type.
    """
    if not isinstance(ext, Mapping) or len(ext) > MAX_EXT_ENTRIES:
        raise _wrong(ext, f"a map of at most {MAX_EXT_ENTRIES} entries")
    for key, value in ext.items():
        if type(key) is not str or type(value) not in _EXT_TYPES:
            raise InvalidData("an entry is not a string with an integer, string, bytes or bool")
    return dict(ext)


def _utf8_nbytes(value: str) -> int:
    return len(value.encode(errors="surrogatepass"))


def _wrong(value: object, expected: str) -> InvalidData:
    shown = repr(value) if type(value) in (int, bool, type(None)) else ""
    shown = shown if 0 < len(shown) <= 24 else f"a {type(value).__name__}"
    return InvalidData(f"expected {expected}, not {shown}")
