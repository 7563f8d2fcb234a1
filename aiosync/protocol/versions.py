"""Identity and order of updates, on both sides of a link.

What is on its way at the trainer compares in ``sender.outbox``.
Pure bookkeeping. This module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

import secrets

from aiosync.errors import StaleVersion

__all__ = ["MAX_VERSION", "Inbox", "draw_epoch"]

MAX_VERSION = 2**63 - 1
"""Largest epoch and largest version."""


def draw_epoch() -> int:
    """An epoch, 1 to 2**63 - 1. Two senders draw the same one with a probability of about 1e-19."""
    return secrets.randbelow(MAX_VERSION) + 1


class Inbox:
    """What a receiver has applied, and which updates are news to it.

    An update is offered when it arrives, and then either applied or refused. Within an epoch
    only versions newer than every one that was offered before are accepted. Another epoch is
    always accepted, because epochs have no order, and the versions of the one before count
    no more.

    Attributes:
        epoch: Epoch of the version that is applied; ``None`` before the first.
        version: Version that is applied; 0 before the first.
        newest_epoch: Epoch of ``newest``; ``None`` before the first offer.
        newest: Newest version that was offered, applied or not; 0 before the first offer.
    """

    __slots__ = ("epoch", "newest", "newest_epoch", "version")

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.version: int = 0
        self.newest_epoch: int | None = None
        self.newest: int = 0

    @property
    def lag(self) -> int:
        """How far the applied version is behind the newest one offered.

        After a change of epoch, until a version of the new one was applied, this is the
        newest version itself: nothing of that epoch is there yet.
        """
        if self.newest_epoch != self.epoch:
            return self.newest
        return self.newest - self.version

    def offer(self, epoch: int, version: int) -> None:
        """Register an update that arrived.

        Raises:
            StaleVersion: Not newer than an update of the same epoch that was offered before,
                whatever became of it. Nothing changed.
        """
        if epoch == self.newest_epoch and version <= self.newest:
            raise StaleVersion(
                f"version {version} of epoch {epoch} is not newer than version {self.newest}"
            )
        self.newest_epoch = epoch
        self.newest = version

    def found(self, epoch: int, version: int) -> None:
        """Register that an update was applied that was found, and need not have been offered."""
        if epoch != self.newest_epoch or version > self.newest:
            self.newest_epoch, self.newest = epoch, version
        self.epoch, self.version = epoch, version

    def applied(self, epoch: int, version: int) -> None:
        """Register that an offered update was applied.

        It may be one of an epoch before: it was being applied when the next epoch came.
        """
        self.epoch, self.version = epoch, version

    def forget(self) -> None:
        """Register that what was applied is gone: as before the first. What is news stays."""
        self.epoch, self.version = None, 0
