"""What ``send_async()`` has begun, until ``wait_async()`` tells what came of it.

Must not import torch or the portal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import aiosync.schemes as aio
from aiosync.errors import LocalProtocolError
from aiosync.types import SendReport

__all__ = ["PendingSends"]

_Outcome: TypeAlias = tuple[SendReport | None, list[Exception]]
_FAILURES_KEPT = 16  # for wait(); if nobody ever calls it, the loop tells of older ones


class PendingSends:
    """The sends of one blocking scheme that nobody has been told of. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.handles: list[aio.SendHandle] = []

    def add(self, handle: aio.SendHandle) -> None:
        """Keep one more, and forget those that succeeded."""
        with self._lock:
            failed = [each for each in self.handles if _has_failed(each)][-_FAILURES_KEPT:]
            kept = [each for each in self.handles if not each.done() or each in failed]
            self.handles = [*kept, handle]

    def wait(self, call: Callable[[Coroutine[Any, Any, _Outcome]], _Outcome]) -> SendReport:
        """The report of the newest, once all have ended; raises the newest failure instead.

        Args:
            call: Runs a coroutine on the loop of the sends, and waits for it.
        """
        handles = list(self.handles)
        if not handles:
            raise LocalProtocolError("No async send is pending: call send_async() first.")

        async def settle() -> _Outcome:
            report, failures = None, []
            for handle in handles:
                try:
                    report = await handle
                except Exception as exc:  # noqa: BLE001 - raised in the thread that waits
                    failures.append(exc)
            return report, failures

        report, failures = call(settle())  # if Ctrl-C ends the wait, the sends go on
        with self._lock:
            self.handles = [each for each in self.handles if each not in handles]
        if not failures:
            assert report is not None
            return report
        newest = failures.pop()
        for older in failures:
            newest.add_note(f"before it failed: {type(older).__name__}: {older}")
        failures.clear()
        try:
            raise newest
        finally:
            del newest  # the traceback refers to this frame: leave no cycle


def _has_failed(handle: aio.SendHandle) -> bool:
    # exception() would count as somebody who has seen it.
    return handle.done() and handle._future._exception is not None
