"""The sender's side of one link: what the worker has, what is on its way, and its two flows.

Writing happens at once where the link takes it and in a task where it does not; a second task
reads the acknowledgements. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiosync.errors import AiosyncError, LocalProtocolError, RemoteProtocolError
from aiosync.protocol import Outbox, Outcome
from aiosync.schemes._snapshots import Snapshot
from aiosync.schemes._tasks import TaskOwner
from aiosync.transports._link import without_frames
from aiosync.transports._publishing import SlotPublisher
from aiosync.transports.base import Again, Received, Transport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.types import AckStatus
from aiosync.wire import Ack, ManifestMessage, Message, Update

__all__ = ["Peer"]


class Peer:
    """One worker, as the sender sees it.

    Args:
        worker_idx: Index of the worker.
        transport: The link; closed by the owner of the peer.
        epoch: Epoch of the sender.
        has_target: The worker knows the module it applies to.
        tasks: Owner of the peer's tasks.
        on_outcomes: Told what became of versions.
        on_lost: Told once, when the link ends.
    """

    def __init__(
        self,
        worker_idx: int,
        transport: Transport,
        *,
        epoch: int,
        has_target: bool,
        tasks: TaskOwner,
        on_outcomes: Callable[[Peer, Sequence[Outcome]], None],
        on_lost: Callable[[Peer, AiosyncError], None],
    ) -> None:
        self.worker_idx = worker_idx
        self.transport = transport
        self.epoch = epoch
        self.has_target = has_target
        self.outbox = Outbox(epoch, worker_idx=worker_idx)
        self.received_version = 0
        self._tasks = tasks
        self._on_outcomes = on_outcomes
        self._on_lost = on_lost
        self._snapshots: dict[int, Snapshot] = {}  # pending ones, by version
        self._digest: bytes | None = None
        self._writing = False
        self._lost = False
        self._publisher: SlotPublisher | None = None
        if isinstance(transport, SharedMemTransport):
            self._publisher = transport.publisher

    def start(self) -> None:
        """Begin to read acknowledgements."""
        if isinstance(self.transport, SharedMemTransport):
            self.transport.take_no_segments()
        self._tasks.start(self._read(), f"aiosync acks of worker {self.worker_idx}")

    def offer(self, snapshot: Snapshot) -> None:
        """Make ``snapshot`` the next update of this worker; the newest wins."""
        if not (self._writing or self._lost) and self.outbox.offer_and_take(snapshot.version):
            self._send(snapshot.retain())
            return
        self._snapshots[snapshot.version] = snapshot.retain()
        self._settle(self.outbox.offer(snapshot.version))
        self._pump()

    def lose(self, error: AiosyncError) -> None:
        """The link is gone: everything on its way fails with ``error``."""
        if self._lost:
            return
        self._lost = True
        outcomes = self.outbox.close(without_frames(error))
        for version in list(self._snapshots):
            self._snapshots.pop(version).release()
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
        if self._writing or self._lost or not self.outbox.can_take:
            return
        self._send(self._snapshots.pop(self.outbox.take()))

    def _send(self, snapshot: Snapshot) -> None:
        """Write now, or in the background; takes over a reference."""
        try:
            taken = self._write_now(snapshot)
        except AiosyncError as exc:
            snapshot.release()
            self._failed(snapshot.version, exc)
            return
        if taken:
            snapshot.release()
            return
        self._writing = True
        self._tasks.start(self._write(snapshot), f"aiosync send to worker {self.worker_idx}")

    def _failed(self, version: int, error: AiosyncError) -> None:
        if isinstance(error, LocalProtocolError):  # it cannot be said; the link is as it was
            self._settle(self.outbox.give_up(version, error))
        else:
            self.lose(error)

    def _messages(self, snapshot: Snapshot) -> tuple[Message | None, Update]:
        digest = snapshot.layout.digest
        manifest = None
        if digest != self._digest:
            manifest = ManifestMessage(snapshot.layout.manifest)
        return manifest, Update(self.epoch, snapshot.version, digest, values=snapshot.values)

    def _write_now(self, snapshot: Snapshot) -> bool:
        slot, digest, publisher = snapshot.slot, snapshot.layout.digest, self._publisher
        if slot is not None and publisher and digest == self._digest and not snapshot.values:
            return publisher.publish_plain_nowait(
                self.epoch, snapshot.version, digest, slot, snapshot.nbytes
            )
        manifest, update = self._messages(snapshot)
        if manifest is not None:
            if not self.transport.send_nowait(manifest):
                return False
            self._digest = snapshot.layout.digest
        if slot is not None and publisher:
            return publisher.publish_nowait(update, slot, snapshot.nbytes)
        return self.transport.send_nowait(update, self._payload(snapshot))

    async def _write(self, snapshot: Snapshot) -> None:
        try:
            manifest, update = self._messages(snapshot)
            if manifest is not None:
                await self.transport.send(manifest)
                self._digest = snapshot.layout.digest
            if snapshot.slot is not None and self._publisher:
                await self._publisher.publish(update, snapshot.slot, snapshot.nbytes)
            else:
                await self.transport.send(update, self._payload(snapshot))
        except AiosyncError as exc:
            self._failed(snapshot.version, exc)
        finally:
            snapshot.release()
            self._writing = False
        self._pump()

    @staticmethod
    def _payload(snapshot: Snapshot) -> list[memoryview]:
        return [snapshot.payload()] if snapshot.nbytes else []

    async def _read(self) -> None:
        try:
            self.transport.subscribe(self._on_message)
            while True:
                self._on_message(await self.transport.recv())
        except AiosyncError as exc:
            self.lose(exc)

    def _on_message(self, received: Received) -> Again | None:
        message = received.message
        if not isinstance(message, Ack):
            raise RemoteProtocolError(
                f"worker {self.worker_idx} sent {type(message).__name__} where only "
                "acknowledgements are expected"
            )
        if message.epoch == self.epoch:
            self.received_version = max(self.received_version, message.version)
        outcomes = self.outbox.on_ack(message)
        if outcomes or self.has_target:
            self._settle(outcomes)
        else:
            self._on_outcomes(self, ())  # connect() waits for no more than that it arrived
        self._pump()
        if message.status is AckStatus.APPLIED and message.epoch == self.epoch:
            return self._on_applied
        return None

    def _on_applied(
        self, version: int, _payload: memoryview | None, _release: Callable[[], None]
    ) -> None:
        """The short way for what nearly every message is."""
        if version > self.received_version:
            self.received_version = version
        self._settle(self.outbox.on_applied(version))
        if self._snapshots:
            self._pump()
