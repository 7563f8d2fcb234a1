"""The messages of a link, and their header maps.

:func:`encode_header` and :func:`decode_header` turn a message into the msgpack map of a frame and
back, and check every field in both directions. This module must never import asyncio, anyio or
torch. The messages are written down in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiosync.errors import LocalProtocolError, RemoteProtocolError
from aiosync.types import AckStatus, Limits
from aiosync.wire._counted import Maker, Templates, join, with_counter
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
    Proof,
    Refuse,
    Release,
    Segment,
    Setup,
    Status,
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
    "Proof",
    "Refuse",
    "Release",
    "Segment",
    "Setup",
    "Status",
    "Update",
    "Welcome",
    "decode_header",
    "decode_header_keys",
    "encode_header",
    "maker_of",
]

# Messages of which only a counter changes from one to the next; see aiosync.wire._counted.
_INT_ONLY = {int}
_COUNTER: dict[type, str] = {Ack: "version", Update: "version", Release: "serial"}


def _ack_key(message: Ack, ext: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if message.error_type or message.error_text or type(message.status) is not AckStatus:
        return None
    return (Ack, message.epoch, message.status, ext)


def _update_key(message: Update, ext: tuple[Any, ...]) -> tuple[Any, ...] | None:
    # What else it may hold belongs to one version: nothing of it may be reused for the next.
    if not message.is_plain or type(message.digest) is not bytes:
        return None
    return (Update, message.epoch, message.digest, ext)


def _release_key(message: Release, ext: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (Release, message.segment_id, message.slot, message.retained, ext)


_COUNTED: dict[type, Callable[[Any, tuple[Any, ...]], tuple[Any, ...] | None]] = {
    Ack: _ack_key,
    Update: _update_key,
    Release: _release_key,
}
_templates = Templates()


def maker_of(message: Message) -> Maker | None:
    """What makes the same message with another counter; ``None`` if it has no short cut."""
    if type(message) is Ack and not message.error_type and not message.error_text:
        epoch, status = message.epoch, message.status
        return lambda version: Ack(epoch, version, status)
    if type(message) is Release:
        segment_id, slot, retained = message.segment_id, message.slot, message.retained
        return lambda serial: Release(segment_id, slot, serial, retained)
    if type(message) is Update and message.is_plain:
        sent, digest = message.epoch, message.digest
        return lambda version: Update(sent, version, digest)
    return None


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
    key_of = _COUNTED.get(cls)
    template_key = None
    if key_of is not None and (not ext or set(map(type, ext.values())) == _INT_ONLY):
        template_key = key_of(message, tuple(ext.items()) if ext else ())
        template = _templates.get(template_key) if template_key is not None else None
        if template is not None:
            whole = join(template, getattr(message, _COUNTER[cls]))
            if whole is not None and len(whole) <= limits.max_header_nbytes:
                return whole
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
        if template_key is not None:
            template = with_counter(header, _COUNTER[cls], pack_header)
            _templates.put(template_key, template)
            packed = join(template, getattr(message, _COUNTER[cls])) or packed
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
    message, ext, _ = decode_header_keys(data, limits=limits)
    return message, ext


def decode_header_keys(
    data: bytes | bytearray | memoryview, *, limits: Limits = DEFAULT_LIMITS
) -> tuple[Message, dict[str, ExtValue] | None, str]:
    """As :func:`decode_header`; also returns the last key of the map."""
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
        last = next(reversed(header), "")
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
    return message, ext, last
