"""The weight server: trainers push to it, workers pull from it or subscribe to it.

The server keeps the newest version of each model in memory, and on disk if it is given a directory.
It passes the trainer's epoch and version on unchanged: a worker cannot tell whether it got them
from the trainer or from the server. Must not import the command line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Self

from aiosync._log import log
from aiosync._repr import in_every_state
from aiosync._tasks import TaskOwner, in_pool_thread, running_loop
from aiosync._version import __version__
from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    TransportClosed,
)
from aiosync.events import SyncStats
from aiosync.protocol import as_count, as_names
from aiosync.rendezvous.listener import StreamListener
from aiosync.sender import Streaming
from aiosync.server.fan_out import FanOut, check_advertised, named_by_default
from aiosync.server.served_model import ServedModel, refuse_link
from aiosync.server.store import WeightStore
from aiosync.server.upstream import Upstream
from aiosync.transports.address import Address
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits
from aiosync.wire import MAX_STREAMS, Hello, stats_values

__all__ = ["WeightServer", "count_refusals"]

_MAX_LISTED = 10
_MAX_NOTE = 700  # characters


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
        store_deltas: Append to the store what changes in a version, where that is little, instead
            of writing it whole; see :class:`WeightStore`. Experimental.
        limits: Limits on the sizes that a peer may announce.
        chunk_nbytes: Bytes that share one checksum on the way to workers, a multiple of 64.
        delta: Which updates travel as changes to an older one, from a trainer or an upstream and
            to workers that take them, see :attr:`aiosync.TCPWeightSyncScheme.delta`; experimental.
        stall_timeout: Seconds after which a worker is dropped that takes no more of an update, and
            does not say that all of it is here; ``None`` for never.
        handshake_timeout: Seconds that a peer has to prove its identity.
        max_connections: Largest number of links at a time.
        max_models: Largest number of models with a version or a trainer at a time.
        limit_rate: Bytes per second that each link sends at most, so that others on the line have
            room; only with ``tcp://``. ``None``: as fast as it goes.
        upstream: Address of a weight server, or of a trainer that listens. This server follows it
            for each of ``model_ids``, passes on what comes, and lets nobody push. Of several
            addresses it uses the first one that admits it.
        streams: Connections of each link to the upstream, up to 16: between sites, where one
            connection gets less than the line.
        fanout: Number of workers of a model from which on others are sent on to servers that follow
            this one, as soon as there are any; and number of such servers from which on other ones
            are. ``None``: as many as ``max_connections``.
        advertise: Address at which other hosts reach this server, which its upstream tells workers
            that it sends on. By default it is the ``url``; a server that listens at every address
            of its host, or at a Unix socket, is told to nobody.
        upstream_token: The secret of the upstream.
        upstream_tls: :class:`aiosync.TLS`, or an ``ssl.SSLContext``, for the link to the upstream.

    Raises:
        ConfigError: An option is wrong, the address cannot be bound, or others could connect
            without proving anything.
        StoreError: A file of the store is damaged, or beyond the ``limits``.
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
        store_deltas: bool = False,
        limits: Limits | None = None,
        chunk_nbytes: int = 4 * 2**20,
        delta: Literal["auto", "off", "always"] = "off",
        stall_timeout: float | None = 60.0,
        handshake_timeout: float = 10.0,
        max_connections: int = 1024,
        max_models: int = 64,
        limit_rate: int | None = None,
        upstream: str | Sequence[str] | None = None,
        upstream_token: str | bytes | None = None,
        upstream_tls: TLS | ssl.SSLContext | None = None,
        streams: int = 1,
        fanout: int | None = None,
        advertise: str | None = None,
    ) -> None:
        self._streaming = Streaming(chunk_nbytes, stall_timeout, delta)
        self._model_ids = None if model_ids is None else frozenset(as_names("model_ids", model_ids))
        as_count("streams", streams, 1, MAX_STREAMS)
        self._max_models = as_count("max_models", max_models, 1)
        self._store = None
        if store is not None:
            # The store has the same limits, so that every version that a peer may push can be
            # loaded again.
            self._store = WeightStore(store, limits=limits or Limits(), deltas=store_deltas)
        elif store_deltas:
            raise ConfigError("store_deltas= needs a store=")
        self._fanout = None if fanout is None else as_count("fanout", fanout, 1)
        self._advertise = None if advertise is None else check_advertised(advertise)
        self._upstream: Upstream | None = None
        if upstream is not None:
            self._upstream = Upstream(
                upstream, token=upstream_token, tls=upstream_tls, limits=limits, streams=streams
            )
            _check_upstream(self._upstream, url, advertise, model_ids)
        elif (upstream_token, upstream_tls, streams, advertise) != (None, None, 1, None):
            raise ConfigError(
                "upstream_token=, upstream_tls=, streams= and advertise= need an upstream="
            )
        self._failed: Counter[str] = Counter()  # links that ended with an error, by its name
        self._listener = StreamListener(
            url,
            credentials=Credentials(token=token, pull_token=pull_token, tls=tls),
            limits=limits,
            handshake_timeout=handshake_timeout,
            max_connections=max_connections,
            limit_rate=limit_rate,
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
            StoreError: A file of the store is damaged, or beyond the limits; nothing is served.
            LocalProtocolError: Called twice, or :meth:`aclose` was called; or no asyncio loop runs
                here, and the server may still be started on one.
        """
        if self._closed or self._started:
            raise LocalProtocolError("a WeightServer can be started only once")
        running_loop()
        self._started, self._started_at = True, time.monotonic()
        try:
            await self._load()
        except BaseException:  # raised again: the caller sees it
            await self.aclose()
            raise
        self._listener.start(self._on_link, self._on_crash)
        if self._upstream is not None:
            self._follow(self._upstream)

    def _follow(self, upstream: Upstream) -> None:
        """Begin to take the versions of another server, for each model."""
        serves = named_by_default(self.url) if self._advertise is None else self._advertise
        for model_id in self._model_ids or ():
            model = self._models.get(model_id) or self._new_model(model_id)
            feeding = upstream.feed(model_id, model, serves)
            self._feeds.append(self._tasks.start(feeding, "aiosync upstream"))

    async def _load(self) -> None:
        """Serve the stored version of each model that this server may serve."""
        if self._store is None:
            return
        for model_id in self._store.model_ids():
            if self._model_ids is not None and model_id not in self._model_ids:
                continue
            stored = await in_pool_thread(self._store.load, model_id)
            if self._closed:
                raise LocalProtocolError("the server was closed while it loaded its store")
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
        """Stop serving: write what is not on disk yet, then close every link. Idempotent.

        A call while another one closes the server waits until that one has ended. If a call is
        cancelled, it closes every link without waiting for the disk.
        """
        if self._closed:
            await self._ended.wait()
            return
        self._closed = True
        models = self._models.values()
        for feed in self._feeds:
            self._tasks.cancel(feed)
        try:
            # No new links. Those that are open stay so until their versions are on disk.
            await self._listener.aclose()
            await asyncio.gather(*(model.finish() for model in models))
        finally:
            # The models are closed as well if this call is cancelled, also before finish() began.
            try:
                await asyncio.gather(*(model.aclose() for model in models))
            finally:
                try:
                    await self._tasks.aclose()
                finally:
                    self._ended.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _on_crash(self, error: BaseException) -> None:
        """Have :meth:`wait_closed` raise the first error that ended a background task."""
        self._crash = self._crash or error
        self._ended.set()

    # -- links ---------------------------------------------------------------------------------

    def _on_link(self, link: TCPTransport, hello: Hello) -> None:
        """Serve a peer that the listener has accepted, in a task of its own."""
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
                model = self._find_or_make_model(hello, link, pushes)
                # A worker that asks for single versions costs no stream, so it is never sent on.
                if hello.subscribe and not pushes:
                    model.admit(link, hello)
            except (ConfigError, ConnectError) as exc:
                await refuse_link(link, exc)
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

    def _find_or_make_model(self, hello: Hello, link: TCPTransport, pushes: bool) -> ServedModel:
        """Return the model that a peer asks for, if the peer may push or get it.

        A new model takes the place of those that no peer uses and that have no weights.

        Raises:
            AuthError: The peer's token does not allow it to push.
            ConfigError: The model is not served, nobody may push here, or another run has replaced
                that of the trainer.
            ConnectError: Another trainer pushes the model.
        """
        model_id = hello.model_id
        if pushes:
            self._check_may_push(model_id, link)
        self._check_served(model_id)
        model = self._models.get(model_id)
        if model is None or (pushes and not model.is_brought):
            self._check_room()
        if model is None:
            self._drop_unused()
            model = self._new_model(model_id)
        if pushes:
            model.check_trainer(hello)
        return model

    def _check_served(self, model_id: str) -> None:
        """Raise ConfigError for a model that is not among those of ``model_ids=``."""
        if self._model_ids is not None and model_id not in self._model_ids:
            known = ", ".join(sorted(self._model_ids))
            raise ConfigError(f"this server does not serve model {model_id!r}; it serves: {known}")

    def _drop_unused(self) -> None:
        """Forget models that no peer uses and that have no weights."""
        for unused in [name for name, each in self._models.items() if each.is_unused]:
            self._models.pop(unused).workers.end()

    def _check_may_push(self, model_id: str, link: TCPTransport) -> None:
        """Raise if this server follows another one, or the token of the peer is for workers."""
        if self._upstream is not None:
            raise ConfigError(
                f"this server follows {self._upstream.where}, so that nobody pushes to it: push "
                "there"
            )
        if link.channel.read_only:
            text = f"the token of {link.channel.name} may pull and subscribe, not push {model_id!r}"
            log(logging.WARNING, "refused", text, model=model_id)
            raise AuthError(f"{text}: give trainers the token=, and the pull_token= to workers")

    def _check_room(self) -> None:
        """Raise ConfigError if there is no room for another model.

        Models without a version do not count: workers may have asked for wrong names.
        """
        if sum(each.is_brought for each in self._models.values()) >= self._max_models:
            raise ConfigError(
                f"this server has {self._max_models} models and accepts no more; "
                f"{self._list_models()}"
            )

    def _new_model(self, model_id: str) -> ServedModel:
        model = self._models[model_id] = ServedModel(
            model_id,
            streaming=self._streaming,
            store=self._store,
            on_crash=self._on_crash,
            note=self._list_models,
            fan_out=FanOut(self._fanout, is_local=Address.parse(self.url).is_local),
        )
        return model

    def _list_models(self) -> str:
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
            "upstream": None if self._upstream is None else self._upstream.where,
            "model_ids": None if self._model_ids is None else sorted(self._model_ids),
            "max_models": self._max_models,
            "models": [model.describe() for _, model in sorted(self._models.items())],
            "stats": stats_values(self.stats().values()),
        }


def _check_upstream(
    upstream: Upstream, url: str, advertise: str | None, model_ids: Sequence[str] | None
) -> None:
    """Raise ConfigError if an upstream leads back to the server, or no models are named."""
    if not model_ids:
        raise ConfigError("a server with an upstream= follows named models: pass model_ids=")
    if any(map(upstream.leads_to, filter(None, (url, advertise)))):
        raise ConfigError(f"the server at {url} would follow itself: give another upstream=")


def count_refusals(server: WeightServer) -> dict[str, int]:
    """Return the number of connections that a server refused, by the name of the error."""
    return dict(server._listener.refused)
