"""Tests in another process, for libraries that keep threads and sockets until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from aiosync.testing import assert_no_leaks
from tests.schemes._harness import PATIENCE, context, loop_factory
from tests.support.waiting import free_port as free_port


class Driver:
    """Another process that runs coroutine functions of importable modules inside a context.

    Args:
        inside: Makes the context; called in that process.
        args: Arguments of ``inside``.
    """

    def __init__(self, inside: Callable[..., AbstractContextManager[None]], *args: Any) -> None:
        self._pool = ProcessPoolExecutor(1, context("forkserver"))
        self._pid = self._pool.submit(_lead).result(60)
        try:
            self._pool.submit(_enter, inside, *args).result(60)
        except BaseException:
            self._kill()
            raise

    def run(self, scenario: Callable[..., Any], *args: Any, loop: str = "asyncio") -> Any:
        """Run ``scenario(*args)`` to its end, and return its result."""
        return self._pool.submit(_run, scenario, args, loop).result(PATIENCE + 15)

    def close(self) -> None:
        """End the context, the process, and the processes that it has started."""
        try:
            self._pool.submit(_leave).result(20)
            self._pool.shutdown()
        finally:
            self._kill()

    def _kill(self) -> None:
        # No process of the group may be left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._pool.shutdown()


# -- in the other process ----------------------------------------------------------------------

_stack = contextlib.ExitStack()


def _lead() -> int:
    os.setsid()
    return os.getpid()


def _enter(inside: Callable[..., AbstractContextManager[None]], *args: Any) -> None:
    _stack.enter_context(inside(*args))


def _leave() -> None:
    _stack.close()


def _run(scenario: Callable[..., Any], args: Any, loop: str) -> Any:
    async def bounded() -> Any:
        async with assert_no_leaks(kinds=("tasks",)), asyncio.timeout(PATIENCE):
            return await scenario(*args)

    try:
        with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
            return runner.run(bounded())
    except BaseException:  # noqa: BLE001 - the test gets its traceback
        raise AssertionError(traceback.format_exc()) from None


# -- processes that end by themselves ----------------------------------------------------------


def together(processes: list[Any]) -> None:
    """Start all processes, and wait until each has ended with exit code 0."""
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode == 0, process
    finally:
        for process in processes:
            process.kill()
            process.join()


# -- a cluster of Ray, which leaves threads and sockets in its driver's process --------------------


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Actors import the modules of the tests.
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    import ray
    from ray.cluster_utils import Cluster

    # Ray notes the cluster's address in this directory, even with another temp_dir, and does not
    # make it.
    Path("/tmp/ray").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temp:
        started = Cluster()
        started.add_node(
            num_cpus=4,
            object_store_memory=640 * 2**20,
            include_dashboard=False,
            temp_dir=temp,
        )
        ray.init(address=started.address, configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()
            started.shutdown()
