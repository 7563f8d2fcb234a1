"""What a framed link reads, as events: from the loop's readable event to the decoder's.

The descriptor stays registered with the loop; it is taken out only while a message waits that
nobody asked for yet, which is what makes the peer block (backpressure). Messages without payload
go to an intercept as they are read, and those that repeat take a short way to their handlers.

Must not import torch, anyio or anything above ``transports``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from aiosync.errors import PeerClosed, ProtocolError, TransportBroken, TransportError
from aiosync.transports._io import ByteIo
from aiosync.transports._link import LinkState, wake
from aiosync.types import Limits
from aiosync.wire import (
    EndOfStream,
    Failed,
    FrameDecoder,
    FrameEnd,
    FrameStart,
    Message,
)

__all__ = ["FrameSource", "Intercept"]

Intercept = Callable[[Message, "Mapping[str, Any] | None"], bool]
"""Sees each message without payload as it is read; returns True to keep it from ``recv()``."""

# One loop callback moves at most this much, so that a bulk transfer never holds the loop long;
# and less if that takes longer, as it does where the memory is touched for the first time.
_WINDOW_NBYTES = 2**20
_WINDOW_SECONDS = 0.001
# One call reads at most this much, which is still in the cache when it is looked at.
_READ_NBYTES = 2**18


class FrameSource:
    """Decodes frames off ``io``. Belongs to the loop of ``state``."""

    def __init__(
        self,
        io: ByteIo,
        state: LinkState,
        *,
        limits: Limits,
        intercept: Intercept | None,
    ) -> None:
        self._io = io
        self._reads_out = io.reads_out
        self._state = state
        self._limits = limits
        self._decoder = FrameDecoder(limits)
        self._intercept = intercept
        self._event: FrameStart | FrameEnd | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._gone: TransportError | None = None
        self._landed: Callable[[], None] | None = None
        self._busy = self._reading = self._timed_out = self._unread_soon = False
        self._stopped_short = False  # at a message; what came with it may never be told again
        state.on_end.append(self.stop)
        self._resume()

    def set_limits(self, limits: Limits) -> None:
        """Let the peer announce other sizes from the next frame on."""
        self._limits = self._decoder.limits = limits

    @property
    def limits(self) -> Limits:
        """What the peer may announce now."""
        return self._limits

    @property
    def ready(self) -> bool:
        """Whether a message waits for ``recv()``."""
        return self._event is not None

    def stop(self) -> None:
        """Read no more, and let a waiting ``recv()`` find out why."""
        self._pause()
        wake(self._waiter)

    def peer_gone(self, error: TransportError) -> None:
        """End the link with ``error`` once everything that the peer said was received."""
        self._on_readable()
        if self.ready:
            self._gone = error
        else:
            self._state.fail(error)

    def _advance(self) -> None:
        """Look for the next event in what was already read, and go on reading."""
        if self._state.closed:
            return
        self._pull()
        if self.ready:
            wake(self._waiter)  # a recv() may have begun to wait before this ran
            return
        if self._gone is not None:
            self._state.fail(self._gone)
        self._resume()
        if self._stopped_short:
            self._stopped_short = False
            self._read_soon()

    def _pull(self) -> None:
        """Take events off the decoder until one has to wait for ``recv()``."""
        while not self.ready:
            event = self._decoder.next_event()
            if event is None:
                return
            if isinstance(event, FrameStart):
                if event.payload_nbytes == 0 and self._intercept is not None:
                    if self._run_intercept(event):
                        continue
                self._event = event
            elif isinstance(event, FrameEnd):
                self._event = event
            elif isinstance(event, Failed):
                self._state.fail(event.error)
                return
            elif isinstance(event, EndOfStream):
                self._state.fail(self._ended(event.clean))
                return

    def _ended(self, clean: bool) -> TransportError:
        if clean:
            return PeerClosed(f"{self._state.name} closed the link")
        return TransportBroken(f"the link to {self._state.name} was cut in mid-message")

    def _run_intercept(self, event: FrameStart) -> bool:
        assert self._intercept is not None
        try:
            return self._intercept(event.message, event.ext)
        except Exception as exc:  # noqa: BLE001 - told to whoever uses the link
            self._handler_failed(exc)
            return True

    def _handler_failed(self, exc: Exception) -> None:
        if isinstance(exc, (ProtocolError, TransportError)):
            self._state.fail(exc)
            return
        # A bug above.
        error = TransportBroken(f"a message from {self._state.name} could not be handled")
        error.__cause__ = exc
        self._state.fail(error)

    def _resume(self) -> None:
        if not self._reading and not self._state.ended:
            self._reading = True
            self._state.loop.add_reader(self._io.read_fd, self._on_event)
            if self._io.has_unread:
                self._read_soon()

    def _on_event(self) -> None:
        if self._unread_soon:  # one window for each turn of the loop, and not two
            return
        self._on_readable()

    def _at_end(self) -> None:
        """The stream has ended: what was read before still counts."""
        self._decoder.feed_eof()
        self._pause()
        self._pull()

    def _read_soon(self) -> None:
        """Read in the next turn of the loop, whether or not it says that there is something."""
        if not self._unread_soon:
            self._unread_soon = True
            self._state.loop.call_soon(self._on_unread)

    def _on_unread(self) -> None:
        self._unread_soon = False
        if self._reading:
            self._on_readable()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._state.loop.remove_reader(self._io.read_fd)

    def _on_readable(self) -> None:
        if self._state.ended:
            return
        budget = _WINDOW_NBYTES
        until = perf_counter() + _WINDOW_SECONDS
        decoder = self._decoder
        while budget > 0 and not self._state.ended:
            buffer = decoder.get_buffer(_WINDOW_NBYTES)
            room = len(buffer)
            if not room:
                self._pull()
                if self.ready:
                    self._pause()
                break
            most = min(budget, _READ_NBYTES)
            if room > most:
                buffer, room = buffer[:most], most
            try:
                nbytes = self._io.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:
                self._lost(exc)
                break
            if nbytes == 0:
                self._at_end()
                break
            decoder.buffer_updated(nbytes)
            if self._landed is not None:
                self._landed()
            self._pull()
            if self.ready:
                self._stopped_short = self._reads_out
                break
            if nbytes < room and not self._reads_out:
                break
            budget = budget - nbytes if perf_counter() < until else 0
        if self._reading and (self._io.has_unread or (budget <= 0 and self._reads_out)):
            self._read_soon()
        if self.ready or self._state.error is not None:
            wake(self._waiter)

    def _lost(self, exc: OSError) -> None:
        error: TransportError
        if self._decoder.mid_frame or not isinstance(exc, ConnectionError):
            error = TransportBroken(f"the link to {self._state.name} was lost: {exc}")
        else:
            error = PeerClosed(f"{self._state.name} closed the link")
        error.__cause__ = exc
        self._state.fail(error)
