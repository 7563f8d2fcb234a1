"""Frames: a fixed prefix, a msgpack header, and a payload that lands where the caller says.

Sans-IO: the decoder says where the next bytes go and which events they made; it never reads,
never waits and never raises for what the peer sent. This module must never import asyncio,
anyio or torch. The byte layout is written down in ``docs/topics/wire-format.md``.
"""

from __future__ import annotations

import zlib

from aiosync.errors import FrameTooLarge, ProtocolError, RemoteProtocolError, WireVersionMismatch
from aiosync.types import Limits
from aiosync.wire._encoding import (
    MAGIC,
    PREFIX,
    PREFIX_NBYTES,
    WIRE_VERSION,
    encode_frame,
)
from aiosync.wire._intake import (
    EMPTY,
    LARGE_HEADER,
    LENDER,
    OVER,
    PAYLOAD,
    PREFIX_OR_HEADER,
    READ_AHEAD_NBYTES,
    Intake,
)
from aiosync.wire.events import EndOfStream, Event, Failed, FrameEnd, FrameStart
from aiosync.wire.manifest import DEFAULT_LIMITS
from aiosync.wire.messages import decode_header

__all__ = [
    "MAGIC",
    "PREFIX_NBYTES",
    "READ_AHEAD_NBYTES",
    "WIRE_VERSION",
    "FrameDecoder",
    "encode_frame",
]

_unpack_prefix = PREFIX.unpack_from
_crc32 = zlib.crc32
_FRAME_END = FrameEnd()


class FrameDecoder(Intake):
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
        "_error",
        "_header",
        "_header_crc",
        "_limits",
        "_terminal",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__()
        self._limits = limits
        self._header = EMPTY  # a header that does not fit into the buffer
        self._header_crc = 0
        self._error: ProtocolError | None = None
        self._terminal: Failed | EndOfStream | None = None

    @property
    def error(self) -> ProtocolError | None:
        """What the peer did wrong, once a :class:`Failed` event was returned. Sticky."""
        return self._error

    @property
    def limits(self) -> Limits:
        """Bounds on what the peer may announce from the next frame on. May be assigned."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits

    @property
    def mid_frame(self) -> bool:
        """Whether some but not all bytes of a frame arrived.

        Meaningful after :meth:`next_event` returned ``None``. False after the last event.
        """
        state = self._state
        return state != OVER and (state != PREFIX_OR_HEADER or self._start != self._end)

    # -- events out -------------------------------------------------------------------------

    def next_event(self) -> Event | None:
        """Return the next event, or ``None`` when more bytes or lent buffers are needed.

        Never raises. :class:`Failed` and :class:`EndOfStream` are final: every later call
        returns the same event, so a loop over events has to stop at them.
        """
        state = self._state
        if state == PREFIX_OR_HEADER:
            return self._next_frame()
        if state == PAYLOAD or state == LARGE_HEADER:
            if self._missing:
                return self._end_of_stream(clean=False) if self._eof else None
            if state == LARGE_HEADER:
                header, self._header = self._header, EMPTY
                return self._start_frame(header)
            self._state = PREFIX_OR_HEADER
            return _FRAME_END
        return self._terminal

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
            self._state = LARGE_HEADER
            self._fill()
        return None

    def _start_frame(self, header: memoryview) -> Event:
        if _crc32(header) != self._header_crc:
            return self._fail(RemoteProtocolError("the CRC-32 of a header is wrong"))
        try:
            message, ext = decode_header(header, limits=self._limits)
        except ProtocolError as exc:
            return self._fail(exc)
        payload_nbytes = self._payload_nbytes
        self._state = LENDER if payload_nbytes else PREFIX_OR_HEADER
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
        self._state = OVER
        self._pieces = []
        self._missing = 0
        self._header = EMPTY
