"""Cancel a call at one of its awaits, which is counted and not left to time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

_T = TypeVar("_T")


class Cancelled(TimeoutError):
    """A call was cancelled, and said so."""


class CancelledAt(Awaitable[_T]):
    """Await a call, whose task is cancelled at the await of which ``is_due()`` is true.

    Args:
        call: The call.
        is_due: Called at each await of the call at which it has to wait, until it is true.

    Raises:
        Cancelled: The call was cancelled.
        AssertionError: It was, and did not raise CancelledError.
    """

    def __init__(self, call: Awaitable[_T], is_due: Callable[[], bool]) -> None:
        self._call = call
        self._is_due = is_due

    def __await__(self) -> Generator[Any, Any, _T]:
        task: asyncio.Task[Any] | None = None
        steps: Any = self._call.__await__()
        step, given = steps.send, None
        try:
            while True:
                future = step(given)
                if task is None and self._is_due():
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                try:
                    step, given = steps.send, (yield future)
                except BaseException as exc:  # noqa: BLE001 - it is the call's
                    step, given = steps.throw, exc
        except StopIteration as end:
            if task is not None:
                raise AssertionError(f"a cancelled call returned {end.value}") from None
            result: _T = end.value
            return result
        except asyncio.CancelledError:
            if task is None or task.uncancel():
                raise
            raise Cancelled from None
        except Exception as exc:
            if task is not None:
                raise AssertionError("a cancelled call raised another error") from exc
            raise
