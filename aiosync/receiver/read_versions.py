"""The versions that reads used: that of the last read, and counts of all of them for spans.

Must not import transports; used from any thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from aiosync._tasks import current_task
from aiosync.receiver.code_marks import no_guard
from aiosync.spans import VersionSpan, epoch_text

__all__ = ["CURRENT_TASKS", "ReadVersions"]

CURRENT_TASKS: dict[Any, Any]
CURRENT_TASKS = getattr(sys.modules.get("_asyncio"), "_current_tasks", {"unknown": None})
"""The running task of each loop that runs one. From Python 3.14 on, asyncio keeps no such dict.

Each read needs its task, and with Python 3.11 each question for the running loop is a system call.
"""

_MOST_RUNS = 256

_Where: TypeAlias = "asyncio.Task[object] | threading.Thread"


class ReadVersions:
    """Epochs and versions of the reads of a guard, by the thread or task that read.

    Args:
        lock: The lock of the guard, which holds it when a read begins or ends.

    Attributes:
        of_thread: Has ``held``, the version of the last read of a thread without a task.
        last_task: Thread, loop and task of the last read in a task, the two as weak references,
            and the version that it used.
        runs: For each thread or task in which reads ended: the epoch, and runs of (version, reads),
            until :meth:`span` takes them. ``None`` until the first call of :meth:`span`.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.of_thread: threading.local = threading.local()
        self.last_task: tuple[int, Callable[[], object], Callable[[], object], tuple[int, int]]
        self.last_task = 0, no_guard, no_guard, (0, 0)
        self.runs: weakref.WeakKeyDictionary[_Where, tuple[int, list[tuple[int, int]]]] | None
        self.runs = None
        self._lock = lock
        self._of_tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], tuple[int, int]]
        self._of_tasks = weakref.WeakKeyDictionary()

    def note(self, thread: int, held: tuple[int, int]) -> None:
        """Keep the version that a read of this task uses, or of this thread if no task runs."""
        task = current_task()
        if task is None:
            self.of_thread.held = held
        else:
            self._of_tasks[task] = held
            self.last_task = thread, weakref.ref(task.get_loop()), weakref.ref(task), held

    def last(self) -> tuple[int, int] | None:
        """Return epoch and version of the last read of this task, or else of this thread.

        ``None`` before any read.
        """
        task = current_task()
        if task is None:
            return getattr(self.of_thread, "held", None)
        with self._lock:
            return self._of_tasks.get(task)

    def count(self, epoch: int, version: int) -> None:
        """Count a read of this thread or task that has ended, with the version that it had.

        Memory is bounded: if span() is never called, the two oldest of many runs become one of the
        older version. Reads in an earlier epoch count as version 0, which is no version.
        """
        assert self.runs is not None
        here = current_task() or threading.current_thread()
        known, runs = self.runs.get(here, (epoch, []))
        if known != epoch:
            runs[:] = [(0, sum(count for _, count in runs))]
        count = runs.pop()[1] if runs and runs[-1][0] == version else 0
        runs.append((version, count + 1))
        if len(runs) > _MOST_RUNS:
            runs[:2] = [(min(runs[0][0], runs[1][0]), runs[0][1] + runs[1][1])]
        self.runs[here] = epoch, runs

    def span(self) -> VersionSpan | None:
        """Return the versions of the reads that ended here since the last call.

        Counting begins with the first call. ``None`` if no read was counted.
        """
        with self._lock:
            if self.runs is None:
                self.runs = weakref.WeakKeyDictionary()
            here = current_task() or threading.current_thread()
            epoch, runs = self.runs.pop(here, (0, []))
        return VersionSpan.from_runs(runs, epoch_text(epoch)) if runs else None
