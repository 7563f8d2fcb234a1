"""What schemes of clusters share: a control stream, and a data plane beside it.

The sender listens, workers dial, as with TCP; how a worker finds the address and what moves
large payloads is each scheme's own. Workers on the sender's host may read shared memory instead.
Must not import torch, nor a concrete scheme.
"""

from __future__ import annotations

import abc
import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, Literal

from aiosync.errors import AiosyncError, AuthError, ConfigError, ConnectError
from aiosync.rendezvous.dialer import Left
from aiosync.rendezvous.listener import StreamListener
from aiosync.rendezvous.same_host import SameHost, dial_here
from aiosync.schemes._stream import StreamScheme
from aiosync.schemes.options import EngineOptions
from aiosync.schemes.sources import Sources
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.transports.shared_memory import Arena
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require
from aiosync.wire import Hello

if TYPE_CHECKING:
    from aiosync.sender import WeightSender

__all__ = ["INLINE_NBYTES", "ClusterScheme"]

INLINE_NBYTES = 4 * 2**20
"""Updates up to this size travel in the control stream.

Setting a transfer beside it going takes a few messages or calls, and a thread or two: as long as a
stream takes for so many bytes.
"""


class ClusterScheme(EngineOptions, StreamScheme):
    """Messages over a control stream, large payloads beside it.

    Args:
        strategy: As for :class:`WeightSyncScheme`, like all options up to ``timeout``.
        address: Where the sender listens for control streams; ``None`` lets the engine choose.
        token: Secret of the control stream; generated when omitted, and pickled with the
            scheme.
        reconnect: Seconds that a worker keeps trying to restore a lost link.
        handshake_timeout: Seconds that a peer has to prove its identity.
        limits: What a peer may announce.
        wire_dtype: What the sender casts floating-point weights to on their way.
        first_version: What a sender counts from; a trainer that resumes continues with it.
        shared_memory: Workers on the sender's host read updates from shared memory.
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        *,
        sync: bool,
        per_worker_weights: bool,
        apply: Literal["auto", "manual"],
        apply_copy: bool,
        guard: Literal["forward", "reading"],
        strict: bool,
        require: Require,
        timeout: float | None,
        address: str | None,
        token: str | bytes | None,
        reconnect: float | None,
        handshake_timeout: float,
        limits: Limits | None,
        wire_dtype: Dtypes | None,
        first_version: int,
        shared_memory: bool,
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
            wire_dtype=wire_dtype,
            first_version=first_version,
        )
        self._addresses = [] if address is None else [Address.parse(address)]
        self._credentials = Credentials(token=secrets.token_bytes(32) if token is None else token)
        self._dial = "receiver"
        self.reconnect = reconnect
        self.shared_memory = shared_memory
        self.handshake_timeout = handshake_timeout
        self.limits = limits

    _longest_pause = 0.5  # between two looks for the sender

    def _reset(self) -> None:
        super()._reset()
        self._link_lost = asyncio.Event()
        self._looking = self._invited = False  # for a trainer; and it said what its token is
        self._same_host: SameHost | None = None

    @property
    def _untaken(self) -> float | None:
        # Large updates travel elsewhere: what is said here fits into the buffers of a host, which
        # takes it however busy the process is, unless it is gone.
        return None if self._keepalive is None else 2 * self._keepalive

    # -- what each of them decides -------------------------------------------------------------

    def _carry(self, control: TCPTransport, *, listened: bool) -> Transport:
        """A link over a control stream, which it owns from then on; or that stream."""
        del listened
        return control

    @abc.abstractmethod
    def _default_address(self) -> Address:
        """Where the sender listens if no address was given."""

    @abc.abstractmethod
    async def _publish(self, address: Address) -> None:
        """Sender: let workers that have no address find this one."""

    _invites: str = ""
    """What :meth:`_invitation` lacks while there is none; empty where there never is one."""

    @abc.abstractmethod
    async def _invitation(self) -> tuple[str, bytes | None] | None:
        """Worker: what the sender published last: its address, and its token if that is new."""

    def _called(self) -> str:
        """Worker: how the sender's errors may call this process, if it has a name."""
        return ""

    # -- links ---------------------------------------------------------------------------------

    def _linked(self, control: TCPTransport, *, listened: bool) -> Transport:
        try:
            link = self._carry(control, listened=listened)
        except BaseException:  # raised again: the caller sees it
            control.abort()
            raise
        self._to_close.add(link)
        return link

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        control = TCPTransport(sock, limits=self.limits, name=name)
        return self._linked(control, listened=self._role == "sender")

    def _make_arena(self) -> Arena | None:
        if self._same_host is None:
            return None
        self._same_host.arena = arena = Arena()
        return arena

    # -- the sender ----------------------------------------------------------------------------

    def _listen(self, address: Address) -> StreamListener:
        listener = super()._listen(address)
        if self.shared_memory:
            self._same_host = SameHost(
                Address.parse(listener.url),
                self._credentials,
                handshake_timeout=self.handshake_timeout,
                limits=self.limits,
            )
            self._listeners.append(self._same_host)
        return listener

    def _bind(self, sources: Sources) -> None:
        self._addresses = self._addresses or [self._default_address()]
        super()._bind(sources)

    def _start_listening(self, sender: WeightSender) -> None:
        if self._listener is not None:

            def join(link: Transport, hello: Hello) -> None:
                assert link.channel is not None
                link.channel.call_on_end(self._link_lost.set)
                sender.workers.welcome(link, None, hello)

            def wrap(control: TCPTransport) -> Transport:
                return self._linked(control, listened=True)

            if self._same_host is not None:
                self._same_host.start(join, sender.workers.tasks)
            self._listener.start(join, sender.workers.crashed, wrap)
            sender.workers.tasks.start(self._publish(self._addresses[0]), "aiosync rendez-vous")

    # -- a worker ------------------------------------------------------------------------------

    async def _dial_trainer(self, left: Left, again: bool) -> Transport:
        self._looking = True
        found = await self._invitation()
        self._looking = False
        self._invited = self._accept(found)
        dialer = self._to_trainer()
        if self.shared_memory:
            rest = left()
            limit = self.handshake_timeout if rest is None else min(rest, self.handshake_timeout)
            here = await dial_here(
                dialer.address,
                self._credentials,
                self.limits,
                called=self._called(),
                timeout=limit,
            )
            if here is not None:
                return here
        return self._linked(await dialer.dial(left(), again=again), listened=False)

    def _nobody(self, within: str) -> str:
        where = f" at {self._addresses[0]}" if self._addresses else ""
        return (
            f"the trainer{where} was not reached{within}: it has to run init_on_sender() and "
            "connect()"
        )

    def _is_final(self, error: AiosyncError) -> bool:
        # A new trainer may be about to say where it is, and what its token is.
        waits = self._invited and isinstance(error, AuthError)
        return self._looking or (super()._is_final(error) and not waits)

    def _accept(self, found: tuple[str, bytes | None] | None) -> bool:
        """Take over where the sender is; whether that came with a token."""
        if found is not None:
            url, token = found
            self._addresses = [Address.parse(url)]
            if token is not None:
                self._credentials = Credentials(token=token)
            return token is not None
        where = self._addresses[0] if self._addresses else None
        if self._invites and (where is None or not (where.port or where.path)):
            raise ConnectError(self._invites)
        if where is None:
            raise ConfigError(
                "this worker does not know where the trainer listens: pickle or copy the scheme "
                "after init_on_sender(), or pass address="
            )
        return False
