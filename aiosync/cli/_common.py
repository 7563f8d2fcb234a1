"""Shared parts of the commands: options for a weight server, error lines and formatting.

Must not import torch, and may import modules that need torch only inside a function: ``--help``
has to be quick.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from aiosync._log import escape_controls
from aiosync.errors import AiosyncError, ConfigError

if TYPE_CHECKING:
    from aiosync.server import WeightClient
    from aiosync.transports.credentials import TLS

__all__ = [
    "INTERRUPTED",
    "TOKEN_VARIABLE",
    "AllowHost",
    "ModelId",
    "Quiet",
    "Streams",
    "Timeout",
    "TlsCa",
    "TlsCert",
    "TlsKey",
    "TokenFile",
    "UseTls",
    "check_model_ids",
    "dialling",
    "errors_to",
    "failing",
    "plain",
    "read_token",
    "show_nbytes",
    "shows_progress",
    "status_line",
    "tls_of",
    "with_flags",
    "write_text",
]

TOKEN_VARIABLE = "AIOSYNC_TOKEN"
"""Environment variable that holds the token if no file is given."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_FLAGS = {
    "upstream_token=, upstream_tls=, streams= and advertise= need an upstream=": (
        "--upstream-token-file, --upstream-tls, --streams and --advertise need --upstream"
    ),
    "store_deltas= needs a store=": "--store-deltas needs --store",
    "upstream=": "--upstream",
    "model_ids=": "--model-id",
    "TLS(cert=..., key=...)": "--tls-cert and --tls-key",
    "TLS(key=...) needs cert=": "--tls-key needs --tls-cert",
    "TLS(verify_clients=True) needs ca=": "--tls-verify-clients needs --tls-ca",
    "(an encrypted key needs password=)": "(a key must not be encrypted)",
    "tls=aiosync.TLS(ca=...)": "--tls-ca",
    "tls=aiosync.TLS(...)": "--tls-cert and --tls-key",
    "TLS(ca=...)": "--tls-ca",
    "pull_token=": "--pull-token-file",
    "pull_token": "--pull-token-file",
    "token=...": "--token-file",
    "token=": "--token-file",
    "tls=": "--tls",
    "(timeout=)": "(--timeout)",
    "min_version=": "--min-version",
    "construct a new scheme to begin a new run, or this one with take_over=True to have it come "
    "back": "push again, with --take-over to go on whoever else pushes",
    "another model_id": "another --model-id",
    "the model_id another": "the --model-id another",
}
"""Arguments in the library's error texts, and the command's option or words for each."""

TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="File with the shared token; without it, the variable AIOSYNC_TOKEN is used.",
    ),
]
"""``--token-file``. No option takes the token itself, because process lists show options."""

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

Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
"""``--quiet``."""

Streams = Annotated[
    int,
    typer.Option(
        min=1,
        max=16,
        help="Connections of a link, where one gets less than the line between two sites.",
    ),
]
"""``--streams``."""

AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="A name under which browsers and probes may ask for pages, beside those of this "
        "host, names without a dot, and addresses; repeatable.",
    ),
]
"""``--allow-host``."""


@contextmanager
def dialling(
    command: str,
    url: str,
    token_file: Path | None,
    tls: bool,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    *model_ids: str,
    streams: int = 1,
) -> Iterator[tuple[WeightClient, dict[str, Any], Console, Callable[[], None]]]:
    """Run a command that asks a server or trainer, within :func:`failing`.

    Errors in the options, an empty name in ``model_ids`` included, are found before anything is
    sent. ``streams`` is for the client alone.

    Yields:
        The client for ``url``; token and TLS as keyword arguments of a client or scheme; the
        console for errors and notes; and the function that :func:`failing` yields.

    Raises:
        typer.Exit: The command failed; see :func:`failing`.
    """
    errors = errors_to()
    with failing(command, errors) as accept_options:
        from aiosync.server import WeightClient
        from aiosync.transports.credentials import Credentials

        check_model_ids(model_ids)
        proofs: dict[str, Any] = {
            "tls": tls_of(wanted=tls, ca=ca, cert=cert, key=key),
            "token": read_token(token_file, errors),
        }
        Credentials(**proofs).dialling_context()
        yield WeightClient(url, **proofs, streams=streams), proofs, errors, accept_options


def errors_to() -> Console:
    """Return a console on stderr, for errors and notes."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def shows_progress(quiet: bool) -> bool:
    """Return True if there is a terminal to show progress on, and the user wants it."""
    return not quiet and sys.stderr.isatty()


@contextmanager
def status_line(console: Console, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Keep one line on a terminal about what the command does now. Starts no thread.

    Args:
        console: Console on stderr.
        quiet: True if the user wants no progress.

    Yields:
        A function that replaces the text of the line, which is gone after the block.
    """
    if not shows_progress(quiet):
        yield lambda text: None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False, transient=True) as live:

        def say(text: str) -> None:
            live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

        yield say


def read_token(path: Path | None, console: Console, option: str = "--token-file") -> bytes | None:
    """Return the token in a file, without one newline at its end, or else in the environment.

    Args:
        path: The file; ``None`` for the environment variable.
        console: Receives a note if other users can read the file.
        option: Name of the option in error texts.

    Raises:
        ConfigError: The file cannot be read, is empty or is too large for a token.
    """
    from aiosync.transports.credentials import read_token as read

    # The mode is read before the contents, because a pipe may no longer exist afterwards.
    mode = path.stat().st_mode if path is not None and os.path.isfile(path) else 0
    token = read(path, option)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        console.print(f"Note: other users can read {path}: chmod 600 is advised.", markup=False)
    return token


def tls_of(
    *,
    wanted: bool = False,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    verify_clients: bool = False,
    option: str = "--tls",
) -> TLS | None:
    """Return the TLS configuration of the options; ``None`` if no TLS option is given.

    The names of the options begin with ``option`` in error texts.

    Raises:
        ConfigError: The options do not fit together.
    """
    if not any((wanted, ca, cert, key, verify_clients)):
        return None
    from aiosync.transports.credentials import TLS

    try:
        return TLS(cert=cert, key=key, ca=ca, verify_clients=verify_clients)
    except ConfigError as exc:
        raise ConfigError(with_flags(str(exc)).replace("--tls", option)) from exc


def plain(text: Any, limit: int = 200) -> str:
    """Return a peer's text, made safe to print: no character in it moves the cursor.

    A text of more than ``limit`` characters is cut.
    """
    shown = escape_controls(str(text))
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def show_nbytes(nbytes: float) -> str:
    """Return a number of bytes as text, in units that are powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def write_text(option: str, path: str, text: str) -> None:
    """Write a text to the file that an option names; ``-`` stands for stdout.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path == "-":
        typer.echo(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{option}: {path}: cannot be written: {exc.strerror}") from exc


def check_model_ids(given: Iterable[str]) -> None:
    """Refuse an empty name of a model, which mostly comes from an empty variable of a script.

    Raises:
        ConfigError: One of the names is empty.
    """
    if "" in given:
        raise ConfigError("--model-id: the name of the model is empty")


def _text_of(error: AiosyncError) -> str:
    """Return the text of an error; with its type and notes if no option is to blame."""
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {str(error).rstrip('.')}. {' '.join(error.__notes__)}"


@contextmanager
def failing(command: str, console: Console) -> Iterator[Callable[[], None]]:
    """Show an error of aiosync as one line and end the command; show aiosync's warnings, too.

    Args:
        command: Name of the command, for the line.
        console: Receives the lines.

    Yields:
        A function that the command calls once its options are checked. Before that the exit status
        for a :class:`~aiosync.errors.ConfigError` is 2, and 1 afterwards.

    Raises:
        typer.Exit: The block raised an error of aiosync, or Ctrl-C interrupted it; with the exit
            status.
    """
    status = 2

    def accept_options() -> None:
        nonlocal status
        status = 1

    lines, log = _Lines(console), logging.getLogger("aiosync")
    log.addHandler(lines)
    try:
        yield accept_options
    except AiosyncError as exc:
        # A package that is not installed is no wrong usage.
        wrong = isinstance(exc, ConfigError) and not isinstance(exc.__cause__, ImportError)
        text = escape(plain(with_flags(_text_of(exc)), 2000))
        console.print(f"[red]aiosync {command}:[/red] {text}")
        raise typer.Exit(status if wrong else 1) from None
    except KeyboardInterrupt:
        console.print("Stopped by Ctrl-C.")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        log.removeHandler(lines)


def with_flags(text: str) -> str:
    """Return an error's text with the command's options instead of the library's arguments."""
    for option, flag in _FLAGS.items():
        text = text.replace(option, flag)
    return text


class _Lines(logging.Handler):
    """Log handler that prints warnings and errors, each as a line with the time."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = plain(with_flags(record.getMessage()), 2000)
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False)
