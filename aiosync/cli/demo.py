"""``aiosync demo``: its options, and the report of a run. The training itself is in ``ppo.py``."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from aiosync.cli._common import errors_to, failing, write_text

if TYPE_CHECKING:
    from aiosync.cli.ppo import Episode
    from aiosync.types import SendReport

__all__ = ["Progress", "demo"]

# Mean return from which on CartPole-v1 counts as solved; the mean here is over 40 episodes.
_SOLVED_RETURN = 475.0
# Number of episodes in the mean returns that are shown and compared.
_WINDOW = 20
_LOOK_SECONDS = 2.0


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
) -> None:
    """Train CartPole with workers that aiosync keeps on the newest policy.

    One trainer process and some worker processes; the workers collect episodes without pause
    and aiosync gives them every new version of the policy. Exits with status 1 if the
    return did not rise.

    - `aiosync demo`
    - `aiosync demo --transport pipe --workers 4`
    """
    errors = errors_to()
    console = errors if json_to == "-" else Console(highlight=False, soft_wrap=True)
    with failing("demo", errors) as status:
        from aiosync.cli import ppo

        if json_to not in (None, "-"):
            write_text("--json", json_to, "")  # a bad path has to fail before the run
        status[0] = 1
        console.print(
            f"aiosync demo: CartPole-v1, {workers} workers, {transport.value}, "
            f"{'aiosync.sync' if sync else 'aiosync'}"
        )
        progress = Progress(workers, seconds, console.print)
        ppo.train(progress, transport.value, workers, seed, sync)
        summary = {"transport": transport.value, "sync": sync, **progress.summary()}
        rose = "rose" if summary["risen"] else "did not rise"
        console.print(
            f"{'Solved' if progress.solved else f'The return {rose}'}: mean return "
            f"{progress.mean_return(first=True):.1f} -> {progress.mean_return():.1f} in "
            f"{progress.elapsed:.1f} s, {summary['steps']} steps and {progress.version} versions."
        )
        if json_to is not None:
            numbers = {name: None if value != value else value for name, value in summary.items()}
            write_text("--json", json_to, json.dumps(numbers, indent=2))
        raise typer.Exit(0 if summary["risen"] else 1)


class Progress:
    """Measurements of one run; prints a line about them every two seconds.

    Args:
        num_workers: Number of worker processes.
        seconds: Longest training time, in seconds.
        say: Prints a line.

    Attributes:
        returns: Return of each episode, which is its number of steps, in the order of arrival.
        lags: Mean number of versions by which the steps of each episode were behind the trainer.
        latencies: Seconds from the call of ``send`` to the last APPLIED ack, for each send.
        workers: For each worker its last version and lag, and its steps and episodes so far.
        version: Newest version that was sent.
        started: Time at which every worker had the first weights, by ``time.monotonic()``.
        elapsed: Training time at the last send, in seconds.
    """

    def __init__(self, num_workers: int, seconds: float, say: Callable[[str], None]) -> None:
        self.returns: list[int] = []
        self.lags: list[float] = []
        self.latencies: list[float] = []
        self.workers: list[dict[str, int]] = [
            {"worker_idx": idx, "version": 0, "lag": 0, "steps": 0, "episodes": 0}
            for idx in range(num_workers)
        ]
        self.version: int = 0
        self.started: float = 0.0
        self.elapsed: float = 0.0
        self._seconds, self._say, self._next_at = seconds, say, 0.0

    def collected(self, batch: list[Episode], version: int) -> float:
        """Record a batch that the trainer took while it had ``version``.

        Returns:
            The factor on the learning rate, which falls from 1 to 0.1 with time.
        """
        for idx, steps in batch:
            self.returns.append(len(steps))
            self.lags.append(version - statistics.fmean(step.version for step in steps))
            worker = self.workers[idx]
            worker["version"] = steps[-1].version
            worker["lag"] = version - steps[-1].version
            worker["steps"] += len(steps)
            worker["episodes"] += 1
        return max(0.1, 1.0 - (time.monotonic() - self.started) / self._seconds)

    def sent(self, report: SendReport) -> None:
        """Record a send that every worker has applied; print a line if one is due."""
        self.version = report.version
        self.latencies.append(report.elapsed)
        self.elapsed = time.monotonic() - self.started
        if self.elapsed >= self._next_at:
            self._next_at = self.elapsed + _LOOK_SECONDS
            has = ", ".join(str(worker["version"]) for worker in self.workers)
            self._say(
                f"{self.elapsed:.0f} of {self._seconds:.0f} s of training  return "
                f"{self.mean_return():6.1f}  version {self.version}  workers have {has}  "
                f"send {self.latency(50) * 1e3:.2f} ms"
            )

    @property
    def going(self) -> bool:
        """True if the training is not solved and there is time left."""
        return not self.solved and self.elapsed < self._seconds

    def mean_return(self, first: bool = False) -> float:
        """Return the mean return of the first or the last 20 episodes; NaN without any."""
        some = self.returns[:_WINDOW] if first else self.returns[-_WINDOW:]
        return statistics.fmean(some or [math.nan])

    @property
    def solved(self) -> bool:
        """True if the last 40 episodes are good enough to stop early."""
        last = self.returns[-2 * _WINDOW :]
        return len(last) == 2 * _WINDOW and statistics.fmean(last) >= _SOLVED_RETURN

    def latency(self, percent: int) -> float:
        """Return the seconds that ``percent`` % of the sends did not exceed; NaN without any."""
        ordered = sorted(self.latencies)
        return ordered[(len(ordered) - 1) * percent // 100] if ordered else math.nan

    def summary(self) -> dict[str, Any]:
        """Return the run as a few values for JSON; times are in seconds, missing means are NaN."""
        start, final = self.mean_return(first=True), self.mean_return()
        return {
            "num_workers": len(self.workers),
            "start_return": start,
            "final_return": final,
            "risen": len(self.returns) >= 2 * _WINDOW and final >= 2 * start,
            "solved": self.solved,
            "seconds": round(self.elapsed, 3),
            "steps": sum(self.returns),
            "episodes": len(self.returns),
            "versions": self.version,
            "send_latency_p50": self.latency(50),
            "send_latency_p95": self.latency(95),
            "mean_lag": statistics.fmean(self.lags or [math.nan]),
            "workers": self.workers,
        }
