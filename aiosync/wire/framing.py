"""Frames: a fixed prefix, a msgpack header, and a payload that lands where the caller says.

Sans-IO: the decoder says where the next bytes go and which events they made; it never reads,
never waits and never raises for what the peer sent. This module must never import asyncio,
anyio or torch. The byte layout is written down in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiosync.errors import (
    FrameTooLarge,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    WireVersionMismatch,
)
from aiosync.types import Limits
from aiosync.wire._counted import (
    COUNTER_NBYTES,
    MAX_COUNTER,
    CountedFrame,
    Repeat,
    Templates,
    counter_of,
)
from aiosync.wire.events import EndOfStream, Event, Failed, FrameEnd, FrameStart
from aiosync.wire.manifest import DEFAULT_LIMITS
from aiosync.wire.messages import (
    ExtValue,
    Message,
    decode_header_keys,
    encode_header,
    maker_of,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "MAGIC",
    "PREFIX_NBYTES",
    "READ_AHEAD_NBYTES",
    "WIRE_VERSION",
    "FrameDecoder",
    "counted_frame",
    "encode_frame",
]

WIRE_VERSION = 1
"""Version of the wire format."""

MAGIC = b"AIOS"
"""The first bytes of every frame."""

PREFIX_NBYTES = 24
"""Bytes of the fixed prefix of a frame."""

READ_AHEAD_NBYTES = 65536
"""Bytes that a decoder reads ahead of the events that were taken."""

_DIRECT_NBYTES = 4096  # a smaller rest of a lent buffer is filled through the read-ahead

# magic, wire version, flags, reserved, header_nbytes, crc32 of the header, payload_nbytes
_PREFIX = struct.Struct("<4sBBHIIQ")
_pack_prefix = _PREFIX.pack
_unpack_prefix = _PREFIX.unpack_from
_unpack_crc = struct.Struct("<I").unpack_from
_unpack_counter = struct.Struct(">Q").unpack_from
_crc32 = zlib.crc32
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
        ext: Entries that a transport adds for its peer, at most 64.
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
    prefix = _pack_prefix(MAGIC, WIRE_VERSION, 0, 0, len(header), _crc32(header), payload_nbytes)
    return prefix + header


def counted_frame(
    message: Message, *, ext: Mapping[str, ExtValue] | None = None, limits: Limits = DEFAULT_LIMITS
) -> CountedFrame | None:
    """Prepare a message without payload that is sent again with only its counter changed.

    Args:
        message: An ``Ack``, ``Update`` or ``Release``; its own counter is not used.
        ext: Entries that a transport adds for its peer.
        limits: Bounds that the receiver is expected to have.

    Returns:
        ``None`` when the message has more than a counter that changes.

    Raises:
        LocalProtocolError: As for :func:`encode_frame`.
    """
    if maker_of(message) is None:
        return None
    frame = encode_frame(message, ext=ext, limits=limits)
    return CountedFrame(frame) if counter_of(memoryview(frame)) else None


_FRAME_END = FrameEnd()
# What the decoder is waiting for.
_PREFIX_OR_HEADER, _LARGE_HEADER, _LENDER, _PAYLOAD, _OVER = range(5)


class FrameDecoder:
    """Turns the bytes of a link into events, without a copy of the payload.

    The loop of a transport is: take events with :meth:`next_event` until it returns ``None``,
    read into :meth:`get_buffer`, report it with :meth:`buffer_updated`; after the last byte
    call :meth:`feed_eof`. When a :class:`FrameStart` announces a payload, lend the buffers
    that it lands in with :meth:`lend`.

    A frame that breaks the rules gives one :class:`Failed` event; :attr:`error` then stays
    set, and no more bytes are accepted. Memory: 64 KiB, plus one header of at most
    ``limits.max_header_nbytes``.

    Not thread-safe. Between ``get_buffer()`` and its ``buffer_updated()`` events may be taken
    and buffers lent, but no other buffer may be asked for.

    Args:
        limits: Bounds on what the peer may announce, checked before anything is allocated.
    """

    __slots__ = (
        "_buffer",
        "_end",
        "_eof",
        "_error",
        "_header",
        "_header_crc",
        "_known",
        "_last",
        "_limits",
        "_missing",
        "_offered",
        "_offered_direct",
        "_payload_nbytes",
        "_pieces",
        "_repeats",
        "_start",
        "_state",
        "_terminal",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._buffer = memoryview(bytearray(READ_AHEAD_NBYTES))
        self._start = 0  # bytes in the buffer that were used
        self._end = 0  # bytes in the buffer that were written
        self._state = _PREFIX_OR_HEADER
        self._header = _EMPTY  # a header that does not fit into the buffer
        self._header_crc = 0
        self._known = Templates()
        self._repeats = Templates()
        self._last: bytes | None = None  # the last frame, if only its counter may change
        self._payload_nbytes = 0
        self._pieces: list[memoryview] = []  # rest of what is to be filled, in reverse order
        self._missing = 0  # bytes until the pieces are full
        self._offered = 0  # bytes of the buffer that get_buffer() returned last
        self._offered_direct = False  # it was a piece, and not the read-ahead
        self._eof = False
        self._error: ProtocolError | None = None
        self._terminal: Failed | EndOfStream | None = None

    @property
    def error(self) -> ProtocolError | None:
        """What the peer did wrong, once a :class:`Failed` event was returned. Sticky."""
        return self._error

    @property
    def mid_frame(self) -> bool:
        """Whether some but not all bytes of a frame arrived.

        Meaningful after :meth:`next_event` returned ``None``. False after the last event.
        """
        state = self._state
        return state != _OVER and (state != _PREFIX_OR_HEADER or self._start != self._end)

    @property
    def needs_buffers(self) -> bool:
        """Whether a payload was announced and :meth:`lend` was not called yet."""
        return self._state == _LENDER

    # -- bytes in ---------------------------------------------------------------------------

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return the writable memory that the next bytes belong in.

        Args:
            sizehint: Ignored; makes the method usable as that of a buffered protocol.

        Returns:
            Bytes to write to, from the first on. Empty after the last event, and when 64 KiB
            were read ahead already: take events, or lend buffers, before reading on.
        """
        self._offered_direct = False
        if self._eof or self._state == _OVER:
            self._offered = 0
            return _EMPTY
        if self._missing:
            piece = self._pieces[-1]
            # A small rest goes through the read-ahead, so that many small buffers, or the
            # end of a payload and the next frame, are read at once.
            if len(piece) >= _DIRECT_NBYTES:
                self._offered_direct = True
                self._offered = len(piece)
                return piece
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = end = 0
        elif start and READ_AHEAD_NBYTES - end < READ_AHEAD_NBYTES // 4:
            self._buffer[: end - start] = self._buffer[start:end]
            self._start, self._end = 0, end - start
            end -= start
        self._offered = READ_AHEAD_NBYTES - end
        return self._buffer[end:]

    def buffer_updated(self, nbytes: int) -> None:
        """Say how many bytes were written to what :meth:`get_buffer` returned.

        Raises:
            LocalProtocolError: Negative, or more than that buffer has room for.
        """
        if not 0 <= nbytes <= self._offered:
            raise LocalProtocolError(
                f"{nbytes} bytes were reported; the buffer has room for {self._offered}"
            )
        self._offered = 0
        if self._state == _OVER:
            return
        if self._offered_direct:
            self._advance(nbytes)
        else:
            self._end += nbytes
            if self._missing:
                self._fill()

    def feed(self, data: Buffer) -> None:
        """Copy bytes in. For tests and small messages; :func:`iter_events` takes any size.

        Args:
            data: C-contiguous bytes.

        Raises:
            LocalProtocolError: More than fits now, or the stream is over; nothing was copied.
        """
        view = memoryview(data).cast("B")
        room = 0
        if not self._eof and self._state != _OVER:
            room = self._missing + READ_AHEAD_NBYTES - (self._end - self._start)
        if len(view) > room:
            raise LocalProtocolError(
                f"{len(view)} bytes do not fit: there is room for {room}; take events first"
            )
        while view:
            target = self.get_buffer()
            if not target:  # all that is left of the room is before the unused bytes
                end = self._end - self._start
                self._buffer[:end] = self._buffer[self._start : self._end]
                self._start, self._end = 0, end
                target = self.get_buffer()
            nbytes = min(len(target), len(view))
            target[:nbytes] = view[:nbytes]
            self.buffer_updated(nbytes)
            view = view[nbytes:]

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
        if self._state != _LENDER:
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
        pieces.reverse()
        self._pieces = pieces
        self._missing = total
        self._state = _PAYLOAD
        self._fill()

    # -- events out -------------------------------------------------------------------------

    def next_event(self) -> Event | None:
        """Return the next event, or ``None`` when more bytes or lent buffers are needed.

        Never raises. :class:`Failed` and :class:`EndOfStream` are final: every later call
        returns the same event, so a loop over events has to stop at them.
        """
        state = self._state
        if state == _PREFIX_OR_HEADER:
            return self._next_frame()
        if state == _PAYLOAD or state == _LARGE_HEADER:
            if self._missing:
                return self._end_of_stream(clean=False) if self._eof else None
            if state == _LARGE_HEADER:
                header, self._header = self._header, _EMPTY
                return self._start_frame(header)
            self._state = _PREFIX_OR_HEADER
            return _FRAME_END
        return self._terminal

    def remember(self, repeat: Repeat) -> None:
        """Have :meth:`next_repeat` return ``repeat`` for frames like the last one.

        Does nothing if the last frame has a payload, or is not one of which only the counter
        changes.
        """
        if self._last is not None:
            self._repeats.put(self._last, repeat)

    def forget(self) -> None:
        """Forget everything that was remembered, and what that refers to."""
        self._last = None
        self._repeats = Templates()

    def next_repeat(self) -> tuple[Repeat, int, bool] | None:
        """Take the next frame, if it is complete and one that was remembered.

        Returns:
            What was remembered, the counter, and whether bytes follow; ``None`` if
            :meth:`next_event` has to look.
        """
        start = self._start
        buffer = self._buffer
        if self._state or self._end - start < PREFIX_NBYTES:
            return None
        stop = start + PREFIX_NBYTES + buffer[start + 8]  # longer headers match no key
        if stop > self._end:
            return None
        frame = bytes(buffer[start:stop])
        repeat = self._repeats.get(frame[:12] + frame[16:-COUNTER_NBYTES])
        if repeat is None:
            return None
        (crc,) = _unpack_crc(frame, 12)
        (counter,) = _unpack_counter(frame, len(frame) - COUNTER_NBYTES)
        if _crc32(frame[PREFIX_NBYTES:]) != crc or not 0 < counter <= MAX_COUNTER:
            return None
        self._start = stop
        return repeat, counter, stop != self._end

    def _next_frame(self) -> Event | None:
        start = self._start
        available = self._end - start
        if available < PREFIX_NBYTES:
            return self._short_prefix(available)
        magic, version, flags, reserved, header_nbytes, crc, payload_nbytes = _unpack_prefix(
            self._buffer, start
        )
        if magic != MAGIC or version != WIRE_VERSION:
            return self._wrong_peer(magic, version)
        if flags or reserved:
            return self._fail(
                RemoteProtocolError(f"unknown flags 0x{flags:02x} or reserved 0x{reserved:04x}")
            )
        limits = self._limits
        if not 0 < header_nbytes <= limits.max_header_nbytes:
            if not header_nbytes:
                return self._fail(RemoteProtocolError("a frame has no header"))
            return self._fail(
                FrameTooLarge(
                    f"a header of {header_nbytes} bytes was announced; at most "
                    f"{limits.max_header_nbytes} are allowed"
                )
            )
        if payload_nbytes > limits.max_payload_nbytes:
            return self._fail(
                FrameTooLarge(
                    f"a payload of {payload_nbytes} bytes was announced; at most "
                    f"{limits.max_payload_nbytes} are allowed"
                )
            )
        stop = start + PREFIX_NBYTES + header_nbytes
        if stop <= self._end:
            self._start = stop
            self._header_crc = crc
            self._payload_nbytes = payload_nbytes
            return self._start_frame(self._buffer[start + PREFIX_NBYTES : stop])
        if self._eof:
            return self._end_of_stream(clean=False)
        if PREFIX_NBYTES + header_nbytes > READ_AHEAD_NBYTES:
            self._start = start + PREFIX_NBYTES
            self._header_crc = crc
            self._payload_nbytes = payload_nbytes
            self._header = memoryview(bytearray(header_nbytes))
            self._pieces = [self._header]
            self._missing = header_nbytes
            self._state = _LARGE_HEADER
            self._fill()
        return None

    def _start_frame(self, header: memoryview) -> Event:
        if _crc32(header) != self._header_crc:
            return self._fail(RemoteProtocolError("the CRC-32 of a header is wrong"))
        self._last = None
        counter = counter_of(header)
        known = self._known.get(bytes(header[:-COUNTER_NBYTES])) if counter else None
        if known is not None:
            make, ext = known
            message = make(counter)
        else:
            try:
                message, ext, last = decode_header_keys(header, limits=self._limits)
            except ProtocolError as exc:
                return self._fail(exc)
            if counter and last in ("version", "serial"):
                maker = maker_of(message)
                if maker is not None:
                    self._known.put(bytes(header[:-COUNTER_NBYTES]), (maker, ext))
            else:
                counter = 0
        payload_nbytes = self._payload_nbytes
        self._state = _LENDER if payload_nbytes else _PREFIX_OR_HEADER
        if counter and not payload_nbytes and len(header) < 256:
            start = self._start - len(header) - PREFIX_NBYTES
            stop = self._start - COUNTER_NBYTES
            self._last = bytes(self._buffer[start : start + 12]) + bytes(
                self._buffer[start + 16 : stop]
            )
        return FrameStart(message, ext, payload_nbytes)

    def _short_prefix(self, available: int) -> Event | None:
        if available >= len(MAGIC):  # a stranger may wait for an answer after a few bytes
            start = self._start
            magic = bytes(self._buffer[start : start + len(MAGIC)])
            version = self._buffer[start + len(MAGIC)] if available > len(MAGIC) else WIRE_VERSION
            if magic != MAGIC or version != WIRE_VERSION:
                return self._wrong_peer(magic, version)
        return self._end_of_stream(clean=not available) if self._eof else None

    # -- helpers ----------------------------------------------------------------------------

    def _advance(self, nbytes: int) -> None:
        """Count bytes that were written to the first piece."""
        pieces = self._pieces
        rest = pieces[-1][nbytes:]
        if rest:
            pieces[-1] = rest
        else:
            pieces.pop()
        self._missing -= nbytes

    def _fill(self) -> None:
        """Move what was read ahead into the pieces."""
        while self._missing and self._start != self._end:
            piece = self._pieces[-1]
            start = self._start
            nbytes = min(len(piece), self._end - start)
            piece[:nbytes] = self._buffer[start : start + nbytes]
            self._start = start + nbytes
            self._advance(nbytes)

    def _wrong_peer(self, magic: bytes, version: int) -> Failed:
        if magic != MAGIC:
            return self._fail(
                RemoteProtocolError(f"a frame starts with {magic!r}: the peer is not aiosync")
            )
        return self._fail(
            WireVersionMismatch(f"the peer speaks wire version {version}, this is {WIRE_VERSION}")
        )

    def _fail(self, error: ProtocolError) -> Failed:
        self._error = error
        self._terminal = failed = Failed(error)
        self._finish()
        return failed

    def _end_of_stream(self, *, clean: bool) -> EndOfStream:
        self._terminal = ended = EndOfStream(clean)
        self._finish()
        return ended

    def _finish(self) -> None:
        self._state = _OVER
        self._pieces = []
        self._missing = 0
        self._header = _EMPTY
