"""Background tasks with an owner: awaited on close, never failing in silence; and waking who waits.

A task group would be the first choice, but a scheme's tasks start in ``connect()`` and end in
``aclose()``, which different tasks may call; a task group must be left by the task that entered
it. Other tasks below ``sync`` end within the call that made them. Must not import torch, nor
anything else of aiosync but its errors.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from aiosync.errors import LocalProtocolError, SyncTimeout, TransportClosed

__all__ = [
    "Newest",
    "Notifier",
    "TaskOwner",
    "WorkerThread",
    "call_soon",
    "current_task",
    "run_on_loop",
    "running_loop",
]

_T = TypeVar("_T")
_Job: TypeAlias = "tuple[Callable[[], Any], asyncio.Future[Any]]"

_CLOSE_SECONDS = 5.0
_PATIENCE_SECONDS = 30.0  # of a thread that waits for a loop


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that runs in this thread.

    Raises:
        LocalProtocolError: None does, as under trio.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError as exc:
        raise LocalProtocolError(
            "aiosync needs an asyncio event loop: use asyncio.run(), aiosync.run(), or anyio with "
            "its asyncio backend"
        ) from exc


def current_task() -> asyncio.Task[Any] | None:
    """The task that runs in this thread; ``None`` also where no loop does."""
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None


def call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object
) -> None:
    """Call on this loop, from any thread; nobody is called once it is closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return  # nobody is left to be told


def run_on_loop(loop: asyncio.AbstractEventLoop | None, call: Callable[[], None]) -> None:
    """Call here if nobody else runs the loop, otherwise there, and wait for it.

    Raises:
        SyncTimeout: The loop, in another thread, did not run; it will not call any more.
    """
    if loop is None or asyncio._get_running_loop() is loop or not loop.is_running():
        call()
        return
    done: Future[None] = Future()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            try:
                call()
            except BaseException as exc:  # noqa: BLE001 - raised in the thread that waits
                done.set_exception(exc)
            else:
                done.set_result(None)

    loop.call_soon_threadsafe(run)
    try:
        done.result(_PATIENCE_SECONDS)
    except TimeoutError as exc:
        raise SyncTimeout(
            f"the event loop of this scheme did not run within {_PATIENCE_SECONDS:g} s"
        ) from exc
    finally:
        done.cancel()  # if it has not begun, it never will


class Notifier:
    """Wakes whoever waits for a change: :class:`asyncio.Condition` without a lock, of any loop.

    Attributes:
        waiting: Whom the next :meth:`notify` wakes. Any thread may ask whether that is anybody.
    """

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait for the next :meth:`notify`; not where ``unless``, asked once it would, says so."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiting[waiter] = None
        try:
            if not unless():
                await waiter
        finally:
            self.waiting.pop(waiter, None)

    def notify(self) -> None:
        """Wake everybody who waits now, in the order in which they came."""
        waiting, self.waiting = self.waiting, {}
        for waiter in waiting:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)


class TaskOwner:
    """Starts tasks, hands their crashes to one callback, and ends them together.

    Args:
        on_crash: Called on the loop with the exception that a task ended with; with
            ``TransportClosed`` where somebody else cancelled it.
    """

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._on_crash = on_crash
        self._tasks: set[asyncio.Task[None]] = set()
        self._given_up: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``coroutine`` in the background until it ends or :meth:`aclose` cancels it."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        own = self._closed or task in self._given_up
        self._given_up.discard(task)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                self._on_crash(error)
        elif not own:  # whoever waits for what it was to do would wait for ever
            self._on_crash(
                TransportClosed(
                    f"a background task of this scheme was cancelled ({task.get_name()!r}), by "
                    "other code or by a CancelledError that a function of yours raised; close "
                    "schemes with aclose() before cancelling tasks"
                )
            )

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel one task, and forget it: nobody waits for what it was to do."""
        if task in self._tasks:
            self._given_up.add(task)
            task.cancel()

    async def aclose(self) -> None:
        """Cancel every task and wait, at most 5 seconds, until they are gone.

        Tasks of a loop that does not run would never be: they are cancelled, as in :meth:`abort`.
        """
        self._closed = True
        running = asyncio.get_running_loop()
        if any(task.get_loop() is not running for task in self._tasks):
            self.abort()
            return
        current = asyncio.current_task()
        tasks = {task for task in self._tasks if task is not current}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    def abort(self) -> None:
        """Cancel every task without waiting. May be called from any thread."""
        self._closed = True
        for task in tuple(self._tasks):
            loop = task.get_loop()
            if loop.is_running() and asyncio._get_running_loop() is not loop:
                call_soon(loop, task.cancel)
            elif not loop.is_closed():
                task.cancel()


class Newest(Generic[_T]):
    """Works at one thing after the other; of those that come meanwhile only at the newest.

    Args:
        work: What to do with each.
        tasks: Owner of the task that does it.
        name: Name of that.

    Attributes:
        waiting: The newest that came meanwhile.
        is_busy: It works at one.
        task: What does so, or did last.
    """

    def __init__(
        self, work: Callable[[_T], Coroutine[Any, Any, None]], tasks: TaskOwner, name: str
    ) -> None:
        self._work, self._tasks, self._name = work, tasks, name
        self.waiting: _T | None = None
        self.is_busy: bool = False
        self.task: asyncio.Task[None] | None = None

    def begin(self, item: _T) -> _T | None:
        """Work at this, after what is worked at now.

        Returns:
            What it takes the place of, and that nobody is going to work at.
        """
        old, self.waiting = self.waiting, item
        if not self.is_busy:
            self.is_busy = True  # before it starts: an eager task may be over then
            self.task = self._tasks.start(self._run(), self._name)
        return old

    async def _run(self) -> None:
        try:
            while (item := self.waiting) is not None:
                self.waiting = None
                await self._work(item)
        finally:
            self.is_busy = False


class WorkerThread:
    """One daemon thread for what must not hold the event loop, one call after the other.

    Not an executor: what a call raises comes back whatever it is, also ``SystemExit`` and the
    ``CancelledError`` of a future, which would otherwise be taken for the end of the waiting task;
    and a call that never returns keeps neither its owner from closing nor the interpreter from
    ending.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._working = 0
        self._lock = threading.Lock()  # for _working
        self._closed = False

    async def run(self, call: Callable[[], _T], *, patience: float | None) -> _T:
        """Run ``call`` and wait for it.

        Args:
            call: What to run.
            patience: Seconds that a cancelled caller goes on waiting for the call to end;
                ``None`` for as long as it takes.

        Raises:
            Exception: Whatever the call raised; what is no ``Exception`` as the cause of a
                ``RuntimeError``.

        Cancellation:
            Class C. The call goes on.
        """
        ended: asyncio.Future[tuple[_T | None, BaseException | None]]
        ended = asyncio.get_running_loop().create_future()
        if self._closed:
            raise RuntimeError(f"{self._name} was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        with self._lock:
            self._working += 1
        self._jobs.put((call, ended))
        try:
            result, error = await asyncio.shield(ended)
        except asyncio.CancelledError:
            await asyncio.wait([ended], timeout=patience)
            raise
        if error is None:
            return result  # type: ignore[return-value]  # the call's own
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        raise RuntimeError(f"{type(error).__name__} was raised: {error}") from error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, ended = job
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = (call(), None)
            except BaseException as exc:  # noqa: BLE001 - run() raises it in the caller's task
                outcome = (None, exc)
            with self._lock:
                self._working -= 1
            _tell(ended, outcome)
            del job, call, ended, outcome  # nothing is kept alive while this waits

    def close(self, *, patience: float) -> None:
        """End the thread; one that is busy ends after its calls, and is waited for only shortly.

        Args:
            patience: Seconds to wait for a thread that has nothing to do.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            if not self._working:
                self._thread.join(patience)


def _tell(ended: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    def tell() -> None:
        if not ended.done():
            ended.set_result(outcome)

    call_soon(ended.get_loop(), tell)
