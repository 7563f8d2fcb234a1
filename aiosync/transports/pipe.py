"""Links over pipes: ``multiprocessing`` connections, raw descriptors and Unix socket pairs.

The event loop drives the descriptors; there is no reader thread and nothing is pickled. Must
not import torch or schemes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from aiosync.errors import ConfigError
from aiosync.transports._channel import FramedChannel
from aiosync.transports._io import DescriptorIo, widen_socket
from aiosync.transports._reader import flat_view
from aiosync.transports.base import Handler, Lender, Payload, Received, Transport, without_payload
from aiosync.types import Cancellation, Capabilities, Limits
from aiosync.wire import Message, Repeat, encode_frame

__all__ = ["MPTransport"]


class MPTransport(Transport):
    """A link over one two-way pipe, or over a pair of one-way pipes.

    Takes ownership of what it is given: closing the transport closes the connections. Nothing
    else may read from or write to them meanwhile.

    Args:
        pipe: A two-way end: ``multiprocessing.Pipe()`` or one socket of a Unix socket pair.
        reader: The readable end of a one-way pipe, instead of ``pipe``.
        writer: The writable end of another one-way pipe, instead of ``pipe``.
        limits: What the peer may announce.
        name: How errors and reprs call the peer.

    Raises:
        ConfigError: Neither ``pipe`` nor both of ``reader`` and ``writer`` were given.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="pipe",
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    def __init__(
        self,
        pipe: Connection | socket.socket | None = None,
        *,
        reader: Connection | None = None,
        writer: Connection | None = None,
        limits: Limits | None = None,
        name: str = "the peer",
    ) -> None:
        if pipe is not None and reader is None and writer is None:
            ends: tuple[Connection | socket.socket, ...] = (pipe,)
            read_fd = write_fd = pipe.fileno()
        elif pipe is None and reader is not None and writer is not None:
            ends = (reader, writer)
            read_fd, write_fd = reader.fileno(), writer.fileno()
        else:
            raise ConfigError(
                "pass either one two-way pipe, MPTransport(conn), or both one-way ends, "
                "MPTransport(reader=..., writer=...)"
            )
        for fd in {read_fd, write_fd}:
            widen_socket(fd)
        self._handler: Handler | None = None
        self._channel = FramedChannel(
            DescriptorIo(read_fd, write_fd, ends),
            limits=limits,
            name=name,
            intercept=self._intercept,
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[MPTransport, MPTransport]]:
        """Two connected ends in this process, closed when the context ends."""
        left, right = socket.socketpair()
        async with (
            cls(left, limits=limits, name="the right end") as one,
            cls(right, limits=limits, name="the left end") as two,
        ):
            yield one, two

    @property
    def channel(self) -> FramedChannel:
        """The framed byte stream below, for schemes that watch the peer's process."""
        return self._channel

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Cancellation: class B."""
        views = [flat_view(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)
        frame = encode_frame(message, nbytes, limits=self._channel.limits)
        await self._channel.send(frame, [view for view in views if view.nbytes], timeout)

    def send_nowait(self, message: Message, payload: Payload = ()) -> bool:
        """See :meth:`Transport.send_nowait`; payloads above 64 KiB are always refused."""
        views = [flat_view(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)
        if nbytes > 65536:
            self._channel.check()
            return False
        frame = encode_frame(message, nbytes, limits=self._channel.limits)
        return self._channel.send_now(frame, [view for view in views if view.nbytes])

    def send_batch_nowait(self, messages: Sequence[Message]) -> bool:
        """See :meth:`Transport.send_batch_nowait`."""
        limits = self._channel.limits
        frames = [encode_frame(message, 0, limits=limits) for message in messages]
        return self._channel.send_now(b"".join(frames))

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. Cancellation: class B."""
        message, _ext, buffers, nbytes = await self._channel.recv(into, timeout)
        return Received(message, [flat_view(buffer) for buffer in buffers], nbytes)

    def subscribe(self, handler: Handler) -> bool:
        """See :meth:`Transport.subscribe`; for messages without payload."""
        self._handler = handler
        return True

    def _intercept(self, message: Message, ext: Mapping[str, Any] | None) -> bool | Repeat:
        del ext
        if self._handler is None:
            return False
        again = self._handler(Received(message))
        return True if again is None else without_payload(again)

    async def aclose(self) -> None:
        """Close both directions at once; waiters see ``TransportClosed``."""
        self._channel.close()

    def abort(self) -> None:
        """The same as :meth:`aclose`, from synchronous code."""
        self._channel.close()

    def __repr__(self) -> str:
        return f"<MPTransport to {self._channel.name}: {self._channel.describe()}>"
