"""The link through shared memory, and its sending side: which slot the word of a link names.

Descriptors travel over the socket, beside the messages that say what they are. Must not import
torch or schemes.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from typing import ClassVar

from aiosync.errors import TransportBroken, TransportClosed
from aiosync.transports.base import Received
from aiosync.transports.shared_memory.reader import SlotReader
from aiosync.transports.shared_memory.slots import BELL, HOLDS, WANT, Arena, Slot, make_page
from aiosync.transports.stream import ByteStream, FramedTransport
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import Message, PageMessage, Segment

__all__ = ["SharedMemTransport", "SlotPublisher"]

_MAX_FDS = 8
_MAX_QUEUED_FDS = 64
_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)


class DescriptorStream(ByteStream):
    """A stream over a Unix socket that can carry descriptors beside the bytes. Owns the socket.

    Attributes:
        received_fds: Descriptors of the peer that nobody took yet.
    """

    reads_out: ClassVar[bool] = (
        False  # shared memory also watches the peer's process, and every call counts
    )

    readv: Callable[[Sequence[memoryview]], int]
    writev: Callable[[Sequence[memoryview]], int]

    def __init__(self, end: Connection | socket.socket) -> None:
        super().__init__(end)
        self.received_fds: deque[int] = deque()
        self._plain = self.readv, self.writev
        self.take_fds(True)

    def take_fds(self, wanted: bool) -> None:
        """Whether descriptors of the peer are taken; to take none saves system time."""
        self.readv = self._recv_with_fds if wanted else self._plain[0]

    def _recv_with_fds(self, buffers: Sequence[memoryview]) -> int:
        nbytes, ancillary, _flags, _address = self.sock.recvmsg_into(
            buffers, _SPACE, socket.MSG_CMSG_CLOEXEC
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
        self.writev = self._plain[1]
        if fd is None:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]

        def with_fd(buffers: Sequence[memoryview]) -> int:
            nbytes = self.sock.sendmsg(buffers, rights)
            self.attach(None)
            return nbytes

        self.writev = with_fd

    def close(self, *, farewell: bool = True) -> None:
        """Close the socket, and descriptors that nobody took."""
        while self.received_fds:
            os.close(self.received_fds.popleft())
        super().close(farewell=farewell)


class SlotPublisher:
    """Names slots of an arena to one peer.

    Args:
        link: Where messages go.
        io: Carries descriptors to the peer.
        arena: Owner of the slots.

    Attributes:
        announced: Ids of the segments that the peer can read.
        promised: Digest of the manifest whose versions the peer promised to take without being
            told; ``None`` while it promises nothing.
        version: Version that the word names; 0 for none.
    """

    def __init__(self, link: FramedTransport, io: DescriptorStream, arena: Arena) -> None:
        self.announced: set[int] = set()
        self.promised: bytes | None = None
        self.version: int = 0
        self._link: FramedTransport | None = link  # until it has ended
        self._io = io
        self._arena = arena
        self._words: memoryview | None = None
        self._page_fd = -1  # until it was sent
        self._slots: tuple[Slot, ...] = ()  # those that the word may name, the newest last
        self._count = self._held = 0
        arena.num_links += 1

    def announcements(self, slot: Slot) -> Generator[tuple[Message, tuple[()]]]:
        """What the peer needs to read a slot: messages, each with its descriptor attached.

        Asking for the next one says that the last one was sent; close it where that fails.

        Raises:
            TransportBroken: There is no memory or descriptor left for a page.
        """
        segment = slot.segment
        if segment.segment_id in self.announced:
            return
        link = self._link
        if link is None:
            raise TransportClosed("the link has ended")
        link.check()
        if self._words is None:
            try:
                self._words, self._page_fd = make_page()
            except OSError as exc:
                raise TransportBroken(
                    f"no page of shared memory for {link.name}: {exc.strerror}"
                ) from exc
        try:
            if self._page_fd >= 0:
                self._io.attach(self._page_fd)
                yield PageMessage(), ()
                self._close_page_fd()
            self._io.attach(segment.read_only_fd)
            yield Segment(segment.segment_id, segment.slot_nbytes, 1), ()
            self.announced.add(segment.segment_id)
        finally:
            self._io.attach(None)

    def _close_page_fd(self) -> None:
        if self._page_fd >= 0:  # else the link ended right after it took the message
            os.close(self._page_fd)
            self._page_fd = -1

    def store(self, slot: Slot, version: int) -> None:
        """Have the peer's next read use a slot, which is sealed and which it can read."""
        words = self._words
        if words is None or (self._slots and slot is self._slots[-1] and version == self.version):
            return
        # An exception of a signal's handler may end this between any two steps: the slot that the
        # word names is never taken for one that it does not.
        old, self._slots = self._slots, (*self._slots, slot)
        slot.namers.add(self)
        self._count += 1
        self.version = version
        # Never the same twice on a link, and each greater than the last.
        words[WANT] = self._count << 16 | (slot.segment.segment_id & 255) << 8 | slot.index
        for each in old:
            if each is not slot:
                each.namers.discard(self)
        self._slots = (slot,)

    @property
    def holds(self) -> int:
        """Version that the peer computes with, of those that a word named; 0 for none.

        Of an ended link the last one.
        """
        return self._held if self._words is None else min(self._words[HOLDS], self.version)

    @property
    def bell(self) -> bool:
        """Whether the peer wants to be told of each new word."""
        return self._words is not None and self._words[BELL] == 1

    def end(self) -> None:
        """The link has ended: its word names nothing any more. Idempotent."""
        link, words, named = self._link, self._words, self._slots
        if link is None:
            return
        self._held = self.holds
        self._link = self._words = self.promised = None
        self._close_page_fd()
        if words is not None and link.pidfd >= 0:
            pidfd, link.pidfd = link.pidfd, -1
            self._arena.abandon(named, self._held, words, pidfd)
        for slot in named:
            slot.namers.discard(self)
        self._slots = ()
        self._arena.num_links -= 1


class SharedMemTransport(FramedTransport):
    """A link between two processes of one host.

    Payloads given to :meth:`send` travel through the socket; schemes put versions into slots.

    Args:
        io: A connected Unix stream socket, or a two-way ``multiprocessing`` connection; owned from
            now on.
        arena: Where the slots are that this end may name to the other; ``None`` if it names none.
        limits: What the peer may announce.
        name: How errors and reprs call the peer.

    Attributes:
        publisher: Names slots to the peer; ``None`` without an arena.
        slots: What the peer named.
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
        self.publisher: SlotPublisher | None = None
        if arena is not None:
            self.publisher = SlotPublisher(self, self._stream, arena)
            self.call_on_end(self.publisher.end)

    def take_segments(self, wanted: bool) -> None:
        """Whether the peer may announce segments. To take no descriptors saves system time."""
        self._stream.take_fds(wanted)

    def deliver(self, received: Received) -> bool:
        """See :meth:`FramedTransport.deliver`; segments are for the slots alone."""
        if isinstance(received.message, Segment | PageMessage):
            self.slots.announce(received.message)
            return True
        return super().deliver(received)

    def abort(self) -> None:
        """See :meth:`FramedTransport.abort`."""
        super().abort()
        if not self.slots.outlives_link:
            self.slots.close()
