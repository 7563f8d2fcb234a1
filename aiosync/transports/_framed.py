"""What every link that moves frames over a byte stream does the same way.

Must not import torch, schemes, or a concrete transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from aiosync.transports._buffers import flat_view
from aiosync.transports._channel import FramedChannel
from aiosync.transports._io import ByteIo
from aiosync.transports.base import Handler, Lender, Payload, Received, Transport
from aiosync.types import Limits
from aiosync.wire import Message, encode_frame

__all__ = ["FramedTransport"]

_NOWAIT_NBYTES = 65536

Divert: TypeAlias = "Callable[[Message, Mapping[str, Any] | None], bool]"


class FramedTransport(Transport):
    """Frames of :mod:`aiosync.wire` over ``io``, payloads in the stream."""

    def __init__(self, io: ByteIo, *, limits: Limits | None, name: str) -> None:
        self._handler: Handler | None = None
        self._divert: Divert | None = None
        self._channel = FramedChannel(io, limits=limits, name=name, intercept=self._intercept)

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
        if nbytes > _NOWAIT_NBYTES:
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

    def divert(self, take: Divert) -> None:
        """Show each message without payload to ``take`` first, as it is read.

        ``take`` gets the message and its extension map, and returns True for those that it keeps
        from everybody else. What it raises ends the link, as for :meth:`subscribe`.
        """
        self._divert = take

    def _intercept(self, message: Message, ext: Mapping[str, Any] | None) -> bool:
        if self._divert is not None and self._divert(message, ext):
            return True
        if self._handler is None or ext:
            return False  # only recv() looks at extensions
        self._handler(Received(message))
        return True

    async def aclose(self) -> None:
        """Close both directions at once; waiters see ``TransportClosed``."""
        self._channel.close()

    def abort(self) -> None:
        """The same as :meth:`aclose`, from synchronous code."""
        self._channel.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._channel.name}: {self._channel.describe()}>"
