"""One model of a weight server: its newest version, the trainer that brings it, its workers.

The epoch and version of the trainer are passed on as they are: a worker cannot tell whether it
got them from the trainer or from here. With a store a version is served once it is on disk: what
the disk refuses cannot be taken back from a worker that has it. Must not import the command line.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from aiosync.errors import AiosyncError, ConnectError, RemoteProtocolError, StaleVersion
from aiosync.protocol import Inbox, VersionClock
from aiosync.receiver.outgoing import Outgoing
from aiosync.receiver.updates import Staged, UpdateReader
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS, greet
from aiosync.sender import Snapshot, Streaming, WorkerRegistry
from aiosync.server._saving import Saver, Unsaved
from aiosync.server._store import StoredUpdate, WeightStore
from aiosync.transports.base import Received, make_ack
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus
from aiosync.wire import Hello, Message, Refuse

__all__ = ["ServedModel"]


class ServedModel:
    """The newest version of one model, and everybody who has to do with it.

    Args:
        model_id: Name of the model.
        strategy: Name of the strategy of whoever came first.
        streaming: How updates travel to workers.
        store: Where the newest version is kept across restarts; ``None`` for nowhere.
        executor: Where the store writes.
        on_crash: Told when a background task ends with an exception.
    """

    def __init__(
        self,
        model_id: str,
        strategy: str,
        *,
        streaming: Streaming,
        store: WeightStore | None,
        executor: Executor | None,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.model_id = model_id
        self.strategy = strategy
        self.updated_at: float | None = None  # seconds since the Unix epoch
        self.versions = 0  # complete ones that came
        self.workers = WorkerRegistry(
            model_id=model_id,
            strategy=strategy,
            num_workers=None,
            clock=VersionClock(),
            on_outcome=None,
            on_crash=on_crash,
            streaming=streaming,
        )
        self._saver = (
            None
            if store is None
            else Saver(
                store,
                model_id,
                executor,
                tasks=self.workers.tasks,
                needed_before=self._needed_before,
                saved=self._saved,
                refused=self._refused,
            )
        )
        self._session = secrets.token_bytes(16)
        self._inbox = Inbox()
        self._updates = UpdateReader()
        self._trainer: TCPTransport | None = None
        self._trainer_name = ""
        self._trainer_epoch: int | None = None
        self._answers: dict[TCPTransport, Outgoing] = {}
        self.received_nbytes = 0  # of complete versions
        self._here: tuple[int, int] | None = None  # epoch and version that are served
        self._trainer_strategy = strategy
        self._ending = False

    # -- what there is -------------------------------------------------------------------------

    @property
    def newest(self) -> Snapshot | None:
        """The newest complete version."""
        return self.workers.newest_for(-1)

    @property
    def is_unused(self) -> bool:
        """Whether there is no version, not even on its way to the disk, no trainer, no worker."""
        workers = self.workers
        anybody = self._trainer is not None or workers.links or workers.arriving
        saving = self._saver is not None and self._saver.is_busy
        return not anybody and self.newest is None and not saving

    def restore(self, stored: StoredUpdate) -> None:
        """Serve what an earlier process kept on disk."""
        snapshot = self._snapshot(stored, lambda: None)
        self._inbox.offer(stored.epoch, stored.version)
        self._publish(snapshot, stored)
        self.updated_at = stored.saved_at

    @staticmethod
    def _snapshot(update: StoredUpdate, free: Callable[[], None]) -> Snapshot:
        return Snapshot(update.layout, update.buffer, free, update.values, update.version)

    def _publish(self, snapshot: Snapshot, update: StoredUpdate) -> None:
        """Serve a version; takes over a reference."""
        epoch, version = self._here = update.epoch, update.version
        self.strategy = self.workers.strategy = update.strategy
        workers = self.workers
        if epoch != workers.clock.epoch:
            workers.clock = VersionClock(epoch)
            workers.history.clear()
            for link in workers.links.values():
                link.begin_epoch(epoch)
                if link.wanted is not None:
                    workers.waiting.add(link)
        workers.history.add(None, snapshot)
        for link in workers.links.values():
            if link.subscribes and not link.has(version):
                link.offer(snapshot)
        workers.answer_all()
        self.updated_at = time.time()

    # -- the trainer ---------------------------------------------------------------------------

    async def receive_from(self, link: TCPTransport, hello: Hello) -> None:
        """Take updates from a trainer until its link ends. Owns the link.

        Raises:
            ConnectError: Another trainer is connected; this one was told, and may try again.
        """
        old = self._trainer
        if old is not None and not old.channel.ended:
            if hello.epoch is None or hello.epoch != self._trainer_epoch:
                error = ConnectError(
                    f"{self._trainer_name} is already pushing model {self.model_id!r}: end it "
                    "first, or push under another model_id"
                )
                await link.send(Refuse("ConnectError", str(error)), timeout=HANDSHAKE_SECONDS)
                await link.aclose()
                raise error
            old.abort()  # the same trainer: its old link broke in the middle
        if self.is_unused:
            self.strategy = self.workers.strategy = hello.strategy
        self._trainer, self._trainer_name = link, link.channel.name
        self._trainer_epoch = hello.epoch
        self._answers[link] = Outgoing(link, self.workers.tasks)
        # While an answer waits to be taken the kernel sends no keepalive probes.
        link.limit_untaken()
        try:
            # What is said to be here need not be sent again: what is being written may be soon.
            await self.drain()
            partial, has = self._updates.partial or (None, None, 0), self._here
            await greet(
                link,
                Hello(
                    role="receiver",
                    model_id=self.model_id,
                    pid=os.getpid(),
                    strategy=self.strategy,
                    session=self._session,
                    epoch=None if has is None else has[0],
                    version=None if has is None else has[1],
                    partial_epoch=partial[0],
                    partial_version=partial[1],
                    partial_nbytes=partial[2],
                ),
                timeout=HANDSHAKE_SECONDS,
            )
            # The two agree, or one of them takes any. What is served is not yet the trainer's.
            self._trainer_strategy = hello.strategy
            self.workers.history.parts = hello.parts
            if self.newest is None:
                self.strategy = self.workers.strategy = hello.strategy
            self._updates.use_link(link)
            link.subscribe(lambda received: self._on_message(link, received))
            while True:
                self._on_message(link, await link.recv(into=self._updates.lender))
        except RemoteProtocolError as exc:
            link.channel.fail(exc)  # tells the trainer
            raise
        finally:
            if self._trainer is link:
                self._trainer = None
            del self._answers[link]
            link.abort()

    def _on_message(self, link: TCPTransport, received: Received) -> None:
        self._answers[link].check()
        staged = self._updates.read(received)
        if staged is not None:
            self._take(link, staged)

    def _take(self, link: TCPTransport, staged: Staged) -> None:
        epoch, version = staged.epoch, staged.version
        if self._ending:
            staged.give_back()  # no answer: the trainer sees that the link ends
            return
        try:
            self._inbox.offer(epoch, version)
        except StaleVersion as exc:
            newest = (self._inbox.newest_epoch, self._inbox.newest)
            if (epoch, version) == self._here:
                staged.give_back()
                self._say(link, make_ack(epoch, version, AckStatus.APPLIED, None))
                return
            if (epoch, version) != newest:
                staged.give_back()
                self._say(link, make_ack(epoch, version, AckStatus.NACK, exc))
                return
            # The disk refused it, and the trainer offers it again.
        self.versions += 1
        self.received_nbytes += staged.layout.nbytes
        update = StoredUpdate(
            epoch, version, self._trainer_strategy, staged.layout, staged.flat, dict(staged.values)
        )
        snapshot = self._snapshot(update, staged.give_back)
        if self._saver is None:
            self._publish(snapshot, update)
            self._say(link, make_ack(epoch, version, AckStatus.APPLIED, None))
            return
        self._say(link, make_ack(epoch, version, AckStatus.RECEIVED, None))
        self._saver.save_soon(Unsaved(link, snapshot, update))

    def _say(self, link: TCPTransport, message: Message) -> None:
        answers = self._answers.get(link)
        if answers is not None:  # else it has gone; its next Hello is answered with what is here
            answers.say(message)

    # -- the disk ------------------------------------------------------------------------------

    def _needed_before(self, unsaved: Unsaved) -> Sequence[Snapshot]:
        if self._here is None or self._here[0] != unsaved.update.epoch:
            return []
        return self.workers.history.needed_before(-1, unsaved.snapshot)

    def _saved(self, unsaved: Unsaved) -> None:
        self._publish(unsaved.snapshot, unsaved.update)
        epoch, version = unsaved.update.epoch, unsaved.update.version
        self._say(unsaved.link, make_ack(epoch, version, AckStatus.APPLIED, None))

    def _refused(self, unsaved: Unsaved, error: AiosyncError) -> None:
        """What was served before is served on; the trainer is told."""
        here = (unsaved.update.epoch, unsaved.update.version)
        for epoch, version in (*unsaved.overtaken, here):  # nothing newer made up for those
            self._say(unsaved.link, make_ack(epoch, version, AckStatus.NACK, error))

    async def drain(self) -> None:
        """Let the newest version reach the disk, or be refused."""
        if self._saver is not None:
            await self._saver.drain()

    def end(self) -> None:
        """Take no more versions: a trainer that never pauses must not keep :meth:`drain` busy."""
        self._ending = True

    async def aclose(self) -> None:
        """Close every link of this model."""
        self._ending = True
        if self._trainer is not None:
            self._trainer.abort()
        self.workers.end()
        await self.workers.tasks.aclose()
        if self._saver is not None:
            self._saver.close()
        self._updates.close()

    def describe(self) -> dict[str, Any]:
        """What ``aiosync status`` shows of this model."""
        newest = self.newest
        return {
            "model_id": self.model_id,
            "strategy": self.strategy,
            "epoch": 0 if newest is None else self.workers.clock.epoch,
            "version": 0 if newest is None else newest.version,
            "nbytes": 0 if newest is None else newest.nbytes,
            "tensors": 0 if newest is None else len(newest.layout.manifest.leaves),
            "updates": self.versions,
            "updated_at": self.updated_at,
            "trainer": None if self._trainer is None else self._trainer_name,
            "received_nbytes": self.received_nbytes,
            "refused": 0 if self._saver is None else self._saver.refusals,
            "refusal": None if self._saver is None else self._saver.refusal,
            "workers": [
                {
                    "worker_idx": idx,
                    "name": link.name,
                    "pid": link.pid,
                    "version": link.applied,
                    "lag": 0 if newest is None else max(0, newest.version - link.applied),
                    "subscribes": link.subscribes,
                    "skipped": link.outbox.skipped,
                    "sent_nbytes": 0 if link.stream is None else link.stream.sent_nbytes,
                    "connected_seconds": round(link.age, 3),
                }
                for idx, link in self.workers.links.items()
            ],
        }
