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
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from aiosync.cli._common import errors_to, failing, write_text
from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from aiosync.cli.ppo import Episode
    from aiosync.types import SendReport

__all__ = ["Collected", "Progress", "demo"]

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


class Collected(NamedTuple):
    """An episode.

    Attributes:
        at: Seconds since training began.
        worker: Whose it is.
        steps: How many it has, which is its return.
        version: The worker's version at its end.
        newest: The trainer's.
        lag: How many versions the steps were behind that, on average.
    """

    at: float
    worker: int
    steps: int
    version: int
    newest: int
    lag: float


@dataclass(slots=True)
class Progress:
    """Everything measured in one run.

    Attributes:
        num_workers: Worker processes.
        seconds: Longest training time.
        show: Called after every update of the policy.
        episodes: In the order in which they arrived.
        latencies: Seconds from the call of ``send`` to the last APPLIED ack, for each send.
        version: Newest version that was sent.
        started: When the workers had the first weights.
        elapsed: Training time at the last send, in seconds.
    """

    num_workers: int
    seconds: float
    show: Callable[[Progress], None]
    episodes: list[Collected] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    version: int = 0
    started: float = 0.0
    elapsed: float = 0.0

    def collected(self, batch: list[Episode], version: int) -> float:
        """Note a batch; return the factor on the learning rate, which falls to 0.1 with time."""
        now = time.monotonic() - self.started
        for worker, steps in batch:
            lag = version - statistics.fmean(step.version for step in steps)
            newest = steps[-1].version
            self.episodes.append(Collected(now, worker, len(steps), newest, version, lag))
        return max(0.1, 1.0 - now / self.seconds)

    def sent(self, report: SendReport) -> None:
        """Note a send that every worker has applied."""
        self.version = report.version
        self.latencies.append(report.elapsed)
        self.elapsed = time.monotonic() - self.started
        self.show(self)

    @property
    def going(self) -> bool:
        """Whether there is more to learn, and time for it."""
        return not self.solved and self.elapsed < self.seconds

    @property
    def workers(self) -> list[dict[str, int]]:
        """Newest version, its lag, steps and episodes of each worker."""
        rows = []
        for idx in range(self.num_workers):
            own = [each for each in self.episodes if each.worker == idx]
            last = own[-1] if own else Collected(0.0, idx, 0, 0, 0, 0.0)
            row = {"worker_idx": idx, "version": last.version, "lag": last.newest - last.version}
            rows.append({**row, "steps": sum(each.steps for each in own), "episodes": len(own)})
        return rows

    def mean_return(self, first: bool = False) -> float:
        """Mean return of the first or the last 20 episodes; NaN when there is none."""
        return _mean_return(self.episodes[:_WINDOW] if first else self.episodes[-_WINDOW:])

    @property
    def solved(self) -> bool:
        """Whether the last 40 episodes are good enough to stop early."""
        last = self.episodes[-2 * _WINDOW :]
        return len(last) == 2 * _WINDOW and _mean_return(last) >= _SOLVED_RETURN

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
            "risen": len(self.episodes) >= 2 * _WINDOW and final >= 2 * start,
            "solved": self.solved,
            "seconds": round(self.elapsed, 3),
            "steps": sum(each.steps for each in self.episodes),
            "episodes": len(self.episodes),
            "versions": self.version,
            "send_latency_p50": self.latency(50),
            "send_latency_p95": self.latency(95),
            "mean_lag": statistics.fmean([each.lag for each in self.episodes] or [math.nan]),
            "workers": self.workers,
        }

    def line(self) -> str:
        """The run so far in one line."""
        return (
            f"{self.elapsed:.0f} of {self.seconds:.0f} s of training  return "
            f"{self.mean_return():6.1f}  version {self.version}  "
            f"send {self.latency(50) * 1e3:.2f} ms"
        )

    def table(self) -> Table:
        """The run so far as a table, for 60 columns or more."""
        table = Table(caption=self.line(), caption_justify="left")
        workers = self.workers
        for name in workers[0]:
            table.add_column(name, justify="right", min_width=7, no_wrap=True)
        for worker in workers:
            table.add_row(*(f"{value:,}" for value in worker.values()))
        return table


def _mean_return(episodes: list[Collected]) -> float:
    return statistics.fmean([each.steps for each in episodes] or [math.nan])


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
    episodes = progress.episodes
    times = [each.at for each in episodes]
    means = [
        _mean_return(episodes[max(0, end - _WINDOW) : end]) for end in range(1, len(times) + 1)
    ]
    returns = [each.steps for each in episodes]
    upper.plot(times, returns, ".", markersize=3, alpha=0.35, label="episode")
    upper.plot(times, means, label=f"mean of the last {_WINDOW}")
    lower.step(times, [each.newest for each in episodes], where="post", label="trainer")
    for idx in range(progress.num_workers):
        own = [(each.at, each.newest - each.lag) for each in episodes if each.worker == idx]
        lower.plot(*zip(*own, strict=True), ".", markersize=4, label=f"worker {idx}")
    upper.set(ylabel="return")
    lower.set(ylabel="version", xlabel="time (s)", ylim=(0, None))
    for axes in (upper, lower):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False)
    figure.savefig(path, dpi=120)
