"""The link through shared memory, and its sending side, which names slots by the link's word.

Descriptors travel over the socket, beside the messages that announce them. Must not import torch or
schemes.
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
        received_fds: Descriptors of the peer that were not taken yet.
    """

    reads_out: ClassVar[bool] = (
        False  # the link also watches the peer's process, and each further call costs time
    )

    readv: Callable[[Sequence[memoryview]], int]
    writev: Callable[[Sequence[memoryview]], int]

    def __init__(self, end: Connection | socket.socket) -> None:
        super().__init__(end)
        self.received_fds: deque[int] = deque()
        self._plain = self.readv, self.writev
        self.take_fds(True)

    def take_fds(self, wanted: bool) -> None:
        """Accept descriptors of the peer, or none from now on, which saves system time."""
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

    def close(self, *, farewell: bool = True) -> None:
        """Close the socket, and the descriptors that were not taken."""
        while self.received_fds:
            os.close(self.received_fds.popleft())
        super().close(farewell=farewell)


class SlotPublisher:
    """The sending side of a link: it names slots of an arena to one peer.

    Args:
        link: The link for messages to the peer.
        io: The stream that carries descriptors to the peer.
        arena: Owner of the slots.

    Attributes:
        announced: Ids of the segments that the peer can read.
        promised: Digest of the manifest whose versions the peer promised to take without a message
            about each one; ``None`` while it promises nothing.
        version: Version that the word names; 0 for none.
    """

    def __init__(self, link: FramedTransport, io: DescriptorStream, arena: Arena) -> None:
        self.announced: set[int] = set()
        self.promised: bytes | None = None
        self.version: int = 0
        # The link; None once it has ended.
        self._link: FramedTransport | None = link
        self._io = io
        self._arena = arena
        self._words: memoryview | None = None
        # The descriptor of the page until it was sent, then -1.
        self._page_fd = -1
        # The slots that the word may name, the newest last.
        self._slots: tuple[Slot, ...] = ()
        self._count = self._held = 0
        arena.num_links += 1

    def announcements(self, slot: Slot) -> Generator[tuple[Message, tuple[()]]]:
        """Return the messages that the peer needs to read a slot, each with a descriptor attached.

        The caller asks for the next message once it has sent the last one. It closes the generator
        if a send fails.

        Raises:
            TransportClosed: The link has ended.
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
        if self._page_fd >= 0:  # it is -1 if the link ended right after it took the message
            os.close(self._page_fd)
            self._page_fd = -1

    def store(self, slot: Slot, version: int) -> None:
        """Name a slot to the peer, whose next read then uses it.

        Args:
            slot: A sealed slot of a segment that was announced to the peer.
            version: The version in the slot.
        """
        words = self._words
        if words is None or (self._slots and slot is self._slots[-1] and version == self.version):
            return
        # An exception of a signal's handler may end this between any two steps. In this order, the
        # slot that the word names is in ``_slots``, and this object in its ``namers``, at any time.
        old, self._slots = self._slots, (*self._slots, slot)
        slot.namers.add(self)
        self._count += 1
        self.version = version
        # The count makes each word of a link different, and greater than the last one.
        words[WANT] = self._count << 16 | (slot.segment.segment_id & 255) << 8 | slot.index
        for each in old:
            if each is not slot:
                each.namers.discard(self)
        self._slots = (slot,)

    @property
    def holds(self) -> int:
        """Version that the peer computes with, of those that the word named; 0 for none.

        Once the link has ended, this is the last such version.
        """
        return self._held if self._words is None else min(self._words[HOLDS], self.version)

    @property
    def bell(self) -> bool:
        """True if the peer asks for a message about each new word."""
        return self._words is not None and self._words[BELL] == 1

    def end(self) -> None:
        """Withdraw the link's slots once the link has ended. Idempotent.

        If the peer's process may still compute with them, the arena keeps them until it has ended.
        """
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
        self.publisher: SlotPublisher | None = None
        if arena is not None:
            self.publisher = SlotPublisher(self, self._stream, arena)
            self.call_on_end(self.publisher.end)

    def take_segments(self, wanted: bool) -> None:
        """Allow or forbid the peer to announce segments. To take no descriptors saves time."""
        self._stream.take_fds(wanted)

    def deliver(self, received: Received) -> bool:
        """See :meth:`FramedTransport.deliver`. Segments and pages go to the reader of slots."""
        if isinstance(received.message, Segment | PageMessage):
            self.slots.announce(received.message)
            return True
        return super().deliver(received)

    def abort(self) -> None:
        """See :meth:`FramedTransport.abort`."""
        super().abort()
        if not self.slots.outlives_link:
            self.slots.close()
