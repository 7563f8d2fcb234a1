"""How ``aiosync demo`` shows itself: a live table on a terminal, lines elsewhere, and a plot.

Needs rich; matplotlib is imported only for a plot. This module must never import typer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.cli._progress import Progress

__all__ = ["check_plot_path", "final_line", "render", "save_plot", "showing"]

_BARS = "▁▂▃▄▅▆▇█"
_MAX_RETURN = 500.0
_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 2.0


@contextmanager
def showing(console: Console, title: str) -> Iterator[Callable[[Progress], None]]:
    """Show progress for as long as the context lasts.

    On a terminal a table is redrawn at most four times a second; elsewhere a line is printed
    every two seconds. No thread is started.

    Args:
        console: Where to.
        title: Headline of the table, or first line.

    Yields:
        A function to call with the progress so far, as often as wanted.
    """
    if not console.is_terminal:
        console.print(title)
        throttle = _Throttle(_LINE_SECONDS)

        def print_line(progress: Progress) -> None:
            if throttle.due():
                console.print(_line(progress))

        yield print_line
        return
    throttle = _Throttle(_REFRESH_SECONDS)
    waiting = Text(f"{title}\nstarting the workers ...")
    with Live(waiting, console=console, auto_refresh=False) as live:
        live.refresh()
        newest: Progress | None = None

        def update(progress: Progress) -> None:
            nonlocal newest
            newest = progress
            if throttle.due():
                live.update(render(progress, title), refresh=True)

        yield update
        if newest is not None:
            live.update(render(newest, title), refresh=True)


class _Throttle:
    """Says yes at most once in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = -math.inf

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


def render(progress: Progress, title: str) -> RenderableType:
    """Return the live table for the progress so far."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("worker", justify="right")
    for heading in ("version", "lag", "steps", "episodes"):
        table.add_column(heading, justify="right", min_width=9)
    for idx, worker in enumerate(progress.workers):
        table.add_row(
            str(idx),
            str(worker.version) if worker.num_steps else "-",
            str(worker.lag) if worker.num_steps else "-",
            f"{worker.num_steps:,}",
            f"{worker.num_episodes:,}",
        )
    table.add_section()
    table.add_row(
        "trainer",
        str(progress.version),
        "",
        f"{progress.num_steps:,}",
        f"{len(progress.returns):,}",
    )
    returns = Text.assemble(
        "return ",
        (f"{progress.recent_return:6.1f}", "bold green"),
        f"  (at the start {progress.start_return:.1f}, best possible {_MAX_RETURN:.0f})  ",
        (_sparkline([value for _, value in progress.returns]), "green"),
    )
    latency = Text(
        f"send to last APPLIED ack: p50 {_ms(progress.latency(50))}, "
        f"p95 {_ms(progress.latency(95))};  {progress.elapsed:.0f} of {progress.seconds:.0f} s"
    )
    return Group(table, returns, latency)


def _line(progress: Progress) -> str:
    workers = ", ".join(
        f"worker {idx}: version {worker.version} lag {worker.lag}"
        for idx, worker in enumerate(progress.workers)
        if worker.num_steps
    )
    return (
        f"{progress.elapsed:5.1f} s  return {progress.recent_return:6.1f}  "
        f"steps {progress.num_steps}  version {progress.version}  {workers}  "
        f"send p50 {_ms(progress.latency(50))} p95 {_ms(progress.latency(95))}"
    )


def final_line(progress: Progress) -> str:
    """Say in one sentence how the run ended."""
    if progress.solved:
        verdict = "Solved"
    elif progress.risen:
        verdict = "The return rose"
    else:
        verdict = "The return did not rise"
    return (
        f"{verdict}: mean return {progress.start_return:.1f} -> {progress.recent_return:.1f} in "
        f"{progress.elapsed:.1f} s, {progress.num_steps} steps and {progress.version} versions."
    )


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f} ms"


def _sparkline(values: list[float], width: int = 30) -> str:
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    means = [sum(part) / len(part) for part in _chunks(values, size)]
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, int(mean / _MAX_RETURN * top + 0.5))] for mean in means)


def _chunks(values: list[float], size: int) -> Iterator[list[float]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def check_plot_path(path: Path) -> None:
    """Make sure that a plot can be saved there, before the training rather than after.

    Raises:
        ConfigError: matplotlib is missing, the folder is missing, or the ending is no picture's.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        raise ConfigError("--plot needs matplotlib: pip install 'aiosync[demo]'") from exc
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.absolute().parent}")
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise ConfigError(f"--plot: {path.name} must end in one of: {', '.join(sorted(known))}")


def save_plot(progress: Progress, path: Path, title: str) -> None:
    """Save return and lag over time as a picture; the ending of ``path`` says which format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title)
    times = [at for at, _ in progress.returns]
    values = [value for _, value in progress.returns]
    window = 20
    means = [
        sum(values[max(0, i - window) : i]) / min(i, window) for i in range(1, len(values) + 1)
    ]
    upper.plot(times, values, ".", markersize=3, alpha=0.35, label="episode")
    upper.plot(times, means, label=f"mean of the last {window}")
    upper.set_ylabel("return")
    upper.legend(loc="upper left")
    for idx in range(progress.num_workers):
        points = [(at, lag) for at, worker, lag in progress.lags if worker == idx]
        lower.plot(
            [at for at, _ in points],
            [lag for _, lag in points],
            ".",
            markersize=3,
            label=f"worker {idx}",
        )
    lower.set_ylabel("lag (versions)")
    lower.set_xlabel("time (s)")
    lower.set_ylim(bottom=0)
    lower.legend(loc="upper left")
    figure.savefig(path, dpi=120)
