"""The weight server: trainers push to it, workers pull from it or subscribe to it.

Keeps the newest version of each model in memory, and on disk if it is given a directory. The epoch
and version of the trainer are passed on as they are: a worker cannot tell whether it got them from
the trainer or from here. With a store a version is served once it is on disk: what the disk refuses
cannot be taken back from a worker that has it. Must not import the command line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from aiosync._log import log
from aiosync._meter import Meter
from aiosync._repr import in_every_state
from aiosync._tasks import Newest, TaskOwner
from aiosync._version import __version__
from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    RemoteProtocolError,
    StaleVersion,
    TransportClosed,
)
from aiosync.events import SyncOutcome, SyncStats
from aiosync.protocol import as_count
from aiosync.receiver.updates import Outgoing, Staged, UpdateReader
from aiosync.rendezvous.handshake import ANY_STRATEGY, HANDSHAKE_SECONDS, greet
from aiosync.rendezvous.listener import StreamListener
from aiosync.sender import Snapshot, Streaming, WorkerRegistry
from aiosync.server.store import StoredUpdate, WeightStore
from aiosync.tensors.buffer import merged
from aiosync.transports.base import make_ack, without_frames
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Limits
from aiosync.wire import DEFAULT_LIMITS, Hello, Refuse, stats_values

__all__ = ["WeightServer"]

_MAX_LISTED = 10
_MAX_NOTE = 700  # characters
_MAX_REPLACED = 256
_REPLACED = (
    "another run has replaced this one at the weight server: construct a new scheme to begin a "
    "new run, or this one with take_over=True to have it come back"
)


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
        replaced: Epochs of runs that others have replaced, oldest first; the last 256.
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
        self.replaced: tuple[int, ...] = ()
        self._model_id = model_id
        self._store = store
        self._session = secrets.token_bytes(16)
        self._updates = UpdateReader()
        self._trainer_epoch: int | None = None
        self._let_in: tuple[int, ...] = ()  # epochs of trainers, since another run was served
        self._to_write: Newest[_Arrival] = Newest(self._write, self.workers.tasks, "aiosync store")
        self._ending = False
        self._updated_at: float | None = None  # seconds since the Unix epoch
        self._versions = 0  # complete ones that came
        self._refusal: str | None = None  # the disk's last one, until a version is stored again

    # -- what there is -------------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        """Of what is served; 0 for nothing."""
        return self.workers.epoch if self.version else 0

    @property
    def is_brought(self) -> bool:
        """Whether there is a version, or one on its way to the disk, or a trainer."""
        return bool(self.version) or self.trainer is not None or self._to_write.is_busy

    @property
    def is_unused(self) -> bool:
        """Whether there is none of these, nor a worker that waits."""
        return not (self.is_brought or self.workers.links or self.workers.arriving)

    def restore(self, stored: StoredUpdate) -> None:
        """Serve what an earlier process kept on disk."""
        self.replaced = stored.replaced
        snapshot = Snapshot(
            stored.layout, stored.buffer, lambda: None, stored.values, stored.version
        )
        self._publish(stored.epoch, stored.strategy, snapshot, stored.saved_at or time.time())

    def _publish(self, epoch: int, strategy: str, snapshot: Snapshot, updated_at: float) -> None:
        """Serve a version; takes over a reference."""
        workers = self.workers
        self.replaced = self._replaced_by(epoch)
        self.version, workers.strategy = snapshot.version, strategy
        if epoch != workers.epoch:
            self._let_in = ()
            workers.epoch, workers.version = epoch, 0
            workers.history.clear()
            for link in workers.links.values():
                link.begin_epoch(epoch)
        workers.history.add(None, snapshot)
        for link in workers.links.values():
            if link.hello.subscribe and link.outbox.newest < snapshot.version:
                link.offer(snapshot)
            workers.answer(link)
        self._meter.mark(snapshot.version, time.perf_counter() - (time.time() - updated_at))
        self._updated_at = updated_at

    def _replaced_by(self, epoch: int) -> tuple[int, ...]:
        """Return the epochs that are replaced once this one is served."""
        if epoch == self._epoch:
            return self.replaced
        others = dict.fromkeys((*self.replaced, self._epoch, *self._let_in))
        return tuple(each for each in others if each not in (0, epoch))[-_MAX_REPLACED:]

    # -- the trainer ---------------------------------------------------------------------------

    def _check_not_replaced(self, hello: Hello) -> None:
        if hello.epoch in self.replaced and not hello.take_over:
            raise ConfigError(_REPLACED)

    def check_trainer(self, hello: Hello) -> None:
        """Find out whether somebody who wants to push may.

        Raises:
            ConfigError: Another run has replaced that of this trainer, which is not told to return.
            ConnectError: Another trainer is connected; this one may try again.
        """
        self._check_not_replaced(hello)
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
            try:  # a version that was being written may be of another run
                self._check_not_replaced(hello)
            except ConfigError as exc:
                await _refuse(link, exc)
                raise
            self._let_in = (*self._let_in, hello.epoch or 0)[-_MAX_REPLACED:]
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
            epoch=self._epoch or None,
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
        old = self._to_write.begin(arrival)
        if old is not None:
            self._end(old, "skipped", AckStatus.SKIPPED)
            old.snapshot.release()

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
        self._publish(arrival.epoch, arrival.strategy, arrival.snapshot, time.time())
        self._end(arrival, "ok", AckStatus.APPLIED)

    # -- the disk ------------------------------------------------------------------------------

    async def _write(self, arrival: _Arrival) -> None:
        """Write a version, and serve it."""
        assert self._store is not None
        if not self._is_news(arrival):
            return
        try:
            await self._save(self._store, arrival)
        except AiosyncError as exc:  # what was served before is served on
            self._end(arrival, "refused", AckStatus.NACK, without_frames(exc))
            number = self._meter.finished["refused"]
            self._refusal = (
                f"not stored, so refused and not served ({number} so far): "
                f"version {arrival.snapshot.version} of epoch {arrival.epoch:016x}: {exc}"
            )
            log(logging.WARNING, "refused", self._refusal, model=self._model_id)
            arrival.snapshot.release()
        else:
            self._refusal = None
            self._serve(arrival)

    async def _save(self, store: WeightStore, arrival: _Arrival) -> None:
        """Write a version, with what it lacks of those before it; none changes meanwhile."""
        newest, history = arrival.snapshot, self.workers.history
        layout, buffer, values = newest.layout, newest.buffer, newest.values
        if self._epoch == arrival.epoch:
            older = history.needed_before(history.for_worker(-1), newest)
            if older:  # an update of some names is no whole model
                parts = [*older, newest]
                layout, buffer, values = await asyncio.to_thread(merged, parts, store.limits)
        epoch, version = arrival.epoch, newest.version
        update = StoredUpdate(
            *(epoch, version, arrival.strategy, layout, buffer, values),
            replaced=self._replaced_by(epoch),
        )
        await asyncio.to_thread(store.save, self._model_id, update)

    async def drain(self) -> None:
        """Let the newest version reach the disk, or be refused."""
        if self._to_write.task is not None:
            await asyncio.wait({self._to_write.task})

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
        """What ``aiosync status`` shows of this model."""
        newest = next(reversed(self.workers.history.for_worker(-1).snapshots()), None)
        return {
            "model_id": self._model_id,
            "strategy": self.workers.strategy,
            "epoch": self._epoch,
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
                    "skipped": link.skipped,
                    "sent_nbytes": link.sent_nbytes,
                    "connected_seconds": round(time.monotonic() - link.since, 3),
                }
                for idx, link in self.workers.links.items()
            ],
        }


async def _refuse(link: TCPTransport, error: AiosyncError) -> None:
    """Tell a peer why it is not let in."""
    await link.send(Refuse(type(error).__name__, str(error)), timeout=HANDSHAKE_SECONDS)


class WeightServer:
    """Serves the newest version of any number of models.

    Trainers connect with ``TCPWeightSyncScheme(url, dial="both")``, and so do workers; a
    worker's ``pull()`` asks, and a subscriber gets each version as it comes. Binds at once;
    serves between :meth:`start` and :meth:`aclose`.

    Args:
        url: ``tcp://host:port`` (port 0: any free one) or ``unix:///path``.
        token: A secret that peers prove that they have; it is never sent.
        pull_token: Another one, for peers that may pull, subscribe and ask for the status, and
            not push. ``None``: everybody who has the ``token`` may do everything.
        tls: :class:`aiosync.TLS`, or an ``ssl.SSLContext`` of the side that listens.
        model_ids: Models that are served; ``None`` for any.
        store: Directory for the newest version of each model; read at the start. A version is
            served once it is on disk; one that cannot be written is refused, and the server keeps
            serving the previous one. ``None`` keeps them in memory only.
        limits: What a peer may announce.
        chunk_nbytes: Bytes that share one checksum on the way to workers, a multiple of 64.
        stall_timeout: Seconds without progress after which a worker that owes an answer is
            dropped; ``None`` for never.
        handshake_timeout: Seconds that a peer has to prove its identity.
        max_connections: Links at a time.
        max_models: Models that trainers bring, at a time, where any are served.

    Raises:
        ConfigError: An option is wrong, the address cannot be bound, or others could connect
            without proving anything.
        StoreError: A file of the store is damaged.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | bytes | None = None,
        pull_token: str | bytes | None = None,
        tls: TLS | ssl.SSLContext | None = None,
        model_ids: Sequence[str] | None = None,
        store: str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        chunk_nbytes: int = 4 * 2**20,
        stall_timeout: float | None = 60.0,
        handshake_timeout: float = 10.0,
        max_connections: int = 1024,
        max_models: int = 64,
    ) -> None:
        self._streaming = Streaming(chunk_nbytes=chunk_nbytes, stall_timeout=stall_timeout)
        if isinstance(model_ids, str):
            raise ConfigError(f"model_ids must be a list of names: pass [{model_ids!r}]")
        self._model_ids = None if model_ids is None else frozenset(model_ids)
        self._max_models = as_count("max_models", max_models, 1)
        self._store = None
        if store is not None:
            # What peers may announce can also be loaded again.
            self._store = WeightStore(store, limits=limits or DEFAULT_LIMITS)
        self._failed: Counter[str] = Counter()  # links that ended with an error, by its name
        self._listener = StreamListener(
            url,
            credentials=Credentials(token=token, pull_token=pull_token, tls=tls),
            limits=limits,
            handshake_timeout=handshake_timeout,
            max_connections=max_connections,
            status=lambda: self.status(),  # whoever has wrapped it
        )
        self._models: dict[str, ServedModel] = {}
        self._tasks = TaskOwner(self._on_crash)
        self._ended = asyncio.Event()
        self._crash: BaseException | None = None
        self._started = self._closed = False
        self._started_at = time.monotonic()

    @property
    def url(self) -> str:
        """Where this listens, with the port that was bound."""
        return self._listener.url

    @in_every_state
    def __repr__(self) -> str:
        state = "closed" if self._closed else "serving" if self._started else "not started"
        return f"<WeightServer at {self.url}: {state}, {len(self._models)} models>"

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the store and accept on the running loop.

        Raises:
            StoreError: A file of the store is damaged; nothing is served.
            LocalProtocolError: Called twice, or after :meth:`aclose`.
        """
        if self._closed or self._started:
            raise LocalProtocolError("a WeightServer can be started only once")
        self._started, self._started_at = True, time.monotonic()
        try:
            await self._load()
        except BaseException:  # raised again: the caller sees it
            await self.aclose()
            raise
        self._listener.start(self._on_link, self._on_crash)

    async def _load(self) -> None:
        if self._store is None:
            return
        for model_id in self._store.model_ids():
            if self._model_ids is not None and model_id not in self._model_ids:
                continue
            stored = await asyncio.to_thread(self._store.load, model_id)
            if stored is not None:
                self._new_model(model_id).restore(stored)

    async def wait_closed(self) -> None:
        """Wait until the server has closed.

        Raises:
            LocalProtocolError: It was not started.
            BaseException: What ended a background task of the server: a bug.
        """
        if not self._started:
            raise LocalProtocolError("the server was not started: await server.start()")
        await self._ended.wait()
        if self._crash is not None:
            raise self._crash

    async def aclose(self) -> None:
        """Stop serving: write what is not on disk yet, then close every link. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._listener.aclose()
        finally:
            await asyncio.gather(*(model.aclose() for model in self._models.values()))
            await self._tasks.aclose()
            self._ended.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _on_crash(self, error: BaseException) -> None:
        self._crash = self._crash or error
        self._ended.set()

    # -- links ---------------------------------------------------------------------------------

    def _on_link(self, link: TCPTransport, hello: Hello) -> None:
        task = self._tasks.start(self._serve(link, hello), "aiosync link of the server")
        # A task that never ran cannot close its link.
        task.add_done_callback(lambda task: link.abort() if task.cancelled() else None)

    async def _serve(self, link: TCPTransport, hello: Hello) -> None:
        """Find out what a peer wants. A peer that does wrong ends its own link and no more."""
        try:
            if self._closed:
                raise TransportClosed("this server was closed")
            pushes = hello.role == "sender"
            try:
                model = self._model_for(hello, link, pushes)
            except (ConfigError, ConnectError) as exc:
                await _refuse(link, exc)
                raise
            if pushes:
                link.channel.says_why = True  # its user can do something about it
                await model.receive_from(link, hello)
            else:
                model.workers.welcome(link, None, hello)
        except AiosyncError as exc:
            self._failed[type(exc).__name__] += 1
            await link.aclose()
        except BaseException:  # cancelled, or a bug that _on_crash() is told
            link.abort()
            raise

    def _model_for(self, hello: Hello, link: TCPTransport, pushes: bool) -> ServedModel:
        """The model that a peer may push, or get.

        Raises:
            AuthError: It may not push.
            ConfigError: The model is not served.
            ConnectError: Another trainer pushes it.
        """
        model_id = hello.model_id
        if pushes and link.channel.read_only:
            text = f"the token of {link.channel.name} may pull and subscribe, not push {model_id!r}"
            log(logging.WARNING, "refused", text, model=model_id)
            raise AuthError(f"{text}: give trainers the token=, and the pull_token= to workers")
        if self._model_ids is not None and model_id not in self._model_ids:
            known = ", ".join(sorted(self._model_ids))
            raise ConfigError(f"this server does not serve model {model_id!r}; it serves: {known}")
        model = self._models.get(model_id)
        if model is None or (pushes and not model.is_brought):
            # Those that workers ask for, under a wrong name perhaps, keep no other out.
            if sum(each.is_brought for each in self._models.values()) >= self._max_models:
                raise ConfigError(
                    f"this server has {self._max_models} models and accepts no more; {self._note()}"
                )
        if model is None:
            for unused in [name for name, each in self._models.items() if each.is_unused]:
                self._models.pop(unused).workers.end()
            model = self._new_model(model_id)
        if pushes:
            model.check_trainer(hello)
        return model

    def _new_model(self, model_id: str) -> ServedModel:
        model = self._models[model_id] = ServedModel(
            model_id,
            streaming=self._streaming,
            store=self._store,
            on_crash=self._on_crash,
            note=self._note,
        )
        return model

    def _note(self) -> str:
        """What there is, for those who ask for something else."""
        found = [repr(name) for name, model in sorted(self._models.items()) if model.version]
        more = f" and {len(found) - _MAX_LISTED} others" if found[_MAX_LISTED:] else ""
        listed = ", ".join(found[:_MAX_LISTED]) or "none yet"
        return f"models that it has weights of: {listed[:_MAX_NOTE]}{more}"

    # -- what is going on ----------------------------------------------------------------------

    def stats(self) -> dict[str, SyncStats]:
        """What was done with each model so far, and how it stands. On any thread; never waits."""
        return {name: model.stats() for name, model in sorted(self._models.copy().items())}

    def status(self) -> dict[str, Any]:
        """What is served, by whom and to whom; only plain values, without secrets."""
        listener = self._listener
        return {
            "aiosync": __version__,
            "url": self.url,
            "uptime_seconds": round(time.monotonic() - self._started_at, 3),
            "connections": len(listener.links),
            "accepted": listener.accepted,
            "refused": dict(listener.refused),
            "ended": dict(self._failed),
            "store": self._store is not None,
            "model_ids": None if self._model_ids is None else sorted(self._model_ids),
            "max_models": self._max_models,
            "models": [model.describe() for _, model in sorted(self._models.items())],
            "stats": stats_values(self.stats().values()),
        }
