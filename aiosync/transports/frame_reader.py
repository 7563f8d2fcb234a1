"""The receiving half of a framed link: reads the stream when it is readable, and takes frames.

The link handles a message without payload at once. If a ``recv()`` waits and a whole payload was
read, the lender of that call may take the message at once, too. Every other frame waits for
``recv()``, and nothing behind it is decoded meanwhile. Must not import torch, anyio, schemes, or a
transport.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from aiosync._tasks import Notifier
from aiosync.errors import PeerClosed, ProtocolError, TransportBroken, TransportError
from aiosync.transports.base import LinkError, Received
from aiosync.transports.byte_stream import ByteStream
from aiosync.types import Limits
from aiosync.wire import FrameDecoder, FrameEnd, FrameStart

__all__ = ["WINDOW_NBYTES", "FrameReader"]

WINDOW_NBYTES = 2**20
"""Most bytes that one callback moves, so that a large transfer never blocks the loop for long."""

# A callback that reads also ends after this time, because memory that is touched for the first time
# is filled more slowly.
_WINDOW_SECONDS = 0.001
# One call reads at most this many bytes, so that they are still in the cache when a lender reads
# them.
_READ_NBYTES = 2**18


class _Link(Protocol):
    """Link of a reader, which handles its messages and errors."""

    name: str

    def deliver(self, received: Received) -> bool:
        """Handle a message without payload. Return False to leave it to ``recv()``."""

    def fail(self, error: LinkError) -> None:
        """End the link with ``error``."""


class FrameReader:
    """Reader of the frames of a link.

    The descriptor is registered with the running loop while frames may be read. It is taken out
    while a manifest is decoded, and while an event waits and the read-ahead is full.

    Args:
        link: The link; dropped when the reader stops.
        io: The stream.
        limits: Bounds on what the peer may announce.

    Attributes:
        decoder: The decoder of the frames.
        event: The event that waits for ``recv()``; ``None`` for none.
        arrival: Wakes ``recv()`` for such an event, or for the end of the link.
        landed: Called after each read of the present payload, to tell its lender; ``None`` for no
            call.
        deliver_whole: While a ``recv()`` waits, takes messages whose payload was read whole;
            ``None`` to leave them to it.
        in_recv: True while a ``recv()`` runs, which alone may take the event.
        is_last: True while :meth:`read_last` runs; the link must write nothing then.
    """

    def __init__(self, link: _Link, io: ByteStream, limits: Limits) -> None:
        self.decoder: FrameDecoder = FrameDecoder(limits)
        self.event: FrameStart | FrameEnd | None = None
        self.arrival: Notifier = Notifier()
        self.landed: Callable[[], None] | None = None
        self.deliver_whole: Callable[[FrameStart], None] | None = None
        self.in_recv: bool = False
        self.is_last: bool = False
        self._link: _Link | None = link
        self._io = io
        self._loop = asyncio.get_running_loop()
        # The error that ends the link once every message that was read is handled.
        self._gone: PeerClosed | None = None
        # True once the peer has closed the link between two frames: those before it still count.
        self._has_rest = False
        # The error that becomes that one once the stream has nothing left to read.
        self._last_error: PeerClosed | None = None
        self._reads_out = True
        # In this order: the descriptor is registered with the loop; a read, or a step of decoding a
        # manifest, is due in the next turn of the loop.
        self._watching = self._read_again = self._next_step_due = False

    def stop(self) -> None:
        """Read no more, and wake ``recv()``. An event that waits stays for it."""
        # The link refers to this object, which would be a cycle.
        self._link = None
        self._pause()
        self.arrival.notify()

    def rely_on_process(self) -> None:
        """Read no further than the stream asks for, as the link watches the peer's process."""
        self._reads_out = self._io.reads_out

    def finish(self, error: PeerClosed) -> None:
        """End the link with ``error`` once every message that the stream has is handled."""
        self._last_error, self._reads_out = error, True
        self.read_last()
        # A message may wait for recv(), or the stream have more than one window.
        self.resume()

    def lose(self, cause: OSError | PeerClosed, *, cut: bool) -> None:
        """End the link because its stream has ended; ``cut`` is true in the middle of a frame."""
        if (link := self._link) is None:
            return
        closed = PeerClosed(f"{link.name} closed the link")
        error: TransportError = cause if isinstance(cause, PeerClosed) else closed
        if cut:
            error = TransportBroken(f"the link to {link.name} was lost in mid-message: {cause}")
        if error is not cause:
            error.__cause__ = cause
        self._has_rest = not cut
        link.fail(error)

    def read_last(self) -> None:
        """Read the messages that the peer sent before it closed, without answering them.

        They still count.
        """
        # _read() does nothing while another read is due.
        self._read_again, self.is_last = False, True
        self._read()
        self.is_last = False

    def take_rest(self, deliver: Callable[[Received], bool]) -> bool:
        """Take the next event for ``recv()`` that was read before the peer closed the link.

        Args:
            deliver: Handles a message without payload, or returns False to leave it to ``recv()``.

        Returns:
            True if an event waits.
        """
        try:
            while self._has_rest and self.event is None:
                event = self.decoder.next_event()
                if isinstance(event, FrameStart) and not event.payload_nbytes:
                    if deliver(Received(event.message, ext=event.ext)):
                        continue
                self.event = event
                self._has_rest = event is not None or self.decoder.is_busy
        except (ProtocolError, TransportError):
            # The link has its error already, and nothing counts behind this one.
            self._has_rest = False
        return self.event is not None

    def hand_over(self) -> None:
        """Offer the message that waits to the link's new handler, unless a ``recv()`` takes it."""
        waiting = None if self._link is None else self.event
        if isinstance(waiting, FrameStart) and not waiting.payload_nbytes and not self.in_recv:
            self.event = None
            self._pull(waiting)
            self.resume()

    def resume(self) -> None:
        """Take the next event from bytes that were read already, and go on reading."""
        self._pull()
        if self.event is not None:
            # A recv() may have begun to wait before this ran.
            self.arrival.notify()
        elif self._next_step_due and self.decoder.is_busy:
            # Bytes that arrive meanwhile wait in the kernel.
            self._pause()
        elif self._gone is None and self._link is not None:
            if not self._watching:
                self._watching = True
                self._io.watch_reads(self._loop, self._read)
            if self._reads_out:
                self._read_soon()

    def _take_step(self) -> None:
        """Decode the next part of a manifest, in a turn of the loop of its own."""
        self._next_step_due = False
        self.resume()

    def _pause(self) -> None:
        """Stop reading; :meth:`resume` goes on."""
        if self._watching:
            self._watching = False
            self._io.watch_reads(self._loop, None)

    def _read_soon(self) -> None:
        """Read in the next turn of the loop, even if the loop does not report any data."""
        if not self._read_again:
            self._read_again = True
            self._loop.call_soon(self._on_turn)

    def _on_turn(self) -> None:
        """Do the read that :meth:`_read_soon` asked for, unless reading has stopped."""
        if self._read_again:
            self._read_again = False
            if self._watching:
                self._read()

    def _read(self) -> None:
        """Read until nothing is left, at most one window; the rest follows in the next turn."""
        # A turn of the loop reads one window only, so a read that is already scheduled is enough.
        if self._read_again:
            return
        budget, until = WINDOW_NBYTES, time.perf_counter() + _WINDOW_SECONDS
        while nbytes := self._read_some(budget):
            budget -= nbytes
            # After a whole message the link's owner goes on first: mostly nothing is left to read.
            is_idle = not (self.decoder.mid_frame or self.is_last)
            if is_idle or budget <= 0 or time.perf_counter() >= until:
                self._read_soon()
                break
        if self.event is not None:
            self.arrival.notify()

    def _read_some(self, most: int) -> int:
        """Read once, and handle the bytes; return their number if reading may go on, else 0."""
        link, io, decoder = self._link, self._io, self.decoder
        if link is None:
            return 0
        try:
            buffer = decoder.get_buffer()[: min(most, _READ_NBYTES)]
            # Without room, an event waits for recv(), and 64 KiB behind it were read.
            if not buffer:
                self._pause()
                return 0
            nbytes = io.readv([buffer])
        except BlockingIOError:
            if self._last_error is None:
                return 0
            # The peer's process has ended, so nothing follows, although the stream is still open.
            nbytes = 0
        except InterruptedError:
            self._read_soon()
            return 0
        except OSError as exc:
            # Between two frames, an error of the connection, such as a reset, is a close.
            is_close = isinstance(exc, ConnectionError)
            if self.event is None or not is_close:
                self.lose(exc, cut=decoder.mid_frame or not is_close)
                return 0
            # Frames behind the event that waits were read before, and still count.
            self._last_error = PeerClosed(f"{link.name} closed the link")
            self._last_error.__cause__ = exc
            nbytes = 0
        except MemoryError as exc:
            error = TransportBroken(f"this process has no memory for a message from {link.name}")
            error.__cause__ = exc
            link.fail(error)
            return 0
        self._take(nbytes, link)
        if self._next_step_due and decoder.is_busy:
            self._pause()
            return 0
        more = nbytes == len(buffer) or self._reads_out
        return nbytes if more and self.event is None and self._link is not None else 0

    def _take(self, nbytes: int, link: _Link) -> None:
        """Handle bytes that were read, or the end of the stream if they are none."""
        if nbytes:
            self.decoder.buffer_updated(nbytes)
            if self.landed is not None:
                self.landed()
        else:
            # Messages that were read before still count.
            self._gone = self._last_error or PeerClosed(f"{link.name} closed the link")
            self._pause()
        self._pull()

    def _deliver(self, link: _Link, event: FrameStart | FrameEnd) -> bool:
        """Hand an event over at once; return False if it has to wait for ``recv()``."""
        if isinstance(event, FrameEnd):
            return False
        if not event.payload_nbytes:
            return link.deliver(Received(event.message, ext=event.ext))
        deliver = self.deliver_whole
        if deliver is None or not self.decoder.has_ahead(event.payload_nbytes):
            return False
        deliver(event)
        return True

    def _pull(self, event: FrameStart | FrameEnd | None = None) -> None:
        """Take events from the decoder until one has to wait for ``recv()``, or none is left.

        Args:
            event: An event that the decoder has returned before, to be handled first.
        """
        link = self._link
        if link is None:
            return
        try:
            while self.event is None and self._link is not None:
                event = event or self.decoder.next_event()
                if event is None and self.decoder.is_busy:
                    if not self._next_step_due:
                        self._next_step_due = True
                        self._loop.call_soon(self._take_step)
                    return
                if event is None:
                    if self._gone is not None:
                        self.lose(self._gone, cut=self.decoder.mid_frame)
                    return
                if not self._deliver(link, event):
                    self.event = event
                event = None
        except (ProtocolError, TransportError) as exc:
            link.fail(exc)
        except Exception as exc:  # noqa: BLE001 - a bug in a handler; the next call raises it
            error = TransportBroken(f"a message from {link.name} could not be handled")
            error.__cause__ = exc
            link.fail(error)
