"""Copies of large blocks that release the GIL, on a few plain threads.

torch's own thread pool is not used: on a machine that computes all the time its barrier costs
milliseconds. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiosync.errors import ConfigError, LocalProtocolError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["CopyPool", "copy_blocks", "copy_bytes"]

_Pair: TypeAlias = "tuple[NDArray[np.uint8], NDArray[np.uint8]]"

_MIN_CHUNK_NBYTES = 4 * 2**20
_MAX_CHUNK_NBYTES = 64 * 2**20


class CopyPool:
    """A few threads that copy large blocks. Threads start with the first large copy.

    The thread that asks for a copy takes part in it, so that ``num_threads - 1`` threads named
    ``aiosync-copy-<n>`` are started. One copy runs at a time; a second caller copies alone.

    Attributes:
        num_threads: Threads that copy at the same time, the caller's included.
    """

    def __init__(self, num_threads: int = 2) -> None:
        """Prepare a pool; nothing is started.

        Args:
            num_threads: At least 1.

        Raises:
            ConfigError: ``num_threads`` is below 1.
        """
        if num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CopyPool num_threads={self.num_threads} closed={self._closed}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def copy(self, pairs: Sequence[_Pair]) -> None:
        """Copy every (destination, source) pair of 1-D uint8 arrays; returns when all is done.

        Raises:
            LocalProtocolError: The pool is closed.
        """
        if self._closed:
            raise LocalProtocolError("the copy pool is closed")
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._reset()
        total = sum(target.size for target, _ in pairs)
        if self.num_threads == 1 or total < 2 * _MIN_CHUNK_NBYTES:
            copy_blocks(pairs)
            return
        if not self._lock.acquire(blocking=False):
            copy_blocks(pairs)
            return
        try:
            self._start()
            job = _Job(_chunks(pairs, total, self.num_threads))
            for _ in self._threads:
                self._jobs.put(job)
            try:
                job.run()
            finally:
                job.join()
        finally:
            self._lock.release()

    def _start(self) -> None:
        while len(self._threads) < self.num_threads - 1:
            thread = threading.Thread(
                target=_work,
                args=(self._jobs,),
                name=f"aiosync-copy-{len(self._threads)}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads and join them. Idempotent. Waits for a copy that is running."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            for thread in self._threads:
                thread.join()
            self._threads.clear()


class _Job:
    """Chunks that several threads take one after the other."""

    def __init__(self, chunks: Sequence[_Pair]) -> None:
        self._chunks: Iterator[_Pair] = iter(chunks)  # next() of a list iterator is atomic
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._active = 0
        self._closed = False
        self._error: BaseException | None = None

    def run(self) -> None:
        for target, source in self._chunks:
            np.copyto(target, source)

    def help(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._active += 1
        try:
            self.run()
        except BaseException as exc:  # noqa: BLE001 - join() raises it in the thread that asked
            self._error = exc
        finally:
            with self._lock:
                self._active -= 1
                self._idle.notify()

    def join(self) -> None:
        """Wait for helpers that are in the middle of a chunk; late ones find nothing to do."""
        with self._lock:
            self._closed = True
            while self._active:
                self._idle.wait()
        if self._error is not None:
            raise self._error


def _work(jobs: SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        job.help()
        del job


def _chunks(pairs: Sequence[_Pair], total: int, num_threads: int) -> list[_Pair]:
    size = min(max(total // (4 * num_threads), _MIN_CHUNK_NBYTES), _MAX_CHUNK_NBYTES)
    return [
        (target[start : start + size], source[start : start + size])
        for target, source in pairs
        for start in range(0, target.size, size)
    ]


def copy_blocks(pairs: Sequence[_Pair]) -> None:
    """Copy every (destination, source) pair in this thread; each copy releases the GIL."""
    for target, source in pairs:
        np.copyto(target, source)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy one block in this thread, without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
