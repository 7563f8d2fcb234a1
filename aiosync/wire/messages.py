"""The messages of a link.

Messages are frozen dataclasses whose constructors check nothing: ``wire.headers`` checks every
field, in both directions. This module must never import asyncio, anyio or torch. The messages are
specified in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiosync.types import AckStatus
from aiosync.wire.manifest import Manifest

__all__ = [
    "MAX_ADDRESS_NBYTES",
    "MAX_BEHIND",
    "MAX_ELSEWHERE",
    "MAX_ERROR_TEXT_NBYTES",
    "MAX_ERROR_TYPE_NBYTES",
    "MAX_PATH",
    "MAX_STREAMS",
    "MAX_WORKER_IDX",
    "NONCE_NBYTES",
    "Ack",
    "Challenge",
    "Current",
    "DeviceSlot",
    "ExtValue",
    "Fetch",
    "Hello",
    "Join",
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
        partial_digest: Digest of the manifest of that update; empty from a receiver that does not
            say it. It travels in the extension map.
        parts: True if each update of a sender may hold only a part of the names, so that no update
            replaces another one.
        slots: True if a receiver can read slots of shared memory in place.
        take_over: True if a sender asks for its place back although another sender may have
            replaced it.
        serves: Address at which a receiver serves what it gets to others; empty for none. It
            travels in the extension map.
        follows: True if a receiver that a :class:`Refuse` sends on dials the addresses which that
            names. False from one that was sent on, and admitted nowhere. It travels in the
            extension map.
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
    serves: str = ""
    follows: bool = False
    partial_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Positive answer to :class:`Hello`.

    Attributes:
        epoch: Epoch of the sender of weights.
        version: Current version of the sender; 0 if it has sent nothing yet.
        worker_idx: Index that the receiver has from now on.
        num_workers: Number of workers that the sender expects; ``None`` if it does not know.
        note: A hint for a human, for the time before the first version.
        path: BLAKE2b digests, of 16 bytes, of the sessions of the weight servers from the first one
            to the one that answers; empty from a trainer. It travels in the extension map.
    """

    epoch: int
    version: int
    worker_idx: int
    num_workers: int | None = None
    note: str = ""
    path: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """Negative answer to :class:`Hello`; its sender closes the link after it.

    Attributes:
        error_type: Name of the exception's type, clipped to 256 bytes when encoded.
        error_text: The reason, for a human; clipped to 3 KiB when encoded.
        elsewhere: Addresses at which the receiver may be admitted, in the order in which it should
            try them. They travel in the extension map.
    """

    error_type: str
    error_text: str
    elsewhere: tuple[str, ...] = ()


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
        codec: Encoding of the payload; ``"dense"`` is the plain bytes of the manifest's leaves,
            ``"delta"`` their difference to an older update.
        values: Non-tensor leaves by name; see :func:`aiosync.wire.encode_values`. Tuples
            arrive as lists.
        chunk: (index, count) if the payload is one of several chunks.
        checksum: Checksum of the leaves' bytes in the frame, 16 bytes, if the link uses one.
        state: Checksum over the whole payload of an update, 16 bytes, on its last chunk;
            see :func:`aiosync.wire.state_checksum`.
        trace: The traceparent of the sender's span, if it has one. It travels in the extension map,
            on the last chunk.
        base: Version of the older update, of the same epoch, and the number of the leaves' bytes;
            for the codec ``"delta"`` only. It travels in the extension map.
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
    base: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledgement of one update by a receiver.

    Attributes:
        epoch: Epoch of the update.
        version: Version of the update.
        status: RECEIVED, APPLIED, NACK or SKIPPED.
        error_type: For a NACK, the name of the exception's type; clipped to 256 bytes.
        error_text: For a NACK, the exception's text; clipped to 3 KiB.
        is_base: True if the receiver keeps the update's bytes, and takes the next one as a delta to
            it. It travels in the extension map.
        behind: Number of workers that get their versions from this receiver, over any number of
            hops, at most 2**32 - 1, and the oldest version among them, 0 if one has none. It
            travels in the extension map. The acknowledgement then need not be of a version under
            way.
    """

    epoch: int
    version: int
    status: AckStatus
    error_type: str = ""
    error_text: str = ""
    is_base: bool = False
    behind: tuple[int, int] | None = None


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
class Join:
    """The dialer's first message on each connection of a link that has several.

    The listener answers each with the same message, and dialers wait for it. With the last of them
    the connections become the link, of which that answer is the first message.

    Attributes:
        link: 16 random bytes that name the link, never used again.
        index: Number of this connection, from 0.
        count: Number of connections of the link.
    """

    link: bytes
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """A receiver's request for the newest version. The answer is an update, or :class:`Current`.

    Attributes:
        min_version: The answer waits until the sender has a version that is at least this; 0 does
            not wait.
        has_none: The receiver's model has no version any more: send the newest one again.
    """

    min_version: int
    has_none: bool = False


@dataclass(frozen=True, slots=True)
class Current:
    """Answer to :class:`Fetch` that names the newest version.

    The receiver has that version already, or the version follows this message, perhaps after other
    updates with names that the receiver lacks. A version that comes again follows it.

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
    | Join
    | Fetch
    | Current
    | Status
    | Setup
    | Leave
)
"""Any message."""

# -- bounds on the fields -------------------------------------------------------------------------

MAX_ERROR_TYPE_NBYTES = 256
"""Greatest size of the name of an exception's type, in UTF-8 bytes; encoding clips longer ones."""

MAX_ERROR_TEXT_NBYTES = 3072
"""Greatest size of an error's text, in UTF-8 bytes; encoding clips longer ones."""

MAX_ADDRESS_NBYTES = 255
"""Greatest size of an address, in UTF-8 bytes."""

MAX_BEHIND = 2**32 - 1
"""Greatest number of workers behind a receiver."""

MAX_PATH = 16
"""Greatest number of weight servers in a row."""

MAX_STREAMS = 16
"""Greatest number of connections of a link."""

MAX_ELSEWHERE = 8
"""Greatest number of addresses to which a receiver is sent on: more would not fit into a header."""

MAX_WORKER_IDX = 2**16 - 1
"""Greatest index of a worker, and greatest number of workers."""

NONCE_NBYTES = 32
"""Bytes of a nonce."""
