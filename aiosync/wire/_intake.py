"""The half of a frame decoder that takes bytes in: where they go, and what is there.

Knows how far a frame is, but not what it says: that is :mod:`aiosync.wire.framing`. This module
must never import asyncio, anyio or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiosync.errors import LocalProtocolError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "EMPTY",
    "LARGE_HEADER",
    "LENDER",
    "OVER",
    "PAYLOAD",
    "PREFIX_OR_HEADER",
    "READ_AHEAD_NBYTES",
    "Intake",
]

READ_AHEAD_NBYTES = 65536
"""Bytes that a decoder reads ahead of the events that were taken."""

_DIRECT_NBYTES = 4096  # a smaller rest of a lent buffer is filled through the read-ahead
# Behind a payload of this size the next one is likely to be as large: what would be read ahead of
# it would have to be copied.
_LARGE_NBYTES = 2**20

EMPTY = memoryview(bytearray())

# What the decoder is waiting for.
PREFIX_OR_HEADER, LARGE_HEADER, LENDER, PAYLOAD, OVER = range(5)


class Intake:
    """Where the bytes of a link go: a read-ahead, and pieces of a payload or a large header.

    What makes events of them takes from ``_start`` to ``_end`` of the read-ahead, sets the pieces
    that are to be filled, and moves ``_state`` on.
    """

    __slots__ = (
        "_ahead",
        "_buffer",
        "_end",
        "_eof",
        "_missing",
        "_offered",
        "_offered_direct",
        "_payload_nbytes",
        "_pieces",
        "_start",
        "_state",
    )

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(READ_AHEAD_NBYTES))
        self._start = 0  # bytes in the buffer that were used
        self._end = 0  # bytes in the buffer that were written
        self._state = PREFIX_OR_HEADER
        self._payload_nbytes = 0
        self._pieces: list[memoryview] = []  # rest of what is to be filled, in reverse order
        self._missing = 0  # bytes until the pieces are full
        self._offered = 0  # bytes of the buffer that get_buffer() returned last
        self._offered_direct = False  # it was a piece, and not the read-ahead
        self._eof = False
        self._ahead = READ_AHEAD_NBYTES  # bytes to ask for at a time

    @property
    def missing_nbytes(self) -> int:
        """Bytes of the payload, or of a large header, that are not there yet."""
        return self._missing

    @property
    def needs_buffers(self) -> bool:
        """Whether a payload was announced and :meth:`lend` was not called yet."""
        return self._state == LENDER

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return the writable memory that the next bytes belong in.

        Args:
            sizehint: Ignored; makes the method usable as that of a buffered protocol.

        Returns:
            Bytes to write to, from the first on. Empty after the last event, and when 64 KiB
            were read ahead already: take events, or lend buffers, before reading on.
        """
        self._offered_direct = False
        if self._eof or self._state == OVER:
            self._offered = 0
            return EMPTY
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
        room = min(READ_AHEAD_NBYTES - end, self._ahead)
        self._offered = room
        return self._buffer[end : end + room]

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
        if self._state == OVER:
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
        if not self._eof and self._state != OVER:
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
        if self._state != LENDER:
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
        self._missing = total
        self._state = PAYLOAD
        self._fill()

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
