"""Running a coroutine on the fastest loop there is. Must not import torch."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiosync.errors import ConfigError

__all__ = ["new_event_loop", "run"]

_T = TypeVar("_T")


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
        RuntimeError: A loop runs in this thread already.
    """
    coroutine = main() if callable(main) else main
    if not asyncio.iscoroutine(coroutine):
        raise ConfigError(f"run() needs a coroutine, got {type(coroutine).__name__}")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)
