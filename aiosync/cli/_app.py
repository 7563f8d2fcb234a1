"""The commands and their options, on typer; what they do is in the modules beside this one.

Must not import gymnasium or matplotlib, nor, but inside a command, what imports them: ``--help``
has to be quick and to work without them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aiosync.errors import AiosyncError, ConfigError

if TYPE_CHECKING:
    from aiosync.cli._demo import DemoOptions

__all__ = ["app", "demo", "doctor", "run_app"]

_INTERRUPTED = 130

app = typer.Typer(
    name="aiosync",
    help="Move a policy's weights from a trainer to its inference workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


class _TransportOption(str, Enum):  # noqa: UP042  # typer shows str values of enums only
    pipe = "pipe"
    shm = "shm"


def run_app(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; see :func:`aiosync.cli.main`."""
    try:
        app(args)
    except SystemExit as exc:  # how typer ends every command, also after it showed wrong usage
        return exc.code if isinstance(exc.code, int) else 0
    return 0


def _print_version(wanted: bool) -> None:
    if wanted:
        from aiosync._version import __version__

        sys.stdout.write(f"aiosync {__version__}\n")
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


@app.command()
def demo(
    transport: Annotated[
        _TransportOption, typer.Option(help="Pipes, or one shared-memory segment.")
    ] = _TransportOption.shm,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    sync: Annotated[
        bool, typer.Option("--sync", help="Use the blocking facade, aiosync.sync.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Longest training time; ends earlier when solved.")
    ] = 50.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of networks and environments.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Save a picture of return and lag over time.")
    ] = None,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write a summary as JSON; - is stdout."),
    ] = None,
) -> None:
    """Train CartPole with workers that aiosync keeps on the newest policy.

    One trainer process and some worker processes; the workers collect episodes without pause
    and aiosync gives them every new version of the policy. Exits with status 1 if the
    return did not rise.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")
    from aiosync.cli._demo import DemoOptions

    options = DemoOptions(
        transport=transport.value, num_workers=workers, sync=sync, seconds=seconds, seed=seed
    )
    raise typer.Exit(_run_demo(options, plot=plot, json_to=json_to))


def _run_demo(options: DemoOptions, *, plot: Path | None, json_to: str | None) -> int:
    from aiosync.cli._demo import run_demo
    from aiosync.cli._pool import WorkerDied
    from aiosync.cli._view import check_plot_path, final_line, save_plot, showing

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    console = errors if json_to == "-" else Console(highlight=False, soft_wrap=True)
    title = (
        f"aiosync demo: CartPole-v1, {options.num_workers} workers, {options.transport}, "
        f"{'aiosync.sync' if options.sync else 'aiosync'}"
    )
    try:
        if plot is not None:
            check_plot_path(plot)
        if json_to not in (None, "-"):
            folder = Path(json_to).absolute().parent
            if not folder.is_dir():
                raise ConfigError(f"--json: there is no folder {folder}")
        with showing(console, title) as show:
            progress = run_demo(options, show)
    except ConfigError as exc:
        errors.print(f"[red]aiosync demo:[/red] {escape(str(exc))}")
        return 2
    except (AiosyncError, WorkerDied) as exc:
        name = type(exc).__name__
        errors.print(f"[red]aiosync demo failed:[/red] {name}: {escape(str(exc))}")
        return 1
    except KeyboardInterrupt:
        errors.print("Stopped by Ctrl-C; every worker has ended.")
        return _INTERRUPTED
    console.print(final_line(progress))
    if plot is not None:
        save_plot(progress, plot, title)
        console.print(f"Picture: {plot}", markup=False)
    if json_to is not None:
        summary = {
            "transport": options.transport,
            "sync": options.sync,
            "num_workers": options.num_workers,
            **progress.summary(),
        }
        text = json.dumps(summary, indent=2) + "\n"
        if json_to == "-":
            sys.stdout.write(text)
        else:
            Path(json_to).write_text(text, encoding="utf-8")
    return 0 if progress.risen else 1


@app.command()
def doctor() -> None:
    """Show versions and check what aiosync needs from this machine.

    Exits with status 1 if something that aiosync needs is missing.
    """
    from aiosync.cli._doctor import examine

    console = Console(highlight=False)
    checks = examine()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for check in checks:
        mark = {True: "[green]ok[/green]", False: "[red]FAILED[/red]", None: ""}[check.ok]
        table.add_row(mark, check.name, escape(check.text))
    console.print(table)
    failed = [check.name for check in checks if check.ok is False]
    if failed:
        console.print(f"Not as it should be: {', '.join(failed)}.")
        raise typer.Exit(1)
    console.print("Everything that aiosync needs is here.")
