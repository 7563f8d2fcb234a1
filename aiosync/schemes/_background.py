"""One thread that runs what must not hold the event loop, one call after the other.

Not an executor: what a call raises comes back whatever it is, also ``SystemExit`` and the
``CancelledError`` of a future, which would otherwise be taken for the end of the waiting task; and
a call that never returns keeps neither its owner from closing nor the interpreter from ending.
Must not import torch, nor anything else of aiosync.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

__all__ = ["Background"]

_T = TypeVar("_T")
_Job: TypeAlias = "tuple[Callable[[], Any], asyncio.Future[Any] | None]"


class Background:
    """A daemon thread, started by its first call.

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

    def submit(self, call: Callable[[], Any]) -> None:
        """Run ``call``, which raises nothing, some time; nobody waits for it."""
        self._put((call, None))

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
        self._put((call, ended))
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

    def _put(self, job: _Job) -> None:
        if self._closed:
            raise RuntimeError(f"{self._name} was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        with self._lock:
            self._working += 1
        self._jobs.put(job)

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
            if ended is not None:
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

    try:
        ended.get_loop().call_soon_threadsafe(tell)
    except RuntimeError:
        return  # the loop is closed: nobody is left to be told
