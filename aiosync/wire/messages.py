"""The messages of a link, and their header maps.

:func:`encode_header` and :func:`decode_header` turn a message into the msgpack map of a frame and
back, and check every field in both directions. This module must never import asyncio, anyio or
torch. The messages are written down in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiosync.errors import LocalProtocolError, RemoteProtocolError
from aiosync.types import Limits
from aiosync.wire._fields import MAX_ERROR_TEXT_NBYTES, MAX_ERROR_TYPE_NBYTES, check_ext
from aiosync.wire._message_types import (
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
)
from aiosync.wire._specs import FIELDS, SPECS
from aiosync.wire.manifest import DEFAULT_LIMITS
from aiosync.wire.packing import InvalidData, pack_header, unpack_header

__all__ = [
    "MAX_ERROR_TEXT_NBYTES",
    "MAX_ERROR_TYPE_NBYTES",
    "Ack",
    "Challenge",
    "Current",
    "ExtValue",
    "Fetch",
    "Hello",
    "ManifestMessage",
    "Message",
    "PageMessage",
    "Promise",
    "Proof",
    "Refuse",
    "Segment",
    "Setup",
    "Status",
    "Take",
    "Update",
    "Welcome",
    "decode_header",
    "encode_header",
]

_TYPE_KEY = "t"
_EXT_KEY = "x"


def encode_header(
    message: Message,
    *,
    ext: Mapping[str, ExtValue] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """Encode the header map of a message, without the frame's prefix.

    Fields that have their default value are left out.

    Args:
        message: What to encode.
        ext: Entries that a transport adds for its peer.
        limits: Bounds that the receiver is expected to have.

    Raises:
        LocalProtocolError: A field has a wrong type or value, or the header is too large.
        ConfigError: A value in ``Update.values`` cannot travel.
    """
    cls = type(message)
    spec = FIELDS.get(cls)
    if spec is None:
        raise LocalProtocolError(f"{cls.__name__} is not a message")
    name, fields = spec
    header: dict[str, Any] = {_TYPE_KEY: name}
    key = ""
    try:
        for key, _, dump, default in fields:
            value = getattr(message, key)
            if value is default or (value == default and type(value) is type(default)):
                continue
            header[key] = dump(value, limits)
        if ext:
            key = _EXT_KEY
            header[_EXT_KEY] = check_ext(ext)
        key = ""
        packed = pack_header(header, large=cls is ManifestMessage)
    except InvalidData as exc:
        where = f"{cls.__name__}.{key}" if key else cls.__name__
        raise LocalProtocolError(f"cannot encode {where}: {exc}") from exc
    if len(packed) > limits.max_header_nbytes:
        raise LocalProtocolError(
            f"the header of this {cls.__name__} has {len(packed)} bytes; "
            f"at most {limits.max_header_nbytes} are allowed"
        )
    return packed


def decode_header(
    data: bytes | bytearray | memoryview, *, limits: Limits = DEFAULT_LIMITS
) -> tuple[Message, dict[str, ExtValue] | None]:
    """Decode a header map, checking every field.

    Args:
        data: The whole header, without the frame's prefix. Nothing in the result refers to it.
        limits: Bounds on what the peer may announce.

    Returns:
        The message, and the extension map or ``None``.

    Raises:
        RemoteProtocolError: Malformed; an unknown message type or field; a missing, wrong-typed
            or out-of-range field.
    """
    where = ""
    try:
        header = unpack_header(data)
        kind = header.pop(_TYPE_KEY, None)
        spec = SPECS.get(kind) if type(kind) is str else None
        if spec is None:
            shown = repr(kind[:40]) if type(kind) is str else f"of type {type(kind).__name__}"
            raise InvalidData(f"unknown message type {shown}")
        cls, loads, required = spec
        where = cls.__name__
        ext = None
        values: dict[str, Any] = {}
        for key, value in header.items():
            load = loads.get(key)
            if load is not None:
                where = key
                values[key] = load(value, limits)
            elif key == _EXT_KEY:
                where = key
                ext = check_ext(value)
            else:
                where = cls.__name__
                shown = repr(key[:40]) if isinstance(key, str | bytes) else type(key).__name__
                raise InvalidData(f"unknown field {shown}")
        where = cls.__name__
        if not required <= values.keys():
            raise InvalidData(f"without {', '.join(sorted(required - values.keys()))}")
        message: Message = cls(**values)
    except InvalidData as exc:
        raise RemoteProtocolError(
            f"illegal header ({where}): {exc}" if where else f"illegal header: {exc}"
        ) from exc
    return message, ext
