"""The sender's side of one link: what the worker has, what is on its way, and its two flows.

Writing happens at once where the link takes it and in a task where it does not; a second task
reads the acknowledgements. Must not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from aiosync._tasks import TaskOwner
from aiosync.errors import (
    AiosyncError,
    LocalProtocolError,
    PeerClosed,
    RemoteProtocolError,
    TransportClosed,
)
from aiosync.protocol import Outbox, Outcome
from aiosync.schemes._coverage import Coverage
from aiosync.schemes._streaming import Streaming, StreamWriter
from aiosync.sender.snapshots import FILLED, Snapshot
from aiosync.transports._link import without_frames
from aiosync.transports.base import Received, Transport
from aiosync.transports.data_plane import SharedPayload
from aiosync.transports.shared_memory import SlotPublisher, can_lock
from aiosync.types import AckStatus
from aiosync.wire import (
    Ack,
    Current,
    Fetch,
    Hello,
    ManifestMessage,
    Message,
    Promise,
    Refuse,
    Take,
    Update,
)

__all__ = ["Peer"]


class Peer:
    """One worker, as the sender sees it.

    Args:
        worker_idx: Index of the worker.
        transport: The link; closed by the owner of the peer.
        epoch: Epoch of the sender.
        hello: What the worker said about itself.
        streaming: How payloads travel in the stream of a link that may damage or lose them;
            ``None`` where they go whole and unchecked.
        tasks: Owner of the peer's tasks.
        on_outcomes: Told what became of versions.
        on_lost: Told once, when the link ends.
        on_fetch: Told when the worker asks for a version, see :attr:`wanted`.
        bring: Brings a snapshot's bytes to where workers read them that do so in place.
    """

    def __init__(
        self,
        worker_idx: int,
        transport: Transport,
        *,
        epoch: int,
        hello: Hello,
        streaming: Streaming | None,
        tasks: TaskOwner,
        on_outcomes: Callable[[Peer, Sequence[Outcome]], None],
        on_lost: Callable[[Peer, AiosyncError], None],
        on_fetch: Callable[[Peer], None],
        bring: Callable[[Snapshot], Awaitable[None]] | None = None,
    ) -> None:
        self.worker_idx = worker_idx
        self.transport = transport
        self.epoch: int = epoch
        self.pid: int = hello.pid
        self._since = time.monotonic()
        self.has_target: bool = hello.has_target
        self.subscribes: bool = hello.subscribe
        self.wanted: int | None = None  # the least version that the worker asked for
        self.outbox: Outbox = Outbox(epoch, worker_idx=worker_idx)
        if hello.epoch == epoch and hello.version:
            self.outbox.start_at(hello.version)
        self._coverage = Coverage()
        self.received_version: int = self.outbox.applied
        self._on_fetch = on_fetch
        self.stream: StreamWriter | None = None
        if streaming is not None and transport.slots is None:
            self.stream = StreamWriter(transport, streaming, epoch, hello, on_stall=self.lose)
        self._tasks = tasks
        self._on_outcomes = on_outcomes
        self._on_lost = on_lost
        self._snapshots: dict[int, Snapshot] = {}  # pending ones, by version
        self._words: list[Message] = []  # to be said when the link is free
        self._digest: bytes | None = None
        self._writing = False
        self._lost = False
        self._publisher: SlotPublisher | None = None
        if hello.slots and can_lock():
            self._publisher = transport.publisher
        self._channel = transport.channel
        self._rung_at = 0.0  # when to ring it next
        self._rung_for = 0  # what it held when it was rung
        self._ring_pause = 0.0  # between the last two; 0.0: it is not behind
        self._ready = bring if bring is not None and self._publisher else self._copied

    def start(self) -> None:
        """Begin to read acknowledgements."""
        channel = self._channel
        if channel is not None and self.transport.capabilities.cross_host:
            channel.refuse_payloads()  # a worker has little to say
        self.transport.take_segments(False)
        self._tasks.start(self._read(), f"aiosync acks of worker {self.worker_idx}")

    @property
    def name(self) -> str:
        """How errors call the worker: its address, or its process."""
        channel = self._channel
        return f"worker {self.worker_idx}" if channel is None else channel.name

    @property
    def watched(self) -> list[int]:
        """Descriptors that tell of what the worker says, and of its end, where it reads slots."""
        channel = self._channel
        if self._publisher is None or channel is None or channel.ended:
            return []
        return [fd for fd in (channel.io.read_fd, channel.pidfd) if fd >= 0]

    @property
    def age(self) -> float:
        """Seconds since its handshake."""
        return time.monotonic() - self._since

    @property
    def sent_nbytes(self) -> int:
        """Bytes of updates that the link took."""
        return 0 if self.stream is None else self.stream.sent_nbytes

    def has(self, version: int) -> bool:
        """Whether the worker has this version, or it is on its way."""
        return self.outbox.newest >= version

    def say(self, message: Current) -> None:
        """Send a word between two updates, in the background where the link is busy."""
        try:
            if self._lost or self.transport.send_nowait(message):
                return
        except AiosyncError as exc:
            self.lose(exc)
            return
        self._words = [message]  # the newest says it all, however often a worker asks
        self._pump()

    def offer(self, snapshot: Snapshot) -> None:
        """Make ``snapshot`` the next update of this worker; the newest wins.

        One that lacks a part of what is under way comes after that instead.
        """
        kept = self._coverage.keeps(snapshot, self.outbox)
        if kept is not None:
            self._snapshots[snapshot.version] = snapshot.retain()
            self._settle(self.outbox.offer_after(snapshot.version, kept))
            return
        if not (self._writing or self._lost) and self.outbox.offer_and_take(snapshot.version):
            self._send(snapshot.retain())
            return
        self._snapshots[snapshot.version] = snapshot.retain()
        self._settle(self.outbox.offer(snapshot.version))
        self._pump()

    def begin_epoch(self, epoch: int) -> None:
        """Another sender takes over: versions start again. The link stays."""
        if self._snapshots and not self.subscribes:
            self.wanted = self.wanted or 1  # the rest of what it asked for never comes
        outcomes = self.outbox.close(TransportClosed("another sender took over"))
        for version in list(self._snapshots):
            self._snapshots.pop(version).release()
        self.epoch = epoch
        self.outbox = Outbox(epoch, worker_idx=self.worker_idx)
        self._coverage = Coverage()
        self.received_version = 0
        if self.stream is not None:
            self.stream.begin_epoch(epoch)
        self._on_outcomes(self, outcomes)

    def lose(self, error: AiosyncError) -> None:
        """The link is gone: everything on its way fails with ``error``."""
        if self._lost:
            return
        self._lost = True
        outcomes = self.outbox.close(without_frames(error))
        for version in list(self._snapshots):
            self._snapshots.pop(version).release()
        if self.stream is not None:
            self.stream.close()
        if self._publisher is not None:
            self._publisher.end()
        self._on_lost(self, error)
        self._on_outcomes(self, outcomes)

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        if self._snapshots:
            for outcome in outcomes:
                snapshot = self._snapshots.pop(outcome.version, None)
                if snapshot is not None:
                    snapshot.release()
        if outcomes:
            self._on_outcomes(self, outcomes)

    def _pump(self) -> None:
        if self._writing or self._lost:
            return
        if self._words:
            self._writing = True
            self._tasks.start(self._catch_up(), f"aiosync words to worker {self.worker_idx}")
        elif self.outbox.can_take:
            snapshot = self._snapshots.pop(self.outbox.take())
            self._coverage.take(snapshot)
            self._send(snapshot)

    async def _catch_up(self) -> None:
        try:
            await self._say_words()
        except AiosyncError as exc:
            self.lose(exc)
        finally:
            self._writing = False
        self._pump()

    async def _say_words(self) -> None:
        while self._words:
            await self.transport.send(self._words.pop(0))

    def _send(self, snapshot: Snapshot) -> None:
        """Write now, or in the background; takes over a reference."""
        try:
            taken = self._write_now(snapshot)
        except AiosyncError as exc:
            snapshot.release()
            self._failed(snapshot.version, exc)
            self._pump()  # what waited for it
            return
        if taken:
            snapshot.release()
            return
        self._writing = True
        # The epoch of now: another sender may take over before the task begins.
        self._tasks.start(
            self._write(snapshot, self.epoch), f"aiosync send to worker {self.worker_idx}"
        )

    def _failed(self, version: int, error: AiosyncError, epoch: int | None = None) -> None:
        if isinstance(error, LocalProtocolError):  # it cannot be said; the link is as it was
            if epoch not in (None, self.epoch):
                return  # nobody waits for it any more
            if version not in self.outbox.in_flight or self.outbox.window_open:
                return  # the worker has answered all the same
            outcomes = self.outbox.give_up(version, without_frames(error))
            self._answered()
            self._settle(outcomes)
        else:
            self.lose(error)

    def _messages(self, snapshot: Snapshot, epoch: int) -> tuple[Message | None, Update]:
        digest = snapshot.layout.digest
        manifest = None
        if digest != self._digest:
            manifest = ManifestMessage(snapshot.layout.manifest)
        return manifest, Update(epoch, snapshot.version, digest, values=snapshot.values)

    @property
    def follows_copies(self) -> bool:
        """Whether a large snapshot may still be filled while it is sent."""
        return self.transport.follows_copies_above is not None

    @property
    def reads_slots(self) -> bool:
        """Whether the worker reads updates where they lie in this process."""
        return self._publisher is not None

    def _write_now(self, snapshot: Snapshot) -> bool:
        publisher = self._publisher
        if publisher and snapshot.state is not FILLED:
            return False  # readers would see a slot that is half full
        if publisher and snapshot.slot is None and not snapshot.values:
            return False  # it is brought there first
        manifest, update = self._messages(snapshot, self.epoch)
        if manifest is not None:
            if not self.transport.send_nowait(manifest):
                return False
            self._digest = snapshot.layout.digest
        if self.stream is not None:
            return self.stream.write_nowait(snapshot)
        if publisher and not snapshot.values:
            assert snapshot.slot is not None
            if not publisher.announce_nowait(snapshot.slot):
                return False
            self._store(publisher, snapshot)
            return self.transport.send_nowait(Take(self.epoch, snapshot.version))
        return self.transport.send_nowait(update, self._payload(snapshot))

    @staticmethod
    def _store(publisher: SlotPublisher, snapshot: Snapshot) -> None:
        assert snapshot.slot is not None
        snapshot.slot.seal(snapshot.version, snapshot.layout.digest, snapshot.nbytes)
        publisher.store(snapshot.slot, snapshot.version)

    # -- what the worker sees without being told --------------------------------------------------

    def looks_for(self, digest: bytes) -> bool:
        """Whether the worker takes updates of this manifest, once named, before it computes again.

        Not while others are on their way to it: their answers come in order.
        """
        publisher = self._publisher
        return (
            publisher is not None
            and publisher.promised == digest
            and not (self._lost or self._writing)
            and not (self._channel and self._channel.ended)  # which the loop is about to see
            and self.outbox.is_idle
        )

    def can_read(self, snapshot: Snapshot) -> bool:
        """Whether the worker knows where this is."""
        slot, publisher = snapshot.slot, self._publisher
        return (
            slot is not None
            and publisher is not None
            and slot.segment.segment_id in publisher.announced
        )

    def can_see(self, snapshot: Snapshot) -> bool:
        """Whether nothing but naming this update is needed."""
        return (
            snapshot.state is FILLED
            and not snapshot.values
            and self.looks_for(snapshot.layout.digest)
            and self.can_read(snapshot)
        )

    def see(self, snapshot: Snapshot) -> None:
        """Name an update to the worker, which promised to look: it counts as applied."""
        slot, version = snapshot.slot, snapshot.version
        assert self._publisher is not None
        assert slot is not None
        if slot.locked:
            slot.seal(version, snapshot.layout.digest, snapshot.nbytes)
        self._publisher.store(slot, version)
        self.outbox.seen(version)
        self.received_version = version

    @property
    def wants_bell(self) -> bool:
        """Whether somebody there waits for what it was named."""
        publisher = self._publisher
        return publisher is not None and publisher.bell and self.is_behind

    @property
    def applied(self) -> int:
        """Newest version that the worker has taken, as far as it is known; 0 for none."""
        holds = 0 if self._publisher is None else self._publisher.holds
        return max(self.outbox.applied, holds)

    @property
    def visible(self) -> int:
        """Version that the worker uses from now on, or has; 0 for none."""
        return max(self.outbox.applied, self.outbox.visible)

    def ring(self) -> None:
        """Have the worker look now. What the link does not take is not said."""
        try:
            self.transport.send_nowait(Take(self.epoch, 0))
        except AiosyncError as exc:
            self.lose(exc)

    @property
    def is_behind(self) -> bool:
        """Whether the worker has not taken yet what it was named without a message."""
        return self._publisher is not None and self._publisher.holds < self.outbox.visible

    def ring_if_behind(self, now: float, first: float, longest: float) -> bool:
        """Ring the worker if it is time for that; less and less often while it does nothing.

        Returns:
            Whether it may have to be rung again.
        """
        if not self.is_behind or self._lost:
            self._ring_pause = 0.0
            return False
        holds = 0 if self._publisher is None else self._publisher.holds
        if not self._ring_pause or holds != self._rung_for:
            self._ring_pause, self._rung_at, self._rung_for = first, now, holds
        if now >= self._rung_at:
            self.ring()
            self._ring_pause = min(2 * self._ring_pause, longest)
            self._rung_at = now + self._ring_pause
        return True

    async def _write(self, snapshot: Snapshot, epoch: int) -> None:
        try:
            manifest, update = self._messages(snapshot, epoch)
            if self.stream is not None:
                self.stream.watch(snapshot.version)  # the manifest may be stuck, too
            if manifest is not None:
                await self.transport.send(manifest)
                self._digest = snapshot.layout.digest
            await self._ready(snapshot)
            if self.stream is not None:
                await self.stream.write(snapshot, epoch)
                await self._say_words()
            elif snapshot.slot is not None and self._publisher and not snapshot.values:
                await self._publisher.announce(snapshot.slot)
                self._store(self._publisher, snapshot)
                await self.transport.send(Take(epoch, snapshot.version))
            else:
                await self.transport.send(update, self._payload(snapshot))
        except AiosyncError as exc:
            self._failed(snapshot.version, exc, epoch)
        finally:
            snapshot.release()
            self._writing = False
        self._pump()

    async def _copied(self, snapshot: Snapshot) -> None:
        """Wait until the snapshot is made, unless the link sends only what is in place."""
        above = self.transport.follows_copies_above
        if above is None or snapshot.nbytes <= above:
            await snapshot.copied()

    @staticmethod
    def _payload(snapshot: Snapshot) -> list[memoryview]:
        return SharedPayload(snapshot.views(0, snapshot.nbytes), snapshot.memo)

    async def _read(self) -> None:
        try:
            self.transport.subscribe(self._on_message)
            while True:
                self._on_message(await self.transport.recv())
        except AiosyncError as exc:
            self.lose(exc)

    def _on_message(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Fetch):
            self.wanted = message.min_version
            self._on_fetch(self)
            return
        if isinstance(message, Promise):
            if self._publisher is not None:
                self._publisher.promised = message.digest or None
                if not message.digest:  # one that this does not reach looks on, in vain
                    self.transport.send_nowait(message)
            return
        if isinstance(message, Refuse):
            raise PeerClosed(f"{self.name} ended the link: {message.error_text}")
        if not isinstance(message, Ack):
            raise RemoteProtocolError(
                f"worker {self.worker_idx} sent {type(message).__name__} where only "
                "acknowledgements are expected"
            )
        if message.epoch == self.epoch and message.status is not AckStatus.NACK:
            self.received_version = max(self.received_version, message.version)
        outcomes = self.outbox.on_ack(message)
        self._answered()
        if outcomes:
            self._settle(outcomes)
        else:
            self._on_outcomes(self, ())  # some wait for no more than that it arrived
        self._pump()

    def _answered(self) -> None:
        if self.stream is not None and self.outbox.window_open:
            self.stream.answered()
