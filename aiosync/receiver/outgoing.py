"""What an end that receives has to say: answers, and what it asks for.

Must not import torch.
"""

from __future__ import annotations

from collections import deque

from aiosync._tasks import TaskOwner
from aiosync.errors import RemoteProtocolError, TransportError
from aiosync.transports.base import Transport, make_ack
from aiosync.types import AckStatus
from aiosync.wire import Fetch, Message

__all__ = ["Outgoing", "PullRequests"]

_MAX_WAITING = 1024  # messages that the peer does not read; it is owed few at a time


class Outgoing:
    """What one end has to say on its link, and on the next one after it: in order, never waiting.

    A link that has ended loses what was to be said; whoever reads from it reports the end.

    Args:
        transport: The link.
        tasks: Owner of the task that writes where the link is busy.
    """

    def __init__(self, transport: Transport, tasks: TaskOwner) -> None:
        self._transport = transport
        self._tasks = tasks
        self._waiting: deque[Message] = deque()
        self._writing = False
        # What was answered last of the newest version: epoch, version, and what.
        self._last: tuple[int, int, AckStatus, BaseException | None] | None = None

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
        if self._writing:
            return  # it goes with the others
        try:
            while waiting and self._transport.send_batch_nowait(list(waiting)):
                waiting.clear()
        except TransportError:
            waiting.clear()
            return
        if waiting:
            self._writing = True  # from now on: more may come before the task begins
            self._tasks.start(self._write(), "aiosync answers")

    def answer(
        self, epoch: int, version: int, status: AckStatus, error: BaseException | None = None
    ) -> None:
        """Say what became of a version."""
        last = self._last
        if last is None or last[0] != epoch or last[1] <= version:
            self._last = (epoch, version, status, error)
        self.say(make_ack(epoch, version, status, error))

    def has_answered(self, epoch: int, version: int, *, again: bool = False) -> bool:
        """Whether this was said of a version last; ``again`` says it once more."""
        last = self._last
        if last is None or last[:2] != (epoch, version):
            return False
        if again:
            self.answer(*last)
        return True

    async def _write(self) -> None:
        try:
            while self._waiting:
                transport = self._transport
                try:
                    await transport.send(self._waiting.popleft())
                except TransportError:
                    if transport is self._transport:  # else what came meanwhile is for the next
                        self._waiting.clear()
        finally:
            self._writing = False


class PullRequests:
    """What ``pull()`` asks for: an update answers it, or the word that there is no newer one.

    Args:
        outgoing: Says it to the trainer, which knows of one request at a time.

    Attributes:
        answers: How often an answer came.
        wanted: The least versions that were asked for and have not come.
        promised: Epoch and version that the trainer said are on their way.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self.answers: int = 0
        self.wanted: list[int] = []
        self.promised: tuple[int, int] | None = None
        self._outgoing = outgoing

    def add(self, min_version: int) -> None:
        """Ask for the newest version, once it is at least this one."""
        self.wanted.append(min_version)
        self._ask()

    def ask_again(self) -> None:
        """Another link took the place of the one that was asked through."""
        self.promised = None
        self._ask()

    def _ask(self) -> None:
        if self.wanted:
            self._outgoing.say(Fetch(min(self.wanted)))

    def has_come(self, epoch: int, version: int) -> None:
        """What was asked for is here, or the model refused it before."""
        promised = self.promised
        if promised is not None and epoch == promised[0] and version < promised[1]:
            return  # not the newest, or a part of what was asked for
        self.promised = None
        self.answers += 1
        left = [each for each in self.wanted if each > version]
        fewer = len(left) < len(self.wanted)
        self.wanted = left
        if fewer:
            self._ask()
