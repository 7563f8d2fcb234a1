"""The sender's half of a link whose payloads travel in the stream: chunks, checksums, deadlines.

A transfer that was cut goes on where it stopped, over the next link. Must not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aiosync.errors import AckTimeout, AiosyncError
from aiosync.protocol import ChunkPlan, validate_seconds
from aiosync.sender.snapshots import Snapshot
from aiosync.transports.base import Transport
from aiosync.wire import Hello, RunningChecksum, Update, state_checksum

__all__ = ["StreamWriter", "Streaming"]

_NOWAIT_NBYTES = 65536


@dataclass(frozen=True, slots=True)
class Streaming:
    """How payloads travel.

    Attributes:
        chunk_nbytes: Bytes of a chunk, a multiple of 64.
        stall_timeout: Seconds without progress after which a worker that owes an answer is
            dropped; ``None`` for never.

    Raises:
        ConfigError: One of them is not what it has to be.
    """

    chunk_nbytes: int = 4 * 2**20
    stall_timeout: float | None = 60.0

    def __post_init__(self) -> None:
        ChunkPlan(0, self.chunk_nbytes)
        validate_seconds("stall_timeout", self.stall_timeout, endless=True, none=True)


class StreamWriter:
    """Writes updates to one worker's link, one at a time.

    Args:
        transport: The link.
        streaming: How.
        epoch: Epoch of the updates.
        hello: What the worker said; it may have a part of an update already.
        on_stall: Called with the error when the worker does not answer.
    """

    def __init__(
        self,
        transport: Transport,
        streaming: Streaming,
        epoch: int,
        hello: Hello,
        *,
        on_stall: Callable[[AiosyncError], None],
    ) -> None:
        self.sent_nbytes: int = 0  # of payloads
        self.resumed_nbytes: int = 0  # that did not have to be sent again
        self.epoch: int = epoch
        self._transport = transport
        self._streaming = streaming
        self._partial = (hello.partial_epoch, hello.partial_version, hello.partial_nbytes)
        self._on_stall = on_stall
        self._owed = 0  # the version that the worker has not answered
        self._timer: asyncio.TimerHandle | None = None
        self._progress = (0, 0)  # as it was seen last

    # -- writing -------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Another sender takes over; an update on its way goes on under its own epoch."""
        self.epoch = epoch

    def write_nowait(self, snapshot: Snapshot) -> bool:
        """Write a small update at once; False when nothing was written."""
        if snapshot.nbytes > _NOWAIT_NBYTES or snapshot.nbytes > self._streaming.chunk_nbytes:
            return False
        plan = self._begin(snapshot)
        update, payload = self._part(self.epoch, snapshot, plan, 0)
        if self._transport.send_nowait(update, payload):
            self.sent_nbytes += snapshot.nbytes
            return True
        self.answered()
        return False

    async def write(self, snapshot: Snapshot, epoch: int) -> None:
        """Write an update, from where the worker's part of it ends."""
        plan = self._begin(snapshot)
        first = 0
        if self._partial[:2] == (epoch, snapshot.version):
            # The last chunk always travels: the values are with it.
            first = min(plan.index_at(self._partial[2]), plan.count - 1)
            self.resumed_nbytes += plan.span(first)[0]
        self._partial = (None, None, 0)
        for index in range(first):
            _checksum_of(snapshot, plan, index)
            await asyncio.sleep(0)  # looking at much memory must not hold the loop
        for index in range(first, plan.count):
            update, payload = self._part(epoch, snapshot, plan, index)
            await self._transport.send(update, payload)
            self.sent_nbytes += sum(view.nbytes for view in payload)

    def _begin(self, snapshot: Snapshot) -> ChunkPlan:
        self.watch(snapshot.version)
        plan = ChunkPlan(snapshot.nbytes, self._streaming.chunk_nbytes)
        if len(snapshot.checksums) != plan.count:
            snapshot.checksums = [None] * plan.count
        return plan

    def watch(self, version: int) -> None:
        """From now on the worker owes an answer to this update; its deadline runs."""
        self._owed = version
        timeout = self._streaming.stall_timeout
        if timeout is not None and self._timer is None:
            self._progress = self._progress_now()
            self._look_later(timeout)

    def _part(
        self, epoch: int, snapshot: Snapshot, plan: ChunkPlan, index: int
    ) -> tuple[Update, list[memoryview]]:
        own = _checksum_of(snapshot, plan, index)
        chunk = (index, plan.count) if plan.count > 1 else None
        digest, last = snapshot.layout.digest, index == plan.count - 1
        sums = [each for each in snapshot.checksums if each is not None]
        update = Update(
            epoch,
            snapshot.version,
            digest,
            values=snapshot.values if last else {},
            chunk=chunk,
            checksum=own,
            state=state_checksum(digest, sums) if last and chunk else None,
        )
        return update, snapshot.views(*plan.span(index))

    def answered(self) -> None:
        """The worker has everything, or refused it."""
        self._owed = 0

    def close(self) -> None:
        """The link is gone."""
        self.answered()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- deadlines -----------------------------------------------------------------------------

    def _look_later(self, seconds: float) -> None:
        # Left to run when the answer comes: making a timer is as dear as a small send.
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _progress_now(self) -> tuple[int, int]:
        channel = self._transport.channel
        return 0 if channel is None else channel.written_nbytes, self._owed

    def _look(self) -> None:
        self._timer = None
        timeout = self._streaming.stall_timeout
        if not self._owed or timeout is None:
            return
        progress = self._progress_now()
        if progress[0] > self._progress[0] or progress[1] != self._progress[1]:
            self._progress = progress
            self._look_later(timeout)
            return
        self._on_stall(
            AckTimeout(
                f"the worker neither took nor sent anything for {timeout:g} s (stall_timeout); it "
                "was dropped and may connect again",
                version=self._owed,
            )
        )


def _checksum_of(snapshot: Snapshot, plan: ChunkPlan, index: int) -> bytes:
    """Computed once for all workers."""
    known = snapshot.checksums[index]
    if known is None:
        running = RunningChecksum()
        for view in snapshot.views(*plan.span(index)):
            running.update(view)
        known = snapshot.checksums[index] = running.digest()
    return known
