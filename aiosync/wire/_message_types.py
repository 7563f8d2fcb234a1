"""The messages of a link: frozen dataclasses, whose constructors check nothing.

Their header maps are made and read by :mod:`aiosync.wire.messages`. This module must never
import asyncio, anyio or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiosync.types import AckStatus
from aiosync.wire.manifest import Manifest

__all__ = [
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
        state: Checksum over the whole payload of an update, 1 to 64 bytes, on its last chunk;
            see :func:`aiosync.wire.state_checksum`.
    """

    epoch: int
    version: int
    digest: bytes
    codec: str = "dense"
    values: Mapping[str, Any] = field(default_factory=dict)
    chunk: tuple[int, int] | None = None
    checksum: bytes | None = None
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """What a receiver says about one update.

    Attributes:
        epoch: Epoch of the update.
        version: Version of the update.
        status: RECEIVED, APPLIED, NACK or SKIPPED.
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
        value: What the peer needs for it, at most 32 KiB.
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
)
"""Any message."""
