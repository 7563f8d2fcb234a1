"""The weight server: trainers push to it, workers pull from it or subscribe to it.

Keeps the newest version of each model in memory, and on disk if it is given a directory. Must
not import the command line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiosync._log import log
from aiosync._tasks import TaskOwner
from aiosync._version import __version__
from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    RemoteProtocolError,
    TransportClosed,
)
from aiosync.events import SyncStats
from aiosync.protocol import as_count
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS
from aiosync.rendezvous.listener import StreamListener
from aiosync.sender import Streaming
from aiosync.server.model import ServedModel
from aiosync.server.store import WeightStore
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits
from aiosync.wire import DEFAULT_LIMITS, Hello, Refuse, stats_values

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["WeightServer"]

_MAX_LISTED = 10
_MAX_NOTE = 700  # characters


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

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            if hello.role not in ("sender", "receiver"):
                raise RemoteProtocolError("unknown role in Hello")
            pushes = hello.role == "sender"
            try:
                model = self._model_for(hello, link, pushes)
            except (ConfigError, ConnectError) as exc:
                refuse = Refuse(type(exc).__name__, str(exc))
                await link.send(refuse, timeout=HANDSHAKE_SECONDS)
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
