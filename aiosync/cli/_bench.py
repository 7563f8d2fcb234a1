"""``aiosync bench``: its options, its progress and where its results go.

Must not import matplotlib, torchrl or ray; what measures is imported inside the command.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from aiosync.cli._options import INTERRUPTED, errors_to, failing
from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from aiosync.bench._plan import Plan
    from aiosync.bench._results import Results

__all__ = ["bench", "choose", "progress_bar"]

_WIDTH = 160  # of tables that go into a file or a pipe, which has none of its own

_Names = list[str] | None
_Counts = list[int] | None


def bench(
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="quick|targets|full",
            show_default=False,
            help="quick, the default, takes minutes; targets measures what aiosync aims to reach; "
            "full measures everything, which takes the better part of an hour.",
        ),
    ] = None,
    transport: Annotated[
        _Names,
        typer.Option(
            metavar="T",
            show_default=False,
            help="Only this one: shm, pipe, tcp, unix, gloo, rpc or ray; repeatable.",
        ),
    ] = None,
    workload: Annotated[
        _Names,
        typer.Option(
            metavar="W",
            show_default=False,
            help="Only this one: 4x2, 1MB, 1000x4KiB, 1000-layers, 64MiB or 512MiB; repeatable.",
        ),
    ] = None,
    workers: Annotated[
        _Counts,
        typer.Option(min=1, metavar="N", show_default=False, help="Only this many; repeatable."),
    ] = None,
    contender: Annotated[
        _Names,
        typer.Option(
            metavar="C",
            show_default=False,
            help="Only this one, such as aiosync, aiosync/facade or torchrl; 'limits' stands for "
            "all limits; repeatable.",
        ),
    ] = None,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is stdout."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save plots to this folder, as PNG.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Show this earlier JSON file instead of measuring."
        ),
    ] = None,
) -> None:
    """Measure aiosync, TorchRL and the machine's limits on the same work, in turns.

    Real worker processes, applied acknowledgements, weights that differ at each send and are
    checked in every worker. Leave the machine alone meanwhile. Exits with status 1 if nothing
    could be measured, or if aiosync failed at something.
    """
    errors = errors_to()
    with failing("bench", errors) as exit_status:
        _check_targets(json_to, plot)
        chosen = (profile, transport, workload, workers, contender)
        if source is not None:
            if any(chosen):
                raise ConfigError(
                    "--from shows a whole file: it cannot be combined with options that choose "
                    "what to run"
                )
            results, ended = _read(source), 0
        else:
            plan = choose(
                profile or "quick",
                transports=transport or (),
                workloads=workload or (),
                workers=workers or (),
                contenders=contender or (),
            )
            exit_status[0] = 1
            results, ended = _measure(plan, errors, json_to)
        _hand_over(results, errors, json_to=json_to, plot=plot)
        if ended:
            errors.print("Stopped by Ctrl-C; every worker has ended.")
        raise typer.Exit(ended or _verdict(results))


# -- options ------------------------------------------------------------------------------------


def choose(
    profile: str,
    *,
    transports: Collection[str] = (),
    workloads: Collection[str] = (),
    workers: Collection[int] = (),
    contenders: Collection[str] = (),
) -> Plan:
    """Return what is left of a profile; an empty collection chooses everything.

    Raises:
        ConfigError: There is no such name, or no case is left.
    """
    from aiosync.bench._contenders import CONTENDERS, TRANSPORTS
    from aiosync.bench._plan import WORKLOAD_NAMES
    from aiosync.bench._profiles import PROFILES
    from aiosync.bench._results import LIMIT

    names = list(dict.fromkeys(each.name for all_ in CONTENDERS.values() for each in all_))
    limits = [name for name in names if name.startswith(LIMIT)]
    _known("--profile", [profile], list(PROFILES))
    _known("--transport", transports, TRANSPORTS)
    _known("--workload", workloads, WORKLOAD_NAMES)
    _known("--contender", contenders, [*names, "limits"])
    whole = PROFILES[profile]
    plan = whole.only(transports=transports, workloads=workloads, workers=workers)
    if contenders:
        taking_part = {*contenders, *(limits if "limits" in contenders else ())} - {"limits"}
        plan = replace(plan, contenders=frozenset(taking_part))
        cases = [
            case
            for case in plan.cases
            if any(plan.takes(case, each.name) for each in CONTENDERS[case.transport])
        ]
        plan = replace(plan, cases=cases)
    if not plan.cases:
        there = "; ".join(map(str, whole.cases))
        more = " --profile full has more." if profile == "quick" else ""
        raise ConfigError(
            f"these options select nothing in the profile {profile}, which contains: {there}.{more}"
        )
    return plan


def _known(option: str, given: Collection[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{option}: there is no {name}; there is: {', '.join(known)}")


def _check_targets(json_to: str | None, plot: Path | None) -> None:
    """Make sure that results can be written, before the run rather than after.

    Raises:
        ConfigError: A folder is missing or may not be written to, or matplotlib is missing.
    """
    if json_to not in (None, "-"):
        file = Path(json_to).absolute()
        if not file.parent.is_dir():
            raise ConfigError(f"--json: there is no folder {file.parent}")
        if file.is_dir():
            raise ConfigError(f"--json: {file} is a folder")
        _check_writable("--json", file if file.exists() else file.parent)
    if plot is not None:
        try:
            import matplotlib  # noqa: F401  # only to see that it is there
        except ModuleNotFoundError as exc:
            raise ConfigError("--plot needs matplotlib: pip install 'aiosync[demo]'") from exc
        folder = plot.absolute()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--plot: {folder} is not a folder")
        if not folder.parent.is_dir():
            raise ConfigError(f"--plot: there is no folder {folder.parent}")
        _check_writable("--plot", folder if folder.exists() else folder.parent)


def _check_writable(option: str, path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{option}: {path} is not writable")


def _read(path: Path) -> Results:
    from aiosync.bench._results import Results

    try:
        return Results.from_json(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"--from: {path}: cannot be read: {exc.strerror}") from exc
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"--from: {path} holds no results that this command can show: {exc}"
        ) from exc


# -- the run ------------------------------------------------------------------------------------


def _measure(plan: Plan, console: Console, json_to: str | None) -> tuple[Results, int]:
    """Run; return what was found and the exit status if Ctrl-C ended it.

    A file is written before every case, too: a run takes long, and may be killed.
    """
    from aiosync.bench._machine import machine
    from aiosync.bench._results import Missing, Results
    from aiosync.bench._run import run

    results = Results(machine(), plan.name)
    try:
        with progress_bar(console) as show:

            def note(done: int, total: int, what: str) -> None:
                if done and json_to not in (None, "-"):
                    Path(json_to).write_text(results.to_json(), encoding="utf-8")
                show(done, total, what)

            run(plan, results, note)
    except KeyboardInterrupt:
        results.missing.append(Missing("the rest of the run", "stopped by Ctrl-C"))
        return results, INTERRUPTED
    return results, 0


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """Show how far the run is: a bar on a terminal, a line for each case elsewhere.

    Args:
        console: Where to.

    Yields:
        A function to call with the cases that are done, how many there are, and what comes next.
    """
    started = time.monotonic()
    if not console.is_terminal:

        def print_line(done: int, total: int, what: str) -> None:
            elapsed = time.monotonic() - started
            console.print(f"{elapsed:6.1f} s  {done} of {total} cases  {what}", markup=False)

        yield print_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("aiosync bench"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # Drawn between cases only: what draws while others measure is measured with them.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        progress.refresh()

        def show(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)
            progress.refresh()

        yield show


# -- what comes out -----------------------------------------------------------------------------


def _hand_over(
    results: Results, errors: Console, *, json_to: str | None, plot: Path | None
) -> None:
    """Print the tables, and write the files."""
    from aiosync.bench._table import show

    stream = sys.stderr if json_to == "-" else sys.stdout
    width = None if stream.isatty() else _WIDTH
    console = Console(file=stream, highlight=False, width=width)
    show(results, console)
    text = results.to_json() + "\n"
    if json_to == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    elif json_to is not None:
        _write(json_to, text)
        console.print(f"\nJSON: {json_to}", markup=False, soft_wrap=True)
    if plot is not None:
        from aiosync.bench._plots import NAMES, save_plots

        try:
            written = save_plots(results, plot)
        except OSError as exc:
            raise ConfigError(f"--plot: {plot}: cannot be written: {exc.strerror}") from exc
        for path in written:
            console.print(f"Picture: {path}", markup=False, soft_wrap=True)
        for name in NAMES:
            if plot / name not in written:
                errors.print(f"No {name}: nothing was measured that it shows.", markup=False)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--json: {path}: cannot be written: {exc.strerror}") from exc


def _verdict(results: Results) -> int:
    """Exit status: another contender may fail, aiosync may not."""
    from aiosync.bench._table import failures

    ours = any(", aiosync" in text.partition(": ")[0] for text in failures(results))
    return 1 if ours or not results.timings else 0
