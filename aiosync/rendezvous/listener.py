"""The side that listens: accepts, lets strangers prove their identity, hands on links.

That is a trainer whose workers dial, or a worker that trainers dial.

Strangers cost little and never for long: a deadline until they have said who they are, 4 KiB, and a
bounded number of them; when there are too many, the one that has taken longest is dropped. Must not
import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from aiosync._log import log
from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    RemoteProtocolError,
    TransportBroken,
)
from aiosync.protocol import as_count, validate_seconds
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS
from aiosync.transports._processes import OPENING, close_in_child, is_no_room
from aiosync.transports.address import Address, bind
from aiosync.transports.base import Transport, in_time
from aiosync.transports.credentials import MAKE_A_TOKEN, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits
from aiosync.wire import Hello, Refuse, Status, encode_frame

__all__ = ["Arrivals", "Listener", "StreamListener", "first_word"]

_MAX_STRANGERS = 256
_AT_ONCE = 32  # strangers whose steps one turn of the loop may bring
_NEW_SECONDS = 0.25  # whose handshake takes longer is far away, or no good
_BUSY_SECONDS = 0.005
_NO_ROOM_SECONDS = 0.1  # with no descriptors left, accepting again at once would only spin
# Whoever was dialled by mistake has seen enough to try all short tokens at home.
_LEAST_TOKEN_NBYTES = 8
_TOKEN_NBYTES = 16
_NO_ROOM_TEXT = "its process has no file descriptor left for this link: raise `ulimit -n` there"


class Listener:
    """Accepts on a socket that listens, from :meth:`accept` to :meth:`close`. Owns the socket.

    Handshakes of those of whom nothing is known yet are bounded in number by :meth:`let_in`.
    """

    speaks_plainly: bool = True
    """Those that dial understand a frame before the handshake."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._spare = self._open_spare()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._strangers: dict[asyncio.Task[None], float] = {}  # handshakes, and since when
        close_in_child(sock)

    def accept(
        self,
        on_connection: Callable[[socket.socket], None],
        on_trouble: Callable[[OSError], None] = lambda exc: None,
    ) -> None:
        """Accept on the running loop.

        Args:
            on_connection: Called with each socket; owns it once it returns.
            on_trouble: Called when a connection could not be accepted, repeatedly if need be.
        """
        self._loop = asyncio.get_running_loop()
        self._on_connection, self._on_trouble = on_connection, on_trouble
        self._go_on()

    def _go_on(self) -> None:
        if self._loop is not None and self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _pause(self, seconds: float) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_later(seconds, self._go_on)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if self._strangers_are_new():
                self._pause(_BUSY_SECONDS)
                return
            try:
                with OPENING:
                    sock, _address = self._sock.accept()
                    close_in_child(sock)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._pause(_NO_ROOM_SECONDS)
                if is_no_room(exc) and self.speaks_plainly:
                    self._turn_away()
                self._on_trouble(exc)
                return
            try:
                self._on_connection(sock)
            except OSError as exc:
                sock.close()  # who dialled sees it at once
                self._on_trouble(exc)
            except BaseException:  # a bug, for the loop's exception handler
                sock.close()
                raise

    @staticmethod
    def _open_spare() -> socket.socket | None:
        """A descriptor to be given up when there is none left."""
        with contextlib.suppress(OSError), OPENING:
            spare = socket.socket(socket.AF_UNIX)
            close_in_child(spare)
            return spare
        return None

    def _turn_away(self) -> None:
        """Tell one that dials why there is no link, in the place of the spare descriptor."""
        if self._spare is not None:
            self._spare.close()
            with contextlib.suppress(OSError):
                sock, _address = self._sock.accept()
                with sock:
                    sock.send(encode_frame(Refuse(ConnectError.__name__, _NO_ROOM_TEXT)))
        self._spare = self._open_spare()

    def _strangers_are_new(self) -> bool:
        """Whether many came just now. A crowd is let in bit by bit, so that the loop goes on."""
        if len(self._strangers) < _AT_ONCE:
            return False
        since = next(itertools.islice(reversed(self._strangers.values()), _AT_ONCE - 1, None))
        return time.monotonic() - since < _NEW_SECONDS

    def let_in(
        self,
        handshake: Coroutine[Any, Any, None],
        close: Callable[[], None],
        tasks: TaskOwner,
        most: int,
    ) -> bool:
        """Begin a handshake.

        Args:
            handshake: Ends the link itself if it fails.
            close: Ends the link where the handshake was cancelled, or had a bug.
            tasks: Owner of its task.
            most: How many may go on.

        Returns:
            Whether the oldest had to make room.
        """
        strangers = self._strangers
        crowded = len(strangers) >= most
        if crowded:  # forgotten at once: its task ends later, and the next one has to go, too
            oldest = next(iter(strangers))
            del strangers[oldest]
            tasks.cancel(oldest)

        def ended(task: asyncio.Task[None]) -> None:
            strangers.pop(task, None)
            if task.cancelled() or task.exception() is not None:
                close()  # also where it never ran

        task = tasks.start(handshake, "aiosync handshake of a stranger")
        strangers[task] = time.monotonic()
        task.add_done_callback(ended)
        return crowded

    def close(self) -> None:
        """Stop accepting. Idempotent; links stay open."""
        if self._sock.fileno() >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            if self._spare is not None:
                self._spare.close()

    async def aclose(self) -> None:
        """The same, and wait until nothing of it runs any more."""
        self.close()


async def first_word(link: Transport, timeout: float) -> Hello:
    """What somebody says first who has proved who it is.

    Raises:
        RemoteProtocolError: It is no Hello.
        RecvTimeout: Nothing, in so many seconds.
    """
    hello = (await link.recv(timeout=timeout)).message
    if not isinstance(hello, Hello):
        raise RemoteProtocolError(f"expected Hello, got {type(hello).__name__}")
    return hello


class StreamListener(Listener):
    """Binds at once, accepts once :meth:`start` is called.

    Args:
        url: ``tcp://host:port`` (port 0: any free one) or ``unix:///path``.
        credentials: Token and TLS that peers need.
        limits: What peers may announce once they proved their identity.
        max_connections: Links that may be open at a time, strangers included; at least 1.
        handshake_timeout: Seconds that a stranger has to prove its identity, and then again to say
            what it wants.
        keepalive: See :meth:`TCPTransport.connect`.
        untaken: See :meth:`TCPTransport.connect`.
        status: What those are told who proved their identity and ask; by default nothing.

    Attributes:
        url: Where this listens, with the port that was bound.
        links: Those that are open.
        accepted: How many links were handed on.
        refused: Connections that were not, by the name of the error; ``"full"`` when there were
            too many connections, ``"crowded out"`` when there were too many strangers.
        last_refusal: Why the last one that proved nothing was refused; ``None`` where somebody
            was admitted after it.

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
        status: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        address = Address.parse(url)
        validate_seconds("handshake_timeout", handshake_timeout)
        credentials = credentials or Credentials()
        if not address.is_local:
            _check_beyond_this_host(credentials, address)
        self._prove = functools.partial(
            TCPTransport.accept,
            credentials=replace(credentials, tls=credentials.listening_context()),  # made once
            limits=limits,
            payloads=False,
            keepalive=keepalive,
            untaken=untaken,
            timeout=handshake_timeout,
        )
        self.speaks_plainly: bool = credentials.tls is None
        self._handshake_timeout = handshake_timeout
        self._status = status
        self._max_connections = as_count("max_connections", max_connections, 1)
        self.links: set[TCPTransport] = set()
        self.accepted: int = 0
        self.refused: Counter[str] = Counter()
        self.last_refusal: str | None = None
        self._why: dict[str, str] = {}  # the last one, by the name of the error
        self._tasks: TaskOwner | None = None
        sock, self._address = bind(address)
        super().__init__(sock)
        self.url: str = str(self._address)

    def start(
        self,
        on_link: Callable[[Any, Hello], None],
        on_crash: Callable[[BaseException], None],
        wrap: Callable[[TCPTransport], Transport] = lambda link: link,
    ) -> None:
        """Accept on the running loop.

        Args:
            on_link: Called with each link whose peer proved its identity and does not ask for the
                status, and with what it said first; owns it from then on. The link takes no
                payloads before ``link.channel.allow_payloads()``.
            on_crash: Called if a handshake ends with an error that is no
                :class:`~aiosync.errors.AiosyncError`: a bug.
            wrap: Makes of the stream what is handed on; ending the stream ends that.
        """
        self._tasks = tasks = TaskOwner(on_crash)
        refused = self.refused

        def on_connection(sock: socket.socket) -> None:
            room = min(self._max_connections - len(self.links), _MAX_STRANGERS)
            if room == 0:
                refused["full"] += 1
                sock.close()
            elif self.let_in(self._meet(sock, on_link, wrap), sock.close, tasks, room):
                refused["crowded out"] += 1

        def on_trouble(exc: OSError) -> None:
            # Of the network below (one connection had a fault already), or no descriptors.
            refused["no room" if is_no_room(exc) else "ConnectError"] += 1

        self.accept(on_connection, on_trouble)

    async def _meet(
        self,
        sock: socket.socket,
        on_link: Callable[[Any, Hello], None],
        wrap: Callable[[TCPTransport], Transport],
    ) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            try:
                stream = await self._prove(sock, name=_name_of(sock))
                undo.callback(stream.abort)
                link = wrap(stream)
                hello = await first_word(link, self._handshake_timeout)
                if hello.role == "status":
                    self.accepted += 1
                    await link.send(Status(self._status()), timeout=HANDSHAKE_SECONDS)
                    await link.aclose()
                    return
            except (AiosyncError, OSError) as exc:
                name = type(exc).__name__ if isinstance(exc, AiosyncError) else "ConnectError"
                self.refused[name] += 1
                self.last_refusal = f"{name}: {exc}"
                self._why[name] = f": {exc}"
                count = self.refused[name]
                if count & (count - 1) == 0:  # strangers cannot fill a log: 1st, 2nd, 4th, ...
                    text = f"{self.url} refused somebody ({count} so far): {name}: {exc}"
                    log(logging.INFO, "refused", text, model=None)
                return
            undo.pop_all()
        self.accepted += 1
        self.last_refusal = None
        self.links.add(stream)
        stream.call_on_end(lambda: self.links.discard(stream))
        on_link(link, hello)

    def refusals(self) -> list[str]:
        """How often somebody was refused, by the name of the error, and why the last time."""
        return [
            f"{name} {count} time{'s' if count > 1 else ''}{self._why.get(name, '')}"
            for name, count in self.refused.items()
        ]

    def close(self) -> None:
        """Stop accepting, and drop who is in the handshake. Idempotent; links stay open."""
        if self._sock.fileno() < 0:
            return
        super().close()
        if self._tasks is not None:
            self._tasks.abort()
        if self._address.scheme == "unix":
            with contextlib.suppress(OSError):
                os.unlink(self._address.path)

    async def aclose(self) -> None:
        """The same, and wait until nothing of it runs any more."""
        self.close()
        if self._tasks is not None:
            await self._tasks.aclose()


class Arrivals:
    """Trainers that dial a worker: one has it at a time, and the newest of its links counts.

    Args:
        takes: Whether another link would ever be taken.
    """

    def __init__(self, takes: Callable[[], bool]) -> None:
        self._takes = takes
        self._newest: tuple[TCPTransport, Hello] | None = None
        self._waits = False  # nobody has taken it so far
        self._changed = Notifier()

    def welcome(self, link: TCPTransport, hello: Hello) -> None:
        """Hear who dialled, whether or not anybody waits for a link. Owns the link."""
        holder, has = self._newest or (link, hello)
        taken = holder is not link and not holder.ended
        if hello.role != "sender":
            link.abort()
        elif taken and (hello.epoch is None or hello.epoch != has.epoch):
            # It tries again: the other one may leave.
            text = (
                f"another trainer has this worker: {holder.name}, process {has.pid}. End one of "
                "the two; the one that is left gets the worker"
            )
            with contextlib.suppress(AiosyncError):
                link.send_nowait(Refuse(ConnectError.__name__, text))
            link.abort()
        elif link.ended or not self._takes():
            link.abort()
        else:
            if holder is not link:
                # Whoever reads from it asks for another link, which is here already.
                holder.fail(TransportBroken("the trainer opened a newer link"))
                if self._waits:
                    holder.abort()
            self._newest, self._waits = (link, hello), True
            self._changed.notify()

    async def next(self, timeout: float | None) -> TCPTransport:
        """Wait for a trainer.

        Raises:
            ConnectTimeout: None came in time.

        Cancellation:
            Class A.
        """
        async with in_time(timeout, ConnectTimeout, "no trainer was accepted"):
            while self._newest is None or not self._waits or self._newest[0].channel.ended:
                await self._changed.wait()
        self._waits = False
        return self._newest[0]

    def close(self) -> None:
        """End what nobody has taken."""
        if self._newest is not None and self._waits:
            self._newest[0].abort()

    async def aclose(self) -> None:
        """The same."""
        self.close()


def _check_beyond_this_host(credentials: Credentials, address: Address) -> None:
    """Refuse to listen where others can connect with nothing, or a token that can be guessed."""
    tokens = credentials.token_bytes, credentials.pull_token_bytes
    nbytes = min((len(each) for each in tokens if each is not None), default=None)
    if nbytes is None and credentials.tls is None:
        raise ConfigError(
            f"listening on {address} would let any host that reaches it receive and send "
            "weights: pass token= (the same on both sides) or tls=aiosync.TLS(...), or "
            "listen on tcp://127.0.0.1:port or unix:///path"
        )
    if nbytes is not None and nbytes < _TOKEN_NBYTES:
        short = f"a token of {address} has {nbytes} bytes, and needs 16 at random: {MAKE_A_TOKEN}"
        if nbytes < _LEAST_TOKEN_NBYTES:
            raise ConfigError(short)
        warnings.warn(short, stacklevel=3)


def _name_of(sock: socket.socket) -> str:
    peer = sock.getpeername()
    if not isinstance(peer, tuple):
        return "a peer on this host"
    return str(Address("tcp", host=peer[0], port=peer[1])).removeprefix("tcp://")
