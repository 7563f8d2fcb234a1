"""Non-blocking byte streams over descriptors: what a framed stream reads from and writes to.

Nothing here knows the event loop, the wire format or torch.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

__all__ = ["ByteIo", "PipeIo", "SocketIo", "StreamIo", "local_host", "socket_of", "widen_socket"]

_BUFFER_NBYTES = 4 * 2**20
_MAX_FDS = 8
_MAX_QUEUED_FDS = 64
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ByteIo(Protocol):
    """A non-blocking byte stream with a descriptor to watch for each direction."""

    read_fd: int
    write_fd: int

    @property
    def reads_out(self) -> bool:
        """Whether to read on until nothing is left, although that takes one more call.

        Where data and an error of the socket come together, uvloop calls back once and never
        again: who stops at the data would wait for the error for ever.
        """

    @property
    def has_unread(self) -> bool:
        """Whether bytes may be left to read that the descriptor no longer announces."""

    @property
    def has_unsent(self) -> bool:
        """Whether bytes that were taken are not with the kernel yet; :meth:`flush` goes on."""

    @property
    def is_full(self) -> bool:
        """Whether a call that took less than it was given would take nothing more."""

    def flush(self) -> None:
        """Hand what is unsent to the kernel, as much as it takes; never blocks."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read some bytes; 0 at the end of the stream; ``BlockingIOError`` when there are none."""

    def send(self, data: bytes, /) -> int:
        """Write some bytes of ``data``; ``BlockingIOError`` when there is no room."""

    def sendv(self, buffers: Sequence[memoryview], /) -> int:
        """Write some bytes of the buffers; ``BlockingIOError`` when there is no room."""

    def close(self) -> None:
        """Close the descriptors. Idempotent."""

    def close_copy(self) -> None:
        """In a forked child: close the descriptors without a word; the stream is the parent's."""


class PipeIo:
    """A stream over one or two connections of ``multiprocessing``, or a socket. Owns them."""

    has_unread = has_unsent = False  # nothing is kept back
    is_full = reads_out = True

    def __init__(
        self, reader: Connection | socket.socket, writer: Connection | socket.socket
    ) -> None:
        self.read_fd: int = reader.fileno()
        self.write_fd: int = writer.fileno()
        self._ends = (reader, writer)
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self.write_fd, False)

    def flush(self) -> None:
        """See :class:`ByteIo`; nothing is ever unsent."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """See :class:`ByteIo`."""
        return os.readv(self.read_fd, [buffer])

    def send(self, data: bytes, /) -> int:
        """See :class:`ByteIo`."""
        return os.write(self.write_fd, data)

    def sendv(self, buffers: Sequence[memoryview], /) -> int:
        """See :class:`ByteIo`."""
        return os.writev(self.write_fd, buffers)

    def close(self) -> None:
        """See :class:`ByteIo`."""
        for end in self._ends:
            end.close()

    def close_copy(self) -> None:
        """See :class:`ByteIo`."""
        self.close()


class StreamIo:
    """A connected stream socket, TCP or Unix, that carries bytes only. Owns the socket."""

    has_unread: bool = False  # nothing is kept back
    has_unsent: bool = False
    is_full: bool = True
    reads_out: bool = True

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock: socket.socket = sock
        self.read_fd: int = sock.fileno()
        self.write_fd: int = self.read_fd
        # The socket's own methods: one call less for each read and write.
        self.recv_into: Callable[[memoryview], int] = sock.recv_into
        self.send: Callable[[bytes], int] = sock.send
        self.sendv: Callable[[Sequence[memoryview]], int] = sock.sendmsg

    def read_by(self, recv_into: Callable[[memoryview], int]) -> None:
        """Have this read from now on."""
        self.recv_into = recv_into

    def write_by(
        self, send: Callable[[bytes], int], sendv: Callable[[Sequence[memoryview]], int]
    ) -> None:
        """Have these write from now on."""
        self.send, self.sendv = send, sendv

    def flush(self) -> None:
        """See :class:`ByteIo`; nothing is ever unsent."""

    def close(self) -> None:
        """See :class:`ByteIo`."""
        self.sock.close()

    def close_copy(self) -> None:
        """See :class:`ByteIo`."""
        self.close()


class SocketIo(StreamIo):
    """A stream over a Unix socket that can carry descriptors beside the bytes."""

    reads_out: bool = False  # shared memory also watches the peer's process, and every call counts

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.received_fds: deque[int] = deque()
        self._space = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
        self.takes_fds = True

    @property
    def takes_fds(self) -> bool:
        """Whether descriptors of the peer are taken; to take none saves system time."""
        return self.recv_into == self._recv_with_fds

    @takes_fds.setter
    def takes_fds(self, value: bool) -> None:
        self.read_by(self._recv_with_fds if value else self.sock.recv_into)

    def _recv_with_fds(self, buffer: memoryview, /) -> int:
        nbytes, ancillary, _flags, _address = self.sock.recvmsg_into(
            [buffer], self._space, _CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.received_fds.extend(fds)
        while len(self.received_fds) > _MAX_QUEUED_FDS:
            os.close(self.received_fds.pop())
        return nbytes

    def attach(self, fd: int | None) -> None:
        """Have a copy of ``fd`` travel beside the next bytes that are written."""
        if fd is None:
            self.write_by(self.sock.send, self.sock.sendmsg)
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]

        def sendv(buffers: Sequence[memoryview]) -> int:
            nbytes = self.sock.sendmsg(buffers, rights)
            self.attach(None)
            return nbytes

        self.write_by(lambda data: sendv([memoryview(data)]), sendv)

    def close(self) -> None:
        """Close the socket, and descriptors that nobody took."""
        while self.received_fds:
            os.close(self.received_fds.popleft())
        self.takes_fds = False  # a bound method would keep this object for the collector
        self.attach(None)
        super().close()


@contextlib.contextmanager
def socket_of(fd: int) -> Iterator[socket.socket]:
    """Another object for the socket that a descriptor stands for; the descriptor stays open.

    Raises:
        OSError: It is not a socket, or was closed; or there is no descriptor left.
    """
    copy = os.dup(fd)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        yield sock


def local_host(fd: int) -> str:
    """Address of this host as the peer of a socket sees it; that of the loopback for local ones."""
    with contextlib.suppress(OSError), socket_of(fd) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            return str(sock.getsockname()[0])
    return "127.0.0.1"


def widen_socket(fd: int) -> None:
    """Ask for 4 MiB kernel buffers, which bulk transfers over Unix sockets need to be fast.

    The kernel grants what its limits allow; a descriptor that is not a socket is left as it is, and
    so is one for which there is no second descriptor.
    """
    with contextlib.suppress(OSError), socket_of(fd) as sock:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_NBYTES)
