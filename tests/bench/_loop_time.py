"""What an event loop spends its time with: late timers, aiosync's own part, single callbacks.

For the benchmark ``asgi_under_load``; runs in the server. Times are milliseconds: *wall* by the
clock, *busy* by the processor time of the loop's thread, which leaves most of what other
processes on a busy machine add out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from aiosync.schemes._answering import Answering
from aiosync.schemes._tasks import TaskOwner
from aiosync.transports._reader import FrameReader
from aiosync.transports._writer import FrameWriter

BOUNDS_MS = (1, 2, 3, 5, 10, 20, 50, 100, 1000)
LIMIT_MS = 5.0


def summary(values: list[float]) -> dict[str, float]:
    """Percentiles of sorted values."""
    if not values:
        return {"p50": 0.0, "p99": 0.0, "p999": 0.0, "max": 0.0}
    last = len(values) - 1
    parts = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: round(values[int(last * part)], 3) for name, part in parts.items()}


class Ticker:
    """How late timers are."""

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
    """How long named pieces of work took, each time."""

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
        """Of everything together, and of each name with the longest first."""
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


class Timed(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are measured."""

    def __init__(self, inner: Any, spans: Spans) -> None:
        self.inner = inner
        self.spans = spans

    def send(self, value: Any) -> Any:
        return self.spans.measure(self.inner.__qualname__, self.inner.send, value)

    def throw(self, *args: Any) -> Any:
        return self.inner.throw(*args)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Any:
        return self.inner.__await__()


def watch_aiosync() -> Spans:
    """Measure what aiosync does on a loop: its callbacks and the steps of its tasks."""
    spans = Spans()
    for owner, names in (
        (FrameReader, ("_on_event", "_on_unread", "_advance")),
        (FrameWriter, ("_on_writable",)),
        (Answering, ("_leave",)),
    ):
        for name in names:
            setattr(owner, name, _measured(getattr(owner, name), spans))
    start = TaskOwner.start

    def start_timed(self: TaskOwner, coroutine: Any, name: str) -> Any:
        return start(self, Timed(coroutine, spans), name)

    TaskOwner.start = start_timed  # type: ignore[method-assign]
    return spans


def _measured(function: Any, spans: Spans) -> Any:
    name = function.__qualname__

    def measured(*args: Any) -> Any:
        return spans.measure(name, function, *args)

    return measured


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
