"""Cancel an operation at each of its await points, one after the other.

An operation that is correct when cancelled "somewhere" is often wrong at one particular await.
:func:`cancel_at_every_await` runs it again and again, cancels it at its first suspension, then at
its second, and so on, and lets the test look at the state left behind after each.

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
    """What one run of the operation did.

    Attributes:
        point: Number of the await point, from 1.
        late: When the cancellation arrived there. Early is as the operation is suspended: what it
            waits for has not happened. Late is when that has happened, but the operation has not
            run again yet; this is where messages get lost: the result is there and nobody takes it.
        delivered: The cancellation was requested. False in the last run of each series, in which
            the operation finished before it came to this point.
        result: What it returned, or ``None``.
        error: What it raised, or ``None``; usually ``asyncio.CancelledError``.
    """

    point: int
    late: bool
    delivered: bool
    result: _T | None = None
    error: BaseException | None = None

    @property
    def finished(self) -> bool:
        """The operation returned normally."""
        return self.error is None

    @property
    def cancelled(self) -> bool:
        """The operation ended with ``CancelledError``."""
        return isinstance(self.error, asyncio.CancelledError)


async def _run_once(
    operation: Callable[[], Coroutine[Any, Any, _T]], point: int, late: bool
) -> CancelOutcome[_T]:
    outcomes: list[CancelOutcome[_T]] = []  # not the task's: one that cancels itself has none
    delivered = False

    def cancel(_: object = None) -> None:
        nonlocal delivered
        delivered = task.cancel()

    @types.coroutine
    def stepwise(coro: Coroutine[Any, Any, _T]) -> Generator[Any, Any, _T]:
        thrown: BaseException | None = None
        for number in count(1):
            try:
                waiter = coro.send(None) if thrown is None else coro.throw(thrown)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            if number == point and late and asyncio.isfuture(waiter):
                # Added before the task adds its own wake-up, so it runs just before that.
                waiter.add_done_callback(cancel)
            elif number == point:
                cancel()
            try:
                yield waiter
                thrown = None
            except BaseException as exc:  # noqa: BLE001  # handed on to the coroutine, whole
                thrown = exc
        raise AssertionError

    async def body() -> None:
        try:
            result = await stepwise(operation())
            outcomes.append(CancelOutcome(point, late, delivered, result))
        except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001  # for the check
            outcomes.append(CancelOutcome(point, late, delivered, error=exc))

    task = asyncio.ensure_future(body())
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    return outcomes[0]


async def cancel_at_every_await(
    operation: Callable[[], Coroutine[Any, Any, _T]],
    check: Callable[[CancelOutcome[_T]], Awaitable[object]] | None = None,
    *,
    around: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    max_points: int = 1000,
    may_not_wait: bool = False,
) -> int:
    """Cancel an operation at its 1st, 2nd, ... n-th await point, early and late, and check each.

    An await point is one suspension up to the event loop. Each series ends with the run that
    finished before its point came; ``check`` sees that run too, with ``delivered`` false.

    Args:
        operation: Makes the coroutine; called once for each run.
        check: Awaited after each run, inside ``around``; raises when the state is wrong.
            Without it, every error other than ``CancelledError`` is raised.
        around: Makes a context that is entered before each run and left after its check: the
            place for set-up and clean-up.
        max_points: Stop a series after this many points, for operations that wait very often.
        may_not_wait: An operation without any await point is in order.

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
