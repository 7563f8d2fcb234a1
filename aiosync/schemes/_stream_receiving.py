"""A worker's half of the stream scheme: finding the trainer, and finding it again.

Must not import torch, nor a concrete scheme.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, Any, Literal

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectTimeout,
    PeerClosed,
)
from aiosync.rendezvous.dialer import Backoff, Dialer
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS, Refused, greet
from aiosync.rendezvous.listener import StreamListener
from aiosync.schemes._arriving import TrainersArriving
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.types import Limits
from aiosync.wire import Hello, Welcome

if TYPE_CHECKING:
    from aiosync.receiver.receiver import WeightReceiver

__all__ = ["OF_USE_SECONDS", "StreamReceiving"]

OF_USE_SECONDS = 1.0
"""A link that lasted for so long counts as one, even if nothing came over it."""

_ADVICE = {
    "receiver": "it has to run init_on_sender() and connect(), or `aiosync serve`",
    "sender": "it has to run init_on_receiver() and connect(), with dial='sender' as well",
    "both": "`aiosync serve` has to run there",
}
"""What the side that listens has to do, by ``dial``."""


class StreamReceiving(TrainersArriving):
    """Methods of a receiver over streams; see :class:`aiosync.TCPWeightSyncScheme`."""

    _addresses: list[Address]
    _credentials: Credentials
    _dial: Literal["receiver", "sender", "both"]
    # Options of some of these schemes, constants of the others.
    _keepalive: float | None = 30.0
    _max_connections: int = 65536

    def _reset(self) -> None:
        super()._reset()
        self._session = secrets.token_bytes(16)
        self._lost_at: float | None = None
        self._progress_then = -1
        self._linked_at = 0.0
        self._given_idx: int | None = None  # by the user; the sender may choose another
        self._applied_epoch: int | None = None
        self._pauses = Backoff()

    def _planning_limits(self) -> Limits | None:
        return self.limits

    # -- where --------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where the side that listens does so; with the port once it is bound."""
        if isinstance(self._listener, StreamListener):
            return self._listener.url
        idx = (self._worker_idx or 0) if self._dial == "sender" else 0
        return str(self._addresses[min(idx, len(self._addresses) - 1)])

    @property
    def _untaken(self) -> float | None:
        # What a worker says is little, and a trainer's host takes it unless it is gone. A worker
        # may be too busy to take an update for as long as stall_timeout says: no kernel has to
        # end its link before.
        if self._role != "receiver" or self._keepalive is None:
            return None
        return 2 * self._keepalive

    def _listen(self, address: Address) -> StreamListener:
        listener = StreamListener(
            address,
            credentials=self._credentials,
            limits=self.limits,
            max_connections=self._max_connections,
            handshake_timeout=self.handshake_timeout,
            keepalive=self._keepalive,
            untaken=self._untaken,
        )
        self._listener = listener
        return listener

    def _bind_early(self) -> None:
        """Bind what copies will dial: they are made before ``init_on_sender()``."""
        address = self._early_address() if self._role is None else None
        if address is not None and self._listener is None:
            self._addresses = [Address.parse(self._listen(address).url)]

    def _early_address(self) -> Address | None:
        """What to bind early; ``None`` where copies find the sender by other means."""
        return None

    def _dialler(self, address: Address, name: str) -> Dialer:
        if address.scheme == "tcp" and address.port == 0:
            advice = (
                "choose one: with dial='sender' a worker binds it, and this side has to know it"
                if self._dial == "sender"
                else "pickle or copy the scheme after init_on_sender(), which binds one, or "
                "choose a port"
            )
            raise ConfigError(f"{address} has no port to dial: {advice}")
        return Dialer(
            address=address,
            credentials=self._credentials,
            limits=self.limits,
            keepalive=self._keepalive,
            untaken=self._untaken,
            attempt_timeout=self.handshake_timeout,
            name=name,
            advice=_ADVICE[self._dial],
        )

    @property
    def reconnects(self) -> int:
        """Receiver: how often a lost link was replaced."""
        return 0 if self._receiver is None else self._receiver.reconnects

    def create_transport(self, pipe_or_context: Any) -> Transport:
        """A link over a connected stream socket. Takes ownership of it; needs a running loop.

        Args:
            pipe_or_context: Connected TCP or Unix socket, or an existing link.
        """
        if isinstance(pipe_or_context, Transport):
            return pipe_or_context
        if not isinstance(pipe_or_context, socket.socket):
            raise ConfigError(f"expected a connected socket, got {pipe_or_context!r}")
        return self._transport_over(pipe_or_context, "the peer")

    # -- meeting the sender --------------------------------------------------------------------

    def _hello(self) -> Hello:
        receiver = self._receiver
        epoch, version = (None, 0) if receiver is None else receiver.held
        partial = (None if receiver is None else receiver.partial) or (None, None, 0)
        plain = super()._hello()
        if self._lost_at is None:
            self._given_idx = plain.worker_idx
        return Hello(
            role="receiver",
            model_id=plain.model_id,
            pid=plain.pid,
            worker_idx=plain.worker_idx,
            strategy=plain.strategy,
            has_target=plain.has_target,
            epoch=epoch if version else None,
            version=version or None,
            session=self._session,
            subscribe=self._subscribes,
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
        )

    async def _reach(self, timeout: float | None) -> Transport:
        if self._pipe is not None:
            return await super()._reach(timeout)
        if self._dial == "sender":
            return await self._next_arrival(timeout)
        name = "the weight server" if self._dial == "both" else "the trainer"
        again = self._greeted is not None
        dialer = self._dialler(self._addresses[0], name)
        return await dialer.until(lambda: dialer.dial(again=again), timeout)

    _tries_again = AiosyncError

    async def _introduce(self, receiver: WeightReceiver, timeout: float | None) -> Welcome:
        welcome = await super()._introduce(receiver, timeout)
        self._greeted = receiver.transport
        return welcome

    async def _next_arrival(self, timeout: float | None) -> Transport:
        """Wait for the sender to dial."""
        if self._listener is None:
            idx = self._worker_idx or 0
            if idx >= len(self._addresses):
                raise ConfigError(
                    f"there is no address for worker {idx}: with dial='sender' the scheme needs "
                    "one address for each worker, in the order of their worker_idx"
                )
            self._listen(self._addresses[idx]).start(self._on_sender, self._on_listener_crash)
        try:
            async with asyncio.timeout(timeout):
                while self._arrived is None:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError as exc:
            raise ConnectTimeout(
                f"no trainer was accepted on {self.address} within {timeout:g} "
                f"s{self._why_nobody()}"
            ) from exc
        self._taken, self._arrived = self._arrived, None
        return self._taken

    def _why_nobody(self) -> str:
        listener = self._listener
        why = listener.counts.last_refusal if isinstance(listener, StreamListener) else None
        return "" if why is None else f"; last refusal: {why}"

    async def _relink(self, lost: AiosyncError) -> Transport:
        receiver = self._receiver
        assert receiver is not None
        loop = asyncio.get_running_loop()
        if self._pipe is not None or self.reconnect == 0:
            raise lost
        lasted = loop.time() - self._linked_at
        if receiver.progress != self._progress_then or lasted > OF_USE_SECONDS:
            # The last link was of some use, if only to wait for what is new.
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
                raise _gave_up(lost, self.reconnect or 0.0, exc.__cause__) from exc
            patience = HANDSHAKE_SECONDS
            if self.reconnect is not None:
                left = self._lost_at + self.reconnect - loop.time()
                patience = min(patience, max(0.0, left))
            try:
                welcome = await greet(link, self._hello_on(link), timeout=patience)
            except AiosyncError as exc:
                link.abort()
                chosen = self._given_idx is None and self._worker_idx is not None
                if chosen and isinstance(exc, ConfigError | Refused):
                    self._worker_idx = None  # a new trainer may have given it to another worker
                elif isinstance(exc, ConfigError):
                    raise
                elif not isinstance(exc, ConnectTimeout):  # of the moment that was left, perhaps
                    lost = exc
                continue
            except BaseException:  # cancelled: raised again
                link.abort()
                raise
            self._worker_idx = welcome.worker_idx
            self._linked_at, self._greeted = loop.time(), link
            same = welcome.epoch == receiver.inbox.newest_epoch
            if not welcome.version or (same and welcome.version <= receiver.inbox.newest):
                receiver.cut_off = None  # nothing newer has to come before this link is of use
            return link

    def _on_applied(self, epoch: int, version: int) -> None:
        super()._on_applied(epoch, version)
        if epoch != self._applied_epoch:  # the versions of another trainer are news to receive()
            self._applied_epoch, self._reported = epoch, 0

    # -- closing -------------------------------------------------------------------------------

    async def _close_here(self) -> None:
        listener = self._listener
        try:
            await super()._close_here()
        finally:
            await self._greetings.aclose()
            if isinstance(listener, StreamListener):
                await listener.aclose()


def _gave_up(lost: AiosyncError, seconds: float, last: BaseException | None = None) -> PeerClosed:
    why = f"; the last attempt: {last}" if isinstance(last, AiosyncError) else ""
    return PeerClosed(
        f"the trainer's link was lost ({lost}), and the trainer could not be reached again within "
        f"{seconds:g} s{why}"
    )
