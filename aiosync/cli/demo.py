"""``aiosync demo``: its options, and the report of a run. The training itself is in ``ppo.py``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console

from aiosync._log import LOGGER
from aiosync.cli._common import errors_to, failing, write_text
from aiosync.cli.demo_view import live, picture
from aiosync.cli.progress import Progress
from aiosync.errors import ConfigError

__all__ = ["demo"]


class _TransportOption(str, Enum):  # noqa: UP042  # typer shows str values of enums only
    pipe = "pipe"
    shm = "shm"


def demo(
    transport: Annotated[
        _TransportOption, typer.Option(help="Pipes, or one shared-memory segment.")
    ] = _TransportOption.shm,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    sync: Annotated[
        bool, typer.Option("--sync", help="Use the blocking API, aiosync.sync.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Longest training time; ends earlier when solved.")
    ] = 50.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of networks and environments.")] = 0,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write a summary as JSON; - is stdout."),
    ] = None,
    plot_to: Annotated[
        str | None,
        typer.Option(
            "--plot", metavar="FILE", help="Write the live view as an SVG picture; - is stdout."
        ),
    ] = None,
) -> None:
    """Train CartPole with workers that aiosync keeps on the newest policy.

    One trainer process and some worker processes; the workers collect episodes without pause
    and aiosync gives them every new version of the policy. Exits with status 1 if the
    return did not rise. A terminal shows the run live; anything else gets a line every two
    seconds.

    - `aiosync demo`
    - `aiosync demo --transport pipe --workers 4`
    """
    errors = errors_to()
    # A document on stdout must be alone there: everything else goes to stderr.
    is_redirected = "-" in (json_to, plot_to)
    console = errors if is_redirected else Console(highlight=False, soft_wrap=True)
    with failing("demo", errors) as accept_options:
        from aiosync.cli import ppo

        if json_to == plot_to == "-":
            raise ConfigError("--json and --plot cannot both write to stdout")
        _empty_files({"--json": json_to, "--plot": plot_to})
        accept_options()
        title = (
            f"aiosync demo: CartPole-v1, {workers} workers, {transport.value}, "
            f"{'aiosync.sync' if sync else 'aiosync'}"
        )
        is_live = console.is_terminal and not console.options.ascii_only
        progress = Progress(workers, seconds, _say_nothing if is_live else console.print)
        if not is_live:
            console.print(title)

        screen = Console(stderr=is_redirected, highlight=False)
        view = live(progress, title, screen) if is_live else nullcontext()
        with _without_early_warnings(progress), view:
            ppo.train(progress, transport.value, workers, seed, sync)
        summary = {"transport": transport.value, "sync": sync, **progress.summary()}
        console.print(_end_of(progress, risen=summary["risen"]))
        documents = {"--json": (json_to, _as_json(summary))}
        if plot_to is not None:
            documents["--plot"] = plot_to, picture(progress, title)
        _write_documents(documents)
        raise typer.Exit(0 if summary["risen"] else 1)


def _write_documents(documents: Mapping[str, tuple[str | None, str]]) -> None:
    """Write the text of each option to its file, or to stdout, if it was given."""
    for option, (path, text) in documents.items():
        if path is not None:
            write_text(option, path, text)


@contextmanager
def _without_early_warnings(progress: Progress) -> Iterator[None]:
    """Keep warnings back until training has started: workers that start slowly are no fault."""

    def is_shown(record: logging.LogRecord) -> bool:
        return progress.started > 0 or record.levelno > logging.WARNING

    LOGGER.addFilter(is_shown)
    try:
        yield
    finally:
        LOGGER.removeFilter(is_shown)


def _end_of(progress: Progress, *, risen: bool) -> str:
    """Return the last line of the report; ``risen`` says that the return rose enough."""
    rose = "The return rose" if risen else "The return did not rise"
    return (
        f"{'Solved' if progress.solved else rose}: mean return "
        f"{progress.mean_return(first=True):.1f} -> {progress.mean_return():.1f} in "
        f"{progress.elapsed:.1f} s, {sum(progress.returns)} steps and {progress.version} versions."
    )


def _as_json(summary: Mapping[str, Any]) -> str:
    """Return a summary as JSON, which has no NaN."""
    return json.dumps(
        {name: None if value != value else value for name, value in summary.items()}, indent=2
    )


def _empty_files(paths: Mapping[str, str | None]) -> None:
    """Empty the files that options name: a bad path has to fail before the run."""
    for option, path in paths.items():
        if path not in (None, "-"):
            write_text(option, str(path), "")


def _say_nothing(line: str) -> None:
    """Print no line about the run: the live view shows it."""
