"""The fastest loop there is, and the cores for it. Must not import torch."""

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
    """A uvloop event loop where uvloop is installed, else one of asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, _T] | Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine to its end, on uvloop where it is installed and on asyncio otherwise.

    Args:
        main: A coroutine, or a function without arguments that returns one.

    Returns:
        What the coroutine returns; its exceptions pass through. Ctrl-C cancels it.

    Raises:
        ConfigError: ``main`` is neither.
        OSError: This process has no file descriptors left for a loop.
        RuntimeError: A loop runs in this thread already.
    """
    coroutine = main() if callable(main) else main
    if not asyncio.iscoroutine(coroutine):
        raise ConfigError(f"run() needs a coroutine, got {type(coroutine).__name__}")
    try:
        find_descriptors()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(coroutine)
    finally:
        coroutine.close()  # there may be no loop, as without file descriptors


def find_descriptors() -> None:
    """Fail before there is a loop: one that gets too few cannot even be closed.

    Raises:
        OSError: There are not enough.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(_LOOP_DESCRIPTORS):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def usable_cores() -> int:
    """How many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # pragma: no cover - the tests run on Linux
