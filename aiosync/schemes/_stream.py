"""What schemes over streams share: who listens where, who dials, what a worker says.

Must not import torch, nor a concrete scheme.
"""

from __future__ import annotations

import abc
import socket
import weakref
from typing import Any, Literal

from aiosync._version import __version__
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectTimeout,
)
from aiosync.rendezvous.dialer import Dialer, Left, LinkState, is_final
from aiosync.rendezvous.listener import Arrivals, StreamListener
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.options import StreamOptions
from aiosync.schemes.sources import Sources
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.types import Limits
from aiosync.wire import stats_values

__all__ = ["StreamScheme"]

_ADVICE = {
    "receiver": "it has to run init_on_sender() and connect(), or `aiosync serve`",
    "sender": "it has to run init_on_receiver() and connect(), with dial='sender' as well",
    "both": "`aiosync serve` has to run there",
}
"""What the side that listens has to do, by ``dial``."""


class StreamScheme(StreamOptions, WeightSyncScheme):
    """What schemes over streams share; see :class:`aiosync.TCPWeightSyncScheme`."""

    _addresses: list[Address]
    _credentials: Credentials
    _dial: Literal["receiver", "sender", "both"]
    # Options of some of these schemes, constants of the others.
    _keepalive: float | None = 30.0
    _longest_pause = 2.0
    _max_connections: int = 65536

    def _reset(self) -> None:
        super()._reset()
        self._listener: StreamListener | None = None
        self._arrivals: Arrivals | None = None  # a worker's that listens

    def _planning_limits(self) -> Limits | None:
        return self.limits

    # -- where --------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where the side that listens does so; with the port once it is bound."""
        if self._listener is not None:
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

    def _status(self) -> dict[str, Any]:
        """What those are told who ask, as :meth:`WeightClient.stats` does."""
        return {
            "aiosync": __version__,
            "url": self.address,
            "stats": stats_values([self.stats()]),
        }

    def _listen(self, address: Address) -> StreamListener:
        asked = weakref.WeakMethod(self._status)  # who forgets a scheme closes it
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
        self._listeners.append(listener)
        return listener

    def _bind(self, sources: Sources) -> None:
        listener = self._listener or self._listen(self._addresses[0])  # it may be bound early
        self._addresses = [Address.parse(listener.url)]  # copies find the port in it

    def _bind_early(self) -> None:
        """Bind what copies will dial: they are made before ``init_on_sender()``."""
        address = self._early_address() if self._role is None else None
        if address is not None and self._listener is None:
            self._addresses = [Address.parse(self._listen(address).url)]

    def _early_address(self) -> Address | None:
        """What to bind early; ``None`` where copies find the sender by other means."""
        return None

    def _dialer(self, address: Address, name: str) -> Dialer:
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

    @abc.abstractmethod
    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        """A link over a connected socket."""

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

    async def _dial_trainer(self, left: Left, again: bool) -> Transport:
        if self._dial == "sender":
            return await self._next_arrival(left())
        return await self._to_trainer().dial(left(), again=again)

    def _to_trainer(self) -> Dialer:
        name = "the weight server" if self._dial == "both" else "the trainer"
        return self._dialer(self._addresses[0], name)

    def _nobody(self, within: str) -> str:
        return self._to_trainer().not_reached(within)

    def _is_final(self, error: AiosyncError) -> bool:
        return is_final(error)

    async def _next_arrival(self, timeout: float | None) -> Transport:
        """Wait for the sender to dial."""
        if self._arrivals is None:
            idx = self._worker_idx or 0
            if idx >= len(self._addresses):
                raise ConfigError(
                    f"there is no address for worker {idx}: with dial='sender' the scheme needs "
                    "one address for each worker, in the order of their worker_idx"
                )
            self._arrivals = Arrivals(self._takes_links)
            self._listeners.append(self._arrivals)
            self._listen(self._addresses[idx]).start(
                self._arrivals.welcome, self._on_listener_crash
            )
        try:
            return await self._arrivals.next(timeout)
        except ConnectTimeout as exc:
            why = None if self._listener is None else self._listener.counts.last_refusal
            refused = "" if why is None else f"; last refusal: {why}"
            raise ConnectTimeout(f"on {self.address}, {exc}{refused}") from exc

    def _takes_links(self) -> bool:
        assert self._trainer is not None
        state = self._trainer.state
        in_use = state not in (LinkState.DIALING, LinkState.GREETING)
        return state is not LinkState.GAVE_UP and not (in_use and self.reconnect == 0)

    def _on_listener_crash(self, error: BaseException) -> None:
        if self._receiver is not None:
            self._receiver.fail(error)
