"""The messages of a link, and their header maps.

Every message is a frozen dataclass. :func:`encode_header` and :func:`decode_header` turn it
into the msgpack map of a frame and back, and check every field in both directions; the
constructors check nothing. This module must never import asyncio, anyio or torch. The
messages are written down in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from aiosync.errors import LocalProtocolError, RemoteProtocolError
from aiosync.types import AckStatus, Limits
from aiosync.wire._counted import Maker, Templates, join, with_counter
from aiosync.wire._fields import (
    MAX_ERROR_TEXT_NBYTES,
    MAX_ERROR_TYPE_NBYTES,
    REQUIRED,
    Convert,
    Field,
    bool_field,
    check_ext,
    checksum_field,
    chunk_field,
    clipped_field,
    digest_field,
    int_field,
    manifest_field,
    status_field,
    str_field,
    values_field,
)
from aiosync.wire.manifest import DEFAULT_LIMITS, Manifest
from aiosync.wire.packing import InvalidData, check_value, pack_header, unpack_header

__all__ = [
    "MAX_ERROR_TEXT_NBYTES",
    "MAX_ERROR_TYPE_NBYTES",
    "Ack",
    "ExtValue",
    "Hello",
    "ManifestMessage",
    "Message",
    "Refuse",
    "Release",
    "Segment",
    "Update",
    "Welcome",
    "decode_header",
    "decode_header_keys",
    "encode_header",
    "maker_of",
]

ExtValue: TypeAlias = int | str | bytes | bool
"""What the extension map of a header may hold."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a link: who is there, and what it already has.

    Attributes:
        role: ``"sender"`` or ``"receiver"``, or what a scheme defines.
        model_id: Which model of the process this link is for.
        pid: Process id of the sender of this message.
        worker_idx: Index that a receiver asks for; ``None`` lets the other side choose.
        strategy: Name of the strategy that the weights are extracted and applied with.
        has_target: A receiver already knows the module that it applies to.
        epoch: Epoch of the weights that a receiver has; ``None`` when it has none.
        version: Version of the weights that a receiver has; ``None`` when it has none.
    """

    role: str
    model_id: str
    pid: int
    worker_idx: int | None = None
    strategy: str = "tensordict"
    has_target: bool = True
    epoch: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Welcome:
    """Positive answer to :class:`Hello`.

    Attributes:
        epoch: Epoch of the sender of weights.
        version: Its current version; 0 when nothing was sent yet.
        worker_idx: Index that the receiver has from now on.
        num_workers: How many workers the sender expects; ``None`` when it does not know.
    """

    epoch: int
    version: int
    worker_idx: int
    num_workers: int | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Negative answer to :class:`Hello`; the link is closed after it.

    Attributes:
        error_type: Name of the exception's type, clipped to 256 bytes when encoded.
        error_text: Reason for a human, clipped to 4 KiB when encoded.
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
        checksum: Checksum of the payload, 1 to 64 bytes, if the link uses one.
    """

    epoch: int
    version: int
    digest: bytes
    codec: str = "dense"
    values: Mapping[str, Any] = field(default_factory=dict)
    chunk: tuple[int, int] | None = None
    checksum: bytes | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is one whole dense payload, with nothing beside it."""
        return (
            not self.values
            and self.codec == "dense"
            and self.chunk is None
            and self.checksum is None
        )


@dataclass(frozen=True, slots=True)
class Ack:
    """What a receiver says about one update.

    Attributes:
        epoch: Epoch of the update.
        version: Version of the update.
        status: RECEIVED, APPLIED or NACK.
        error_type: For a NACK, the name of the exception's type; clipped to 256 bytes.
        error_text: For a NACK, the exception's text; clipped to 4 KiB.
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
class Release:
    """A receiver no longer reads a slot of a shared-memory segment.

    Attributes:
        segment_id: Segment that the slot is in.
        slot: Index of the slot.
        serial: Which use of the slot is meant; a release of an older use is ignored.
        retained: The receiver keeps reading the slot, and only says that it is done with
            everything older.
    """

    segment_id: int
    slot: int
    serial: int
    retained: bool = False


Message: TypeAlias = Hello | Welcome | Refuse | ManifestMessage | Update | Ack | Segment | Release
"""Any message."""


_U32 = 2**32 - 1
_IDX = 2**31 - 1
_SLOTS = 65535

_EPOCH = int_field("epoch", 1)
_VERSION = int_field("version", 1)

_FIELDS: dict[type, tuple[str, tuple[Field, ...]]] = {
    Hello: (
        "hello",
        (
            str_field("role"),
            str_field("model_id", empty=True),
            int_field("pid", 0, _U32),
            int_field("worker_idx", 0, _IDX, default=None),
            str_field("strategy", "tensordict"),
            bool_field("has_target", True),
            int_field("epoch", 1, default=None),
            int_field("version", 0, default=None),
        ),
    ),
    Welcome: (
        "welcome",
        (
            _EPOCH,
            int_field("version", 0),
            int_field("worker_idx", 0, _IDX),
            int_field("num_workers", 0, _IDX, default=None),
        ),
    ),
    Refuse: (
        "refuse",
        (
            clipped_field("error_type", MAX_ERROR_TYPE_NBYTES),
            clipped_field("error_text", MAX_ERROR_TEXT_NBYTES),
        ),
    ),
    ManifestMessage: ("manifest", (manifest_field("manifest"),)),
    Update: (
        "update",
        (
            _EPOCH,
            _VERSION,
            digest_field("digest"),
            str_field("codec", "dense"),
            values_field("values"),
            chunk_field("chunk"),
            checksum_field("checksum"),
        ),
    ),
    Ack: (
        "ack",
        (
            _EPOCH,
            _VERSION,
            status_field("status"),
            clipped_field("error_type", MAX_ERROR_TYPE_NBYTES, ""),
            clipped_field("error_text", MAX_ERROR_TEXT_NBYTES, ""),
        ),
    ),
    Segment: (
        "segment",
        (
            int_field("segment_id", 0),
            int_field("slot_nbytes", 0),
            int_field("num_slots", 1, _SLOTS),
        ),
    ),
    Release: (
        "release",
        (
            int_field("segment_id", 0),
            int_field("slot", 0, _SLOTS - 1),
            int_field("serial", 0),
            bool_field("retained", False),
        ),
    ),
}


class _Spec(NamedTuple):
    cls: type
    loads: dict[str, Convert]
    required: frozenset[str]


_SPECS = {
    name: _Spec(
        cls,
        {each.name: each.load for each in fields},
        frozenset(each.name for each in fields if each.default is REQUIRED),
    )
    for cls, (name, fields) in _FIELDS.items()
}
_LARGE = (ManifestMessage,)

# Messages of which only a counter changes from one to the next; see aiosync.wire._counted.
_INT_ONLY = {int}
_COUNTER: dict[type, str] = {Ack: "version", Update: "version", Release: "serial"}


def _ack_key(message: Ack, ext: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if message.error_type or message.error_text or type(message.status) is not AckStatus:
        return None
    return (Ack, message.epoch, message.status, ext)


def _update_key(message: Update, ext: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if message.values or message.chunk is not None or message.checksum is not None:
        return None
    if type(message.digest) is not bytes:
        return None
    return (Update, message.epoch, message.digest, message.codec, ext)


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
    if type(message) is Update and not message.values:
        sent, digest, codec = message.epoch, message.digest, message.codec
        chunk, checksum = message.chunk, message.checksum
        return lambda version: Update(sent, version, digest, codec, chunk=chunk, checksum=checksum)
    return None


_TYPE_KEY = "t"
_EXT_KEY = "x"
_IGNORED_PREFIX = "x-"


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
    spec = _FIELDS.get(cls)
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
        packed = pack_header(header, large=cls in _LARGE)
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
        RemoteProtocolError: Malformed; an unknown message type; an unknown field whose name
            does not start with ``"x-"``; a missing, wrong-typed or out-of-range field.
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
        spec = _SPECS.get(kind) if type(kind) is str else None
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
                _check_unknown(key, value)
        where = cls.__name__
        if not required <= values.keys():
            raise InvalidData(f"without {', '.join(sorted(required - values.keys()))}")
        message: Message = cls(**values)
    except InvalidData as exc:
        raise RemoteProtocolError(
            f"illegal header ({where}): {exc}" if where else f"illegal header: {exc}"
        ) from exc
    return message, ext, last


def _check_unknown(key: object, value: Any) -> None:
    """Let a field from a later revision pass if its name says that it may be ignored."""
    if type(key) is not str or not key.startswith(_IGNORED_PREFIX):
        shown = repr(key[:40]) if isinstance(key, str | bytes) else type(key).__name__
        raise InvalidData(f"unknown field {shown}")
    check_value(value, 2)
