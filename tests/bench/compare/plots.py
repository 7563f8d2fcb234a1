"""Results as pictures, one for each question. Needs matplotlib, and draws without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiosync.bench import LIMIT, WORKLOADS, Case, Results, Timing, limit_of
from tests.bench.compare.targets import ratio, show_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["NAMES", "save_plots"]

NAMES = ("latency.png", "throughput.png", "ratio.png")
"""Files that :func:`save_plots` writes, if there is something to show."""

# The styles are distinct for colour-blind eyes too, and by marker. The background is part of the
# picture, so that it reads the same on a light page and on a dark one.
_STYLES: dict[str, dict[str, Any]] = {
    "aiosync": {"color": "#0072b2", "marker": "o"},
    "aiosync/asyncio": {"color": "#56b4e9", "marker": "s"},
    "aiosync/facade": {"color": "#009e73", "marker": "^"},
    "aiosync/network": {"color": "#6a51a3", "marker": "*"},
    "torchrl": {"color": "#d55e00", "marker": "D"},
    "torchrl/aliased": {"color": "#cc79a7", "marker": "v"},
    "limit": {"color": "#555555", "marker": "x", "linestyle": "--"},
}
_OTHER: dict[str, Any] = {"color": "#a0790a", "marker": "P"}
_PAPER = "#fbfbf8"
_INK = "#1a1a1a"
_COLUMNS = 3
# Bytes per second mean something only for models of at least this size.
_MIN_NBYTES = 10**6


def save_plots(results: Results, folder: Path) -> list[Path]:
    """Draw the pictures for which the results have data.

    Args:
        results: Results of a run.
        folder: Folder of the pictures, which is made if it does not exist.

    Returns:
        The files that were written; those of :data:`NAMES` without data are missing.
    """
    drawn: Sequence[Callable[[Results], Figure | None]] = (_latency, _throughput, _ratio)
    written = []
    for name, draw in zip(NAMES, drawn, strict=True):
        figure = draw(results)
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / name, dpi=120, facecolor=figure.get_facecolor())
            written.append(folder / name)
    return written


# -- pictures -----------------------------------------------------------------------------------


def _latency(results: Results) -> Figure | None:
    """Draw how long a small update takes, by workers."""
    return _lines(
        results,
        "Latency of a small update (4x2): from send to the last applied, median and p10 to p90",
        lambda case: case.workload == "4x2" and not case.busy,
        lambda timing: (timing.case.workers, str(timing.case.workers)),
        lambda timing, seconds: seconds * 1e3,
        ("workers", "ms"),
    )


def _throughput(results: Results) -> Figure | None:
    """Draw how many bytes per second go to one worker, by size."""

    def position(timing: Timing) -> tuple[float, str]:
        return WORKLOADS[timing.case.workload].nbytes, timing.case.workload

    def speed(timing: Timing, seconds: float) -> float:
        return WORKLOADS[timing.case.workload].nbytes / seconds / 1e9

    def wanted(case: Case) -> bool:
        workload = WORKLOADS.get(case.workload)
        large = workload is not None and workload.nbytes >= _MIN_NBYTES
        return large and case.workers == 1 and not case.busy

    return _lines(
        results,
        "Throughput to one worker, by size of the model: median and p10 to p90",
        wanted,
        position,
        speed,
        ("model", "GB/s"),
    )


def _lines(
    results: Results,
    title: str,
    wanted: Callable[[Case], bool],
    across: Callable[[Timing], tuple[float, str]],
    up: Callable[[Timing, float], float],
    labels: tuple[str, str],
) -> Figure | None:
    """Draw one panel for each transport, one line for each contender and one for the limit."""
    panels: dict[str, dict[str, list[Timing]]] = {}
    for case in dict.fromkeys(timing.case for timing in results.timings if wanted(timing.case)):
        panel = panels.setdefault(case.transport, {})
        for timing in results.timings:
            if timing.case == case and not timing.contender.startswith(LIMIT):
                panel.setdefault(timing.contender, []).append(timing)
        limit = limit_of(results, case)
        if limit is not None:
            panel.setdefault("limit", []).append(limit)
    if not panels:
        return None
    figure, axes = _panels(title, len(panels), height=3.2, sharey=True)
    ticks = {
        across(timing) for each in panels.values() for line in each.values() for timing in line
    }
    positions, names = zip(*sorted(ticks), strict=True)
    beside = max(1.3, (positions[-1] / positions[0]) ** 0.12)
    for axis, (transport, lines) in zip(axes, panels.items(), strict=True):
        axis.set_title(transport, color=_INK)
        axis.set_xscale("log")
        axis.set_yscale("log")
        for name, timings in lines.items():
            timings.sort(key=across)
            middle = [up(timing, timing.median) for timing in timings]
            low, high = _ends(timings, up)
            axis.errorbar(
                [across(timing)[0] for timing in timings],
                middle,
                yerr=[
                    [max(0.0, at - end) for at, end in zip(middle, low, strict=True)],
                    [max(0.0, end - at) for at, end in zip(middle, high, strict=True)],
                ],
                label=name,
                capsize=2,
                linewidth=1.5,
                markersize=5,
                **_STYLES.get(name, _OTHER),
            )
        axis.set_xticks(positions, names)
        axis.set_xticks([], minor=True)
        axis.set_xlim(positions[0] / beside, positions[-1] * beside)
        _plain_numbers(axis.yaxis)
        axis.set_xlabel(labels[0], color=_INK)
        axis.set_ylabel(labels[1], color=_INK)
        axis.grid(True, which="major", alpha=0.3)
    _legend(figure, axes)
    return figure


def _ends(
    timings: Sequence[Timing], up: Callable[[Timing, float], float]
) -> tuple[list[float], list[float]]:
    """Return the lower and the upper end of each bar; a quick send is a high throughput."""
    pairs = [
        sorted(up(timing, timing.percentile(percent)) for percent in (10, 90)) for timing in timings
    ]
    return [low for low, _ in pairs], [high for _, high in pairs]


def _ratio(results: Results) -> Figure | None:
    """Draw how many times as long TorchRL takes, case by case."""
    panels: dict[str, list[tuple[Case, float]]] = {}
    for case in dict.fromkeys(timing.case for timing in results.timings):
        found = ratio(results, case)
        if found is not None:
            panels.setdefault(case.transport, []).append((case, found))
    if not panels:
        return None
    most = max(map(len, panels.values()))
    title = "TorchRL's time / aiosync's time on the same work, medians"
    figure, axes = _panels(title, len(panels), height=0.9 + 0.25 * most, sharex=True)
    every = [1.0, *(found for bars in panels.values() for _, found in bars)]
    for axis, (transport, bars) in zip(axes, panels.items(), strict=True):
        axis.set_title(transport, color=_INK)
        axis.set_xscale("log")
        # The bars of all panels have the same thickness, also in a panel that has fewer of them.
        axis.set_ylim(most - 0.4, -0.6)
        names = [str(case).removeprefix(f"{transport} ") for case, _ in bars]
        axis.barh(
            range(len(bars)),
            [found - 1 for _, found in bars],
            left=1,
            height=0.7,
            color=[_STYLES["aiosync" if found >= 1 else "torchrl"]["color"] for _, found in bars],
        )
        axis.set_yticks(range(len(bars)), names)
        for place, (_, found) in enumerate(bars):
            # The text is on the right also of bars that go left, as the names of the cases are on
            # the left.
            axis.annotate(
                show_ratio(found),
                (max(found, 1), place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                color=_INK,
            )
        axis.axvline(1.0, color=_INK, linewidth=1)
        axis.set_xlim(min(every) / 3, max(every) * 6)
        _plain_numbers(axis.xaxis, few=True)
        axis.set_xlabel("times as long (1: equally fast)", color=_INK)
        axis.grid(True, axis="x", which="major", alpha=0.3)
        axis.set_axisbelow(True)
    return figure


# -- frames -------------------------------------------------------------------------------------


def _panels(
    title: str, count: int, *, height: float, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    size = (max(7.0, 4.2 * columns), 1.2 + height * rows)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=size, layout=layout, facecolor=_PAPER)
    figure.suptitle(title, color=_INK)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    every: list[Axes] = list(grid.flat)
    for unused in every[count:]:
        unused.remove()
    for axis in every[:count]:
        axis.set_facecolor("white")
        # Panels share their scale, so that they can be compared, but each shows it.
        axis.tick_params(colors=_INK, labelleft=True, labelbottom=True)
    return figure, every[:count]


def _plain_numbers(axis: Any, *, few: bool = False) -> None:
    """Write plain numbers on an axis: 0.2 and not 2 x 10^-1."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0,) if few else (1.0, 2.0, 5.0), numticks=30))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend below all panels."""
    shown: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(name, handle)
    order = [name for name in _STYLES if name in shown]
    order += [name for name in shown if name not in order]
    figure.legend(
        [shown[name] for name in order],
        order,
        loc="outside lower center",
        ncols=min(len(order), 3 if len(axes) == 1 else 6),
        labelcolor=_INK,
        frameon=False,
    )
