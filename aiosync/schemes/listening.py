"""The side that listens on a URL: accepts, lets strangers prove their identity, hands on links.

Strangers cost little and never for long: a deadline, 64 KiB, and a bounded number of them; when
there are too many, the one that has taken longest is dropped. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from aiosync._tasks import TaskOwner
from aiosync.errors import AiosyncError, ConfigError
from aiosync.protocol import validate_seconds
from aiosync.protocol.indices import as_count
from aiosync.transports._fork import close_in_child
from aiosync.transports.address import Address, bind
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits

__all__ = ["ListenerCounts", "StreamListener"]

_MAX_STRANGERS = 256
_PAUSE_SECONDS = 0.1  # with no descriptors left, accepting again at once would only spin
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True)
class ListenerCounts:
    """What came to a listener.

    Attributes:
        accepted: Links that were handed on.
        refused: Connections that were not, by the name of the error; ``"full"`` when there were
            too many connections, ``"crowded out"`` when there were too many strangers.
        ended: Links that ended with an error, by its name, where the owner counts them.
        last_refusal: Why the last one that proved nothing was refused; ``None`` where somebody
            was admitted after it.
    """

    accepted: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    last_refusal: str | None = None


class StreamListener:
    """Binds at once, accepts once :meth:`start` is called.

    Args:
        url: ``tcp://host:port`` (port 0: any free one) or ``unix:///path``.
        credentials: Token and TLS that peers need.
        limits: What peers may announce once they proved their identity.
        max_connections: Links that may be open at a time, strangers included.
        handshake_timeout: Seconds that a stranger has to prove its identity.
        keepalive: See :meth:`TCPTransport.connect`.
        untaken: See :meth:`TCPTransport.connect`.

    Raises:
        ConfigError: The address cannot be bound, a certificate file cannot be used, or other
            hosts could connect without proving anything.
    """

    def __init__(
        self,
        url: str | Address,
        *,
        credentials: Credentials | None = None,
        limits: Limits | None = None,
        max_connections: int = 1024,
        handshake_timeout: float = 10.0,
        keepalive: float | None = 30.0,
        untaken: float | None = None,
    ) -> None:
        address = Address.parse(url)
        validate_seconds("handshake_timeout", handshake_timeout)
        self._max_connections = as_count("max_connections", max_connections, 1)
        self._credentials = credentials or Credentials()
        if not address.is_local and self._credentials.token is None:
            if self._credentials.tls is None:
                raise ConfigError(
                    f"listening on {address} would let any host that reaches it receive and send "
                    "weights: pass token= (the same on both sides) or tls=aiosync.TLS(...), or "
                    "listen on tcp://127.0.0.1:port or unix:///path"
                )
        self._context: ssl.SSLContext | None = self._credentials.listening_context()
        self._limits = limits
        self._handshake_timeout = handshake_timeout
        self._keepalive = keepalive
        self._untaken = untaken
        self.counts: ListenerCounts = ListenerCounts()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_link: Callable[[TCPTransport], None] | None = None
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}
        self._open: set[TCPTransport] = set()
        self._tasks: TaskOwner | None = None
        self._sock, self._address = bind(address)
        self._inode = self._own_inode()
        close_in_child(self)

    @property
    def url(self) -> str:
        """Where this listens, with the port that was bound."""
        return str(self._address)

    @property
    def num_open(self) -> int:
        """Links that are open."""
        return len(self._open)

    def start(
        self, on_link: Callable[[TCPTransport], None], on_crash: Callable[[BaseException], None]
    ) -> None:
        """Accept on the running loop.

        Args:
            on_link: Called with each link whose peer proved its identity; owns it from then on.
                The link takes no payloads before ``link.channel.allow_payloads()``.
            on_crash: Called if a handshake ends with an error that is no
                :class:`~aiosync.errors.AiosyncError`: a bug.
        """
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner(on_crash)
        self._on_link = on_link
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._tasks is not None
        for _ in range(64):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                # Of the network below (one connection had a fault already), or no descriptors.
                name = "no room" if exc.errno in _NO_ROOM else "ConnectError"
                self.counts.refused[name] += 1
                self._pause()
                return
            full = len(self._open) + len(self._strangers) >= self._max_connections
            if full and not self._strangers:
                self.counts.refused["full"] += 1
                sock.close()
                continue
            if full or len(self._strangers) >= _MAX_STRANGERS:
                # Forgotten at once: its task ends later, and the next one has to go, too.
                self.counts.refused["crowded out"] += 1
                self._tasks.cancel(self._strangers.pop(next(iter(self._strangers))))
            task = self._tasks.start(self._let_in(sock), "aiosync handshake of a stranger")
            self._strangers[sock] = task
            task.add_done_callback(lambda task, sock=sock: self._end_stranger(sock, task))  # type: ignore[misc]  # the default binds it

    def _pause(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(_PAUSE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        if self._loop is not None and self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _end_stranger(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(sock, None)
        if task.cancelled():
            sock.close()  # a task that never ran has not closed it

    async def _let_in(self, sock: socket.socket) -> None:
        try:
            link = await TCPTransport.accept(
                sock,
                credentials=self._credentials,
                context=self._context,
                limits=self._limits,
                name=_name_of(sock),
                payloads=False,
                keepalive=self._keepalive,
                untaken=self._untaken,
                timeout=self._handshake_timeout,
            )
        except AiosyncError as exc:
            self.counts.refused[type(exc).__name__] += 1
            self.counts.last_refusal = f"{type(exc).__name__}: {exc}"
            return
        except OSError:
            self.counts.refused["ConnectError"] += 1  # it had gone before anything was set up
            sock.close()
            return
        self.counts.accepted += 1
        self.counts.last_refusal = None
        self._open.add(link)
        link.channel.call_on_end(lambda: self._open.discard(link))
        assert self._on_link is not None
        self._on_link(link)

    def close(self) -> None:
        """Stop accepting, and drop who is in the handshake. Idempotent; links stay open."""
        if self._sock.fileno() < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
        if self._tasks is not None:
            self._tasks.abort()
        if self._inode is not None and self._inode == self._own_inode():
            with contextlib.suppress(OSError):
                os.unlink(self._address.path)
        self._sock.close()

    async def aclose(self) -> None:
        """The same, and wait until nothing of it runs any more."""
        self.close()
        if self._tasks is not None:
            await self._tasks.aclose()

    def _own_inode(self) -> tuple[int, int] | None:
        if self._address.scheme != "unix":
            return None
        try:
            found = os.stat(self._address.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def close_after_fork(self) -> None:
        """In a forked child: close this copy; the parent goes on listening."""
        self._sock.close()


def _name_of(sock: socket.socket) -> str:
    try:
        peer = sock.getpeername()
    except OSError:
        return "a peer"
    return _shown(peer[0], peer[1]) if isinstance(peer, tuple) else "a peer on this host"


def _shown(host: str, port: int) -> str:
    """IPv4 as it is, also of peers of a listener for both families."""
    if ":" not in host:
        return f"{host}:{port}"
    mapped = ipaddress.IPv6Address(host).ipv4_mapped
    return f"[{host}]:{port}" if mapped is None else f"{mapped}:{port}"
