"""A clock that jumps: timeouts and delays in tests cost no real time.

:class:`VirtualClock` makes event loops whose ``loop.time()`` stalls while anything can run
and jumps to the next timer when nothing can. A test of a 120 s deadline then finishes in
microseconds, and finishes the same way each time. Code under test must ask ``loop.time()``,
``asyncio.sleep()`` and friends; ``time.monotonic()`` is not replaced.

This module must never import pytest, torch or the rest of aiosync.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

__all__ = ["VirtualClock"]

_T = TypeVar("_T")


class VirtualClock:
    """Source of virtual time, in seconds, shared by the loops made from it.

    A loop is idle when no callback is ready, no watched descriptor is ready, and no
    ``run_in_executor()`` call is under way; then the clock jumps. While such a call is under way
    the clock runs at real speed, so that a deadline does not pass only because a thread needed a
    moment. With no timer pending the loop waits for descriptors for real, as any loop does. Peers
    in other threads and processes are not waited for.

    Args:
        start: Time to start from, in seconds.

    Threads:
        Not thread-safe; use it from the thread that runs the loop.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def time(self) -> float:
        """Return the virtual time in seconds. Fits wherever a time function is asked for."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward by hand, as a callback that takes ``seconds`` would."""
        self._now += seconds

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Make a loop on this clock; usable as a ``loop_factory``."""
        return _Loop(self)

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end on a new loop on this clock, as ``asyncio.run`` does."""
        with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
            return runner.run(main)


class _Loop(asyncio.SelectorEventLoop):
    """A selector event loop whose time is a clock's."""

    def __init__(self, clock: VirtualClock) -> None:
        self._selecting = _JumpingSelector(clock)
        super().__init__(self._selecting)
        self.time = clock.time  # type: ignore[method-assign]
        # asyncio adds this to the time when it looks for timers that are due. It must not vanish
        # in the rounding of a large time, or a timer that is due exactly now would never fire.
        self._clock_resolution = 1e-6

    def run_in_executor(  # type: ignore[override]  # typeshed has *Ts there, which adds nothing
        self, executor: Executor | None, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        future = super().run_in_executor(executor, func, *args)
        self._selecting.threads_at_work += 1
        future.add_done_callback(self._selecting.note_end)
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        self._selecting.threads_at_work += 1  # Python 3.12 waits until a deadline on this clock
        try:
            await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self._selecting.note_end()


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock instead of sleeping."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.threads_at_work = 0
        self._clock = clock

    def note_end(self, _: object = None) -> None:
        self.threads_at_work -= 1

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        started = time.monotonic()
        ready = super().select(timeout if self.threads_at_work else 0)
        passed = time.monotonic() - started if self.threads_at_work else 0.0
        self._clock.advance(min(timeout, passed) if ready else timeout)
        return ready
