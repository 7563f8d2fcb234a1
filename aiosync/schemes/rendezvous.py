"""Where workers of one host find their trainer: a Unix socket that only the same user may use.

On Linux the address is in the abstract namespace, so nothing is left in the file system however
a process ends; elsewhere it is a path in the temporary directory. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from typing import Protocol

from aiosync.errors import ConfigError, ConnectError, ConnectTimeout
from aiosync.transports._fork import close_in_child
from aiosync.transports._processes import is_gone

__all__ = ["AnyListener", "Listener", "dial", "new_address", "peer_pid"]

_BACKLOG = 1024
_PAUSE_SECONDS = 0.1
_RETRY_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1)


def new_address() -> str:
    """A fresh address that nobody can guess."""
    name = f"aiosync-{secrets.token_hex(16)}"
    if sys.platform == "linux":
        return f"\0{name}"
    return os.path.join(tempfile.gettempdir(), f"{name}.sock")


class AnyListener(Protocol):
    """Where workers arrive, whatever it listens on."""

    def close(self) -> None:
        """Stop accepting. Idempotent."""


class Listener:
    """The trainer's end: bound at once, accepting once :meth:`start` is called.

    Args:
        address: From :func:`new_address`.

    Raises:
        ConfigError: The address is in use: another copy of this scheme is a sender already. Or
            the process has no descriptor left.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as exc:
            raise ConfigError(f"cannot create the socket that workers dial: {exc}") from exc
        try:
            self._sock.bind(address)
            self._sock.listen(_BACKLOG)
        except OSError as exc:
            self._sock.close()
            raise ConfigError(
                "another copy of this scheme is a sender already; give each sender a scheme of "
                f"its own ({exc})"
            ) from exc
        self._sock.setblocking(False)
        close_in_child(self)

    def start(
        self,
        on_connection: Callable[[socket.socket, int], None],
        on_trouble: Callable[[OSError], None] = lambda exc: None,
    ) -> None:
        """Accept on the running loop.

        Args:
            on_connection: Called with each socket and its process id; owns it once it returns.
            on_trouble: Called when a connection could not be accepted; may be called repeatedly for
                it.
        """
        self._loop = asyncio.get_running_loop()
        self._on_trouble = on_trouble
        self._loop.add_reader(self._sock.fileno(), self._accept, on_connection)

    def _accept(self, on_connection: Callable[[socket.socket, int], None]) -> None:
        for _ in range(64):
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                # No descriptors, most likely. Who waits is told by the next turn, or by its own
                # deadline; the loop would say it a hundred thousand times a second.
                self._on_trouble(exc)
                self._pause(on_connection)
                return
            try:
                pid, uid = peer_pid(sock)
                if uid is not None and uid != os.geteuid():
                    sock.close()  # another user's process: it has no business here
                    continue
                on_connection(sock, pid)
            except OSError as exc:
                sock.close()  # who dialled sees it at once
                self._on_trouble(exc)
            except BaseException:  # a bug, for the loop's exception handler
                sock.close()
                raise

    def _pause(self, on_connection: Callable[[socket.socket, int], None]) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._sock.fileno())

        def go_on() -> None:
            if self._sock.fileno() >= 0:
                self.start(on_connection, self._on_trouble)

        self._loop.call_later(_PAUSE_SECONDS, go_on)

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        if not self._address.startswith("\0"):
            with contextlib.suppress(OSError):
                os.unlink(self._address)

    def close_after_fork(self) -> None:
        """In a forked child: close this copy; the parent goes on listening."""
        self._sock.close()


def peer_pid(sock: socket.socket) -> tuple[int, int | None]:
    """(process id, user id) of the other end; (0, None) where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, None
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _gid = struct.unpack("3i", data)
    return pid, uid


async def dial(address: str, *, sender_pid: int | None, timeout: float | None) -> socket.socket:
    """Reach the trainer, waiting for it to listen.

    Args:
        address: From the scheme.
        sender_pid: Process that listens, if it is known; its end ends the wait.
        timeout: Seconds for the whole call; ``None`` waits for ever.

    Raises:
        ConnectTimeout: Nothing listened there in time.
        ConnectError: The trainer's process has ended, or it belongs to another user.

    Cancellation:
        Class A.
    """
    loop = asyncio.get_running_loop()
    give_up = None if timeout is None else loop.time() + timeout
    attempt = 0
    while True:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as exc:
            raise ConnectError(f"cannot create a socket to reach the trainer: {exc}") from exc
        sock.setblocking(False)
        try:
            sock.connect(address)
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError) as exc:
            sock.close()
            _check_alive(sender_pid, exc)
            pause = _RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)]
            attempt += 1
            if give_up is not None and loop.time() + pause > give_up:
                raise ConnectTimeout(
                    f"no trainer listened within {timeout:g} s: call init_on_sender() and "
                    "connect() on the trainer's copy of this scheme"
                ) from exc
            await asyncio.sleep(pause)
            continue
        except OSError as exc:
            sock.close()
            raise ConnectError(f"the trainer cannot be reached: {exc}") from exc
        _pid, uid = peer_pid(sock)
        if uid is not None and uid != os.geteuid():
            sock.close()
            raise ConnectError("the socket of this scheme belongs to another user")
        return sock


def _check_alive(pid: int | None, cause: BaseException) -> None:
    if pid is not None and is_gone(pid):
        raise ConnectError(f"the trainer's process {pid} has ended") from cause
