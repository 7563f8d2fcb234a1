"""Delay of the timers of a worker's event loop while weights arrive."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

__all__ = ["Tick", "Ticker"]


@dataclass(frozen=True, slots=True)
class Tick:
    """One timer.

    Attributes:
        began: Time at which it was set, by :func:`time.perf_counter`, which is the same in all
            processes.
        late: Seconds after its time at which it fired.
        held: Part of ``late`` that the loop's thread spent computing, at most. In the rest of it
            the thread waited for a core.
    """

    began: float
    late: float
    held: float


class Ticker:
    """Timer that sleeps repeatedly on the loop that starts it, and records how late it wakes up.

    Args:
        interval: Seconds of one sleep.
    """

    INTERVAL = 0.002

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._ticks: list[Tick] = []
        self._task: asyncio.Task[None] | None = None
        self._began = (0.0, 0.0)

    def start(self) -> None:
        """Start on the running loop."""
        self._begin()
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> list[Tick]:
        """Stop; return all ticks since the start. The one under way counts if it is late."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._note()
            if self._ticks[-1].late <= 0:
                self._ticks.pop()
        ticks, self._ticks = self._ticks, []
        return ticks

    async def _run(self) -> None:
        while True:
            self._begin()
            await asyncio.sleep(self._interval)
            self._note()

    def _begin(self) -> None:
        self._began = (time.perf_counter(), time.thread_time())

    def _note(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        late = max(0.0, now - self._began[0] - self._interval)
        self._ticks.append(Tick(self._began[0], late, min(late, cpu - self._began[1])))
