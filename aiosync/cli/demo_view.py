"""The live view of ``aiosync demo`` in a terminal: the return over time, versions and sends."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aiosync.cli.progress import Progress

__all__ = ["live", "picture"]

_MOST_RETURN = 500.0  # of CartPole-v1
_HEIGHT = 8  # lines of the chart
_BLOCKS = " ▁▂▃▄▅▆▇█"
_REFRESHES = 4  # a second
_PICTURE_WIDTH = 100
_LEGEND = (
    "A worker's version is that of the last episode that has arrived: episodes take a moment to "
    "arrive, so it may be a little behind, although each worker acts with the newest version."
)


@contextmanager
def live(progress: Progress, title: str, console: Console) -> Iterator[None]:
    """Show a run while it lasts; the last picture stays."""
    view = _View(progress, title)
    with Live(
        console=console, get_renderable=view.draw, refresh_per_second=_REFRESHES, transient=False
    ):
        yield


def picture(progress: Progress, title: str) -> str:
    """Return the view of a run as the text of an SVG picture."""
    console = Console(record=True, width=_PICTURE_WIDTH, file=io.StringIO())
    console.print(_View(progress, title).draw())
    return console.export_svg(title="aiosync demo")


class _View:
    """The view of one run, drawn anew for each refresh."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = title

    def draw(self) -> RenderableType:
        """Return the view as it is now. On any thread."""
        progress = self._progress
        if not progress.started:
            return Text(f"{self._title}: the workers start")
        body = Group(
            _Chart(progress), Text(), _versions(progress), _sends(progress), Text(_LEGEND, "dim")
        )
        end = f"{progress.elapsed:.0f} of {progress.seconds:.0f} s"
        return Panel(
            body, title=self._title, subtitle=end, title_align="left", subtitle_align="right"
        )


class _Chart:
    """The mean return over the time of the run, as wide as there is room."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: object) -> Iterator[RenderableType]:
        width = max(10, getattr(options, "max_width", 80) - 6)
        rows = _rows(self._progress.curve, self._progress.seconds, width)
        for number, row in enumerate(rows):
            label = {0: f"{_MOST_RETURN:.0f}", _HEIGHT - 1: "0"}.get(number, "")
            yield Text.assemble((f"{label:>4} ", "dim"), (row, "green"))
        found = self._progress.mean_return()
        yield Text(f"     mean return of 20 episodes: {found:.1f}", "green")


def _rows(curve: Sequence[tuple[float, float]], seconds: float, width: int) -> list[str]:
    """Return the lines of a chart from the top, a column for each part of the time."""
    means: list[float] = []
    for at, value in list(curve):
        # A column without a send of its own shows the value of the next send.
        column = min(width - 1, int(at / seconds * width))
        means += [value] * (column + 1 - len(means))
        means[column] = value
    steps = [value / _MOST_RETURN * _HEIGHT for value in means]
    return [
        "".join(_BLOCKS[round(8 * min(1.0, max(0.0, step - row)))] for step in steps)
        for row in reversed(range(_HEIGHT))
    ]


def _versions(progress: Progress) -> Table:
    """Return the versions of the trainer and of the workers, side by side."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("trainer")
    for worker in progress.workers:
        table.add_column(f"worker {worker['worker_idx']}")
    versions = (str(worker["version"]) for worker in progress.workers)
    table.add_row(f"version {progress.version}", *versions)
    return table


def _sends(progress: Progress) -> Text:
    """Return the line about the rate of the sends and the time that they take."""
    rate = len(progress.latencies) / progress.elapsed if progress.elapsed else 0.0
    half, most = progress.latency(50) * 1e3, progress.latency(95) * 1e3
    return Text(
        f"{rate:.1f} sends a second, each until all workers have it: {half:.2f} ms (median), "
        f"{most:.2f} ms (95 %)"
    )
