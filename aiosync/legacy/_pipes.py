"""Taking over the pipes that this generation hands to schemes and transports.

Must not import torch, asyncio or a scheme.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiosync.errors import ConfigError
from aiosync.transports._pidfd import open_pidfd

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "ProcessWatch",
    "creator_of",
    "has_ended",
    "of_old_context",
    "say_goodbye",
    "take_socket",
    "take_sockets",
]

_UCRED = struct.Struct("3i")  # process, user, group


def take_socket(pipe: Any) -> socket.socket:
    """The socket below one end of a two-way pipe, whose connection object is closed.

    The program may close its own end afterwards or not: it makes no difference any more.

    Args:
        pipe: ``multiprocessing`` connection of a two-way pipe, or a connected Unix socket,
            which is returned as it is.

    Raises:
        ConfigError: It is neither; nothing was closed.
    """
    if isinstance(pipe, socket.socket):
        return pipe
    if not hasattr(pipe, "fileno"):
        raise ConfigError(f"{pipe!r} is not a multiprocessing pipe connection")
    try:
        fd = os.dup(pipe.fileno())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the pipe {pipe!r} is closed: {exc}") from exc
    try:
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        os.close(fd)
        raise ConfigError("pipes have to be two-way: multiprocessing.Pipe(duplex=True)") from exc
    pipe.close()
    return sock


def take_sockets(pipes: Sequence[Any]) -> list[socket.socket]:
    """:func:`take_socket` for each; those that were taken are closed when one is refused."""
    taken: list[socket.socket] = []
    try:
        for pipe in pipes:
            taken.append(take_socket(pipe))  # noqa: PERF401 - what was taken has to be known
    except BaseException:  # goes on to the caller
        for sock in taken:
            sock.close()
        raise
    return taken


def creator_of(sock: socket.socket) -> int:
    """The process that made a pipe of which this is an end; 0 when the kernel does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError:
        return 0  # closed already: reading tells
    return int(_UCRED.unpack(found)[0])


def has_ended(pid: int) -> bool:
    """Whether a process of this namespace is known to be gone; one that nobody reaped is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's
    return False


def say_goodbye(sock: socket.socket) -> None:
    """End what is written to a pipe. What was written before is still read.

    Closing is not enough: forked processes may have copies of this end. Idempotent.
    """
    with contextlib.suppress(OSError):  # closed already, or the other end is
        sock.shutdown(socket.SHUT_WR)


class ProcessWatch:
    """Ends what is read from a pipe once a process has ended. What it wrote before is still read.

    The end of the pipe does not tell: whoever was forked meanwhile has a copy of its end.

    Args:
        loop: What waits for the end of the process.
        sock: One end of the pipe; whose it is makes no difference.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._pid = os.getpid()
        self._pidfd = -1

    def watch(self, pid: int) -> None:
        """Watch this process, and no other; 0 for one that is not known."""
        self.close()
        if pid <= 0 or pid == os.getpid():
            return
        try:
            self._pidfd = open_pidfd(pid)
        except ProcessLookupError:
            self._end()
        else:
            if self._pidfd >= 0:  # else the closed stream has to tell
                self._loop.add_reader(self._pidfd, self._end)

    def _end(self) -> None:
        self.close()
        with contextlib.suppress(OSError):  # closed already
            self._sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Stop watching. Idempotent; in a forked child the parent goes on."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd < 0:
            return
        if self._pid == os.getpid() and not self._loop.is_closed():
            self._loop.remove_reader(pidfd)
        os.close(pidfd)


def of_old_context(context: Any, name: str) -> Any:
    """The pipes that an old-style context offers, or ``None``.

    TorchRL's present collectors have such an attribute, too, but use it for something else.
    """
    if context is None or type(context).__module__.partition(".")[0] == "torchrl":
        return None
    return getattr(context, name, None)
