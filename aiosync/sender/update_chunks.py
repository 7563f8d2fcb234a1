"""The chunks of updates on a link whose payloads travel in the stream.

Each chunk has a checksum. A transfer that was cut goes on where it stopped, over the next link; an
update may travel as the changes to one that the worker keeps. Must not import the receiver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aiosync.errors import ConfigError
from aiosync.protocol import as_chunk_nbytes, validate_seconds
from aiosync.sender.deltas import Delta, Deltas, Pace
from aiosync.sender.incoming import Abandoned, Incoming
from aiosync.sender.snapshots import Snapshot
from aiosync.tensors.delta import check_delta
from aiosync.wire import Hello, Message, Update, checksum, state_checksum

__all__ = ["PendingBytes", "Steps", "Streaming", "UpdateChunks"]

_Payload: TypeAlias = "Sequence[memoryview | bytes]"
PendingBytes: TypeAlias = "asyncio.Future[bytes | None] | asyncio.Future[None]"
Steps: TypeAlias = "Generator[tuple[Message, _Payload] | PendingBytes | None]"
"""Messages of an update on a link, with ``None`` where other tasks may have a turn.

A future is to be waited for, and not to be cancelled.

Asking for the next one says that the last one was sent. The generator may be given up before any
step, and made anew.
"""


@dataclass(frozen=True, slots=True)
class Streaming:
    """Settings of links whose payloads travel in the stream.

    Attributes:
        chunk_nbytes: Bytes of a chunk, a multiple of 64.
        stall_timeout: Seconds without progress after which a worker that owes an answer is
            dropped; ``None`` for never.
        delta: Which updates travel as changes to an older one: ``"auto"`` those that arrive
            sooner so, ``"always"`` all that have a base at the worker.

    Raises:
        ConfigError: A value is not of its type, or out of range; or zstandard is not installed.
    """

    chunk_nbytes: int = 4 * 2**20
    stall_timeout: float | None = 60.0
    delta: Literal["auto", "off", "always"] = "off"

    def __post_init__(self) -> None:
        as_chunk_nbytes("chunk_nbytes", self.chunk_nbytes)
        validate_seconds("stall_timeout", self.stall_timeout, endless=True, none=True)
        if self.delta not in ("auto", "off", "always"):
            raise ConfigError(f"delta must be 'auto', 'off' or 'always', got {self.delta!r}")
        if self.delta != "off":
            check_delta()


class UpdateChunks:
    """The chunks of the updates of one link.

    Args:
        settings: Size of the chunks, and which updates travel as deltas.
        hello: The worker's Hello, which tells how much of an update the link before left there.
        counts: Counts of the registry, which the bytes of chunks are added to.

    Attributes:
        settings: As given.
        base: Version of which the worker keeps the bytes as a base; 0 for none.
        sent_nbytes: Bytes of chunks that the link took.
    """

    def __init__(self, settings: Streaming, hello: Hello, counts: dict[str, int]) -> None:
        self.settings: Streaming = settings
        self.base: int = 0
        self.sent_nbytes: int = 0
        self._counts = counts
        self._partial = (hello.partial_epoch, hello.partial_version, hello.partial_nbytes)
        # A worker of an older release names no digest.
        self._partial_digest = hello.partial_digest
        self._pace = Pace()
        # The update that the link carried last, whose memory may have been given back.
        self._sent: Snapshot | None = None
        # The update that the link carried last, while it may be the base of the next one.
        self._carried: Snapshot | None = None

    def note_base(self, version: int) -> None:
        """Note the worker's answer that it has this version, and keeps its bytes as a base."""
        carried = self._carried
        # The chunks of a newer update replace the base, also if the rest of them never comes.
        if carried is None or version >= carried.version:
            self.base = version
        self._pace.arrived(version, time.monotonic())

    async def begin(self, snapshot: Snapshot, deltas: Deltas, *, in_parts: bool) -> Delta | None:
        """Return the update as changes to the worker's base, or ``None`` to send it whole.

        The caller releases the base of the delta.

        Args:
            snapshot: The update.
            deltas: Makes the delta.
            in_parts: Workers may have got a version joined with older updates.
        """
        # The chunks of an update replace the worker's base one by one.
        base, self.base = self.base, 0
        sent = self._sent
        # A joined update has the version of its last part. The base that the link before carried
        # may have been one.
        if sent is None or sent.version != base:
            sent, base = None, 0 if in_parts else base
        delta = deltas.take(snapshot, base, sent, self._carried)
        self.release_carried()
        self._carried = snapshot.retain()
        is_worth = False
        try:
            if delta is not None:
                is_worth = self.settings.delta == "always" or await delta.is_worth(self._pace)
        finally:
            if delta is not None and not is_worth:
                delta.base.release()
        self._pace.begin(snapshot, time.monotonic(), is_delta=is_worth)
        return delta if is_worth else None

    def release_carried(self) -> None:
        """Release the update that the link carried last: it is no base for the next one."""
        if self._carried is not None:
            self._carried.release()
            self._carried = None

    def _take_partial(self, snapshot: Snapshot, epoch: int, size: int) -> int:
        """Return how many bytes of the update the link before left there; later calls return 0."""
        *of, has = self._partial
        self._partial = (None, None, 0)
        fits = has == snapshot.nbytes or (0 < has < snapshot.nbytes and has % size == 0)
        # A joined update has the version of its last part.
        is_same = self._partial_digest in (b"", snapshot.layout.digest)
        return has if fits and is_same and of == [epoch, snapshot.version] else 0

    def steps(self, snapshot: Snapshot, epoch: int, delta: Delta | None) -> Steps:
        """Yield the chunks of an update, from the end of the part that the worker has."""
        size = self.settings.chunk_nbytes
        incoming = snapshot.incoming
        nbytes, sums, digest = snapshot.nbytes, snapshot.checksums, snapshot.layout.digest
        self._sent = snapshot
        count = max(1, -(-nbytes // size))
        # The last chunk is always sent: it has the values.
        first = min(self._take_partial(snapshot, epoch, size) // size, count - 1)
        for index in range(count):
            start, stop = index * size, min(index * size + size, nbytes)
            is_last = index == count - 1
            if incoming is not None:
                try:
                    yield from _arrivals(incoming, stop, is_last=is_last)
                except Abandoned:
                    # The same version may come again, and then goes on from here.
                    self._partial, self._partial_digest = (epoch, snapshot.version, start), digest
                    raise
            views = snapshot.views(start, stop)
            # A checksum is computed once for all workers.
            if index == len(sums):
                sums.append(checksum(*views))
            if index < first:
                # The worker has the chunk; only its checksum is needed. Reading much memory must
                # not hold the loop.
                yield None
                continue
            payload: _Payload = views
            sent, codec, base = stop - start, "dense", None
            encoded = None if delta is None else (yield from _encoded_chunk(delta, index))
            # A worker refuses a delta that is no smaller than its result.
            if delta is not None and encoded is not None and len(encoded) < stop - start:
                payload, sent = [encoded], len(encoded)
                codec, base = "delta", (delta.base.version, stop - start)
            yield (
                Update(
                    epoch,
                    snapshot.version,
                    digest,
                    codec,
                    base=base,
                    values=snapshot.values if is_last else {},
                    chunk=(index, count) if count > 1 else None,
                    checksum=sums[index],
                    state=state_checksum(digest, sums) if is_last and index else None,
                    trace=snapshot.trace if is_last else None,
                ),
                payload,
            )
            self.sent_nbytes += sent
            self._counts["wire_nbytes"] += sent


def _arrivals(incoming: Incoming, stop: int, *, is_last: bool) -> Iterator[PendingBytes]:
    """Yield futures to wait for until the bytes up to ``stop`` are here, and may be sent."""
    while waiting := incoming.until(stop, is_last=is_last):
        yield waiting


def _encoded_chunk(delta: Delta, index: int) -> Generator[PendingBytes, None, bytes | None]:
    """Yield a chunk's future until it is encoded; return the result, ``None`` to send it whole."""
    chunk = delta.chunk(index)
    if not chunk.done():
        yield chunk
    return chunk.result()
