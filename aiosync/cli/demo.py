"""``aiosync demo``: its options, and what is shown of a run. What is run is in ``ppo.py``."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from aiosync.cli._common import errors_to, failing, write_text
from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from aiosync.cli.ppo import Episode
    from aiosync.types import SendReport

__all__ = ["Progress", "demo"]

_SOLVED_RETURN = 475.0  # mean return at which CartPole-v1 counts as solved, here over 40 episodes
_WINDOW = 20  # episodes in the means that are shown and compared


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
    plot: Annotated[
        Path | None, typer.Option(help="Save a plot of return and versions over time.")
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

    - `aiosync demo`
    - `aiosync demo --transport pipe --workers 4 --plot demo.png`
    """
    errors = errors_to()
    console = errors if json_to == "-" else Console(highlight=False, soft_wrap=True)
    with failing("demo", errors) as status:
        from aiosync.cli import ppo

        for name, path in (("--plot", plot), ("--json", json_to)):
            if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
                raise ConfigError(f"{name}: there is no folder {Path(path).absolute().parent}")
        if plot is not None:
            _check_plot(plot)
        status[0] = 1
        title = (
            f"aiosync demo: CartPole-v1, {workers} workers, {transport.value}, "
            f"{'aiosync.sync' if sync else 'aiosync'}"
        )
        with _showing(console, title) as show:
            progress = Progress(workers, seconds, show)
            ppo.train(progress, transport.value, workers, seed, sync)
        summary = {"transport": transport.value, "sync": sync, **progress.summary()}
        rose = "rose" if summary["risen"] else "did not rise"
        console.print(
            f"{'Solved' if progress.solved else f'The return {rose}'}: mean return "
            f"{progress.mean_return(first=True):.1f} -> {progress.mean_return():.1f} in "
            f"{progress.elapsed:.1f} s, {summary['steps']} steps and {progress.version} versions."
        )
        if plot is not None:
            _save_plot(progress, plot, title)
            console.print(f"Picture: {plot}", markup=False)
        if json_to is not None:
            numbers = {name: None if value != value else value for name, value in summary.items()}
            write_text("--json", json_to, json.dumps(numbers, indent=2))
        raise typer.Exit(0 if summary["risen"] else 1)


@dataclass(slots=True)
class Progress:
    """Everything measured in one run. Times are seconds since :attr:`started`.

    Attributes:
        num_workers: Worker processes.
        seconds: Longest training time.
        show: Called after every update of the policy.
        returns: (time, return) of every episode, in the order in which they arrived.
        lags: (time, worker, newest version, mean lag of the steps) of every episode, in versions.
        latencies: Seconds from the call of ``send`` to the last APPLIED ack, for each send.
        workers: Newest version, its lag, steps and episodes of each worker.
        version: Newest version that was sent.
        started: When the workers had the first weights.
        elapsed: Training time at the last send.
    """

    num_workers: int
    seconds: float
    show: Callable[[Progress], None]
    workers: list[dict[str, int]] = field(init=False)
    returns: list[tuple[float, float]] = field(default_factory=list)
    lags: list[tuple[float, int, int, float]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    version: int = 0
    started: float = 0.0
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        self.workers = [
            {"worker_idx": idx, "version": 0, "lag": 0, "steps": 0, "episodes": 0}
            for idx in range(self.num_workers)
        ]

    def collected(self, batch: list[Episode], version: int) -> float:
        """Note a batch; return the factor on the learning rate, which falls to 0.1 with time."""
        now = time.monotonic() - self.started
        for episode in batch:
            steps, worker = len(episode.obs), self.workers[episode.worker_idx]
            worker["version"] = episode.versions[-1]
            worker["lag"] = version - worker["version"]
            worker["steps"] += steps
            worker["episodes"] += 1
            self.returns.append((now, steps))
            lag = version - statistics.fmean(episode.versions)
            self.lags.append((now, episode.worker_idx, version, lag))
        return max(0.1, 1.0 - now / self.seconds)

    def sent(self, report: SendReport) -> bool:
        """Note a send that every worker has applied; whether to go on."""
        self.version = report.version
        self.latencies.append(report.elapsed)
        self.elapsed = time.monotonic() - self.started
        self.show(self)
        return not self.solved and self.elapsed < self.seconds

    def mean_return(self, first: bool = False) -> float:
        """Mean return of the first or the last 20 episodes; NaN when there is none."""
        values = [value for _, value in self.returns]
        return _mean(values[:_WINDOW] if first else values[-_WINDOW:])

    @property
    def solved(self) -> bool:
        """Whether the last 40 episodes are good enough to stop early."""
        last = [value for _, value in self.returns[-2 * _WINDOW :]]
        return len(last) == 2 * _WINDOW and _mean(last) >= _SOLVED_RETURN

    def latency(self, percent: int) -> float:
        """Seconds that so many percent of the sends did not exceed."""
        ordered = sorted(self.latencies)
        return ordered[(len(ordered) - 1) * percent // 100] if ordered else math.nan

    def summary(self) -> dict[str, Any]:
        """Return the run in a few numbers that JSON can hold; times in seconds."""
        start, final = self.mean_return(first=True), self.mean_return()
        return {
            "num_workers": self.num_workers,
            "start_return": start,
            "final_return": final,
            "risen": len(self.returns) >= 2 * _WINDOW and final >= 2 * start,
            "solved": self.solved,
            "seconds": round(self.elapsed, 3),
            "steps": sum(worker["steps"] for worker in self.workers),
            "episodes": len(self.returns),
            "versions": self.version,
            "send_latency_p50": self.latency(50),
            "send_latency_p95": self.latency(95),
            "mean_lag": _mean([lag for *_, lag in self.lags]),
            "workers": self.workers,
        }

    def line(self) -> str:
        """The run so far in one line."""
        workers = ", ".join(
            f"worker {idx}: version {worker['version']} lag {worker['lag']}"
            for idx, worker in enumerate(self.workers)
        )
        p50, p95 = (self.latency(percent) * 1e3 for percent in (50, 95))
        return f"{self._summary_line()}  {workers}  send p50 {p50:.2f} ms p95 {p95:.2f} ms"

    def _summary_line(self) -> str:
        return (
            f"{self.elapsed:.0f} of {self.seconds:.0f} s of training  "
            f"return {self.mean_return():6.1f}  version {self.version}"
        )

    def table(self) -> Table:
        """The run so far as a table, for 60 columns or more."""
        table = Table(caption=self._summary_line(), caption_justify="left")
        for name in self.workers[0]:
            table.add_column(name, justify="right", min_width=7, no_wrap=True)
        for worker in self.workers:
            table.add_row(*(f"{value:,}" for value in worker.values()))
        return table


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


@contextmanager
def _showing(console: Console, title: str) -> Iterator[Callable[[Progress], None]]:
    """Show progress: a table on a terminal, and a line every two seconds elsewhere."""
    console.print(title, markup=False)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    next_at = 0.0

    def show(progress: Progress) -> None:
        nonlocal next_at
        if time.monotonic() < next_at:
            return
        next_at = time.monotonic() + (2.0 if live is None else 0.5)
        if live is None:
            console.print(progress.line(), markup=False)
        else:
            live.update(progress.table(), refresh=True)

    with live or nullcontext():
        yield show


def _check_plot(path: Path) -> None:
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        ends = ", ".join(sorted(known))
        raise ConfigError(f"--plot: {path.name} must end in one of: {ends}")


def _save_plot(progress: Progress, path: Path, title: str) -> None:
    """Save return and versions over time as a picture; the ending of ``path`` says which format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title)
    times, values = [at for at, _ in progress.returns], [value for _, value in progress.returns]
    means = [_mean(values[max(0, i - _WINDOW) : i]) for i in range(1, len(values) + 1)]
    upper.plot(times, values, ".", markersize=3, alpha=0.35, label="episode")
    upper.plot(times, means, label=f"mean of the last {_WINDOW}")
    lower.step(
        times, [version for _, _, version, _ in progress.lags], where="post", label="trainer"
    )
    for idx in range(progress.num_workers):
        points = [
            (at, version - lag) for at, worker, version, lag in progress.lags if worker == idx
        ]
        lower.plot(*zip(*points, strict=True), ".", markersize=4, label=f"worker {idx}")
    upper.set(ylabel="return")
    lower.set(ylabel="version", xlabel="time (s)", ylim=(0, None))
    for axes in (upper, lower):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False)
    figure.savefig(path, dpi=120)
