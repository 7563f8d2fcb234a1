"""What schemes of distributed engines share: a control stream, and payloads beside it.

The sender listens, workers dial, as with TCP; how a worker finds the address and what carries
the payloads is each engine's own. Workers on the sender's host may read shared memory instead.
Must not import torch, nor a concrete scheme.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import secrets
import socket
import weakref
from typing import TYPE_CHECKING, Literal

from aiosync.errors import AiosyncError, AuthError, ConfigError, ConnectTimeout
from aiosync.rendezvous.listener import AnyListener, StreamListener
from aiosync.rendezvous.same_host import SameHost, available, dial_here
from aiosync.schemes._stream_receiving import StreamReceiving
from aiosync.schemes.options import EngineOptions
from aiosync.schemes.sources import Sources
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.transports.shared_memory import Arena, SharedMemTransport
from aiosync.transports.stream import FramedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits, Require

if TYPE_CHECKING:
    from aiosync.sender import WeightSender

__all__ = ["INLINE_NBYTES", "EngineScheme"]

INLINE_NBYTES = 4 * 2**20
"""Updates up to this size travel in the control stream.

Setting a transfer beside it going takes a few messages or calls, and a thread or two: as long as a
stream takes for so many bytes.
"""

_AGAIN_SECONDS = 0.2
_ATTEMPT_SECONDS = 5.0  # at one address, before it is looked up again


class EngineScheme(EngineOptions, StreamReceiving):
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
        )
        self._addresses = [] if address is None else [Address.parse(address)]
        self._credentials = Credentials(token=secrets.token_bytes(32) if token is None else token)
        self._dial = "receiver"
        self.reconnect = reconnect
        self.shared_memory = shared_memory
        self.handshake_timeout = handshake_timeout
        self.limits = limits

    def _reset(self) -> None:
        super()._reset()
        self._beside_links: weakref.WeakSet[Transport] = weakref.WeakSet()
        self._same_host: SameHost | None = None

    @property
    def _untaken(self) -> float | None:
        # Large updates travel elsewhere: what is said here fits into the buffers of a host, which
        # takes it however busy the process is, unless it is gone.
        return None if self._keepalive is None else 2 * self._keepalive

    # -- what an engine decides ----------------------------------------------------------------

    @abc.abstractmethod
    def _carry(self, control: TCPTransport, *, listened: bool) -> Transport:
        """A link over a control stream, which it owns from then on; or that stream."""

    def _default_address(self) -> Address:
        """Where the sender listens if no address was given."""
        return Address.parse("tcp://127.0.0.1:0")

    async def _publish(self, address: Address) -> None:
        """Sender: let workers that have no address find this one."""

    async def _look_up(self, timeout: float | None) -> None:
        """Worker: find the sender's address, if it is to be found anywhere else than here.

        Raises:
            ConnectTimeout: It did not appear in time.
        """

    @property
    def _may_change(self) -> bool:
        """Whether looking the sender up again may find another one."""
        return False

    @property
    def _shares_memory(self) -> bool:
        """Whether workers on the sender's host read updates from shared memory."""
        return self.shared_memory and available()

    def _called(self) -> str:
        """Worker: how the sender's errors may call this process, if it has a name."""
        return ""

    def _joined_here(self, channel: FramedTransport) -> None:
        """Sender: a worker on this host opened a link through shared memory."""

    # -- links ---------------------------------------------------------------------------------

    def _linked(self, control: TCPTransport, *, listened: bool) -> Transport:
        try:
            link = self._carry(control, listened=listened)
        except BaseException:  # raised again: the caller sees it
            control.abort()
            raise
        self._beside_links.add(link)
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
        if self._shares_memory:
            self._same_host = SameHost(
                Address.parse(listener.url),
                self._credentials,
                handshake_timeout=self.handshake_timeout,
                limits=self.limits,
            )
        return listener

    def _make_listener(self, sources: Sources) -> AnyListener | None:
        del sources
        listener = self._listener  # bound early
        if not isinstance(listener, StreamListener):
            address = self._addresses[0] if self._addresses else self._default_address()
            listener = self._listen(address)
        self._addresses = [Address.parse(listener.url)]  # copies find the port in it
        return listener

    def _start_listening(self, sender: WeightSender) -> None:
        if isinstance(self._listener, StreamListener):

            def welcome(control: TCPTransport) -> None:
                with contextlib.suppress(AiosyncError):  # the engine has ended; the worker sees it
                    sender.workers.welcome(self._linked(control, listened=True))

            def welcome_here(link: SharedMemTransport) -> None:
                self._joined_here(link.channel)
                sender.workers.welcome(link)

            if self._same_host is not None:
                self._same_host.start(welcome_here, sender.workers.tasks)
            self._listener.start(welcome, sender.workers.crashed)
            sender.workers.tasks.start(self._publish(self._addresses[0]), "aiosync rendez-vous")

    # -- a worker ------------------------------------------------------------------------------

    async def _reach(self, timeout: float | None) -> Transport:
        if self._pipe is not None:
            return await super()._reach(timeout)
        loop = asyncio.get_running_loop()
        give_up = None if timeout is None else loop.time() + timeout
        while True:
            left = None if give_up is None else max(0.0, give_up - loop.time())
            await self._look_up(left)
            if not self._addresses:
                raise ConfigError(
                    "this worker does not know where the trainer listens: pickle or copy the "
                    "scheme after init_on_sender(), or pass address="
                )
            left = None if give_up is None else max(0.0, give_up - loop.time())
            attempt = _ATTEMPT_SECONDS if left is None else min(_ATTEMPT_SECONDS, left)
            try:
                return await self._reach_at(self._addresses[0], attempt)
            except ConnectTimeout:
                if left is not None and left <= attempt:
                    raise
                continue
            except AuthError:
                # A new trainer may be about to say where it is, and what its token is.
                if not self._may_change or (left is not None and left <= _AGAIN_SECONDS):
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)
                continue

    async def _reach_at(self, address: Address, timeout: float) -> Transport:
        dialler = self._dialler(address, "the trainer")

        async def attempt() -> TCPTransport | SharedMemTransport:
            here = None
            if self._shares_memory:
                here = await dial_here(
                    address, self._credentials, self.limits, called=self._called()
                )
            return here or await dialler.dial(again=self._greeted is not None)

        link = await dialler.until(attempt, timeout)
        return link if isinstance(link, SharedMemTransport) else self._linked(link, listened=False)

    # -- closing -------------------------------------------------------------------------------

    def _close_listener(self) -> None:
        super()._close_listener()
        if self._same_host is not None and not self._inherited:
            self._same_host.close()

    async def _close_here(self) -> None:
        links = list(self._beside_links)
        try:
            await super()._close_here()
        finally:
            await asyncio.gather(*(link.aclose() for link in links))
