"""Turns: the moments between two reads in which the loop, or a thread, applies updates.

A forward that Ctrl-C ended does not tell the guard. So the loop tries again now and then, and each
try warns of an automatic read that has kept it waiting for long. If applying waits for an
accelerator, a thread does it, and the loop goes on. Belongs to the loop of its receiver. Must not
import transports.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from aiosync._interrupts import is_interrupt
from aiosync._tasks import Notifier, call_soon
from aiosync.protocol import Inbox
from aiosync.receiver.guard import Guard
from aiosync.receiver.model import WorkerModel
from aiosync.receiver.reads import warn_of_long_calls

__all__ = ["Turns"]

# First and longest pause between two tries.
_RETRY_SECONDS = (0.05, 1.0)


class Turns:
    """Has the noted updates of a worker applied, now or as soon as its reads end.

    Args:
        guard: Keeps reads and updates apart.
        model: The model, which says if applying waits for an accelerator.
        inbox: Has the version of the model.
        take: Applies the noted updates, under the guard; keeps no object alive.
        ended: Called after each try, on the loop: with True if the version changed since the last.

    Attributes:
        take: As given.
        has_ended: True once :meth:`end` was called.
    """

    def __init__(
        self,
        guard: Guard,
        model: WorkerModel,
        inbox: Inbox,
        *,
        take: Callable[[], object],
        ended: Callable[[bool], object],
    ) -> None:
        self.take: Callable[[], object] = take
        self.has_ended: bool = False
        self._guard = guard
        self._model = model
        self._inbox = inbox
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._in_thread: Future[bool] | None = None
        self._thread_ended = Notifier()
        # Epoch and version at the end of the last try.
        self._told: tuple[int | None, int] = (None, 0)
        # Identifier of the thread while it applies, else 0.
        self._thread = 0

    def submit(self, pause: float = _RETRY_SECONDS[0]) -> None:
        """Apply the noted updates now, or when reads end; ``pause`` seconds before the next try."""
        if self._in_thread is not None or (self._model.waits and not self.has_ended):
            # A read that begins before the thread does applies the updates.
            self._guard.offer(self.take)
            if self._in_thread is None:
                self._apply_in_thread(pause)
            return
        try:
            done = self._guard.submit(self.take)
        except BaseException as exc:  # noqa: BLE001 - raised here, or by the loop
            self.interrupt_loop(exc)
            done = False
        self._end_turn(done, pause)

    def _apply_in_thread(self, pause: float) -> None:
        """Begin to apply the noted updates in the thread, which is started if need be."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "aiosync-apply")
        self._in_thread = self._threads.submit(self._apply_offered)
        self._in_thread.add_done_callback(lambda _: call_soon(self._loop, self._end_thread, pause))

    async def wait_for_thread(self, unless: Callable[[], bool]) -> None:
        """Wait for the end of the thread's try that is under way, or ``unless()``. On the loop."""
        under_way = self._in_thread
        while under_way is not None and not self.has_ended and not unless():
            await self._thread_ended.wait()
            # Another one may have begun: in a stream of updates there is always one.
            under_way = under_way if self._in_thread is under_way else None

    def _apply_offered(self) -> bool:
        """Apply in the thread what was offered to the guard; return False if a read is open."""
        self._thread = threading.get_ident()
        try:
            return self._guard.apply_offered()
        finally:
            self._thread = 0

    @property
    def is_in_thread(self) -> bool:
        """True on the thread that applies; ``ended`` is called once the guard is free again."""
        return self._thread == threading.get_ident()

    def _end_thread(self, pause: float) -> None:
        """Take over the thread's result: applied, or left to an open read."""
        ended, self._in_thread = self._in_thread, None
        assert ended is not None
        self._thread_ended.notify()
        done = False
        try:
            done = ended.result()
        except BaseException as exc:  # noqa: BLE001 - raised here, or by the loop
            self.interrupt_loop(exc)
        finally:
            self._end_turn(done, pause)
        if done and self._guard.has_offer and self._in_thread is None and not self.has_ended:
            # This update was offered after the thread had looked for one for the last time.
            self._apply_in_thread(pause)

    def _end_turn(self, done: bool, pause: float) -> None:
        """Tell the owner that a try has ended; plan the next one unless this was ``done``."""
        if not done and self._timer is None and not self.has_ended:
            self._timer = self._loop.call_later(pause, self._try_again, pause)
        had, self._told = self._told, (self._inbox.epoch, self._inbox.version)
        self._ended(self._told != had)

    def _try_again(self, pause: float) -> None:
        """Try again; if the reads go on, the next try comes after twice the pause."""
        self._timer = None
        if not self.has_ended:
            self.submit(min(2 * pause, _RETRY_SECONDS[1]))
            # Last, as the program may have warnings raised.
            warn_of_long_calls(self._guard)

    def interrupt_loop(self, error: BaseException) -> None:
        """Have the loop raise the exception of a signal's handler, so that it ends no link.

        Any other exception is raised here.
        """
        if not is_interrupt(error):
            raise error
        self._loop.call_soon(_raise, error)

    def end(self) -> None:
        """Start no thread and no timer any more, and wait for none."""
        self.has_ended = True
        self._thread_ended.notify()

    def close(self) -> None:
        """Cancel the timer, and let the thread end."""
        if self._timer is not None:
            self._timer.cancel()
        if self._threads is not None:
            # A signal's handler may have interrupted submit(), whose lock this thread then holds.
            call_soon(self._loop, self._threads.shutdown, False)


def _raise(error: BaseException) -> None:
    raise error
