"""Options that the commands for a weight server share, and how their errors are shown.

Must not import torch, nor, but inside a function, what imports it: ``--help`` has to be quick.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from aiosync.errors import AiosyncError, ConfigError

if TYPE_CHECKING:
    from aiosync.transports.credentials import TLS

__all__ = [
    "INTERRUPTED",
    "TOKEN_VARIABLE",
    "Connection",
    "ModelId",
    "Timeout",
    "TlsCa",
    "TlsCert",
    "TlsKey",
    "TokenFile",
    "UseTls",
    "check_model_ids",
    "errors_to",
    "failing",
    "plain",
    "read_token",
    "tls_of",
]

TOKEN_VARIABLE = "AIOSYNC_TOKEN"
"""Environment variable with the token, where no file is given."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_MAX_TOKEN_NBYTES = 65536

TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="File with the shared token; without it, the variable AIOSYNC_TOKEN is used.",
    ),
]
"""``--token-file``. There is no option for the token itself: lists of processes show options."""

TlsCa = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="PEM file of the authorities to trust. Implies TLS.",
    ),
]
"""``--tls-ca``."""

TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="PEM file of this side's certificate."),
]
"""``--tls-cert``."""

TlsKey = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="PEM file of its key, if that is not in the same file.",
    ),
]
"""``--tls-key``."""

UseTls = Annotated[
    bool,
    typer.Option("--tls", help="Use TLS; without --tls-ca, the system's authorities are trusted."),
]
"""``--tls``."""

ModelId = Annotated[str, typer.Option(metavar="ID", help="Name of the model.")]
"""``--model-id``."""

Timeout = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", help="Longest time for the whole command.")
]
"""``--timeout``."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Whom to ask, and with what.

    Attributes:
        url: As it was given.
        token: The shared token.
        tls: Certificates of the side that dials.
    """

    url: str
    token: bytes | None
    tls: TLS | None

    def __repr__(self) -> str:
        return f"<Connection to {self.url}>"  # no token

    def check(self) -> None:
        """Find what is wrong with it before anything is sent.

        Raises:
            ConfigError: Not an address, an empty token, or a file that cannot be used.
        """
        from aiosync.transports.address import Address
        from aiosync.transports.credentials import Credentials

        address = Address.parse(self.url)
        if address.scheme == "tcp" and not address.port:
            raise ConfigError(f"{address} has no port to dial")
        Credentials(token=self.token, tls=self.tls).dialling_context()


def errors_to() -> Console:
    """The console for errors and notes."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def read_token(path: Path | None, console: Console) -> bytes | None:
    """Return the token of a file, without one newline at its end, or that of the environment.

    Args:
        path: The file, if there is one.
        console: Where a note goes if others can read the file.

    Raises:
        ConfigError: It cannot be read, is empty or is too large for a token.
    """
    if path is None:
        text = os.environ.get(TOKEN_VARIABLE)
        return None if text is None else os.fsencode(text)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(_MAX_TOKEN_NBYTES + 1)
    except OSError as exc:
        raise ConfigError(f"--token-file: {path}: cannot be read: {exc.strerror}") from exc
    token = token.removesuffix(b"\n").removesuffix(b"\r")
    if not token:
        raise ConfigError(
            f"--token-file: {path} is empty: make a token with "
            "`python -c 'import secrets; print(secrets.token_urlsafe())'`"
        )
    if len(token) > _MAX_TOKEN_NBYTES:
        raise ConfigError(f"--token-file: {path} is too large for a token")
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        console.print(f"Note: other users can read {path}: chmod 600 is advised.", markup=False)
    return token


def tls_of(
    *,
    wanted: bool = False,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    verify_clients: bool = False,
) -> TLS | None:
    """Return what the TLS options say; ``None`` without any.

    Raises:
        ConfigError: They do not fit together.
    """
    if not (wanted or ca or cert or key or verify_clients):
        return None
    from aiosync.transports.credentials import TLS

    return TLS(cert=cert, key=key, ca=ca, verify_clients=verify_clients)


def plain(text: Any, limit: int = 200) -> str:
    """Return what a peer said, safe to print: nothing in it moves the cursor."""
    shown = str(text)
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def check_model_ids(given: Iterable[str]) -> None:
    """Refuse a model without a name: an empty variable of a script, more often than not.

    Raises:
        ConfigError: One of the names is empty.
    """
    if "" in given:
        raise ConfigError("--model-id: the name of the model is empty")


@contextmanager
def failing(command: str, console: Console) -> Iterator[list[int]]:
    """Show errors of aiosync as one line, and end the command.

    Args:
        command: Its name, for the line.
        console: Where the line goes.

    Yields:
        A list with the exit status of a :class:`~aiosync.errors.ConfigError`: 2 until the
        command is past its options, and puts 1 there.

    Raises:
        typer.Exit: With the status.
    """
    status = [2]
    try:
        yield status
    except AiosyncError as exc:
        usage = isinstance(exc, ConfigError) and status[0] == 2
        name = "" if isinstance(exc, ConfigError) else f"{type(exc).__name__}: "
        text = escape(plain(f"{name}{exc}", 2000))
        console.print(f"[red]aiosync {command}:[/red] {text}")
        raise typer.Exit(2 if usage else 1) from None
    except KeyboardInterrupt:
        console.print("Stopped by Ctrl-C.")
        raise typer.Exit(INTERRUPTED) from None
