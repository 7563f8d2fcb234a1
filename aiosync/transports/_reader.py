"""The receiving direction of a framed link: messages, for whoever waits for one.

Payload bytes are read straight into the buffers that the receiver lends.

Must not import torch, anyio or anything above ``transports``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiosync.errors import (
    PeerClosed,
    RecvTimeout,
    TransportBroken,
    TransportBusy,
)
from aiosync.transports._buffers import take_buffers
from aiosync.transports._link import wake
from aiosync.transports._source import FrameSource
from aiosync.transports.base import Lender
from aiosync.wire import FrameEnd, FrameStart, Message

__all__ = ["FrameReader"]

_POLL_PAYLOAD_SECONDS = 1.0


class FrameReader(FrameSource):
    """Has messages of ``io`` waited for. Belongs to the loop of ``state``."""

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
            event = self._event
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

    def _lend(self, into: Lender | None, start: FrameStart) -> list[Any]:
        try:
            buffers = take_buffers(into, start.message, start.payload_nbytes, self._limits)
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
