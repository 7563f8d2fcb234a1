"""The fastest event loop that is installed, and the usable cores. Must not import torch."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiosync.errors import ConfigError

__all__ = ["find_descriptors", "new_event_loop", "run", "usable_cores"]

_T = TypeVar("_T")
_LOOP_DESCRIPTORS = 10


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop if uvloop is installed, else one of asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, _T] | Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine to its end, on uvloop if it is installed and on asyncio otherwise.

    Args:
        main: A coroutine, or a function without arguments that returns one.

    Returns:
        The result of the coroutine; its exceptions pass through. Ctrl-C cancels it.

    Raises:
        ConfigError: ``main`` is neither.
        OSError: This process has no file descriptors left for a loop.
        RuntimeError: A loop runs in this thread already.
    """
    coroutine = main() if callable(main) else main
    if not asyncio.iscoroutine(coroutine):
        raise ConfigError(f"run() needs a coroutine, got {type(coroutine).__name__}")
    try:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("a loop runs in this thread already: await the coroutine there")
        find_descriptors()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(coroutine)
    finally:
        # There may have been no loop that ran the coroutine, as without file descriptors.
        coroutine.close()


def find_descriptors() -> None:
    """Raise if this process has too few file descriptors left for a loop.

    A loop that gets too few cannot even be closed, so call this before one is made.

    Raises:
        OSError: There are not enough.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(_LOOP_DESCRIPTORS):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # pragma: no cover - the tests run on Linux
