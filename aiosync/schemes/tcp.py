"""The scheme over TCP between hosts, and over Unix sockets within one. Must not import torch."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Literal

from aiosync._log import log
from aiosync.errors import AiosyncError, AuthError, ConfigError, PeerClosed
from aiosync.rendezvous.dialer import Dialer, KeptLink, Left, to_dial
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS
from aiosync.schemes.options import TCPOptions, refuse
from aiosync.schemes.sources import Sources
from aiosync.schemes.stream import StreamFabric, StreamScheme
from aiosync.sender import Streaming, WeightSender, WorkerRegistry
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.tensors.delta import check_delta
from aiosync.transports.address import Address, parse_all
from aiosync.transports.base import Transport
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require
from aiosync.wire import Hello

__all__ = ["TCPWeightSyncScheme"]

_CANNOT_BIND = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
# A weight server is the only worker of its trainer.
_SERVER_IDX = 0


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
            object, or read :attr:`address`, after ``init_on_sender()``. With ``dial="both"``
            several may be given, and each attempt takes the first one that admits this side.
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
        stall_timeout: Seconds after which a worker is dropped that takes no more of an update, and
            does not say that all of it is here; ``None`` for never.
        take_over: Trainer of a weight server: bring the server back to this run when it dials again
            and another run has replaced it meanwhile. Otherwise calls raise.
        chunk_nbytes: Bytes that share one checksum, a multiple of 64.
        delta: Updates travel as changes to an older one: ``"off"``, ``"auto"`` where they arrive
            sooner so, or ``"always"``. Both sides need it, and zstandard. Experimental.
        streams: Connections of each link that this side dials, up to 16: between sites, where one
            connection gets less than the line.
        keepalive: Seconds after which the kernel probes a silent TCP peer; ``None`` for never.
        handshake_timeout: Seconds that a peer has to prove its identity.
        max_connections: Links that a listening side accepts at a time.
        limits: Limits on what a peer may announce once it has proved its identity.

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
        delta: Literal["auto", "off", "always"] = "off",
        streams: int = 1,
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
        credentials = Credentials(token=token, tls=tls)
        self._use(TCPFabric(address, credentials, dial))
        self._set_options(
            subscribe=subscribe,
            reconnect=reconnect,
            stall_timeout=stall_timeout,
            take_over=take_over,
            chunk_nbytes=chunk_nbytes,
            delta=delta,
            streams=streams,
            keepalive=keepalive,
            handshake_timeout=handshake_timeout,
            max_connections=max_connections,
            limits=limits,
        )

    @property
    def refused(self) -> dict[str, int]:
        """Connections that a listening side refused, by the name of the error."""
        listener = self._fabric.listener
        return {} if listener is None else dict(listener.refused)


class TCPFabric(StreamFabric[TCPWeightSyncScheme]):
    """Fabric over TCP, of a trainer that listens or of a weight server that both sides dial.

    Args:
        address: As for the scheme.
        credentials: As for :class:`StreamFabric`.
        dial: The side that dials, as for the scheme.

    Raises:
        ConfigError: An address is none, or cannot be dialled; or only one can be used.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        credentials: Credentials,
        dial: Literal["receiver", "both"],
    ) -> None:
        first, *others = parse_all(address)
        super().__init__(first, credentials)
        # True if both sides dial a weight server, and the trainer does not listen.
        self._has_server = dial == "both"
        if others and not self._has_server:
            raise ConfigError("several addresses need dial='both': a trainer listens at one")
        self.others: tuple[Address, ...] = to_dial(address)[1:] if others else ()
        if self._has_server:
            self.trainer_name: str = "the weight server"
            self.advice: str = "`aiosync serve` has to run there"
            # A server may name other hosts, which a user of Unix sockets did not ask to dial.
            self.follows: bool = {first.scheme, *(each.scheme for each in others)} == {"tcp"}

    def streams(self, scheme: TCPWeightSyncScheme) -> int:
        """Return the number of connections that the user has chosen."""
        return scheme.streams

    def keepalive(self, scheme: TCPWeightSyncScheme) -> float | None:
        """Return the seconds after which the kernel probes a silent peer; ``None`` for never."""
        return scheme.keepalive

    def max_connections(self, scheme: TCPWeightSyncScheme) -> int:
        """Return the greatest number of links that the listener has at a time."""
        return scheme.max_connections

    def subscribes(self, scheme: TCPWeightSyncScheme) -> bool:
        """Return True if a worker gets every update, and not only those that it asks for."""
        return scheme.subscribe

    def link(self, scheme: TCPWeightSyncScheme, sock: socket.socket, name: str) -> Transport:
        """Make a link over a connected socket."""
        return TCPTransport(sock, limits=scheme.limits, name=name)

    def streaming(self, scheme: TCPWeightSyncScheme) -> Streaming:
        """Return the settings of streamed payloads; raise if ``delta`` cannot be used."""
        both = "delta= compares one state of the weights, and per_worker_weights has many"
        refuse((scheme.delta != "off" and scheme.per_worker_weights, f"{both}: choose one of them"))
        return Streaming(scheme.chunk_nbytes, scheme.stall_timeout, scheme.delta)

    def takes_deltas(self, scheme: TCPWeightSyncScheme) -> bool:
        """Return True if a worker takes updates as changes to an older one; raise if it cannot."""
        if scheme.delta != "off":
            check_delta()
        return scheme.delta != "off"

    def early_address(self) -> Address | None:
        """Return the address to bind early; ``None`` if its port is known, or a server's."""
        address = self.address
        assert address is not None
        is_unknown = address.scheme == "tcp" and address.port == 0
        return address if is_unknown and not self._has_server else None

    def bind(self, scheme: TCPWeightSyncScheme, sources: Sources) -> None:
        """Bind the address that workers dial; with a weight server, expect only the server."""
        if self._has_server:
            _expect_server(sources)
            return
        try:
            super().bind(scheme, sources)
        except ConfigError as exc:
            if getattr(exc.__cause__, "errno", 0) not in _CANNOT_BIND:
                raise
            server = "to push to a weight server there, construct the scheme with dial='both'"
            raise ConfigError(f"{exc}; {server}") from exc

    def listen(self, scheme: TCPWeightSyncScheme, sender: WeightSender, *, given: bool) -> None:
        """Let workers in from now on, or keep dialling the weight server unless links are given."""
        workers = sender.workers
        if self.listener is not None:
            # connect() reports these refusals if it waits for a worker in vain.
            workers.admission.strangers = self.listener.refusals
            self.listener.start(
                lambda link, hello: workers.admission.welcome(link, None, hello), workers.crashed
            )
        elif self._has_server and not given:
            keep = self._keep_dialling(scheme, workers, self.dialer(scheme))
            workers.tasks.start(keep, "aiosync link to the weight server")

    async def _keep_dialling(
        self, scheme: TCPWeightSyncScheme, workers: WorkerRegistry, dialer: Dialer
    ) -> None:
        """Keep a link to the weight server, and replace a lost one within ``reconnect`` seconds."""
        idx = _SERVER_IDX
        # Newest version that the server has said it has.
        applied = 0
        # False again once the server has left.
        server_has_joined = False
        name = f"{dialer.name} at {dialer.where}"
        kept = KeptLink(
            name,
            {
                str(each): functools.partial(self._dial_server, workers, dialer, each)
                for each in dialer.addresses
            },
            functools.partial(self._introduce, scheme, workers),
            not_reached_text=dialer.not_reached_text,
        )
        workers.record(idx).where = kept.describe
        try:
            link, _ = await kept.connect(None)
            while True:
                ended = asyncio.Event()

                def on_end(link: TCPTransport = link, ended: asyncio.Event = ended) -> None:
                    nonlocal applied, server_has_joined
                    # The registry still has the link now, and forgets it after this call.
                    peer = workers.links.get(idx)
                    if workers.record(idx).has_left:
                        # A server that takes its place is awaited as the first one was.
                        server_has_joined = False
                    elif peer is not None and peer.transport is link:
                        server_has_joined, applied = True, max(applied, peer.outbox.applied)
                    ended.set()

                link.channel.call_on_end(on_end)
                workers.admission.welcome(link, idx)
                await ended.wait()
                if server_has_joined and scheme.reconnect == 0:
                    _log_given_up(workers, f"the link to {name} was lost, and reconnect is 0")
                    return
                # connect() limits its own wait for a server to join. The server may join later, so
                # this wait for it has no limit.
                seconds = scheme.reconnect if server_has_joined else None
                lost = PeerClosed("the weight server closed the link, or its process ended")
                link, _ = await kept.reconnect(lost, applied, seconds)
        except AiosyncError as exc:
            # _dial_server() raises an error that is noted already.
            if workers.record(idx).error is not exc:
                workers.not_reached(idx, exc)
            # A server that never joined is reported by connect().
            if workers.record(idx).joined:
                _log_given_up(workers, str(exc))

    async def _dial_server(
        self,
        workers: WorkerRegistry,
        dialer: Dialer,
        address: Address,
        left: Left,
        is_redial: bool,
    ) -> TCPTransport:
        """Dial the weight server; if it ended the last link with a final error, raise that."""
        record = workers.record(_SERVER_IDX)
        error = record.end or record.error
        if is_redial and isinstance(error, AuthError | ConfigError):
            # connect() and send() report this error.
            raise error
        return await dialer.dial(address, left, is_redial)

    async def dial_named(
        self, scheme: TCPWeightSyncScheme, address: Address, left: Left, is_redial: bool
    ) -> TCPTransport:
        """Make one attempt to reach a server that another server named."""
        return await self.dialer(scheme).dial(address, left, is_redial)

    async def _introduce(
        self,
        scheme: TCPWeightSyncScheme,
        workers: WorkerRegistry,
        link: TCPTransport,
        timeout: float | None,
    ) -> None:
        """Tell the weight server whose run this is; the sender reads the server's own Hello."""
        hello = Hello(
            role="sender",
            parts=not scheme.strict,
            model_id=self.model_id,
            pid=os.getpid(),
            strategy=scheme.strategy_str,
            epoch=workers.epoch,
            version=workers.version,
            take_over=scheme.take_over,
        )
        await link.send(hello, timeout=HANDSHAKE_SECONDS if timeout is None else timeout)


def _log_given_up(workers: WorkerRegistry, why: str) -> None:
    """Warn that a trainer does not dial its weight server any more."""
    text = f"no weight server any more, and no send reaches one: {why}"
    log(logging.WARNING, "gave up", text, model=workers.model_id)


def _expect_server(sources: Sources) -> None:
    """Make the weight server the only worker of a trainer; raise if it expects several."""
    if (sources.num_workers or 1) > 1:
        raise ConfigError(
            f"{sources.num_workers} workers are expected, but with dial='both' the weight "
            "server is the only peer: leave num_workers out"
        )
    if sources.num_workers is None:
        sources.num_workers = 1
