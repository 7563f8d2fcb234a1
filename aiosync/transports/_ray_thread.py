"""One thread for calls that block: into Ray, and copies. Must not import torch or schemes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from aiosync.errors import TransportBroken
from aiosync.transports._carrier import handed_over, outlast

__all__ = ["OneThread"]

_CLOSE_SECONDS = 5.0
_T = TypeVar("_T")


class OneThread:
    """Runs calls one after the other, off the loop. The thread is made by the first call.

    Args:
        loop: Whose futures the calls become.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pool: ThreadPoolExecutor | None = None
        self._running: set[asyncio.Future[Any]] = set()
        self._last: Future[Any] | None = None
        self._ended = False

    def start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run ``call`` when its turn has come."""
        if self._ended:
            raise TransportBroken("the link has ended")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "aiosync-ray")
        running = self._loop.run_in_executor(self._pool, handed_over(call))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    async def result_of(self, running: asyncio.Future[_T]) -> _T:
        """Its result. When this is cancelled, it still waits, and is cancelled then."""
        cancelled = await outlast(running)
        if cancelled is not None:
            running.exception()
            raise cancelled
        return running.result()

    async def idle(self) -> None:
        """Wait until nothing runs; when cancelled, too, and is cancelled then."""
        cancelled: asyncio.CancelledError | None = None
        while self._running:
            try:
                await asyncio.wait(set(self._running))
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled

    def end(self, last: Callable[[], object] | None = None) -> None:
        """Take no more calls but this one, if there were any. Never waits; idempotent."""
        if self._ended:
            return
        self._ended = True
        if self._pool is not None:
            if last is not None:
                with contextlib.suppress(RuntimeError):  # the interpreter is about to end
                    self._last = self._pool.submit(last)
            self._pool.shutdown(wait=False)

    async def aclose(self) -> None:
        """Wait a while until the thread has ended. Call :meth:`end` first."""
        waiting = set(self._running)
        if self._last is not None:
            waiting.add(asyncio.wrap_future(self._last))
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=_CLOSE_SECONDS)
        if self._pool is not None and not waiting:
            self._pool.shutdown(wait=True)
