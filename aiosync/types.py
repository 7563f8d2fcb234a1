"""Identifiers, enums and small frozen dataclasses that every layer shares.

No behaviour lives here. This module imports nothing from aiosync but
:mod:`aiosync.errors`, and neither asyncio, anyio nor torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aiosync.errors import AiosyncError

__all__ = [
    "AckStatus",
    "Cancellation",
    "Capabilities",
    "Limits",
    "Require",
    "SendReport",
]

Require: TypeAlias = Literal["all"] | int | float
"""The workers whose success makes a send one: all, at least so many, or at least that fraction."""


class AckStatus(enum.IntEnum):
    """The answer of a receiver to one update."""

    RECEIVED = 1
    """Every byte arrived and was staged; the module is unchanged so far."""
    APPLIED = 2
    """The module is on this version."""
    NACK = 3
    """The update was refused; the module kept the version it had."""
    SKIPPED = 4
    """A newer update replaced this one, which is never applied."""


class Cancellation(enum.Enum):
    """The effect of cancelling an operation in the middle."""

    SAFE = "A"
    """Nothing happened, or all of it did."""
    BREAKS_LINK = "B"
    """Safe until the first byte; after it the link is broken for good."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a peer may announce, checked before anything is allocated for it.

    The defaults are those of links to other hosts. Within one host a payload may be up to 1 TiB if
    no ``Limits`` are given.

    Attributes:
        max_header_nbytes: Bytes of one message header (a manifest travels in a header).
        max_payload_nbytes: Bytes of one payload.
        max_buffer_nbytes: Bytes that ``recv()`` allocates itself when no buffer is lent.
        max_tensors: Leaves in one manifest.
        max_name_nbytes: UTF-8 bytes of one name.
        max_ndim: Dimensions of one tensor.
    """

    max_header_nbytes: int = 16 * 2**20
    max_payload_nbytes: int = 2**36
    max_buffer_nbytes: int = 2**30
    max_tensors: int = 200_000
    max_name_nbytes: int = 1024
    max_ndim: int = 32


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of a transport, and the behaviour of its operations.

    The conformance suite checks the cancellation classes. It takes from here what a link connects,
    and how payloads travel.

    Attributes:
        name: Registry name, for example ``"memory"`` or ``"shm"``.
        cross_process: The two ends may live in different processes.
        cross_host: The two ends may live on different hosts.
        whole_payloads: Large payloads travel beside the link, whole, protected by the medium that
            carries them; they are never cut into parts with checksums of their own.
        zero_copy_recv: ``recv()`` without lent buffers returns a view of memory that the sender
            wrote; the memory stays as it is while any code holds a view.
        send_cancellation: Class of ``send()``.
        recv_cancellation: Class of ``recv()``.
        exceptions: Names of conformance checks that do not hold, with the reason; "*" for all.
    """

    name: str
    cross_process: bool = True
    cross_host: bool = False
    whole_payloads: bool = False
    zero_copy_recv: bool = False
    send_cancellation: Cancellation = Cancellation.BREAKS_LINK
    recv_cancellation: Cancellation = Cancellation.BREAKS_LINK
    exceptions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, init=False)
class SendReport:
    """The result of one send.

    Attributes:
        epoch: Epoch of the sender.
        version: Version that was sent.
        acked: Workers that applied exactly this version; through shared memory also those whose
            next forward uses it, or a newer one. Of this host, and not over plain TCP, no process
            that had ended by then.
        skipped: Workers that never applied this version because a newer one overtook it, on its way
            or while it waited there, with that newer version.
        failed: Workers that did not get it, with the reason. Empty unless the ``require`` policy of
            the scheme tolerated the failure. Of the workers in ``waiting``, those that refused an
            earlier version after its send had returned, with their error.
        lost: Workers that had gone before this send, and were reported by an earlier one; or that
            died since the last report, and whose index another process has now.
        left: Workers that were closed since the last report, and so neither have this version nor
            failed. Later reports name them only if ``worker_ids`` does; a worker that comes back
            gets the update that it was sent last.
        waiting: Workers that had not answered when as many as ``require`` asks for had. The update
            goes on to them in the background. Empty with ``require="all"``.
        elapsed: Seconds from the call until the result was settled: by the last worker that
            ``require`` needs.
        nbytes: Payload bytes of the update, counted once.
    """

    epoch: int
    version: int
    acked: frozenset[int]
    skipped: Mapping[int, int]
    failed: Mapping[int, AiosyncError]
    lost: Mapping[int, AiosyncError]
    left: frozenset[int]
    waiting: frozenset[int]
    elapsed: float
    nbytes: int

    # The constructor that dataclasses make sets the fields of a frozen class one by one, for 3 us
    # of a send that takes 50.
    def __init__(
        self,
        epoch: int,
        version: int,
        acked: frozenset[int],
        skipped: Mapping[int, int] | None = None,
        failed: Mapping[int, AiosyncError] | None = None,
        lost: Mapping[int, AiosyncError] | None = None,
        left: frozenset[int] = frozenset(),
        waiting: frozenset[int] = frozenset(),
        elapsed: float = 0.0,
        nbytes: int = 0,
    ) -> None:
        """Set all fields."""
        self.__dict__.update(
            epoch=epoch,
            version=version,
            acked=acked,
            skipped=skipped or {},
            failed=failed or {},
            lost=lost or {},
            left=left,
            waiting=waiting,
            elapsed=elapsed,
            nbytes=nbytes,
        )
