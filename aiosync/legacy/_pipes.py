"""Taking over the pipes that this generation hands to schemes and transports.

Must not import torch, asyncio or a scheme.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from aiosync.errors import ConfigError

__all__ = ["of_old_context", "say_goodbye", "take_socket", "take_sockets"]


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
