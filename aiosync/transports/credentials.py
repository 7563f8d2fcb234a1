"""Credentials of the two ends of a stream link: a shared token, and the use of TLS.

The certificates of TLS are in ``tls``. No repr, error or log shows a secret, and a pickle does not
contain it as legible text. Must not import torch or the event loop.
"""

from __future__ import annotations

import functools
import os
import re
import select
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from aiosync._repr import in_every_state
from aiosync.errors import ConfigError
from aiosync.transports.secret import MAKE_A_TOKEN, Secret
from aiosync.transports.tls import TLS

__all__ = ["MAKE_A_TOKEN", "TLS", "TOKEN_VARIABLE", "Credentials", "Secret", "read_token"]

TOKEN_VARIABLE = "AIOSYNC_TOKEN"
"""Environment variable that has the token if no file is given."""

_MAX_TOKEN_NBYTES = 65536
# Time for another process to write a token into a pipe and to close the pipe.
_PIPE_SECONDS = 10.0


def read_token(path: str | os.PathLike[str] | None, option: str) -> bytes | None:
    """Return the token in a file, without one newline at its end, or that of the environment.

    Args:
        path: The file; ``None`` reads the variable :data:`TOKEN_VARIABLE`.
        option: Name of the option for the file, in errors.

    Returns:
        The token; ``None`` if there is neither a file nor the variable.

    Raises:
        ConfigError: The file cannot be read, is empty or is too large for a token.
    """
    if path is None:
        text = os.environ.get(TOKEN_VARIABLE)
        return None if text is None else os.fsencode(text)
    token = re.sub(rb"\r?\n\Z", b"", _read_file(path, option))
    if not token:
        raise ConfigError(
            f"{option}: {path} is empty: remove it, and make one with `aiosync token {path}`"
        )
    if len(token) > _MAX_TOKEN_NBYTES:
        raise ConfigError(f"{option}: {path} is too large for a token")
    return token


def _read_file(path: str | os.PathLike[str], option: str) -> bytes:
    """Return the bytes of a file or a pipe, or the first ones if all are too large for a token."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise ConfigError(f"{option}: {path}: it is a device, not a file")
            return _read_pipe(file) if stat.S_ISFIFO(mode) else file.read(_MAX_TOKEN_NBYTES + 1)
    except TimeoutError as exc:
        raise ConfigError(
            f"{option}: {path} is a pipe, and nobody has written a token to it within "
            f"{_PIPE_SECONDS:g} s"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"{option}: {path}: cannot be read: {exc.strerror}") from exc


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file for :func:`open`, without waiting until a pipe has a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_pipe(file: BinaryIO) -> bytes:
    """Read a pipe to its end, or until the data is too large for a token.

    Raises:
        TimeoutError: The pipe was not closed in time.
    """
    ends, poll, token = time.monotonic() + _PIPE_SECONDS, select.poll(), b""
    poll.register(file, select.POLLIN)
    while poll.poll(max(0.0, ends - time.monotonic()) * 1000):
        more = os.read(file.fileno(), _MAX_TOKEN_NBYTES + 1)
        token += more
        if not more or len(token) > _MAX_TOKEN_NBYTES:
            return token
    raise TimeoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The token and certificates of one end of a link, which are also its demands on the other end.

    Attributes:
        token: Token that must be the same on both ends; it never travels. Use at least 16 random
            bytes.
        pull_token: Another token, for the end that listens: a peer that dials may have this one
            instead, and then only gets weights.
        tls: Certificates as files, or an ``ssl.SSLContext``, which cannot be pickled. They encrypt
            the link; ``None`` does not.

    Raises:
        ConfigError: A token is empty, there is no ``token`` beside the ``pull_token`` or the two
            are the same, or a value has a wrong type.
    """

    token: Secret | str | bytes | None = field(default=None, repr=False)
    pull_token: Secret | str | bytes | None = field(default=None, repr=False)
    tls: TLS | ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        for name, given in (("token", self.token), ("pull_token", self.pull_token)):
            if given is not None and not isinstance(given, Secret):
                object.__setattr__(self, name, Secret(given))
        if self.pull_token is not None and self.token in (None, self.pull_token):
            raise ConfigError(
                "pull_token needs another token beside it: token=, of those who may push as well"
            )
        if self.tls is not None and not isinstance(self.tls, TLS | ssl.SSLContext):
            raise ConfigError(
                f"tls must be aiosync.TLS(...) or an ssl.SSLContext, not {type(self.tls).__name__}"
            )

    @in_every_state
    def __repr__(self) -> str:
        token = "token" if self.token is not None else "no token"
        return f"<Credentials: {token}, {'TLS' if self.tls is not None else 'no TLS'}>"

    @property
    def token_bytes(self) -> bytes | None:
        """The token as bytes, for the handshake; ``None`` without one."""
        return self.token.value if isinstance(self.token, Secret) else None

    @property
    def pull_token_bytes(self) -> bytes | None:
        """The ``pull_token`` as bytes, for the handshake; ``None`` without one."""
        return self.pull_token.value if isinstance(self.pull_token, Secret) else None

    def listening_context(self) -> ssl.SSLContext | None:
        """Return the SSL context of the side that listens, or ``None`` without TLS.

        Raises:
            ConfigError: There is no certificate, or a file cannot be used.
        """
        return self.tls.listening_context() if isinstance(self.tls, TLS) else self.tls

    def dialling_context(self) -> ssl.SSLContext | None:
        """Return the SSL context of the side that dials, or ``None`` without TLS.

        Raises:
            ConfigError: A file cannot be used.
        """
        return self.tls.dialling_context() if isinstance(self.tls, TLS) else self.tls

    # A __getstate__() would be replaced by that of dataclasses with slots in Python 3.11.2 and
    # before.
    def __reduce__(self) -> tuple[Callable[[], Credentials], tuple[()]]:
        if isinstance(self.tls, ssl.SSLContext):
            raise ConfigError(
                "an ssl.SSLContext cannot be passed to another process: pass "
                "tls=aiosync.TLS(cert=..., key=..., ca=...) with file names"
            )
        make = functools.partial(
            Credentials, token=self.token, pull_token=self.pull_token, tls=self.tls
        )
        return make, ()
