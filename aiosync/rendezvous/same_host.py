"""Rendezvous of a trainer and the workers of its host: a Unix socket for processes of one user.

Its address is in the abstract namespace, so nothing is left in the file system however a process
ends. The sender of a scheme over a cluster listens on such a socket beside its TCP address, from
which the name of the socket is made: a worker that proves there that it has the token reads weights
from shared memory. Must not import torch.
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
from aiosync.rendezvous.listener import Listener, receive_hello
from aiosync.transports._forks import new_socket
from aiosync.transports._process_end import is_gone
from aiosync.transports.address import Address
from aiosync.transports.base import Transport, in_time
from aiosync.transports.credentials import Credentials
from aiosync.transports.shared_memory import Arena, SharedMemTransport
from aiosync.transports.tcp import prove_as_dialer, prove_as_listener
from aiosync.types import Limits
from aiosync.wire import Hello, Setup

__all__ = [
    "NotYetReachable",
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
# Kind and key of the Setup that a worker sends once both ends have proved their identity.
_SETUP = "here", "called"


def new_address() -> str:
    """Return a new address that no other process can guess."""
    return f"\0aiosync-{secrets.token_hex(16)}"


def bind_here(address: str) -> socket.socket:
    """Return a socket that listens on ``address``, for the trainer.

    Args:
        address: Address of the socket, such as :func:`new_address` returns.

    Raises:
        ConfigError: The address is in use, as another copy of this scheme is a sender already, or
            this process has no descriptor left.
    """
    sock = None
    try:
        sock = new_socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as exc:
        if sock is None:
            raise ConfigError(f"no socket can be made for workers of this host: {exc}") from exc
        sock.close()
        raise ConfigError(
            "another copy of this scheme is a sender already; give each sender a scheme of "
            f"its own ({exc})"
        ) from exc
    sock.setblocking(False)
    return sock


def peer_pid(sock: socket.socket) -> int | None:
    """Return the process id of the other end, or ``None`` if it runs as another user.

    The id is 0 for a process in a process namespace that this process cannot see.
    """
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _gid = struct.unpack("3i", data)
    return int(pid) if uid == os.geteuid() else None


class NotYetReachable(ConnectError):
    """An error because no process listens at an address yet, or because its queue is full."""


def connect(address: str, *, listener_pid: int | None = None) -> tuple[socket.socket, int]:
    """Make one attempt to reach the process that listens at ``address``. It does not wait.

    Args:
        address: Address of the trainer's socket, from the scheme.
        listener_pid: Id of the process that listens, if it is known. Once that process has ended,
            no other attempt can succeed.

    Returns:
        The connected socket, and the process id of the other end as :func:`peer_pid` returns it.

    Raises:
        NotYetReachable: No process listens there yet, or its queue is full.
        ConnectError: The trainer cannot be reached, its process has ended, or it belongs to another
            user.
    """
    sock = None
    try:
        sock = new_socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect(address)
        pid = peer_pid(sock)
    except OSError as exc:
        if sock is not None:
            sock.close()
        if listener_pid is not None and is_gone(listener_pid):
            raise ConnectError(f"the trainer's process {listener_pid} has ended") from exc
        kind = NotYetReachable if isinstance(exc, _NOT_YET) else ConnectError
        raise kind(f"the trainer cannot be reached: {exc}") from exc
    if pid is None:
        sock.close()
        raise ConnectError("the socket of this scheme belongs to another user")
    return sock, pid


# -- beside the TCP address of a cluster ---------------------------------------------------------


def _name(address: Address) -> str:
    """Return the name of the abstract socket beside ``address``.

    It is made from the whole address, so that a trainer of this host is not taken for that of
    another host, which may listen on the same port with the same token. The name is no secret, as
    every process of the host can list such names.
    """
    digest = hashlib.sha256(f"aiosync same host {address}".encode())
    return f"\0aiosync-{digest.hexdigest()[:32]}"


def _link(
    sock: socket.socket, pid: int, name: str, limits: Limits | None, arena: Arena | None = None
) -> SharedMemTransport:
    """Return a link to a peer that has not proved its identity yet, and so may send little."""
    link = SharedMemTransport(sock, arena=arena, limits=limits, name=name)
    link.channel.refuse_payloads()
    link.take_segments(False)
    # If the process has ended already, the handshake fails.
    with contextlib.suppress(ConnectError):
        link.channel.watch_process(pid)
    return link


class SameHost(Listener):
    """The sender's listener for workers of its own host, bound at once.

    Args:
        address: Address on which the sender listens for the workers of all hosts.
        credentials: The sender's token.
        handshake_timeout: Seconds that a stranger has to prove its identity.
        limits: Bounds on what workers may announce after that.

    Raises:
        ConfigError: Another process or scheme listens there already, or this process has no
            descriptor left.

    Attributes:
        arena: Owner of the slots that the links name to workers; ``None`` until the caller sets it.
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
        """Accept workers on the running loop.

        Args:
            on_link: Called with each link whose peer proved its identity, and with the peer's
                Hello. It owns the link from then on. Links name slots of :attr:`arena`.
            tasks: Owner of the handshakes' tasks.
        """

        def on_connection(sock: socket.socket) -> None:
            pid = peer_pid(sock)
            if not pid:
                # The process runs as another user, or in a process namespace where this one could
                # not see it end.
                sock.close()
                return
            link = _link(sock, pid, f"worker process {pid}", self._limits, self.arena)
            self.let_in(self._admit_stranger(link, on_link), link.abort, tasks, _MAX_STRANGERS)

        self.accept(on_connection)

    async def _admit_stranger(
        self, link: SharedMemTransport, on_link: Callable[[Transport, Hello], None]
    ) -> None:
        """Let a stranger prove its identity, and hand on its link."""
        try:
            async with asyncio.timeout(self._handshake_timeout):
                await prove_as_listener(link, self._credentials)
                setup = (await link.recv()).message
            if not isinstance(setup, Setup) or (setup.kind, setup.key) != _SETUP:
                raise RemoteProtocolError(f"expected Setup, got {type(setup).__name__}")
            hello = await receive_hello(link, self._handshake_timeout)
        except (AiosyncError, TimeoutError):
            # The peer was told the reason. If it is a worker, it dials the TCP address next, where
            # refusals are counted.
            link.abort()
            return
        on_link(link, hello)


async def dial_here(
    address: Address,
    credentials: Credentials,
    limits: Limits | None = None,
    *,
    timeout: float | None,
) -> SharedMemTransport | None:
    """Dial the sender that listens on ``address``, if it runs on this host.

    Args:
        address: Address on which the sender listens for the workers of all hosts.
        credentials: The token.
        limits: Bounds on what the sender may announce once it has proved its identity.
        timeout: Seconds for the whole call; ``None`` waits for ever.

    Returns:
        The link; ``None`` if no process listens on this host, or if the process that listens does
        not prove its identity or closes the link. The caller then dials the address itself.

    Raises:
        ConnectTimeout: A process accepted the connection and did not answer in time.

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
    # The trainer has proved its identity, and may announce memory to read.
    link.take_segments(True)
    return link
