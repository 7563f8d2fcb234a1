"""Links through shared memory: weights in slots of one segment, messages over a Unix socket.

The sender writes a version once into a slot, however many receivers read it, and names it to each
of them by one word of memory; they read it in place. The descriptors travel over the socket, and so
does whatever is no version of weights in a slot. Must not import torch or schemes. See
``docs/topics/shared-memory.md``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

from aiosync.transports._incoming import SlotReader
from aiosync.transports._io import SocketIo, widen_socket
from aiosync.transports._publishing import SlotPublisher
from aiosync.transports._segment import Arena
from aiosync.transports.stream import FramedTransport
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import Message, PageMessage, Segment

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
        io = SocketIo(sock)
        widen_socket(io.read_fd)
        self._io = io
        super().__init__(io, limits=limits, name=name)
        self.slots: SlotReader = SlotReader(io)
        self.publisher: SlotPublisher | None = None
        if arena is not None:
            self.publisher = SlotPublisher(self._channel, io, arena)
            self._channel.call_on_end(self.publisher.end)

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

    @property
    def takes_segments(self) -> bool:
        """Whether the peer may announce segments. To take no descriptors saves system time."""
        return self._io.takes_fds

    @takes_segments.setter
    def takes_segments(self, value: bool) -> None:
        self._io.takes_fds = value

    def _intercept(self, message: Message, ext: Mapping[str, Any] | None) -> bool:
        if isinstance(message, Segment | PageMessage):
            self.slots.announce(message)
            return True
        return super()._intercept(message, ext)

    def abort(self) -> None:
        """See :meth:`FramedTransport.abort`."""
        if self._channel.closed:
            return
        if self.publisher is not None:
            self.publisher.end()
        self._channel.close()
        if not self.slots.outlives_link:
            self.slots.close()
