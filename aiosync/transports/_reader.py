"""The receiving direction of a framed link: from the loop's readable event to a message.

The descriptor stays registered with the loop; it is taken out only while a message waits that
nobody asked for yet, which is what makes the peer block (backpressure). Payload bytes are read
straight into the buffers that the receiver lends.

Must not import torch, anyio or anything above ``transports``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from aiosync.errors import (
    LocalProtocolError,
    PeerClosed,
    ProtocolError,
    RecvTimeout,
    TransportBroken,
    TransportBusy,
    TransportError,
)
from aiosync.transports._buffers import flat_view, take_buffers
from aiosync.transports._io import ByteIo
from aiosync.transports._link import LinkState, wake
from aiosync.transports.base import Lender
from aiosync.types import Limits
from aiosync.wire import (
    EndOfStream,
    Failed,
    FrameDecoder,
    FrameEnd,
    FrameStart,
    Message,
    Repeat,
)

__all__ = ["FrameReader", "Intercept"]

Intercept = Callable[[Message, "Mapping[str, Any] | None"], "bool | Repeat"]
"""Sees each message without payload as it is read; returns True to keep it from ``recv()``.

Or, instead of True, what takes the counter of later messages that are the same but for it.
"""

# One loop callback moves at most this much, so that a bulk transfer never holds the loop long;
# and less if that takes longer, as it does where the memory is touched for the first time.
_WINDOW_NBYTES = 2**20
_WINDOW_SECONDS = 0.001
# One call reads at most this much, which is still in the cache when it is looked at.
_READ_NBYTES = 2**18
_POLL_PAYLOAD_SECONDS = 1.0


class FrameReader:
    """Decodes frames off ``io``. Belongs to the loop of ``state``."""

    def __init__(
        self,
        io: ByteIo,
        state: LinkState,
        *,
        limits: Limits,
        intercept: Intercept | None,
        whole_below: int,
    ) -> None:
        self._io = io
        self._reads_out = io.reads_out
        self._state = state
        self._limits = limits
        self._decoder = FrameDecoder(limits)
        self._intercept = intercept
        self._whole_below = whole_below
        self._event: FrameStart | FrameEnd | None = None
        # A small payload on its way in, and one that is complete and waits for recv().
        self._small: tuple[FrameStart, bytearray] | None = None
        self._whole: tuple[FrameStart, bytearray] | None = None
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
        return self._event is not None or self._whole is not None

    def stop(self) -> None:
        """Read no more, and let a waiting ``recv()`` find out why."""
        self._pause()
        self._decoder.forget()
        wake(self._waiter)

    def peer_gone(self, error: TransportError) -> None:
        """End the link with ``error`` once everything that the peer said was received."""
        self._on_readable()
        if self.ready:
            self._gone = error
        else:
            self._state.fail(error)

    async def recv(
        self, into: Lender | None, timeout: float | None
    ) -> tuple[Message, Mapping[str, Any] | None, list[Any], int]:
        """Wait for a message; returns it with its ext map, its buffers and its payload size."""
        if self._busy:
            raise TransportBusy(f"another recv() is waiting on the link to {self._state.name}")
        self._busy = True
        self._timed_out = False
        handle = None
        if timeout is not None and timeout > 0:
            handle = self._state.loop.call_later(timeout, self._expire)
        try:
            await self._next_start(timeout)
            whole, event = self._whole, self._event
            if whole is not None:
                # A small payload that was read completely before anybody saw it.
                self._whole = None
                self._advance_soon()
                start, data = whole
                return self._place_whole(start, data, into)
            assert isinstance(event, FrameStart)
            self._event = None
            if event.payload_nbytes == 0:
                self._advance_soon()
                return event.message, event.ext, [], 0
            if handle is None and timeout is not None:
                # A poll found the head of a message: give its payload a moment to follow.
                handle = self._state.loop.call_later(_POLL_PAYLOAD_SECONDS, self._expire)
            return await self._recv_payload(event, into)
        finally:
            self._busy = False
            if handle is not None:
                handle.cancel()

    def _place_whole(
        self, start: FrameStart, data: bytearray, into: Lender | None
    ) -> tuple[Message, Mapping[str, Any] | None, list[Any], int]:
        if into is None:
            return start.message, start.ext, [data], len(data)
        buffers = self._lend(into, start)
        offset = 0
        for buffer in buffers:
            view = flat_view(buffer)
            view[:] = data[offset : offset + view.nbytes]
            offset += view.nbytes
        return start.message, start.ext, buffers, len(data)

    def _lend(self, into: Lender | None, start: FrameStart) -> list[Any]:
        try:
            buffers = take_buffers(into, start.message, start.payload_nbytes, self._limits)
            total = sum(flat_view(buffer).nbytes for buffer in buffers)
            if total != start.payload_nbytes:
                raise LocalProtocolError(
                    f"lent {total} bytes for a payload of {start.payload_nbytes}"
                )
        except BaseException:  # goes on to the caller of recv()
            # The payload that follows cannot be placed, so the stream is lost with it.
            name = self._state.name
            self._state.fail(TransportBroken(f"no buffer was lent for a payload from {name}"))
            raise
        return buffers

    async def _next_start(self, timeout: float | None) -> None:
        if timeout is not None and timeout <= 0 and not self.ready:
            self._on_readable()
        if self.ready or (timeout is not None and timeout <= 0):
            await asyncio.sleep(0)  # a checkpoint; the message is still queued if cancelled here
        while not self.ready or self._state.closed:
            self._state.check()
            if self._timed_out or (timeout is not None and timeout <= 0):
                raise RecvTimeout(f"no message from {self._state.name} within {timeout:g} s")
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = self._state.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _expire(self) -> None:
        self._timed_out = True
        wake(self._waiter)

    async def _recv_payload(
        self, start: FrameStart, into: Lender | None
    ) -> tuple[Message, Mapping[str, Any] | None, list[Any], int]:
        buffers = self._lend(into, start)
        self._decoder.lend(buffers)
        landed = getattr(into, "landed", None)
        if landed is not None:
            nbytes, decoder = start.payload_nbytes, self._decoder
            self._landed = lambda: landed(nbytes - decoder.missing_nbytes)
        name = self._state.name
        try:
            self._advance()
            while not isinstance(self._event, FrameEnd):
                self._state.check()
                if self._timed_out:
                    raise RecvTimeout(
                        f"a payload from {name} did not arrive in time; "
                        "the link is broken, open a new one"
                    )
                await self._wait()
        except PeerClosed as exc:
            raise TransportBroken(f"{name} went away in mid-message") from exc
        except BaseException:  # goes on to the caller of recv()
            self._event = None
            self._state.fail(TransportBroken(f"recv() from {name} was cut in mid-message"))
            raise
        finally:
            self._landed = None
        self._event = None
        self._advance_soon()
        return start.message, start.ext, buffers, start.payload_nbytes

    def _advance_soon(self) -> None:
        # The caller of recv() gets its message before the next one is looked at: an intercept
        # may take that one at once, and would overtake it.
        self._state.loop.call_soon(self._advance)

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
                if event.payload_nbytes == 0:
                    if self._intercept is not None and self._run_intercept(event):
                        continue
                elif event.payload_nbytes <= self._whole_below:
                    self._small = (event, bytearray(event.payload_nbytes))
                    self._decoder.lend([self._small[1]])
                    continue
                self._event = event
            elif isinstance(event, FrameEnd):
                if self._whole_below and self._small is not None:
                    self._whole, self._small = self._small, None
                else:
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
            taken = self._intercept(event.message, event.ext)
        except Exception as exc:  # noqa: BLE001 - told to whoever uses the link
            self._handler_failed(exc)
            return True
        if callable(taken):
            self._decoder.remember(taken)
            return True
        return taken

    def _pull_repeats(self) -> bool:
        """Hand messages that are repeated to their handlers, without building them.

        Returns:
            Whether something else may follow.
        """
        state, decoder = self._state, self._decoder
        more = True
        while more and not (self._event or self._whole or state.error or state.closed):
            repeated = decoder.next_repeat()
            if repeated is None:
                return True
            repeat, counter, more = repeated
            try:
                repeat(counter)
            except Exception as exc:  # noqa: BLE001 - told to whoever uses the link
                self._handler_failed(exc)
        return more

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
        if not self._unread_soon:  # one window for each turn of the loop, and not two
            self._on_readable()

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
                decoder.feed_eof()
                self._pause()
                self._pull()
                break
            decoder.buffer_updated(nbytes)
            if self._landed is not None:
                self._landed()
            if self._pull_repeats():
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
