"""Workers on the sender's own host: links through shared memory beside those of an engine.

The sender of an engine's scheme also listens on an abstract Unix socket, whose name only those
can work out who know where it listens and its token. Whoever reaches it shares its kernel, and
reads weights from shared memory. Must not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import sys
from collections.abc import Callable

from aiosync.errors import ConfigError, ConnectError
from aiosync.schemes.rendezvous import Listener, peer_pid
from aiosync.transports._segment import Arena
from aiosync.transports.address import Address
from aiosync.transports.credentials import Credentials
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.types import Limits

__all__ = ["AVAILABLE", "SameHost", "dial_here"]

AVAILABLE: bool = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether this system has abstract sockets and anonymous shared memory."""


def _name(address: Address, credentials: Credentials) -> str:
    """What the abstract socket beside ``address`` is called.

    The whole address counts: a trainer of this host is not to be taken for that of another one,
    which may listen on the same port with the same token.
    """
    digest = hmac.new(
        credentials.token_bytes or b"", f"aiosync same host {address}".encode(), hashlib.sha256
    )
    return f"\0aiosync-{digest.hexdigest()[:32]}"


class SameHost:
    """The sender's end, bound at once.

    Args:
        address: Where the sender listens for everybody.
        credentials: Its token.
        limits: What workers may announce.
    """

    def __init__(
        self, address: Address, credentials: Credentials, limits: Limits | None = None
    ) -> None:
        self.arena: Arena | None = None
        self._limits = limits
        self._listener: Listener | None = None
        with contextlib.suppress(ConfigError):  # taken: workers then come the other way
            self._listener = Listener(_name(address, credentials))

    def start(self, welcome: Callable[[SharedMemTransport], None]) -> None:
        """Let workers in on the running loop; links read from :attr:`arena`."""

        def on_connection(sock: socket.socket, pid: int) -> None:
            if pid <= 0:
                sock.close()  # in a process namespace of its own: its end could not be seen
                return
            name = f"worker process {pid}"
            link = SharedMemTransport(sock, arena=self.arena, limits=self._limits, name=name)
            with contextlib.suppress(ConnectError):  # gone already: the handshake will see it
                link.channel.watch_process(pid)
            welcome(link)

        if self._listener is not None:
            self._listener.start(on_connection)

    def close(self) -> None:
        """Stop accepting. Idempotent; links stay open."""
        if self._listener is not None:
            self._listener.close()


def dial_here(
    address: Address, credentials: Credentials, limits: Limits | None = None
) -> SharedMemTransport | None:
    """A link to a sender that listens on ``address`` and runs on this host; ``None`` otherwise.

    Needs a running loop; never waits.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(_name(address, credentials))
        pid, uid = peer_pid(sock)
    except OSError:
        sock.close()
        return None
    if pid <= 0 or uid != os.geteuid():
        sock.close()
        return None
    link = SharedMemTransport(sock, limits=limits, name=f"the trainer at {address}")
    with contextlib.suppress(ConnectError):
        link.channel.watch_process(pid)
    return link
