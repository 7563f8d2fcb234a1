"""Updates in chunks with checksums, over links whose payloads travel in the stream.

A transfer that was cut goes on where it stopped, over the next link. Must not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aiosync.errors import AckTimeout, AiosyncError
from aiosync.protocol import ChunkPlan, validate_seconds
from aiosync.sender.snapshots import Snapshot
from aiosync.transports.base import Transport
from aiosync.wire import Hello, Message, RunningChecksum, Update, state_checksum

__all__ = ["ChunkWriter", "Streaming"]

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


class ChunkWriter:
    """Writes updates to one worker's link, one at a time.

    Args:
        transport: The link.
        streaming: How.
        hello: What the worker said; it may have a part of an update already.
        on_stall: Called with the error when the worker does not answer.

    Attributes:
        sent_nbytes: Bytes of payloads that the link took.
        resumed_nbytes: Those that did not have to be sent again.
        owed: The version to which the worker owes an answer; 0 for none.
        most_at_once: Bytes of an update that is one small chunk.
    """

    def __init__(
        self,
        transport: Transport,
        streaming: Streaming,
        hello: Hello,
        *,
        on_stall: Callable[[AiosyncError], None],
    ) -> None:
        self.sent_nbytes: int = 0
        self.resumed_nbytes: int = 0
        self._transport = transport
        self._streaming = streaming
        self._partial = (hello.partial_epoch, hello.partial_version, hello.partial_nbytes)
        self._on_stall = on_stall
        self.owed: int = 0
        self.most_at_once: int = min(_NOWAIT_NBYTES, streaming.chunk_nbytes)
        self._timer: asyncio.TimerHandle | None = None
        self._progress = (0, 0)  # as it was seen last

    def steps(
        self, epoch: int, snapshot: Snapshot
    ) -> Iterator[tuple[Message, Sequence[memoryview]] | None]:
        """The messages of an update, from where the worker's part of it ends.

        What is asked for next was sent; ``None`` stands for a moment in which others have a turn.
        """
        plan, first = ChunkPlan(snapshot.nbytes, self._streaming.chunk_nbytes), 0
        if len(snapshot.checksums) != plan.count:
            snapshot.checksums = [None] * plan.count
        if self._partial[:2] == (epoch, snapshot.version):
            # The last chunk always travels: the values are with it.
            first = min(plan.index_at(self._partial[2]), plan.count - 1)
            self.resumed_nbytes += plan.span(first)[0]
        self._partial = (None, None, 0)
        for index in range(plan.count):
            start, stop = plan.span(index)
            views = snapshot.views(start, stop)
            checksum = snapshot.checksums[index]  # computed once for all workers
            if checksum is None:
                running = RunningChecksum()
                for view in views:
                    running.update(view)
                checksum = snapshot.checksums[index] = running.digest()
            if index < first:
                yield None  # looking at much memory must not hold the loop
                continue
            digest, is_last, state = snapshot.layout.digest, index == plan.count - 1, None
            if is_last and index:
                state = state_checksum(digest, [each for each in snapshot.checksums if each])
            yield (
                Update(
                    epoch,
                    snapshot.version,
                    digest,
                    values=snapshot.values if is_last else {},
                    chunk=(index, plan.count) if plan.count > 1 else None,
                    checksum=checksum,
                    state=state,
                    trace=snapshot.trace if is_last else None,
                ),
                views,
            )
            self.sent_nbytes += stop - start

    # -- the worker's answer -------------------------------------------------------------------

    def watch(self, version: int) -> None:
        """From now on the worker owes an answer to this update; its deadline runs."""
        self.owed = version
        if self._timer is None:
            self._look()

    def close(self) -> None:
        """The link is gone."""
        self.owed = 0
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Drop a worker that has to answer, and of which nothing came or went since the last look.

        The timer is left to run when the answer comes: making one is as dear as a small send.
        """
        self._timer, timeout, channel = None, self._streaming.stall_timeout, self._transport.channel
        if not self.owed or timeout is None:
            return
        progress = (0 if channel is None else channel.written_nbytes, self.owed)
        if progress != self._progress:
            self._progress = progress
            self._timer = asyncio.get_running_loop().call_later(timeout, self._look)
            return
        self._on_stall(
            AckTimeout(
                f"the worker neither took nor sent anything for {timeout:g} s (stall_timeout); it "
                "was dropped and may connect again",
                version=self.owed,
            )
        )
