"""What the fault proxy does with sockets: addresses, readiness, and ends that lose no byte.

This module must never import pytest, torch or the rest of aiosync but its errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from aiosync.errors import ConfigError

if sys.platform == "linux":
    import fcntl
    import termios

__all__ = [
    "Address",
    "close_in_order",
    "delivered",
    "dial",
    "new_socket",
    "normal_errors",
    "parse",
    "prepared",
    "readable",
    "resolve",
    "unlink",
    "writable",
]

Address: TypeAlias = str | tuple[str, int]
"""The path of a Unix socket, or host and port."""

_Target: TypeAlias = tuple[int, Any]  # the family, and what connect() and bind() take
_KERNEL_NBYTES: Final = 2**17  # asked for; Linux grants twice as much, for its own overhead
_LINGER: Final = 5.0  # seconds in which the kernel of a peer has to take some of what it was sent
_BLOCK_NBYTES: Final = 2**16
_BUGS: Final = {errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTSOCK}
_TCP_CLOSE: Final = 7  # the kernel's state number of a connection that is gone


def parse(url: str) -> Address:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"not an address: {url!r}") from error
    if parts.scheme == "tcp" and host and port is not None and not parts.path:
        return host, port
    if parts.scheme == "unix" and not parts.netloc and parts.path not in ("", "/"):
        return parts.path
    raise ConfigError(f"neither tcp://host:port nor unix:///path: {url!r}")


async def resolve(address: Address) -> list[_Target]:
    if isinstance(address, str):
        return [(socket.AF_UNIX, address)]
    host, port = address
    try:  # most addresses are numbers, for which no thread is needed
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]


async def dial(address: Address, opened: list[socket.socket]) -> socket.socket | None:
    """Connect, or None; the socket is in ``opened`` from the start, for whoever cancels this."""
    try:
        targets = await resolve(address)
    except OSError:
        return None
    for family, target in targets:
        sock = new_socket(family)
        opened.append(sock)
        try:
            await asyncio.get_running_loop().sock_connect(sock, target)
        except OSError:
            opened.remove(sock)
            sock.close()
        else:
            return sock
    return None


def new_socket(family: int) -> socket.socket:
    return prepared(socket.socket(family, socket.SOCK_STREAM))


def prepared(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Fixed: the kernel would let the buffers of a stalled connection grow to many MiB.
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _KERNEL_NBYTES)
    return sock


def unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def normal_errors() -> Iterator[None]:
    """Pass over what a peer can cause; the errors of a misused socket are bugs of this module."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _BUGS:
            raise


async def readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_reader(sock)


async def writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_writer(sock)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def close_in_order(sock: socket.socket) -> None:
    """Have the peer read all that it was sent and the end, whatever it has sent meanwhile.

    Closing a socket with unread bytes makes the kernel report a reset to the peer, which may come
    before the end of the stream. Over TCP the end is therefore waited for until the peer's kernel
    has it; over Unix nothing more arrives after the shutdown, so that it can be emptied.
    """
    is_unix = sock.family == socket.AF_UNIX
    with normal_errors():
        sock.shutdown(socket.SHUT_RDWR if is_unix else socket.SHUT_WR)
        if is_unix:
            with contextlib.suppress(BlockingIOError):
                while sock.recv(_BLOCK_NBYTES):
                    pass
        else:
            await delivered(sock)
    sock.close()


async def delivered(sock: socket.socket) -> None:
    """Wait until the peer's kernel has all that was sent, takes nothing for 5 s, or is gone."""
    loop = asyncio.get_running_loop()
    last, give_up, pause = -1, 0.0, 0.0005
    while left := _unacknowledged(sock):
        if left != last:
            last, give_up, pause = left, loop.time() + _LINGER, 0.0005
        elif loop.time() >= give_up:
            return
        await asyncio.sleep(pause)  # the kernel tells nobody
        pause = min(2 * pause, 0.01)


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes that the peer's kernel does not have yet; the end of the stream counts as one."""
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return 0  # over Unix, what was sent lies with the peer already
    if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
        return 0
    (nbytes,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(nbytes)
