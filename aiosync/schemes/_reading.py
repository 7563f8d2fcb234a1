"""The context manager of ``scheme.reading()``, for threads and for coroutines.

Must not import transports; it is used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from aiosync.schemes.guard import Guard

__all__ = ["Reading"]

_reading: ContextVar[tuple[int, ...]] = ContextVar("aiosync_reading", default=())


class Reading:
    """Context manager of ``scheme.reading()``: what is computed inside sees one version.

    Use ``with`` in threads and in code without awaits, ``async with`` in coroutines that await
    inside the block; the latter also lets an update that waits go first. Both may be nested.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.enter()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard.leave()

    async def __aenter__(self) -> None:
        # Inside a read of this task, or of the one that started it, an update cannot go first.
        if id(self._guard) not in _reading.get():
            await self._let_update_go_first()
        self._guard.enter()
        _reading.set((*_reading.get(), id(self._guard)))

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        reads = list(_reading.get())
        with contextlib.suppress(ValueError):  # left in another context than it was entered in
            reads.remove(id(self._guard))
        _reading.set(tuple(reads))
        self._guard.leave()

    async def _let_update_go_first(self) -> None:
        loop = asyncio.get_running_loop()
        applied = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(applied.set)

        while (patience := self._guard.watch(wake)) > 0:
            try:
                await asyncio.wait_for(applied.wait(), patience)
            except TimeoutError:
                return
            finally:
                self._guard.unwatch(wake)
            applied.clear()
