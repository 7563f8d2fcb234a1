"""The messages of a link, and their headers.

Frozen dataclasses whose constructors check nothing; :func:`encode_header` and
:func:`decode_header` turn them into the bytes of a header and back, and check every field in both
directions. An update, its chunks and their acknowledgements have headers of fixed places; the rest
are msgpack maps. At the end is what a status says of syncs. This module must never import asyncio,
anyio or torch. The messages are written down in ``docs/topics/wire-format.md``.
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
"""What the extension map of a header may hold."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a link: who is there, and what it already has.

    Attributes:
        role: ``"sender"``, ``"receiver"`` or ``"status"``, or what a scheme defines.
        model_id: Which model of the process this link is for.
        pid: Process id of the sender of this message.
        worker_idx: Index that a receiver asks for; ``None`` lets the other side choose.
        strategy: Name of the strategy that the weights are extracted and applied with.
        has_target: A receiver already knows the module that it applies to.
        epoch: Epoch of the weights that a receiver has; ``None`` when it has none.
        version: Version of the weights that a receiver has; ``None`` when it has none.
        session: Names the receiver object across reconnections, 16 bytes; ``None`` when it
            never reconnects.
        subscribe: Send every update; if false, only those that :class:`Fetch` asks for.
        partial_epoch: Epoch of an update that a receiver has in part; ``None`` for none.
        partial_version: Version of that update; ``None`` for none.
        partial_nbytes: Bytes from the start of that update's payload that are staged and
            verified already.
        parts: Updates of a sender may hold a part of the names, of which none replaces another.
        slots: A receiver can read slots of shared memory in place.
        take_over: A sender comes back although another one may have replaced it.
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
        version: Its current version; 0 when nothing was sent yet.
        worker_idx: Index that the receiver has from now on.
        num_workers: How many workers the sender expects; ``None`` when it does not know.
        note: What a human may want to know while nothing was sent yet.
    """

    epoch: int
    version: int
    worker_idx: int
    num_workers: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Negative answer to :class:`Hello`; the link is closed after it.

    Attributes:
        error_type: Name of the exception's type, clipped to 256 bytes when encoded.
        error_text: Reason for a human, clipped to 3 KiB when encoded.
    """

    error_type: str
    error_text: str


@dataclass(frozen=True, slots=True)
class ManifestMessage:
    """Announces a layout; later updates name it by its digest.

    Attributes:
        manifest: The layout.
    """

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Update:
    """One version of the weights, or one chunk of it. The tensors are the frame's payload.

    Attributes:
        epoch: Epoch of the sender, 1 to 2**63 - 1.
        version: Version within the epoch, 1 to 2**63 - 1.
        digest: Digest of the manifest that describes the payload, 16 bytes.
        codec: How the payload was made; ``"dense"`` is the plain bytes of the manifest.
        values: Non-tensor leaves by name; see :func:`aiosync.wire.encode_values`. Tuples
            arrive as lists.
        chunk: (index, count) when the payload is one of several parts.
        checksum: Checksum of the payload, 16 bytes, if the link uses one.
        state: Checksum over the whole payload of an update, 16 bytes, on its last chunk;
            see :func:`aiosync.wire.state_checksum`.
        trace: The traceparent of the sender's span, if it has one. Travels in the extension map, on
            the last chunk.
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
    """What a receiver says about one update.

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
    """Announces a shared-memory segment, whose descriptor travels beside the message.

    Attributes:
        segment_id: Chosen by the sender; unique on the link.
        slot_nbytes: Bytes of one slot.
        num_slots: Slots in the segment, 1 to 65535.
    """

    segment_id: int
    slot_nbytes: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class PageMessage:
    """Gives a receiver the page of this link, whose descriptor travels beside the message."""


@dataclass(frozen=True, slots=True)
class Take:
    """A receiver is to take what the word of its page names.

    Attributes:
        epoch: Epoch of the sender.
        version: The version that is named, or an older one where the word has moved; the
            receiver answers to it as to an update. 0: no answer is wanted.
    """

    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Promise:
    """A receiver takes what its word names without being told, before it computes again.

    Attributes:
        digest: Digest of the manifest for whose versions it does; empty for none any more, to
            which the sender answers with the same message.
    """

    digest: bytes


@dataclass(frozen=True, slots=True)
class Challenge:
    """First message of both ends of a link, where they prove that they share a token.

    That of the end which opened the link is a greeting: its nonce is not used.

    Attributes:
        nonce: 32 random bytes, never used again.
        required: The side that sent this has a token, and refuses who has none.
    """

    nonce: bytes
    required: bool = True


@dataclass(frozen=True, slots=True)
class Proof:
    """Answer to :class:`Challenge`, and the answer to that answer. The token never travels.

    Attributes:
        nonce: From who opened the link, 32 random bytes, never used again; from who accepted
            it, the nonce of its :class:`Challenge`.
        mac: Authentication code over both nonces and the role of who made it, at most 64
            bytes; empty from a side that has no token.
    """

    nonce: bytes
    mac: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A receiver asks for the newest version; the answer is an update, or :class:`Current`.

    Attributes:
        min_version: The answer waits until there is a version that is at least this; 0 takes
            what is there.
    """

    min_version: int


@dataclass(frozen=True, slots=True)
class Current:
    """Answer to :class:`Fetch`: what the newest version is.

    The receiver has it already, or it follows: after this message, and perhaps after updates
    that hold what it lacks.

    Attributes:
        epoch: Epoch of the sender.
        version: Its newest version; 0 when nothing was sent yet.
    """

    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Last message of a side that was closed, and did not die; the link is closed after it."""


@dataclass(frozen=True, slots=True)
class Status:
    """Answer to a :class:`Hello` whose role is ``"status"``.

    Attributes:
        values: What the sender says about itself and its receivers, as in ``Update.values``.
    """

    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """One step of setting up the way that payloads take beside the link.

    Attributes:
        kind: What is set up, for example ``"gloo"``.
        key: Which step.
        value: What the peer needs for it, at most 2 KiB.
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

# -- what the fields may hold ---------------------------------------------------------------------

MAX_ERROR_TYPE_NBYTES = 256
"""UTF-8 bytes of the name of an exception's type; longer ones are clipped when encoding."""

MAX_ERROR_TEXT_NBYTES = 3072
"""UTF-8 bytes of an error's text; longer ones are clipped when encoding."""

MAX_WORKER_IDX = 2**16 - 1
"""The highest index of a worker, and number of workers."""

NONCE_NBYTES = 32
"""Bytes of a nonce."""

_INT = 2**63 - 1
_U32 = 2**32 - 1
_NAME = -1  # as many bytes as the limits allow for a name
# Entries of a map where nobody may choose their names but this format: as many as hello has.
_MAX_FEW = 16
_EXT_TYPES = frozenset({int, str, bytes, bool})

_Spec: TypeAlias = "tuple[Any, int, int]"
"""Type of a field, and the least and the most of its value, or of its bytes."""

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
        {"segment_id": _COUNT, "slot_nbytes": _COUNT, "num_slots": (int, 1, 65535)},
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
}
_TYPES: dict[int, type] = {number: cls for cls, (number, _) in _FIELDS.items()}
_DEFAULTS: dict[type, dict[str, Any]] = {
    cls: {
        each.name: each.default if each.default_factory is MISSING else {} for each in fields(cls)
    }
    for cls in _FIELDS
}
_FROM_SENDERS = frozenset({Update, Status, ManifestMessage})  # of weights; anybody sends the others

_UPDATE_HEADER = struct.Struct("<BBHIIQQ16s16s16sI")
_HAS_CHECKSUM, _HAS_STATE = 1, 2  # the flags of an update
_ACK_HEADER = struct.Struct("<BBHQQI")
_NO_SUM = bytes(16)
_STATUS = {int(status): status for status in AckStatus}
_EXT_KEY, _TRACE_KEY = "x", "trace"
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ILLEGAL = (ValueError, TypeError, KeyError, AttributeError, struct.error)


def is_traceparent(value: object) -> TypeGuard[str]:
    """Whether this is one of W3C Trace Context, version 00: 55 characters."""
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

    Fields that have their default value are left out of its map.

    Args:
        message: What to encode.
        ext: Entries that a transport adds for its peer, at most 16.
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
                # An error's text must travel whatever it holds; lone surrogates become "?".
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
    except ConfigError:  # of the user's values
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
        data: The whole header, without the frame's prefix. Nothing in the result refers to it.
        limits: Bounds on what the peer may announce. One that may send no payloads may send
            neither updates, layouts nor a status.
        manifest: Called with the encoding of a manifest and the limits; the message holds what it
            returns.

    Returns:
        The message, and the extension map or ``None``.

    Raises:
        RemoteProtocolError: Malformed; an unknown message type or field; a missing, wrong-typed
            or out-of-range field.
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
    """Read the fields of fixed places; returns where the map begins."""
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
    """Return statistics as they travel in a status."""
    return [asdict(each) for each in stats]


def stats_from(values: Any) -> tuple[SyncStats, ...]:
    """Read what :func:`stats_values` made; fields of newer releases are left out.

    Args:
        values: What a peer sent; the limits of its header bound how much that is.

    Raises:
        RemoteProtocolError: A field is missing, or is not what its annotation says.
    """
    try:
        found: tuple[SyncStats, ...] = _read(tuple[SyncStats, ...], values)
    except _ILLEGAL as exc:
        raise RemoteProtocolError(f"illegal statistics: {str(exc)[:300]}") from exc
    return found


def _read(kind: Any, value: Any) -> Any:
    """A value as its annotation says."""
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
