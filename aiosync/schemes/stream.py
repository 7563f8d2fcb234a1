"""The fabric of schemes over streams: where the trainer listens, and how workers reach it.

Must not import torch, nor a concrete scheme.
"""

from __future__ import annotations

import abc
import socket
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from aiosync._version import __version__
from aiosync.errors import AiosyncError, ConfigError, LocalProtocolError
from aiosync.rendezvous.dialer import Dial, Dialer, Left, is_final
from aiosync.rendezvous.listener import StreamListener
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.fabric import Fabric
from aiosync.schemes.lifecycle import Life
from aiosync.schemes.options import StreamOptions
from aiosync.schemes.sources import Sources
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.types import Limits
from aiosync.wire import stats_values

__all__ = ["StreamFabric", "StreamScheme"]


class StreamScheme(StreamOptions, WeightSyncScheme):
    """Common part of schemes over streams; see :class:`aiosync.TCPWeightSyncScheme`."""

    _fabric: StreamFabric[Any]

    @property
    def address(self) -> str:
        """Address of the side that listens; with the port once it is bound."""
        return self._fabric.url

    @property
    def reconnects(self) -> int:
        """Receiver: number of times that a lost link was replaced."""
        receiver = self._life.receiver
        return 0 if receiver is None else receiver.meter.reconnects

    def create_transport(self, pipe_or_context: Any) -> Transport:
        """Make a link over a connected stream socket. Takes ownership of it; needs a running loop.

        Args:
            pipe_or_context: Connected TCP or Unix socket, or an existing link.
        """
        if isinstance(pipe_or_context, Transport):
            return pipe_or_context
        if not isinstance(pipe_or_context, socket.socket):
            raise ConfigError(f"expected a connected socket, got {pipe_or_context!r}")
        return self._fabric.link(self, pipe_or_context, "the peer")


_Scheme = TypeVar("_Scheme", bound=StreamScheme, contravariant=True)


class StreamFabric(Fabric[_Scheme]):
    """Fabric whose trainer listens at an address that workers dial.

    Args:
        address: Where the trainer listens; ``None`` until one is chosen or found.
        credentials: Token and TLS of both sides.

    Attributes:
        address: As given; with the port once it is bound.
        credentials: As given.
        listener: The trainer's listener, once the address is bound.
        others: Addresses that a worker tries if it does not reach the first one.
    """

    _of_process: ClassVar[tuple[str, ...]] = (*Fabric._of_process, "listener")

    trainer_name: str = "the trainer"
    """Name in errors of the side that listens."""
    advice: str = "it has to run init_on_sender() and connect(), or `aiosync serve`"
    """Advice in errors: how the user makes the side that listens reachable."""

    def __init__(self, address: Address | None, credentials: Credentials) -> None:
        super().__init__()
        self.address: Address | None = address
        self.credentials: Credentials = credentials
        self.others: tuple[Address, ...] = ()

    def begin(self, life: Life) -> None:
        """Take the scheme's new life in this process, in which nothing listens yet."""
        super().begin(life)
        self.listener: StreamListener | None = None

    def limits(self, scheme: _Scheme) -> Limits | None:
        """Return the limits that receivers are expected to have: those of this side."""
        return scheme.limits or Limits()

    @abc.abstractmethod
    def link(self, scheme: _Scheme, sock: socket.socket, name: str) -> Transport:
        """Make a link over a connected socket."""

    # -- settings of listeners and links ---------------------------------------------------------

    def keepalive(self, scheme: _Scheme) -> float | None:
        """Return the seconds after which the kernel probes a silent peer; ``None`` for never."""
        return 30.0

    def max_connections(self, scheme: _Scheme) -> int:
        """Return the greatest number of links that the listener has at a time."""
        return 65536

    def streams(self, scheme: _Scheme) -> int:
        """Return the number of connections of a link that this side dials."""
        return 1

    def untaken(self, scheme: _Scheme) -> float | None:
        """Return the seconds after which a peer that takes no bytes is lost; ``None`` for never."""
        # A worker's messages are small, and the trainer's host takes them unless it is gone. A
        # worker may be too busy to take an update for as long as stall_timeout says: no kernel may
        # end its link before that.
        keepalive = self.keepalive(scheme)
        if self.life.role != "receiver" or keepalive is None:
            return None
        return 2 * keepalive

    # -- the trainer -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Address of the side that listens.

        Raises:
            LocalProtocolError: There is none yet.
        """
        if self.listener is not None:
            return self.listener.url
        if self.address is None:
            raise LocalProtocolError("the scheme has no address yet: call init_on_sender() first")
        return str(self.address)

    def open_listener(self, scheme: _Scheme, address: Address) -> None:
        """Bind an address; later copies of the scheme have it, with the port that was chosen."""
        self.listener = listener = StreamListener(
            address,
            credentials=self.credentials,
            limits=scheme.limits,
            max_connections=self.max_connections(scheme),
            handshake_timeout=scheme.handshake_timeout,
            keepalive=self.keepalive(scheme),
            untaken=self.untaken(scheme),
            status=_status_of(scheme),
        )
        self.address = Address.parse(listener.url)
        self.life.listeners.append(listener)

    def bind(self, scheme: _Scheme, sources: Sources) -> None:
        """Bind the address that workers dial, unless :meth:`bind_early` has bound it."""
        if self.listener is None:
            assert self.address is not None
            self.open_listener(scheme, self.address)

    def early_address(self) -> Address | None:
        """Return the address to bind early; ``None`` if early copies find the sender otherwise."""
        return None

    def bind_early(self, scheme: _Scheme) -> None:
        """Bind the address before ``init_on_sender()``, for copies that are made before it."""
        address = self.early_address() if self.life.role is None else None
        if address is not None and self.listener is None:
            self.open_listener(scheme, address)

    # -- a worker --------------------------------------------------------------------------------

    def dialer(self, scheme: _Scheme) -> Dialer:
        """Return the dialer of the address.

        Raises:
            ConfigError: The port is not known.
        """
        address = self.address
        assert address is not None
        if address.scheme == "tcp" and address.port == 0:
            raise ConfigError(
                f"{address} has no port to dial: pickle or copy the scheme after "
                "init_on_sender(), which binds one, or choose a port"
            )
        return Dialer(
            addresses=(address, *self.others),
            credentials=self.credentials,
            limits=scheme.limits,
            keepalive=self.keepalive(scheme),
            untaken=self.untaken(scheme),
            streams=self.streams(scheme),
            attempt_timeout=scheme.handshake_timeout,
            name=self.trainer_name,
            advice=self.advice,
        )

    async def dial(self, scheme: _Scheme, left: Left, is_redial: bool) -> Transport:
        """Make one attempt to reach the address; ``is_redial`` if there was a link before."""
        dialer = self.dialer(scheme)
        return await dialer.dial(dialer.addresses[0], left, is_redial)

    def dials(self, scheme: _Scheme) -> Mapping[str, Dial[Transport]]:
        """Return the functions that dial the side that listens, by address."""
        return self.dialer(scheme).dials if self.others else super().dials(scheme)

    def not_reached_text(self, scheme: _Scheme, within: str) -> str:
        """Return the text of an error while the side that listens is not reached."""
        return self.dialer(scheme).not_reached_text(within)

    def may_retry(self, error: AiosyncError) -> bool:
        """Return True unless the error is due to this side's options, credentials or messages."""
        return not is_final(error)


def _status_of(scheme: StreamScheme) -> Callable[[], dict[str, Any]]:
    """Return a function that answers peers which ask for a status, such as ``aiosync top``."""
    # A weak reference, as a scheme that is forgotten has to be closed.
    asked = weakref.ref(scheme)

    def status() -> dict[str, Any]:
        scheme = asked()
        if scheme is None:
            return {}
        stats = stats_values([scheme.stats()])
        return {"aiosync": __version__, "url": scheme.address, "stats": stats}

    return status
