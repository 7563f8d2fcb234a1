"""Cancel an operation at each of its await points, one after the other.

An operation that is correct when cancelled "somewhere" is often wrong at one particular await.
:func:`cancel_at_every_await` runs it again and again, cancels it at its first suspension, then at
its second, and so on, and lets the test look at the state left behind after each.

This module must never import pytest, torch or the rest of aiosync.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["CancelOutcome", "CancelWhen", "cancel_at_every_await"]

_T = TypeVar("_T")


class CancelWhen(enum.Enum):
    """When the cancellation arrives, seen from the await point."""

    EARLY = "early"
    """As the operation is suspended: what it waits for has not happened."""
    LATE = "late"
    """What it waits for has happened, but the operation has not run again yet.

    This is where messages get lost: the result is there and nobody takes it.
    """


@dataclass(frozen=True, slots=True)
class CancelOutcome(Generic[_T]):
    """What one run of the operation did.

    Attributes:
        point: Number of the await point, from 1.
        when: When the cancellation arrived there.
        delivered: The cancellation was requested. False in the last run of each series, in which
            the operation finished before it came to this point.
        finished: The operation returned normally.
        result: What it returned, or ``None``.
        error: What it raised, or ``None``; usually ``asyncio.CancelledError``.
    """

    point: int
    when: CancelWhen
    delivered: bool
    finished: bool
    result: _T | None
    error: BaseException | None

    @property
    def cancelled(self) -> bool:
        """The operation ended with ``CancelledError``."""
        return isinstance(self.error, asyncio.CancelledError)


class _Driver(Generic[_T]):
    """Awaits a coroutine and cancels the running task at the n-th suspension."""

    def __init__(self, coro: Coroutine[Any, Any, _T], point: int, when: CancelWhen) -> None:
        self._coro = coro
        self._point = point
        self._when = when
        self.delivered = False

    def __await__(self) -> Generator[Any, Any, _T]:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("cancel_at_every_await() needs asyncio")
        steps = 0
        thrown: BaseException | None = None
        while True:
            try:
                if thrown is None:
                    waiter = self._coro.send(None)
                else:
                    error, thrown = thrown, None
                    waiter = self._coro.throw(error)
            except StopIteration as stop:
                result: _T = stop.value
                return result
            steps += 1
            if steps == self._point:
                self._arm(task, waiter)
            try:
                yield waiter
            except BaseException as exc:  # noqa: BLE001  # handed on to the coroutine, whole
                thrown = exc

    def _arm(self, task: asyncio.Task[Any], waiter: Any) -> None:
        if self._when is CancelWhen.EARLY or not asyncio.isfuture(waiter):
            self._cancel(task)
        else:
            # Added before the task adds its own wake-up, so it runs just before that.
            waiter.add_done_callback(lambda _: self._cancel(task))

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self.delivered = True
        task.cancel()


async def _run_once(
    operation: Callable[[], Coroutine[Any, Any, _T]], point: int, when: CancelWhen
) -> CancelOutcome[_T]:
    driver = _Driver(operation(), point, when)
    box: list[_T] = []

    async def body() -> None:
        box.append(await driver)

    task = asyncio.ensure_future(body())
    try:
        await asyncio.wait({task})
    finally:
        if not task.done():
            task.cancel()
    error: BaseException | None
    if box:
        error = None  # a cancellation that came too late cancels the task, not the operation
    elif task.cancelled():
        error = asyncio.CancelledError()
    else:
        error = task.exception()
    return CancelOutcome(
        point=point,
        when=when,
        delivered=driver.delivered,
        finished=bool(box),
        result=box[0] if box else None,
        error=error,
    )


async def cancel_at_every_await(
    operation: Callable[[], Coroutine[Any, Any, _T]],
    check: Callable[[CancelOutcome[_T]], Awaitable[object]] | None = None,
    *,
    around: Callable[[], AbstractAsyncContextManager[object]] | None = None,
    when: tuple[CancelWhen, ...] = (CancelWhen.EARLY, CancelWhen.LATE),
    max_points: int = 1000,
    may_not_wait: bool = False,
) -> int:
    """Cancel an operation at its 1st, 2nd, ... n-th await point, and check after each.

    An await point is one suspension up to the event loop. Each series ends with the run that
    finished before its point came; ``check`` sees that run too, with ``delivered`` false.

    Args:
        operation: Makes the coroutine; called once for each run.
        check: Awaited after each run, inside ``around``; raises when the state is wrong.
            Without it, every error other than ``CancelledError`` is raised.
        around: Makes a context that is entered before each run and left after its check: the
            place for set-up and clean-up.
        when: Which moments to try at each point; one series for each.
        max_points: Stop a series after this many points, for operations that wait very often.
        may_not_wait: An operation without any await point is in order.

    Returns:
        The largest number of await points at which the operation was cancelled.

    Raises:
        RuntimeError: The operation has no await point at all, so that nothing was tested, and
            ``may_not_wait`` is false.
    """
    deepest = 0
    for moment in when:
        for point in range(1, max_points + 1):
            async with around() if around is not None else nullcontext():
                outcome = await _run_once(operation, point, moment)
                if check is not None:
                    await check(outcome)
                elif outcome.error is not None and not outcome.cancelled:
                    raise outcome.error
            if not outcome.delivered:
                break
            deepest = max(deepest, point)
    if deepest == 0 and not may_not_wait:
        raise RuntimeError("the operation never waits: there was nothing to cancel")
    return deepest
