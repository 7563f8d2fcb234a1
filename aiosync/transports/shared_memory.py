"""Links through shared memory: weights in slots of one segment, messages over a Unix socket.

The sender writes a version once into a slot, however many receivers read it, and names it to each
of them by one word of memory; they read it in place. The descriptors travel over the socket, and so
does whatever is no version of weights in a slot. Must not import torch or schemes. See
``docs/topics/shared-memory.md``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import ClassVar

from aiosync.transports._incoming import SlotReader
from aiosync.transports._io import DescriptorStream
from aiosync.transports._publishing import SlotPublisher
from aiosync.transports._segment import Arena
from aiosync.transports.base import Received
from aiosync.transports.stream import FramedTransport, widen_socket
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import PageMessage, Segment

__all__ = ["SharedMemTransport"]


class SharedMemTransport(FramedTransport):
    """A link between two processes of one host.

    Payloads given to :meth:`send` travel through the socket; schemes put versions into slots.

    Args:
        sock: A connected Unix stream socket; owned from now on.
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
        sock: socket.socket,
        *,
        arena: Arena | None = None,
        limits: Limits | None = None,
        name: str = "the peer",
    ) -> None:
        io = DescriptorStream(sock)
        widen_socket(io.read_fd)
        super().__init__(io, limits=limits, name=name)
        self._fds = io
        self.slots: SlotReader = SlotReader(io)
        self.publisher: SlotPublisher | None = None
        if arena is not None:
            self.publisher = SlotPublisher(self, io, arena)
            self.call_on_end(self.publisher.end)

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[SharedMemTransport, SharedMemTransport]]:
        """Two connected ends in this process, closed when the context ends."""
        left, right = socket.socketpair()
        async with (
            cls(left, limits=limits, name="the right end") as one,
            cls(right, limits=limits, name="the left end") as two,
        ):
            yield one, two

    def take_segments(self, wanted: bool) -> None:
        """Whether the peer may announce segments. To take no descriptors saves system time."""
        self._fds.take_fds(wanted)

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
