"""The listening side: it accepts connections, authenticates peers, and hands on links.

A stranger is a peer that has not proved its identity yet. It costs little and not for long: it has
a deadline for the proof and gets 4 KiB of memory, and the number of strangers is bounded; when
there are too many, the one that has taken longest is dropped. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import socket
import struct
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiosync._log import log
from aiosync._tasks import TaskOwner
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
)
from aiosync.protocol import as_count, validate_seconds
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS
from aiosync.transports._forks import OPENING, close_in_child
from aiosync.transports.address import Address, bind
from aiosync.transports.base import Transport, is_no_room
from aiosync.transports.credentials import MAKE_A_TOKEN, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits
from aiosync.wire import Hello, Join, Message, Refuse, Status, encode_frame

__all__ = ["Listener", "StreamListener", "receive_hello"]

_SO_MAX_PACING_RATE = 47  # Python has no name for it.
_MAX_STRANGERS = 256
# Greatest number of new strangers, as one turn of the loop may run a step of each handshake.
_AT_ONCE = 32
# A stranger is new for this time. One whose handshake takes longer is far away, or hostile.
_NEW_SECONDS = 0.25
_BUSY_SECONDS = 0.005
# While the process has no descriptors left, accepting again at once would only spin.
_NO_ROOM_SECONDS = 0.1
# Shorter tokens are refused: a stranger that somebody dialled by mistake has seen a proof, and can
# try all short tokens against it in its own time.
_LEAST_TOKEN_NBYTES = 8
_TOKEN_NBYTES = 16
_NO_ROOM_TEXT = "its process has no file descriptor left for this link: raise `ulimit -n` there"


class Listener:
    """A socket that accepts connections, from :meth:`accept` to :meth:`close`. Owns the socket.

    :meth:`let_in` bounds the number of handshakes with strangers.
    """

    may_refuse_plainly: bool = True
    """True if dialers understand a plain frame before the handshake, as they do without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._owned = [sock]
        # This closes the sockets of a listener that is collected without close(). It also keeps
        # them until then: in a cycle of garbage they could be collected, with a warning, before the
        # scheme whose end closes them.
        weakref.finalize(self, _close_all, self._owned).atexit = False
        self._spare = self._open_spare()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The tasks of handshakes, oldest first, and the times at which they began.
        self._strangers: dict[asyncio.Task[None], float] = {}
        close_in_child(sock)

    def accept(
        self,
        on_connection: Callable[[socket.socket], None],
        on_trouble: Callable[[OSError], None] = lambda exc: None,
    ) -> None:
        """Accept connections on the running loop.

        Args:
            on_connection: Called with each accepted socket, which it owns once it has returned.
            on_trouble: Called with the error each time a connection could not be accepted.
        """
        self._loop = asyncio.get_running_loop()
        self._on_connection, self._on_trouble = on_connection, on_trouble
        self._go_on()

    def _go_on(self) -> None:
        """Accept connections as they come; do nothing once the socket is closed."""
        if self._loop is not None and self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _pause(self, seconds: float) -> None:
        """Accept nothing for some seconds; connections wait in the kernel meanwhile."""
        if self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_later(seconds, self._go_on)

    def _accept(self) -> None:
        """Accept up to 32 waiting connections; pause if new strangers crowd, or after an error."""
        for _ in range(_AT_ONCE):
            if self._is_crowded_by_new_strangers():
                self._pause(_BUSY_SECONDS)
                return
            try:
                # No fork comes before the socket is one that a child closes.
                with OPENING:
                    sock, _address = self._sock.accept()
                    close_in_child(sock)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._pause(_NO_ROOM_SECONDS)
                if is_no_room(exc) and self.may_refuse_plainly:
                    self._turn_away()
                self._on_trouble(exc)
                return
            try:
                self._on_connection(sock)
            except OSError as exc:
                # The dialer sees the end of the connection at once, not after a timeout.
                sock.close()
                self._on_trouble(exc)
            except BaseException:  # a bug, which the loop's exception handler reports
                sock.close()
                raise

    def _open_spare(self) -> socket.socket | None:
        """Return an unused socket; ``None`` if the process has no descriptor left for it.

        Once no other descriptor is left, closing this one makes room to accept one more connection,
        and to refuse it with a reason.
        """
        with contextlib.suppress(OSError), OPENING:
            spare = socket.socket(socket.AF_UNIX)
            close_in_child(spare)
            self._owned[1:] = [spare]
            return spare
        return None

    def _turn_away(self) -> None:
        """Accept one connection with the spare descriptor, only to tell the dialer the reason.

        The connection is the spare one from then on: if it ended at once, a dialer that has not
        sent its Hello yet would get an error from that, and not read the reason.
        """
        if self._spare is not None:
            self._spare.close()
            self._spare = None
            with contextlib.suppress(OSError), OPENING:
                self._spare, _address = self._sock.accept()
                close_in_child(self._spare)
                self._owned[1:] = [self._spare]
                self._spare.send(encode_frame(Refuse(ConnectError.__name__, _NO_ROOM_TEXT)))
        if self._spare is None:
            self._spare = self._open_spare()

    def _is_crowded_by_new_strangers(self) -> bool:
        """Return True if the newest 32 strangers all came within the last 0.25 s.

        A crowd is then accepted bit by bit, so that the loop can do other work.
        """
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
        """Begin the handshake with a stranger.

        Args:
            handshake: The handshake, which ends the link itself if it fails.
            close: Ends the link if the handshake was cancelled, or had a bug.
            tasks: Owner of the handshake's task.
            most: Greatest number of handshakes at a time, at least 1.

        Returns:
            True if the oldest handshake was cancelled to make room.
        """
        strangers = self._strangers
        # A handshake that has just ended makes no room, and its callback may not have run yet.
        going_on = [task for task in strangers if not task.done()]
        crowded = len(going_on) >= most
        if crowded:
            # Its task ends only later. It is removed at once, so that the next call cancels another
            # one.
            oldest = going_on[0]
            del strangers[oldest]
            tasks.cancel(oldest)

        def ended(task: asyncio.Task[None]) -> None:
            strangers.pop(task, None)
            if task.cancelled() or task.exception() is not None:
                # A task that is cancelled before it ran has closed nothing itself.
                close()

        task = tasks.start(handshake, "aiosync handshake of a stranger")
        strangers[task] = time.monotonic()
        task.add_done_callback(ended)
        return crowded

    def close(self) -> None:
        """Stop accepting connections. Idempotent; links stay open."""
        if self._sock.fileno() >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._sock.fileno())
            _close_all(self._owned)

    async def aclose(self) -> None:
        """Stop accepting connections, and wait until no task of this object runs any more."""
        self.close()


def _limit(sock: socket.socket, rate: int) -> None:
    """Let a socket send at most so many bytes per second."""
    packed = struct.pack("@L", max(1, min(rate, 2**64 - 1)))
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, packed)


def _close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


async def receive_hello(link: Transport, timeout: float) -> Hello:
    """Return the Hello of a peer that has proved its identity.

    Args:
        link: The link to the peer.
        timeout: Seconds to wait for the message.

    Raises:
        RemoteProtocolError: The peer's first message is not a Hello.
        RecvTimeout: No message arrived in time.
    """
    return _as_hello((await link.recv(timeout=timeout)).message)


def _as_hello(message: Message) -> Hello:
    if not isinstance(message, Hello):
        raise RemoteProtocolError(f"expected Hello, got {type(message).__name__}")
    return message


@dataclass(slots=True)
class _JoiningLink:
    """The connections so far of a link that has several, by their number, and their time limit."""

    members: dict[int, TCPTransport] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class StreamListener(Listener):
    """A listener on a URL. It binds at once, and accepts once :meth:`start` is called.

    Args:
        url: ``tcp://host:port`` (port 0: any free port) or ``unix:///path``.
        credentials: Token and TLS that peers need.
        limits: Bounds on what peers may announce once they have proved their identity.
        max_connections: Greatest number of open links, strangers included; at least 1.
        handshake_timeout: Seconds that a stranger has to prove its identity, and then as many for
            its first message.
        keepalive: See :meth:`TCPTransport.connect`.
        untaken: See :meth:`TCPTransport.connect`.
        status: Returns the values that a peer gets that proved its identity and asks for the
            status; by default none.
        limit_rate: Bytes per second that each link sends at most, a whole number; only with TCP.

    Attributes:
        url: The address on which this listens, with the port that was bound.
        links: The open links.
        accepted: Number of peers that were admitted, those that asked for the status included.
        refused: Number of connections that were refused, by the name of the error; ``"full"`` when
            there were too many connections, ``"crowded out"`` when there were too many strangers,
            ``"no room"`` when the process had no descriptor or memory left.

    Raises:
        ConfigError: The address cannot be bound, a certificate file cannot be used, or other
            hosts could connect without proving their identity.
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
        limit_rate: int | None = None,
    ) -> None:
        address = Address.parse(url)
        if limit_rate is not None:
            as_count("limit_rate", limit_rate, 1)
            if address.scheme != "tcp":
                raise ConfigError(f"limit_rate= is for tcp://host:port, and not for {address}")
        validate_seconds("handshake_timeout", handshake_timeout)
        credentials = credentials or Credentials()
        if not address.is_local:
            _check_beyond_this_host(credentials, address)
        self._prove = functools.partial(
            TCPTransport.accept,
            # One TLS context serves all links, so that the files are read only once.
            credentials=replace(credentials, tls=credentials.listening_context()),
            limits=limits,
            payloads=False,
            keepalive=keepalive,
            untaken=untaken,
            timeout=handshake_timeout,
        )
        self.may_refuse_plainly: bool = credentials.tls is None
        self._handshake_timeout = handshake_timeout
        self._status = status
        self._max_connections = as_count("max_connections", max_connections, 1)
        self.links: set[TCPTransport] = set()
        self.accepted: int = 0
        self.refused: Counter[str] = Counter()
        # Texts of the last errors, by the name of the error.
        self._why: dict[str, str] = {}
        self._tasks: TaskOwner | None = None
        # The connections so far of each link that has several, by the link and their number.
        self._joining: dict[tuple[bytes, int], _JoiningLink] = {}
        sock, self._address = bind(address)
        self._limit_rate = limit_rate
        if limit_rate is not None:
            # Accepted sockets inherit it, and the kernel keeps to it.
            _limit(sock, limit_rate)
        super().__init__(sock)
        self.url: str = str(self._address)
        self._file = _identity_of(self._address.path)

    def start(
        self,
        on_link: Callable[[Any, Hello], None],
        on_crash: Callable[[BaseException], None],
        wrap: Callable[[TCPTransport], Transport] = lambda link: link,
    ) -> None:
        """Accept connections on the running loop.

        Args:
            on_link: Called with each link whose peer proved its identity and does not ask for the
                status, and with the peer's Hello. It owns the link from then on. The link takes no
                payloads before ``link.channel.allow_payloads()``.
            on_crash: Called if a handshake ends with an error that is not an
                :class:`~aiosync.errors.AiosyncError`, which is a bug.
            wrap: Makes the link to hand on out of the stream; the link must end with the stream.
        """
        self._tasks = tasks = TaskOwner(on_crash)
        refused = self.refused

        def on_connection(sock: socket.socket) -> None:
            room = min(self._max_connections - len(self.links), _MAX_STRANGERS)
            if room <= 0:
                refused["full"] += 1
                sock.close()
            elif self.let_in(self._admit_stranger(sock, on_link, wrap), sock.close, tasks, room):
                refused["crowded out"] += 1

        def on_trouble(exc: OSError) -> None:
            # Either this process has no descriptor or memory left, or the new connection has failed
            # in the network already.
            refused["no room" if is_no_room(exc) else "ConnectError"] += 1

        self.accept(on_connection, on_trouble)

    async def _admit_stranger(
        self,
        sock: socket.socket,
        on_link: Callable[[Any, Hello], None],
        wrap: Callable[[TCPTransport], Transport],
    ) -> None:
        """Let a stranger prove its identity, and hand on its link; answer a status request here."""
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            try:
                stream = await self._prove(sock, name=_name_of(sock))
                undo.callback(stream.abort)
                link = wrap(stream)
                first = (await link.recv(timeout=self._handshake_timeout)).message
                if isinstance(first, Join) and link is stream:
                    joined = self._join(stream, first)
                    if joined is None:
                        undo.pop_all()
                        return
                    link = stream = joined
                    undo.callback(stream.abort)
                    first = (await link.recv(timeout=self._handshake_timeout)).message
                hello = _as_hello(first)
                if hello.role == "status":
                    self.accepted += 1
                    await link.send(Status(self._status()), timeout=HANDSHAKE_SECONDS)
                    await link.aclose()
                    return
            except (AiosyncError, OSError) as exc:
                name = type(exc).__name__ if isinstance(exc, AiosyncError) else "ConnectError"
                self.refused[name] += 1
                self._why[name] = f": {exc}"
                count = self.refused[name]
                # Only the 1st, 2nd, 4th, 8th ... refusal is logged, so that strangers cannot fill
                # a log.
                if count & (count - 1) == 0:
                    text = f"{self.url} refused somebody ({count} so far): {name}: {exc}"
                    log(logging.INFO, "refused", text, model=None)
                return
            undo.pop_all()
        self.accepted += 1
        self.links.add(stream)
        stream.call_on_end(lambda: self.links.discard(stream))
        on_link(link, hello)

    def _join(self, stream: TCPTransport, join: Join) -> TCPTransport | None:
        """Take one connection of a link that has several; return the link with the last of them.

        This object owns the others until then. They are given up when one of them ends, and when
        the next one does not come within the time for a handshake.

        Raises:
            RemoteProtocolError: The connection is no new one of the link.
            ConnectError: Too many links are coming together.
            TransportError: Another connection has just ended.
        """
        key = join.link, join.count
        waiting = self._joining.get(key) or _JoiningLink()
        if join.index >= join.count or join.index in waiting.members:
            raise RemoteProtocolError(f"connection {join.index} of {join.count} was not expected")
        if not waiting.members and sum(count for _, count in self._joining) > _MAX_STRANGERS:
            raise ConnectError("too many links of several connections are coming together")
        self._joining[key] = waiting
        waiting.members[join.index] = stream
        if waiting.timer is not None:
            waiting.timer.cancel()
        if len(waiting.members) == join.count:
            del self._joining[key]
            link = self._put_together([waiting.members[index] for index in range(join.count)])
            link.queue(encode_frame(join))
            return link
        give_up = functools.partial(self._give_up_join, key, waiting)
        loop = asyncio.get_running_loop()
        waiting.timer = loop.call_later(self._handshake_timeout, give_up)
        stream.call_on_end(give_up)
        # The dialer waits for this before it dials the next one, which could crowd this out.
        stream.queue(encode_frame(join))
        return None

    def _put_together(self, members: list[TCPTransport]) -> TCPTransport:
        """Return one link of several connections, which share its rate; end them if that fails."""
        try:
            if self._limit_rate is not None:
                for each in members:
                    _limit(each.io.sock, self._limit_rate // len(members))
            return TCPTransport.join(members)
        except BaseException:  # raised again
            for each in members:
                each.abort()
            raise

    def _give_up_join(self, key: tuple[bytes, int], waiting: _JoiningLink) -> None:
        """Close the connections of a link that has not come together."""
        if self._joining.get(key) is waiting:
            del self._joining[key]
            self.refused["ConnectTimeout"] += 1
            if waiting.timer is not None:
                waiting.timer.cancel()
            for each in waiting.members.values():
                each.abort()

    def refusals(self) -> list[str]:
        """Return one text for each kind of error: the number of refusals, and the last reason."""
        return [
            f"{name} {count} time{'s' if count > 1 else ''}{self._why.get(name, '')}"
            for name, count in self.refused.items()
        ]

    def close(self) -> None:
        """Stop accepting connections, and cancel all handshakes. Idempotent; links stay open."""
        if self._sock.fileno() < 0:
            return
        # A file that has replaced this socket's file is another listener's, and stays. Until this
        # socket is closed, no other file gets the number of its inode.
        if self._file is not None and _identity_of(self._address.path) == self._file:
            with contextlib.suppress(OSError):
                os.unlink(self._address.path)
        super().close()
        for key, waiting in list(self._joining.items()):
            self._give_up_join(key, waiting)
        if self._tasks is not None:
            self._tasks.abort()

    async def aclose(self) -> None:
        """Do as :meth:`close`, and wait until no task of this object runs any more."""
        self.close()
        if self._tasks is not None:
            await self._tasks.aclose()


def _check_beyond_this_host(credentials: Credentials, address: Address) -> None:
    """Refuse to listen for other hosts without a token or TLS, or with a token that is too short.

    Raises:
        ConfigError: There is neither a token nor TLS, or a token has fewer than 8 bytes. A token of
            8 to 15 bytes only causes a warning.
    """
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


def _identity_of(path: str) -> tuple[int, int] | None:
    """Return device and inode of the file at ``path``; ``None`` if there is none."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return found.st_dev, found.st_ino
    return None


def _name_of(sock: socket.socket) -> str:
    """Return the peer's address, as errors about its link name it."""
    peer = sock.getpeername()
    if not isinstance(peer, tuple):
        return "a peer on this host"
    return str(Address("tcp", host=peer[0], port=peer[1])).removeprefix("tcp://")
