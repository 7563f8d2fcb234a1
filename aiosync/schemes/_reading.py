"""The context manager of ``scheme.reading()``, for threads and for coroutines.

Must not import transports; it is used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from aiosync._tasks import current_task

if TYPE_CHECKING:
    from types import TracebackType

    from aiosync.schemes.guard import Guard

__all__ = ["Reading", "is_held_by_caller", "on_behalf_of_reader"]

_reading: ContextVar[tuple[int, ...]] = ContextVar("aiosync_reading", default=())
_waiting_readers: ContextVar[tuple[int, ...]] = ContextVar("aiosync_waiting_readers", default=())


class Reading:
    """Context manager of ``scheme.reading()``: what is computed inside sees one version.

    Use ``with`` in threads and in code without awaits, ``async with`` in coroutines that await
    inside the block; the latter also lets an update that waits go first. Both may be nested.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._threads: list[int] = []  # where it was entered: a generator may end elsewhere

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def _enter(self) -> None:
        self._guard.enter()
        self._threads.append(threading.get_ident())
        _note_task(self._guard)

    def _leave(self) -> None:
        thread = threading.get_ident()
        if thread not in self._threads:
            thread = self._threads[-1]
        self._threads.remove(thread)
        _forget_task(self._guard, thread)
        self._guard.leave(thread=thread)

    async def __aenter__(self) -> None:
        # Inside a read of this task, or of the one that started it, an update cannot go first.
        if id(self._guard) not in _reading.get():
            await self._let_update_go_first()
            self._guard.note_overlap()
        self._enter()
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
        self._leave()

    async def _let_update_go_first(self) -> None:
        await asyncio.sleep(0)  # one forward after the other must leave the loop its turns
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


# -- whose read it is ---------------------------------------------------------------------------

# The guard counts the reads of threads. Of two tasks on one loop, one may wait for an update that
# the read of the other holds back; but a task that waits inside of its own read waits for ever.


def is_held_by_caller(guard: Guard) -> bool:
    """Whether this very task holds a read, or the thread does that waits for this task.

    What is not certain is not said: a read that one task began and another ended is nobody's.
    """
    if id(guard) in _waiting_readers.get():
        return True
    tasks = guard.tasks.get(threading.get_ident())
    return tasks is not None and current_task() in tasks


@contextlib.contextmanager
def on_behalf_of_reader(guard: Guard) -> Iterator[None]:
    """What is started inside runs for this thread, which reads and waits for it to end."""
    token = _waiting_readers.set((*_waiting_readers.get(), id(guard)))
    try:
        yield
    finally:
        _waiting_readers.reset(token)


def _note_task(guard: Guard) -> None:
    task = current_task()
    if task is not None:
        guard.tasks.setdefault(threading.get_ident(), []).append(task)


def _forget_task(guard: Guard, thread: int) -> None:
    tasks = guard.tasks.get(thread)
    if tasks is None:
        return
    try:
        tasks.remove(current_task())  # type: ignore[arg-type]  # None is in no list
    except ValueError:
        tasks.clear()  # another one began it, and nobody knows which
    if not tasks:
        guard.tasks.pop(thread, None)
