"""The trainer's pipes on the portal's loop: who has attached, and what those get who come late.

After its greeting a pipe is only watched until its worker says something; there is no deadline for
that, since workers of this generation attach whenever they like. Must not import the blocking
classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiosync.schemes as aio
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ConfigError,
    ConnectError,
    PartialSyncError,
    PeerClosed,
    RemoteProtocolError,
)
from aiosync.legacy._endpoint import naming
from aiosync.legacy._greeting import Greeting, ask_who_writes, greet, hear
from aiosync.legacy._pipes import has_ended, say_goodbye
from aiosync.legacy._relay import link_over
from aiosync.rendezvous.handshake import ANY_STRATEGY, HANDSHAKE_SECONDS
from aiosync.schemes.handles import SendHandle
from aiosync.schemes.sources import is_per_worker
from aiosync.sender import WeightSender
from aiosync.sender.workers import watch_process
from aiosync.transports.base import Transport
from aiosync.wire import Hello

__all__ = ["PipeLinks", "Sending", "retrieved"]

GRACE_SECONDS = 2.0
"""How long sends wait for workers that never attached, from the first send on."""


@dataclass(slots=True)
class Sending:
    """One send that is under way.

    Attributes:
        version: Its version.
        handle: What the workers that had attached make of it; ``None`` without any.
        late: Workers that it addresses and that had not attached.
    """

    version: int
    handle: SendHandle | None
    late: frozenset[int]


class PipeLinks:
    """The pipes of a sender. Its coroutines belong to the portal's loop.

    Args:
        scheme: The async scheme, which has the role of a sender and no link yet.
        socks: One for each worker, by index; owned from now on.
    """

    def __init__(self, scheme: aio.WeightSyncScheme, socks: Sequence[socket.socket]) -> None:
        self._scheme = scheme
        self._all = tuple(socks)
        self._socks: dict[int, socket.socket] = dict(enumerate(socks))  # nobody attached yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._give_up: float | None = None  # when the grace ends
        self.num_pipes: int = len(socks)

    @property
    def started(self) -> bool:
        """Whether workers that attach are answered."""
        return self._loop is not None

    async def start(self, weights: Any = None) -> None:
        """Connect, and answer workers from now on. Waits for none of them.

        Args:
            weights: What workers get when they attach before the first send; ``None`` for
                nothing.
        """
        if self.started:
            return
        scheme = self._scheme
        # This generation sends nothing before send() is called, whatever model is registered.
        kept = scheme._model, scheme._sources.weights, scheme._context_ref
        scheme._model = scheme._sources.weights = scheme._context_ref = None
        try:
            await scheme.connect(weights=weights)
        finally:
            scheme._model, scheme._sources.weights, scheme._context_ref = kept
        self._loop = asyncio.get_running_loop()
        tasks = self._sender.workers.tasks
        for idx, sock in self._socks.items():
            # The kernel names the writer if either end asks; a worker may ask only later.
            ask_who_writes(sock)
            greet(sock, "scheme")
            tasks.start(self._watch(idx, sock), f"aiosync legacy pipe {idx}")

    @property
    def _sender(self) -> WeightSender:
        sender = self._scheme._sender
        assert sender is not None
        return sender

    async def _watch(self, idx: int, sock: socket.socket) -> None:
        """Wait until the worker says something; then it is a link as any other."""
        workers = self._sender.workers
        try:
            greeting = await hear(sock)
            transport = await self._link(idx, sock, greeting)
        except AiosyncError as exc:
            self._socks.pop(idx).close()
            kind = PeerClosed if isinstance(exc, PeerClosed) else ConnectError
            workers.not_reached(idx, kind(f"worker {idx} could not attach: {exc}"))
            return
        del self._socks[idx]
        while transport in workers.arriving:
            await workers.changed.wait()
        if not self._has_attached(idx):
            why = "; ".join(workers.refusals) or "its end of the pipe was closed"
            workers.not_reached(idx, ConnectError(f"worker {idx} could not attach: {why}"))

    async def _link(self, idx: int, sock: socket.socket, greeting: Greeting) -> Transport:
        scheme = self._scheme
        if greeting.speaks == "scheme":
            raise ConfigError(
                "both ends of this pipe are senders: use init_on_worker() on one of them"
            )
        if greeting.speaks == "worker":
            transport = scheme.create_transport(sock)
            try:
                hello = await self._hello(transport, greeting)
            except BaseException:  # goes on to the caller
                transport.abort()
                raise
            self._sender.workers.welcome(transport, idx, hello)
            return transport
        # A transport of this generation, which shakes no hands. It takes what comes.
        transport = link_over(sock, greeting)
        model_id = scheme.model_id or "policy"
        hello = Hello("receiver", model_id, greeting.pid, strategy=ANY_STRATEGY)
        await transport.send(naming(model_id, scheme.strategy_str))
        self._sender.workers.welcome(transport, idx, hello)
        return transport

    @staticmethod
    async def _hello(transport: Transport, greeting: Greeting) -> Hello:
        """Wait for a worker's side of the handshake, and notice if it dies before."""
        if greeting.sure and has_ended(greeting.sure):
            raise PeerClosed(f"its process {greeting.sure} has ended")
        watch_process(transport, greeting.sure or greeting.pid)
        message = (await transport.recv(timeout=HANDSHAKE_SECONDS)).message
        if not isinstance(message, Hello):
            raise RemoteProtocolError(f"expected Hello, got {type(message).__name__}")
        return message

    # -- sending -------------------------------------------------------------------------------

    async def send(self, weights: Any, worker_ids: int | Iterable[int] | None) -> frozenset[int]:
        """Send, and wait until every worker that has attached applied it.

        Returns:
            The workers that it addresses and that have not attached yet.

        Raises:
            PartialSyncError: As ``WeightSyncScheme.send`` raises it.
            ConfigError: There is no pipe for a worker that is named.
        """
        addressed = self._addressed(weights, worker_ids)
        if all(map(self._has_attached, addressed)):
            await self._scheme.send(weights, worker_ids)
            return frozenset()
        return await self.finish(await self.begin(weights, worker_ids))

    async def begin(self, weights: Any, worker_ids: int | Iterable[int] | None) -> Sending:
        """Take a snapshot and send it in the background."""
        scheme, sender, workers = self._scheme, self._sender, self._sender.workers
        workers.check()
        addressed = self._addressed(weights, worker_ids)
        known = set(filter(self._has_attached, addressed))
        late = frozenset(addressed - known)
        if self._give_up is None:
            self._give_up = asyncio.get_running_loop().time() + GRACE_SECONDS
        if worker_ids is None and not is_per_worker(weights):  # all, and who comes later
            handle = retrieved(scheme.send_nowait(weights))
            return Sending(handle.version, handle, late)
        first = None
        if known:
            mine = _only(weights, known)
            first = retrieved(scheme.send_nowait(mine, None if is_per_worker(mine) else known))
        version = workers.clock.next() if first is None else first.version
        if late:
            planned = scheme._plan(_only(weights, late))
            for idx in late:
                plan = planned.get(idx) or planned[None]
                sender.keep_for(idx, plan, version)
        return Sending(version, first, late)

    async def finish(self, sending: Sending) -> frozenset[int]:
        """Wait for a send; see :meth:`send`."""
        acked: frozenset[int] = frozenset()
        if sending.handle is not None:
            acked = (await sending.handle).acked
        if not sending.late:
            return frozenset()
        workers = self._sender.workers
        loop = asyncio.get_running_loop()
        assert self._give_up is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._give_up - loop.time())):
                while not all(map(self._has_attached, sending.late)):
                    await workers.changed.wait()
        attached = {idx for idx in sending.late if self._has_attached(idx)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._scheme._limit(None)):
                while not all(self._is_settled(idx, sending.version) for idx in attached):
                    await workers.changed.wait()
        failed = {idx: error for idx in attached if (error := self._error(idx, sending.version))}
        if failed:
            for idx in failed:
                workers.record(idx).reported = True
            acked |= attached - failed.keys()
            raise PartialSyncError(acked=acked, failed=failed, version=sending.version)
        return sending.late - attached

    def _addressed(self, weights: Any, worker_ids: int | Iterable[int] | None) -> set[int]:
        if worker_ids is None:
            return set(weights) if is_per_worker(weights) else set(range(self.num_pipes))
        named = {worker_ids} if isinstance(worker_ids, int) else set(worker_ids)
        for idx in sorted(named):
            if not 0 <= idx < self.num_pipes:
                raise ConfigError(f"Worker {idx} not registered: there are {self.num_pipes} pipes")
            if is_per_worker(weights) and idx not in weights:
                raise ConfigError(f"no weights were given for worker {idx}")
        return named

    def _has_attached(self, idx: int) -> bool:
        record = self._sender.workers.record(idx)
        return record.link is not None or record.is_lost

    def _is_settled(self, idx: int, version: int) -> bool:
        self._sender.workers.check()
        record = self._sender.workers.record(idx)
        link = record.link
        return link is None or link.visible >= version or record.failure(version) is not None

    def _error(self, idx: int, version: int) -> AiosyncError | None:
        record = self._sender.workers.record(idx)
        if record.link is None:
            return record.error
        if record.link.visible >= version:
            return None
        late = f"worker {idx} attached, but did not apply version {version} in time"
        return record.failure(version) or AckTimeout(late, worker_ids=[idx], version=version)

    async def deliver_rest(self, seconds: float, wanted: Callable[[], bool]) -> None:
        """Wait for workers that have yet to get what was sent to them.

        Args:
            seconds: How long.
            wanted: Asked now and then; there is no use in going on once it says False.
        """
        loop, workers = asyncio.get_running_loop(), self._sender.workers
        give_up = loop.time() + seconds
        while self._owes() and wanted() and (left := give_up - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.1)):
                    await workers.changed.wait()

    def _owes(self) -> bool:
        workers = self._sender.workers
        if workers.arriving or any(map(workers.newest_for, self._socks)):
            return True
        for idx, link in workers.links.items():
            snapshot = workers.newest_for(idx)
            if snapshot is not None and link.visible < snapshot.version:
                if workers.record(idx).failure(snapshot.version) is None:
                    return True
        return False

    # -- closing -------------------------------------------------------------------------------

    def say_goodbye(self) -> None:
        """Let workers see the end even if other processes have copies of the pipes."""
        for sock in self._all:
            say_goodbye(sock)

    def close(self) -> None:
        """Close the pipes that nobody attached to. Idempotent."""
        loop = self._loop
        for sock in self._socks.values():
            # Elsewhere than on the loop its tasks have ended, or it is that of a parent process.
            if loop is not None and asyncio._get_running_loop() is loop and sock.fileno() >= 0:
                loop.remove_reader(sock)
            sock.close()
        self._socks.clear()

    def __del__(self) -> None:
        for sock in self._socks.values():
            sock.close()


def retrieved(handle: SendHandle) -> SendHandle:
    """Have nobody complain of a failure that is never waited for.

    Programs that end, or give up the scheme, need not wait for their last send.
    """
    handle._future.add_done_callback(lambda future: future.cancelled() or future.exception())
    return handle


def _only(weights: Any, worker_ids: Iterable[int]) -> Any:
    if not (isinstance(weights, Mapping) and is_per_worker(weights)):
        return weights
    return {idx: weights[idx] for idx in worker_ids if idx in weights}
