"""A receiver's messages to its trainer, in order and without waiting. Must not import asyncio."""

from __future__ import annotations

from collections import deque

from aiosync._tasks import TaskOwner
from aiosync.errors import RemoteProtocolError, TransportError
from aiosync.transports.base import Transport
from aiosync.wire import Message

__all__ = ["Outgoing"]

# Most messages that may wait for the link: a peer that reads its answers is owed only a few.
_MAX_WAITING = 1024


class Outgoing:
    """Sends the messages of one end over its link, and over later links: in order, never waiting.

    A link that has ended loses its unsent messages; the code that reads from it reports the end.

    Args:
        transport: The link.
        tasks: Owner of the task that writes if the link is busy.
    """

    def __init__(self, transport: Transport, tasks: TaskOwner) -> None:
        self._transport = transport
        self._tasks = tasks
        self._waiting: deque[Message] = deque()
        self._writing = False

    def use_link(self, transport: Transport) -> None:
        """Go on with another link; unsent messages are dropped."""
        self._waiting.clear()
        self._transport = transport

    def check(self) -> None:
        """Refuse a peer that causes answers and does not read them.

        Raises:
            RemoteProtocolError: Too many messages wait.
        """
        if len(self._waiting) > _MAX_WAITING:
            raise RemoteProtocolError(
                "the other end keeps sending updates without reading the replies"
            )

    def say(self, message: Message) -> None:
        """Send a message as soon as the link takes it."""
        waiting = self._waiting
        waiting.append(message)
        if self._writing:
            # The writing task sends it, too.
            return
        try:
            while waiting and self._transport.send_batch_nowait(list(waiting)):
                waiting.clear()
        except (TransportError, RemoteProtocolError):
            waiting.clear()
            return
        if waiting:
            # Set before the task begins, because more messages may come first.
            self._writing = True
            self._tasks.start(self._write(), "aiosync answers")

    async def _write(self) -> None:
        """Send the messages that wait, one by one, for as long as the link is busy."""
        try:
            while self._waiting:
                transport = self._transport
                try:
                    await transport.send(self._waiting.popleft())
                except (TransportError, RemoteProtocolError):
                    # Later messages are for the link that has replaced this one.
                    if transport is self._transport:
                        self._waiting.clear()
        finally:
            self._writing = False
