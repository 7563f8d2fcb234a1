"""Time that an event loop spends: late timers, and single callbacks.

For the benchmark ``asgi_under_load``, in whose server it runs. Times are milliseconds: *wall* by
the clock, *busy* by the processor time of the loop's thread. The latter leaves out most of the time
that other processes add on a busy machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

BOUNDS_MS = (1, 2, 3, 5, 10, 20, 50, 100, 1000)
LIMIT_MS = 5.0


def summary(values: list[float]) -> dict[str, float]:
    """Return percentiles of sorted values."""
    if not values:
        return {"p50": 0.0, "p99": 0.0, "p999": 0.0, "max": 0.0}
    last = len(values) - 1
    parts = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: round(values[int(last * part)], 3) for name, part in parts.items()}


class Ticker:
    """Timers that record how late they fire."""

    def __init__(self) -> None:
        self.lags: list[float] = []

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            self.lags.append((time.perf_counter() - began) * 1e3 - 1)

    def take(self) -> dict[str, Any]:
        lags = sorted(self.lags)
        self.lags.clear()
        counts = {f"<= {bound}": sum(lag <= bound for lag in lags) for bound in BOUNDS_MS}
        return {**summary(lags), "ticks": len(lags), "histogram": counts}


class Spans:
    """Durations of named pieces of work."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, float]]] = {}
        self._since = time.perf_counter()

    def measure(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            return work(*args)
        finally:
            span = ((time.perf_counter() - began) * 1e3, (time.thread_time() - cpu) * 1e3)
            self.spans.setdefault(name, []).append(span)

    def take(self) -> dict[str, Any]:
        """Return and forget the durations: of all together, then of each name, longest first."""
        rows = [{"what": name, **_row(spans)} for name, spans in self.spans.items()]
        together = _row([span for spans in self.spans.values() for span in spans])
        seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
        busy = sum(busy for spans in self.spans.values() for _, busy in spans)
        self.spans.clear()
        rows.sort(key=lambda row: -row["busy"]["max"])
        return {**together, "share": round(busy / 1e3 / seconds, 3), "parts": rows[:12]}


def _row(spans: list[tuple[float, float]]) -> dict[str, Any]:
    wall, busy = sorted(span[0] for span in spans), sorted(span[1] for span in spans)
    return {
        "count": len(spans),
        "wall": summary(wall),
        "busy": summary(busy),
        "busy_over_limit": sum(each > LIMIT_MS for each in busy),
    }


def watch_everything() -> Spans:
    """Measure every callback of asyncio's own loop; uvloop's are out of reach."""
    spans = Spans()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        spans.measure(_name_of(handle), run, handle)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    return spans


def _name_of(handle: asyncio.Handle) -> str:
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"a step of {getattr(owner.get_coro(), '__qualname__', owner.get_name())}"
    name = getattr(callback, "__qualname__", repr(callback))
    return f"{getattr(callback, '__module__', '')}.{name}"
