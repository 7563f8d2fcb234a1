"""Byte streams: non-blocking reads and writes of a connected socket.

A framed link moves its frames over such a stream; TLS, and descriptors beside the bytes, are
streams of their own. Must not import torch, anyio, schemes, or a transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import ClassVar

from aiosync.errors import ConfigError

__all__ = ["ByteStream", "first_bytes"]

_BUFFER_NBYTES = 4 * 2**20
_IOV_MAX = 512


class ByteStream:
    """A non-blocking stream over a connected socket, which it owns.

    Args:
        end: The socket, or the two-way ``multiprocessing`` connection over it. Unix sockets get
            kernel buffers of 4 MiB, as far as the system's limits allow.

    Raises:
        ConfigError: The connection is one-way or closed, or this process has no descriptor left.

    Attributes:
        sock: The socket.
        fd: The descriptor of the socket.
        socks: All sockets of the stream; of several, ``sock`` is the first one.
        reads_out: True to read on until nothing is left, although that takes one more call. If data
            and an error of the socket arrive together, uvloop calls back only once: a reader that
            stopped after the data would never see the error. A link that does not watch the peer's
            process always reads on.
        has_unsent: True if the stream took bytes that it has not given to the kernel yet;
            :meth:`flush` goes on with them.
        readv: Reads some bytes, and returns their number; 0 at the end of the stream. ``readv`` and
            ``writev`` raise ``BlockingIOError`` instead of waiting, and may be replaced by other
            functions later. ``readv`` raises ``InterruptedError`` if it is to be called again in
            the next turn of the loop.
        writev: Writes some bytes of several buffers, and returns their number.
    """

    reads_out: ClassVar[bool] = True

    def __init__(self, end: Connection | socket.socket) -> None:
        self.sock: socket.socket = end if isinstance(end, socket.socket) else _below(end)
        self.sock.setblocking(False)
        if self.sock.family == socket.AF_UNIX:
            # Large transfers are slow with the small buffers that the kernel gives by default.
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                self.sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_NBYTES)
        self.fd: int = self.sock.fileno()
        self.socks: tuple[socket.socket, ...] = (self.sock,)
        self.has_unsent: bool = False
        # These call the functions of the system directly, which saves a Python call each time.
        self.readv: Callable[[Sequence[memoryview]], int] = functools.partial(os.readv, self.fd)
        self.writev: Callable[[Sequence[memoryview]], int] = functools.partial(os.writev, self.fd)

    def watch_reads(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None] | None
    ) -> None:
        """Have ``callback`` called while there is something to read; ``None`` ends that."""
        if callback is None:
            loop.remove_reader(self.fd)
        else:
            loop.add_reader(self.fd, callback)

    def watch_writes(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None] | None
    ) -> None:
        """Have ``callback`` called while the kernel takes bytes; ``None`` ends that."""
        if callback is None:
            loop.remove_writer(self.fd)
        else:
            loop.add_writer(self.fd, callback)

    def drop_unread(self) -> None:
        """Drop unread bytes, which would turn an orderly end of the stream into a reset.

        They are read from the socket, as no TLS has to decrypt them.
        """
        scratch = memoryview(bytearray(65536))
        with contextlib.suppress(OSError):
            for _ in range(64):
                if not os.readv(self.fd, [scratch]):
                    break

    def flush(self) -> None:
        """Give unsent bytes to the kernel, as many as it takes. Never blocks."""

    def close(self, *, farewell: bool = True) -> None:
        """Close the socket. Idempotent.

        Args:
            farewell: True to tell the peer, if the stream has a message for that. False in a forked
                child, because the parent goes on with the link.
        """
        del farewell
        # Reading or writing on must fail: the number of the descriptor may soon be another file's.
        self.readv = self.writev = _closed
        self.sock.close()


def first_bytes(views: Sequence[memoryview], most: int) -> list[memoryview]:
    """Return views of the first bytes of ``views``: at most 512 views and ``most`` bytes."""
    window = []
    for view in views[:_IOV_MAX]:
        window.append(view[:most])
        most -= view.nbytes
        if most <= 0:
            break
    return window


def _closed(_: object) -> int:
    """Raise in place of a read or a write of a closed stream."""
    raise OSError("the stream was closed")


def _below(pipe: Connection) -> socket.socket:
    """Return the socket of a two-way pipe, and close the pipe.

    Raises:
        ConfigError: The pipe is closed, or one-way, so that it is no socket; or this process has no
            descriptor left.
    """
    try:
        fd = os.dup(pipe.fileno())
    except OSError as exc:
        raise ConfigError(f"no link can be made over {pipe!r}: {exc}") from exc
    try:
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        os.close(fd)
        raise ConfigError("a link needs two-way pipes: multiprocessing.Pipe()") from exc
    pipe.close()
    return sock
