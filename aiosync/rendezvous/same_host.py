"""Workers on the sender's own host: links through shared memory beside those of an engine.

The sender of an engine's scheme also listens on an abstract Unix socket that is named after its
address. Whoever reaches it shares its kernel; who also is the same user's process, and proves that
it has the token, reads weights from shared memory. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import socket
import sys
from collections.abc import Callable

from aiosync._tasks import TaskOwner
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    RemoteProtocolError,
)
from aiosync.rendezvous.listener import AnyListener, Strangers, first_word
from aiosync.rendezvous.unix import UnixListener, connect
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.credentials import Credentials
from aiosync.transports.handshake import (
    name_from,
    prove_as_dialer,
    prove_as_listener,
)
from aiosync.transports.shared_memory import Arena, SharedMemTransport, has_memory
from aiosync.types import Limits
from aiosync.wire import Hello, Setup

__all__ = ["SameHost", "available", "dial_here"]

_MAX_STRANGERS = 1024
_KIND, _CALLED = "here", "called"


@functools.cache
def available() -> bool:
    """Whether this system has abstract sockets, and lets this process share memory."""
    return sys.platform == "linux" and has_memory()


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


class SameHost(AnyListener):
    """The sender's end, bound at once.

    Args:
        address: Where the sender listens for everybody.
        credentials: Its token.
        handshake_timeout: Seconds that a stranger has to prove its identity.
        limits: What workers may announce afterwards.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        *,
        handshake_timeout: float,
        limits: Limits | None = None,
    ) -> None:
        self.arena: Arena | None = None
        self._credentials = credentials
        self._handshake_timeout = handshake_timeout
        self._limits = limits
        self._listener: UnixListener | None = None
        with contextlib.suppress(ConfigError):  # taken: workers then come the other way
            self._listener = UnixListener(_name(address))

    def start(self, on_link: Callable[[Transport, Hello], None], tasks: TaskOwner) -> None:
        """Let workers in on the running loop.

        Args:
            on_link: Called with each link whose peer proved its identity, and with what it said
                first; owns it from then on. Links read from :attr:`arena`.
            tasks: Owner of the handshakes' tasks.
        """
        strangers = Strangers(tasks)

        def on_connection(sock: socket.socket, pid: int) -> None:
            if not pid:  # in a process namespace of its own its end could not be seen
                sock.close()
                return
            link = _link(sock, pid, f"worker process {pid}", self._limits, self.arena)
            strangers.let_in(self._let_in(link, on_link), link.abort, _MAX_STRANGERS)

        if self._listener is not None:
            self._listener.start(on_connection, busy=strangers.are_new)

    async def _let_in(
        self, link: SharedMemTransport, on_link: Callable[[Transport, Hello], None]
    ) -> None:
        try:
            async with asyncio.timeout(self._handshake_timeout):
                await prove_as_listener(link, self._credentials)
                said = (await link.recv()).message
            if not isinstance(said, Setup) or (said.kind, said.key) != (_KIND, _CALLED):
                raise RemoteProtocolError(f"{type(said).__name__} instead of a name")
            hello = await first_word(link, self._handshake_timeout)
        except (AiosyncError, TimeoutError):
            link.abort()  # it was told; a worker then comes the other way, where it is counted
            return
        if called := name_from(said.value):
            link.channel.name = f"{called}, {link.channel.name}"
        on_link(link, hello)

    def close(self) -> None:
        """Stop accepting. Idempotent; links stay open."""
        if self._listener is not None:
            self._listener.close()


async def dial_here(
    address: Address,
    credentials: Credentials,
    limits: Limits | None = None,
    *,
    called: str = "",
    timeout: float | None,
) -> SharedMemTransport | None:
    """A link to a sender that listens on ``address`` and runs on this host.

    Args:
        address: Where the sender listens for everybody.
        credentials: The token.
        limits: What the sender may announce once it proved its identity.
        called: How the sender's errors call this process, besides its number: ASCII.
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
        async with asyncio.timeout(timeout):
            await prove_as_dialer(link, credentials)
            await link.send(Setup(_KIND, _CALLED, called.encode("ascii", "replace")))
    except BaseException as exc:  # raised again where the caller sees it
        link.abort()
        if isinstance(exc, AiosyncError):
            return None
        if isinstance(exc, TimeoutError):
            raise ConnectTimeout(f"{link.channel.name} did not answer") from exc
        raise
    link.take_segments(True)
    return link
