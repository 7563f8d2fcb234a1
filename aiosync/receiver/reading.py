"""Reads that are no forward pass: blocks, functions and methods that compute with one version.

Must not import transports; used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from aiosync._tasks import current_task
from aiosync.errors import ConfigError
from aiosync.receiver.guard import Guard, never_traced

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

__all__ = ["Guarded", "Methods", "Reading", "is_held_by_caller", "on_behalf_of_reader"]

_PAUSE_SECONDS = 0.001

# Guards whose reads the task is in, or one is that started it: no update can go first.
_inside: ContextVar[tuple[int, ...]] = ContextVar("aiosync_inside", default=())
# Guards whose reads hold the thread that waits for what runs here.
_waiting: ContextVar[tuple[int, ...]] = ContextVar("aiosync_waiting", default=())


class Reading:
    """Context manager of ``scheme.reading()``: what is computed inside sees one version.

    Use ``with`` in threads and in code without awaits, ``async with`` in coroutines that await
    inside the block; the latter also lets an update that waits go first. Both may be nested.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        # Where and by which task it was entered: a generator may end elsewhere.
        self._entered: list[tuple[int, asyncio.Task[Any] | None]] = []

    def __enter__(self) -> None:
        task = current_task()
        self._guard.enter(task)
        self._entered.append((threading.get_ident(), task))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        found = (threading.get_ident(), current_task())
        if found not in self._entered:
            found = self._entered[-1]
        self._entered.remove(found)
        self._guard.leave(found[1], thread=found[0])

    async def __aenter__(self) -> None:
        guard = self._guard
        if id(guard) not in _inside.get():
            await asyncio.sleep(0)  # one forward after the other must leave the loop its turns
            while guard.turn_left > 0:  # noqa: ASYNC110 - nor here
                await asyncio.sleep(_PAUSE_SECONDS)
            guard.note_overlap()
        self.__enter__()
        _inside.set((*_inside.get(), id(guard)))

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        reads = list(_inside.get())
        with contextlib.suppress(ValueError):  # left in another context than it was entered in
            reads.remove(id(self._guard))
        _inside.set(tuple(reads))
        self.__exit__(exc_type, exc, traceback)


def is_held_by_caller(guard: Guard) -> bool:
    """Whether this very task holds a read, or the thread does that waits for this task.

    Of two tasks on one loop, one may wait for an update that the read of the other holds back;
    but a task that waits inside of its own read waits for ever.
    """
    return id(guard) in _waiting.get() or guard.holds(current_task())


@contextlib.contextmanager
def on_behalf_of_reader(guard: Guard) -> Iterator[None]:
    """What is started inside runs for this thread, which reads and waits for it to end."""
    token = _waiting.set((*_waiting.get(), id(guard)))
    try:
        yield
    finally:
        _waiting.reset(token)


class Guarded:
    """A function each call of which is a read. Copies and pickles as the function itself.

    Args:
        guard: What keeps updates out meanwhile.
        function: The function, or what makes a coroutine.
        name: What an error calls it.

    Raises:
        ConfigError: It is no function, or a generator.
    """

    def __init__(self, guard: Guard, function: Any, name: str = "function") -> None:
        if not callable(function):
            raise ConfigError(f"{name!r} cannot be guarded: there is no such function")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{name!r} is a generator: read in it, `with scheme.reading():`")
        functools.update_wrapper(self, function, updated=())
        self.guard = guard
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it while no update is applied."""
        if self._is_async:
            return self._wait(args, kwargs)
        frame = sys._getframe()
        self.guard.enter(frame)  # known by its frame, should Ctrl-C come before leave()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.guard.leave(frame)
            del frame

    async def _wait(self, args: Any, kwargs: Any) -> Any:
        async with Reading(self.guard):
            return await self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _unguarded, (self._function,)


def _unguarded(function: Any) -> Any:
    return function


class Methods:
    """Named methods of a model, whose calls are reads as its forward passes are.

    Args:
        guard: What keeps updates out meanwhile.
        names: Their names.
    """

    def __init__(self, guard: Guard, names: Sequence[str]) -> None:
        self._guard = guard
        self._names = names
        self._wrapped: list[tuple[nn.Module, str]] = []

    def check(self, model: nn.Module) -> None:
        """Raise :class:`~aiosync.ConfigError` if one of them cannot be guarded."""
        for name in self._names:
            Guarded(self._guard, getattr(model, name, None), name)

    def wrap(self, model: nn.Module | None) -> None:
        """Guard those of this model, and no longer those of another one."""
        while self._wrapped:
            old, name = self._wrapped.pop()
            if getattr(vars(old).get(name), "guard", None) is self._guard:
                del vars(old)[name]
        for name in self._names if model is not None else ():
            method = Guarded(self._guard, getattr(model, name, None), name)
            # Of what a wrapper (torch.compile) has inside it is the method of that.
            owner: Any = getattr(inspect.unwrap(method), "__self__", model)
            vars(owner)[name] = method
            self._wrapped.append((owner, name))
