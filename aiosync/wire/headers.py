"""The headers of messages: bytes from messages, and checked messages from bytes.

The headers of an update, of its chunks and of their acknowledgements have fields at fixed places;
the other headers are msgpack maps. This module must never import asyncio, anyio or torch. The
headers are specified in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeAlias, TypeGuard

from aiosync.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from aiosync.types import AckStatus, Limits
from aiosync.wire.manifest import DEFAULT_LIMITS, DIGEST_NBYTES, Manifest
from aiosync.wire.messages import (
    MAX_ADDRESS_NBYTES,
    MAX_BEHIND,
    MAX_ELSEWHERE,
    MAX_ERROR_TEXT_NBYTES,
    MAX_ERROR_TYPE_NBYTES,
    MAX_PATH,
    MAX_STREAMS,
    MAX_WORKER_IDX,
    NONCE_NBYTES,
    Ack,
    Challenge,
    Current,
    DeviceSlot,
    ExtValue,
    Fetch,
    Hello,
    Join,
    Leave,
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
from aiosync.wire.values import (
    MAX_CONTAINERS,
    MAX_ITEMS,
    InvalidData,
    encode_values,
    pack,
    unpack,
)

__all__ = ["decode_header", "encode_header", "is_traceparent"]

# -- legal values of the fields -------------------------------------------------------------------

_INT = 2**63 - 1
_U32 = 2**32 - 1
# In place of a greatest size: the limits' bound on the size of a name.
_NAME = -1
# Greatest number of entries of an extension map, and of a map whose keys this format defines: Hello
# has that many fields.
_MAX_FEW = 16
_EXT_TYPES = frozenset({int, str, bytes, bool})

_Spec: TypeAlias = "tuple[Any, int, int]"
"""Type of a field, and the least and greatest value or, for bytes, strings and maps, size."""

_BOOL: _Spec = (bool, 0, 1)
_EPOCH: _Spec = (int, 1, _INT)
_COUNT: _Spec = (int, 0, _INT)
_INDEX: _Spec = (int, 0, MAX_WORKER_IDX)
_NONCE: _Spec = (bytes, NONCE_NBYTES, NONCE_NBYTES)
_ERRORS: dict[str, _Spec] = {
    "error_type": (str, 0, MAX_ERROR_TYPE_NBYTES),
    "error_text": (str, 0, MAX_ERROR_TEXT_NBYTES),
}
_VALUES: _Spec = (dict, 0, MAX_ITEMS)

_UPDATE, _ACK = 1, 2
_FIELDS: dict[type, tuple[int, dict[str, _Spec]]] = {
    Update: (_UPDATE, {"codec": (str, 1, _NAME), "values": _VALUES}),
    Ack: (_ACK, _ERRORS),
    Hello: (
        3,
        {
            "role": (str, 1, _NAME),
            "model_id": (str, 0, _NAME),
            "pid": (int, 0, _U32),
            "worker_idx": _INDEX,
            "strategy": (str, 1, _NAME),
            "has_target": _BOOL,
            "epoch": _EPOCH,
            "version": _COUNT,
            "session": (bytes, 16, 16),
            "subscribe": _BOOL,
            "partial_epoch": _EPOCH,
            "partial_version": _EPOCH,
            "partial_nbytes": _COUNT,
            "parts": _BOOL,
            "slots": _BOOL,
            "take_over": _BOOL,
        },
    ),
    Welcome: (
        4,
        {
            "epoch": _EPOCH,
            "version": _COUNT,
            "worker_idx": _INDEX,
            "num_workers": _INDEX,
            "note": (str, 0, MAX_ERROR_TEXT_NBYTES),
        },
    ),
    Refuse: (5, _ERRORS),
    ManifestMessage: (6, {"manifest": (bytes, 0, _INT)}),
    Segment: (
        7,
        {
            "segment_id": _COUNT,
            "slot_nbytes": _COUNT,
            "num_slots": (int, 1, 65535),
            "on_device": _BOOL,
        },
    ),
    PageMessage: (8, {}),
    Take: (9, {"epoch": _EPOCH, "version": _COUNT}),
    Promise: (10, {"digest": (bytes, 0, DIGEST_NBYTES)}),
    Challenge: (11, {"nonce": _NONCE, "required": _BOOL}),
    Proof: (12, {"nonce": _NONCE, "mac": (bytes, 0, 64)}),
    Fetch: (13, {"min_version": _COUNT}),
    Current: (14, {"epoch": _EPOCH, "version": _COUNT}),
    Status: (15, {"values": _VALUES}),
    Setup: (
        16,
        {"kind": (str, 1, _NAME), "key": (str, 0, _NAME), "value": (bytes, 0, 2048)},
    ),
    Leave: (17, {}),
    DeviceSlot: (
        18,
        {
            "segment_id": _COUNT,
            "index": (int, 0, 255),
            "kind": (str, 1, _NAME),
            "uuid": (bytes, 16, 16),
            "nbytes": _COUNT,
        },
    ),
    Join: (
        19,
        {
            "link": (bytes, 16, 16),
            "index": (int, 0, MAX_STREAMS - 1),
            "count": (int, 2, MAX_STREAMS),
        },
    ),
}
_TYPES: dict[int, type] = {number: cls for cls, (number, _) in _FIELDS.items()}
_DEFAULTS: dict[type, dict[str, Any]] = {
    cls: {
        each.name: each.default if each.default_factory is MISSING else {} for each in fields(cls)
    }
    for cls in _FIELDS
}
# Only a sender of weights sends these messages. Every peer may send the others.
_FROM_SENDERS = frozenset({Update, Status, ManifestMessage})

_UPDATE_HEADER = struct.Struct("<BBHIIQQ16s16s16sI")
# Flags in the header of an update.
_HAS_CHECKSUM, _HAS_STATE = 1, 2
_ACK_HEADER = struct.Struct("<BBHQQI")
_NO_SUM = bytes(16)
_STATUS = {int(status): status for status in AckStatus}
_EXT_KEY, _TRACE_KEY, _BASE_KEY = "x", "trace", "base"
_SERVES_KEY, _FOLLOWS_KEY, _ELSEWHERE_KEY = "serves", "follows", "elsewhere"
_PARTIAL_KEY = "partial_digest"
_BEHIND_KEY, _PATH_KEY, _NONE_KEY = "behind", "path", "has_none"
_SESSION_NBYTES = 16
_BASE = struct.Struct("<QQ")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ILLEGAL = (ValueError, TypeError, KeyError, AttributeError, struct.error)


def is_traceparent(value: object) -> TypeGuard[str]:
    """Return True if a value is a traceparent of W3C Trace Context, version 00: 55 characters."""
    return isinstance(value, str) and _TRACEPARENT.fullmatch(value) is not None


def _check(value: Any, spec: _Spec, limits: Limits) -> None:
    """Raise :class:`InvalidData` unless a field's value has the type and size of its ``spec``."""
    kind, low, high = spec
    if type(value) is not kind:
        raise InvalidData(f"a {type(value).__name__} instead of a {kind.__name__}")
    is_number = kind is int or kind is bool
    size = value if is_number else len(value.encode() if kind is str else value)
    most = limits.max_name_nbytes if high == _NAME else high
    if not low <= size <= most:
        raise InvalidData(f"{size} is not from {low} to {most}")


def _check_ext(ext: Any) -> dict[str, ExtValue]:
    """Return an extension map as a dict.

    Raises:
        InvalidData: It is no map, has too many entries, or has one of another type.
    """
    if not isinstance(ext, Mapping) or len(ext) > _MAX_FEW:
        raise InvalidData(f"no map of at most {_MAX_FEW} entries")
    if any(type(k) is not str or type(v) not in _EXT_TYPES for k, v in ext.items()):
        raise InvalidData("an entry is not a string with an int, str, bytes or bool")
    return dict(ext)


def _fixed_header(message: Update | Ack, rest_nbytes: int) -> bytes:
    """Return the checked fields at fixed places; a map of ``rest_nbytes`` bytes follows them."""
    epoch, version = message.epoch, message.version
    if not (0 < epoch <= _INT and 0 < version <= _INT):
        raise InvalidData("epoch and version are from 1 to 2**63 - 1")
    if isinstance(message, Ack):
        status = _STATUS[message.status]
        return _ACK_HEADER.pack(_ACK, status, 0, epoch, version, rest_nbytes)
    index, count = message.chunk or (0, 0)
    flags = _HAS_CHECKSUM * (message.checksum is not None) | _HAS_STATE * (
        message.state is not None
    )
    checksum = _NO_SUM if message.checksum is None else message.checksum
    state = _NO_SUM if message.state is None else message.state
    if not len(message.digest) == len(checksum) == len(state) == 16:
        raise InvalidData("digest and checksums have 16 bytes")
    if message.chunk is not None and not 0 <= index < count:
        raise InvalidData("a chunk is (index, count) with 0 <= index < count < 2**32")
    return _UPDATE_HEADER.pack(
        _UPDATE,
        flags,
        0,
        index,
        count,
        epoch,
        version,
        message.digest,
        checksum,
        state,
        rest_nbytes,
    )


def _encode_field(key: str, value: Any, spec: _Spec) -> Any:
    """Return the form in which the value of a field travels; the caller checks it after that."""
    if key == "values":
        return encode_values(value)
    if key == "manifest":
        return Manifest.encode(value)
    if key in _ERRORS:
        # The text of an error must travel in any case, so it is clipped, and lone surrogates
        # become "?".
        clipped = value[: spec[2]].encode(errors="replace")[: spec[2]]
        return clipped.decode(errors="ignore")
    return value


def _check_addresses(addresses: Sequence[Any]) -> Sequence[str]:
    """Return addresses that can be dialled from another host, few and short enough.

    Raises:
        InvalidData: They are too many, or one of them is another kind of address or too long.
    """
    if not 0 < len(addresses) <= MAX_ELSEWHERE:
        raise InvalidData(f"{len(addresses)} addresses are not from 1 to {MAX_ELSEWHERE}")
    for each in addresses:
        if not each.startswith("tcp://") or len(each.encode()) > MAX_ADDRESS_NBYTES or " " in each:
            raise InvalidData(f"no address of TCP of at most {MAX_ADDRESS_NBYTES} bytes")
    return addresses


def _check_behind(behind: tuple[int, int]) -> tuple[int, int]:
    """Return the numbers of :attr:`Ack.behind`, if sums of them still fit into a message.

    Raises:
        InvalidData: One of them is out of range.
    """
    count, oldest = behind
    if not (0 <= count <= MAX_BEHIND and 0 <= oldest <= _INT):
        raise InvalidData(f"at most {MAX_BEHIND} workers, with versions to 2**63 - 1, are behind")
    return behind


def _check_path(path: Any) -> bytes:
    """Return the joined digests of the servers in :attr:`Welcome.path`, if whole and few enough.

    Raises:
        InvalidData: They are none or too many, or not whole.
    """
    count, rest = divmod(len(path), _SESSION_NBYTES)
    if not isinstance(path, bytes) or rest or not 0 < count <= MAX_PATH:
        raise InvalidData(f"no path of 1 to {MAX_PATH} sessions")
    return path


def _entries_of(message: Message) -> dict[str, ExtValue]:
    """Return the fields of a message that travel as entries of the extension map.

    A peer ignores an entry that it does not know, but refuses a field that it does not know.
    """
    entries: dict[str, ExtValue] = {}
    if isinstance(message, Update):
        if message.trace is not None and is_traceparent(message.trace):
            entries[_TRACE_KEY] = message.trace
        if message.base is not None:
            entries[_BASE_KEY] = _BASE.pack(*message.base)
    elif isinstance(message, Ack):
        if message.is_base:
            entries[_BASE_KEY] = True
        if message.behind is not None:
            entries[_BEHIND_KEY] = _BASE.pack(*_check_behind(message.behind))
    elif isinstance(message, Fetch):
        if message.has_none:
            entries[_NONE_KEY] = True
    else:
        entries = _addresses_of(message)
    return entries


def _addresses_of(message: Message) -> dict[str, ExtValue]:
    """Return the fields of a greeting or its answer that travel in the extension map."""
    entries: dict[str, ExtValue] = {}
    if isinstance(message, Hello):
        if message.serves:
            (entries[_SERVES_KEY],) = _check_addresses((message.serves,))
        if message.follows:
            entries[_FOLLOWS_KEY] = True
        if message.partial_digest:
            entries[_PARTIAL_KEY] = message.partial_digest
    elif isinstance(message, Refuse) and message.elsewhere:
        entries[_ELSEWHERE_KEY] = " ".join(_check_addresses(message.elsewhere))
    elif isinstance(message, Welcome) and message.path:
        entries[_PATH_KEY] = _check_path(b"".join(message.path))
    return entries


def _take_entries(cls: type, ext: dict[str, ExtValue], found: dict[str, Any]) -> None:
    """Move the entries that :func:`_entries_of` made from ``ext`` to the fields in ``found``."""
    base = ext.get(_BASE_KEY)
    if cls is Update:
        if is_traceparent(ext.get(_TRACE_KEY)):
            found["trace"] = ext.pop(_TRACE_KEY)
        if isinstance(base, bytes):
            found["base"] = _BASE.unpack(base)
            del ext[_BASE_KEY]
    elif cls is Ack:
        if base is True:
            found["is_base"] = ext.pop(_BASE_KEY)
        behind = ext.get(_BEHIND_KEY)
        if isinstance(behind, bytes):
            found["behind"] = _check_behind(_BASE.unpack(behind))
            del ext[_BEHIND_KEY]
    elif cls is Fetch:
        if ext.get(_NONE_KEY) is True:
            found["has_none"] = ext.pop(_NONE_KEY)
    else:
        _take_addresses(cls, ext, found)


def _take_addresses(cls: type, ext: dict[str, ExtValue], found: dict[str, Any]) -> None:
    """Move the entries that :func:`_addresses_of` made from ``ext`` to the fields in ``found``."""
    if cls is Hello:
        if _SERVES_KEY in ext:
            (found["serves"],) = _check_addresses((ext.pop(_SERVES_KEY),))
        if ext.get(_FOLLOWS_KEY) is True:
            found["follows"] = ext.pop(_FOLLOWS_KEY)
        if isinstance(ext.get(_PARTIAL_KEY), bytes):
            found["partial_digest"] = ext.pop(_PARTIAL_KEY)
    elif cls is Refuse and _ELSEWHERE_KEY in ext:
        named: Any = ext.pop(_ELSEWHERE_KEY)
        found["elsewhere"] = tuple(_check_addresses(named.split(" ")))
    elif cls is Welcome and _PATH_KEY in ext:
        path: Any = _check_path(ext.pop(_PATH_KEY))
        places = range(0, len(path), _SESSION_NBYTES)
        found["path"] = tuple(path[at : at + _SESSION_NBYTES] for at in places)


def encode_header(
    message: Message,
    *,
    ext: Mapping[str, ExtValue] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """Encode the header of a message, without the frame's prefix.

    Fields that have their default value are left out of the header's map.

    Args:
        message: The message to encode.
        ext: Entries that the transport adds for the transport of its peer, at most 16.
        limits: Bounds that the receiver is expected to have.

    Raises:
        LocalProtocolError: A field has a wrong type or value, or the header is too large.
        ConfigError: A value in ``Update.values`` cannot travel.
    """
    cls = type(message)
    if cls not in _FIELDS:
        raise LocalProtocolError(f"{cls.__name__} is not a message")
    number, specs = _FIELDS[cls]
    defaults = _DEFAULTS[cls]
    where = cls.__name__
    rest: dict[str, Any] = {}
    try:
        for key, spec in specs.items():
            value = getattr(message, key)
            if value == defaults[key] and type(value) is type(defaults[key]):
                continue
            where = f"{cls.__name__}.{key}"
            rest[key] = value = _encode_field(key, value, spec)
            _check(value, spec, limits)
        where = f"{cls.__name__}.{_EXT_KEY}"
        if own := _entries_of(message):
            ext = {**(ext or {}), **own}
        if ext:
            rest[_EXT_KEY] = _check_ext(ext)
        where = cls.__name__
        if number > _ACK:
            header = bytes((number,)) + pack(rest)
        else:
            packed = pack(rest) if rest else b""
            header = _fixed_header(message, len(packed)) + packed  # type: ignore[arg-type]
    except ConfigError:
        # encode_values() says which of the user's values cannot travel.
        raise
    except _ILLEGAL as exc:
        raise LocalProtocolError(f"cannot encode {where}: {exc}") from exc
    if len(header) > limits.max_header_nbytes:
        raise LocalProtocolError(
            f"the header of this {where} has {len(header)} bytes; "
            f"at most {limits.max_header_nbytes} are allowed"
        )
    return header


def decode_header(
    data: bytes | bytearray | memoryview,
    *,
    limits: Limits = DEFAULT_LIMITS,
    manifest: Callable[[bytes, Limits], Any] = Manifest.decode,
) -> tuple[Message, dict[str, ExtValue] | None]:
    """Decode a header, checking every field.

    Args:
        data: The whole header, without the frame's prefix. Nothing in the result refers to this
            memory.
        limits: Bounds on what the peer may announce. A peer that may send no payloads may send
            neither updates, manifests nor a status.
        manifest: Called with the encoding of a manifest and the limits; the message holds the
            object that it returns.

    Returns:
        The message, and the extension map or ``None``.

    Raises:
        RemoteProtocolError: The header is malformed, its message type or one of its fields is
            unknown, or a field is missing, has a wrong type or is out of range.
    """
    number = data[0] if len(data) else 0
    cls = _TYPES.get(number)
    if cls is None:
        raise RemoteProtocolError(f"illegal header: unknown message type {number}")
    where = cls.__name__
    if cls in _FROM_SENDERS and not limits.max_payload_nbytes:
        raise RemoteProtocolError(f"this peer sends no weights, and it sent {where}")
    found: dict[str, Any] = {}
    ext = None
    try:
        start = _read_fixed(number, data, found) if number <= _ACK else 1
        if start == 1 or start < len(data):
            ext = _read_map(cls, data[start:], found, limits, manifest)
        message: Message = cls(**found)
    except _ILLEGAL as exc:
        raise _illegal(where, exc) from exc
    return message, ext


def _illegal(where: str, error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(f"illegal header ({where}): {str(error)[:300]}")


def _read_map(
    cls: type,
    data: bytes | bytearray | memoryview,
    found: dict[str, Any],
    limits: Limits,
    manifest: Callable[[bytes, Limits], Any],
) -> dict[str, ExtValue] | None:
    """Read the fields of a header's map into ``found``; return the extension map, if any is left.

    Raises:
        RemoteProtocolError: A field is unknown, has a wrong type or is out of range.
        InvalidData: It is no map, or too large a one.
    """
    # Only these two messages have values of a user, which may be many and nested.
    ext, specs, free = None, _FIELDS[cls][1], cls is Update or cls is Status
    rest = unpack(
        data,
        most=MAX_ITEMS if free else _MAX_FEW,
        most_containers=MAX_CONTAINERS if free else 2,
    )
    for key, value in rest.items():
        try:
            if key in specs:
                _check(value, specs[key], limits)
                found[key] = manifest(value, limits) if key == "manifest" else value
            elif key == _EXT_KEY:
                ext = _check_ext(value)
            else:
                raise InvalidData(f"unknown field of {cls.__name__}")
        except _ILLEGAL as exc:
            # An unauthenticated peer may have written the key: its control characters are escaped.
            raise _illegal(ascii(key[:40])[1:-1], exc) from exc
    if ext is None:
        return None
    try:
        _take_entries(cls, ext, found)
    except _ILLEGAL as exc:
        raise _illegal(_EXT_KEY, exc) from exc
    return ext or None


def _read_fixed(number: int, data: bytes | bytearray | memoryview, found: dict[str, Any]) -> int:
    """Read the fields at fixed places into ``found``. Return the offset of the map."""
    if number == _ACK:
        size = _ACK_HEADER.size
        _, status, flags, epoch, version, nbytes = _ACK_HEADER.unpack_from(data)
        found["status"] = _STATUS[status]
    else:
        size = _UPDATE_HEADER.size
        _, has, flags, index, count, epoch, version, digest, checksum, state, nbytes = (
            _UPDATE_HEADER.unpack_from(data)
        )
        if has > _HAS_CHECKSUM | _HAS_STATE or index >= (count or 1):
            raise InvalidData("unknown flags, or an index that is not below its count")
        found["digest"] = digest
        found["chunk"] = (index, count) if count else None
        found["checksum"] = checksum if has & _HAS_CHECKSUM else None
        found["state"] = state if has & _HAS_STATE else None
    if flags or not (0 < epoch <= _INT and 0 < version <= _INT) or size + nbytes != len(data):
        raise InvalidData("an epoch, a version or a length that cannot be")
    found.update(epoch=epoch, version=version)
    return size
