"""One byte stream over several connections, each of which may have a limit of its own.

Between sites a connection often gets less than the line: its window is small for the distance, or
the network bounds each connection. The bytes of a link go over its connections in stripes, in
turn: the first stripe over the first connection, the next one over the second, and so on. Both ends
know from the number of a byte alone where it is, so that nothing is added to the bytes. Must not
import torch.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import TypeAlias

from aiosync.transports.byte_stream import ByteStream, first_bytes

__all__ = ["STRIPE_NBYTES", "StripedStream"]

STRIPE_NBYTES = 256 * 1024
"""Bytes that go over one connection before the next one has its turn."""

# Seconds for which bytes before an orderly end may still come over other connections.
_LAST_SECONDS = 1.0

_Watch: TypeAlias = Callable[
    [ByteStream, asyncio.AbstractEventLoop, Callable[[], None] | None], None
]


class _Direction:
    """The stripes of one direction.

    Args:
        streams: The connections.
        watch: Registers a callback for this direction of a connection, or ends that.

    Attributes:
        stream: The connection of the present stripe.
        left: Number of bytes that are left of the stripe.
    """

    def __init__(self, streams: Sequence[ByteStream], watch: _Watch) -> None:
        self._streams = itertools.cycle(streams)
        self._watch = watch
        self._watched: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None
        self.stream: ByteStream = next(self._streams)
        self.left: int = STRIPE_NBYTES

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called whenever the connection of the present stripe is ready."""
        self._watched = None if callback is None else (loop, callback)
        self._watch(self.stream, loop, callback)

    def call_back(self) -> None:
        """Call the callback, if there is one."""
        if self._watched is not None:
            self._watched[1]()

    def advance(self, nbytes: int, *, is_over: bool = True) -> None:
        """Count bytes of the stripe; once it ``is_over``, the next connection has its turn."""
        self.left -= nbytes
        if self.left or not is_over:
            return
        watched = self._watched
        if watched is not None:
            self._watch(self.stream, watched[0], None)
        self.stream, self.left = next(self._streams), STRIPE_NBYTES
        if watched is not None:
            self.watch(*watched)


class StripedStream(ByteStream):
    """A stream over several connected streams, which it owns. Both ends have them in one order.

    The stream ends with any of its connections: at once if the connection broke while it was idle,
    after a second if it was closed, and at the latest when it has its turn.

    Args:
        streams: The streams, at least one.
    """

    readv: Callable[[Sequence[memoryview]], int]
    writev: Callable[[Sequence[memoryview]], int]

    def __init__(self, streams: Sequence[ByteStream]) -> None:
        super().__init__(streams[0].sock)
        self._streams = tuple(streams)
        self.socks: tuple[socket.socket, ...] = tuple(stream.sock for stream in streams)
        self._in = _Direction(streams, lambda stream, *args: stream.watch_reads(*args))
        self._out = _Direction(streams, lambda stream, *args: stream.watch_writes(*args))
        self.readv, self.writev = self._readv, self._writev
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: OSError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch_reads(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None] | None
    ) -> None:
        """See :class:`ByteStream`."""
        # A stream that is closed must not watch numbers that may be other files' by now.
        if self._loop is None and callback is not None:
            self._loop = loop
            for stream in self._streams:
                self._watch_idle(stream)
        self._in.watch(loop, callback)

    def watch_writes(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None] | None
    ) -> None:
        """See :class:`ByteStream`."""
        self._out.watch(loop, callback)

    def _readv(self, buffers: Sequence[memoryview]) -> int:
        stream = self._in.stream
        try:
            nbytes = stream.readv(first_bytes(buffers, self._in.left))
        except BlockingIOError:
            if self._error is not None:
                raise self._error from None
            raise
        self._in.advance(nbytes)
        if self._in.stream is not stream:
            self._watch_idle(stream)
        return nbytes

    def _watch_idle(self, stream: ByteStream) -> None:
        """Look at a connection as soon as there is something, until it has its turn."""
        if self._loop is not None:
            self._loop.add_reader(stream.fd, self._look, stream)

    def _look(self, stream: ByteStream) -> None:
        """Find out why a connection is readable before its turn; bytes wait for the turn."""
        assert self._loop is not None
        self._loop.remove_reader(stream.fd)
        try:
            ended = not stream.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as exc:
            self._lose(exc)
            return
        if ended and self._timer is None:
            closed = ConnectionResetError("one of the connections was closed")
            self._timer = self._loop.call_later(_LAST_SECONDS, self._lose, closed)

    def _lose(self, error: OSError) -> None:
        """End the stream, once what has arrived is read."""
        self._error = self._error or error
        self._in.call_back()

    def _writev(self, buffers: Sequence[memoryview]) -> int:
        self.flush()
        if not self._out.left:
            raise BlockingIOError
        nbytes = self._out.stream.writev(first_bytes(buffers, self._out.left))
        self._count(nbytes)
        return nbytes

    def _count(self, nbytes: int) -> None:
        """Count written bytes; TLS has to send the last ones of a stripe before the next stripe.

        The other end reads the stripes in their order, and nothing else would send those bytes.
        """
        self._out.advance(nbytes, is_over=not self._out.stream.has_unsent)
        self.has_unsent: bool = self._out.stream.has_unsent

    def flush(self) -> None:
        """See :class:`ByteStream`."""
        if self.has_unsent:
            self._out.stream.flush()
            self._count(0)

    def drop_unread(self) -> None:
        """See :class:`ByteStream`."""
        for stream in self._streams:
            stream.drop_unread()

    def close(self, *, farewell: bool = True) -> None:
        """See :class:`ByteStream`."""
        loop, self._loop = self._loop, None
        # A forked child has the epoll descriptor of its parent, whose loop goes on watching.
        if loop is not None and farewell and not loop.is_closed():
            for stream in self._streams:
                loop.remove_reader(stream.fd)
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams:
            stream.close(farewell=farewell)
        super().close(farewell=farewell)
