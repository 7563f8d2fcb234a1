"""A stream over a Unix socket that can carry descriptors beside the bytes.

Nothing here knows the event loop, the wire format or torch.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from aiosync.transports.stream import ByteStream

__all__ = ["DescriptorStream"]

_MAX_FDS = 8
_MAX_QUEUED_FDS = 64
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)


class DescriptorStream(ByteStream):
    """A stream over a Unix socket that can carry descriptors beside the bytes. Owns the socket.

    Attributes:
        received_fds: Descriptors of the peer that nobody took yet.
    """

    reads_out: ClassVar[bool] = (
        False  # shared memory also watches the peer's process, and every call counts
    )

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._sock = sock
        self._plain = (self.readv, self.write, self.writev)
        self.received_fds: deque[int] = deque()
        self.take_fds(True)

    def take_fds(self, wanted: bool) -> None:
        """Whether descriptors of the peer are taken; to take none saves system time."""
        self.use(self._recv_with_fds if wanted else self._plain[0], self.write, self.writev)

    def _recv_with_fds(self, buffers: Sequence[memoryview]) -> int:
        nbytes, ancillary, _flags, _address = self._sock.recvmsg_into(buffers, _SPACE, _CLOEXEC)
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
        _, write, writev = self._plain
        self.use(self.readv, write, writev)
        if fd is None:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]

        def with_fd(buffers: Sequence[memoryview]) -> int:
            nbytes = self._sock.sendmsg(buffers, rights)
            self.attach(None)
            return nbytes

        self.use(self.readv, lambda data: with_fd([memoryview(data)]), with_fd)

    def close(self, *, farewell: bool = True) -> None:
        """Close the socket, and descriptors that nobody took."""
        while self.received_fds:
            os.close(self.received_fds.popleft())
        super().close(farewell=farewell)
