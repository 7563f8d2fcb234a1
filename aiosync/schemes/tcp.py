"""Weights over streams: TCP between hosts, Unix sockets within one.

Must not import torch, nor another concrete scheme.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Literal

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectTimeout,
    PeerClosed,
    RemoteProtocolError,
)
from aiosync.schemes._dialling import Backoff, Dialler
from aiosync.schemes._handshake import HANDSHAKE_SECONDS, greet
from aiosync.schemes._snapshots import PrivateStore, SnapshotStore
from aiosync.schemes._sources import Sources
from aiosync.schemes._streaming import Streaming
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.listening import StreamListener
from aiosync.schemes.rendezvous import AnyListener
from aiosync.schemes.sender import WeightSender
from aiosync.strategy import WeightStrategy
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require
from aiosync.wire import Hello

__all__ = ["TCPWeightSyncScheme"]


class TCPWeightSyncScheme(WeightSyncScheme):
    """Sends weights to workers on any host, over TCP or Unix sockets.

    The sender listens and workers dial its address at any time: before the first update, in the
    middle, after a crash. Each gets the newest version, and then every new one as it comes; a
    slow worker skips versions and delays nobody. A worker whose link is lost dials again and
    goes on where the transfer stopped. See ``docs/topics/across-machines.md``.

    Args:
        address: ``tcp://host:port`` or ``unix:///path``; a list of them, one for each worker,
            with ``dial="sender"``. Port 0 lets the system choose: pickle this object, or read
            :attr:`address`, after ``init_on_sender()``.
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
        sync: Kept for TorchRL's signature.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker weights of its own.
        apply: ``"auto"``, or ``"manual"`` to apply only in :meth:`apply_pending`.
        apply_copy: Copy updates into the parameters' memory.
        guard: ``"forward"``, or ``"reading"`` for ``with scheme.reading():``.
        strict: Every name and dtype has to match.
        require: How many workers have to apply an update for ``send()`` to succeed.
        timeout: Seconds that calls wait unless they say otherwise; ``None`` for ever.
        token: A secret that both sides prove to have; it never travels. Use at least 16 random
            bytes.
        tls: :class:`aiosync.TLS` with the names of certificate files, or an ``ssl.SSLContext``
            of this side.
        dial: Who dials: ``"receiver"``; ``"sender"``, where workers listen; or ``"both"``, where
            a weight server (``aiosync serve``) listens at the address.
        subscribe: Worker: get every update. If false, only what :meth:`pull` asks for.
        reconnect: Seconds that a worker, or a sender that dials, goes on trying to get a lost
            link back; ``None`` for ever, 0 for not at all.
        stall_timeout: Seconds without progress after which a worker that owes an answer is
            dropped; ``None`` for never.
        chunk_nbytes: Bytes that share one checksum, a multiple of 64.
        keepalive: Seconds after which the kernel asks a silent TCP peer whether it is there.
        handshake_timeout: Seconds that a peer has to prove who it is.
        max_connections: Links that a listening side takes at a time.
        limits: What a peer may announce once it has proved who it is.

    Raises:
        ConfigError: An option has an illegal value.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "tcp://127.0.0.1:0",
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        *,
        sync: bool = True,
        per_worker_weights: bool = False,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        token: str | bytes | None = None,
        tls: TLS | ssl.SSLContext | None = None,
        dial: Literal["receiver", "sender", "both"] = "receiver",
        subscribe: bool = True,
        reconnect: float | None = 30.0,
        stall_timeout: float | None = 60.0,
        chunk_nbytes: int = 4 * 2**20,
        keepalive: float | None = 30.0,
        handshake_timeout: float = 10.0,
        max_connections: int = 1024,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(
            strategy,
            sync=sync,
            per_worker_weights=per_worker_weights,
            apply=apply,
            apply_copy=apply_copy,
            guard=guard,
            strict=strict,
            require=require,
            timeout=timeout,
        )
        if dial not in ("receiver", "sender", "both"):
            raise ConfigError(f"dial must be 'receiver', 'sender' or 'both', got {dial!r}")
        if reconnect is not None and not reconnect >= 0:
            raise ConfigError(f"reconnect must be seconds or None, got {reconnect!r}")
        listed = [address] if isinstance(address, str | Address) else list(address)
        if not listed or (len(listed) > 1 and dial != "sender"):
            raise ConfigError("pass one address; a list of them only with dial='sender'")
        self._addresses = [Address.parse(each) for each in listed]
        self._credentials = Credentials(token=token, tls=tls)
        self._dial: Literal["receiver", "sender", "both"] = dial
        self._wants_updates = subscribe
        self.reconnect = reconnect
        self._options = Streaming(chunk_nbytes=chunk_nbytes, stall_timeout=stall_timeout)
        self._keepalive = keepalive
        self._handshake_timeout = handshake_timeout
        self._max_connections = max_connections
        self._limits = limits

    def _reset(self) -> None:
        super()._reset()
        self._session = secrets.token_bytes(16)
        self._arrived: asyncio.Queue[Transport] | None = None
        self._lost_at: float | None = None
        self._progress_then = -1
        self._pauses = Backoff()

    def _get_config(self) -> dict[str, Any]:
        state = super()._get_config()
        for name in ("_session", "_arrived", "_lost_at", "_progress_then", "_pauses"):
            del state[name]
        return state

    # -- what it is ----------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where the side that listens does so; with the port once it is bound."""
        if isinstance(self._listener, StreamListener):
            return self._listener.url
        idx = (self._worker_idx or 0) if self._dial == "sender" else 0
        return str(self._addresses[min(idx, len(self._addresses) - 1)])

    @property
    def reconnects(self) -> int:
        """Receiver: how often a lost link was replaced."""
        return 0 if self._receiver is None else self._receiver.reconnects

    @property
    def damaged_chunks(self) -> int:
        """Chunks that arrived damaged here (receiver), or had to be sent again (sender)."""
        if self._receiver is not None:
            return self._receiver.damaged
        peers = () if self._sender is None else self._sender.peers.values()
        return sum(peer.stream.resent for peer in peers if peer.stream is not None)

    @property
    def refused(self) -> dict[str, int]:
        """Connections that a listening side refused, by the name of the error."""
        listener = self._listener
        return dict(listener.counts.refused) if isinstance(listener, StreamListener) else {}

    # -- what the base class asks --------------------------------------------------------------

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        return TCPTransport(sock, limits=self._limits, name=name)

    def create_transport(self, pipe_or_context: Any) -> Transport:
        """A link over a connected stream socket. Takes ownership of it; needs a running loop.

        Args:
            pipe_or_context: Connected TCP or Unix socket, or a link as it is.
        """
        if isinstance(pipe_or_context, Transport):
            return pipe_or_context
        if not isinstance(pipe_or_context, socket.socket):
            raise ConfigError(f"{pipe_or_context!r} is no connected socket")
        return TCPTransport(pipe_or_context, limits=self._limits)

    def _make_store(self) -> SnapshotStore:
        return PrivateStore()

    def _streaming(self) -> Streaming:
        return self._options

    def _listen(self, address: Address) -> StreamListener:
        listener = StreamListener(
            address,
            credentials=self._credentials,
            limits=self._limits,
            max_connections=self._max_connections,
            handshake_timeout=self._handshake_timeout,
            keepalive=self._keepalive,
        )
        self._listener = listener
        return listener

    def _dialler(self, address: Address, name: str) -> Dialler:
        if address.scheme == "tcp" and address.port == 0:
            raise ConfigError(
                f"{address} names no port to dial: pickle or copy the scheme after "
                "init_on_sender(), which binds one, or choose a port"
            )
        return Dialler(
            address,
            credentials=self._credentials,
            limits=self._limits,
            keepalive=self._keepalive,
            attempt_timeout=self._handshake_timeout,
            name=name,
        )

    # -- the sender ----------------------------------------------------------------------------

    def _make_listener(self, sources: Sources) -> AnyListener | None:
        if self._dial == "receiver":
            listener = self._listen(self._addresses[0])
            self._addresses = [Address.parse(listener.url)]  # copies find the port in it
            return listener
        if sources.num_workers is None:
            sources.num_workers = len(self._addresses)
        return None

    def _start_listening(self, sender: WeightSender) -> None:
        if isinstance(self._listener, StreamListener):
            self._listener.start(sender.welcome, sender.workers._crashed)
        elif self._dial != "receiver" and not self._links and self._sources.pipes is None:
            for idx, address in enumerate(self._addresses):
                dialler = self._dialler(address, f"worker {idx}")
                keep = self._keep_dialling(sender, idx, dialler)
                sender.workers.tasks.start(keep, f"aiosync link to worker {idx}")

    async def _keep_dialling(self, sender: WeightSender, idx: int, dialler: Dialler) -> None:
        """Reach one worker, and again whenever its link is lost, until that takes too long."""
        backoff = Backoff()

        async def introduce(link: TCPTransport) -> None:
            hello = Hello(
                role="sender",
                model_id=self._model_id or "policy",
                pid=os.getpid(),
                strategy=self.strategy_str,
                epoch=self._clock.epoch,
                version=self._clock.current,
            )
            await link.send(hello, timeout=HANDSHAKE_SECONDS)

        patience = self.timeout
        while True:
            try:
                link = await dialler.reach(patience, greet=introduce, backoff=backoff)
            except AiosyncError as exc:
                sender.workers.not_reached(idx, exc)
                return
            ended = asyncio.Event()
            link.channel.call_on_end(ended.set)
            sender.welcome(link, idx)
            began = sender.workers.clock.current
            await ended.wait()
            if sender.workers.clock.current != began:
                backoff.reset()  # it was of some use
            await backoff.wait()
            if self.reconnect == 0:
                return
            patience = self.reconnect

    # -- the receiver --------------------------------------------------------------------------

    @property
    def _subscribes(self) -> bool:  # type: ignore[override]  # an option here, a constant above
        return self._wants_updates

    def _hello(self) -> Hello:
        receiver = self._receiver
        inbox = None if receiver is None else receiver.inbox
        has = inbox is not None and inbox.version > 0
        partial = (None if receiver is None else receiver.resume()) or (None, None, 0)
        plain = super()._hello()
        return Hello(
            role="receiver",
            model_id=plain.model_id,
            pid=plain.pid,
            worker_idx=plain.worker_idx,
            strategy=plain.strategy,
            has_target=plain.has_target,
            epoch=inbox.epoch if inbox is not None and has else None,
            version=inbox.version if inbox is not None and has else None,
            session=self._session,
            subscribe=self._wants_updates,
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
        )

    async def _reach(self, timeout: float | None) -> Transport:
        if self._pipe is not None:
            return await super()._reach(timeout)
        if self._dial == "sender":
            return await self._next_arrival(timeout)
        return await self._dialler(self._addresses[0], "the trainer").reach(timeout)

    async def _next_arrival(self, timeout: float | None) -> Transport:
        """Wait for the sender to dial."""
        if self._arrived is None:
            self._arrived = asyncio.Queue()
            idx = self._worker_idx or 0
            if idx >= len(self._addresses):
                raise ConfigError(
                    f"there is no address for worker {idx}: with dial='sender' the scheme needs "
                    "one address for each worker, in the order of their worker_idx"
                )
            self._listen(self._addresses[idx]).start(self._on_sender, self._on_listener_crash)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    link = await self._arrived.get()
                    try:
                        await self._check_sender(link)
                    except AiosyncError:
                        link.abort()  # it was told, or has gone; the next one may be right
                        continue
                    except BaseException:  # cancelled: raised again
                        link.abort()
                        raise
                    return link
        except TimeoutError as exc:
            raise ConnectTimeout(f"no trainer dialled {self.address} in {timeout:g} s") from exc

    def _on_sender(self, link: TCPTransport) -> None:
        assert self._arrived is not None
        self._arrived.put_nowait(link)  # their number is bounded by the listener

    def _on_listener_crash(self, error: BaseException) -> None:
        if self._receiver is not None:
            self._receiver.fail(error)

    async def _check_sender(self, link: Transport) -> None:
        message = (await link.recv(timeout=HANDSHAKE_SECONDS)).message
        if not isinstance(message, Hello) or message.role != "sender":
            raise RemoteProtocolError("expected the Hello of a sender")

    async def _relink(self, lost: AiosyncError) -> Transport:
        receiver = self._receiver
        assert receiver is not None
        loop = asyncio.get_running_loop()
        if self._pipe is not None or self.reconnect == 0:
            raise lost
        if receiver.progress != self._progress_then:  # the last link was of some use
            self._progress_then = receiver.progress
            self._lost_at = loop.time()
            self._pauses.reset()
        assert self._lost_at is not None
        while True:
            left: float | None = None
            if self.reconnect is not None:
                left = self._lost_at + self.reconnect - loop.time()
                if left <= 0:
                    raise _gave_up(lost, self.reconnect) from lost
            try:
                await self._pauses.wait()
                link = await self._reach(left)
            except (AuthError, ConfigError):
                raise
            except ConnectTimeout as exc:
                raise _gave_up(lost, self.reconnect or 0.0) from exc
            try:
                welcome = await greet(link, self._hello(), timeout=HANDSHAKE_SECONDS)
            except ConfigError:
                link.abort()
                raise
            except AiosyncError as exc:
                link.abort()
                lost = exc
                continue
            except BaseException:  # cancelled: raised again
                link.abort()
                raise
            self._worker_idx = welcome.worker_idx
            return link

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """See :meth:`WeightSyncScheme.aclose`."""
        listener = self._listener
        try:
            await super().aclose()
        finally:
            if isinstance(listener, StreamListener) and self._pid == os.getpid():
                await listener.aclose()

    def _abort_unused_links(self) -> None:
        super()._abort_unused_links()
        while self._arrived is not None and not self._arrived.empty():
            self._arrived.get_nowait().abort()


def _gave_up(lost: AiosyncError, seconds: float) -> PeerClosed:
    return PeerClosed(
        f"the trainer's link was lost ({lost}), and it was not reached again within {seconds:g} s"
    )
