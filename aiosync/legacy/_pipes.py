"""Taking over the pipes that this generation hands to schemes and transports.

Must not import torch, asyncio or a scheme.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from aiosync.errors import ConfigError

__all__ = [
    "creator_of",
    "hear_writer",
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
        raise ConfigError(f"{pipe!r} is no connection of a pipe")
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


def hear_writer(sock: socket.socket, io: Any, tell: Callable[[int], None]) -> None:
    """Have the process known that writes the first bytes which are read from a pipe.

    The kernel says so. The process that made the pipe need not be the one that writes to it.

    Args:
        sock: One end of the pipe.
        io: The stream that reads it with ``recv_into()``.
        tell: Called with the process id, once, in the midst of the first read.
    """
    if not hasattr(socket, "SO_PASSCRED") or sock.family != socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def recv_into(buffer: memoryview) -> int:
        # Only looks; descriptors that came along are for the read that follows.
        space = socket.CMSG_SPACE(_UCRED.size)
        _, ancillary, _, _ = sock.recvmsg(1, space, socket.MSG_PEEK)
        del vars(io)["recv_into"]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid = _UCRED.unpack_from(data)[0]
                if pid > 0:  # 0: it is in another namespace
                    tell(pid)
        return int(io.recv_into(buffer))

    vars(io)["recv_into"] = recv_into  # for the first read only: none pays for it later


def creator_of(sock: socket.socket) -> int:
    """The process that made a pipe of which this is an end; 0 when the kernel does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError:
        return 0  # closed already: reading tells
    return int(_UCRED.unpack(found)[0])


def say_goodbye(sock: socket.socket) -> None:
    """End what is written to a pipe. What was written before is still read.

    Closing is not enough: forked processes may have copies of this end. Idempotent.
    """
    with contextlib.suppress(OSError):  # closed already, or the other end is
        sock.shutdown(socket.SHUT_WR)


def of_old_context(context: Any, name: str) -> Any:
    """The pipes that an old-style context offers, or ``None``.

    TorchRL's present collectors have such an attribute, too, but use it for something else.
    """
    if context is None or type(context).__module__.partition(".")[0] == "torchrl":
        return None
    return getattr(context, name, None)
