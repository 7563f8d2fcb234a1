"""Cancel an operation at each of its await points, one after the other.

An operation that is correct when cancelled "somewhere" is often wrong at one particular await.
:func:`cancel_at_every_await` runs the operation repeatedly, cancels it at its first suspension,
then at its second, and so on, and lets the test check the state after each run.

This module must never import pytest, torch or the rest of aiosync.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

__all__ = ["CancelOutcome", "cancel_at_every_await"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CancelOutcome(Generic[_T]):
    """Result of one run of the operation.

    Attributes:
        point: Number of the await point, from 1.
        late: Moment of the cancellation at that point. Early (False) is when the operation is
            suspended, before the event that it waits for. Late (True) is after that event, but
            before the operation runs on. Operations lose messages there, because the result
            exists and the operation never takes it.
        delivered: True if the cancellation was requested. False in the last run of each series, in
            which the operation finished before it came to this point.
        result: Result of the operation, or ``None``.
        error: Exception of the operation, or ``None``; usually ``asyncio.CancelledError``.
    """

    point: int
    late: bool
    delivered: bool
    result: _T | None = None
    error: BaseException | None = None

    @property
    def finished(self) -> bool:
        """True if the operation returned normally."""
        return self.error is None

    @property
    def cancelled(self) -> bool:
        """True if the operation ended with ``CancelledError``."""
        return isinstance(self.error, asyncio.CancelledError)


async def _run_once(
    operation: Callable[[], Coroutine[Any, Any, _T]], point: int, late: bool
) -> CancelOutcome[_T]:
    """Run the operation once, and cancel it at its await point number ``point``, if it has one."""
    # The outcome is not the task's result, because a task that cancels itself has no result.
    outcomes: list[CancelOutcome[_T]] = []
    delivered = False
    task: asyncio.Task[Any] | None = None

    def cancel(_: object = None) -> None:
        nonlocal delivered
        assert task is not None
        delivered = task.cancel()

    @types.coroutine
    def stepwise(coro: Coroutine[Any, Any, _T]) -> Generator[Any, Any, _T]:
        """Await a coroutine from one suspension to the next, so that they can be counted."""
        thrown: BaseException | None = None
        for number in count(1):
            try:
                waiter = coro.send(None) if thrown is None else coro.throw(thrown)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            if number == point and late and asyncio.isfuture(waiter):
                # The task adds its own wake-up later, so this callback runs just before that.
                waiter.add_done_callback(cancel)
            elif number == point:
                cancel()
            try:
                yield waiter
                thrown = None
            except BaseException as exc:  # noqa: BLE001  # thrown into the coroutine unchanged
                thrown = exc
        raise AssertionError

    async def body() -> None:
        nonlocal task
        # An eager task runs up to here, and further, before its factory returns it.
        task = asyncio.current_task()
        try:
            result = await stepwise(operation())
            outcomes.append(CancelOutcome(point, late, delivered, result))
        except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001  # the check gets it
            outcomes.append(CancelOutcome(point, late, delivered, error=exc))

    running = asyncio.ensure_future(body())
    try:
        await asyncio.wait({running})
    finally:
        running.cancel()
    return outcomes[0]


async def _check(
    outcome: CancelOutcome[_T], check: Callable[[CancelOutcome[_T]], Awaitable[object]] | None
) -> None:
    """Have the caller check a run; without a check, raise its error unless it was cancelled."""
    if check is not None:
        await check(outcome)
    elif outcome.error is not None and not outcome.cancelled:
        raise outcome.error


async def cancel_at_every_await(
    operation: Callable[[], Coroutine[Any, Any, _T]],
    check: Callable[[CancelOutcome[_T]], Awaitable[object]] | None = None,
    *,
    around: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    max_points: int = 1000,
    may_not_wait: bool = False,
) -> int:
    """Cancel an operation at its 1st, 2nd, ... n-th await point, early and late; check each run.

    An await point is one suspension up to the event loop. There is a series of early and one of
    late cancellations. A series ends with the run that finished before its point; ``check`` gets
    that run, too, with ``delivered`` false.

    Args:
        operation: Makes the coroutine; called once for each run.
        check: Awaited after each run, inside ``around``; raises when the state is wrong.
            Without it, every error other than ``CancelledError`` is raised.
        around: Makes a context that is entered before each run and left after its check, for
            set-up and clean-up.
        max_points: Largest number of points in a series, for operations that wait very often.
        may_not_wait: Accept an operation without any await point.

    Returns:
        The largest number of await points at which the operation was cancelled.

    Raises:
        RuntimeError: The operation has no await point at all, so that nothing was tested, and
            ``may_not_wait`` is false.
    """
    deepest = 0
    for late in (False, True):
        for point in range(1, max_points + 1):
            async with around():
                outcome = await _run_once(operation, point, late)
                await _check(outcome, check)
            if not outcome.delivered:
                break
            deepest = max(deepest, point)
    if deepest == 0 and not may_not_wait:
        raise RuntimeError("the operation never waits: there was nothing to cancel")
    return deepest
