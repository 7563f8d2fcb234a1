"""The receiver's account of an update that arrives in chunks: the places of its chunks.

This is pure bookkeeping, which never reads a payload. This module must never import asyncio, anyio
or torch, and reads no clock.
"""

from __future__ import annotations

from aiosync.errors import RemoteProtocolError, TransportBroken
from aiosync.wire import ALIGNMENT, Update, state_checksum

__all__ = ["Assembly"]


class Assembly:
    """A receiver's account of one update that arrives in chunks, one after the other.

    For each chunk, :meth:`place` returns the place of its bytes before any of them is written, and
    :meth:`arrived` checks that they are the bytes that the sender sent. An update without ``chunk``
    is one chunk. This object outlives a link: call :meth:`resume` before the first chunk that
    arrives over the next link.

    Args:
        nbytes: Bytes of the whole payload.
        digest: Digest of the manifest.
        epoch: Epoch of the update.
        version: Version of the update.

    Attributes:
        nbytes: Bytes of the whole payload.
        digest: Digest of the manifest.
        epoch: Epoch of the update.
        version: Version of the update.
        wire_nbytes: Bytes of its chunks, as they travelled.
    """

    __slots__ = (
        *("_count", "_resumed", "_size", "_sums"),
        *("digest", "epoch", "nbytes", "version", "wire_nbytes"),
    )

    def __init__(self, nbytes: int, digest: bytes, epoch: int, version: int) -> None:
        self.nbytes: int = nbytes
        self.digest: bytes = digest
        self.epoch: int = epoch
        self.version: int = version
        self.wire_nbytes: int = 0
        # Checksums of the verified chunks, in order.
        self._sums: list[bytes] = []
        # Number of all chunks, and bytes of each chunk but the last.
        self._count = self._size = 0
        # True from resume() on, until the first chunk over the new link has its place.
        self._resumed = False

    @property
    def good_nbytes(self) -> int:
        """Number of verified bytes, counted from the start of the payload."""
        return min(len(self._sums) * self._size, self.nbytes)

    def resume(self) -> None:
        """Allow the next chunk to be the first one, because it arrives over a new link.

        The sender may start from the beginning there, with chunks of another size.
        """
        self._resumed = True

    def place(self, update: Update, nbytes: int) -> tuple[int, int]:
        """Check an announced chunk before any of its bytes is written.

        Args:
            update: The message that announces the chunk. It has the epoch, version and digest of
                this update.
            nbytes: Bytes of the frame's payload. A delta takes the place of its result.

        Returns:
            Start and stop of the chunk's bytes in the payload of the update.

        Raises:
            RemoteProtocolError: The chunk is not the next one, has no checksum, or has values or a
                ``state`` although it is not the last. No byte of the update counts as verified any
                more.
        """
        if update.base is not None:
            nbytes = update.base[1]
        index, count = update.chunk or (0, 1)
        good, is_last = len(self._sums), index == count - 1
        if index == 0 and (self._resumed or not good):
            follows = self._begin(count, nbytes)
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

    def _begin(self, count: int, nbytes: int) -> bool:
        """Begin the payload with a first chunk; return True if the size of the chunk fits."""
        self._sums, self._count, self._size = [], count, nbytes
        if count == 1:
            return nbytes == self.nbytes
        return nbytes > 0 and nbytes % ALIGNMENT == 0 and count == -(-self.nbytes // nbytes)

    def arrived(self, update: Update, found: bytes) -> bool:
        """Register that the bytes of a chunk are at the place that :meth:`place` returned.

        Args:
            update: The message that announced the chunk.
            found: Checksum of the bytes that arrived.

        Returns:
            True if the update is complete.

        Raises:
            TransportBroken: The chunk was damaged on its way.
            RemoteProtocolError: The checksum over the whole update is wrong. No byte of the update
                counts as verified any more.
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
