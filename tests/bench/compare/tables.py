"""A comparison as tables: on a console with rich, and as Markdown. One description serves both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from aiosync.bench import LIMIT, Case, Timing, limit_of
from tests.bench.compare.targets import judge, ratio, share_of_limit, show_ratio, throughput
from tests.bench.processes import Comparison, Figure

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["failures", "headline", "install_advice", "show", "show_seconds", "to_markdown"]

_NOT_INSTALLED = "not installed: "
_EXTRAS = {"ray": "aiosync[ray]", "torchrl": "aiosync[torchrl]"}
_NAMES = (
    "aiosync",
    "aiosync/asyncio",
    "aiosync/facade",
    "aiosync/network",
    "torchrl",
    "torchrl/aliased",
)
# Below this size a send is latency, and bytes per second say nothing.
_MIN_NBYTES_FOR_SPEED = 10**6


@dataclass(frozen=True, slots=True)
class _Cell:
    """Text of a cell, and the smaller text below it or behind it."""

    text: str
    beside: str = ""


_EMPTY = _Cell("-")


@dataclass(slots=True)
class _Grid:
    """A table."""

    title: str
    headings: Sequence[str]
    # The number of columns, from the left, that hold words; the others hold numbers.
    words: int
    rows: list[Sequence[_Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# -- words --------------------------------------------------------------------------------------


def show_seconds(seconds: float) -> str:
    """Return a duration with three digits, in microseconds below a millisecond."""
    value, unit = _scaled(seconds)
    return f"{_digits(value)} {unit}"


def _scaled(seconds: float) -> tuple[float, str]:
    return (seconds * 1e6, "µs") if seconds < 1e-3 else (seconds * 1e3, "ms")


def _digits(value: float) -> str:
    """Return a number with at least three digits, and never with an exponent."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def headline(results: Comparison) -> list[str]:
    """Return two lines that say where and how the results were made."""
    machine = results.machine
    cores = f"{machine.cores} core{'s' if machine.cores != 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    where = f"on {cores} with {machine.memory_gib:g} GiB, {machine.system}"
    return [f"Profile {results.profile}, {results.elapsed:.0f} s, {where}", versions]


def failures(results: Comparison) -> list[str]:
    """Return the failures, each with its cause in one line: the last one of a traceback."""
    return [
        f"{missing.what}: {_last_line(missing.why)}"
        for missing in results.missing
        if not missing.why.startswith(_NOT_INSTALLED)
    ]


def _last_line(why: str) -> str:
    """Return the error of a traceback, without the lines that continue it and need the rest."""
    lines = [line for line in why.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
    return (raised or lines or ["no reason given"])[-1].strip()


def install_advice(results: Comparison) -> list[str]:
    """Return lines that say what was left out for lack of a package, and how to install it."""
    left_out: dict[str, list[str]] = {}
    for missing in results.missing:
        if missing.why.startswith(_NOT_INSTALLED):
            for package in missing.why.removeprefix(_NOT_INSTALLED).split(", "):
                left_out.setdefault(package, []).append(missing.what)
    return [
        f"{package} is not installed, so these were left out: {'; '.join(what)}. "
        f"Install it with: pip install '{_EXTRAS.get(package, package)}'"
        for package, what in left_out.items()
    ]


# -- tables -------------------------------------------------------------------------------------


def _grids(results: Comparison) -> Iterator[_Grid]:
    for transport in dict.fromkeys(timing.case.transport for timing in results.timings):
        yield _transport_grid(results, transport)
    if results.figures:
        yield _figures_grid(results)
    if results.timings:
        yield _targets_grid(results)


def _transport_grid(results: Comparison, transport: str) -> _Grid:
    timings = [timing for timing in results.timings if timing.case.transport == transport]
    names = _ordered(
        timing.contender for timing in timings if not timing.contender.startswith(LIMIT)
    )
    headings = ["work", "workers", *names, "limit", "TorchRL / aiosync", "of the limit"]
    grid = _Grid(f"Transport {transport}: send to applied", headings, 2)
    for case in dict.fromkeys(timing.case for timing in timings):
        limit = limit_of(results, case)
        busy = " busy" if case.busy else ""
        grid.rows.append(
            [
                _Cell(case.workload),
                _Cell(f"{case.workers}{busy}"),
                *(_timing_cell(results.timing(case, name)) for name in names),
                _EMPTY if limit is None else _limit_cell(limit),
                _ratio_cell(results, case),
                _share_cell(results, case, limit),
            ]
        )
    kept = [
        index for index in range(len(headings)) if any(row[index] != _EMPTY for row in grid.rows)
    ]
    grid.headings = [headings[index] for index in kept]
    grid.rows = [[row[index] for index in kept] for row in grid.rows]
    return grid


def _ordered(names: Iterable[str]) -> list[str]:
    found = dict.fromkeys(names)
    known = [name for name in _NAMES if name in found]
    return known + [name for name in found if name not in known]


def _timing_cell(timing: Timing | None) -> _Cell:
    if timing is None:
        return _EMPTY
    # The range has the unit of the median, whatever that of its ends would be.
    _, unit = _scaled(timing.median)
    factor = 1e6 if unit == "µs" else 1e3
    low, high = (_digits(timing.percentile(percent) * factor) for percent in (10, 90))
    return _Cell(show_seconds(timing.median), f"{low} - {high}")


def _limit_cell(limit: Timing) -> _Cell:
    return _Cell(show_seconds(limit.median), limit.contender.removeprefix(LIMIT))


def _ratio_cell(results: Comparison, case: Case) -> _Cell:
    found = ratio(results, case)
    facade = ratio(results, case, "aiosync/facade")
    return _Cell(
        "-" if found is None else show_ratio(found),
        "" if facade is None else f"facade {show_ratio(facade)}",
    )


def _share_cell(results: Comparison, case: Case, limit: Timing | None) -> _Cell:
    share = share_of_limit(results, case, limit)
    ours = results.timing(case, "aiosync")
    speed = throughput(ours) if ours is not None else None
    beside = ""
    if ours is not None and speed is not None and speed * ours.median >= _MIN_NBYTES_FOR_SPEED:
        beside = f"{speed / 1e9:.2f} GB/s"
    return _Cell("-" if share is None else f"{share:.2f}", beside)


def _figures_grid(results: Comparison) -> _Grid:
    names = _ordered(figure.contender for figure in results.figures)
    headings = ["figure", "unit", "transport", "work", "workers", *names]
    grid = _Grid("Figures", headings, 5)
    values: dict[tuple[str, str, str, str, str], dict[str, str]] = {}
    notes: dict[str, dict[str, list[Figure]]] = {}
    for figure in results.figures:
        place = (figure.transport, figure.workload, str(figure.workers))
        key = (figure.name, figure.unit, *place)
        values.setdefault(key, {})[figure.contender] = _number(figure.value)
        if figure.note:
            notes.setdefault(figure.name, {}).setdefault(figure.note, []).append(figure)
    order = list(dict.fromkeys(figure.name for figure in results.figures))
    for key in sorted(values, key=lambda key: order.index(key[0])):
        cells = [_Cell(values[key].get(name, "-")) for name in names]
        grid.rows.append([*(_Cell(word) for word in key), *cells])
    for name, texts in notes.items():
        shown = [
            text if len(texts) == 1 else f"{text} ({_whose(figures)})"
            for text, figures in texts.items()
        ]
        grid.notes.append(f"{name}: {'; '.join(shown)}")
    return grid


def _whose(figures: Sequence[Figure]) -> str:
    """Return the contenders that a note is about; for a note on one value, its transport, too."""
    if len(figures) == 1:
        return f"{figures[0].transport}, {figures[0].contender}"
    return ", ".join(_ordered(figure.contender for figure in figures))


def _targets_grid(results: Comparison) -> _Grid:
    verdicts = judge(results)
    measured = [verdict for verdict in verdicts if verdict.met is not None]
    title = (
        f"Targets: {sum(verdict.met is True for verdict in measured)} of {len(measured)} met, "
        f"{len(verdicts) - len(measured)} not measured"
    )
    grid = _Grid(title, ["target", "wanted", "found", "met"], 2)
    for verdict in measured:
        met = "yes" if verdict.met else "no"
        row = (verdict.text, verdict.wanted, verdict.found or "-", met)
        grid.rows.append([_Cell(text) for text in row])
    unmeasured = [verdict.text for verdict in verdicts if verdict.met is None]
    # A run of a few cases says nothing of most targets.
    if 0 < len(unmeasured) <= len(measured):
        grid.notes.append(f"Not measured: {'; '.join(unmeasured)}")
    return grid


# -- on a console -------------------------------------------------------------------------------


def show(results: Comparison, console: Console) -> None:
    """Print everything: tables, targets, and what is missing."""
    for line in headline(results):
        console.print(Text(line))
    if not results.timings:
        console.print(Text("Nothing was measured."))
    for grid in _grids(results):
        console.print()
        console.print(_rich(grid))
        for note in grid.notes:
            console.print(Text(note, style="dim"))
    for title, lines in _missing(results):
        console.print()
        console.print(Text(title))
        for line in lines:
            console.print(Text(f"  {line}"))


def _rich(grid: _Grid) -> Table:
    table = Table(title=grid.title, title_justify="left", title_style="bold")
    for index, heading in enumerate(grid.headings):
        # A heading that is broken at its slash is as narrow as the numbers below it.
        text = heading.replace("/", "/\n").replace(" / ", "/ ") if index else heading
        justify = "left" if index < grid.words else "right"
        table.add_column(Text(text), justify="right" if justify == "right" else "left")
    for row in grid.rows:
        table.add_row(*(_rich_cell(cell) for cell in row))
    return table


def _rich_cell(cell: _Cell) -> Text:
    text = Text(cell.text, style="bold red" if cell.text == "no" else "")
    if cell.beside:
        text.append(f"\n{cell.beside}", style="dim")
    return text


def _missing(results: Comparison) -> Iterator[tuple[str, list[str]]]:
    failed, advice = failures(results), install_advice(results)
    if failed:
        yield "Not measured:", failed
    if advice:
        yield "Not installed:", advice


# -- as Markdown --------------------------------------------------------------------------------


def to_markdown(results: Comparison) -> str:
    """Return everything as Markdown, with headings of the third level."""
    parts = ["\n".join(f"{line}  " for line in headline(results)).rstrip()]
    if not results.timings:
        parts.append("Nothing was measured.")
    for grid in _grids(results):
        parts += [f"### {grid.title}", _markdown(grid)]
        if grid.notes:
            parts.append("\n".join(f"- {_escaped(note)}" for note in grid.notes))
    for title, lines in _missing(results):
        parts += [f"### {title.rstrip(':')}", "\n".join(f"- {_escaped(line)}" for line in lines)]
    return "\n\n".join(parts) + "\n"


def _markdown(grid: _Grid) -> str:
    below = ["---" if index < grid.words else "---:" for index in range(len(grid.headings))]
    rows = [
        _line([f"{cell.text} ({cell.beside})" if cell.beside else cell.text for cell in row])
        for row in grid.rows
    ]
    return "\n".join([_line(grid.headings), f"| {' | '.join(below)} |", *rows])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Return an error's text so that nothing of it is taken for a table, a tag or emphasis."""
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", " ".join(text.split()))
