"""Schemes over streams: TCP between hosts, Unix sockets within one.

The common part of all schemes over streams comes first: where a side listens, which side dials, and
what a worker says. Must not import torch.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import os
import socket
import ssl
import weakref
from typing import Any, Literal

from aiosync._version import __version__
from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
)
from aiosync.rendezvous.dialer import Dialer, KeptLink, Left, is_final
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS
from aiosync.rendezvous.listener import StreamListener
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.options import StreamOptions, TCPOptions
from aiosync.schemes.roles import Trainer
from aiosync.schemes.sources import Sources
from aiosync.sender import Streaming, WeightSender, WorkerRegistry
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require
from aiosync.wire import Hello, stats_values

__all__ = ["StreamScheme", "TCPWeightSyncScheme"]

_NOT_OURS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
_ADVICE = {
    "receiver": "it has to run init_on_sender() and connect(), or `aiosync serve`",
    "both": "`aiosync serve` has to run there",
}
"""Advice for the side that listens, by ``dial``."""


class StreamScheme(StreamOptions, WeightSyncScheme):
    """Common part of schemes over streams; see :class:`aiosync.TCPWeightSyncScheme`."""

    # None until a scheme of a cluster has chosen or found one.
    _address: Address | None
    _credentials: Credentials
    _dial: Literal["receiver", "both"] = "receiver"
    # These are options of some schemes, and constants of the others.
    _keepalive: float | None = 30.0
    _max_connections: int = 65536

    def _reset(self, model_id: str | None) -> None:
        super()._reset(model_id)
        self._listener: StreamListener | None = None

    def _planning_limits(self) -> Limits | None:
        return self.limits

    # -- addresses ----------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Address of the side that listens; with the port once it is bound."""
        if self._listener is not None:
            return self._listener.url
        if self._address is None:
            raise LocalProtocolError("the scheme has no address yet: call init_on_sender() first")
        return str(self._address)

    @property
    def _untaken(self) -> float | None:
        # A worker's messages are small, and the trainer's host takes them unless it is gone. A
        # worker may be too busy to take an update for as long as stall_timeout says: no kernel may
        # end its link before that.
        if self._life.role != "receiver" or self._keepalive is None:
            return None
        return 2 * self._keepalive

    def _status(self) -> dict[str, Any]:
        """Return the answer to peers that ask for a status, as :meth:`WeightClient.stats` does."""
        return {
            "aiosync": __version__,
            "url": self.address,
            "stats": stats_values([self.stats()]),
        }

    def _listen(self, address: Address) -> StreamListener:
        # A weak reference, as a scheme that is forgotten has to be closed.
        asked = weakref.WeakMethod(self._status)
        self._listener = listener = StreamListener(
            address,
            credentials=self._credentials,
            limits=self.limits,
            max_connections=self._max_connections,
            handshake_timeout=self.handshake_timeout,
            keepalive=self._keepalive,
            untaken=self._untaken,
            status=lambda: (asked() or dict)(),
        )
        self._life.listeners.append(listener)
        return listener

    def _bind(self, sources: Sources) -> None:
        # The listener may have been bound early.
        assert self._address is not None
        listener = self._listener or self._listen(self._address)
        # Copies find the port in the address.
        self._address = Address.parse(listener.url)

    def _bind_early(self) -> None:
        """Bind the address that copies dial which are made before ``init_on_sender()``."""
        address = self._early_address() if self._life.role is None else None
        if address is not None and self._listener is None:
            self._address = Address.parse(self._listen(address).url)

    def _early_address(self) -> Address | None:
        """Return the address to bind early; ``None`` if copies find the sender by other means."""
        return None

    def _dialer(self) -> Dialer:
        address = self._address
        assert address is not None
        if _has_no_port(address):
            raise ConfigError(
                f"{address} has no port to dial: pickle or copy the scheme after "
                "init_on_sender(), which binds one, or choose a port"
            )
        return Dialer(
            address=address,
            credentials=self._credentials,
            limits=self.limits,
            keepalive=self._keepalive,
            untaken=self._untaken,
            attempt_timeout=self.handshake_timeout,
            name="the weight server" if self._dial == "both" else "the trainer",
            advice=_ADVICE[self._dial],
        )

    @property
    def reconnects(self) -> int:
        """Receiver: number of times that a lost link was replaced."""
        receiver = self._life.receiver
        return 0 if receiver is None else receiver.reconnects

    @abc.abstractmethod
    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        """Make a link over a connected socket."""

    def create_transport(self, pipe_or_context: Any) -> Transport:
        """Make a link over a connected stream socket. Takes ownership of it; needs a running loop.

        Args:
            pipe_or_context: Connected TCP or Unix socket, or an existing link.
        """
        if isinstance(pipe_or_context, Transport):
            return pipe_or_context
        if not isinstance(pipe_or_context, socket.socket):
            raise ConfigError(f"expected a connected socket, got {pipe_or_context!r}")
        return self._transport_over(pipe_or_context, "the peer")

    # -- meeting the sender --------------------------------------------------------------------

    async def _dial_trainer(self, left: Left, again: bool) -> Transport:
        return await self._dialer().dial(left(), again=again)

    def _nobody(self, within: str) -> str:
        return self._dialer().not_reached(within)

    def _is_final(self, error: AiosyncError) -> bool:
        return is_final(error)


def _has_no_port(address: Address) -> bool:
    return address.scheme == "tcp" and address.port == 0


class TCPWeightSyncScheme(TCPOptions, StreamScheme):
    """Scheme that sends weights to workers on any host, over TCP or Unix sockets.

    The sender listens and workers dial its address at any time: before the first update, in the
    middle, after a crash. Each worker gets the newest version, and then every new one as it comes;
    a slow worker skips versions and does not delay the others. A worker whose link is lost dials
    again and goes on where the transfer stopped. See ``docs/topics/across-machines.md``.

    Options may be assigned until :meth:`connect`, except ``address``, ``token``, ``tls`` and
    ``dial``; a side that listens takes ``keepalive``, ``handshake_timeout``, ``max_connections``
    and ``limits`` as they are when it starts listening: a sender in ``init_on_sender()``.

    Args:
        address: ``tcp://host:port`` or ``unix:///path``. Port 0 lets the system choose: pickle this
            object, or read :attr:`address`, after ``init_on_sender()``.
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
        sync: As for :class:`aiosync.WeightSyncScheme`.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        apply_copy: Copy updates into the parameters' memory.
        buffers: ``"persistent"`` keeps updates out of other buffers of a worker's module.
        guard: ``"forward"``, or ``"reading"`` for ``with scheme.reading():``.
        strict: Every name and dtype must match.
        require: Number of workers that must apply an update for ``send()`` to succeed.
        timeout: Default timeout of calls in seconds; ``None`` for ever.
        wire_dtype: A floating-point dtype to which the sender casts the weights on their way; or
            one for each name pattern.
        first_version: A sender's first version; a trainer that resumes continues with it.
        token: A secret that both sides prove that they have; it is never sent. Use at least 16
            random bytes.
        tls: :class:`aiosync.TLS` with the names of certificate files, or an ``ssl.SSLContext`` of
            this side.
        dial: The side that dials: ``"receiver"``; or ``"both"``, and a weight server (``aiosync
            serve``) listens at the address.
        subscribe: Worker: get every update. If false, only what :meth:`pull` asks for.
        reconnect: Seconds that a worker, or a sender that dials, keeps trying to restore a lost
            link; ``None`` for ever, 0 for not at all.
        stall_timeout: Seconds without progress after which a worker that owes an answer is dropped;
            ``None`` for never.
        take_over: Trainer of a weight server: bring the server back to this run when it dials again
            and another run has replaced it meanwhile. Otherwise calls raise.
        chunk_nbytes: Bytes that share one checksum, a multiple of 64.
        keepalive: Seconds after which the kernel probes a silent TCP peer; ``None`` for never.
        handshake_timeout: Seconds that a peer has to prove its identity.
        max_connections: Links that a listening side accepts at a time.
        limits: Limits on what a peer may announce once it has proved its identity.

    Raises:
        ConfigError: An option has an illegal value.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        *,
        sync: bool = True,
        per_worker_weights: bool = False,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        buffers: Literal["all", "persistent"] = "all",
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        wire_dtype: Dtypes | None = None,
        first_version: int = 1,
        token: str | bytes | None = None,
        tls: TLS | ssl.SSLContext | None = None,
        dial: Literal["receiver", "both"] = "receiver",
        subscribe: bool = True,
        reconnect: float | None = 30.0,
        stall_timeout: float | None = 60.0,
        take_over: bool = False,
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
            buffers=buffers,
            guard=guard,
            strict=strict,
            require=require,
            timeout=timeout,
            wire_dtype=wire_dtype,
            first_version=first_version,
        )
        if dial not in ("receiver", "both"):
            raise ConfigError(f"dial must be 'receiver' or 'both', got {dial!r}")
        self._address = Address.parse(address)
        self._credentials = Credentials(token=token, tls=tls)
        self._dial = dial
        self._set_options(
            subscribe=subscribe,
            reconnect=reconnect,
            stall_timeout=stall_timeout,
            take_over=take_over,
            chunk_nbytes=chunk_nbytes,
            keepalive=keepalive,
            handshake_timeout=handshake_timeout,
            max_connections=max_connections,
            limits=limits,
        )

    # -- options -------------------------------------------------------------------------------

    @property
    def _subscribes(self) -> bool:  # type: ignore[override]  # an option here, a constant above
        return self.subscribe

    @property
    def _keepalive(self) -> float | None:  # type: ignore[override]  # an option here, too
        return self.keepalive

    @property
    def _max_connections(self) -> int:  # type: ignore[override]  # an option here, too
        return self.max_connections

    @property
    def refused(self) -> dict[str, int]:
        """Connections that a listening side refused, by the name of the error."""
        return {} if self._listener is None else dict(self._listener.refused)

    # -- methods that the base class calls -----------------------------------------------------

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        return TCPTransport(sock, limits=self.limits, name=name)

    def _streaming(self) -> Streaming:
        return Streaming(chunk_nbytes=self.chunk_nbytes, stall_timeout=self.stall_timeout)

    # -- the sender ----------------------------------------------------------------------------

    def _bind(self, sources: Sources) -> None:
        if self._dial == "both":
            if (sources.num_workers or 1) > 1:
                raise ConfigError(
                    f"{sources.num_workers} workers are expected, but with dial='both' the weight "
                    "server is the only peer: leave num_workers out"
                )
            sources.num_workers = 1
            return
        try:
            super()._bind(sources)
        except ConfigError as exc:
            if getattr(exc.__cause__, "errno", 0) not in _NOT_OURS:
                raise
            server = "to push to a weight server there, construct the scheme with dial='both'"
            raise ConfigError(f"{exc}; {server}") from exc

    def _early_address(self) -> Address | None:
        address = self._address
        assert address is not None
        return address if _has_no_port(address) and self._dial == "receiver" else None

    def _start_listening(self, trainer: Trainer, sender: WeightSender) -> None:
        if self._listener is not None:
            workers = sender.workers
            workers.strangers = self._listener.refusals
            self._listener.start(
                lambda link, hello: workers.welcome(link, None, hello), workers.crashed
            )
        elif self._dial == "both" and not trainer.links and self._life.given.sources.pipes is None:
            keep = self._keep_dialling(sender.workers, self._dialer())
            sender.workers.tasks.start(keep, "aiosync link to the weight server")

    async def _keep_dialling(self, workers: WorkerRegistry, dialer: Dialer) -> None:
        """Reach the weight server; after a lost link try again for ``reconnect`` seconds."""
        # The server is the only worker.
        idx = 0
        # Newest version that the server has said it has.
        applied = 0
        joined = False

        async def dial(left: Left, again: bool) -> TCPTransport:
            error = workers.record(idx).error
            if again and isinstance(error, AuthError | ConfigError):
                # The error is final: connect() and send() report it.
                raise error
            return await dialer.dial(left(), again=again)

        async def introduce(link: TCPTransport, timeout: float | None) -> None:
            hello = Hello(
                role="sender",
                parts=not self.strict,
                model_id=self.model_id or "policy",
                pid=os.getpid(),
                strategy=self.strategy_str,
                epoch=workers.epoch,
                version=workers.version,
                take_over=self.take_over,
            )
            await link.send(hello, timeout=HANDSHAKE_SECONDS if timeout is None else timeout)

        kept = KeptLink(
            f"{dialer.name} at {dialer.address}", dial, introduce, nobody=dialer.not_reached
        )
        workers.record(idx).where = kept.describe
        try:
            link, _ = await kept.connect(None)
            while True:
                ended = asyncio.Event()

                def on_end(link: TCPTransport = link, ended: asyncio.Event = ended) -> None:
                    nonlocal applied, joined
                    # The registry forgets the link after this.
                    peer = workers.links.get(idx)
                    if workers.record(idx).has_left:
                        # A server that takes its place is as welcome as the first one.
                        joined = False
                    elif peer is not None and peer.transport is link:
                        joined, applied = True, max(applied, peer.outbox.applied)
                    ended.set()

                link.channel.call_on_end(on_end)
                workers.welcome(link, idx)
                await ended.wait()
                if joined and self.reconnect == 0:
                    return
                # connect() limits its own wait for the server; one that comes later is welcome,
                # too.
                seconds = self.reconnect if joined else None
                lost = PeerClosed("the weight server closed the link, or its process ended")
                link, _ = await kept.reconnect(lost, seconds, applied)
        except AiosyncError as exc:
            if workers.record(idx).error is not exc:
                workers.not_reached(idx, exc)
