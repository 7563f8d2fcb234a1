"""The typer application with all commands.

The files of the commands, and the modules that they import at their top, may import torch or
gymnasium only inside a function: ``--help`` has to be quick, and to work without them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from aiosync._version import __version__
from aiosync.cli.bench import bench
from aiosync.cli.demo import demo
from aiosync.cli.doctor import doctor, token
from aiosync.cli.plan import plan
from aiosync.cli.serve import serve
from aiosync.cli.status import status, top
from aiosync.cli.transfer import pull, push

__all__ = ["app"]

app = typer.Typer(
    name="aiosync",
    help="Move a policy's weights from a trainer to its inference workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (demo, doctor, token, serve, push, pull, status, top, bench, plan):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    """Print the version and end the command, if the option was given."""
    if wanted:
        typer.echo(f"aiosync {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Move a policy's weights from a trainer to its inference workers."""
