"""A clock that jumps: timeouts and delays in tests cost no real time.

:class:`VirtualClock` makes event loops whose ``loop.time()`` stalls while anything can run
and jumps to the next timer when nothing can. A test of a 120 s deadline then finishes in
microseconds, and finishes the same way each time. Code under test must ask ``loop.time()``,
``asyncio.sleep()`` and friends; ``time.monotonic()`` is not replaced.

This module must never import pytest, torch or the rest of aiosync.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["VirtualClock", "VirtualClockEventLoop"]

_T = TypeVar("_T")


class VirtualClock:
    """Source of virtual time, in seconds, shared by the loops made from it.

    Args:
        start: Time to start from, in seconds.
        grace: Real seconds to wait for file descriptors before each jump. 0 is right while all
            peers live on the loop; tests with a peer in another thread or process need a little.

    Attributes:
        jumps: How often the clock jumped so far.

    Threads:
        Not thread-safe; use it from the thread that runs the loop.
    """

    def __init__(self, start: float = 0.0, *, grace: float = 0.0) -> None:
        self._now = start
        self.grace = grace
        self.jumps: int = 0

    def time(self) -> float:
        """Return the virtual time in seconds. Fits wherever a time function is asked for."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward by hand, as a callback that takes ``seconds`` would.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back (advance by {seconds} s)")
        self._now += seconds

    def jump(self, seconds: float) -> None:
        """Move the time forward because the loop is idle; counted in :attr:`jumps`."""
        self.advance(seconds)
        self.jumps += 1

    def new_event_loop(self) -> VirtualClockEventLoop:
        """Make a loop on this clock; usable as a ``loop_factory``."""
        return VirtualClockEventLoop(self)

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end on a new loop on this clock, as ``asyncio.run`` does."""
        with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
            return runner.run(main)

    def __repr__(self) -> str:
        return f"<VirtualClock {self._now:.6f} s, {self.jumps} jumps>"


class VirtualClockEventLoop(asyncio.SelectorEventLoop):
    """A selector event loop whose time is a :class:`VirtualClock`.

    Idle means: no callback is ready, no watched descriptor is ready, and no
    ``run_in_executor()`` call is under way. While such a call is under way the clock runs at
    real speed, so that a deadline does not pass only because a thread needed a moment. With no
    timer pending the loop waits for descriptors for real, as any loop does.

    Args:
        clock: The clock to follow; a new one when omitted.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock: VirtualClock = clock if clock is not None else VirtualClock()
        self._executor_calls = 0
        super().__init__(_JumpingSelector(self.clock, self._has_executor_calls))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.clock.time()

    @property
    def _clock_resolution(self) -> float:
        # asyncio adds this to the time when it looks for timers that are due. It must not vanish
        # in the rounding of a large time, or a timer that is due exactly now would never fire.
        return max(1e-9, 2 * math.ulp(self.clock.time()))

    @_clock_resolution.setter
    def _clock_resolution(self, _: float) -> None:
        """Ignore what asyncio finds out about the real clock."""

    def run_in_executor(  # type: ignore[override]  # typeshed has *Ts there, which adds nothing
        self, executor: Executor | None, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Run ``func`` in a thread; the clock runs at real speed until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._executor_calls += 1
        future.add_done_callback(self._executor_call_done)
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the threads of the executor, at real speed; arguments as in asyncio."""
        self._executor_calls += 1  # Python 3.12 and newer wait until a deadline on this clock
        try:
            await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self._executor_calls -= 1

    def _executor_call_done(self, _: asyncio.Future[Any]) -> None:
        self._executor_calls -= 1

    def _has_executor_calls(self) -> bool:
        return self._executor_calls > 0


class _JumpingSelector(selectors.BaseSelector):
    """A selector that moves the clock instead of sleeping."""

    def __init__(self, clock: VirtualClock, busy: Callable[[], bool]) -> None:
        self._clock = clock
        self._busy = busy
        self._inner = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return self._inner.select(timeout)
        if self._busy():
            started = time.monotonic()
            ready = self._inner.select(timeout)
            self._clock.advance(min(timeout, time.monotonic() - started) if ready else timeout)
            return ready
        ready = self._inner.select(self._clock.grace)
        if not ready:
            self._clock.jump(timeout)
        return ready

    def register(
        self, fileobj: FileDescriptorLike, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(
        self, fileobj: FileDescriptorLike, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def close(self) -> None:
        self._inner.close()

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._inner.get_map()
