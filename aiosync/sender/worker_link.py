"""The sender's side of one link: what the worker has, what is on its way, and its two flows.

Links whose payloads travel in the stream get them in chunks with checksums; a transfer that was cut
goes on where it stopped, over the next link.

Writing happens at once where the link takes it and in a task where it does not; a second task
reads the acknowledgements. That the worker has gone is noticed by ``transports.stream``, which
``sender.workers`` has watch its process; of a plain Ray actor by ``transports.ray``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    LocalProtocolError,
    PeerClosed,
    RemoteProtocolError,
    TransportClosed,
)
from aiosync.protocol import ChunkPlan, Outbox, WorkerLeft, validate_seconds
from aiosync.sender.history import Chain, Group, names_of, together
from aiosync.sender.snapshots import Snapshot
from aiosync.transports.base import Received, Transport, without_frames
from aiosync.transports.data_plane import SharedPayload
from aiosync.transports.shared_memory import SlotPublisher
from aiosync.types import AckStatus
from aiosync.wire import (
    DEFAULT_LIMITS,
    Ack,
    Current,
    Fetch,
    Hello,
    Leave,
    ManifestMessage,
    Message,
    Promise,
    Refuse,
    RunningChecksum,
    Take,
    Update,
    state_checksum,
)

if TYPE_CHECKING:
    from aiosync.sender.workers import WorkerRegistry

__all__ = ["Streaming", "WorkerLink"]

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
        owes: To which version it owes an answer, if it does.
        on_stall: Called with the error when the worker does not answer.

    Attributes:
        sent_nbytes: Bytes of payloads that the link took.
        resumed_nbytes: Those that did not have to be sent again.
        most_at_once: Bytes of an update that is one small chunk.
    """

    def __init__(
        self,
        transport: Transport,
        streaming: Streaming,
        hello: Hello,
        *,
        owes: Callable[[], int | None],
        on_stall: Callable[[AiosyncError], None],
    ) -> None:
        self.sent_nbytes: int = 0
        self.resumed_nbytes: int = 0
        self._transport = transport
        self._streaming = streaming
        self._partial = (hello.partial_epoch, hello.partial_version, hello.partial_nbytes)
        self._owes = owes
        self._on_stall = on_stall
        self.most_at_once: int = min(_NOWAIT_NBYTES, streaming.chunk_nbytes)
        self._timer: asyncio.TimerHandle | None = None
        self._progress: tuple[int, int | None] = (0, None)  # as it was seen last

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

    def watch(self) -> None:
        """From now on the worker owes an answer; its deadline runs."""
        if self._timer is None:
            self._look()

    def close(self) -> None:
        """The link is gone."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Drop a worker that has to answer, and of which nothing came or went since the last look.

        The timer is left to run when the answer comes: making one is as dear as a small send.
        """
        self._timer, timeout, channel = None, self._streaming.stall_timeout, self._transport.channel
        owed = self._owes()
        if owed is None or timeout is None:
            return
        progress = (0 if channel is None else channel.written_nbytes, owed)
        if progress != self._progress:
            self._progress = progress
            self._timer = asyncio.get_running_loop().call_later(timeout, self._look)
            return
        self._on_stall(
            AckTimeout(
                f"the worker neither took nor sent anything for {timeout:g} s (stall_timeout); it "
                "was dropped and may connect again",
                version=owed,
            )
        )


class WorkerLink:
    """One connected worker, as the sender sees it.

    Args:
        idx: Index of the worker.
        transport: The link; closed by the owner of this.
        hello: What the worker said about itself.
        registry: Told what becomes of versions, and when the link ends.

    Attributes:
        idx: As given.
        transport: As given.
        hello: As given.
        wanted: The least version that it asked for, until that is answered.
        outbox: What is on its way, in the epoch of the sender now.
        received_version: Newest version that is complete there, applied or not.
        stream: Writes payloads in chunks; ``None`` where they go whole.
        publisher: Names slots to a worker that reads updates in place; ``None`` for others.
    """

    def __init__(
        self,
        idx: int,
        transport: Transport,
        hello: Hello,
        registry: WorkerRegistry,
    ) -> None:
        self.idx: int = idx
        self.transport: Transport = transport
        self.hello: Hello = hello
        self.wanted: int | None = None
        epoch = registry.clock.epoch
        self.outbox: Outbox = Outbox(epoch, idx, hello.version or 0 if hello.epoch == epoch else 0)
        self.received_version: int = self.outbox.applied
        self.stream: ChunkWriter | None = None
        self.publisher: SlotPublisher | None = None
        self._channel = channel = transport.channel
        if channel is not None:
            channel.refuse_payloads()  # a worker has little to say
        transport.take_segments(False)
        if hello.slots:
            self.publisher = transport.publisher
        if registry.streaming is not None and transport.slots is None:
            self.stream = ChunkWriter(
                transport,
                registry.streaming,
                hello,
                owes=lambda: self.outbox.unreceived,
                on_stall=self.lose,
            )
        self._since = time.monotonic()
        self._registry = registry
        self._queue = Chain()  # what waits for the link
        self._covers: Group = ()  # holds every name of what the link took
        self._word: Current | None = None  # to be said when the link is free
        self._digest: bytes | None = None  # of the manifest that the worker has
        self._writing = False
        self._looks = (0, 0)  # the version that it held, and how often it was found behind so

    def start(self) -> None:
        """Begin to read acknowledgements."""
        self._registry.tasks.start(self._read(), f"aiosync acks of worker {self.idx}")

    # -- what is known of the worker -----------------------------------------------------------

    @property
    def name(self) -> str:
        """How errors call the worker: its address, or its process."""
        return f"worker {self.idx}" if self._channel is None else self._channel.name

    @property
    def watched(self) -> list[int]:
        """Descriptors that tell of what the worker says, and of its end, where it reads slots."""
        channel = self._channel
        if self.publisher is None or channel is None or channel.ended:
            return []
        return [fd for fd in (channel.io.fd, channel.pidfd) if fd >= 0]

    @property
    def age(self) -> float:
        """Seconds since its handshake."""
        return time.monotonic() - self._since

    @property
    def applied(self) -> int:
        """Newest version that the worker has taken, as far as it is known; 0 for none."""
        return max(self.outbox.applied, 0 if self.publisher is None else self.publisher.holds)

    @property
    def visible(self) -> int:
        """Version that the worker uses from now on, or has; 0 for none."""
        return max(self.outbox.applied, self.outbox.visible)

    @property
    def lag(self) -> int:
        """How far it is behind what was sent to it, and is still on its way; in versions."""
        behind = self.is_behind or not self.outbox.is_idle
        return self.outbox.newest - self.applied if behind else 0

    @property
    def is_behind(self) -> bool:
        """Whether the worker has not taken yet what it was named without a message."""
        return self.publisher is not None and self.publisher.holds < self.outbox.visible

    def has(self, version: int) -> bool:
        """Whether the worker has this version, or it is on its way."""
        return self.outbox.newest >= version

    # -- updates by message --------------------------------------------------------------------

    def offer(self, *group: Snapshot) -> None:
        """Make ``group`` the next update of this worker; the newest wins.

        One that lacks a part of what is under way comes after that instead.
        """
        outbox, covers, queue = self.outbox, self._covers, self._queue
        needed: list[Snapshot] = []
        kept: list[int] = []
        overtakes = outbox.is_idle or (
            len(group) == 1 == len(covers)
            and queue.groups in ([], [covers])
            and covers[0].holds_same(group[0])
        )
        if not overtakes:
            names = names_of(group)
            needed = queue.lacking(names)
            overtakes = not needed and names_of(covers) <= names
        for each in group:
            each.retain()
        if queue.groups:
            kept = queue.add(group, needed, parts=self._registry.history.parts)
        else:
            queue.groups.append(group)
        if overtakes:
            self._covers = group
        replaced = outbox.offer(group[-1].version, None if overtakes else kept)
        if replaced:
            self._registry.on_outcomes(self, replaced)
        self._pump()

    def say(self, message: Current) -> None:
        """Send a word between two updates, in the background where the link is busy."""
        try:
            if self.outbox.error or self.transport.send_nowait(message):
                return
        except AiosyncError as exc:
            self.lose(exc)
            return
        self._word = message  # the newest says it all, however often a worker asks
        self._pump()

    def _pump(self) -> None:
        """Write what may go now: at once where the link takes it, else in the background."""
        while not (self._writing or self.outbox.error):
            if self._word is not None:
                self._write_soon(())
                return
            version = self.outbox.take()
            if version is None:
                return
            self._covers = group = self._queue.groups.pop(0)
            try:
                if len(group) > 1 or not self._write_now(group[0]):
                    self._write_soon(tuple(each.retain() for each in group))
                return
            except AiosyncError as exc:
                self._failed(version, exc, self.outbox.epoch)  # what waited for it is next
            finally:
                for each in group:
                    each.release()

    def _write_now(self, snapshot: Snapshot) -> bool:
        if snapshot.filling is not None or snapshot.kept is not None:
            return False
        if self.stream is not None and snapshot.nbytes > self.stream.most_at_once:
            return False
        with contextlib.closing(self._steps(snapshot, self.outbox.epoch)) as steps:
            for step in steps:
                if step is not None and not self.transport.send_nowait(*step):
                    return False
        return True

    def _write_soon(self, group: Group) -> None:
        self._writing = True
        # The epoch of now: another sender may take over before the task begins.
        self._registry.tasks.start(
            self._write(group, self.outbox.epoch), f"aiosync send to worker {self.idx}"
        )

    async def _write(self, group: Group, epoch: int) -> None:
        """Write a word that waits, and updates, to which this has a reference."""
        try:
            while self._word is not None:
                word, self._word = self._word, None
                await self.transport.send(word)
            if len(group) > 1:
                limits = DEFAULT_LIMITS if self._channel is None else self._channel.limits
                await self._write_update(await together(group, limits), epoch)
            elif group:
                await self._write_update(group[0], epoch)
        except AiosyncError as exc:
            self._failed(group[-1].version if group else 0, exc, epoch)
        finally:
            for each in group:
                each.release()
            self._writing = False
        self._pump()

    async def _write_update(self, snapshot: Snapshot, epoch: int) -> None:
        above = self.transport.follows_copies_above
        early = snapshot.live is not None or (above is not None and snapshot.nbytes > above)
        if self.publisher is not None or not early:
            await snapshot.filled()
        kept = None
        if snapshot.kept is not None and self.publisher is not None:
            kept = await snapshot.kept()
        with contextlib.closing(self._steps(snapshot, epoch, kept)) as steps:
            for step in steps:
                if step is None:
                    await asyncio.sleep(0)
                else:
                    await self.transport.send(*step)

    def _steps(
        self, snapshot: Snapshot, epoch: int, kept: Sequence[memoryview] | None = None
    ) -> Generator[tuple[Message, Sequence[memoryview]] | None]:
        """What an update consists of on this link, with ``None`` where others may have a turn.

        What is asked for next was sent. May be given up before any step, and begun again.
        """
        version, digest, publisher = snapshot.version, snapshot.layout.digest, self.publisher
        if self.stream is not None:
            self.stream.watch()  # the manifest may be stuck, too
        if digest != self._digest:
            yield ManifestMessage(snapshot.layout.manifest), ()
            self._digest = digest
        if self.stream is not None:
            before = self.stream.sent_nbytes
            yield from self.stream.steps(epoch, snapshot)
            self._registry.wire_nbytes += self.stream.sent_nbytes - before
        elif publisher is not None and snapshot.slot is not None and not snapshot.values:
            yield from publisher.announcements(snapshot.slot)
            snapshot.slot.seal(version, digest, snapshot.nbytes, snapshot.trace)
            publisher.store(snapshot.slot, version)
            yield Take(epoch, version), ()
        else:
            views = snapshot.views(0, snapshot.nbytes) if kept is None else kept
            payload = SharedPayload(views, snapshot.memo)
            yield (
                Update(epoch, version, digest, values=snapshot.values, trace=snapshot.trace),
                payload,
            )
            self._registry.wire_nbytes += snapshot.nbytes

    def _failed(self, version: int, error: AiosyncError, epoch: int) -> None:
        if not isinstance(error, LocalProtocolError):
            self.lose(error)
        elif epoch == self.outbox.epoch:  # it cannot be said, and the link is as it was
            self._registry.on_outcomes(self, self.outbox.give_up(version, without_frames(error)))

    # -- what the worker sees without being told -----------------------------------------------

    def looks_for(self, digest: bytes) -> bool:
        """Whether the worker takes updates of this manifest, once named, before it computes again.

        Not while others are on their way to it: their answers come in order.
        """
        publisher = self.publisher
        return (
            publisher is not None
            and publisher.promised == digest
            and not (self._writing or self.outbox.error)
            and not (self._channel and self._channel.ended)  # which the loop is about to see
            and not (self.outbox.queue or self.outbox.in_flight)
        )

    def can_see(self, snapshot: Snapshot) -> bool:
        """Whether nothing but naming this update is needed: it is in a slot that is known there."""
        slot, publisher = snapshot.slot, self.publisher
        return (
            slot is not None
            and publisher is not None
            and slot.segment.segment_id in publisher.announced
            and snapshot.filling is None
            and not snapshot.values
            and self.looks_for(snapshot.layout.digest)
        )

    def see(self, snapshot: Snapshot) -> None:
        """Name an update to the worker, which promised to look: it counts as applied."""
        publisher, slot = self.publisher, snapshot.slot
        assert publisher is not None
        assert slot is not None
        if slot.locked:
            slot.seal(snapshot.version, snapshot.layout.digest, snapshot.nbytes, snapshot.trace)
        publisher.store(slot, snapshot.version)
        self.outbox.newest = self.outbox.visible = self.received_version = snapshot.version

    def ring(self) -> None:
        """Have the worker look now. What the link does not take is not said."""
        try:
            self.transport.send_nowait(Take(self.outbox.epoch, 0))
        except AiosyncError as exc:
            self.lose(exc)

    def ring_if_behind(self) -> bool:
        """Ring the worker if it is behind, but ever more seldom while it does nothing: whether."""
        publisher, before = self.publisher, self._looks
        self._looks = (0, 0)
        if publisher is None or not self.is_behind or self.outbox.error:
            return False
        looks = before[1] + 1 if before[0] == publisher.holds else 1
        self._looks = (publisher.holds, looks)
        if looks & (looks - 1) == 0 or looks % 200 == 0:
            self.ring()
        return True

    # -- what the worker says, and the end -----------------------------------------------------

    async def _read(self) -> None:
        try:
            self.transport.subscribe(self._on_message)
            while True:
                self._on_message(await self.transport.recv())
        except AiosyncError as exc:
            self.lose(exc)

    def _on_message(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Ack):
            if message.epoch == self.outbox.epoch and message.status is not AckStatus.NACK:
                self.received_version = max(self.received_version, message.version)
            outcomes = self.outbox.on_ack(message)
            self._registry.on_outcomes(self, outcomes)  # some wait for no more than that it arrived
            if self.outbox.queue:
                self._pump()
        elif isinstance(message, Fetch):
            self.wanted = message.min_version
            self._registry.answer(self)
        elif isinstance(message, Promise):
            if self.publisher is not None:
                self.publisher.promised = message.digest or None
                if not message.digest:  # one that this does not reach looks on, in vain
                    self.transport.send_nowait(message)
        elif isinstance(message, Leave):
            self.lose(WorkerLeft(f"{self.name} left"))
        elif isinstance(message, Refuse):
            raise PeerClosed(f"{self.name} ended the link: {message.error_text}")
        else:
            raise RemoteProtocolError(
                f"worker {self.idx} sent {type(message).__name__} where only acknowledgements are "
                "expected"
            )

    def begin_epoch(self, epoch: int) -> None:
        """Another sender takes over: versions start again. The link stays."""
        if self._queue.groups and not self.hello.subscribe:
            self.wanted = self.wanted or 1  # the rest of what it asked for never comes
        outcomes = self.outbox.close(TransportClosed("another sender took over"))
        self.outbox = Outbox(epoch, self.idx)
        self._queue.clear()
        self._covers, self.received_version = (), 0
        self._registry.on_outcomes(self, outcomes)

    def lose(self, error: AiosyncError) -> None:
        """The link is gone: everything on its way fails with ``error``."""
        if self.outbox.error is not None:
            return
        outcomes = self.outbox.close(without_frames(error))
        self._queue.clear()
        if self.stream is not None:
            self.stream.close()
        if self.publisher is not None:
            self.publisher.end()
        self._registry.on_lost(self, error)
        self._registry.on_outcomes(self, outcomes)
