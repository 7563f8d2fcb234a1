"""The receiver's record of the order of updates: what it applied, and what it was offered.

The order of updates that the sender has under way is in ``sender.outbox``. This is pure
bookkeeping. This module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

import secrets
import threading

from aiosync.errors import StaleVersion

__all__ = ["MAX_VERSION", "Inbox", "draw_epoch"]

MAX_VERSION = 2**63 - 1
"""Largest epoch and largest version."""


def draw_epoch() -> int:
    """Return a random epoch, 1 to 2**63 - 1.

    Two senders draw the same epoch with a probability of about 1e-19.
    """
    return secrets.randbelow(MAX_VERSION) + 1


class Inbox:
    """A receiver's record of the version it has applied and the newest version it was offered.

    An update is offered when it arrives, and then either applied or refused. Within an epoch
    only a version newer than all that were offered before is accepted. An update of another epoch
    is always accepted, because epochs have no order; the versions of the previous epoch are then
    no longer compared. A thread may apply one update while another one is offered.

    Attributes:
        epoch: Epoch of the applied version; ``None`` before the first.
        version: Applied version; 0 before the first.
        newest_epoch: Epoch of ``newest``; ``None`` before the first offer.
        newest: Newest version that was offered, applied or not; 0 before the first offer.
        taken: Epoch and version that were applied last, also if they were forgotten since.
    """

    __slots__ = ("_lock", "epoch", "newest", "newest_epoch", "taken", "version")

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.version: int = 0
        self.newest_epoch: int | None = None
        self.newest: int = 0
        self.taken: tuple[int | None, int] = (None, 0)
        self._lock = threading.Lock()

    def offer(self, epoch: int, version: int) -> None:
        """Register an update that arrived.

        Raises:
            StaleVersion: The update is not newer than an update of the same epoch that was offered
                before, whether that one was applied or refused. The record is unchanged.
        """
        with self._lock:
            if epoch == self.newest_epoch and version <= self.newest:
                raise StaleVersion(
                    f"version {version} of epoch {epoch:016x} is not newer than version "
                    f"{self.newest}"
                )
            self.newest_epoch, self.newest = epoch, version

    def applied(self, epoch: int, version: int) -> None:
        """Register that an update was applied, whether or not it was offered.

        The update may belong to an earlier epoch: the receiver was still applying it when the
        first update of the next epoch was offered.
        """
        with self._lock:
            # All at once: a message about this version may come in another thread.
            self._see(epoch, version)
            self.epoch, self.version = self.taken = epoch, version

    def seen(self, epoch: int, version: int) -> None:
        """Register an update that was never offered, and that was refused in shared memory."""
        with self._lock:
            self._see(epoch, version)

    def _see(self, epoch: int, version: int) -> None:
        """Register a version that was never offered, if it is newer. Under the lock."""
        if epoch == self.newest_epoch and version > self.newest:
            self.newest = version

    def forget(self) -> None:
        """Register that the model no longer has the applied version, as before the first one.

        The newest offered version stays as it is.
        """
        self.epoch, self.version = None, 0

    @property
    def has_let_go(self) -> bool:
        """True if the newest version was applied, and the model no longer has it."""
        newest = self.newest_epoch, self.newest
        return not self.version and self.newest > 0 and self.taken == newest

    def reopen(self) -> None:
        """Accept all versions of the epoch again, as the sender offers them anew."""
        with self._lock:
            self.newest, self.taken = 0, (None, 0)
