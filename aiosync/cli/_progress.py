"""What ``aiosync demo`` measures: returns, versions, lags and latencies over time.

Bookkeeping only: this module must never import torch, typer, rich or matplotlib.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from aiosync.cli._ppo import Fragment
    from aiosync.types import SendReport

__all__ = ["SOLVED_RETURN", "Progress", "WorkerProgress"]

SOLVED_RETURN = 475.0
"""Mean return at which CartPole-v1 counts as solved."""

_WINDOW = 20
"""Episodes in the means that are shown and compared."""

_SOLVED_WINDOW = 40
"""Episodes whose mean must reach :data:`SOLVED_RETURN` for an early stop."""


@dataclass(slots=True)
class WorkerProgress:
    """What is known of one worker.

    Attributes:
        version: Version that took its newest step.
        lag: How many versions its newest step was behind the trainer when it was learnt from.
        num_steps: Environment steps so far.
        num_episodes: Episodes that ended so far.
    """

    version: int = 0
    lag: int = 0
    num_steps: int = 0
    num_episodes: int = 0


@dataclass(slots=True)
class Progress:
    """Everything measured in one run. Times are seconds since :meth:`start`.

    Attributes:
        num_workers: Worker processes.
        seconds: Longest training time.
        workers: One entry for each worker.
        returns: (time, return) of every episode, in the order in which they arrived.
        lags: (time, worker, mean lag of the steps) of every fragment.
        latencies: Seconds from the call of ``send`` to the last APPLIED ack, for each send.
        version: Newest version that was sent.
    """

    num_workers: int
    seconds: float
    workers: list[WorkerProgress] = field(init=False)
    returns: list[tuple[float, float]] = field(default_factory=list)
    lags: list[tuple[float, int, float]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    version: int = 0
    _started_at: float | None = None
    _stopped_at: float | None = None

    def __post_init__(self) -> None:
        self.workers = [WorkerProgress() for _ in range(self.num_workers)]

    def start(self) -> None:
        """Start the clock."""
        self._started_at = time.monotonic()

    def stop(self) -> None:
        """Stop the clock."""
        self._stopped_at = time.monotonic()

    def collected(self, batch: Sequence[Fragment], version: int) -> None:
        """Note a batch that is about to be learnt from, with the trainer's version."""
        now = self.elapsed
        for fragment in batch:
            worker = self.workers[fragment.worker_idx]
            worker.version = int(fragment.versions[-1])
            worker.lag = version - worker.version
            worker.num_steps += fragment.num_steps
            worker.num_episodes += len(fragment.returns)
            self.returns.extend((now, value) for value in fragment.returns)
            mean_lag = version - float(fragment.versions.mean())
            self.lags.append((now, fragment.worker_idx, mean_lag))

    def sent(self, report: SendReport) -> None:
        """Note a send that every worker has applied."""
        self.version = report.version
        self.latencies.append(report.elapsed)

    @property
    def elapsed(self) -> float:
        """Seconds since :meth:`start`; 0 before it."""
        if self._started_at is None:
            return 0.0
        return (self._stopped_at or time.monotonic()) - self._started_at

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate: falls from 1 to 0.1 over the time allowed."""
        return max(0.1, 1.0 - self.elapsed / self.seconds)

    @property
    def num_steps(self) -> int:
        """Environment steps of all workers."""
        return sum(worker.num_steps for worker in self.workers)

    @property
    def start_return(self) -> float:
        """Mean return of the first 20 episodes; NaN when there is none."""
        return _mean([value for _, value in self.returns[:_WINDOW]])

    @property
    def recent_return(self) -> float:
        """Mean return of the last 20 episodes; NaN when there is none."""
        return _mean([value for _, value in self.returns[-_WINDOW:]])

    @property
    def solved(self) -> bool:
        """Whether the last 40 episodes reached :data:`SOLVED_RETURN` on average."""
        last = [value for _, value in self.returns[-_SOLVED_WINDOW:]]
        return len(last) == _SOLVED_WINDOW and _mean(last) >= SOLVED_RETURN

    @property
    def risen(self) -> bool:
        """Whether the return at least doubled from the first to the last 20 episodes."""
        return len(self.returns) >= 2 * _WINDOW and self.recent_return >= 2 * self.start_return

    @property
    def finished(self) -> bool:
        """Whether to stop: solved, or out of time."""
        return self.solved or self.elapsed >= self.seconds

    def latency(self, percentile: float) -> float:
        """Return that percentile of the latencies, in seconds; NaN when nothing was sent."""
        return float(np.percentile(self.latencies, percentile)) if self.latencies else float("nan")

    def summary(self) -> dict[str, Any]:
        """Return the run in a few numbers that JSON can hold; times in seconds."""
        return {
            "start_return": _json_number(self.start_return),
            "final_return": _json_number(self.recent_return),
            "risen": self.risen,
            "solved": self.solved,
            "seconds": round(self.elapsed, 3),
            "steps": self.num_steps,
            "episodes": len(self.returns),
            "versions": self.version,
            "send_latency_p50": _json_number(self.latency(50)),
            "send_latency_p95": _json_number(self.latency(95)),
            "mean_lag": _json_number(_mean([lag for _, _, lag in self.lags])),
            "workers": [
                {
                    "worker_idx": idx,
                    "version": worker.version,
                    "lag": worker.lag,
                    "steps": worker.num_steps,
                    "episodes": worker.num_episodes,
                }
                for idx, worker in enumerate(self.workers)
            ],
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _json_number(value: float) -> float | None:
    return None if value != value else round(value, 6)
