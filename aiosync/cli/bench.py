"""``aiosync bench``: its options, its progress lines and the output of its results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console

from aiosync.cli._common import (
    INTERRUPTED,
    Quiet,
    errors_to,
    failing,
    shows_progress,
    write_text,
)
from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from aiosync.bench import Plan, Results

__all__ = ["bench"]

# Characters in a line of a table that goes to a file or a pipe, which have no width of their own.
_WIDTH = 160


def bench(
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="quick|full",
            show_default=False,
            help="quick, the default, takes a minute; full measures everything, which takes the "
            "better part of an hour.",
        ),
    ] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(
            metavar="T",
            show_default=False,
            help="Only this one: shm, pipe, tcp, unix or gloo; repeatable.",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="W",
            show_default=False,
            help="Only this one: 4x2 (one layer of 40 bytes), 1MB (a policy), 1000x4KiB (tensors "
            "of 4 KiB), 1000-layers, 64MiB or 512MiB; repeatable.",
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", show_default=False, help="Only this many; repeatable."),
    ] = None,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is stdout."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Show this earlier JSON file instead of measuring."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Measure aiosync and the machine's limits on the same work, in turns.

    Real worker processes, applied acknowledgements, weights that differ at each send and are
    checked in every worker. Leave the machine alone meanwhile. Exits with status 1 if nothing
    could be measured, or if aiosync failed at something.

    - `aiosync bench`
    - `aiosync bench --transport shm --json results.json`
    - `aiosync bench --from results.json`
    """
    errors = errors_to()
    with failing("bench", errors) as accept_options:
        ended = 0
        if source is not None:
            if any((profile, transport, workload, workers)):
                raise ConfigError("--from shows a whole file, and goes with no choice of a part")
            results = _read(source)
        else:
            plan = _choose(profile, transport, workload, workers)
            if json_to not in (None, "-"):
                write_text("--json", json_to, "")  # a bad path has to fail before the run
            accept_options()
            results, ended = _measure(plan, errors, json_to, quiet)
        _show(results, sys.stderr if json_to == "-" else sys.stdout)
        if json_to is not None:
            write_text("--json", json_to, results.to_json())
        if ended:
            errors.print("Stopped by Ctrl-C; every worker has ended.")
        raise typer.Exit(ended or int(results.failed))


def _show(results: Results, stream: TextIO) -> None:
    """Print the results, in lines of a fixed width if the stream is no terminal."""
    from aiosync.bench import show

    width = None if stream.isatty() else _WIDTH
    show(results, Console(file=stream, highlight=False, width=width))


def _choose(
    profile: str | None,
    transports: Sequence[str] | None,
    workloads: Sequence[str] | None,
    workers: Sequence[int] | None,
) -> Plan:
    """Return the part of a profile that the options choose."""
    from aiosync.bench import choose, profiles

    plans, name = profiles(), profile or "quick"
    if name not in plans:
        raise ConfigError(f"--profile: there is no {name}; there is: {', '.join(plans)}")
    return choose(plans[name], transports or (), workloads or (), workers or ())


def _read(path: Path) -> Results:
    """Return the results in an earlier JSON file; raise ConfigError if it holds none."""
    from aiosync.bench import Results

    try:
        return Results.from_json(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"--from: {path}: cannot be read: {exc.strerror}") from exc
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"--from: {path} holds no results: {exc!r}") from exc


def _measure(plan: Plan, console: Console, json_to: str | None, quiet: bool) -> tuple[Results, int]:
    """Run the plan; return the results, and the exit status if Ctrl-C ended the run, or else 0.

    The JSON file is written after every case, because a run takes long and may be killed.
    """
    from aiosync.bench import Missing, Results, machine, run

    results = Results(machine(), plan.name)

    def note(done: int, total: int, what: str) -> None:
        if done and json_to not in (None, "-"):
            # A full disk must not end the run: the last write, after the table, tells of it.
            with contextlib.suppress(ConfigError):
                write_text("--json", json_to, results.to_json())
        if shows_progress(quiet):
            line = f"{results.elapsed:6.1f} s  {done} of {total} cases  {what}"
            console.print(line, markup=False)

    try:
        run(plan, results, note)
    except KeyboardInterrupt:
        results.missing.append(Missing("the rest of the run", "stopped by Ctrl-C"))
        return results, INTERRUPTED
    return results, 0
