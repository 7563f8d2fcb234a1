"""The link through shared memory, over a Unix socket.

Descriptors travel over the socket, beside the messages that announce them. Must not import torch or
schemes.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import ClassVar

from aiosync.transports.base import Received
from aiosync.transports.byte_stream import ByteStream
from aiosync.transports.framed_link import FramedTransport
from aiosync.transports.shared_memory.publisher import SlotPublisher
from aiosync.transports.shared_memory.reader import SlotReader
from aiosync.transports.shared_memory.slots import Arena
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import DeviceSlot, PageMessage, Segment

__all__ = ["SharedMemTransport"]

_MAX_FDS = 8
_MAX_QUEUED_FDS = 64
_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)


class DescriptorStream(ByteStream):
    """A stream over a Unix socket that can carry descriptors beside the bytes. Owns the socket.

    Attributes:
        received_fds: Descriptors of the peer that were not taken yet.
    """

    # The end of the peer's process is noticed in any case, and each further call costs time.
    reads_out: ClassVar[bool] = False

    readv: Callable[[Sequence[memoryview]], int]
    writev: Callable[[Sequence[memoryview]], int]

    def __init__(self, end: Connection | socket.socket) -> None:
        super().__init__(end)
        self.received_fds: deque[int] = deque()
        # The functions that move bytes only.
        self._plain = self.readv, self.writev
        self.take_fds(True)

    def take_fds(self, wanted: bool) -> None:
        """Accept descriptors of the peer, or none from now on, which saves system time."""
        self.readv = self._recv_with_fds if wanted else self._plain[0]

    def _recv_with_fds(self, buffers: Sequence[memoryview]) -> int:
        """Read bytes as :attr:`readv` does, and keep the descriptors that came beside them."""
        nbytes, ancillary, flags, _address = self.sock.recvmsg_into(
            buffers, _SPACE, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.received_fds.extend(fds)
        # A peer must not use up the descriptors of this process.
        while len(self.received_fds) > _MAX_QUEUED_FDS:
            os.close(self.received_fds.pop())
        if flags & socket.MSG_CTRUNC:
            # The kernel drops descriptors that the process has no room for, and delivers the bytes.
            text = "this process has no file descriptor left for shared memory: raise `ulimit -n`"
            raise OSError(errno.EMFILE, text)
        return nbytes

    def attach(self, fd: int | None) -> None:
        """Send a copy of ``fd`` beside the next bytes that are written; ``None`` sends none."""
        self.writev = self._plain[1]
        if fd is None:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]

        def with_fd(buffers: Sequence[memoryview]) -> int:
            nbytes = self.sock.sendmsg(buffers, rights)
            self.attach(None)
            return nbytes

        self.writev = with_fd

    def drop_unread(self) -> None:
        """Drop unread bytes, but keep the descriptors beside them until :meth:`close`."""
        scratch = memoryview(bytearray(65536))
        with contextlib.suppress(OSError):
            for _ in range(64):
                if not self.readv([scratch]):
                    break

    def close(self, *, farewell: bool = True) -> None:
        """Close the socket, and the descriptors that were not taken."""
        while self.received_fds:
            os.close(self.received_fds.popleft())
        super().close(farewell=farewell)


class SharedMemTransport(FramedTransport):
    """A link between two processes of one host.

    Payloads that are given to :meth:`send` travel through the socket; schemes put versions into
    slots.

    Args:
        io: A connected Unix stream socket, or a two-way ``multiprocessing`` connection; owned from
            now on.
        arena: Owner of the slots that this end may name to the peer; ``None`` if it names none.
        limits: Bounds on what the peer may announce.
        name: Name of the peer in errors and reprs.

    Attributes:
        publisher: Publisher that names slots to the peer; ``None`` without an arena.
        slots: Reader of the slots that the peer names.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="shm",
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    def __init__(
        self,
        io: Connection | socket.socket,
        *,
        arena: Arena | None = None,
        limits: Limits | None = None,
        name: str = "the peer",
    ) -> None:
        self._stream = DescriptorStream(io)
        super().__init__(self._stream, limits=limits, name=name)
        self.slots: SlotReader = SlotReader(self._stream.received_fds)
        # The sender keeps the slots that it named until the page says that they are not used.
        self.call_on_end(self.slots.decline_page)
        self.publisher: SlotPublisher | None = None
        if arena is not None:
            self.publisher = SlotPublisher(self, self._stream.attach, arena)
            self.call_on_end(self.publisher.end)

    def take_segments(self, wanted: bool) -> None:
        """Allow or forbid the peer to announce segments. To take no descriptors saves time."""
        self._stream.take_fds(wanted)

    def deliver(self, received: Received) -> bool:
        """See :meth:`FramedTransport.deliver`. Segments and pages go to the reader of slots."""
        if isinstance(received.message, Segment | DeviceSlot | PageMessage):
            # The descriptors have gone with the link.
            if not self.ended:
                self.slots.announce(received.message)
            return True
        return super().deliver(received)

    def abort(self) -> None:
        """See :meth:`FramedTransport.abort`."""
        super().abort()
        # Otherwise the receiver closes it, after it has read the last slot that was named.
        if not self.slots.outlives_link:
            self.slots.close()
