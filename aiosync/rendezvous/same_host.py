"""Where workers of one host find their trainer: a Unix socket that only the same user may use.

Its address is in the abstract namespace, so nothing is left in the file system however a process
ends. The sender of an engine's scheme listens on one as well, which is named after its address:
whoever proves there that it has the token reads weights from shared memory. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Callable

from aiosync._tasks import TaskOwner
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    RemoteProtocolError,
)
from aiosync.rendezvous.listener import Listener, first_word
from aiosync.transports._processes import is_gone
from aiosync.transports.address import Address
from aiosync.transports.base import Transport, in_time
from aiosync.transports.credentials import Credentials
from aiosync.transports.shared_memory import Arena, SharedMemTransport
from aiosync.transports.tcp import prove_as_dialer, prove_as_listener
from aiosync.types import Limits
from aiosync.wire import Hello, Setup

__all__ = [
    "NobodyListens",
    "SameHost",
    "bind_here",
    "connect",
    "dial_here",
    "new_address",
    "peer_pid",
]

_BACKLOG = 1024
_NOT_YET = (ConnectionRefusedError, FileNotFoundError, BlockingIOError)
_MAX_STRANGERS = 1024
_SETUP = "here", "called"  # kind and key of what a worker says once both have proved who they are


def new_address() -> str:
    """A fresh address that nobody can guess."""
    return f"\0aiosync-{secrets.token_hex(16)}"


def bind_here(address: str) -> socket.socket:
    """The trainer's end: a socket that listens.

    Args:
        address: From :func:`new_address`.

    Raises:
        ConfigError: The address is in use: another copy of this scheme is a sender already.
        OSError: The process has no descriptor left.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            "another copy of this scheme is a sender already; give each sender a scheme of "
            f"its own ({exc})"
        ) from exc
    sock.setblocking(False)
    return sock


def peer_pid(sock: socket.socket) -> int | None:
    """Process id of the other end, 0 in a namespace that is not seen; ``None`` of other users."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _gid = struct.unpack("3i", data)
    return int(pid) if uid == os.geteuid() else None


class NobodyListens(ConnectError):
    """There is nobody at an address, so far."""


def connect(address: str, *, listener_pid: int | None = None) -> tuple[socket.socket, int]:
    """One attempt to reach who listens at ``address``; it does not wait.

    Args:
        address: From the scheme.
        listener_pid: Process that listens, if it is known; its end ends all hope.

    Returns:
        The socket, and the process id of the other end, 0 in a namespace that is not seen.

    Raises:
        NobodyListens: So far.
        ConnectError: It cannot be reached, its process has ended, or it is another user's.
    """
    sock = None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect(address)
        pid = peer_pid(sock)
    except OSError as exc:
        if sock is not None:
            sock.close()
        if listener_pid is not None and is_gone(listener_pid):
            raise ConnectError(f"the trainer's process {listener_pid} has ended") from exc
        kind = NobodyListens if isinstance(exc, _NOT_YET) else ConnectError
        raise kind(f"the trainer cannot be reached: {exc}") from exc
    if pid is None:
        sock.close()
        raise ConnectError("the socket of this scheme belongs to another user")
    return sock, pid


# -- beside an engine ----------------------------------------------------------------------------


def _name(address: Address) -> str:
    """What the abstract socket beside ``address`` is called.

    The whole address counts: a trainer of this host is not to be taken for that of another one,
    which may listen on the same port with the same token. It is no secret, as every process of
    the host can list such names.
    """
    digest = hashlib.sha256(f"aiosync same host {address}".encode())
    return f"\0aiosync-{digest.hexdigest()[:32]}"


def _link(
    sock: socket.socket, pid: int, name: str, limits: Limits | None, arena: Arena | None = None
) -> SharedMemTransport:
    """A link to somebody who has proved nothing yet."""
    link = SharedMemTransport(sock, arena=arena, limits=limits, name=name)
    link.channel.refuse_payloads()
    link.take_segments(False)
    with contextlib.suppress(ConnectError):  # gone already: the handshake will see it
        link.channel.watch_process(pid)
    return link


class SameHost(Listener):
    """The sender's end, bound at once.

    Args:
        address: Where the sender listens for everybody.
        credentials: Its token.
        handshake_timeout: Seconds that a stranger has to prove its identity.
        limits: What workers may announce afterwards.

    Raises:
        ConfigError: Somebody listens there already.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        *,
        handshake_timeout: float,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(bind_here(_name(address)))
        self.arena: Arena | None = None
        self._credentials = credentials
        self._handshake_timeout = handshake_timeout
        self._limits = limits

    def start(self, on_link: Callable[[Transport, Hello], None], tasks: TaskOwner) -> None:
        """Let workers in on the running loop.

        Args:
            on_link: Called with each link whose peer proved its identity, and with what it said
                first; owns it from then on. Links read from :attr:`arena`.
            tasks: Owner of the handshakes' tasks.
        """

        def on_connection(sock: socket.socket) -> None:
            pid = peer_pid(sock)
            if not pid:  # of another user; or in a process namespace where its end is not seen
                sock.close()
                return
            link = _link(sock, pid, f"worker process {pid}", self._limits, self.arena)
            self.let_in(self._meet(link, on_link), link.abort, tasks, _MAX_STRANGERS)

        self.accept(on_connection)

    async def _meet(
        self, link: SharedMemTransport, on_link: Callable[[Transport, Hello], None]
    ) -> None:
        try:
            async with asyncio.timeout(self._handshake_timeout):
                await prove_as_listener(link, self._credentials)
                said = (await link.recv()).message
            if not isinstance(said, Setup) or (said.kind, said.key) != _SETUP:
                raise RemoteProtocolError(f"expected Setup, got {type(said).__name__}")
            hello = await first_word(link, self._handshake_timeout)
        except (AiosyncError, TimeoutError):
            link.abort()  # it was told; a worker then comes the other way, where it is counted
            return
        on_link(link, hello)


async def dial_here(
    address: Address,
    credentials: Credentials,
    limits: Limits | None = None,
    *,
    timeout: float | None,
) -> SharedMemTransport | None:
    """A link to a sender that listens on ``address`` and runs on this host.

    Args:
        address: Where the sender listens for everybody.
        credentials: The token.
        limits: What the sender may announce once it proved its identity.
        timeout: Seconds for the whole call; ``None`` waits for ever.

    Returns:
        ``None`` where nobody is, or somebody who is not to be trusted or hangs up.

    Raises:
        ConnectTimeout: Somebody is there and did not answer.

    Cancellation:
        Class A.
    """
    try:
        sock, pid = connect(_name(address))
    except ConnectError:
        return None
    link = _link(sock, pid, f"the trainer at {address}", limits)
    try:
        async with in_time(timeout, ConnectTimeout, f"{link.name} did not answer"):
            await prove_as_dialer(link, credentials)
            await link.send(Setup(*_SETUP))
    except BaseException as exc:  # raised again where the caller sees it
        link.abort()
        if isinstance(exc, AiosyncError) and not isinstance(exc, ConnectTimeout):
            return None
        raise
    link.take_segments(True)
    return link
