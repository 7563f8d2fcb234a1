"""The versions of the reads that ended, by the thread or task in which they did.

Its owner has a lock. Must not import transports.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TypeAlias

from aiosync._tasks import current_task
from aiosync.spans import VersionSpan

__all__ = ["SpanLog", "epoch_text"]

_MOST_RUNS = 256

_Where: TypeAlias = "asyncio.Task[object] | threading.Thread"


def epoch_text(epoch: int) -> str | None:
    """An epoch as users see it; ``None`` for 0, where there is none."""
    return f"{epoch:016x}" if epoch else None


class SpanLog:
    """Runs of (version, reads) for each thread and task, until somebody takes them.

    Memory is bounded: where nobody does, the two oldest of many runs become one of the older
    version. What was read in another epoch before counts as version 0, which is no version.
    """

    def __init__(self) -> None:
        self._runs: weakref.WeakKeyDictionary[_Where, tuple[int, list[tuple[int, int]]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, epoch: int, version: int) -> None:
        """A read of this thread or task has ended, which had this version."""
        here = current_task() or threading.current_thread()
        known, runs = self._runs.get(here, (epoch, []))
        if known != epoch:
            runs[:] = [(0, sum(count for _, count in runs))]
        count = runs.pop()[1] if runs and runs[-1][0] == version else 0
        runs.append((version, count + 1))
        if len(runs) > _MOST_RUNS:
            runs[:2] = [(min(runs[0][0], runs[1][0]), runs[0][1] + runs[1][1])]
        self._runs[here] = epoch, runs

    def take(self) -> VersionSpan | None:
        """What this thread or task has read since the last time; ``None`` for nothing."""
        epoch, runs = self._runs.pop(current_task() or threading.current_thread(), (0, []))
        return VersionSpan.from_runs(runs, epoch_text(epoch)) if runs else None
