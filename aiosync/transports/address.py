"""Where a stream link starts: ``tcp://host:port`` and ``unix:///path``.

Parsing and binding only; nothing here knows the wire format, the event loop or torch.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from aiosync.errors import ConfigError

try:
    import fcntl
except ImportError:  # pragma: no cover - no locks on this platform
    fcntl = None  # type: ignore[assignment]

__all__ = ["Address", "any_port_of", "bind", "own_host"]

_BACKLOG = 1024
_MAX_PATH_NBYTES = 107  # of sockaddr_un on Linux


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
        """Read ``tcp://host:port``, ``tcp://[::1]:port`` or ``unix:///path``.

        Raises:
            ConfigError: It is none of them.
        """
        if isinstance(url, Address):
            return url
        if not isinstance(url, str):
            raise ConfigError(f"an address must be a str such as 'tcp://host:7000', not {url!r}")
        if "@" in url and not url.startswith("unix:"):
            # Before anything is parsed: an error of the parser would repeat a part of them.
            raise ConfigError(
                "an address must not contain credentials: pass them as token= or tls="
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"{_shown(url)} is not an address: {exc}") from exc
        if parts.query or parts.fragment:
            raise ConfigError(f"{_shown(url)} is not an address: it has a query or a fragment")
        if parts.scheme == "tcp":
            if not parts.hostname or port is None or parts.path not in ("", "/"):
                raise ConfigError(f"{_shown(url)} is not of the form tcp://host:port")
            return cls("tcp", host=parts.hostname, port=port)
        if parts.scheme == "unix":
            if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
                raise ConfigError(f"{_shown(url)} is not of the form unix:///path/of/the/socket")
            if len(os.fsencode(parts.path)) > _MAX_PATH_NBYTES:
                raise ConfigError(
                    f"the path of a Unix socket has at most {_MAX_PATH_NBYTES} bytes: "
                    f"{_shown(parts.path)} is longer"
                )
            return cls("unix", path=parts.path)
        raise ConfigError(
            f"{_shown(url)} is not an address: it starts with neither tcp:// nor unix://"
        )

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it: a Unix socket or a loopback address."""
        if self.scheme == "unix" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False  # a name; whatever it means, it may mean something else tomorrow

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def _shown(text: str) -> str:
    rest = min((at for at in map(text.find, "?#") if at >= 0), default=len(text))
    if rest < len(text):  # a query may hold a token
        text = f"{text[: rest + 1]}..."
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def bind(address: Address) -> tuple[socket.socket, Address]:
    """Bind and listen. Blocking only to look up a host name.

    A Unix socket that a dead process left behind is replaced; only the same user may open the
    new one.

    Returns:
        The non-blocking listening socket, and the address with the port that was bound.

    Raises:
        ConfigError: The address is in use, not of this host, or not allowed.
    """
    try:
        if address.scheme == "unix":
            return _bind_unix(address.path), address
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, proto, _name, where = found[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except BaseException:  # raised again: the caller sees it
            sock.close()
            raise
    except OSError as exc:
        reason = "another process or scheme listens there" if _in_use(exc) else str(exc)
        raise ConfigError(f"cannot listen on {address}: {reason}") from exc
    return sock, Address("tcp", host=address.host, port=sock.getsockname()[1])


def _in_use(exc: OSError) -> bool:
    return exc.errno == errno.EADDRINUSE


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Between bind() and listen() a socket looks as one that a dead process left behind.
        with _exclusively(path):
            try:
                _bind_private(sock, path)
            except OSError as exc:
                if not _in_use(exc) or not _is_stale(path):
                    raise
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                _bind_private(sock, path)
            sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:  # raised again: the caller sees it
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _exclusively(path: str) -> Iterator[None]:
    """Keep other processes that bind ``path`` out, by a lock on a file beside it.

    The file is there only meanwhile. Where none can be made, nobody is kept out.

    Raises:
        OSError: Another one binds it at this moment (EADDRINUSE).
    """
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.aiosync-lock")
    file = _locked(beside)
    try:
        yield
    finally:
        if file is not None:
            # Before it is unlocked: whoever waits for this file finds that it is not the one
            # beside the path any more.
            with contextlib.suppress(OSError):
                os.unlink(beside)
            os.close(file)


def _locked(path: str) -> int | None:
    """Descriptor of a file that this call has locked; ``None`` where that cannot be done."""
    while fcntl is not None:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.lstat(path)):
                return file
        except FileNotFoundError:
            pass  # its last owner removed it after it was opened here
        except BlockingIOError as exc:
            os.close(file)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from exc
        except OSError:  # a file system without locks; the file may be another one's
            os.close(file)
            return None
        os.close(file)
    return None


def _bind_private(sock: socket.socket, path: str) -> None:
    # The mode of the socket object becomes that of the file, so that there is no moment in which
    # others may connect. A umask would be process-wide.
    os.fchmod(sock.fileno(), stat.S_IRUSR | stat.S_IWUSR)
    sock.bind(path)
    os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)


def _is_stale(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            raise OSError("a link that leads nowhere is there") from None
        return True  # whoever listened there removed it just now
    if not stat.S_ISSOCK(mode):
        is_file = "a regular file" if stat.S_ISREG(mode) else "something that is no socket"
        what = "a directory" if stat.S_ISDIR(mode) else is_file
        raise OSError(f"{what} is there: choose another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def own_host(towards: str | None) -> str:
    """Address of this host that ``towards`` and its neighbours reach; the loopback for nobody.

    Looks up a name, and sends nothing.
    """
    if towards:
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((towards, 9))
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def any_port_of(host: str) -> Address:
    """``tcp://host:0``, for numbers of both families."""
    return Address.parse(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
