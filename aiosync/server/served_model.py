"""One model of a weight server: its newest version, its trainer or upstream, and its workers.

An update is passed on while it arrives, but for its last chunk, which waits until the server serves
the version. With a store, that is once it is on disk, because a version that the disk refuses could
not be taken back from a worker. On its way an update is

- partial, while chunks are missing: the reader has its memory;
- early, if workers get the verified part: a snapshot of the same memory, with its progress;
- an arrival, once it is whole: with a store it waits for the disk;
- served, or discarded for a newer one, for another run's, or as the disk refused it.

Must not import the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from aiosync._log import log
from aiosync._meter import Meter
from aiosync._tasks import Newest, work_in_thread
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
    StaleVersion,
    TransportClosed,
)
from aiosync.events import SyncOutcome, SyncStats
from aiosync.receiver.answers import Outgoing
from aiosync.receiver.update_reader import Staged, UpdateReader
from aiosync.rendezvous.handshake import (
    ANY_STRATEGY,
    HANDSHAKE_SECONDS,
    SentOn,
    greet,
    is_same_strategy,
)
from aiosync.sender import Snapshot, Streaming, WorkerRegistry
from aiosync.sender.incoming import Incoming
from aiosync.server.fan_out import FanOut
from aiosync.server.store import StoredUpdate, WeightStore
from aiosync.tensors.joining import check_joined, joined_size
from aiosync.transports.base import make_ack, without_frames
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Limits
from aiosync.wire import MAX_PATH, Ack, Hello, Leave, Refuse, Update, Welcome

__all__ = ["ServedModel", "refuse_link"]

_MAX_REPLACED = 256
# Shortest time between two reports to the upstream about the workers here.
_REPORT_SECONDS = 0.25
_REPLACED = (
    "another run has replaced this one at the weight server: construct a new scheme to begin a "
    "new run, or this one with take_over=True to have it come back"
)


class _Arrival(NamedTuple):
    """A version that a trainer pushed, and the queue of acks to that trainer."""

    answers: Outgoing
    epoch: int
    strategy: str
    snapshot: Snapshot  # this arrival holds a reference

    # Returns True if the trainer may send the next update as a delta to this epoch and version.
    is_base: Callable[[int, int], bool]

    def say(self, status: AckStatus, error: AiosyncError | None = None) -> None:
        """Send an ack for this version to the trainer.

        If the link has ended, the ack is lost: the server's next Hello names the version that the
        server has.
        """
        epoch, version = self.epoch, self.snapshot.version
        is_base = self.is_base(epoch, version)
        self.answers.say(make_ack(epoch, version, status, error, is_base=is_base))


class ServedModel:
    """The newest version of one model, with its trainer and its workers.

    Versions are written to the disk one at a time. A version that a newer one replaces before its
    turn is not written.

    Args:
        model_id: Name of the model.
        streaming: Options for the updates to workers.
        store: Store that keeps the newest version across restarts; ``None`` for none.
        on_crash: Called with the exception that ends a background task.
        note: Returns the text that workers get while there is no version.
        fan_out: Decides which workers are admitted.

    Attributes:
        workers: The workers that have a version, or wait for one.
        fan_out: As given.
        trainer: The link of the trainer that pushes the model now; ``None`` for none.
        replaced: Epochs of runs that other runs have replaced, oldest first; the last 256.
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
        fan_out: FanOut,
    ) -> None:
        self.fan_out: FanOut = fan_out
        self.workers: WorkerRegistry = WorkerRegistry(
            model_id=model_id,
            strategy=ANY_STRATEGY,
            num_workers=None,
            on_outcome=None,
            on_crash=on_crash,
            streaming=streaming,
        )
        self.workers.admission.note = note
        self._meter = Meter("server", model_id, "tcp")
        self.trainer: TCPTransport | None = None
        self.version: int = 0
        self.replaced: tuple[int, ...] = ()
        self._model_id = model_id
        self._store = store
        self._session = secrets.token_bytes(16)
        self.workers.admission.path = (_mark_of(self._session),)
        self._updates = UpdateReader(takes_deltas=streaming.delta != "off")
        # Held while a chunk is decoded and read.
        self._reading = asyncio.Lock()
        self._early: Snapshot | None = None  # the update that is passed on while it arrives
        self._trainer_epoch: int | None = None
        # Epochs of the trainers that were accepted since the served epoch last changed.
        self._let_in: tuple[int, ...] = ()
        self._to_write: Newest[_Arrival] = Newest(self._write, self.workers.tasks, "aiosync store")
        self._ending = False
        self._updated_at: float | None = None  # seconds since the Unix epoch
        self._versions = 0  # number of complete versions that trainers pushed
        # Text about the last version that was refused, until a version is served.
        self._refusal: str | None = None

    # -- the served version --------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        """Epoch of the served version; 0 if there is none."""
        return self.workers.epoch if self.version else 0

    @property
    def is_brought(self) -> bool:
        """True if there is a version, or one on its way to the disk, or a trainer.

        Only such a model counts among the ``max_models`` of the server.
        """
        return bool(self.version) or self.trainer is not None or self._to_write.is_busy

    @property
    def is_unused(self) -> bool:
        """True if there is no version, no trainer and no worker, so that the server may drop it."""
        return not (self.is_brought or self.workers.links or self.workers.admission.arriving)

    def restore(self, stored: StoredUpdate) -> None:
        """Serve the version that an earlier process stored on disk."""
        self.replaced = stored.replaced
        snapshot = Snapshot(
            stored.layout, stored.buffer, lambda: None, stored.values, stored.version
        )
        self._publish(stored.epoch, stored.strategy, snapshot, stored.saved_at or time.time())

    # -- the servers above and below -----------------------------------------------------------

    def admit(self, link: TCPTransport, hello: Hello) -> None:
        """Count a worker that subscribes, or raise the error that sends it away.

        Raises:
            SentOn: Servers that follow this one have room for it.
            ConnectError: It is a server that this one follows, so that none would get versions; or
                a server that would be one too many in a row.
        """
        path = self.workers.admission.path
        # A server without an upstream follows nobody, whatever it followed before: then only its
        # own mark, the last one, counts.
        above = path if self.trainer is not None else path[-1:]
        if _mark_of(hello.session) in above or (_is_server(hello) and len(path) == MAX_PATH):
            raise ConnectError(
                "this server gets its versions from the one that asks, or there are too many in a "
                "row: it has to follow another one"
            )
        # Workers are sent on to no server that lacks weights which are here.
        linked = self.workers.links.values()
        ready = {each.transport for each in linked if each.applied or not self.version}
        self.fan_out.admit(link, hello, ready)

    def _follow_path(self, path: tuple[bytes, ...]) -> None:
        """Note which servers are above; if they have changed, have the servers below dial again.

        When they dial, the answer names the servers above this one. A server admits none of those
        that are above itself, so that servers never stand in a circle.

        Args:
            path: The marks of the servers above, from the first one to the upstream.
        """
        admission = self.workers.admission
        before, own = admission.path, _mark_of(self._session)
        admission.path = (*path, own)
        if admission.path == before:
            return
        for link in [*self.workers.links.values()]:
            if _is_server(link.hello):
                link.lose(ConnectError("this server has another upstream"))
                link.transport.abort()
        # A server in its handshake may have been told the servers of before. Which of these are
        # workers is not known yet: they dial again, too.
        for transport in [*admission.arriving]:
            transport.abort()

    # -- the newest version --------------------------------------------------------------------

    def _publish(self, epoch: int, strategy: str, snapshot: Snapshot, updated_at: float) -> None:
        """Serve a version to every worker; takes over the caller's reference to the snapshot."""
        workers, incoming = self.workers, snapshot.incoming
        # Workers of another strategy must not get the last chunk.
        self._agree_on(strategy)
        if incoming is not None:
            snapshot.incoming = None
            # Workers that got it while it arrived now get its last chunk.
            incoming.serve()
        self.replaced = self._replaced_by(epoch)
        self.version = snapshot.version
        if epoch != workers.epoch:
            # These trainers are among the replaced ones now.
            self._let_in = ()
            workers.epoch, workers.version = epoch, 0
            workers.history.clear()
            if workers.deltas is not None:
                workers.deltas.close()  # versions of another epoch are no bases
            for link in workers.links.values():
                link.begin_epoch(epoch)
            # Workers that went have no version of this run.
            for record in workers.records.values():
                record.had = 0
        # None stands for all workers.
        workers.history.add({None: snapshot})
        for link in workers.links.values():
            if link.hello.subscribe and link.outbox.newest < snapshot.version:
                link.offer(snapshot)
            # The worker may have asked for a version that was not here yet.
            workers.answer(link)
        self._meter.mark(snapshot.version, time.perf_counter() - (time.time() - updated_at))
        self._updated_at = updated_at
        workers.changed.notify()

    def _replaced_by(self, epoch: int) -> tuple[int, ...]:
        """Return the epochs of replaced runs once a version of ``epoch`` is served."""
        if epoch == self._epoch:
            return self.replaced
        # Trainers that were let in, and of which no version was served, are replaced as well.
        others = dict.fromkeys((*self.replaced, self._epoch, *self._let_in))
        return tuple(each for each in others if each not in (0, epoch))[-_MAX_REPLACED:]

    # -- the trainer ---------------------------------------------------------------------------

    def _check_not_replaced(self, hello: Hello) -> None:
        """Raise ConfigError for a trainer whose run was replaced, unless it may take over."""
        if hello.epoch in self.replaced and not hello.take_over:
            raise ConfigError(_REPLACED)

    def check_trainer(self, hello: Hello) -> None:
        """Check that a trainer may push this model now.

        Raises:
            ConfigError: Another run has replaced that of this trainer, and the trainer was made
                without ``take_over=True``.
            ConnectError: Another trainer is connected; this one may try again.
        """
        self._check_not_replaced(hello)
        old = self.trainer
        if old is None or old.channel.ended:
            return
        # The same trainer may dial again before its old link is known to have ended.
        if hello.epoch is None or hello.epoch != self._trainer_epoch:
            raise ConnectError(
                f"{old.channel.name} is already pushing model {self._model_id!r}: end it "
                "first, or push under another model_id"
            )

    async def receive_from(self, link: TCPTransport, hello: Hello) -> None:
        """Receive updates from a trainer until its link ends. Owns the link.

        The trainer has to have passed :meth:`check_trainer`.
        """
        if self.trainer is not None:
            self.trainer.abort()  # the broken link of the same trainer
        self.trainer, self._trainer_epoch = link, hello.epoch
        try:
            # A thread may still decode a chunk of the old link, into memory that both links use.
            async with self._reading:
                pass
            own_hello = await self.hello()
            try:  # the version that was being written may belong to another run
                self._check_not_replaced(hello)
            except ConfigError as exc:
                await refuse_link(link, exc)
                raise
            self._let_in = (*self._let_in, hello.epoch or 0)[-_MAX_REPLACED:]
            await greet(link, own_hello, timeout=HANDSHAKE_SECONDS)
            # greet() has made sure that the strategies match, or that one side takes any. A version
            # that is served already may be of another run, so its strategy stays.
            self.workers.history.parts = hello.parts
            if not self.version:
                self._agree_on(hello.strategy)
            await self._receive(link, hello.strategy)
        except RemoteProtocolError as exc:
            link.channel.fail(exc)  # the channel tells the trainer the error
            raise
        finally:
            self._end_link(link)

    async def follow(self, link: TCPTransport, welcome: Welcome) -> None:
        """Take versions of an upstream, which has let this server in, until its link ends."""
        self.trainer = link
        self._follow_path(welcome.path)
        # The upstream does not say if its trainer sends updates of some names.
        self.workers.history.parts = True
        try:
            await self._receive(link, ANY_STRATEGY)
        except RemoteProtocolError as exc:
            link.channel.fail(exc)  # the channel tells the upstream the error
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(AiosyncError):
                link.send_nowait(Leave())  # so that this server does not count as lost there
            raise
        finally:
            self._end_link(link)

    async def _report_workers(self, answers: Outgoing) -> None:
        """Report to the other side, at each change, the workers here and their oldest version.

        It ignores the rest of these acks, as their versions were acknowledged before.
        """
        reported = None
        while True:
            news = self._epoch, self.workers.behind
            if self.version and news != reported:
                reported = news
                answers.say(Ack(self._epoch, self.version, AckStatus.RECEIVED, behind=news[1]))
            await self.workers.changed.wait()
            await asyncio.sleep(_REPORT_SECONDS)

    def _end_link(self, link: TCPTransport) -> None:
        """End a link to a trainer or the upstream; one that replaced it meanwhile stays."""
        if self.trainer is link:
            self.trainer = None
        link.abort()

    async def _receive(self, link: TCPTransport, strategy: str) -> None:
        """Take every update that arrives over a link, and raise the error that ends it."""
        tasks = self.workers.tasks
        answers = Outgoing(link, tasks)
        reports = tasks.start(self._report_workers(answers), "aiosync reports")
        try:
            await self._receive_updates(link, strategy, answers)
        finally:
            tasks.cancel(reports)

    async def _receive_updates(self, link: TCPTransport, strategy: str, answers: Outgoing) -> None:
        """Read from a link for ever; pass on each chunk, and take each update once it is whole."""
        # The kernel sends no keepalive probes while an answer waits for the trainer to take it, so
        # that wait needs a limit of its own.
        link.limit_untaken()
        updates = self._updates
        updates.use_link(link)
        # The trainer is told to which update its next one may be a delta.
        epoch, version = updates.base
        if version:
            answers.say(Ack(epoch, version, AckStatus.RECEIVED, is_base=True))
        while True:
            received = await link.recv(into=updates.lender)
            async with self._reading:
                # Another link may have replaced this one before this task went on.
                if self.trainer is not link:
                    raise TransportClosed("the trainer has dialled again over another link")
                work = updates.heavy_work(received)
                if work is not None:
                    await work_in_thread(work)
                staged = updates.read(received)
            answers.check()
            if staged is not None:
                self._take(answers, strategy, staged, link.channel.limits)
            elif isinstance(received.message, Update):
                self._pass_on()

    def _agree_on(self, strategy: str) -> None:
        """Adopt the trainer's strategy; end the links of workers that have another one.

        Those workers dial again, and the handshake tells them that their strategy is wrong.
        """
        self.workers.admission.strategy = strategy
        for link in self.workers.links.values():
            if not is_same_strategy(link.hello.strategy, strategy):
                link.lose(ConfigError(f"the trainer's strategy is {strategy!r}"))
                link.transport.abort()

    async def hello(self, *, is_upstream: bool = False) -> Hello:
        """Return the message that tells a trainer or an upstream what is here."""
        # The other side does not send again the version that the Hello names, so the version that
        # is being written should be on disk before the Hello.
        await self.drain()
        strategy = self.workers.admission.strategy
        partial = self._updates.partial or (None, None, 0, b"")
        # An upstream takes a subscriber with ANY_STRATEGY for a server. A trainer's strategy has to
        # match that of the served version.
        return Hello(
            role="receiver",
            model_id=self._model_id,
            pid=os.getpid(),
            strategy=ANY_STRATEGY if is_upstream or not self.version else strategy,
            session=self._session,
            epoch=self._epoch or None,
            version=self.version or None,
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
            partial_digest=partial[3],
        )

    def _take(self, answers: Outgoing, strategy: str, staged: Staged, limits: Limits) -> None:
        """Serve an update that has arrived whole; with a store, have it written to disk first."""
        if self._ending:
            return  # without an ack: the trainer sees that the link ends
        early, values = self._early, dict(staged.values)
        # Memory that was passed on is used for no other update. So if this update is in it, this is
        # the one that was passed on.
        if early is not None and early.buffer is staged.flat:
            self._early, snapshot = None, early
            snapshot.values = values
            assert early.incoming is not None
            early.incoming.advance(early.nbytes)
        else:
            self._discard_early()
            layout, flat = staged.layout, staged.flat
            snapshot = Snapshot(layout, flat, staged.give_back, values, staged.version)
        snapshot.trace = staged.trace
        arrival = _Arrival(answers, staged.epoch, strategy, snapshot, self._is_base)
        self._versions += 1
        if self._store is None:
            if self._is_news_or_answer(arrival):
                try:
                    check_joined(self._whole(arrival), limits)
                except AiosyncError as exc:
                    self._refuse(arrival, exc)
                else:
                    self._serve(arrival)
            return
        arrival.say(AckStatus.RECEIVED)
        old = self._to_write.begin(arrival)
        if old is not None:
            self._end(old, "skipped", AckStatus.SKIPPED)
            self._discard(old.snapshot)

    def _pass_on(self) -> None:
        """Give the part of an update that has arrived to workers that wait for no other one.

        Their last chunk waits until the whole is served.
        """
        partial, workers, early = self._updates.partial, self.workers, self._early
        if partial is None or not self._may_pass_on(*partial[:2]):
            return
        _, version, nbytes, _ = partial
        links = [each for each in workers.links.values() if each.is_free_for(version)]
        # Also if no worker begins now: those that began before learn how much has arrived.
        if links or early is not None:
            early = self._share_early(version, nbytes)
        if early is not None:
            for link in links:
                link.offer(early)

    def _may_pass_on(self, epoch: int, version: int) -> bool:
        """Return True if workers may get the version before the whole of it is served."""
        # Links change to another epoch only when a whole version of it is served.
        return not self._ending and epoch == self._epoch and version > self.version

    def _share_early(self, version: int, nbytes: int) -> Snapshot | None:
        """Return the early snapshot of the update that arrives, with ``nbytes`` verified.

        ``None`` if no chunk of it has arrived.
        """
        shared, early = self._updates.share_partial(), self._early
        if shared is None:
            return None
        layout, landing, give_back = shared
        if early is None or early.buffer is not landing:
            self._discard_early()
            early = self._early = Snapshot(layout, landing, give_back, version=version)
            early.incoming = Incoming()
        assert early.incoming is not None
        early.incoming.advance(nbytes)
        return early

    def _discard_early(self) -> None:
        """Release the update that was passed on while it arrived, if any: it is not served."""
        early, self._early = self._early, None
        if early is not None:
            self._discard(early)

    def _discard(self, snapshot: Snapshot) -> None:
        """Release a version that is not served; workers that have a part of it get another one."""
        deltas = self.workers.deltas
        if snapshot.incoming is not None:
            snapshot.incoming.abandon()
            if deltas is not None:
                deltas.withdraw(snapshot)
        snapshot.release()

    def _is_base(self, epoch: int, version: int) -> bool:
        """Return True if the trainer may send its next update as a delta to this version."""
        return self._updates.base == (epoch, version)

    def _is_news_or_answer(self, arrival: _Arrival) -> bool:
        """Return True if a version is newer than the served one, or of another epoch.

        Otherwise the trainer gets an ack and the version is released.
        """
        version = arrival.snapshot.version
        if self._epoch != arrival.epoch or version > self.version:
            return True
        self._discard(arrival.snapshot)
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
        """Count an arrival whose outcome is known, and send its ack to the trainer."""
        version, nbytes = arrival.snapshot.version, arrival.snapshot.nbytes
        self._meter.ended(outcome, arrival.epoch, version, 0.0, {}, nbytes)
        arrival.say(status, error)

    def _serve(self, arrival: _Arrival) -> None:
        """Serve an arrival to the workers, and tell the trainer that it was applied."""
        self._refusal = None
        self._publish(arrival.epoch, arrival.strategy, arrival.snapshot, time.time())
        self._end(arrival, "ok", AckStatus.APPLIED)

    def _refuse(self, arrival: _Arrival, error: AiosyncError, why: str = "") -> None:
        """Release an arrival, and tell the trainer why; the previous version stays served."""
        self._end(arrival, "refused", AckStatus.NACK, without_frames(error))
        number = self._meter.finished["refused"]
        self._refusal = (
            f"{why}refused and not served ({number} so far): "
            f"version {arrival.snapshot.version} of epoch {arrival.epoch:016x}: {error}"
        )
        log(logging.WARNING, "refused", self._refusal, model=self._model_id)
        self._discard(arrival.snapshot)

    def _whole(self, arrival: _Arrival) -> list[Snapshot]:
        """Return the updates that together are the whole model once this one is served."""
        if self._epoch != arrival.epoch:
            return [arrival.snapshot]
        return self.workers.history.whole(arrival.snapshot)

    # -- the disk ------------------------------------------------------------------------------

    async def _write(self, arrival: _Arrival) -> None:
        """Write a version to the disk, then serve it; refuse the version if that fails."""
        assert self._store is not None
        if not self._is_news_or_answer(arrival):
            return
        try:
            await self._save(self._store, arrival)
        except AiosyncError as exc:
            self._refuse(arrival, exc, "not stored, so ")
        else:
            self._serve(arrival)

    async def _save(self, store: WeightStore, arrival: _Arrival) -> None:
        """Write a version as a whole model, with the tensors that only older versions hold.

        The served versions do not change meanwhile, because versions are written one at a time.
        """
        epoch, strategy, parts = arrival.epoch, arrival.strategy, self._whole(arrival)
        check_joined(parts, store.limits)
        whole = await self.workers.history.join(parts, store.limits)
        try:
            update = StoredUpdate(
                *(epoch, whole.version, strategy, whole.layout, whole.buffer, whole.values),
                replaced=self._replaced_by(epoch),
            )
            await work_in_thread(functools.partial(store.save, self._model_id, update))
        finally:
            whole.release()

    async def drain(self) -> None:
        """Wait until the newest version is on disk, or refused."""
        if self._to_write.task is not None:
            await asyncio.wait({self._to_write.task})

    async def finish(self) -> None:
        """Wait until the newest version is on disk or refused, then close every link."""
        # From now on new versions are dropped: a trainer that never pauses must not delay the end.
        self._ending = True
        await self.drain()
        await self.aclose()

    async def aclose(self) -> None:
        """Close every link without waiting for the disk. Idempotent."""
        self._ending = True
        self._discard_early()
        if self.trainer is not None:
            self.trainer.abort()
        self.workers.end()
        await self.workers.tasks.aclose()
        self._updates.close()

    def stats(self) -> SyncStats:
        """Return the statistics of this model. Any thread may call it."""
        version, workers, updated_at = self.version, self.workers, self._updated_at
        found = workers.stats(version, self._meter.age)
        return self._meter.stats(
            under_way=lambda: self._to_write.is_busy,
            epoch=self._epoch,
            version=version,
            newest_version=version,
            lag=max((each.lag for each in found if each.state in ("ready", "lagging")), default=0),
            age=0.0 if updated_at is None else max(0.0, time.time() - updated_at),
            workers=found,
            **workers.counts,
        )

    def describe(self) -> dict[str, Any]:
        """Return the values that ``aiosync status`` shows of this model."""
        # No worker has this index, so these are the snapshots for all workers.
        tensors, nbytes = joined_size(self.workers.history.for_worker(-1).snapshots())
        return {
            "model_id": self._model_id,
            "strategy": self.workers.admission.strategy,
            "epoch": self._epoch,
            "version": self.version,
            "nbytes": nbytes,
            "tensors": tensors,
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
                    "serves": link.hello.serves,
                    "behind": None if link.outbox.behind is None else list(link.outbox.behind),
                    "skipped": link.skipped,
                    "sent_nbytes": link.sent_nbytes,
                    "connected_seconds": round(time.monotonic() - link.since, 3),
                }
                for idx, link in self.workers.links.items()
            ],
        }


def _mark_of(session: bytes | None) -> bytes:
    """Return the digest that names a server to workers, who must not learn its session itself."""
    return hashlib.blake2b(session or b"", digest_size=16).digest()


def _is_server(hello: Hello) -> bool:
    """Return True for the Hello of a weight server: workers subscribe with a strategy."""
    return hello.subscribe and hello.strategy == ANY_STRATEGY


async def refuse_link(link: TCPTransport, error: AiosyncError) -> None:
    """Tell a peer the reason why it is refused, and to whom it is sent on."""
    elsewhere = tuple(map(str, error.addresses)) if isinstance(error, SentOn) else ()
    await link.send(Refuse(type(error).__name__, str(error), elsewhere), timeout=HANDSHAKE_SECONDS)
