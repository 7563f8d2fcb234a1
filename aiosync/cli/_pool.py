"""The worker processes of ``aiosync demo`` and their trajectory channels.

Nothing here is about weights: it starts and stops processes with :mod:`multiprocessing`,
reads fragments from them, async or blocking, and turns a dead worker into a clear error.
This module must never import typer, rich or matplotlib.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import signal
import time
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any

from aiosync.cli._ppo import Fragment
from aiosync.cli._worker import (
    WorkerFailure,
    WorkerSpec,
    any_readable,
    worker_main,
)
from aiosync.errors import AiosyncError

__all__ = ["WorkerDied", "Workers"]


class WorkerDied(RuntimeError):
    """A worker process ended, or raised, before it was asked to stop."""


class Workers:
    """The processes that collect; a context manager, async or plain, that stops them.

    Each worker has one fragment in the making and at most one waiting to be taken, so a slow
    trainer makes its workers wait and never gets old data.

    Args:
        scheme: Travels to every process; ``init_on_sender`` was called.
        num_workers: Processes to start.
        seed: Base of the workers' seeds.
        sync: The scheme is of the blocking facade.
    """

    def __init__(self, scheme: Any, *, num_workers: int, seed: int, sync: bool) -> None:
        self._scheme = scheme
        self._specs = [WorkerSpec(worker_idx=i, seed=seed) for i in range(num_workers)]
        self._sync = sync
        self._processes: list[SpawnProcess] = []
        self._channels: list[Connection] = []
        self._taken = [0] * num_workers

    def start(self) -> None:
        """Start every process; does not wait for them."""
        context = multiprocessing.get_context("spawn")
        # Ctrl-C reaches the whole process group. Workers are to ignore it from their very first
        # instruction, and a signal mask is inherited; a Ctrl-C meanwhile is not lost for us.
        resource_tracker.ensure_running()  # first, because it unblocks SIGINT when it starts
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for spec in self._specs:
                ours, theirs = context.Pipe(duplex=True)
                process = context.Process(
                    target=worker_main,
                    args=(spec, self._scheme, theirs, self._sync),
                    name=f"aiosync-demo-worker-{spec.worker_idx}",
                    daemon=True,
                )
                self._channels.append(ours)
                process.start()
                self._processes.append(process)
                theirs.close()  # so that its end is the worker's end
                ours.send_bytes(b"next")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def receive(self) -> Fragment:
        """Return the next fragment of any worker; blocks until there is one.

        Raises:
            WorkerDied: A worker ended or raised.
        """
        ready = multiprocessing.connection.wait(self._channels)
        return self._take([channel for channel in self._channels if channel in ready])

    async def receive_async(self) -> Fragment:
        """Return the next fragment of any worker, like :meth:`receive`.

        Cancellation:
            Class A. A fragment that was not returned is still there.
        """
        return self._take(await any_readable(self._channels))

    @property
    def processes(self) -> Sequence[SpawnProcess]:
        """The worker processes, by index."""
        return tuple(self._processes)

    def _take(self, ready: Sequence[Connection]) -> Fragment:
        """Read a fragment of the readable worker that was read least, and ask for its next."""
        channel = min(ready, key=lambda item: self._taken[self._channels.index(item)])
        idx = self._channels.index(channel)
        self._taken[idx] += 1
        try:
            message = channel.recv()  # written in one go by the worker: it is all there
            if isinstance(message, WorkerFailure):
                raise WorkerDied(f"worker {idx} raised:\n{message.text}")
            channel.send_bytes(b"next")
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise self._died(idx) from None
        assert isinstance(message, Fragment)
        return message

    def _died(self, idx: int) -> WorkerDied:
        process = self._processes[idx]
        process.join(5.0)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return WorkerDied(f"worker {idx} (pid {process.pid}) {how} before it was asked to stop")

    def _explain(self) -> WorkerDied | None:
        """Find out whether a dead worker is behind an error of the weight transfer."""
        for idx, channel in enumerate(self._channels):
            try:
                while channel.poll(0.2):
                    message = channel.recv()
                    if isinstance(message, WorkerFailure):
                        return WorkerDied(f"worker {idx} raised:\n{message.text}")
            except (EOFError, OSError):
                return self._died(idx)
        return None

    def stop(self, timeout: float = 5.0) -> None:
        """End every process: ask, then terminate, then kill. Idempotent.

        Args:
            timeout: Seconds that the workers get to end by themselves.
        """
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.terminate()
                process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._channels.clear()
        self._processes.clear()

    def __enter__(self) -> Workers:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        died = self._explain() if isinstance(exc, AiosyncError) else None
        self.stop(5.0 if exc is None else 0.5)  # a worker that still starts hears nothing
        if died is not None:
            raise died from exc

    async def __aenter__(self) -> Workers:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, exc_type, exc, traceback)
