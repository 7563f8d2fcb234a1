"""Encoding and decoding of frames, and the checksums of their payloads.

A frame is a fixed prefix, a header, and a payload that the decoder puts into buffers of the caller.
The content of a header, with the fixed places of an update and of an acknowledgement, is in
``headers``; their fields are those of ``messages``.

The decoder does no I/O: it returns the memory for the next bytes, and the events that the bytes so
far make up; it never reads and never waits. This module must never import asyncio, anyio or torch.
The byte layout is specified in ``docs/topics/wire-format.md``.

A checksum finds accidents, not attacks. It is XXH3 with 128 bits, because a checksum must not slow
down the link that it protects: a loopback socket moves 3 to 5 GB/s, and on the same machine zlib's
CRC-32 reads 1.7 GB/s, XXH3 10 GB/s in cold memory and 30 GB/s in the cache. An attacker can make
other bytes with the same checksum; only TLS protects against that.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import xxhash
from typing_extensions import Buffer

from aiosync.errors import (
    FrameTooLarge,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    WireVersionMismatch,
)
from aiosync.types import Limits
from aiosync.wire.headers import decode_header, encode_header
from aiosync.wire.manifest import DEFAULT_LIMITS, Manifest
from aiosync.wire.messages import ExtValue, ManifestMessage, Message

__all__ = [
    "CHECKSUM_NBYTES",
    "MAGIC",
    "PREFIX_NBYTES",
    "READ_AHEAD_NBYTES",
    "WIRE_VERSION",
    "FrameDecoder",
    "FrameEnd",
    "FrameStart",
    "RunningChecksum",
    "checksum",
    "encode_frame",
    "state_checksum",
]

WIRE_VERSION = 2
"""Version of the wire format."""

MAGIC = b"AIOS"
"""The first bytes of every frame."""

PREFIX_NBYTES = 24
"""Bytes of the fixed prefix of a frame."""

READ_AHEAD_NBYTES = 65536
"""Bytes that a decoder may hold beyond the events that its caller has taken."""

CHECKSUM_NBYTES = 16
"""Bytes of a checksum. A checksum of another length was made by another function, and so never
matches."""

# Magic, wire version, flags, reserved, header_nbytes, CRC-32 of the header, payload_nbytes.
_PREFIX = struct.Struct("<4sBBHIIQ")
_SMALL_NBYTES = PREFIX_NBYTES + 4096
# Smaller rests of a lent buffer are filled through the read-ahead, to save system calls.
_DIRECT_NBYTES = 4096
# From a payload of at least this size on, the decoder reads ahead little: the next payload is
# likely to be as large, and every byte of it that is read ahead has to be copied.
_LARGE_NBYTES = 2**20
_EMPTY = memoryview(bytearray())


def encode_frame(
    message: Message,
    payload_nbytes: int = 0,
    *,
    ext: Mapping[str, ExtValue] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """Encode the prefix and the header of one frame; the payload follows them on the link.

    Args:
        message: The message to send.
        payload_nbytes: Bytes of the payload that will follow.
        ext: Entries that the transport adds for the transport of its peer, at most 16.
        limits: Bounds that the receiver is expected to have.

    Raises:
        LocalProtocolError: A field is illegal, or the header or payload is over the limits.
        ConfigError: A value in ``Update.values`` cannot travel.
    """
    if not 0 <= payload_nbytes <= limits.max_payload_nbytes:
        raise LocalProtocolError(
            f"a payload of {payload_nbytes} bytes is not allowed; "
            f"the limit is {limits.max_payload_nbytes}"
        )
    header = encode_header(message, ext=ext, limits=limits)
    crc = zlib.crc32(header)
    return _PREFIX.pack(MAGIC, WIRE_VERSION, 0, 0, len(header), crc, payload_nbytes) + header


@dataclass(slots=True)
class FrameStart:
    """The event that a header arrived.

    If the frame has no payload this event is the whole frame, and no :class:`FrameEnd` follows. If
    it has one, the decoder waits for :meth:`FrameDecoder.lend`.

    Attributes:
        message: The decoded message.
        ext: Entries that the peer's transport added, or ``None``.
        payload_nbytes: Bytes of the payload; 0 for none.
    """

    message: Message
    ext: Mapping[str, ExtValue] | None
    payload_nbytes: int


@dataclass(frozen=True, slots=True)
class FrameEnd:
    """The event that a payload is complete. The decoder has dropped the lent buffers."""


_FRAME_END = FrameEnd()


class FrameDecoder:
    """A decoder that turns the bytes of a link into events, without a copy of the payload.

    The loop of a transport is: take events with :meth:`next_event` until it returns ``None``,
    read into :meth:`get_buffer`, and report the bytes with :meth:`buffer_updated`. When a
    :class:`FrameStart` announces a payload, lend the buffers for it with :meth:`lend`.
    A large manifest is decoded in steps: while :attr:`is_busy` is true, call :meth:`next_event`
    again, once in each turn of an event loop.

    The decoder uses memory for one header of at most ``limits.max_header_nbytes``, and 64 KiB;
    4 KiB for a peer that may send no payloads. It must not be used after an error, and is not
    thread-safe.

    Args:
        limits: Bounds on what the peer may announce, checked before anything is allocated.

    Attributes:
        limits: The bounds. May be assigned: the new bounds hold from the next frame on.
        missing_nbytes: Bytes of the payload that have not arrived yet.
        needs_buffers: True if a payload was announced and :meth:`lend` was not called yet.
    """

    __slots__ = (
        "_ahead",
        "_buffer",
        "_end",
        "_head_nbytes",
        "_in_payload",
        "_pieces",
        "_start",
        "_unfinished",
        "limits",
        "missing_nbytes",
        "needs_buffers",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits: Limits = limits
        self.missing_nbytes: int = 0
        self.needs_buffers: bool = False
        self._buffer = _EMPTY
        # The bytes of the buffer that were read ahead and are not used yet.
        self._start = self._end = 0
        # Greatest size of the buffer for one read, in bytes.
        self._ahead = READ_AHEAD_NBYTES
        # Bytes of the prefix and header of which only a part has arrived; 0 otherwise.
        self._head_nbytes = 0
        self._in_payload = False
        # The lent buffers that are still to be filled, in reverse order.
        self._pieces: list[memoryview] = []
        # The event whose manifest is still being decoded.
        self._unfinished: FrameStart | None = None

    @property
    def is_busy(self) -> bool:
        """True if :meth:`next_event` can go on without more bytes, although it returned ``None``.

        It then has more steps of a manifest to decode.
        """
        return self._unfinished is not None

    @property
    def mid_frame(self) -> bool:
        """True if some but not all bytes of a frame have arrived.

        Ask only after :meth:`next_event` returned ``None``.
        """
        unread = self._start != self._end or self._unfinished is not None
        return self._in_payload or self.needs_buffers or unread

    def has_ahead(self, nbytes: int) -> bool:
        """Return True if so many bytes of the announced payload were read ahead.

        A whole payload that is here already can be taken at once.
        """
        return self._end - self._start >= nbytes

    def next_event(self) -> FrameStart | FrameEnd | None:
        """Return the next event; ``None`` if it needs bytes or lent buffers, or :attr:`is_busy`.

        Raises:
            ProtocolError: The peer broke the rules of the wire format. Among its subclasses are
                :class:`~aiosync.errors.FrameTooLarge` and
                :class:`~aiosync.errors.WireVersionMismatch`.
        """
        if self.needs_buffers or self.missing_nbytes:
            return None
        if self._in_payload:
            self._in_payload = False
            return _FRAME_END
        if self._unfinished is not None:
            return self._next_step(self._unfinished)
        start = self._start
        available = self._end - start
        if available < PREFIX_NBYTES:
            # A peer of another version, or that is not aiosync, may send nothing more until it gets
            # an answer. So the first bytes are checked before the prefix is complete.
            if available >= len(MAGIC):
                _check_peer(bytes(self._buffer[start : min(start + 5, self._end)]))
            return None
        magic, version, flags, reserved, header_nbytes, crc, payload_nbytes = _PREFIX.unpack_from(
            self._buffer, start
        )
        if magic != MAGIC or version != WIRE_VERSION:
            _check_peer(magic + bytes((version,)))
        if flags or reserved or not header_nbytes:
            raise RemoteProtocolError(
                f"unknown flags 0x{flags:02x}, reserved 0x{reserved:04x}, or no header"
            )
        limits = self.limits
        if header_nbytes > limits.max_header_nbytes:
            raise _too_large("header", header_nbytes, limits.max_header_nbytes)
        if payload_nbytes > limits.max_payload_nbytes:
            raise _too_large("payload", payload_nbytes, limits.max_payload_nbytes)
        stop = start + PREFIX_NBYTES + header_nbytes
        if stop > self._end:
            self._head_nbytes = stop - start
            return None
        self._start, self._head_nbytes = stop, 0
        header = self._buffer[start + PREFIX_NBYTES : stop]
        if zlib.crc32(header) != crc:
            raise RemoteProtocolError("the CRC-32 of a header is wrong")
        return self._begin_frame(header, payload_nbytes)

    def _begin_frame(self, header: memoryview, payload_nbytes: int) -> FrameStart | None:
        """Decode a header; return its event, or ``None`` if its manifest takes more steps."""
        try:
            message, ext = decode_header(
                header, limits=self.limits, manifest=Manifest.decode_in_steps
            )
        except ProtocolError as exc:
            # Tracebacks of the causes would keep views of the buffer alive.
            exc.__cause__ = exc.__context__ = None
            raise
        event = FrameStart(message, ext, payload_nbytes)
        if isinstance(message, ManifestMessage):
            return self._next_step(event)
        self.missing_nbytes = payload_nbytes
        self.needs_buffers = payload_nbytes > 0
        return event

    def _next_step(self, event: FrameStart) -> FrameStart | None:
        """Decode a part of a manifest; return the event once it is complete, ``None`` before."""
        self._unfinished = event
        steps = cast("Iterator[None]", cast("ManifestMessage", event.message).manifest)
        try:
            next(steps)
        except StopIteration as done:
            self._unfinished = None
            event.message = ManifestMessage(done.value)
            self.missing_nbytes = event.payload_nbytes
            self.needs_buffers = event.payload_nbytes > 0
            return event
        except ProtocolError as exc:
            # The causes are dropped as in _begin_frame(): their tracebacks keep memory alive.
            exc.__cause__ = exc.__context__ = None
            raise
        return None

    def get_buffer(self) -> memoryview:
        """Return the writable memory for the next bytes of the link.

        Returns:
            Memory to be filled from its first byte on. It is empty if 64 KiB were read ahead
            already: take events, or lend buffers, before reading on.
        """
        # A small rest is filled through the read-ahead, so that one call reads many small buffers,
        # or the end of a payload and the next frame.
        if self._pieces and len(self._pieces[-1]) >= _DIRECT_NBYTES:
            return self._pieces[-1]
        start, end = self._start, self._end
        if start == end:
            start = end = self._start = self._end = 0
        buffer = self._buffer
        size = READ_AHEAD_NBYTES if self.limits.max_payload_nbytes else _SMALL_NBYTES
        if self._head_nbytes > size:
            size = self._head_nbytes
        # A header that is longer than the buffer gets a larger one, for as long as it is needed.
        # Otherwise unused bytes move to the front only if little room is left behind them.
        new_size = len(buffer) != size and end - start <= size
        if new_size or (start and size - end < size // 4):
            self._buffer = memoryview(bytearray(size)) if new_size else buffer
            self._buffer[: end - start] = buffer[start:end]
            self._start, self._end = 0, end - start
        return self._buffer[self._end : self._end + self._ahead]

    def buffer_updated(self, nbytes: int) -> None:
        """Report how many bytes were written to the memory that :meth:`get_buffer` returned."""
        if self._pieces and len(self._pieces[-1]) >= _DIRECT_NBYTES:
            self._advance(nbytes)
        else:
            self._end += nbytes
            if self._pieces:
                self._fill()

    def lend(self, buffers: Sequence[memoryview]) -> None:
        """Lend the memory for the announced payload.

        Bytes of the payload that were read ahead are copied into it at once. The decoder keeps
        views of the buffers until it has returned :class:`FrameEnd`; until then no other code may
        write to them.

        Args:
            buffers: Writable byte buffers, filled one after the other. Their total size is that of
                the payload.
        """
        # After a large payload another one is likely, of which all that is read ahead is copied.
        large = self.missing_nbytes >= _LARGE_NBYTES
        self._ahead = _DIRECT_NBYTES if large else READ_AHEAD_NBYTES
        self._pieces = [*filter(len, reversed(buffers))]
        self.needs_buffers = False
        self._in_payload = True
        self._fill()

    def _advance(self, nbytes: int) -> None:
        """Count bytes that were written to the first of the remaining lent buffers."""
        rest = self._pieces.pop()[nbytes:]
        if rest:
            self._pieces.append(rest)
        self.missing_nbytes -= nbytes

    def _fill(self) -> None:
        """Copy the bytes that were read ahead into the lent buffers."""
        while self._pieces and self._start != self._end:
            piece = self._pieces[-1]
            start = self._start
            nbytes = min(len(piece), self._end - start)
            piece[:nbytes] = self._buffer[start : start + nbytes]
            self._start = start + nbytes
            self._advance(nbytes)


def _check_peer(head: bytes) -> None:
    """Raise unless a frame begins with the magic and, if it has arrived, the wire version."""
    if not head.startswith(MAGIC):
        raise RemoteProtocolError(f"a frame starts with {head[:4]!r}: the peer is not aiosync")
    if len(head) > len(MAGIC) and head[4] != WIRE_VERSION:
        raise WireVersionMismatch(
            f"the peer speaks wire version {head[4]}, this is {WIRE_VERSION}: install the same "
            "release of aiosync on both sides"
        )


def _too_large(what: str, nbytes: int, most: int) -> FrameTooLarge:
    return FrameTooLarge(f"a {what} of {nbytes} bytes was announced; at most {most} are allowed")


def checksum(*pieces: Buffer) -> bytes:
    """Return the checksum of some bytes: XXH3-128, seed 0, in its canonical (big-endian) form.

    The checksum finds accidents, not attacks. The bytes are not copied.

    Args:
        pieces: Contiguous memory of any item type; the checksum is that of the bytes of all pieces,
            one after the other.

    Returns:
        16 bytes.
    """
    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return found.digest()


class RunningChecksum:
    """The :func:`checksum` of bytes that arrive piece by piece."""

    __slots__ = ("_hash", "nbytes")

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.nbytes: int = 0
        """Number of bytes that :meth:`update` has read."""

    def update(self, data: Buffer) -> None:
        """Add the bytes that follow: contiguous memory, which is not read after this returns."""
        self._hash.update(data)
        self.nbytes += memoryview(data).nbytes

    def digest(self) -> bytes:
        """Return :func:`checksum` of all bytes so far."""
        return self._hash.digest()


def state_checksum(digest: bytes, checksums: Iterable[bytes]) -> bytes:
    """Return the checksum over a whole update: its layout, and all of its chunks in order.

    It finds faults that the checksum of a single chunk cannot find: a chunk of another version or
    at another place, and bytes that a sender changed between two chunks. It is made from the
    checksums of the chunks, so that the payload need not be read a second time.

    Args:
        digest: Digest of the manifest, 16 bytes.
        checksums: :func:`checksum` of every chunk, in the order of their indices.

    Returns:
        16 bytes.
    """
    return xxhash.xxh3_128_digest(digest + b"".join(checksums))
