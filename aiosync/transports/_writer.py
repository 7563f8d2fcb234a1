"""The sending direction of a framed link: from a frame and its payload to the descriptor.

Payload bytes are written straight from the sender's buffers; while the peer does not read, the
caller waits (backpressure) and the loop goes on.

Must not import torch, anyio or anything above ``transports``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from aiosync.errors import (
    PeerClosed,
    ProtocolError,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportError,
)
from aiosync.transports._io import ByteIo
from aiosync.transports._link import LinkState, wake

__all__ = ["FrameWriter"]

# One loop callback moves at most this much, so that a bulk transfer never holds the loop long.
_WINDOW_NBYTES = 2**20
_IOV_MAX = 512


class FrameWriter:
    """Writes frames to ``io``, one at a time. Belongs to the loop of ``state``."""

    def __init__(self, io: ByteIo, state: LinkState) -> None:
        self._io = io
        self._state = state
        self._out: list[memoryview] = []  # what is left of the frame being written
        self._next: list[memoryview] = []  # the frame that comes after it
        self._started = False  # some of its bytes are with the kernel
        self._queue: deque[bytes] = deque()  # control frames that go out between two others
        self._waiter: asyncio.Future[None] | None = None
        self._busy = self._writing = self._timed_out = False
        self.written = 0  # bytes that the stream took
        state.on_end.append(self.stop)

    @property
    def mid_frame(self) -> bool:
        """Whether the peer has a part of a frame and waits for the rest."""
        return self._io.has_unsent or (self._started and bool(self._out))

    def stop(self) -> None:
        """Write no more, and let a waiting ``send()`` find out why."""
        if self._writing:
            self._writing = False
            self._state.loop.remove_writer(self._io.write_fd)
        wake(self._waiter)

    def queue(self, frame: bytes) -> None:
        """Send a control frame as soon as the stream is between two frames; never waits.

        For frames whose number is bounded by something else, such as the slots of a segment.
        """
        if self._state.ended:
            return
        try:
            taken = self.send_now(frame)
        except (TransportError, ProtocolError):
            return  # the link has just ended: its next operation raises this
        if not taken:
            self._queue.append(frame)
            if not self._busy:
                self._watch()

    def send_now(self, frame: bytes, payload: Sequence[memoryview] = ()) -> bool:
        """Write a small frame without waiting; False when nothing was written.

        A frame that the kernel took only in part is copied and flushed by the loop, and counts
        as sent.
        """
        self._state.check()
        if self._busy or self._out:
            return False
        self._started = False
        try:
            if payload:
                nbytes = self._io.sendv([memoryview(frame), *payload])
            else:
                nbytes = self._io.send(frame)
                if nbytes == len(frame):
                    if self._io.has_unsent:
                        self._watch()
                    return True
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self._lost(exc)
            self._state.check()
            return False
        rest = _after([memoryview(frame), *payload], nbytes)
        if rest:
            self._out, self._started = [memoryview(b"".join(rest))], True
        if rest or self._io.has_unsent:
            self._watch()
        return True

    async def send(
        self, frame: bytes, payload: Sequence[memoryview], timeout: float | None
    ) -> None:
        """Write a frame and its payload; the contract of ``Transport.send``."""
        if self._busy:
            raise TransportBusy(f"another send() is running on the link to {self._state.name}")
        self._busy = True
        self._timed_out = False
        handle = None
        if timeout is not None:
            handle = self._state.loop.call_later(timeout, self._expire)
        self._next = [memoryview(frame), *payload]
        try:
            await asyncio.sleep(0)  # a checkpoint, before the first byte
            while self._out:  # the tail of an earlier send_now(): not ours to cut
                await self._wait(timeout)
            self._state.check()
            self._out, self._next, self._started = self._next, [], False
            try:
                self._write(_WINDOW_NBYTES)
                while self._out or self._io.has_unsent:
                    self._watch()
                    await self._wait(timeout)
            except BaseException:  # goes on to the caller of send()
                if self._out:  # else the kernel has all of it: sent, whatever ended the wait
                    self._abandon()
                raise
        finally:
            self._busy, self._next = False, []
            if handle is not None:
                handle.cancel()
            if self._queue:
                self._watch()

    def keep_rest(self) -> None:
        """Copy what the stream has not taken yet: its buffers are about to change."""
        self._out, self._next = (
            [memoryview(b"".join(views))] if views else [] for views in (self._out, self._next)
        )

    async def _wait(self, timeout: float | None) -> None:
        self._state.check()
        if self._timed_out:
            raise SendTimeout(
                f"{self._state.name} did not take the message within {timeout:g} s"
                + ("; the link is broken, open a new one" if self._started else "")
            )
        self._waiter = self._state.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._state.check()

    def _expire(self) -> None:
        self._timed_out = True
        wake(self._waiter)

    def _abandon(self) -> None:
        # A send that ends early is harmless before its first byte and cuts the link after it.
        self._out = []
        if self._started:
            name = self._state.name
            self._state.fail(TransportBroken(f"a send to {name} was cut in mid-message"))
        elif self._writing:
            self.stop()

    def _watch(self) -> None:
        if not self._writing and not self._state.ended:
            self._writing = True
            self._state.loop.add_writer(self._io.write_fd, self._on_writable)

    def _on_writable(self) -> None:
        self._write(_WINDOW_NBYTES)
        if not self._out and self._queue and not self._busy:
            self._out, self._started = [memoryview(self._queue.popleft())], False
            self._write(_WINDOW_NBYTES)
        if self._out or self._io.has_unsent:
            return
        if self._waiter is not None and not self._waiter.done():
            # The next part of a large update is likely to follow at once: taking the descriptor
            # out of the loop and putting it back costs more than being called once in vain.
            wake(self._waiter)
        elif self._writing and (self._busy or not self._queue):
            self.stop()

    def _write(self, budget: int) -> None:
        if self._io.has_unsent and not self._out:
            try:
                self._io.flush()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                self._lost(exc)
            return
        while self._out and budget > 0:
            window = _window(self._out, budget)
            try:
                nbytes = self._io.sendv(window)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                self._lost(exc)
                return
            self._started = True
            self.written += nbytes
            self._out = _after(self._out, nbytes)
            budget -= nbytes
            if self._io.is_full and nbytes < sum(map(len, window)):
                return  # another call would only say so

    def _lost(self, exc: OSError) -> None:
        error: TransportError
        name = self._state.name
        if self._started:
            error = TransportBroken(f"the link to {name} was lost in mid-message: {exc}")
        else:
            error = PeerClosed(f"{name} closed the link")
        error.__cause__ = exc
        self._state.fail(error)


def _window(views: list[memoryview], budget: int) -> list[memoryview]:
    """The first buffers of ``views``, no more than ``budget`` bytes of them."""
    window = []
    for view in views[:_IOV_MAX]:
        if view.nbytes >= budget:
            window.append(view[:budget])
            break
        window.append(view)
        budget -= view.nbytes
    return window


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``views`` after ``nbytes`` of them were written."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []
