"""One model of a weight server: its newest version, the trainer that brings it, its workers.

The epoch and version of the trainer are passed on as they are: a worker cannot tell whether it
got them from the trainer or from here. With a store a version is served once it is on disk: what
the disk refuses cannot be taken back from a worker that has it. Must not import the command line.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from aiosync.errors import AiosyncError, ConnectError, RemoteProtocolError, StaleVersion
from aiosync.protocol import Inbox, VersionClock
from aiosync.receiver.outgoing import Outgoing
from aiosync.receiver.updates import Staged, UpdateReader
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS, greet
from aiosync.sender import Snapshot, Streaming, WorkerRegistry
from aiosync.server.merging import Part, merged
from aiosync.server.store import StoredUpdate, WeightStore
from aiosync.transports._kept_errors import without_frames
from aiosync.transports.base import Received, make_ack
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus
from aiosync.wire import Hello, Refuse

__all__ = ["ServedModel"]


@dataclass(slots=True, eq=False)
class _Arrival:
    """A version that a trainer brought.

    Attributes:
        link: Who brought it, and is told what became of it.
        epoch: Its epoch.
        strategy: Name of the strategy that made it.
        snapshot: The version; a reference is held.
        overtaken: Versions of this link that waited for the disk, and that this one replaced.
    """

    link: TCPTransport
    epoch: int
    strategy: str
    snapshot: Snapshot
    overtaken: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def name(self) -> tuple[int, int]:
        """Epoch and version."""
        return self.epoch, self.snapshot.version


class ServedModel:
    """The newest version of one model, and everybody who has to do with it.

    Versions are written to the disk one at a time; what is replaced before its turn is not.

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
        self.workers: WorkerRegistry = WorkerRegistry(
            model_id=model_id,
            strategy=strategy,
            num_workers=None,
            clock=VersionClock(),
            on_outcome=None,
            on_crash=on_crash,
            streaming=streaming,
        )
        self._model_id = model_id
        self._store = store
        self._executor = executor
        self._session = secrets.token_bytes(16)
        self._inbox = Inbox()
        self._updates = UpdateReader()
        self._trainer: TCPTransport | None = None
        self._trainer_epoch: int | None = None
        self._answers: dict[TCPTransport, Outgoing] = {}
        self._here: tuple[int, int] | None = None  # epoch and version that are served
        self._next: _Arrival | None = None  # only the newest is worth writing, so one waits
        self._writing: asyncio.Task[None] | None = None
        self._ending = False
        self._updated_at: float | None = None  # seconds since the Unix epoch
        self._versions = 0  # complete ones that came
        self._received_nbytes = 0  # of these
        self._refusals = 0  # by the disk
        self._refusal: str | None = None  # the last one, until a version is stored again

    # -- what there is -------------------------------------------------------------------------

    @property
    def is_unused(self) -> bool:
        """Whether there is no version, not even on its way to the disk, no trainer, no worker."""
        workers = self.workers
        anybody = self._trainer is not None or workers.links or workers.arriving
        return not anybody and self._here is None and self._writing is None

    def restore(self, stored: StoredUpdate) -> None:
        """Serve what an earlier process kept on disk."""
        snapshot = Snapshot(
            stored.layout, stored.buffer, lambda: None, stored.values, stored.version
        )
        self._inbox.offer(stored.epoch, stored.version)
        self._publish(stored.epoch, stored.strategy, snapshot)
        self._updated_at = stored.saved_at

    def _publish(self, epoch: int, strategy: str, snapshot: Snapshot) -> None:
        """Serve a version; takes over a reference."""
        workers, version = self.workers, snapshot.version
        self._here = epoch, version
        workers.strategy = strategy
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
        self._updated_at = time.time()

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
                    f"{old.channel.name} is already pushing model {self._model_id!r}: end it "
                    "first, or push under another model_id"
                )
                await link.send(Refuse("ConnectError", str(error)), timeout=HANDSHAKE_SECONDS)
                await link.aclose()
                raise error
            old.abort()  # the same trainer: its old link broke in the middle
        if self.is_unused:
            self.workers.strategy = hello.strategy
        self._trainer, self._trainer_epoch = link, hello.epoch
        self._answers[link] = Outgoing(link, self.workers.tasks)
        # While an answer waits to be taken the kernel sends no keepalive probes.
        link.limit_untaken()
        try:
            # What is said to be here need not be sent again: what is being written may be soon.
            await self.drain()
            await greet(link, self._hello(), timeout=HANDSHAKE_SECONDS)
            # The two agree, or one of them takes any. What is served is not yet the trainer's.
            self.workers.history.parts = hello.parts
            if self._here is None:
                self.workers.strategy = hello.strategy
            self._updates.use_link(link)
            on_message = functools.partial(self._on_message, link, hello.strategy)
            link.subscribe(on_message)
            while True:
                on_message(await link.recv(into=self._updates.lender))
        except RemoteProtocolError as exc:
            link.channel.fail(exc)  # tells the trainer
            raise
        finally:
            if self._trainer is link:
                self._trainer = None
            del self._answers[link]
            link.abort()

    def _hello(self) -> Hello:
        partial, has = self._updates.partial or (None, None, 0), self._here or (None, None)
        return Hello(
            role="receiver",
            model_id=self._model_id,
            pid=os.getpid(),
            strategy=self.workers.strategy,
            session=self._session,
            epoch=has[0],
            version=has[1],
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
        )

    def _on_message(self, link: TCPTransport, strategy: str, received: Received) -> None:
        self._answers[link].check()
        staged = self._updates.read(received)
        if staged is not None:
            self._take(link, strategy, staged)

    def _take(self, link: TCPTransport, strategy: str, staged: Staged) -> None:
        name, inbox = (staged.epoch, staged.version), self._inbox
        if self._ending:
            staged.give_back()  # no answer: the trainer sees that the link ends
            return
        try:
            inbox.offer(*name)
        except StaleVersion as exc:
            if name == self._here:
                staged.give_back()
                self._say(link, name, AckStatus.APPLIED)
                return
            if name != (inbox.newest_epoch, inbox.newest):
                staged.give_back()
                self._say(link, name, AckStatus.NACK, exc)
                return
            # The disk refused it, and the trainer offers it again.
        self._versions += 1
        self._received_nbytes += staged.layout.nbytes
        snapshot = Snapshot(
            staged.layout, staged.flat, staged.give_back, dict(staged.values), staged.version
        )
        arrival = _Arrival(link, staged.epoch, strategy, snapshot)
        if self._store is None:
            self._serve(arrival)
            return
        self._say(link, name, AckStatus.RECEIVED)
        replaced, self._next = self._next, arrival
        if replaced is not None:
            replaced.snapshot.release()
            if replaced.link is link:
                arrival.overtaken = [*replaced.overtaken, replaced.name]
        if self._writing is None:
            self._writing = self.workers.tasks.start(self._write(self._store), "aiosync store")

    def _serve(self, arrival: _Arrival) -> None:
        self._publish(arrival.epoch, arrival.strategy, arrival.snapshot)
        self._say(arrival.link, arrival.name, AckStatus.APPLIED)

    def _say(
        self,
        link: TCPTransport,
        name: tuple[int, int],
        status: AckStatus,
        error: AiosyncError | None = None,
    ) -> None:
        answers = self._answers.get(link)
        if answers is not None:  # else it has gone; its next Hello is answered with what is here
            answers.say(make_ack(*name, status, error))

    # -- the disk ------------------------------------------------------------------------------

    async def _write(self, store: WeightStore) -> None:
        """Write the newest version, and serve it, until none waits."""
        try:
            while self._next is not None:
                arrival, self._next = self._next, None
                try:
                    await self._save(store, arrival)
                except AiosyncError as exc:  # what was served before is served on
                    arrival.snapshot.release()
                    epoch, version = arrival.name
                    self._refusals += 1
                    self._refusal = f"version {version} of epoch {epoch}: {exc}"
                    # Nothing newer made up for those that it replaced.
                    for name in (*arrival.overtaken, arrival.name):
                        self._say(arrival.link, name, AckStatus.NACK, without_frames(exc))
                except BaseException:  # cancelled, or a bug
                    arrival.snapshot.release()
                    raise
                else:
                    self._refusal = None
                    self._serve(arrival)
        finally:
            self._writing = None

    async def _save(self, store: WeightStore, arrival: _Arrival) -> None:
        """Write a version, with what it lacks of those before it."""
        older: Sequence[Snapshot] = []
        if self._here is not None and self._here[0] == arrival.epoch:
            older = self.workers.history.needed_before(-1, arrival.snapshot)
        kept = [snapshot.retain() for snapshot in (*older, arrival.snapshot)]

        def save() -> None:
            parts = [Part(each.layout, each.buffer, each.values) for each in kept]
            # An update of some names is no whole model.
            layout, buffer, values = parts[0] if len(parts) == 1 else merged(parts, store.limits)
            update = StoredUpdate(*arrival.name, arrival.strategy, layout, buffer, values)
            store.save(self._model_id, update)

        writing = asyncio.get_running_loop().run_in_executor(self._executor, save)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})  # its memory must not be reused meanwhile
            raise
        finally:
            for snapshot in kept:
                snapshot.release()

    async def drain(self) -> None:
        """Let the newest version reach the disk, or be refused."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

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
        if self._next is not None:
            self._next.snapshot.release()
            self._next = None
        self._updates.close()

    def describe(self) -> dict[str, Any]:
        """What ``aiosync status`` shows of this model."""
        chain, trainer = self.workers.history.for_worker(-1), self._trainer
        newest = chain[-1] if chain else None
        epoch, version = self._here or (0, 0)
        return {
            "model_id": self._model_id,
            "strategy": self.workers.strategy,
            "epoch": epoch,
            "version": version,
            "nbytes": 0 if newest is None else newest.nbytes,
            "tensors": 0 if newest is None else len(newest.layout.manifest.leaves),
            "updates": self._versions,
            "updated_at": self._updated_at,
            "trainer": None if trainer is None else trainer.channel.name,
            "received_nbytes": self._received_nbytes,
            "refused": self._refusals,
            "refusal": self._refusal,
            "workers": [
                {
                    "worker_idx": idx,
                    "name": link.name,
                    "pid": link.pid,
                    "version": link.applied,
                    "lag": max(0, version - link.applied),
                    "subscribes": link.subscribes,
                    "skipped": link.outbox.skipped,
                    "sent_nbytes": 0 if link.stream is None else link.stream.sent_nbytes,
                    "connected_seconds": round(link.age, 3),
                }
                for idx, link in self.workers.links.items()
            ],
        }
