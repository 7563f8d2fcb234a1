"""Small messages on their way to the other end: answers, wishes. In order, and never waiting.

Where the link takes them they are written at once, otherwise by a task. Must not import torch.
"""

from __future__ import annotations

from collections import deque

from aiosync._tasks import TaskOwner
from aiosync.errors import RemoteProtocolError, TransportError
from aiosync.transports.base import Transport
from aiosync.types import AckStatus
from aiosync.wire import Message

__all__ = ["Outgoing"]

_MAX_WAITING = 1024  # the peer does not read; it is owed few at a time


class Outgoing:
    """What one end has to say on its link, and on the next one after it.

    A link that has ended loses what was to be said; whoever reads from it reports the end.

    Args:
        transport: The link.
        tasks: Owner of the task that writes where the link is busy.
    """

    def __init__(self, transport: Transport, tasks: TaskOwner) -> None:
        self._transport = transport
        self._tasks = tasks
        self._waiting: deque[Message] = deque()
        self._flushing = False

    def use_link(self, transport: Transport) -> None:
        """Go on with another link."""
        self._waiting.clear()
        self._transport = transport

    def check(self) -> None:
        """Refuse a peer that makes answers necessary and does not read them.

        Raises:
            RemoteProtocolError: Too many wait.
        """
        if len(self._waiting) > _MAX_WAITING:
            raise RemoteProtocolError(
                "the other end keeps sending updates without reading the replies"
            )

    def say(self, message: Message) -> None:
        """Send a message as soon as the link takes it."""
        waiting = self._waiting
        waiting.append(message)
        if self._flushing:
            return  # it goes with the others
        try:
            while waiting and self._transport.send_batch_nowait(list(waiting)):
                waiting.clear()
        except TransportError:
            waiting.clear()
            return
        if waiting:
            self._flushing = True  # from now on: more may come before the task begins
            self._tasks.start(self._flush_all(), "aiosync answers")

    def say_applied_now(self, epoch: int, version: int) -> bool:
        """The short way for what is said most often; False where it has to wait its turn."""
        if self._waiting or self._flushing:
            return False
        try:
            return self._transport.ack_nowait(epoch, version, AckStatus.APPLIED)
        except TransportError:
            return True  # nobody is there any more

    async def flush(self) -> None:
        """Wait until the link took everything, unless a task does that already."""
        if self._waiting and not self._flushing:
            self._flushing = True
            await self._flush_all()

    async def _flush_all(self) -> None:
        transport = self._transport
        try:
            while self._waiting and transport is self._transport:
                await transport.send(self._waiting.popleft())
        except TransportError:
            if transport is self._transport:
                self._waiting.clear()
        finally:
            self._flushing = False
        if self._waiting:  # it came for the next link, while this one was failing
            self._flushing = True
            await self._flush_all()
