"""The figures that ``aiosync top`` and the page show: of two answers, as a rate needs two.

Must not import torch, nor what draws.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from aiosync.cli._common import plain, show_nbytes
from aiosync.cli.status import show_seconds
from aiosync.errors import AiosyncError
from aiosync.events import SyncStats, WorkerStats

__all__ = [
    "STATES",
    "Facts",
    "Look",
    "counts",
    "facts",
    "look_again",
    "worker_facts",
    "workers",
]

Facts: TypeAlias = dict[str, str]
"""Names and texts, in the order in which they are shown."""

STATES = ("lost", "lagging", "joining", "left", "ready")
"""What a worker can be; what needs a look comes first."""


class Look(NamedTuple):
    """What somebody said, and what it had said before.

    Attributes:
        at: When it was asked, in seconds of ``time.monotonic()``.
        models: What it said.
        before: What it had said before.
        error: Why there is nothing newer.
    """

    at: float
    models: Sequence[SyncStats] = ()
    before: Look | None = None
    error: AiosyncError | None = None

    @property
    def trouble(self) -> str:
        """Why there is nothing newer, in a sentence; empty where there is."""
        if self.error is None:
            return ""
        since = show_seconds(time.monotonic() - self.at)
        return f"No answer for {since}, asking again: {plain(self.error, 500)}"

    def rate(self, model: SyncStats, count: Callable[[SyncStats], int]) -> float | None:
        """How fast a count grows, a second; ``None`` while that is not known."""
        before = self.before or self
        for old in before.models:
            if (old.role, old.model, old.epoch) == (model.role, model.model, model.epoch):
                seconds = self.at - before.at
                return max(0, count(model) - count(old)) / seconds if seconds else None
        return None


async def look_again(ask: Callable[[], Awaitable[Sequence[SyncStats]]], last: Look) -> Look:
    """Ask once more; without an answer the look has what was said last."""
    last = last._replace(before=None, error=None)
    try:
        return Look(time.monotonic(), await ask(), last)
    except AiosyncError as exc:
        return last._replace(error=exc)


def workers(models: Iterable[SyncStats]) -> list[tuple[SyncStats, WorkerStats]]:
    """The workers of all models, those first that need a look."""
    found = [(model, worker) for model in models for worker in model.workers]
    return sorted(found, key=lambda each: (STATES.index(each[1].state), -each[1].lag))


def counts(found: Iterable[tuple[SyncStats, WorkerStats]]) -> dict[str, int]:
    """How many workers are what."""
    states = Counter[str](worker.state for _, worker in found)
    return {state: states[state] for state in reversed(STATES) if states[state]}


def facts(look: Look, model: SyncStats) -> Facts:
    """What is shown of a model, besides its name and workers."""
    rate = look.rate(model, lambda each: each.version)
    nbytes = look.rate(model, lambda each: each.wire_nbytes)
    pause = model.seconds.get("pause")
    return {
        "version": str(model.version),
        "lag": str(model.lag),
        "rate": "-" if rate is None else f"{rate:.1f}/s",
        "bytes/s": "-" if nbytes is None else f"{show_nbytes(nbytes)}/s",
        "age": show_seconds(model.age) if model.version else "-",
        "pause": "-" if pause is None else f"{pause * 1e3:.1f} ms",
    }


def worker_facts(worker: WorkerStats) -> Facts:
    """What is shown of a worker, besides its index and state."""
    return {
        "version": str(worker.version or "-"),
        "lag": str(worker.lag),
        "age": show_seconds(worker.age) if worker.version else "-",
        "pid": str(worker.pid or "-"),
    }
