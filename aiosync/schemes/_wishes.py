"""Versions that a worker asked its trainer for, until they have come.

Must not import asyncio or torch.
"""

from __future__ import annotations

from aiosync.protocol import Inbox
from aiosync.schemes._outgoing import Outgoing
from aiosync.wire import Current, Fetch

__all__ = ["Wishes"]


class Wishes:
    """What ``pull()`` asks for: an update answers it, or the word that there is no newer one.

    Args:
        outgoing: Says it to the trainer, which knows of one wish at a time.

    Attributes:
        answers: How often an answer came.
        wanted: The least versions that were asked for and have not come.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self.answers: int = 0
        self.wanted: list[int] = []
        self._outgoing = outgoing
        self._promised: tuple[int, int] | None = None  # epoch and version that are on their way

    @property
    def is_promised(self) -> bool:
        """Whether the trainer said that a version follows which has not come yet."""
        return self._promised is not None

    def add(self, min_version: int) -> None:
        """Ask for the newest version, once it is at least this one."""
        self.wanted.append(min_version)
        self._outgoing.say(Fetch(min(self.wanted)))

    def ask_for_a_word(self) -> None:
        """Have the trainer say something: which version is its newest, or that version."""
        self._outgoing.say(Fetch(0))
        if self.wanted:  # the trainer knows of one wish at a time
            self._outgoing.say(Fetch(min(self.wanted)))

    def ask_again(self) -> None:
        """Another link took the place of the one that was asked through."""
        self._promised = None
        if self.wanted:
            self._outgoing.say(Fetch(min(self.wanted)))

    def on_current(self, message: Current, inbox: Inbox) -> bool:
        """The trainer said what its newest version is.

        Returns:
            Whether that is here already; otherwise it follows.
        """
        if message.version and (
            message.epoch != inbox.newest_epoch or message.version > inbox.newest
        ):
            # The word overtook the update, which pull() waits for; a lost link may swallow it.
            self._promised = (message.epoch, message.version)
            return False
        self._promised = None  # the latest word counts
        return True

    def has_come(self, epoch: int, version: int) -> None:
        """What was asked for is here, or the model refused it before."""
        promised = self._promised
        if promised is not None and epoch == promised[0] and version < promised[1]:
            return  # not the newest, or a part of what was asked for
        self._promised = None
        self.answers += 1
        left = [each for each in self.wanted if each > version]
        if left and len(left) < len(self.wanted):
            self._outgoing.say(Fetch(min(left)))
        self.wanted = left
