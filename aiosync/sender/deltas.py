"""The newest update of a sender as changes to an older one, encoded once for all links.

The older one is mostly the one before. For a worker that skipped versions while its link carried an
update, it is that update, which the link has kept. Each chunk is encoded in a thread when the first
link needs it. The next ones are begun at the same time, so that they are encoded while the link
carries this one. A sender keeps two older updates for this at most, and of the encoded chunks of
each at most a quarter of an update.
"""

from __future__ import annotations

import asyncio
import time

from aiosync._tasks import TaskOwner, in_pool_thread
from aiosync.sender.snapshots import Snapshot
from aiosync.tensors.delta import DeltaLayout

__all__ = ["Delta", "Deltas", "Pace"]

# A delta is tried if it saves a third of the bytes, and is encoded three times as fast as the link
# carries them whole. If it was slower all the same, two updates travel whole before the next delta,
# after another slower one four, and so on up to this number.
_MOST_RATIO, _MARGIN, _MOST_PAUSE = 0.67, 3.0, 64
# Links carry smaller updates in too short a time to be measured.
_LEAST_NBYTES = 8 * 2**20
# Up to this size an update travels whole: it takes one packet or a few.
_SMALL_NBYTES = 65536
_KEPT_SHARE = 4
_AHEAD = 2


class Pace:
    """How fast one link carries updates, whole and as deltas.

    Attributes:
        rate: Bytes of whole updates for each second, until the worker's answer; 0.0 if unknown.
        pause: Number of updates that should travel whole, as deltas were slower.
    """

    def __init__(self) -> None:
        self.rate: float = 0.0
        self.pause: int = 0
        # The pause after the last delta; 1 if that was no slower.
        self._last_pause = 1
        # Version, bytes, time at the start and kind of the update whose answer is awaited.
        self._timed: tuple[int, int, float, bool] = (0, 0, 0.0, False)

    def begin(self, snapshot: Snapshot, now: float, *, is_delta: bool) -> None:
        """Register that the link begins to carry an update."""
        self._timed = (snapshot.version, snapshot.nbytes, now, is_delta)

    def arrived(self, version: int, now: float) -> None:
        """Measure the rate at the worker's answer to an update; pause deltas if one was slower."""
        begun, nbytes, began, is_delta = self._timed
        if version != begun or not nbytes:
            return
        self._timed = (0, 0, 0.0, False)
        seconds = max(now - began, 1e-6)
        if not is_delta:
            self.rate, self.pause = nbytes / seconds, max(self.pause - 1, 0)
        elif seconds * self.rate > nbytes:
            self.pause = self._last_pause = min(2 * self._last_pause, _MOST_PAUSE)
        else:
            self._last_pause = 1


class Delta:
    """An update as changes to its base. Its users hold a reference to both snapshots.

    Args:
        base: The older update.
        new: The update, with the same layout.
        layout: The dtypes in it.
        size: Bytes of a chunk.
        tasks: Owner of the encoding tasks.

    Attributes:
        base: As given.
    """

    def __init__(
        self, base: Snapshot, new: Snapshot, layout: DeltaLayout, size: int, tasks: TaskOwner
    ) -> None:
        self.base: Snapshot = base
        self._new = new
        self._layout = layout
        self._size = size
        self._tasks = tasks
        # Encoded chunks, and those that are being encoded; ``None`` for one that could not be.
        self._chunks: dict[int, asyncio.Future[bytes | None]] = {}
        # Bytes of chunks before and after encoding, and the seconds that it took.
        self._measured = (0, 0, 0.0)

    async def is_worth(self, pace: Pace) -> bool:
        """Return True if the update should travel as a delta; encodes a chunk to find out."""
        nbytes, rate, num_here = self._new.nbytes, pace.rate, self._num_here
        if not (rate and num_here) or nbytes < _LEAST_NBYTES or pace.pause:
            return False
        if not self._measured[0]:
            # Not the first chunk if more are here: tensors of another kind are often at the start.
            await asyncio.wait({self.chunk(num_here // 2, 0)})
        whole, encoded, seconds = self._measured
        return encoded < _MOST_RATIO * whole and _MARGIN * rate * seconds < whole

    @property
    def _num_here(self) -> int:
        """Number of chunks that are complete here; of an update that still arrives not all."""
        incoming, nbytes = self._new.incoming, self._new.nbytes
        return -(-nbytes // self._size) if incoming is None else incoming.nbytes // self._size

    def chunk(self, index: int, ahead: int = _AHEAD) -> asyncio.Future[bytes | None]:
        """Return the future of an encoded chunk; its result is ``None`` if the chunk travels whole.

        Do not cancel it: other links wait for it, too.

        Args:
            index: Index of the chunk, which is complete here.
            ahead: Number of the following chunks to begin as well, as far as they are complete.
        """
        for each in (index, *range(index + 1, min(index + 1 + ahead, self._num_here))):
            if each not in self._chunks:
                future = self._chunks[each] = asyncio.get_running_loop().create_future()
                self._tasks.start(self._encode(each, future), "aiosync delta")
        found = self._chunks[index]
        self._drop_oldest()
        return found

    def _drop_oldest(self) -> None:
        """Drop encoded chunks, oldest first, until only a share of the update's size is kept."""
        done = {each: future for each, future in self._chunks.items() if future.done()}
        kept = sum(len(future.result() or b"") for future in done.values())
        for each, future in done.items():
            if kept * _KEPT_SHARE <= self._new.nbytes:
                break
            # Links that are still to carry this chunk have it encoded anew.
            kept -= len(future.result() or b"")
            del self._chunks[each]

    async def _encode(self, index: int, found: asyncio.Future[bytes | None]) -> None:
        """Encode a chunk in a thread, and resolve its future; with ``None`` if that fails."""
        start = index * self._size
        stop = min(start + self._size, self._new.nbytes)
        # Empty if no link needs the chunk any more, and the memory has been given back.
        old, new = (each.buffer.memoryview() for each in (self.base, self._new))

        def encode() -> tuple[bytes, float]:
            began = time.perf_counter()
            return self._layout.encode(start, stop, old, new), time.perf_counter() - began

        try:
            if old.nbytes and new.nbytes:
                encoded, seconds = await in_pool_thread(encode)
                whole, nbytes, spent = self._measured
                self._measured = whole + stop - start, nbytes + len(encoded), spent + seconds
                found.set_result(encoded)
        except (MemoryError, RuntimeError):
            # There is no memory for the encoding, or no thread.
            pass
        finally:
            if not found.done():
                found.set_result(None)


class Deltas:
    """The newest update of a sender, with the one before and an older one as its bases.

    Args:
        chunk_nbytes: Bytes of a chunk.
        tasks: Owner of the encoding tasks.
    """

    def __init__(self, chunk_nbytes: int, tasks: TaskOwner) -> None:
        self._size = chunk_nbytes
        self._tasks = tasks
        self._newest: Snapshot | None = None
        self._layout: DeltaLayout | None = None
        # The newest update as changes to the one before, and to the older one of a slow link.
        self._deltas: list[Delta] = []

    def take(
        self, snapshot: Snapshot, version: int, sent: Snapshot | None, carried: Snapshot | None
    ) -> Delta | None:
        """Register an update that a link is about to write; the newest before becomes its base.

        Args:
            snapshot: The update.
            version: The version that the worker keeps as a base; 0 for none.
            sent: The update of this version that the link carried, as links may have got different
                ones; ``None`` if an earlier link carried it.
            carried: The update that the link carried last, if it has kept it.

        Returns:
            The update as changes to that version, with a reference to its base that the caller
            releases; ``None`` if the sender does not have that base, or if this update is small or
            not the newest.
        """
        if snapshot.nbytes > _SMALL_NBYTES:
            self._follow(snapshot)
        if not version or snapshot is not self._newest:
            return None
        found = next(
            (
                each
                for each in self._deltas
                if each.base.version == version and sent in (None, each.base)
            ),
            None,
        )
        if found is None and carried is not None and carried.version == version:
            self._drop(keep=1)
            found = self._add(carried.retain(), snapshot)
        if found is not None:
            found.base.retain()
        return found

    def _follow(self, snapshot: Snapshot) -> None:
        """Make a newer update the newest, with the one before as its base; ignore an older one."""
        newest = self._newest
        if newest is not None and snapshot.version <= newest.version:
            return
        self._drop(keep=0)
        self._newest = snapshot.retain()
        if newest is None or newest.layout.digest != snapshot.layout.digest:
            self._layout = DeltaLayout(snapshot.layout.manifest)
        if newest is not None:
            # The reference to it goes over to the delta, so that nothing is released here.
            self._add(newest, snapshot)

    def _add(self, base: Snapshot, new: Snapshot) -> Delta | None:
        """Add a delta that owns the reference to ``base``; release that if the layouts differ."""
        if base.layout.digest != new.layout.digest:
            base.release()
            return None
        assert self._layout is not None
        self._deltas.append(Delta(base, new, self._layout, self._size, self._tasks))
        return self._deltas[-1]

    def _drop(self, *, keep: int) -> None:
        """Forget all deltas but the first ``keep`` ones, and release their bases."""
        while len(self._deltas) > keep:
            self._deltas.pop().base.release()

    def withdraw(self, snapshot: Snapshot) -> None:
        """Forget the newest update, of which the rest never comes: the one before is newest."""
        if snapshot is self._newest:
            before = self._deltas[0].base.retain() if self._deltas else None
            self.close()
            self._newest = before

    def close(self) -> None:
        """Release all updates, at the end or when another sender's versions begin."""
        self._drop(keep=0)
        if self._newest is not None:
            self._newest.release()
        self._newest = None
