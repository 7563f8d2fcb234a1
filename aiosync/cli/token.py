"""``aiosync token``: a new token in a file of its own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from aiosync.cli._common import errors_to, failing
from aiosync.errors import ConfigError

__all__ = ["token"]


def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file; there must be none yet.")],
) -> None:
    """Make a token, in a new file that only you can read.

    Copy the file to each machine: commands take it as --token-file, a scheme as token=.

    - `aiosync token token`
    """
    with failing("token", errors_to()):
        try:
            with open(file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as new:
                new.write(secrets.token_urlsafe(32))  # no newline, which would be a part of token=
        except OSError as exc:
            raise ConfigError(f"{file}: cannot be written: {exc.strerror}") from exc
        typer.echo(f"Token in {file}")
