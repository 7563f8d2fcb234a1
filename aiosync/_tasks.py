"""Background tasks with an owner, wake-ups of waiting tasks, and a thread for blocking calls.

An owner awaits its tasks when it is closed, and none of them fails in silence. A task group would
be the first choice, but a scheme's tasks start in ``connect()`` and end in ``aclose()``, which
different tasks may call; a task group must be left by the task that entered it. Other tasks below
``sync`` end within the call that made them. Must not import torch, nor anything else of aiosync but
its errors.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from aiosync._repr import text_of
from aiosync.errors import LocalProtocolError, SyncTimeout, TransportBroken, TransportClosed

__all__ = [
    "Newest",
    "Notifier",
    "TaskOwner",
    "WorkerThread",
    "call_soon",
    "current_task",
    "in_own_thread",
    "in_pool_thread",
    "run_on_loop",
    "running_loop",
    "work_in_thread",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Job: TypeAlias = "tuple[Callable[[], Any], asyncio.Future[Any]]"

_CLOSE_SECONDS = 5.0
# A thread waits this long for a loop to make a call.
_PATIENCE_SECONDS = 30.0


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that runs in this thread.

    Raises:
        LocalProtocolError: No asyncio loop runs here, as under trio.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError as exc:
        raise LocalProtocolError(
            "aiosync needs an asyncio event loop: use asyncio.run(), aiosync.run(), or anyio with "
            "its asyncio backend"
        ) from exc


def current_task() -> asyncio.Task[Any] | None:
    """Return the task that runs in this thread; ``None`` also if no loop does."""
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None


def call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object
) -> None:
    """Schedule a call on a loop, from any thread; drop it if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        # A closed loop has no tasks that need the call.
        return


def run_on_loop(loop: asyncio.AbstractEventLoop | None, call: Callable[[], None]) -> None:
    """Call here if no other thread runs the loop; otherwise call on the loop, and wait for the end.

    A call that has begun is waited for as long as it takes, and its errors are raised here.

    Raises:
        SyncTimeout: The loop, in another thread, did not run; it will not make the call any more.
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
        wait([done], _PATIENCE_SECONDS)
    finally:
        # A call that has not begun must not begin later; one that has is not cancelled by this.
        is_late = done.cancel()
    if is_late:
        raise SyncTimeout(
            f"the event loop of this scheme did not run within {_PATIENCE_SECONDS:g} s"
        )
    done.result()


class Notifier:
    """Notifier of waiting tasks: an :class:`asyncio.Condition` without a lock, for any loop.

    Attributes:
        waiting: Futures that the next :meth:`notify` resolves. Any thread may check if there are
            any.
    """

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self, unless: Callable[[], bool] | None = None) -> None:
        """Wait for the next :meth:`notify`; not at all if ``unless()`` is true.

        It is called once this task is among :attr:`waiting`, so that no notify can be missed.
        """
        waiter = asyncio.get_running_loop().create_future()
        self.waiting[waiter] = None
        try:
            if unless is None or not unless():
                await waiter
        finally:
            self.waiting.pop(waiter, None)

    def notify(self) -> None:
        """Wake all tasks that wait now, in the order in which they came."""
        waiting, self.waiting = self.waiting, {}
        for waiter in waiting:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)


class TaskOwner:
    """Owner of background tasks: starts them, reports their crashes, and ends them together.

    Args:
        on_crash: Called on the loop with the exception that a task ended with; with
            ``TransportClosed`` if other code cancelled the task.
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
        """Report the error that ended a task, or its cancellation by other code, as a crash."""
        self._tasks.discard(task)
        own = self._closed or task in self._given_up
        self._given_up.discard(task)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                self._on_crash(error)
        elif not own:
            # Other code cancelled the task, and its work will never be done: callers must not wait
            # for ever.
            self._on_crash(
                TransportClosed(
                    f"a background task of this scheme was cancelled ({task.get_name()!r}), by "
                    "other code or by a CancelledError that a function of yours raised; close "
                    "schemes with aclose() before cancelling tasks"
                )
            )

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel one task, which is no crash: no caller waits for its work."""
        if task in self._tasks:
            self._given_up.add(task)
            task.cancel()

    async def aclose(self) -> None:
        """Cancel every task and wait, at most 5 seconds, until they have ended.

        If one belongs to another loop, which may not run, all are only cancelled, as in
        :meth:`abort`.
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


_limiter: RunVar[CapacityLimiter] = RunVar("aiosync_limiter")
_MAX_THREADS = 16


async def in_pool_thread(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Make a call that blocks on files or a store in a thread, and wait for it.

    The threads are anyio's, with a limit of aiosync's own: the calls of a program that fill the
    default executor of the loop do not hold this one up.

    Cancellation:
        At once; the call goes on in its thread, and its result is dropped.
    """
    limiter = _limiter.get(None)
    if limiter is None:
        _limiter.set(limiter := CapacityLimiter(_MAX_THREADS))
    return await to_thread.run_sync(
        functools.partial(call, *args, **kwargs), abandon_on_cancel=True, limiter=limiter
    )


async def work_in_thread(work: Callable[[], _T]) -> _T:
    """Do aiosync's own work on weights in a thread, as :func:`in_pool_thread` does.

    Raises:
        TransportBroken: There is no memory for it, or no thread.

    Cancellation:
        At once; the call goes on in its thread, and its result is dropped.
    """
    try:
        return await in_pool_thread(work)
    # A thread that cannot start is a RuntimeError.
    except (MemoryError, RuntimeError) as exc:
        raise TransportBroken(f"this process has no memory or thread left: {exc!r}") from exc


class Newest(Generic[_T]):
    """Task that works on one item at a time; of the items that come meanwhile it takes the newest.

    Args:
        work: Called for each item.
        tasks: Owner of the task.
        name: Name of the task.

    Attributes:
        waiting: The newest item that came meanwhile; ``None`` for none.
        is_busy: True while the task works on an item.
        task: The task that works; ``None``, or one that has ended, for none.
    """

    def __init__(
        self, work: Callable[[_T], Coroutine[Any, Any, None]], tasks: TaskOwner, name: str
    ) -> None:
        self._work, self._tasks, self._name = work, tasks, name
        self.waiting: _T | None = None
        self.is_busy: bool = False
        self.task: asyncio.Task[None] | None = None

    def begin(self, item: _T) -> _T | None:
        """Work on this item, after the present one.

        Returns:
            The waiting item that this one replaces, which is never worked on; ``None`` for none.
        """
        old, self.waiting = self.waiting, item
        if not self.is_busy:
            # Set this before the task starts: an eager task may be over then.
            self.is_busy = True
            self.task = self._tasks.start(self._run(), self._name)
        return old

    async def _run(self) -> None:
        try:
            while (item := self.waiting) is not None:
                self.waiting = None
                await self._work(item)
        finally:
            # The traceback of a cancelled task would keep the item.
            self.is_busy, self.task = False, None


class WorkerThread:
    """One daemon thread for calls that must not hold the event loop; it makes one after the other.

    It is no executor. Whatever a call raises comes back, also ``SystemExit`` and the
    ``CancelledError`` of a future, which an executor would make look like the end of the waiting
    task. And a call that never returns keeps neither its owner from closing nor the interpreter
    from ending.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._working = 0
        # Guards _working.
        self._lock = threading.Lock()
        self._closed = False

    async def run(self, call: Callable[[], _T], *, patience: float | None) -> _T:
        """Run ``call`` in the thread and wait for it.

        Args:
            call: The function to call.
            patience: Seconds that a cancelled caller goes on waiting for the call to end; ``None``
                for no limit.

        Raises:
            Exception: Whatever the call raised. An error that is no ``Exception`` is the cause of a
                ``RuntimeError``.

        Cancellation:
            Class C. The call goes on.
        """
        ended: asyncio.Future[tuple[_T | None, BaseException | None]]
        ended = asyncio.get_running_loop().create_future()
        if self._closed:
            raise RuntimeError(f"{self._name} was closed")
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            # Only a thread that has started: if the system starts none, the next call tries again.
            self._thread = thread
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
        raise RuntimeError(f"{type(error).__name__} was raised: {text_of(error)}") from error

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
            # Keep no object alive while this thread waits for the next call.
            del job, call, ended, outcome

    def close(self, *, patience: float) -> None:
        """End the thread after its calls; wait for the end only if it is idle.

        Args:
            patience: Seconds to wait for an idle thread.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            if not self._working:
                self._thread.join(patience)


async def in_own_thread(call: Callable[[], _T], name: str) -> _T:
    """Make a call that may never return in a daemon thread of its own, and wait for it.

    A thread of a pool would keep the process from ending then.

    Cancellation:
        At once; the call goes on in its thread, and its result is dropped.
    """
    thread = WorkerThread(name)
    try:
        return await thread.run(call, patience=0.0)
    finally:
        thread.close(patience=1.0)


def _tell(ended: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    """Have the loop of :meth:`WorkerThread.run` set the outcome of a call."""

    def tell() -> None:
        if not ended.done():
            ended.set_result(outcome)

    call_soon(ended.get_loop(), tell)
