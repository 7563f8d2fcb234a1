"""The sender's side of one link: the worker's version, the updates on their way, and its two tasks.

Updates are written at once if the link takes them, and in a task if not; a second task reads the
acknowledgements. The end of a worker is noticed by ``transports.framed_link``, which
``sender.registry`` has watch the worker's process; that of a plain Ray actor by ``transports.ray``;
and that of a process that dies before it joins by ``sender.worker_deaths``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol

from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ConnectError,
    LocalProtocolError,
    PeerClosed,
    RemoteProtocolError,
    TransportClosed,
)
from aiosync.sender.deltas import Delta, Deltas
from aiosync.sender.incoming import Abandoned
from aiosync.sender.outbox import Outbox, Outcome, WorkerLeft
from aiosync.sender.snapshots import Snapshot
from aiosync.sender.update_chunks import PendingBytes, Steps, Streaming, UpdateChunks
from aiosync.sender.update_queue import LateJoinerUpdates
from aiosync.transports.base import Received, Transport, is_no_room, without_frames
from aiosync.transports.data_plane import SharedPayload
from aiosync.transports.shared_memory import Slot, SlotPublisher
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
    Take,
    Update,
)

__all__ = ["WorkerLink"]

_NOWAIT_NBYTES = 65536


class LinkOwner(Protocol):
    """The registry as its links see it.

    Attributes:
        epoch: Epoch of the sender.
        streaming: Settings of links whose payloads travel in the stream.
        history: Updates for workers that join later.
        tasks: Owner of the links' tasks.
        counts: Counts for :class:`SyncStats`, which links add to.
        deltas: Encodes the changes of updates; ``None`` if all travel whole.
    """

    epoch: int
    deltas: Deltas | None
    streaming: Streaming | None
    tasks: TaskOwner
    counts: dict[str, int]
    history: LateJoinerUpdates

    def on_outcomes(self, link: WorkerLink, outcomes: Sequence[Outcome]) -> None:
        """Register outcomes of versions; also called without any, as calls may wait for less."""

    def on_lost(self, link: WorkerLink, error: AiosyncError) -> None:
        """Remove a link that has ended."""

    def answer(self, link: WorkerLink) -> None:
        """Answer a worker that asked for a version."""

    def catch_up(self, link: WorkerLink) -> None:
        """Offer what is newer than all that this worker was offered."""


class WorkerLink:
    """One connected worker, as the sender sees it.

    Args:
        idx: Index of the worker.
        transport: The link; closed by the owner of this object.
        hello: The worker's Hello.
        registry: Told of the outcomes of versions, and of the end of the link.

    Attributes:
        idx: As given.
        transport: As given.
        hello: As given.
        wanted: The least version that the worker asked for, until that is answered; else ``None``.
        outbox: Updates on their way, in the sender's present epoch.
        since: Time of the handshake, on ``time.monotonic()``'s clock.
        skipped: Number of versions that a newer one overtook.
        publisher: Names slots to a worker that reads updates in place; ``None`` for others.
    """

    def __init__(
        self,
        idx: int,
        transport: Transport,
        hello: Hello,
        registry: LinkOwner,
    ) -> None:
        self.idx: int = idx
        self.transport: Transport = transport
        self.hello: Hello = hello
        self.wanted: int | None = None
        epoch = registry.epoch
        self.outbox: Outbox = Outbox(epoch, idx, hello.version or 0 if hello.epoch == epoch else 0)
        self.skipped: int = 0
        self.publisher: SlotPublisher | None = None
        self._channel = channel = transport.channel
        if channel is not None:
            # The name may lack the process, as over TCP.
            if str(hello.pid) not in channel.name:
                channel.name = f"process {hello.pid} at {channel.name}"
            # A worker only sends small messages.
            channel.refuse_payloads()
        # A worker announces no shared memory to this side.
        transport.take_segments(False)
        if hello.slots:
            self.publisher = transport.publisher
        # ``None`` if payloads travel whole.
        self._chunks: UpdateChunks | None = None
        if registry.streaming is not None and transport.slots is None:
            self._chunks = UpdateChunks(registry.streaming, hello, registry.counts)
        # Stall timer for the worker's answer, and the progress that it saw last.
        self._timer: asyncio.TimerHandle | None = None
        self._progress: tuple[int, int] | None = None
        # Bytes of messages between updates, which are no progress of an update.
        self._said_nbytes = 0
        self.since: float = time.monotonic()
        self._registry = registry
        # A message that waits until the link is free.
        self._word: Current | None = None
        # Digest of the manifest that the worker has.
        self._digest: bytes | None = None
        # Notified when the worker answers a manifest, or when the link ends.
        self._answered = Notifier()
        # Number of promises that the worker has withdrawn.
        self._num_withdrawn = 0
        self._writing = False
        # True while the link waits for bytes that this side does not have yet: messages are sent
        # between two chunks then, and the worker is not taken for stalled.
        self._waits = False

    # -- state of the worker -------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the worker in errors: its address, or its process."""
        return f"worker {self.idx}" if self._channel is None else self._channel.name

    @property
    def _written_nbytes(self) -> int:
        return 0 if self._channel is None else self._channel.written_nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes of chunks that the link took."""
        return 0 if self._chunks is None else self._chunks.sent_nbytes

    @property
    def watched(self) -> list[int]:
        """Descriptors that turn readable when a worker that reads slots sends a message or ends."""
        channel = self._channel
        if self.publisher is None or channel is None or channel.ended:
            return []
        return [fd for fd in (channel.io.fd, channel.pidfd) if fd >= 0]

    @property
    def applied(self) -> int:
        """Newest version that the worker is known to have taken; 0 for none."""
        return max(self.outbox.applied, 0 if self.publisher is None else self.publisher.holds)

    @property
    def visible(self) -> int:
        """Version that the worker has, or uses from its next read on; 0 for none."""
        return max(self.outbox.applied, self.outbox.named_version)

    @property
    def lag(self) -> int:
        """Number of versions that the worker is behind; 0 if no update is on its way to it."""
        behind = self.is_behind or not self.outbox.is_idle
        return self.outbox.newest - self.applied if behind else 0

    def is_free_for(self, version: int) -> bool:
        """Return True if a subscriber lacks this version, and no other update is on its way."""
        outbox = self.outbox
        busy = self._writing or self._word or outbox.error or not outbox.is_idle
        return self.hello.subscribe and not busy and outbox.newest < version

    @property
    def is_behind(self) -> bool:
        """True if the worker has not taken yet the version named to it in shared memory."""
        return self.publisher is not None and self.publisher.holds < self.outbox.named_version

    # -- updates by message --------------------------------------------------------------------

    def offer(self, *group: Snapshot) -> None:
        """Queue snapshots as one update for this worker; it replaces those that still wait."""
        replaced = self.outbox.offer(group, parts=self._registry.history.parts)
        if replaced:
            self._registry.on_outcomes(self, replaced)
        self._pump()

    def say(self, message: Current) -> None:
        """Send a message between two updates; it replaces a message that still waits."""
        self._word = message
        if self._waits:
            self._say_between_chunks()
        self._pump()

    def _say_between_chunks(self) -> None:
        """Send the message that waits, as the rest of the update may not come for long."""
        before, word = self._written_nbytes, self._word
        try:
            sent = word is not None and self.transport.send_nowait(word)
        except AiosyncError as exc:
            self.lose(exc)
            return
        if sent:
            self._word = None
            self._said_nbytes += self._written_nbytes - before

    def _pump(self) -> None:
        """Write the next message or update: at once if the link takes it, else in a task."""
        while not (self._writing or self.outbox.error):
            # A message that waits goes first. An empty group stands for it.
            group = () if self._word is not None else self.outbox.take()
            if group is None:
                return
            # Another sender may take over before the task begins.
            epoch = self.outbox.epoch
            try:
                if len(group) != 1 or not self._write_now(group[0]):
                    self._writing = True
                    writing = self._write(tuple(each.retain() for each in group), epoch)
                    self._registry.tasks.start(writing, f"aiosync send to worker {self.idx}")
                return
            except AiosyncError as exc:
                # An update that waited for this one is next.
                self._failed(group, exc, epoch)
            finally:
                for each in group:
                    each.release()

    def _write_now(self, snapshot: Snapshot) -> bool:
        """Write an update if the link takes it at once; return False if a task has to write it."""
        if snapshot.filling is not None or snapshot.kept is not None or self._announces(snapshot):
            return False
        if snapshot.incoming is not None:
            return False
        chunks = self._chunks
        if chunks is not None:
            if snapshot.nbytes > min(_NOWAIT_NBYTES, chunks.settings.chunk_nbytes):
                return False
            # The update replaces the base that the worker keeps.
            chunks.base = 0
        with contextlib.closing(self._steps(snapshot, self.outbox.epoch)) as steps:
            for step in steps:
                if isinstance(step, tuple) and not self.transport.send_nowait(*step):
                    return False
        return True

    async def _write(self, group: tuple[Snapshot, ...], epoch: int) -> None:
        """Write a message that waits, then ``group`` as one update; release the references."""
        try:
            while self._word is not None:
                word, self._word = self._word, None
                before = self._written_nbytes
                await self.transport.send(word)
                self._said_nbytes += self._written_nbytes - before
            if group:
                limits = DEFAULT_LIMITS if self._channel is None else self._channel.limits
                snapshot = await self._registry.history.join(group, limits)
                try:
                    await self._write_update(snapshot, epoch)
                finally:
                    snapshot.release()
        except AiosyncError as exc:
            self._failed(group, exc, epoch)
        finally:
            for each in group:
                each.release()
            self._writing = False
        self._pump()

    async def _write_update(self, snapshot: Snapshot, epoch: int) -> None:
        """Write one update, as soon as the link can use its bytes."""
        digest = snapshot.layout.digest
        if self._digest != digest and self._chunks is None and self.publisher is None:
            await self.transport.send(ManifestMessage(snapshot.layout.manifest))
            self._digest = digest
        # Nothing is awaited between this and the views of borrowed bytes: a send() that is
        # cancelled copies them, and until then the memory has others.
        await self._wait_until_usable(snapshot)
        if self._announces(snapshot):
            await self._announce(snapshot)
        delta, deltas = None, self._registry.deltas
        # An update of an epoch that ended meanwhile is no base for those of the present one.
        if self._chunks is not None and deltas is not None and epoch == self.outbox.epoch:
            await self._wait_for_chunk(snapshot, self._chunks.settings.chunk_nbytes)
            history = self._registry.history
            # A base may have been joined from parts that a whole update ended in the history.
            in_parts = history.parts or history.is_in_parts_for(self.idx)
            delta = await self._chunks.begin(snapshot, deltas, in_parts=in_parts)
        try:
            with contextlib.closing(self._steps(snapshot, epoch, delta)) as steps:
                await self._write_steps(steps)
        finally:
            if delta is not None:
                delta.base.release()
            # The link may have ended before begin() kept the update as a base.
            if self._chunks is not None and self.outbox.error is not None:
                self._chunks.release_carried()

    async def _wait_for_chunk(self, snapshot: Snapshot, nbytes: int) -> None:
        """Wait for the first chunk of an update that arrives: it tells if a delta is worth it."""
        incoming, first = snapshot.incoming, min(nbytes, snapshot.nbytes)
        while incoming is not None and (waiting := incoming.until(first, is_last=False)):
            await self._wait_for(waiting)

    async def _write_steps(self, steps: Steps) -> None:
        """Write the messages of an update, and wait where bytes are still to come."""
        for step in steps:
            if step is None:
                await asyncio.sleep(0)
            elif isinstance(step, tuple):
                await self.transport.send(*step)
            else:
                await self._wait_for(step)

    async def _wait_until_usable(self, snapshot: Snapshot) -> None:
        """Wait until all bytes of an update are here, unless the link may follow their copy."""
        above = self.transport.follows_copies_above
        may_follow_copy = (
            snapshot.live is not None
            or snapshot.incoming is not None
            or (above is not None and snapshot.nbytes > above)
        )
        if self.publisher is not None:
            await snapshot.in_memory()
        elif not may_follow_copy:
            await snapshot.filled()

    async def _wait_for(self, bytes_to_send: PendingBytes) -> None:
        """Wait for bytes that this side still receives or encodes; raise if the link ends first."""

        def lets_go() -> bool:
            return self.outbox.let_go == self.outbox.unreceived

        self._waits = True
        self._say_between_chunks()
        try:
            while not bytes_to_send.done():
                if self.outbox.error is not None:
                    raise self.outbox.error
                if lets_go():
                    raise Abandoned("the worker has no version, and the rest has yet to arrive")
                lost = self._answered.wait(lambda: self.outbox.error is not None or lets_go())
                ended = asyncio.ensure_future(lost)
                try:
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait({bytes_to_send, ended}, return_when=first)
                finally:
                    ended.cancel()
        finally:
            self._waits = False

    def _announces(self, snapshot: Snapshot) -> bool:
        """Return True if reads look at the word, and may lack the update's manifest or segment."""
        publisher, slot = self.publisher, snapshot.slot
        if publisher is None or publisher.promised is None:
            return False
        is_new = slot is not None and slot.place not in publisher.announced
        return is_new or publisher.promised != snapshot.layout.digest

    async def _announce(self, snapshot: Snapshot) -> None:
        """Have the worker read segment and manifest of an update before its word names that.

        The worker withdraws its promise when it reads the manifest. It may promise anew at once,
        and that does no harm.
        """
        assert self.publisher is not None
        before = self._num_withdrawn
        if snapshot.slot is not None:
            with contextlib.closing(self.publisher.announcements(snapshot.slot)) as announcements:
                for message in announcements:
                    await self.transport.send(*message)
        await self.transport.send(ManifestMessage(snapshot.layout.manifest))
        self._digest = snapshot.layout.digest
        while self._num_withdrawn == before and not self.outbox.error:
            await self._answered.wait()

    def _steps(self, snapshot: Snapshot, epoch: int, delta: Delta | None = None) -> Steps:
        """Yield the messages of an update: with chunks, with all bytes, or that name its slot."""
        version, digest, publisher = snapshot.version, snapshot.layout.digest, self.publisher
        if self._chunks is not None:
            # An attempt that was abandoned may have stopped at the same byte of the same version.
            self._progress = None
            if self._timer is None:
                # The worker owes an answer from now on. The link may take no byte even of the
                # manifest.
                self._drop_if_stalled()
        if digest != self._digest:
            yield ManifestMessage(snapshot.layout.manifest), ()
            self._digest = digest
        if self._chunks is not None:
            yield from self._chunks.steps(snapshot, epoch, delta)
        elif publisher is not None and snapshot.slot is not None and not snapshot.values:
            yield from publisher.announcements(snapshot.slot)
            snapshot.slot.seal(version, digest, snapshot.nbytes, snapshot.trace)
            publisher.store(snapshot.slot, version)
            yield Take(epoch, version), ()
        else:
            payload = SharedPayload(snapshot.views(0, snapshot.nbytes), snapshot.share)
            yield (
                Update(epoch, version, digest, values=snapshot.values, trace=snapshot.trace),
                payload,
            )
            self._registry.counts["wire_nbytes"] += snapshot.nbytes

    def _drop_if_stalled(self) -> None:
        """Drop a worker that owes an answer if it took and answered nothing since the last check.

        The timer goes on when the answer comes: making one costs as much as a small send.
        """
        assert self._chunks is not None
        # The update may be of an epoch that has ended since.
        owed = self.outbox.unreceived or (0 if self._writing else None)
        timeout = self._chunks.settings.stall_timeout
        self._timer = None
        if owed is None or timeout is None:
            return
        progress = (self._written_nbytes - self._said_nbytes, owed)
        if progress != self._progress or self._waits:
            self._progress = progress
            self._timer = asyncio.get_running_loop().call_later(timeout, self._drop_if_stalled)
            return
        self.lose(
            AckTimeout(
                f"the worker neither took nor answered the update for {timeout:g} s "
                "(stall_timeout); it was dropped and may connect again",
                version=owed,
            )
        )

    def _failed(self, group: tuple[Snapshot, ...], error: AiosyncError, epoch: int) -> None:
        """End the link after an error of a write, or give up the update if only that is wrong."""
        if not isinstance(error, LocalProtocolError):
            self.lose(error)
        elif isinstance(error, Abandoned) and epoch == self.outbox.epoch:
            self.outbox.give_up(group[-1].version, error)
            self._registry.catch_up(self)
        elif group and epoch == self.outbox.epoch:
            # The update cannot be sent, and the link of a subscriber works as before.
            outcomes = self.outbox.give_up(group[-1].version, without_frames(error))
            self._registry.on_outcomes(self, outcomes)
            if not self.hello.subscribe:
                # The worker asked for this update, and would wait for it in vain.
                self._send_refusal(error)
                self.lose(error)

    def _send_refusal(self, error: AiosyncError) -> None:
        """Tell the worker why its link ends, if the link takes a message now."""
        # The link may be writing, or may have ended.
        with contextlib.suppress(AiosyncError):
            self.transport.send_nowait(Refuse(type(error).__name__, str(error)))

    # -- updates named in shared memory --------------------------------------------------------

    def takes_named(self, digest: bytes, slot: Slot | None = None) -> bool:
        """Return True if naming an update of this manifest is enough for the worker to take it.

        The worker then takes the update before it computes again. Not while other updates are on
        their way to it, as their answers come in order.

        Args:
            digest: Digest of the manifest.
            slot: A slot that the worker has to be able to read, too.
        """
        publisher = self.publisher
        return (
            publisher is not None
            and publisher.promised == digest
            and (slot is None or slot.place in publisher.announced)
            and not (self._writing or self.outbox.error)
            # The link may have ended, which the loop is about to notice.
            and not (self._channel and self._channel.ended)
            and not (self.outbox.queue.groups or self.outbox.in_flight)
        )

    def takes_off_loop(self, digest: bytes) -> bool:
        """Return True if naming is enough, as for :meth:`takes_named`, and the worker stays."""
        publisher = self.publisher
        return publisher is not None and not publisher.leaves and self.takes_named(digest)

    def can_read(self, slot: Slot | None) -> bool:
        """Return True if the worker has the segment of a slot of shared memory."""
        publisher = self.publisher
        return slot is None or (publisher is not None and slot.place in publisher.announced)

    def name_in_memory(self, snapshot: Snapshot, naming_suffices: bool) -> bool:
        """Name an update to the worker if that is enough. Return True if it counts as applied.

        Args:
            snapshot: The update.
            naming_suffices: The caller has checked that naming is enough. The caller may run on
                another thread than the loop's, and no message may be sent there instead.

        Returns:
            False if the update has to be offered, too; or, if naming sufficed, the worker leaves.
        """
        publisher, slot, outbox = self.publisher, snapshot.slot, self.outbox
        if publisher is None or slot is None:
            return False
        digest = snapshot.layout.digest
        if not naming_suffices and (
            snapshot.filling is not None or snapshot.values or not self.takes_named(digest, slot)
        ):
            return False
        # The slot is unlocked before any link names it, so that workers can read it.
        if slot.locked:
            slot.seal(snapshot.version, digest, snapshot.nbytes, snapshot.trace)
        if not publisher.store(slot, snapshot.version):
            return False
        outbox.newest = outbox.named_version = outbox.received = snapshot.version
        return True

    def ring(self) -> None:
        """Tell the worker to look for an update now. The message is dropped if the link is full."""
        try:
            self.transport.send_nowait(Take(self.outbox.epoch, 0))
        except AiosyncError as exc:
            self.lose(exc)

    # -- messages of the worker, and the end of the link ---------------------------------------

    async def read(self) -> None:
        """Read the worker's messages until the link ends."""
        try:
            self.transport.subscribe(self._on_message)
            while True:
                self._on_message(await self.transport.recv())
        except AiosyncError as exc:
            self.lose(exc)

    def _on_message(self, received: Received) -> None:
        """Handle a message of the worker, and write what may be written after it."""
        message = received.message
        if isinstance(message, Ack):
            named = self.outbox.named_version
            if message.is_base and message.epoch == self.outbox.epoch and self._chunks is not None:
                self._chunks.note_base(message.version)
            outcomes, publisher = self.outbox.on_ack(message), self.publisher
            if publisher is not None:
                # The worker has a newer version, which came by message, than the word names.
                if publisher.version < self.outbox.applied:
                    publisher.overtaken()
                if named and not self.outbox.named_version:
                    self._keep_older(publisher, named)
            # RECEIVED has no outcomes, but some calls wait for no more than that.
            self._registry.on_outcomes(self, outcomes)
            if self.outbox.queue.groups:
                self._pump()
            elif self._registry.deltas is not None and self.outbox.unreceived is None:
                if self._chunks is not None:
                    # The worker has the last update, and no newer one waits to be a delta to it.
                    self._chunks.release_carried()
        elif isinstance(message, Fetch):
            self.wanted = message.min_version
            if message.has_none:
                self._forget_versions(message.min_version)
            self._registry.answer(self)
        elif isinstance(message, Promise):
            self._on_promise(message)
        elif isinstance(message, Leave):
            self.lose(WorkerLeft(f"{self.name} left"))
        else:
            self._refuse(message)

    def _keep_older(self, publisher: SlotPublisher, refused: int) -> None:
        """Note which version the worker has, in place of the named one that it refused."""
        # Where only a hook refused it, the model has it, which does not count as applied.
        self.outbox.named_version = min(publisher.holds, refused - 1)
        if self.outbox.received == refused:
            self.outbox.received = self.outbox.named_version

    def _forget_versions(self, least: int) -> None:
        """Say that the kept versions come again to a worker that has none, if that is so now."""
        version = self._registry.history.for_worker(self.idx).version
        if not version or version < least:
            return
        if self.outbox.carries_part:
            # The rest may never come, so that the link gives up the part.
            self.outbox.let_go = self.outbox.in_flight[-1]
            self._answered.notify()
        # A message that is being written comes before the one below.
        if not self.outbox.is_idle:
            return
        self.outbox.forget()
        if self.publisher is not None:
            self.publisher.forget()
        self.say(Current(self.outbox.epoch, version))

    def _refuse(self, message: Message) -> NoReturn:
        """Raise the error for a message after which the link cannot go on."""
        if isinstance(message, Refuse):
            raise PeerClosed(f"{self.name} ended the link: {message.error_text}")
        raise RemoteProtocolError(
            f"worker {self.idx} sent {type(message).__name__} where only acknowledgements are "
            "expected"
        )

    def _on_promise(self, message: Promise) -> None:
        """Note which manifest's updates the worker takes without a message, or that it withdrew."""
        if self.publisher is not None:
            self.publisher.promised = message.digest or None
            # Confirm the withdrawal: a worker that this does not reach goes on looking, in vain.
            if not message.digest:
                self._num_withdrawn += 1
                self.transport.send_nowait(message)
            self._answered.notify()

    def begin_epoch(self, epoch: int) -> None:
        """Start the epoch of another sender, in which versions start anew. The link stays."""
        if self.outbox.queue.groups and not self.hello.subscribe:
            # The rest of the updates that the worker asked for never comes: answer it anew.
            self.wanted = self.wanted or 1
        outcomes = self.outbox.close(TransportClosed("another sender took over"))
        self.outbox = Outbox(epoch, self.idx)
        if self._chunks is not None:
            self._chunks.base = 0
            self._chunks.release_carried()
        self._registry.on_outcomes(self, outcomes)

    def lose(self, error: AiosyncError) -> None:
        """End the link: everything on its way fails with ``error``. Later calls do nothing."""
        if self.outbox.error is not None:
            return
        if is_no_room(error.__cause__):
            text = f"the trainer's process has no descriptor or memory left: {error}"
            self._send_refusal(ConnectError(text))
        outcomes = self.outbox.close(without_frames(error))
        if self._timer is not None:
            self._timer.cancel()
        if self._chunks is not None:
            self._chunks.release_carried()
        self._answered.notify()
        # The loss comes first: the outcomes, and sends that they end, have to find the link gone.
        self._registry.on_lost(self, error)
        self._registry.on_outcomes(self, outcomes)
