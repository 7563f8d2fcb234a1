"""Episodes of ``aiosync demo``, and the measurements of a run. Must not import typer or rich."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from aiosync.types import SendReport

__all__ = ["Episode", "Progress", "Step"]

# Mean return from which on CartPole-v1 counts as solved; the mean here is over 40 episodes.
_SOLVED_RETURN = 475.0
# Number of episodes in the mean returns that are shown and compared.
_WINDOW = 20
_LINE_SECONDS = 2.0


class Step(NamedTuple):
    """One environment step of a worker.

    Attributes:
        obs: Observation before the step.
        action: Index of the action.
        log_prob: The action's log-probability under the policy that chose it.
        version: Version of that policy.
    """

    obs: Any
    action: int
    log_prob: float
    version: int


Episode: TypeAlias = tuple[int, list[Step]]
"""Index of a worker, and the steps of one episode; their number is the return."""


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
        curve: After each send the time of training and the mean return.
        seconds: As given.
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
        self.curve: list[tuple[float, float]] = []
        self.seconds: float = seconds
        self.version: int = 0
        self.started: float = 0.0
        self.elapsed: float = 0.0
        self._say, self._next_at = say, 0.0

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
        return max(0.1, 1.0 - (time.monotonic() - self.started) / self.seconds)

    def sent(self, report: SendReport) -> None:
        """Record a send that every worker has applied; print a line if one is due."""
        self.version = report.version
        self.latencies.append(report.elapsed)
        self.elapsed = time.monotonic() - self.started
        self.curve.append((self.elapsed, self.mean_return()))
        if self.elapsed >= self._next_at:
            self._next_at = self.elapsed + _LINE_SECONDS
            has = ", ".join(str(worker["version"]) for worker in self.workers)
            self._say(
                f"{self.elapsed:.0f} of {self.seconds:.0f} s of training  return "
                f"{self.mean_return():6.1f}  version {self.version}  workers have {has}  "
                f"send {self.latency(50) * 1e3:.2f} ms"
            )

    @property
    def going(self) -> bool:
        """True if the training is not solved and there is time left."""
        return not self.solved and self.elapsed < self.seconds

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
