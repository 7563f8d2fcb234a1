"""Identity and order of updates, and those that come in chunks: where each belongs.

What is on its way at the trainer compares in ``sender.outbox``.
Pure bookkeeping: it looks at no payload. This module must never import asyncio, anyio or torch,
and reads no clock.
"""

from __future__ import annotations

import secrets

from aiosync.errors import RemoteProtocolError, StaleVersion, TransportBroken
from aiosync.wire import ALIGNMENT, Update, state_checksum

__all__ = ["MAX_VERSION", "Assembly", "Inbox", "draw_epoch"]

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

    def offer(self, epoch: int, version: int) -> None:
        """Register an update that arrived.

        Raises:
            StaleVersion: Not newer than an update of the same epoch that was offered before,
                whatever became of it. Nothing changed.
        """
        if epoch == self.newest_epoch and version <= self.newest:
            raise StaleVersion(
                f"version {version} of epoch {epoch:016x} is not newer than version {self.newest}"
            )
        self.newest_epoch = epoch
        self.newest = version

    def applied(self, epoch: int, version: int) -> None:
        """Register that an update was applied, whether or not it was offered.

        It may be one of an epoch before: it was being applied when the next epoch came.
        """
        if epoch == self.newest_epoch and version > self.newest:
            self.newest = version
        self.epoch, self.version = epoch, version

    def forget(self) -> None:
        """Register that what was applied is gone: as before the first. What is news stays."""
        self.epoch, self.version = None, 0


class Assembly:
    """A receiver's account of one update that arrives in chunks, one after the other.

    For each chunk, :meth:`place` says where its bytes belong, before any of them is written, and
    :meth:`arrived` whether they are what was sent. An update without ``chunk`` is one chunk. The
    object outlives a link: call :meth:`resume` before the first chunk of the next one.

    Args:
        nbytes: Bytes of the whole payload.
        digest: Digest of the manifest.
        epoch: Epoch of the update.
        version: Version of the update.

    Attributes:
        nbytes: As given.
        digest: As given.
        epoch: As given.
        version: As given.
    """

    __slots__ = ("_count", "_resumed", "_size", "_sums", "digest", "epoch", "nbytes", "version")

    def __init__(self, nbytes: int, digest: bytes, epoch: int, version: int) -> None:
        self.nbytes: int = nbytes
        self.digest: bytes = digest
        self.epoch: int = epoch
        self.version: int = version
        self._sums: list[bytes] = []  # of the chunks that are verified
        self._count = self._size = 0  # how many there are, and bytes of all but the last
        self._resumed = False  # the next chunk is the first over its link

    @property
    def good_nbytes(self) -> int:
        """Bytes from the start of the payload that are verified."""
        return min(len(self._sums) * self._size, self.nbytes)

    def resume(self) -> None:
        """Another link: the next chunk may be the first one again, and cut in another way."""
        self._resumed = True

    def place(self, update: Update, nbytes: int) -> tuple[int, int]:
        """Check an announced chunk before any of its bytes is written.

        Args:
            update: What announces it: the same epoch, version and digest.
            nbytes: Bytes of the frame's payload.

        Returns:
            Where the bytes belong in the payload of the update: start and stop.

        Raises:
            RemoteProtocolError: It is not the chunk that comes next, its checksum is missing, or
                it has values or a ``state`` although it is not the last. Nothing of the update
                counts as verified any more.
        """
        index, count = update.chunk or (0, 1)
        good, is_last = len(self._sums), index == count - 1
        if index == 0 and (self._resumed or not good):
            self._sums, self._count, self._size = [], count, nbytes
            follows = nbytes == self.nbytes
            if count > 1:
                aligned = nbytes > 0 and nbytes % ALIGNMENT == 0
                follows = aligned and count == -(-self.nbytes // nbytes)
        else:
            follows = (index, count) == (good, self._count) and nbytes == min(
                self._size, self.nbytes - self.good_nbytes
            )
        if not follows:
            why = f"does not follow {good} chunks of version {self.version} of {self.nbytes} bytes"
        elif update.checksum is None:
            why = "has no checksum"
        elif not is_last and (update.values or update.state is not None):
            why = "has fields that only the last one may have"
        else:
            self._resumed = False
            start = index * self._size
            return start, start + nbytes
        self._sums = []
        raise RemoteProtocolError(
            f"chunk {index} of {count} of version {update.version} with {nbytes} bytes {why}"
        )

    def arrived(self, update: Update, found: bytes) -> bool:
        """Register that the bytes of a chunk are where :meth:`place` said.

        Args:
            update: What announced it.
            found: Checksum of the bytes that came.

        Returns:
            Whether the update is complete.

        Raises:
            TransportBroken: The chunk was damaged on its way.
            RemoteProtocolError: The checksum over the whole update is wrong; nothing of it counts
                as verified any more.
        """
        index, count = update.chunk or (0, 1)
        if found != update.checksum:
            raise TransportBroken(
                f"chunk {index} of {count} of version {self.version} arrived damaged"
            )
        self._sums.append(found)
        if index < count - 1:
            return False
        if update.state is not None and state_checksum(self.digest, self._sums) != update.state:
            self._sums = []
            raise RemoteProtocolError(
                f"version {self.version} of epoch {self.epoch:016x} does not match its checksum, "
                "although each of its chunks does"
            )
        return True
