"""Where workers of one host find their trainer: a Unix socket that only the same user may use.

On Linux the address is in the abstract namespace, so nothing is left in the file system however
a process ends; elsewhere it is a path in the temporary directory. Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Callable

from aiosync.errors import ConfigError, ConnectError
from aiosync.rendezvous.listener import AcceptLoop, AnyListener
from aiosync.transports._processes import is_gone

__all__ = ["NobodyListens", "UnixListener", "connect", "new_address"]

_BACKLOG = 1024
_NOT_YET = (ConnectionRefusedError, FileNotFoundError, BlockingIOError)


def new_address() -> str:
    """A fresh address that nobody can guess."""
    name = f"aiosync-{secrets.token_hex(16)}"
    if sys.platform == "linux":
        return f"\0{name}"
    return os.path.join(tempfile.gettempdir(), f"{name}.sock")


class UnixListener(AnyListener):
    """The trainer's end: bound at once, accepting once :meth:`start` is called.

    Args:
        address: From :func:`new_address`.

    Raises:
        ConfigError: The address is in use: another copy of this scheme is a sender already. Or
            the process has no descriptor left.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as exc:
            raise ConfigError(f"cannot create the socket that workers dial: {exc}") from exc
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
        self._accepting = AcceptLoop(sock)

    def start(
        self,
        on_connection: Callable[[socket.socket, int], None],
        on_trouble: Callable[[OSError], None] = lambda exc: None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Accept on the running loop.

        Args:
            on_connection: Called with each socket and its process id (0 where the system does not
                tell); owns it once it returns.
            on_trouble: Called when a connection could not be accepted; may be called repeatedly for
                it.
            busy: Whether the next one has to wait for a moment.
        """

        def of_this_user(sock: socket.socket) -> None:
            pid = _peer_pid(sock)
            if pid is None:
                sock.close()  # another user's process: it has no business here
            else:
                on_connection(sock, pid)

        self._accepting.start(of_this_user, on_trouble, busy)

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        if self._accepting.close() and not self._address.startswith("\0"):
            with contextlib.suppress(OSError):
                os.unlink(self._address)


def _peer_pid(sock: socket.socket) -> int | None:
    """Process id of the other end; 0 where the system does not tell, ``None`` of other users."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
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
        The socket, and the process id of the other end, 0 where the system does not tell.

    Raises:
        NobodyListens: So far.
        ConnectError: It cannot be reached, its process has ended, or it is another user's.
    """
    sock = None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect(address)
        pid = _peer_pid(sock)
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
