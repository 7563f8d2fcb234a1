"""The weight server: trainers push to it, workers pull from it or subscribe to it.

The server keeps the newest version of each model in memory, and on disk if it is given a directory.
It passes the trainer's epoch and version on unchanged: a worker cannot tell whether it got them
from the trainer or from the server. With a store, a version is served once it is on disk, because
a version that the disk refuses could not be taken back from a worker.
Must not import the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

from aiosync._log import log
from aiosync._meter import Meter
from aiosync._repr import in_every_state
from aiosync._tasks import Newest, TaskOwner, in_pool_thread
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
from aiosync.receiver.answers import Outgoing
from aiosync.receiver.update_reader import Staged, UpdateReader
from aiosync.rendezvous.handshake import ANY_STRATEGY, HANDSHAKE_SECONDS, greet
from aiosync.rendezvous.listener import StreamListener
from aiosync.sender import Snapshot, Streaming, WorkerRegistry
from aiosync.sender.update_queue import join_snapshots
from aiosync.server.store import StoredUpdate, WeightStore
from aiosync.server.upstream import Upstream
from aiosync.transports.base import make_ack, without_frames
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Limits
from aiosync.wire import DEFAULT_LIMITS, Ack, Hello, Leave, Refuse, stats_values

__all__ = ["WeightServer"]

_MAX_LISTED = 10
_MAX_NOTE = 700  # characters
_MAX_REPLACED = 256
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

    is_base: Callable[[int, int], bool]

    def say(self, status: AckStatus, error: AiosyncError | None = None) -> None:
        """Send an ack for this version to the trainer.

        If the link has ended, the ack is lost: the server's next Hello names the version that the
        server has.
        """
        named = self.epoch, self.snapshot.version
        self.answers.say(make_ack(*named, status, error, is_base=self.is_base(*named)))


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

    Attributes:
        workers: The workers that have a version, or wait for one.
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
    ) -> None:
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
        self._updates = UpdateReader(takes_deltas=streaming.delta != "off")
        self._trainer_epoch: int | None = None
        # Epochs of the trainers that were accepted since the served epoch last changed.
        self._let_in: tuple[int, ...] = ()
        self._to_write: Newest[_Arrival] = Newest(self._write, self.workers.tasks, "aiosync store")
        self._ending = False
        self._updated_at: float | None = None  # seconds since the Unix epoch
        self._versions = 0  # number of complete versions that trainers pushed
        # Text about the last version that the disk refused, until a version is stored.
        self._refusal: str | None = None

    # -- the served version --------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        """Epoch of the served version; 0 if there is none."""
        return self.workers.epoch if self.version else 0

    @property
    def is_brought(self) -> bool:
        """True if there is a version, or one on its way to the disk, or a trainer."""
        return bool(self.version) or self.trainer is not None or self._to_write.is_busy

    @property
    def is_unused(self) -> bool:
        """True if there is no version, no trainer and no worker."""
        return not (self.is_brought or self.workers.links or self.workers.admission.arriving)

    def restore(self, stored: StoredUpdate) -> None:
        """Serve the version that an earlier process stored on disk."""
        self.replaced = stored.replaced
        snapshot = Snapshot(
            stored.layout, stored.buffer, lambda: None, stored.values, stored.version
        )
        self._publish(stored.epoch, stored.strategy, snapshot, stored.saved_at or time.time())

    def _publish(self, epoch: int, strategy: str, snapshot: Snapshot, updated_at: float) -> None:
        """Serve a version to every worker; takes over the caller's reference to the snapshot."""
        workers = self.workers
        self.replaced = self._replaced_by(epoch)
        self.version, workers.admission.strategy = snapshot.version, strategy
        if epoch != workers.epoch:
            self._let_in = ()
            workers.epoch, workers.version = epoch, 0
            workers.history.clear()
            if workers.deltas is not None:
                workers.deltas.close()  # versions of another epoch are no bases
            for link in workers.links.values():
                link.begin_epoch(epoch)
        workers.history.add({None: snapshot})
        for link in workers.links.values():
            if link.hello.subscribe and link.outbox.newest < snapshot.version:
                link.offer(snapshot)
            workers.answer(link)
        self._meter.mark(snapshot.version, time.perf_counter() - (time.time() - updated_at))
        self._updated_at = updated_at

    def _replaced_by(self, epoch: int) -> tuple[int, ...]:
        """Return the epochs of replaced runs once a version of ``epoch`` is served."""
        if epoch == self._epoch:
            return self.replaced
        others = dict.fromkeys((*self.replaced, self._epoch, *self._let_in))
        return tuple(each for each in others if each not in (0, epoch))[-_MAX_REPLACED:]

    # -- the trainer ---------------------------------------------------------------------------

    def _check_not_replaced(self, hello: Hello) -> None:
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
            said = await self.hello()
            try:  # the version that was being written may belong to another run
                self._check_not_replaced(hello)
            except ConfigError as exc:
                await _refuse(link, exc)
                raise
            self._let_in = (*self._let_in, hello.epoch or 0)[-_MAX_REPLACED:]
            await greet(link, said, timeout=HANDSHAKE_SECONDS)
            # greet() has made sure that the strategies match, or that one side takes any. A version
            # that is served already may be of another run, so its strategy stays.
            self.workers.history.parts = hello.parts
            if not self.version:
                self._agree_on(hello.strategy)
            await self._receive(link, hello.strategy)
        finally:
            self._end_link(link)

    async def follow(self, link: TCPTransport) -> None:
        """Take versions of an upstream, which has let this server in, until its link ends."""
        self.trainer = link
        # The upstream does not say if its trainer sends updates of some names.
        self.workers.history.parts = True
        try:
            await self._receive(link, ANY_STRATEGY)
        except asyncio.CancelledError:
            with contextlib.suppress(AiosyncError):
                link.send_nowait(Leave())  # so that this server does not count as lost there
            raise
        finally:
            self._end_link(link)

    def _end_link(self, link: TCPTransport) -> None:
        if self.trainer is link:
            self.trainer = None
        link.abort()

    async def _receive(self, link: TCPTransport, strategy: str) -> None:
        """Take every update that arrives over a link, and raise the error that ends it."""
        # The kernel sends no keepalive probes while an answer waits for the trainer to take it, so
        # that wait needs a limit of its own.
        link.limit_untaken()
        answers, updates = Outgoing(link, self.workers.tasks), self._updates
        updates.use_link(link)
        epoch, version = updates.base
        if version:
            answers.say(Ack(epoch, version, AckStatus.RECEIVED, is_base=True))
        try:
            while True:
                received = await link.recv(into=updates.lender)
                work = updates.heavy_work(received)
                if work is not None:
                    await in_pool_thread(work)
                staged = updates.read(received)
                answers.check()
                if staged is not None:
                    self._take(answers, strategy, staged)
        except RemoteProtocolError as exc:
            link.channel.fail(exc)  # the channel tells the trainer the error
            raise

    def _agree_on(self, strategy: str) -> None:
        """Adopt the trainer's strategy; end the links of workers that have another one.

        Those workers dial again, and the handshake tells them that their strategy is wrong.
        """
        self.workers.admission.strategy = strategy
        for link in self.workers.links.values():
            if link.hello.strategy != strategy and ANY_STRATEGY not in (
                link.hello.strategy,
                strategy,
            ):
                link.lose(ConfigError(f"the trainer's strategy is {strategy!r}"))
                link.transport.abort()

    async def hello(self) -> Hello:
        """Return the message that tells a trainer or an upstream what is here."""
        # The other side does not send again the version that the Hello names, so the version that
        # is being written should be on disk before the Hello.
        await self.drain()
        partial = self._updates.partial or (None, None, 0)
        return Hello(
            role="receiver",
            model_id=self._model_id,
            pid=os.getpid(),
            strategy=self.workers.admission.strategy if self.version else ANY_STRATEGY,
            session=self._session,
            epoch=self._epoch or None,
            version=self.version or None,
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
        )

    def _take(self, answers: Outgoing, strategy: str, staged: Staged) -> None:
        if self._ending:
            return  # without an ack: the trainer sees that the link ends
        layout, values = staged.layout, dict(staged.values)
        snapshot = Snapshot(layout, staged.flat, staged.give_back, values, staged.version)
        snapshot.trace = staged.trace
        arrival = _Arrival(answers, staged.epoch, strategy, snapshot, self._is_base)
        self._versions += 1
        if self._store is None:
            if self._is_news_or_answer(arrival):
                self._serve(arrival)
            return
        arrival.say(AckStatus.RECEIVED)
        old = self._to_write.begin(arrival)
        if old is not None:
            self._end(old, "skipped", AckStatus.SKIPPED)
            old.snapshot.release()

    def _is_base(self, epoch: int, version: int) -> bool:
        return self._updates.base == (epoch, version)

    def _is_news_or_answer(self, arrival: _Arrival) -> bool:
        """Return True if a version is newer than the served one, or of another epoch.

        Otherwise the trainer gets an ack and the version is released.
        """
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
        """Write a version to the disk, then serve it; refuse the version if that fails."""
        assert self._store is not None
        if not self._is_news_or_answer(arrival):
            return
        try:
            await self._save(self._store, arrival)
        except AiosyncError as exc:  # the server keeps serving the previous version
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
        """Write a version as a whole model, with the tensors that only older versions hold.

        The served versions do not change meanwhile, because versions are written one at a time.
        """
        epoch, parts = arrival.epoch, [arrival.snapshot]
        if self._epoch == epoch:
            parts = self.workers.history.whole(arrival.snapshot)
        whole = await join_snapshots(parts, store.limits)
        try:
            update = StoredUpdate(
                *(epoch, whole.version, arrival.strategy, whole.layout, whole.buffer, whole.values),
                replaced=self._replaced_by(epoch),
            )
            await in_pool_thread(store.save, self._model_id, update)
        finally:
            whole.release()

    async def drain(self) -> None:
        """Wait until the newest version is on disk, or refused."""
        if self._to_write.task is not None:
            await asyncio.wait({self._to_write.task})

    async def aclose(self) -> None:
        """Wait until the newest version is on disk or refused, then close every link."""
        # From now on new versions are dropped: a trainer that never pauses must not delay the end.
        self._ending = True
        try:
            await self.drain()
        finally:
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
        newest = next(reversed(self.workers.history.for_worker(-1).snapshots()), None)
        return {
            "model_id": self._model_id,
            "strategy": self.workers.admission.strategy,
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
    """Tell a peer the reason why it is refused."""
    await link.send(Refuse(type(error).__name__, str(error)), timeout=HANDSHAKE_SECONDS)


class WeightServer:
    """Server that keeps and serves the newest version of any number of models.

    Trainers and workers connect with ``TCPWeightSyncScheme(url, dial="both")``. A worker's
    ``pull()`` asks for a version; a subscriber gets each version as it comes. The server binds its
    address at once, and serves between :meth:`start` and :meth:`aclose`.

    Args:
        url: ``tcp://host:port`` (port 0: any free one) or ``unix:///path``.
        token: A secret that peers prove that they have; it is never sent.
        pull_token: Another secret, for peers that may pull, subscribe and ask for the status, but
            not push. ``None``: every peer with the ``token`` may do everything.
        tls: :class:`aiosync.TLS`, or an ``ssl.SSLContext`` of the side that listens.
        model_ids: Models that are served; ``None`` for any.
        store: Directory for the newest version of each model; read at the start. A version is
            served once it is on disk; one that cannot be written is refused, and the server keeps
            serving the previous one. ``None`` keeps them in memory only.
        limits: Limits on the sizes that a peer may announce.
        chunk_nbytes: Bytes that share one checksum on the way to workers, a multiple of 64.
        delta: Which updates travel as changes to the one before, from a trainer or an upstream and
            to workers that take them, see :attr:`aiosync.TCPWeightSyncScheme.delta`; experimental.
        stall_timeout: Seconds without progress after which a worker that owes an answer is
            dropped; ``None`` for never.
        handshake_timeout: Seconds that a peer has to prove its identity.
        max_connections: Largest number of links at a time.
        max_models: Largest number of models with a version or a trainer at a time.
        upstream: Address of a weight server, or of a trainer that listens. This server follows it
            for each of ``model_ids``, passes on what comes, and lets nobody push.
        upstream_token: The secret of the upstream.
        upstream_tls: :class:`aiosync.TLS`, or an ``ssl.SSLContext``, for the link to the upstream.

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
        delta: Literal["auto", "off", "always"] = "off",
        stall_timeout: float | None = 60.0,
        handshake_timeout: float = 10.0,
        max_connections: int = 1024,
        max_models: int = 64,
        upstream: str | None = None,
        upstream_token: str | bytes | None = None,
        upstream_tls: TLS | ssl.SSLContext | None = None,
    ) -> None:
        self._streaming = Streaming(chunk_nbytes, stall_timeout, delta)
        if isinstance(model_ids, str):
            raise ConfigError(f"model_ids must be a list of names: pass [{model_ids!r}]")
        self._model_ids = None if model_ids is None else frozenset(model_ids)
        self._max_models = as_count("max_models", max_models, 1)
        self._store = None
        if store is not None:
            # The store has the same limits, so that every version that a peer may push can be
            # loaded again.
            self._store = WeightStore(store, limits=limits or DEFAULT_LIMITS)
        self._upstream = None
        if upstream is not None:
            if not model_ids:
                raise ConfigError(
                    "a server with an upstream= follows named models: pass model_ids="
                )
            self._upstream = Upstream(
                upstream, token=upstream_token, tls=upstream_tls, limits=limits
            )
        self._failed: Counter[str] = Counter()  # links that ended with an error, by its name
        self._listener = StreamListener(
            url,
            credentials=Credentials(token=token, pull_token=pull_token, tls=tls),
            limits=limits,
            handshake_timeout=handshake_timeout,
            max_connections=max_connections,
            status=lambda: self.status(),  # looked up at each call, so that a wrapper on it counts
        )
        self._models: dict[str, ServedModel] = {}
        self._tasks = TaskOwner(self._on_crash)
        self._feeds: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._crash: BaseException | None = None
        self._started = self._closed = False
        self._started_at = time.monotonic()

    @property
    def url(self) -> str:
        """Address that the server listens at, with the port that was bound."""
        return self._listener.url

    @in_every_state
    def __repr__(self) -> str:
        state = "closed" if self._closed else "serving" if self._started else "not started"
        return f"<WeightServer at {self.url}: {state}, {len(self._models)} models>"

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the store and accept connections on the running event loop.

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
        if self._upstream is not None:
            for model_id in self._model_ids or ():
                model = self._models.get(model_id) or self._new_model(model_id)
                feeding = self._upstream.feed(model_id, model)
                self._feeds.append(self._tasks.start(feeding, "aiosync upstream"))

    async def _load(self) -> None:
        if self._store is None:
            return
        for model_id in self._store.model_ids():
            if self._model_ids is not None and model_id not in self._model_ids:
                continue
            stored = await in_pool_thread(self._store.load, model_id)
            if stored is not None:
                self._new_model(model_id).restore(stored)

    async def wait_closed(self) -> None:
        """Wait until the server has closed.

        Raises:
            LocalProtocolError: The server was not started.
            BaseException: The exception that ended a background task of the server: a bug.
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
            for feed in self._feeds:
                feed.cancel()
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
        # A task that is cancelled before it runs cannot close its link itself.
        task.add_done_callback(lambda task: link.abort() if task.cancelled() else None)

    async def _serve(self, link: TCPTransport, hello: Hello) -> None:
        """Serve one peer: receive from a trainer, or hand a worker's link to its model.

        An illegal peer loses its own link; the other links go on.
        """
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
                link.channel.says_why = True  # the trainer's user can correct the error
                await model.receive_from(link, hello)
            else:
                model.workers.admission.welcome(link, None, hello)
        except AiosyncError as exc:
            self._failed[type(exc).__name__] += 1
            await link.aclose()
        except BaseException:  # the task was cancelled, or this is a bug, which _on_crash() reports
            link.abort()
            raise

    def _model_for(self, hello: Hello, link: TCPTransport, pushes: bool) -> ServedModel:
        """Return the model that a peer asks for, if the peer may push or get it.

        Raises:
            AuthError: The peer's token does not allow it to push.
            ConfigError: The model is not served, nobody may push here, or another run has replaced
                that of the trainer.
            ConnectError: Another trainer pushes the model.
        """
        model_id = hello.model_id
        if pushes and self._upstream is not None:
            raise ConfigError(
                f"this server follows {self._upstream.address}, so that nobody pushes to it: push "
                "there"
            )
        if pushes and link.channel.read_only:
            text = f"the token of {link.channel.name} may pull and subscribe, not push {model_id!r}"
            log(logging.WARNING, "refused", text, model=model_id)
            raise AuthError(f"{text}: give trainers the token=, and the pull_token= to workers")
        if self._model_ids is not None and model_id not in self._model_ids:
            known = ", ".join(sorted(self._model_ids))
            raise ConfigError(f"this server does not serve model {model_id!r}; it serves: {known}")
        model = self._models.get(model_id)
        if model is None or (pushes and not model.is_brought):
            self._check_room()
        if model is None:
            for unused in [name for name, each in self._models.items() if each.is_unused]:
                self._models.pop(unused).workers.end()
            model = self._new_model(model_id)
        if pushes:
            model.check_trainer(hello)
        return model

    def _check_room(self) -> None:
        """Raise if there is no room for another model.

        Models without a version do not count: workers may have asked for wrong names.
        """
        if sum(each.is_brought for each in self._models.values()) >= self._max_models:
            raise ConfigError(
                f"this server has {self._max_models} models and accepts no more; {self._note()}"
            )

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
        """Return a text that names the models with weights, for peers that ask for another one."""
        found = [repr(name) for name, model in sorted(self._models.items()) if model.version]
        more = f" and {len(found) - _MAX_LISTED} others" if found[_MAX_LISTED:] else ""
        listed = ", ".join(found[:_MAX_LISTED]) or "none yet"
        return f"models that it has weights of: {listed[:_MAX_NOTE]}{more}"

    # -- statistics ----------------------------------------------------------------------------

    def stats(self) -> dict[str, SyncStats]:
        """Return the statistics of each model. Any thread may call it; it never waits."""
        return {name: model.stats() for name, model in sorted(self._models.copy().items())}

    def status(self) -> dict[str, Any]:
        """Return the served models, their trainers and their workers: plain values, no secrets."""
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
