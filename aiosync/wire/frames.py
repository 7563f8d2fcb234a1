"""Frames: a fixed prefix, a header, and a payload that lands where the caller says.

Sans-IO: the decoder says where the next bytes go and which events they made; it never reads,
never waits and never raises for what the peer sent. This module must never import asyncio,
anyio or torch. The byte layout is written down in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from aiosync.errors import (
    FrameTooLarge,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    WireVersionMismatch,
)
from aiosync.types import Limits
from aiosync.wire.manifest import DEFAULT_LIMITS
from aiosync.wire.messages import ExtValue, Message, decode_header, encode_header

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "MAGIC",
    "PREFIX_NBYTES",
    "READ_AHEAD_NBYTES",
    "WIRE_VERSION",
    "EndOfStream",
    "Event",
    "Failed",
    "FrameDecoder",
    "FrameEnd",
    "FrameStart",
    "encode_frame",
]

WIRE_VERSION = 2
"""Version of the wire format."""

MAGIC = b"AIOS"
"""The first bytes of every frame."""

PREFIX_NBYTES = 24
"""Bytes of the fixed prefix of a frame."""

READ_AHEAD_NBYTES = 65536
"""Bytes that a decoder reads ahead of the events that were taken."""

# Magic, wire version, flags, reserved, header_nbytes, CRC-32 of the header, payload_nbytes.
_PREFIX = struct.Struct("<4sBBHIIQ")
_SMALL_NBYTES = PREFIX_NBYTES + 4096
_DIRECT_NBYTES = 4096  # a smaller rest of a lent buffer is filled through the read-ahead
# Behind a payload of this size the next one is likely to be as large: what would be read ahead of
# it would have to be copied.
_LARGE_NBYTES = 2**20
_EMPTY = memoryview(bytearray())


def encode_frame(
    message: Message,
    payload_nbytes: int = 0,
    *,
    ext: Mapping[str, ExtValue] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """Encode prefix and header of one frame; the payload follows them on the link.

    Args:
        message: What to send.
        payload_nbytes: Bytes of the payload that will follow.
        ext: Entries that a transport adds for its peer, at most 16.
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
    """A header arrived.

    Without payload this is the whole frame and no :class:`FrameEnd` follows. With one, the
    decoder waits for :meth:`FrameDecoder.lend`.

    Attributes:
        message: The decoded message.
        ext: What the peer's transport added, or ``None``.
        payload_nbytes: Bytes of the payload.
    """

    message: Message
    ext: Mapping[str, ExtValue] | None
    payload_nbytes: int


@dataclass(frozen=True, slots=True)
class FrameEnd:
    """The payload is complete; the decoder dropped the lent buffers."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer broke the rules. The last event; taking events again returns it again.

    Attributes:
        error: What was wrong, ready to be raised.
    """

    error: ProtocolError


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The stream ended. The last event; taking events again returns it again.

    Attributes:
        clean: It ended between two frames; False when a frame was cut.
    """

    clean: bool


Event: TypeAlias = FrameStart | FrameEnd | Failed | EndOfStream
"""What a decoder reports."""

_FRAME_END = FrameEnd()


class FrameDecoder:
    """Turns the bytes of a link into events, without a copy of the payload.

    The loop of a transport is: take events with :meth:`next_event` until it returns ``None``,
    read into :meth:`get_buffer`, report it with :meth:`buffer_updated`; after the last byte
    call :meth:`feed_eof`. When a :class:`FrameStart` announces a payload, lend the buffers
    that it lands in with :meth:`lend`.

    After the :class:`Failed` event of a frame that breaks the rules no more bytes are accepted.
    Memory: one header of at most ``limits.max_header_nbytes``, and 64 KiB; 4 KiB for a peer that
    may send no payloads.

    Not thread-safe. Between ``get_buffer()`` and its ``buffer_updated()`` events may be taken
    and buffers lent, but no other buffer may be asked for.

    Args:
        limits: Bounds on what the peer may announce, checked before anything is allocated.

    Attributes:
        limits: As given. May be assigned: the bounds from the next frame on.
        missing_nbytes: Bytes of the payload that are not there yet.
        needs_buffers: A payload was announced and :meth:`lend` was not called yet.
    """

    __slots__ = (
        "_ahead",
        "_buffer",
        "_end",
        "_eof",
        "_final",
        "_head_nbytes",
        "_in_payload",
        "_offered",
        "_payload_nbytes",
        "_pieces",
        "_start",
        "limits",
        "missing_nbytes",
        "needs_buffers",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits: Limits = limits
        self.missing_nbytes: int = 0
        self.needs_buffers: bool = False
        self._buffer = _EMPTY
        self._start = self._end = 0  # of what was read ahead and not used
        self._ahead = READ_AHEAD_NBYTES  # bytes to ask for at a time
        self._head_nbytes = 0  # of prefix and header, where only a part of them is there
        self._payload_nbytes = 0  # what the prefix said
        self._in_payload = False
        self._pieces: list[memoryview] = []  # rest of what is to be filled, in reverse order
        self._offered = _EMPTY  # what get_buffer() returned last
        self._eof = False
        self._final: Failed | EndOfStream | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether some but not all bytes of a frame arrived.

        Meaningful after :meth:`next_event` returned ``None``. False after the last event.
        """
        inside = self._in_payload or self.needs_buffers or self._start != self._end
        return self._final is None and inside

    def next_event(self) -> Event | None:
        """Return the next event, or ``None`` when more bytes or lent buffers are needed.

        Never raises. :class:`Failed` and :class:`EndOfStream` are final: every later call
        returns the same event, so a loop over events has to stop at them.
        """
        if self._final is not None or self.needs_buffers:
            return self._final
        if self._in_payload and not self.missing_nbytes:
            self._in_payload = False
            return _FRAME_END
        if self._start != self._end and not self.missing_nbytes:
            try:
                start = self._next_frame()
            except ProtocolError as exc:
                # What it was raised from would keep the frames that look at the buffer.
                exc.__traceback__ = exc.__cause__ = exc.__context__ = None
                return self._finish(Failed(exc))
            if start is not None:
                return start
        if self._eof:
            return self._finish(EndOfStream(not self.mid_frame))
        return None

    def _next_frame(self) -> FrameStart | None:
        start = self._start
        available = self._end - start
        if available < PREFIX_NBYTES:
            if available >= len(MAGIC):  # a stranger may wait for an answer
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
        message, ext = decode_header(header, limits=limits)
        self._payload_nbytes = payload_nbytes
        self.needs_buffers = payload_nbytes > 0
        return FrameStart(message, ext, payload_nbytes)

    def _finish(self, event: Failed | EndOfStream) -> Failed | EndOfStream:
        self._final = event
        self._pieces = []
        self._buffer = _EMPTY
        self.missing_nbytes = self._start = self._end = 0
        self._in_payload = self.needs_buffers = False
        return event

    def get_buffer(self) -> memoryview:
        """Return the writable memory that the next bytes belong in.

        Returns:
            Bytes to write to, from the first on. Empty after the last event, and when 64 KiB
            were read ahead already: take events, or lend buffers, before reading on.
        """
        if self._eof or self._final is not None:
            self._offered = _EMPTY
            return _EMPTY
        # A small rest goes through the read-ahead, so that many small buffers, or the
        # end of a payload and the next frame, are read at once.
        if self.missing_nbytes and len(self._pieces[-1]) >= _DIRECT_NBYTES:
            self._offered = self._pieces[-1]
            return self._offered
        start, end = self._start, self._end
        if start == end:
            start = end = self._start = self._end = 0
        buffer = self._buffer
        size = READ_AHEAD_NBYTES if self.limits.max_payload_nbytes else _SMALL_NBYTES
        if self._head_nbytes > size:
            size = self._head_nbytes
        new_size = len(buffer) != size and end - start <= size
        if new_size or (start and size - end < size // 4):
            self._buffer = memoryview(bytearray(size)) if new_size else buffer
            self._buffer[: end - start] = buffer[start:end]
            self._start, self._end = 0, end - start
        self._offered = self._buffer[self._end : self._end + self._ahead]
        return self._offered

    def buffer_updated(self, nbytes: int) -> None:
        """Say how many bytes were written to what :meth:`get_buffer` returned.

        Raises:
            LocalProtocolError: Negative, or more than that buffer has room for.
        """
        offered = self._offered
        if not 0 <= nbytes <= len(offered):
            raise LocalProtocolError(
                f"{nbytes} bytes were reported; the buffer has room for {len(offered)}"
            )
        self._offered = _EMPTY
        if self._final is not None or not nbytes:
            return
        if offered.obj is not self._buffer.obj:
            self._advance(nbytes)
        else:
            self._end += nbytes
            if self.missing_nbytes:
                self._fill()

    def feed_eof(self) -> None:
        """Say that no more bytes will come. Idempotent."""
        self._eof = True

    def lend(self, buffers: Sequence[Buffer]) -> None:
        """Give the memory that the announced payload lands in.

        What was read ahead of it is copied in at once. The decoder keeps views of the
        buffers until it returned :class:`FrameEnd` or the last event; nobody else may write
        to them until then.

        Args:
            buffers: Writable and C-contiguous, filled one after the other; their sizes add up
                to ``payload_nbytes`` exactly.

        Raises:
            LocalProtocolError: No payload is waiting, or the buffers do not fit. Nothing
                changed; other buffers may be lent.
        """
        if not self.needs_buffers:
            raise LocalProtocolError("no payload is waiting for buffers")
        pieces: list[memoryview] = []
        total = 0
        for buffer in buffers:
            try:
                view = memoryview(buffer)
            except TypeError as exc:
                raise LocalProtocolError(f"{type(buffer).__name__} is not a buffer") from exc
            if view.readonly or not view.c_contiguous:
                raise LocalProtocolError("a lent buffer must be writable and C-contiguous")
            if view.nbytes:
                pieces.append(view.cast("B"))
                total += view.nbytes
        if total != self._payload_nbytes:
            raise LocalProtocolError(
                f"the lent buffers have {total} bytes; the payload has {self._payload_nbytes}"
            )
        self._ahead = _DIRECT_NBYTES if total >= _LARGE_NBYTES else READ_AHEAD_NBYTES
        pieces.reverse()
        self._pieces = pieces
        self.missing_nbytes = total
        self.needs_buffers = False
        self._in_payload = True
        self._fill()

    def _advance(self, nbytes: int) -> None:
        """Count bytes that were written to the first piece."""
        rest = self._pieces.pop()[nbytes:]
        if rest:
            self._pieces.append(rest)
        self.missing_nbytes -= nbytes

    def _fill(self) -> None:
        """Move what was read ahead into the pieces."""
        while self.missing_nbytes and self._start != self._end:
            piece = self._pieces[-1]
            start = self._start
            nbytes = min(len(piece), self._end - start)
            piece[:nbytes] = self._buffer[start : start + nbytes]
            self._start = start + nbytes
            self._advance(nbytes)


def _check_peer(head: bytes) -> None:
    """Raise unless a frame begins with the magic and, if that has come, the version."""
    if not head.startswith(MAGIC):
        raise RemoteProtocolError(f"a frame starts with {head[:4]!r}: the peer is not aiosync")
    if len(head) > len(MAGIC) and head[4] != WIRE_VERSION:
        raise WireVersionMismatch(
            f"the peer speaks wire version {head[4]}, this is {WIRE_VERSION}: install the same "
            "release of aiosync on both sides"
        )


def _too_large(what: str, nbytes: int, most: int) -> FrameTooLarge:
    return FrameTooLarge(f"a {what} of {nbytes} bytes was announced; at most {most} are allowed")
