"""Non-blocking byte streams over descriptors: what a framed channel reads from and writes to.

Nothing here knows the event loop, the wire format or torch.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

__all__ = [
    "ByteIo",
    "DescriptorIo",
    "SocketIo",
    "StreamIo",
    "socket_of",
    "widen_socket",
]

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

    def recv_into(self, buffer: memoryview) -> int:
        """Read some bytes; 0 at the end of the stream; ``BlockingIOError`` when there are none."""

    def send(self, data: bytes) -> int:
        """Write some bytes of ``data``; ``BlockingIOError`` when there is no room."""

    def sendv(self, buffers: Sequence[memoryview]) -> int:
        """Write some bytes of the buffers; ``BlockingIOError`` when there is no room."""

    def close(self) -> None:
        """Close the descriptors. Idempotent."""

    def close_copy(self) -> None:
        """In a forked child: close the descriptors without a word; the stream is the parent's."""


class DescriptorIo:
    """A stream over raw descriptors: both ends of ``multiprocessing.Pipe``, or a socket pair.

    Owns the descriptors, through the objects in ``owners`` when they have any.
    """

    def __init__(self, read_fd: int, write_fd: int, owners: Sequence[object] = ()) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._owners = tuple(owners)
        self._closed = False
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    has_unread = has_unsent = False  # nothing is kept back
    is_full = True
    reads_out = True

    def flush(self) -> None:
        return None

    def recv_into(self, buffer: memoryview) -> int:
        return os.readv(self.read_fd, [buffer])

    def send(self, data: bytes) -> int:
        return os.write(self.write_fd, data)

    def sendv(self, buffers: Sequence[memoryview]) -> int:
        return os.writev(self.write_fd, buffers)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._owners:
            for owner in self._owners:
                owner.close()  # type: ignore[attr-defined]  # every owner is a Connection or socket
            return
        for fd in {self.read_fd, self.write_fd}:
            with contextlib.suppress(OSError):
                os.close(fd)

    def close_copy(self) -> None:
        self.close()


class SocketIo:
    """A stream over a Unix socket that can carry descriptors beside the bytes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock: socket.socket = sock
        self.read_fd: int = sock.fileno()
        self.write_fd: int = self.read_fd
        self.received_fds: deque[int] = deque()
        self.takes_fds: bool = True
        self._attached: int | None = None
        self._space = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)

    has_unread = has_unsent = False  # nothing is kept back
    is_full = True
    reads_out = False  # shared memory also watches the peer's process, and every call counts

    def flush(self) -> None:
        """See :class:`ByteIo`; nothing is ever unsent."""

    def recv_into(self, buffer: memoryview) -> int:
        """See :class:`ByteIo`; descriptors that came along are queued."""
        if not self.takes_fds:
            return self.sock.recv_into(buffer)
        nbytes, ancillary, _flags, _address = self.sock.recvmsg_into(
            [buffer], self._space, _CLOEXEC
        )
        if ancillary:
            self._take_fds(ancillary)
        return nbytes

    def _take_fds(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.received_fds.extend(fds)
        while len(self.received_fds) > _MAX_QUEUED_FDS:
            os.close(self.received_fds.pop())

    def attach(self, fd: int | None) -> None:
        """Have a copy of ``fd`` travel beside the next bytes that are written."""
        self._attached = fd

    def send(self, data: bytes) -> int:
        """See :class:`ByteIo`."""
        return self.sock.send(data) if self._attached is None else self.sendv([memoryview(data)])

    def sendv(self, buffers: Sequence[memoryview]) -> int:
        """See :class:`ByteIo`."""
        if self._attached is None:
            return self.sock.sendmsg(buffers)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._attached]))]
        nbytes = self.sock.sendmsg(buffers, rights)
        self._attached = None
        return nbytes

    def close(self) -> None:
        """Close the socket, and descriptors that nobody took."""
        while self.received_fds:
            os.close(self.received_fds.popleft())
        self.sock.close()

    def close_copy(self) -> None:
        """See :class:`ByteIo`."""
        self.close()


class StreamIo:
    """A connected stream socket, TCP or Unix, that carries bytes only. Owns the socket."""

    has_unread = has_unsent = False  # nothing is kept back
    is_full = True
    reads_out = True

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock: socket.socket = sock
        self.read_fd: int = sock.fileno()
        self.write_fd: int = self.read_fd

    def flush(self) -> None:
        """See :class:`ByteIo`; nothing is ever unsent."""

    def recv_into(self, buffer: memoryview) -> int:
        """See :class:`ByteIo`."""
        return self.sock.recv_into(buffer)

    def send(self, data: bytes) -> int:
        """See :class:`ByteIo`."""
        return self.sock.send(data)

    def sendv(self, buffers: Sequence[memoryview]) -> int:
        """See :class:`ByteIo`."""
        return self.sock.sendmsg(buffers)

    def close(self) -> None:
        """See :class:`ByteIo`."""
        self.sock.close()

    def close_copy(self) -> None:
        """See :class:`ByteIo`."""
        self.sock.close()


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


def widen_socket(fd: int) -> None:
    """Ask for 4 MiB kernel buffers, which bulk transfers over Unix sockets need to be fast.

    The kernel grants what its limits allow; a descriptor that is not a socket is left as it is, and
    so is one for which there is no second descriptor.
    """
    with contextlib.suppress(OSError), socket_of(fd) as sock:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_NBYTES)
