"""Updates in chunks: where each one belongs, which are verified, and what has to come again.

Pure bookkeeping: it writes no payload and keeps none, and the only bytes it looks at are those
that it is asked to compare with their checksum. This module must never import asyncio, anyio or
torch, and reads no clock.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiosync.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from aiosync.wire import ALIGNMENT, RunningChecksum, Update, checksum, state_checksum

__all__ = ["Assembly", "ChunkPlan", "Verdict"]

_MAX_RECUT = 2**16  # chunks that another cut may make of a part: each is looked at again


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a sender cuts one payload: equal chunks, of which the last may be shorter.

    Attributes:
        nbytes: Bytes of the payload, 0 or more.
        chunk_nbytes: Bytes of every chunk but the last, a positive multiple of 64.

    Raises:
        ConfigError: One of the two is not what it has to be.
    """

    nbytes: int
    chunk_nbytes: int

    def __post_init__(self) -> None:
        if type(self.nbytes) is not int or self.nbytes < 0:
            raise ConfigError(f"nbytes is {self.nbytes!r}; it must be an int, 0 or more")
        size = self.chunk_nbytes
        if type(size) is not int or size <= 0 or size % ALIGNMENT:
            raise ConfigError(
                f"chunk_nbytes is {size!r}; it must be a positive multiple of {ALIGNMENT}"
            )

    @property
    def count(self) -> int:
        """How many chunks there are. An empty payload has one, which is empty."""
        return max(1, -(-self.nbytes // self.chunk_nbytes))

    def span(self, index: int) -> tuple[int, int]:
        """Return where a chunk starts and stops in the payload, in bytes.

        Raises:
            LocalProtocolError: There is no such chunk.
        """
        if not 0 <= index < self.count:
            raise LocalProtocolError(f"there is no chunk {index} of {self.count}")
        start = index * self.chunk_nbytes
        return start, min(start + self.chunk_nbytes, self.nbytes)

    def index_at(self, nbytes: int) -> int:
        """Return how many chunks a receiver has that has a prefix of the payload.

        Args:
            nbytes: Bytes of the prefix, as in ``Hello.partial_nbytes``. Anything may come from
                a peer here.

        Returns:
            Index of the chunk to go on with; :attr:`count` when the prefix is everything, and
            0 when it is larger than the payload or does not end where a chunk ends.
        """
        if not 0 < nbytes <= self.nbytes:
            return 0
        if nbytes == self.nbytes:
            return self.count
        index, rest = divmod(nbytes, self.chunk_nbytes)
        return 0 if rest else index


class Verdict(enum.Enum):
    """What the arrival of a chunk means for the update."""

    GOOD = "good"
    """The chunk is verified; others are missing."""
    DAMAGED = "damaged"
    """The chunk is not what was sent: ask for it again with ``Resend``."""
    COMPLETE = "complete"
    """Every chunk is verified, and the whole as well if its checksum came."""


class Assembly:
    """A receiver's account of one update that arrives in chunks.

    For each chunk, :meth:`place` says where its bytes belong, before any of them is written, and
    :meth:`arrived` what has to be done when they are there. Chunks may come in any order. An
    update without ``chunk`` is one chunk. The memory belongs to the caller; it must not change
    where chunks are verified.

    The object outlives a link: call :meth:`resume` before the next one is opened. Memory is in
    proportion to the chunks that arrived. Not thread-safe.

    Args:
        nbytes: Bytes of the whole payload.
        digest: Digest of the manifest.
        epoch: Epoch of the update.
        version: Version of the update.
        max_damaged: How often each chunk may arrive damaged.
        require_checksum: Refuse a chunk that has no checksum. Otherwise such a chunk is taken as
            it is.

    Attributes:
        nbytes: As given.
        digest: As given.
        epoch: As given.
        version: As given.
        values: ``Update.values`` of the last chunk, once that is verified; empty before.
    """

    __slots__ = (
        "_count",
        "_damaged",
        "_good",
        "_max_damaged",
        "_memory",
        "_prefix",
        "_require_checksum",
        "_resumed",
        "_size",
        "_state",
        "_unsummed",
        "_was_resumed",
        "digest",
        "epoch",
        "nbytes",
        "values",
        "version",
    )

    def __init__(
        self,
        nbytes: int,
        digest: bytes,
        epoch: int,
        version: int,
        *,
        max_damaged: int = 3,
        require_checksum: bool = True,
    ) -> None:
        self.nbytes: int = nbytes
        self.digest: bytes = digest
        self.epoch: int = epoch
        self.version: int = version
        self._max_damaged = max_damaged
        self._require_checksum = require_checksum
        self._damaged: Counter[int] = Counter()
        self._resumed = self._was_resumed = False
        self._good: dict[int, bytes | None] = {}  # the checksum of each chunk that is verified
        self._prefix = 0  # so many chunks from the first on are verified
        self._count = 0  # 0 is: not known yet
        self._size = 0  # bytes of every chunk but the last; 0 as above
        self._state: bytes | None = None
        # Chunks from the first on that were verified in another cut: _good lacks their checksums.
        self._unsummed = 0
        self._memory: memoryview | None = None  # of the payload, to make up for that
        self.values: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        return (
            f"Assembly(epoch={self.epoch}, version={self.version}, "
            f"good={len(self._good)} of {self._count or '?'}, damaged={self.damaged})"
        )

    @property
    def good_nbytes(self) -> int:
        """Bytes from the start of the payload that are verified without a gap."""
        # The last chunk may be shorter than the others.
        return min(self._prefix * self._size, self.nbytes)

    @property
    def damaged(self) -> int:
        """How many chunks arrived damaged so far, those that came again counted again."""
        return self._damaged.total()

    @property
    def was_resumed(self) -> bool:
        """Whether :meth:`resume` was called."""
        return self._was_resumed

    def resume(self, memory: memoryview | None = None) -> int:
        """Prepare for another link.

        What is verified behind a gap is forgotten. The first chunk of the new link may be any
        that begins where what is verified ends, or before; what is verified from there on is
        forgotten too, as it will come again. Chunks that were damaged stay counted.

        Args:
            memory: The whole payload. It is kept, and read again if the sender now cuts the payload
                in another way: ``Update.state`` is made of the checksums of that cut. Without it
                such a sender has to begin with chunk 0.

        Returns:
            :attr:`good_nbytes`, for ``Hello.partial_nbytes``. An update of which nothing is missing
            must not be announced there.
        """
        self._forget_from(self._prefix)
        self._resumed = self._was_resumed = True
        self._memory = memory
        return self.good_nbytes

    def place(self, update: Update, nbytes: int) -> tuple[int, int]:
        """Check an announced chunk before any of its bytes is written.

        Args:
            update: What announces it.
            nbytes: Bytes of the frame's payload.

        Returns:
            Where the bytes belong in the payload of the update: start and stop.

        Raises:
            RemoteProtocolError: It is a chunk of another update or was cut in another way, it is
                verified already, its checksum is missing, or it has values or a ``state``
                although it is not the last.
        """
        if (update.epoch, update.version, update.digest) != (self.epoch, self.version, self.digest):
            raise RemoteProtocolError(
                f"a chunk of version {update.version} of epoch {update.epoch} came within "
                f"version {self.version} of epoch {self.epoch}, or its manifest changed"
            )
        index, count = update.chunk or (0, 1)
        is_last = index == count - 1
        if update.checksum is None and self._require_checksum:
            raise RemoteProtocolError(f"chunk {index} of {count} has no checksum")
        if not is_last and (update.values or update.state is not None):
            raise RemoteProtocolError(
                f"chunk {index} of {count} has fields that only the last one may have"
            )
        if self._resumed:
            size = self._size_from(index, count, nbytes)  # it may be cut in another way now
            self._check_cut(index, count, nbytes, size)
            self._go_on_at(index, count, size)
        else:
            if self._count and count != self._count:
                raise RemoteProtocolError(
                    f"an update of {self._count} chunks became one of {count}"
                )
            size = self._size or self._size_from(index, count, nbytes)
            self._check_cut(index, count, nbytes, size)
        if index in self._good:
            raise RemoteProtocolError(
                f"chunk {index} of {count} arrived although it was already there"
            )
        self._count, self._size = count, size
        start = index * size
        return start, start + nbytes

    def arrived(
        self, update: Update, data: memoryview, running: RunningChecksum | None = None
    ) -> Verdict:
        """Register that the bytes of a chunk are where :meth:`place` said.

        Args:
            update: What announced it.
            data: These bytes, contiguous; empty for an empty payload. Read before this returns.
            running: Has looked at the first bytes of ``data`` already, as they came.

        Raises:
            RemoteProtocolError: As for :meth:`place`; the chunk was damaged more than
                ``max_damaged`` times; or the checksum over the whole update is wrong, in which
                case nothing of it counts as verified any more.
        """
        self.place(update, data.nbytes)
        index, count = update.chunk or (0, 1)
        found: bytes | None = None
        if update.checksum is not None:
            if running is None:
                found = checksum(data)
            else:
                if running.nbytes < data.nbytes:
                    running.update(data[running.nbytes :])
                found = running.digest()
            if found != update.checksum:
                self._damaged[index] += 1
                if self._damaged[index] > self._max_damaged:
                    raise RemoteProtocolError(
                        f"chunk {index} of {count} of version {self.version} arrived damaged "
                        f"{self._damaged[index]} times"
                    )
                return Verdict.DAMAGED
        self._good[index] = found
        while self._prefix in self._good:
            self._prefix += 1
        if index == count - 1:
            self.values, self._state = update.values, update.state
        self._sum_again(count)
        if len(self._good) < count:
            return Verdict.GOOD
        self._check_state()
        return Verdict.COMPLETE

    # -- helpers ----------------------------------------------------------------------------

    def _start_over(self) -> None:
        self._good = {}
        self._prefix = self._count = self._size = self._unsummed = 0
        self._state, self.values = None, {}

    def _forget_from(self, index: int) -> None:
        if not index:
            self._start_over()
            return
        if len(self._good) > index:
            self._good = {each: self._good[each] for each in range(index)}
        self._prefix = index
        self._unsummed = min(self._unsummed, index)
        if index < self._count:
            self._state, self.values = None, {}

    def _go_on_at(self, index: int, count: int, size: int) -> None:
        """The first chunk over another link: go on from there, in its cut."""
        start, good = index * size, self.good_nbytes
        if start > good:
            raise RemoteProtocolError(
                f"the update goes on at byte {start}, but it is here up to byte {good} only"
            )
        if not index or (count, size) == (self._count, self._size):
            self._forget_from(index)
        elif self._memory is None or index > _MAX_RECUT:
            raise RemoteProtocolError(
                f"an update of {self._count} chunks goes on with chunk {index} of {count}"
            )
        else:
            self._start_over()
            self._good = dict.fromkeys(range(index))
            self._prefix = self._unsummed = index
        self._resumed = False

    def _sum_again(self, count: int) -> None:
        """Make up for checksums of this cut, some with each chunk: it may be much to look at."""
        left = count - len(self._good)
        for _ in range(-(-self._unsummed // (left + 1))):
            assert self._memory is not None
            self._unsummed -= 1
            start = self._unsummed * self._size
            self._good[self._unsummed] = checksum(self._memory[start : start + self._size])

    def _size_from(self, index: int, count: int, nbytes: int) -> int:
        """The size of every chunk but the last, from the first chunk that came."""
        if index < count - 1 or count == 1:
            return nbytes
        # The last chunk came first: those before it share what is left.
        return (self.nbytes - nbytes) // (count - 1)

    def _check_cut(self, index: int, count: int, nbytes: int, size: int) -> None:
        expected = size if index < count - 1 else self.nbytes - (count - 1) * size
        fits = nbytes == expected
        if count > 1:
            fits = fits and size > 0 and size % ALIGNMENT == 0 and -(-self.nbytes // size) == count
        if not fits:
            raise RemoteProtocolError(
                f"chunk {index} of {count} with {nbytes} bytes does not fit an update of "
                f"{self.nbytes} bytes"
            )

    def _check_state(self) -> None:
        if self._state is None:
            return
        checksums = [self._good[index] for index in range(self._count)]
        known = [each for each in checksums if each is not None]
        if len(known) < len(checksums):
            error = "has a checksum, but some of its chunks had none"
        elif state_checksum(self.digest, known) != self._state:
            error = "does not match its checksum, although each of its chunks does"
        else:
            return
        self._start_over()
        raise RemoteProtocolError(f"version {self.version} of epoch {self.epoch} {error}")
