"""One connection of the fault proxy: two sockets, and what happens to the bytes between them.

This module must never import pytest, torch or the rest of aiosync.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiosync.testing._sockets import (
    Address,
    close_in_order,
    delivered,
    dial,
    normal_errors,
    parse,
    prepared,
    readable,
    writable,
)

if TYPE_CHECKING:
    from aiosync.testing.proxy import FaultProxy, Faults, Plan

__all__ = ["Connection", "End"]

_BLOCK_NBYTES: Final = 2**16
_QUEUE_NBYTES: Final = 2**17  # with the longest duplicate of 128 KiB, 256 KiB are held
_SLICE: Final = 0.005  # seconds of a limited rate that are sent at once
_DEPTH: Final = 0.02  # seconds of a limited rate that may be caught up
_LINGER_0: Final = struct.pack("ii", 1, 0)  # closing sends a reset


class End(enum.IntEnum):
    """How a direction ends; the order decides which fault of one offset happens."""

    RESET = 0
    CUT = 1
    HALF_CLOSE = 2
    EOF = 3
    BROKEN = 4


class Connection:
    """Two sockets and the streams between them. Ends by a fault, by order, or by itself."""

    def __init__(self, proxy: FaultProxy, dialer: socket.socket) -> None:
        self.running = asyncio.Event()  # cleared by FaultProxy.stall()
        self.running.set()
        self.stalls: list[asyncio.Event] = []  # of streams that have come to their stall_at
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._proxy = proxy
        self._socks = [prepared(dialer)]
        self._ends: list[End] = []

    def end(self, how: End) -> None:
        if not self.ended.done():
            self.ended.set_result(how)

    def half_ended(self, how: End) -> None:
        """One direction is over; the connection is when both are."""
        self._ends.append(how)
        if len(self._ends) == 2:
            self.end(End.RESET if End.BROKEN in self._ends else End.CUT)

    def count(self, nbytes: int, *, forward: bool) -> None:
        if forward:
            self._proxy.bytes_forward += nbytes
        else:
            self._proxy.bytes_back += nbytes

    async def serve(self, choose: Callable[[], Plan], upstream: str) -> None:
        """Relay until something ends the connection; raises what is no fault of a peer."""
        try:
            relay = asyncio.create_task(self._relay(choose(), parse(upstream)))
            either: list[asyncio.Future[Any]] = [relay, self.ended]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                relay.cancel()
                await asyncio.wait({relay})  # nothing watches the sockets after this
                if not relay.cancelled():
                    relay.result()
            if self.ended.result() is not End.RESET:
                await asyncio.gather(*map(close_in_order, self._socks))
        except asyncio.CancelledError:
            self.end(End.CUT)
            raise
        finally:
            if not self.ended.done() or self.ended.result() is End.RESET:
                for sock in self._socks:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            self.close()

    async def _relay(self, plan: Plan, upstream: Address) -> None:
        dialer = self._socks[0]
        server = await dial(upstream, self._socks)
        if server is None:
            self.end(End.RESET)
            return
        forward = _Stream(self, plan.forward, dialer, server, forward=True)
        back = _Stream(self, plan.back, server, dialer, forward=False)
        async with asyncio.TaskGroup() as group:
            for stream in (forward, back):
                group.create_task(stream.read())
                group.create_task(stream.write())

    def close(self) -> None:
        self.end(End.CUT)
        for sock in self._socks:
            sock.close()


def _first_end(faults: Faults) -> tuple[int | None, End]:
    ends = (
        (faults.reset_at, End.RESET),
        (faults.cut_at, End.CUT),
        (faults.half_close_at, End.HALF_CLOSE),
    )
    return min(((at, end) for at, end in ends if at is not None), default=(None, End.EOF))


class _Stream:
    """One direction: reads up to the next offset of a fault, and writes what was read.

    Reader and writer are two coroutines, so that blocks can be under way for the time of a delay.
    What the writer does after a block (an end) travels through the same queue.
    """

    def __init__(
        self,
        connection: Connection,
        faults: Faults,
        source: socket.socket,
        destination: socket.socket,
        *,
        forward: bool,
    ) -> None:
        self._connection = connection
        self._faults = faults
        self._source = source
        self._destination = destination
        self._count = partial(connection.count, forward=forward)
        self._queue: deque[tuple[float, bytes | End]] = deque()  # with the time to deliver it
        self._held = 0
        self._changed = asyncio.Event()  # for the one of reader and writer that waits
        self._paced = 0.0

    async def read(self) -> None:
        faults = self._faults
        last, how = _first_end(faults)
        start, stop = faults.duplicate or (0, 0)
        stall = faults.stall_at
        copy = bytearray()
        at = 0
        while True:
            if at == stall:
                stall = None
                lifted = asyncio.Event()
                self._connection.stalls.append(lifted)
                await lifted.wait()
            if at == last:
                self._put(how)
                return
            while self._held >= _QUEUE_NBYTES:
                await self._change()
            marks = [mark for mark in (last, stall, start, stop) if mark is not None and mark > at]
            room = min(_BLOCK_NBYTES, _QUEUE_NBYTES - self._held)
            block = await self._recv(min([room, *(mark - at for mark in marks)]))
            if not block:
                self._put(End.EOF if block is not None else End.BROKEN)
                return
            if faults.corrupt_at is not None and at <= faults.corrupt_at < at + len(block):
                changed = bytearray(block)
                changed[faults.corrupt_at - at] ^= faults.corrupt_mask
                block = bytes(changed)
            self._put(block)
            if start <= at < stop:
                copy += block
            at += len(block)
            if at == stop and copy:
                self._put(bytes(copy))
                copy.clear()

    async def write(self) -> None:
        loop = asyncio.get_running_loop()
        self._paced = loop.time()
        while True:
            while not self._queue:
                await self._change()
            due, item = self._queue[0]
            await _sleep_until(due)
            if isinstance(item, End):
                await self._connection.running.wait()
                await self._end(item)
                return
            if not await self._send_paced(memoryview(item)):
                # What the destination sent before it broke is for the other direction to relay.
                self._connection.half_ended(End.BROKEN)
                return
            self._queue.popleft()
            self._held -= len(item)
            self._changed.set()

    def _put(self, item: bytes | End) -> None:
        due = asyncio.get_running_loop().time() + self._faults.delay
        self._queue.append((due, item))
        self._held += 0 if isinstance(item, End) else len(item)
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _end(self, how: End) -> None:
        if how is End.CUT:
            self._connection.end(End.CUT)
        elif how in (End.RESET, End.BROKEN):
            await delivered(self._destination)
            self._connection.end(End.RESET)
        else:
            with normal_errors():  # the destination is gone already, as its own reader sees
                self._destination.shutdown(socket.SHUT_WR)
            self._connection.half_ended(how)
            if how is End.HALF_CLOSE:
                await self._discard()

    async def _discard(self) -> None:
        while True:
            block = await self._recv(_BLOCK_NBYTES)
            if not block:
                break
            await asyncio.sleep(0)  # a fast source must not keep the loop to itself
        if block is None:
            self._connection.end(End.RESET)

    async def _recv(self, nbytes: int) -> bytes | None:
        """Bytes, none at the end of the stream, or None when the connection is broken."""
        while True:
            await self._connection.running.wait()
            try:
                with normal_errors():
                    return self._source.recv(nbytes)
                return None
            except BlockingIOError:
                await readable(self._source)

    async def _send_paced(self, data: memoryview) -> bool:
        rate = self._faults.rate
        if rate is None:
            return await self._send(data)
        step = max(1, int(rate * _SLICE))
        loop = asyncio.get_running_loop()
        for at in range(0, len(data), step):
            part = data[at : at + step]
            self._paced = max(self._paced, loop.time() - _DEPTH) + len(part) / rate
            await _sleep_until(self._paced)
            if not await self._send(part):
                return False
        return True

    async def _send(self, data: memoryview) -> bool:
        while data:
            await self._connection.running.wait()
            try:
                sent = None
                with normal_errors():
                    sent = self._destination.send(data)
            except BlockingIOError:
                await writable(self._destination)
                continue
            if sent is None:
                return False
            self._count(sent)
            data = data[sent:]
        return True


async def _sleep_until(due: float) -> None:
    left = due - asyncio.get_running_loop().time()
    if left > 0:
        await asyncio.sleep(left)
