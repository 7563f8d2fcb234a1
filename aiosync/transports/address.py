"""Addresses of stream links: ``tcp://host:port`` and ``unix:///path``.

This module only parses and binds them; it knows neither the wire format, the event loop nor torch.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from aiosync.errors import ConfigError
from aiosync.transports._forks import new_socket

__all__ = ["Address", "bind", "own_host", "parse_all"]

_BACKLOG = 1024
# Greatest path in a sockaddr_un on Linux.
_MAX_PATH_NBYTES = 107


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL.

    Attributes:
        scheme: ``"tcp"`` or ``"unix"``.
        host: Host name or IP address, without brackets; empty for ``unix``.
        port: TCP port; 0 lets the system choose one when it is bound.
        path: Path of the socket file; empty for ``tcp``.
    """

    scheme: Literal["tcp", "unix"]
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, url: str | Address) -> Address:
        """Parse ``tcp://host:port``, ``tcp://[::1]:port`` or ``unix:///path``.

        Raises:
            ConfigError: ``url`` is none of them.
        """
        if isinstance(url, Address):
            return url
        if not isinstance(url, str):
            raise ConfigError(f"an address must be a str such as 'tcp://host:7000', not {url!r}")
        if "@" in url and not url.startswith("unix:"):
            # Checked before anything is parsed, as an error of the parser would show a part of the
            # credentials.
            raise ConfigError(
                "an address must not contain credentials: pass them as token= or tls="
            )
        # A query is left out of errors, because it may hold a token.
        shown = repr(re.sub("(?s)([?#]).*", r"\1...", url)[:200])
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"{shown} is not an address: {exc}") from exc
        address = cls._from_parts(parts, port)
        if address is None:
            raise ConfigError(
                f"{shown} is not an address: use tcp://host:port, or unix:///path/of/the/socket "
                f"with a path of at most {_MAX_PATH_NBYTES} bytes"
            )
        return address

    @classmethod
    def _from_parts(cls, parts: SplitResult, port: int | None) -> Address | None:
        """Return the address that a URL names; ``None`` if it lacks a part, or has more."""
        if parts.query or parts.fragment:
            return None
        if parts.scheme == "tcp" and parts.hostname and parts.path in ("", "/"):
            return None if port is None else cls("tcp", host=parts.hostname, port=port)
        if parts.scheme == "unix" and not parts.netloc and _is_socket_path(parts.path):
            return cls("unix", path=parts.path)
        return None

    @property
    def is_local(self) -> bool:
        """True if only this host can reach the address: a Unix socket or a loopback address."""
        if self.scheme == "unix" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            # A host name counts as not local, because it may resolve to another address later.
            return False

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_all(urls: str | Address | Sequence[str]) -> tuple[Address, ...]:
    """Parse one address or several, in their order.

    Raises:
        ConfigError: There is none, or one of them is no address.
    """
    if isinstance(urls, Sequence) and not isinstance(urls, str):
        if not urls:
            raise ConfigError("there is no address: the list is empty")
        return tuple(map(Address.parse, urls))
    return (Address.parse(urls),)


def bind(address: Address) -> tuple[socket.socket, Address]:
    """Bind an address and listen on it. This blocks only to look up a host name.

    A Unix socket that a dead process left behind is replaced; only the same user may connect to the
    new one.

    Returns:
        The non-blocking listening socket, and the address with the port that was bound.

    Raises:
        ConfigError: The address is in use, does not belong to this host, or is not allowed.
    """
    sock = None
    try:
        if address.scheme == "unix":
            sock = new_socket(socket.AF_UNIX, socket.SOCK_STREAM)
            if _is_stale(address.path):
                os.unlink(address.path)
            # The mode of the socket object becomes that of the file, so that there is no moment in
            # which other users may connect. A umask would affect the whole process.
            os.fchmod(sock.fileno(), stat.S_IRUSR | stat.S_IWUSR)
            sock.bind(address.path)
            os.chmod(address.path, stat.S_IRUSR | stat.S_IWUSR)
        else:
            found = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, proto, _name, where = found[0]
            sock = new_socket(family, kind, proto)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            address = replace(address, port=sock.getsockname()[1])
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except (OSError, ValueError) as exc:
        if sock is not None:
            sock.close()
        in_use = "another process or scheme listens there, or it is no socket"
        reason = in_use if getattr(exc, "errno", 0) == errno.EADDRINUSE else exc
        raise ConfigError(f"cannot listen on {address}: {reason}") from exc
    return sock, address


def _is_stale(path: str) -> bool:
    """Return True if the file at ``path`` is a socket on which no process listens any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        refused = probe.connect_ex(path) == errno.ECONNREFUSED
    return refused and stat.S_ISSOCK(os.stat(path).st_mode)


def own_host(towards: str | None) -> str:
    """Return the address at which the host ``towards``, and hosts near it, can reach this host.

    The result is the loopback address if ``towards`` is ``None`` or there is no route to it. The
    call may look up a host name, and sends nothing to that host.
    """
    if towards:
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((towards, 9))
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _is_socket_path(path: str) -> bool:
    return path.startswith("/") and 1 < len(os.fsencode(path)) <= _MAX_PATH_NBYTES
