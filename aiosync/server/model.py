"""One model of a weight server: its newest version, the trainer that brings it, its workers.

The epoch and version of the trainer are passed on as they are: a worker cannot tell whether it
got them from the trainer or from here. With a store a version is served once it is on disk: what
the disk refuses cannot be taken back from a worker that has it. Must not import the command line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from aiosync._log import log
from aiosync._meter import Meter
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
    StaleVersion,
)
from aiosync.events import SyncOutcome, SyncStats
from aiosync.receiver.updates import Outgoing, Staged, UpdateReader
from aiosync.rendezvous.handshake import ANY_STRATEGY, HANDSHAKE_SECONDS, greet
from aiosync.sender import Snapshot, Streaming, WorkerRegistry
from aiosync.server.store import StoredUpdate, WeightStore
from aiosync.tensors.buffer import merged
from aiosync.transports.base import make_ack, without_frames
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus
from aiosync.wire import Hello

__all__ = ["ServedModel"]


class _Arrival(NamedTuple):
    """A version that a trainer brought, and who is told what became of it."""

    answers: Outgoing
    epoch: int
    strategy: str
    snapshot: Snapshot  # a reference is held

    def say(self, status: AckStatus, error: AiosyncError | None = None) -> None:
        """Tell the trainer; one that has gone is answered with what is here, by the next Hello."""
        self.answers.say(make_ack(self.epoch, self.snapshot.version, status, error))


class ServedModel:
    """The newest version of one model, and everybody who has to do with it.

    Versions are written to the disk one at a time; what is replaced before its turn is not.

    Args:
        model_id: Name of the model.
        streaming: How updates travel to workers.
        store: Where the newest version is kept across restarts; ``None`` for nowhere.
        on_crash: Told when a background task ends with an exception.
        note: What workers are told while there is no version.

    Attributes:
        workers: Those that have it, or wait for it.
        trainer: The link of whoever brings it now.
        version: Number of the version that is served; 0 for none.
    """

    def __init__(
        self,
        model_id: str,
        *,
        streaming: Streaming,
        store: WeightStore | None,
        on_crash: Callable[[BaseException], None],
        note: Callable[[], str],
    ) -> None:
        self.workers: WorkerRegistry = WorkerRegistry(
            model_id=model_id,
            strategy=ANY_STRATEGY,
            num_workers=None,
            on_outcome=None,
            on_crash=on_crash,
            streaming=streaming,
        )
        self.workers.note = note
        self._meter = Meter("server", model_id, "tcp")
        self.trainer: TCPTransport | None = None
        self.version: int = 0
        self._epoch: int | None = None  # of what is served
        self._model_id = model_id
        self._store = store
        self._session = secrets.token_bytes(16)
        self._updates = UpdateReader()
        self._trainer_epoch: int | None = None
        self._next: _Arrival | None = None  # only the newest is worth writing, so one waits
        self._writing: asyncio.Task[None] | None = None
        self._ending = False
        self._updated_at: float | None = None  # seconds since the Unix epoch
        self._versions = 0  # complete ones that came
        self._refusal: str | None = None  # the disk's last one, until a version is stored again

    # -- what there is -------------------------------------------------------------------------

    @property
    def is_brought(self) -> bool:
        """Whether there is a version, or one on its way to the disk, or a trainer."""
        return bool(self.version) or self.trainer is not None or self._writing is not None

    @property
    def is_unused(self) -> bool:
        """Whether there is none of these, nor a worker that waits."""
        return not (self.is_brought or self.workers.links or self.workers.arriving)

    def restore(self, stored: StoredUpdate) -> None:
        """Serve what an earlier process kept on disk."""
        snapshot = Snapshot(
            stored.layout, stored.buffer, lambda: None, stored.values, stored.version
        )
        self._publish(stored.epoch, stored.strategy, snapshot)
        self._updated_at = saved_at = stored.saved_at or time.time()
        self._meter.mark(stored.version, time.perf_counter() - (time.time() - saved_at))

    def _publish(self, epoch: int, strategy: str, snapshot: Snapshot) -> None:
        """Serve a version; takes over a reference."""
        workers = self.workers
        self._epoch, self.version = epoch, snapshot.version
        workers.strategy = strategy
        if epoch != workers.epoch:
            workers.epoch, workers.version = epoch, 0
            workers.history.clear()
            for link in workers.links.values():
                link.begin_epoch(epoch)
        workers.history.add(None, snapshot)
        for link in workers.links.values():
            if link.hello.subscribe and link.outbox.newest < snapshot.version:
                link.offer(snapshot)
        workers.answer_all()
        self._meter.mark(snapshot.version, time.perf_counter())
        self._updated_at = time.time()

    # -- the trainer ---------------------------------------------------------------------------

    def check_trainer(self, hello: Hello) -> None:
        """Find out whether somebody who wants to push may.

        Raises:
            ConnectError: Another trainer is connected; this one may try again.
        """
        old = self.trainer
        if old is None or old.channel.ended:
            return
        if hello.epoch is None or hello.epoch != self._trainer_epoch:
            raise ConnectError(
                f"{old.channel.name} is already pushing model {self._model_id!r}: end it "
                "first, or push under another model_id"
            )

    async def receive_from(self, link: TCPTransport, hello: Hello) -> None:
        """Take updates from a trainer that passed the check until its link ends. Owns the link."""
        if self.trainer is not None:
            self.trainer.abort()  # the same trainer's: it broke in the middle
        self.trainer, self._trainer_epoch = link, hello.epoch
        # While an answer waits to be taken the kernel sends no keepalive probes.
        link.limit_untaken()
        answers, updates = Outgoing(link, self.workers.tasks), self._updates
        try:
            # What is said to be here need not be sent again: what is being written may be soon.
            await self.drain()
            await greet(link, self._hello(), timeout=HANDSHAKE_SECONDS)
            # The two agree, or one of them takes any. What is served is not yet the trainer's.
            self.workers.history.parts = hello.parts
            if not self.version:
                self._agree_on(hello.strategy)
            updates.use_link(link)
            while True:
                staged = updates.read(await link.recv(into=updates.lender))
                answers.check()
                if staged is not None:
                    self._take(answers, hello.strategy, staged)
        except RemoteProtocolError as exc:
            link.channel.fail(exc)  # tells the trainer
            raise
        finally:
            if self.trainer is link:
                self.trainer = None
            link.abort()

    def _agree_on(self, strategy: str) -> None:
        """Have workers that came first with another strategy dial again: they are told then."""
        self.workers.strategy = strategy
        for link in self.workers.links.values():
            if link.hello.strategy != strategy and ANY_STRATEGY not in (
                link.hello.strategy,
                strategy,
            ):
                link.lose(ConfigError(f"the trainer's strategy is {strategy!r}"))
                link.transport.abort()

    def _hello(self) -> Hello:
        partial = self._updates.partial or (None, None, 0)
        return Hello(
            role="receiver",
            model_id=self._model_id,
            pid=os.getpid(),
            strategy=self.workers.strategy if self.version else ANY_STRATEGY,
            session=self._session,
            epoch=self._epoch,
            version=self.version or None,
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
        )

    def _take(self, answers: Outgoing, strategy: str, staged: Staged) -> None:
        if self._ending:
            return  # no answer: the trainer sees that the link ends
        layout, values = staged.layout, dict(staged.values)
        snapshot = Snapshot(layout, staged.flat, staged.give_back, values, staged.version)
        snapshot.trace = staged.trace
        arrival = _Arrival(answers, staged.epoch, strategy, snapshot)
        self._versions += 1
        if self._store is None:
            if self._is_news(arrival):
                self._serve(arrival)
            return
        arrival.say(AckStatus.RECEIVED)
        if self._next is not None:
            self._end(self._next, "skipped", AckStatus.SKIPPED)
            self._next.snapshot.release()
        self._next = arrival
        if self._writing is None:
            self._writing = self.workers.tasks.start(self._write(self._store), "aiosync store")

    def _is_news(self, arrival: _Arrival) -> bool:
        """Whether a version is newer than what is served; its trainer is told where it is not."""
        version = arrival.snapshot.version
        if self._epoch != arrival.epoch or version > self.version:
            return True
        arrival.snapshot.release()
        if version == self.version:
            arrival.say(AckStatus.APPLIED)
        else:
            stale = f"version {version} is not newer than version {self.version}, which is served"
            arrival.say(AckStatus.NACK, StaleVersion(stale))
        return False

    def _end(
        self,
        arrival: _Arrival,
        outcome: SyncOutcome,
        status: AckStatus,
        error: AiosyncError | None = None,
    ) -> None:
        version, nbytes = arrival.snapshot.version, arrival.snapshot.nbytes
        self._meter.ended(outcome, arrival.epoch, version, 0.0, {}, nbytes)
        arrival.say(status, error)

    def _serve(self, arrival: _Arrival) -> None:
        self._publish(arrival.epoch, arrival.strategy, arrival.snapshot)
        self._end(arrival, "ok", AckStatus.APPLIED)

    # -- the disk ------------------------------------------------------------------------------

    async def _write(self, store: WeightStore) -> None:
        """Write the newest version, and serve it, until none waits."""
        try:
            while self._next is not None:
                arrival, self._next = self._next, None
                if not self._is_news(arrival):
                    continue
                try:
                    await self._save(store, arrival)
                except AiosyncError as exc:  # what was served before is served on
                    self._end(arrival, "refused", AckStatus.NACK, without_frames(exc))
                    number = self._meter.finished["refused"]
                    self._refusal = (
                        f"not stored, so refused and not served ({number} so far): "
                        f"version {arrival.snapshot.version} of epoch {arrival.epoch}: {exc}"
                    )
                    log(logging.WARNING, "refused", self._refusal, model=self._model_id)
                    arrival.snapshot.release()
                else:
                    self._refusal = None
                    self._serve(arrival)
        finally:
            self._writing = None

    async def _save(self, store: WeightStore, arrival: _Arrival) -> None:
        """Write a version, with what it lacks of those before it; none changes meanwhile."""
        older, history = list[Snapshot](), self.workers.history
        if self._epoch == arrival.epoch:
            older = history.needed_before(history.for_worker(-1), arrival.snapshot)
        newest = arrival.snapshot

        def save() -> None:
            layout, buffer, values = newest.layout, newest.buffer, newest.values
            if older:  # an update of some names is no whole model
                layout, buffer, values = merged([*older, newest], store.limits)
            epoch, version = arrival.epoch, arrival.snapshot.version
            update = StoredUpdate(epoch, version, arrival.strategy, layout, buffer, values)
            store.save(self._model_id, update)

        await asyncio.to_thread(save)

    async def drain(self) -> None:
        """Let the newest version reach the disk, or be refused."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def aclose(self) -> None:
        """Let the newest version reach the disk, and then close every link."""
        self._ending = True  # a trainer that never pauses must not keep the disk busy
        try:
            await self.drain()
        finally:
            if self.trainer is not None:
                self.trainer.abort()
            self.workers.end()
            await self.workers.tasks.aclose()
            self._updates.close()

    def stats(self) -> SyncStats:
        """How it stands, on any thread."""
        version, workers, updated_at = self.version, self.workers, self._updated_at
        found = workers.stats(version, self._meter.age)
        return self._meter.stats(
            under_way=lambda: self._writing is not None,
            epoch=self._epoch or 0,
            version=version,
            newest_version=version,
            lag=max((each.lag for each in found if each.state in ("ready", "lagging")), default=0),
            age=0.0 if updated_at is None else max(0.0, time.time() - updated_at),
            workers=found,
            **workers.counts,
        )

    def describe(self) -> dict[str, Any]:
        """What ``aiosync status`` shows of this model."""
        newest = next(reversed(self.workers.history.for_worker(-1).snapshots()), None)
        return {
            "model_id": self._model_id,
            "strategy": self.workers.strategy,
            "epoch": self._epoch or 0,
            "version": self.version,
            "nbytes": 0 if newest is None else newest.nbytes,
            "tensors": 0 if newest is None else len(newest.layout.manifest.leaves),
            "updates": self._versions,
            "updated_at": self._updated_at,
            "trainer": None if self.trainer is None else self.trainer.channel.name,
            "refused": self._meter.finished["refused"],
            "refusal": self._refusal,
            "workers": [
                {
                    "worker_idx": idx,
                    "name": link.name,
                    "pid": link.hello.pid,
                    "version": link.applied,
                    "lag": max(0, self.version - link.applied),
                    "subscribes": link.hello.subscribe,
                    "skipped": link.outbox.skipped,
                    "sent_nbytes": link.sent_nbytes,
                    "connected_seconds": round(time.monotonic() - link.since, 3),
                }
                for idx, link in self.workers.links.items()
            ],
        }
