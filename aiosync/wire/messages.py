"""The messages of a link, and their headers.

Messages are frozen dataclasses whose constructors check nothing; :func:`encode_header` and
:func:`decode_header` turn them into the bytes of a header and back, and check every field in both
directions. The headers of an update, of its chunks and of their acknowledgements have fields at
fixed places; the other headers are msgpack maps. The end of this module encodes the statistics in a
status. This module must never import asyncio, anyio or torch. The messages are specified in
``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeGuard, get_args, get_origin, get_type_hints

from aiosync.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from aiosync.events import SyncStats, WorkerStats
from aiosync.types import AckStatus, Limits
from aiosync.wire.manifest import DEFAULT_LIMITS, DIGEST_NBYTES, Manifest
from aiosync.wire.values import (
    MAX_CONTAINERS,
    MAX_ITEMS,
    InvalidData,
    encode_values,
    pack,
    unpack,
)

__all__ = [
    "MAX_ERROR_TEXT_NBYTES",
    "MAX_ERROR_TYPE_NBYTES",
    "MAX_WORKER_IDX",
    "NONCE_NBYTES",
    "Ack",
    "Challenge",
    "Current",
    "DeviceSlot",
    "ExtValue",
    "Fetch",
    "Hello",
    "Leave",
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
    "is_traceparent",
    "stats_from",
    "stats_values",
]

ExtValue: TypeAlias = int | str | bytes | bool
"""Type of a value in the extension map of a header."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a link: the role of the peer, and the weights that it already has.

    Attributes:
        role: ``"sender"``, ``"receiver"`` or ``"status"``, or a role that a scheme defines.
        model_id: The model of the process that this link is for.
        pid: Id of the process that sends this message.
        worker_idx: Index that a receiver asks for; ``None`` lets the other side choose.
        strategy: Name of the strategy that extracts and applies the weights.
        has_target: True if a receiver already knows the module that it applies weights to.
        epoch: Epoch of the weights that a receiver has; ``None`` if it has none.
        version: Version of the weights that a receiver has; ``None`` if it has none.
        session: Identifies the receiver object across reconnections, 16 bytes; ``None`` if it
            never reconnects.
        subscribe: True asks for every update, False only for those that a :class:`Fetch` asks for.
        partial_epoch: Epoch of an update that a receiver has in part; ``None`` for none.
        partial_version: Version of that update; ``None`` for none.
        partial_nbytes: Bytes from the start of that update's payload that are staged and
            verified already.
        parts: True if each update of a sender may hold only a part of the names, so that no update
            replaces another one.
        slots: True if a receiver can read slots of shared memory in place.
        take_over: True if a sender asks for its place back although another sender may have
            replaced it.
    """

    role: str
    model_id: str
    pid: int
    worker_idx: int | None = None
    strategy: str = "tensordict"
    has_target: bool = True
    epoch: int | None = None
    version: int | None = None
    session: bytes | None = None
    subscribe: bool = True
    partial_epoch: int | None = None
    partial_version: int | None = None
    partial_nbytes: int = 0
    parts: bool = False
    slots: bool = False
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """Positive answer to :class:`Hello`.

    Attributes:
        epoch: Epoch of the sender of weights.
        version: Current version of the sender; 0 if it has sent nothing yet.
        worker_idx: Index that the receiver has from now on.
        num_workers: Number of workers that the sender expects; ``None`` if it does not know.
        note: A hint for a human, for the time before the first version.
    """

    epoch: int
    version: int
    worker_idx: int
    num_workers: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Negative answer to :class:`Hello`; its sender closes the link after it.

    Attributes:
        error_type: Name of the exception's type, clipped to 256 bytes when encoded.
        error_text: The reason, for a human; clipped to 3 KiB when encoded.
    """

    error_type: str
    error_text: str


@dataclass(frozen=True, slots=True)
class ManifestMessage:
    """Announcement of a layout. Later updates name it by its digest.

    Attributes:
        manifest: The layout.
    """

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Update:
    """One version of the weights, or one chunk of it. The frame's payload holds the tensors.

    Attributes:
        epoch: Epoch of the sender, 1 to 2**63 - 1.
        version: Version within the epoch, 1 to 2**63 - 1.
        digest: Digest of the manifest that describes the payload, 16 bytes.
        codec: Encoding of the payload; ``"dense"`` is the plain bytes of the manifest's leaves.
        values: Non-tensor leaves by name; see :func:`aiosync.wire.encode_values`. Tuples
            arrive as lists.
        chunk: (index, count) if the payload is one of several chunks.
        checksum: Checksum of the frame's payload, 16 bytes, if the link uses one.
        state: Checksum over the whole payload of an update, 16 bytes, on its last chunk;
            see :func:`aiosync.wire.state_checksum`.
        trace: The traceparent of the sender's span, if it has one. It travels in the extension map,
            on the last chunk.
    """

    epoch: int
    version: int
    digest: bytes
    codec: str = "dense"
    values: Mapping[str, Any] = field(default_factory=dict)
    chunk: tuple[int, int] | None = None
    checksum: bytes | None = None
    state: bytes | None = None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledgement of one update by a receiver.

    Attributes:
        epoch: Epoch of the update.
        version: Version of the update.
        status: RECEIVED, APPLIED, NACK or SKIPPED.
        error_type: For a NACK, the name of the exception's type; clipped to 256 bytes.
        error_text: For a NACK, the exception's text; clipped to 3 KiB.
    """

    epoch: int
    version: int
    status: AckStatus
    error_type: str = ""
    error_text: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """Announcement of a shared-memory segment, whose descriptor travels beside the message.

    Attributes:
        segment_id: Id that the sender chose; unique on the link.
        slot_nbytes: Bytes of one slot, its header included.
        num_slots: Least number of slots in the segment, 1 to 65535.
        on_device: True if the segment only has the headers of slots whose payloads are in device
            memory; a :class:`DeviceSlot` announces each.
    """

    segment_id: int
    slot_nbytes: int
    num_slots: int
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """Announcement of a slot's device memory, whose descriptor travels beside the message.

    Attributes:
        segment_id: Id of an announced segment, which has the slot's header.
        index: Index of the slot.
        kind: Name of the driver's interface, for example ``"cuda"``.
        uuid: UUID of the device, 16 bytes.
        nbytes: Bytes of the device memory.
    """

    segment_id: int
    index: int
    kind: str
    uuid: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageMessage:
    """Announcement of the page of this link, whose descriptor travels beside the message."""


@dataclass(frozen=True, slots=True)
class Take:
    """A sender's request that a receiver takes the version that the word of its page names.

    Attributes:
        epoch: Epoch of the sender.
        version: The version that the word names, or an older one if the word has changed since;
            the receiver answers to this version as to an update. 0 asks for no answer.
    """

    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Promise:
    """A receiver's promise to take the version that its word names before it computes again.

    The sender then need not send a :class:`Take` for each version.

    Attributes:
        digest: Digest of the manifest for whose versions the promise holds. An empty digest ends
            the promise, and the sender answers it with the same message.
    """

    digest: bytes


@dataclass(frozen=True, slots=True)
class Challenge:
    """First message of both ends of a link that prove to each other that they share a token.

    The challenge of the dialer, the end that opened the link, is only a greeting: its nonce is not
    used.

    Attributes:
        nonce: 32 random bytes, never used again.
        required: True if the side that sent this has a token, and refuses a peer without one.
    """

    nonce: bytes
    required: bool = True


@dataclass(frozen=True, slots=True)
class Proof:
    """The dialer's answer to a :class:`Challenge`, and the listener's answer to that answer.

    The token itself never travels.

    Attributes:
        nonce: From the dialer, 32 random bytes, never used again; from the listener, the nonce of
            its :class:`Challenge`.
        mac: Authentication code over both nonces and the role of the side that made it, at most 64
            bytes; empty from a side that has no token.
    """

    nonce: bytes
    mac: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A receiver's request for the newest version. The answer is an update, or :class:`Current`.

    Attributes:
        min_version: The answer waits until the sender has a version that is at least this; 0 does
            not wait.
    """

    min_version: int


@dataclass(frozen=True, slots=True)
class Current:
    """Answer to :class:`Fetch` that names the newest version.

    The receiver has that version already, or the version follows this message, perhaps after other
    updates with names that the receiver lacks.

    Attributes:
        epoch: Epoch of the sender.
        version: Newest version of the sender; 0 if it has sent nothing yet.
    """

    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Last message of a side that was closed in order; that side closes the link after it.

    A process that dies sends none.
    """


@dataclass(frozen=True, slots=True)
class Status:
    """Answer to a :class:`Hello` whose role is ``"status"``.

    Attributes:
        values: The sender's report about itself and its receivers, as plain values like those of
            ``Update.values``.
    """

    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """One step in setting up the path on which payloads travel beside the link.

    Attributes:
        kind: Kind of the path, for example ``"gloo"``.
        key: Name of the step.
        value: Data that the peer needs for the step, at most 2 KiB.
    """

    kind: str
    key: str = ""
    value: bytes = b""


Message: TypeAlias = (
    Hello
    | Welcome
    | Refuse
    | ManifestMessage
    | Update
    | Ack
    | Segment
    | DeviceSlot
    | PageMessage
    | Take
    | Promise
    | Challenge
    | Proof
    | Fetch
    | Current
    | Status
    | Setup
    | Leave
)
"""Any message."""

# -- legal values of the fields -------------------------------------------------------------------

MAX_ERROR_TYPE_NBYTES = 256
"""Greatest size of the name of an exception's type, in UTF-8 bytes; encoding clips longer ones."""

MAX_ERROR_TEXT_NBYTES = 3072
"""Greatest size of an error's text, in UTF-8 bytes; encoding clips longer ones."""

MAX_WORKER_IDX = 2**16 - 1
"""Greatest index of a worker, and greatest number of workers."""

NONCE_NBYTES = 32
"""Bytes of a nonce."""

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
_EXT_KEY, _TRACE_KEY = "x", "trace"
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ILLEGAL = (ValueError, TypeError, KeyError, AttributeError, struct.error)


def is_traceparent(value: object) -> TypeGuard[str]:
    """Return True if a value is a traceparent of W3C Trace Context, version 00: 55 characters."""
    return isinstance(value, str) and _TRACEPARENT.fullmatch(value) is not None


def _check(value: Any, spec: _Spec, limits: Limits) -> None:
    kind, low, high = spec
    if type(value) is not kind:
        raise InvalidData(f"a {type(value).__name__} instead of a {kind.__name__}")
    is_number = kind is int or kind is bool
    size = value if is_number else len(value.encode() if kind is str else value)
    most = limits.max_name_nbytes if high == _NAME else high
    if not low <= size <= most:
        raise InvalidData(f"{size} is not from {low} to {most}")


def _check_ext(ext: Any) -> dict[str, ExtValue]:
    if not isinstance(ext, Mapping) or len(ext) > _MAX_FEW:
        raise InvalidData(f"no map of at most {_MAX_FEW} entries")
    if any(type(k) is not str or type(v) not in _EXT_TYPES for k, v in ext.items()):
        raise InvalidData("an entry is not a string with an int, str, bytes or bool")
    return dict(ext)


def _fixed_header(message: Update | Ack, rest_nbytes: int) -> bytes:
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
            if key == "values":
                value = encode_values(value)
            elif key == "manifest":
                value = Manifest.encode(value)
            elif specs is _ERRORS:
                # The text of an error must travel in any case, so lone surrogates become "?".
                clipped = value[: spec[2]].encode(errors="replace")[: spec[2]]
                value = clipped.decode(errors="ignore")
            _check(value, spec, limits)
            rest[key] = value
        trace = message.trace if cls is Update else None  # type: ignore[union-attr]
        if trace is not None and is_traceparent(trace):
            ext = {**(ext or {}), _TRACE_KEY: trace}
        if ext:
            where = f"{cls.__name__}.{_EXT_KEY}"
            rest[_EXT_KEY] = _check_ext(ext)
        where = cls.__name__
        if number > _ACK:
            header = bytes((number,)) + pack(rest)
        else:
            packed = pack(rest) if rest else b""
            header = _fixed_header(message, len(packed)) + packed  # type: ignore[arg-type]
    except ConfigError:  # encode_values() says which of the user's values cannot travel
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
        start = 1
        if number <= _ACK:
            start = _read_fixed(number, data, found)
        if start == 1 or start < len(data):
            free = cls is Update or cls is Status
            rest = unpack(
                data[start:],
                most=MAX_ITEMS if free else _MAX_FEW,
                most_containers=MAX_CONTAINERS if free else 2,
            )
            specs = _FIELDS[cls][1]
            for key, value in rest.items():
                where = key[:40]
                if key in specs:
                    _check(value, specs[key], limits)
                    found[key] = manifest(value, limits) if key == "manifest" else value
                elif key == _EXT_KEY:
                    ext = _check_ext(value)
                    if cls is Update and is_traceparent(ext.get(_TRACE_KEY)):
                        found["trace"] = ext.pop(_TRACE_KEY)
                        ext = ext or None
                else:
                    raise InvalidData(f"unknown field of {cls.__name__}")
            where = cls.__name__
        message: Message = cls(**found)
    except _ILLEGAL as exc:
        raise RemoteProtocolError(f"illegal header ({where}): {str(exc)[:300]}") from exc
    return message, ext


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


# -- the statistics in a status -------------------------------------------------------------------

_hints = functools.cache(get_type_hints)


def stats_values(stats: Iterable[SyncStats]) -> list[dict[str, Any]]:
    """Return statistics as the plain values that travel in a status."""
    return [asdict(each) for each in stats]


def stats_from(values: Any) -> tuple[SyncStats, ...]:
    """Read statistics that :func:`stats_values` made; fields of newer releases are left out.

    Args:
        values: The values that a peer sent. The limits of the peer's header bound their size.

    Raises:
        RemoteProtocolError: A field is missing, or its value does not fit its annotation.
    """
    try:
        found: tuple[SyncStats, ...] = _read(tuple[SyncStats, ...], values)
    except _ILLEGAL as exc:
        raise RemoteProtocolError(f"illegal statistics: {str(exc)[:300]}") from exc
    return found


def _read(kind: Any, value: Any) -> Any:
    """Check a value from a peer against the annotation ``kind``, and return it as that type."""
    origin, of = get_origin(kind), get_args(kind)
    if kind in (SyncStats, WorkerStats):
        fields = _hints(kind)
        known = {name: each for name, each in value.items() if name in fields}
        return kind(**{name: _read(fields[name], each) for name, each in known.items()})
    if origin is tuple:
        if type(value) is not list:
            raise TypeError(f"a {type(value).__name__} instead of a list")
        return tuple(_read(of[0], each) for each in value)
    if origin is Mapping:
        return {_read(of[0], name): _read(of[1], each) for name, each in value.items()}
    if origin is Literal:
        if value not in of:
            raise ValueError(f"{value!r:.40} is none of {', '.join(of)}")
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    if kind is not str and not 0 <= value < math.inf:
        raise ValueError(f"{value} is no count and no time")
    return value
