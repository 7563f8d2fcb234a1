"""Reads other than forward passes: blocks, functions and methods that compute with one version.

Must not import transports; used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import sysconfig
import threading
import time
import warnings
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aiosync._tasks import current_task
from aiosync.errors import ConfigError
from aiosync.receiver.code_marks import automatic, itself, never_traced
from aiosync.receiver.forwards import has_no_forward
from aiosync.receiver.guard import TASKS_AROUND, Guard
from aiosync.spans import VersionSpan, epoch_text

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = [
    "Guarded",
    "Methods",
    "Reading",
    "is_held_by_caller",
    "on_behalf_of_reader",
    "warn_of_long_calls",
]

_PAUSE_SECONDS = 0.001
# An automatic read that keeps an update waiting for longer warns.
_LONG_SECONDS = 1.0

# Guards whose reads are open in the thread that waits for this code.
_waiting: ContextVar[tuple[int, ...]] = ContextVar("aiosync_waiting", default=())


class Reading:
    """Context manager of ``scheme.reading()``: code inside sees one version of the weights.

    Use ``with`` in threads and in code without awaits, ``async with`` in coroutines that await
    inside the block; ``async with`` also lets a waiting update go first. Both may be nested.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        # Epoch and version that the block used which ended last, for span; None before that.
        self._held: tuple[int, int] | None = None
        # Thread and task that entered each open block, because a generator may end in another one.
        self._entered: list[tuple[int, asyncio.Task[Any] | None]] = []

    @property
    def version(self) -> int:
        """Version that the block uses; 0 for weights without a version, and outside the block."""
        return self._guard.held[1] if self._entered else 0

    @property
    def span(self) -> VersionSpan | None:
        """The version that the block used, for code that learns from its results.

        ``None`` before the end of the block. If one object had several blocks, that of the block
        that ended last.
        """
        if self._held is None:
            return None
        epoch, version = self._held
        return VersionSpan(version, version, epoch_text(epoch))

    def __enter__(self) -> Self:
        guard, task = self._guard, current_task()
        entered, before = (threading.get_ident(), task), guard.num_blocks(task)
        self._entered.append(entered)
        try:
            guard.enter(task)
        except BaseException:  # raised again, to the caller
            # The handler of a signal may raise once the read is open.
            self._entered.remove(entered)
            if guard.num_blocks(task) > before:
                guard.leave(task)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        found = self._entered[-1]
        # The handler of a signal may raise before the read has ended.
        try:
            here = (threading.get_ident(), current_task())
            found = here if here in self._entered else found
            # Noted now, as leave() may apply a newer version.
            self._held = self._guard.held
            self._entered.remove(found)
        finally:
            self._guard.leave(found[1], thread=found[0])

    async def __aenter__(self) -> Self:
        guard = self._guard
        # While a block around this one is open, no update can go first.
        if not guard.is_open_around:
            # A coroutine that runs one forward after the other must give the loop its turns.
            await asyncio.sleep(0)
            while guard.turn_left > 0:  # noqa: ASYNC110 - other threads do not wake a loop
                await asyncio.sleep(_PAUSE_SECONDS)
            guard.note_overlap()
        self._note_around(True)
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(exc_type, exc, traceback)
        self._note_around(self._guard.holds(current_task()))

    def _note_around(self, is_inside: bool) -> None:
        """Note if this task is inside a block of the guard, also for tasks that it starts."""
        if (task := current_task()) is not None:
            here = (id(self._guard), weakref.ref(task))
            around = [each for each in TASKS_AROUND.get() if each != here and each[1]() is not None]
            TASKS_AROUND.set((*around, here) if is_inside else tuple(around))


def is_held_by_caller(guard: Guard) -> bool:
    """Return True if this very task holds a read, or the thread that waits for this task does.

    Of two tasks on one loop, one may wait for an update that the read of the other holds back; but
    a task that waits inside its own read waits for ever.
    """
    return id(guard) in _waiting.get() or guard.holds(current_task())


@contextlib.contextmanager
def on_behalf_of_reader(guard: Guard) -> Iterator[None]:
    """Mark calls inside this block as run for this thread, which reads and waits for their end."""
    token = _waiting.set((*_waiting.get(), id(guard)))
    try:
        yield
    finally:
        _waiting.reset(token)


class Guarded:
    """A function each call of which is a read. Copies and pickles as the function itself.

    Args:
        guard: Keeps updates out during a call.
        function: The function, or a coroutine function, whose coroutine is awaited inside the read.
        name: Name of the function in errors.

    Raises:
        ConfigError: ``function`` cannot be called, or is a generator function; a call that returns
            a generator, a future or a task raises the same.
    """

    def __init__(self, guard: Guard, function: Any, name: str = "function") -> None:
        if not callable(function):
            raise ConfigError(f"{name!r} cannot be guarded: there is no such function")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise _generates(name)
        functools.update_wrapper(self, function, updated=())
        self._guard, self._function, self._name = guard, function, name
        self._is_async = inspect.iscoroutinefunction(function)
        if self._is_async and sys.version_info >= (3, 12):
            inspect.markcoroutinefunction(self)
        elif self._is_async:
            self._is_coroutine = vars(asyncio.coroutines)["_is_coroutine"]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        bind = getattr(self._function, "__get__", None)
        if bind is None:
            return self
        return Guarded(self._guard, bind(instance, owner), self._name)

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function while no update is applied."""
        if self._is_async:
            return self._wait(self._function(*args, **kwargs))
        frame = sys._getframe()
        # The frame ends the read if Ctrl-C comes before leave().
        self._guard.enter(frame)
        try:
            result = self._function(*args, **kwargs)
        finally:
            self._guard.leave(frame)
            del frame
        # An `async def` below a decorator gives a coroutine.
        if isinstance(result, Coroutine):
            return self._wait(result)
        if isinstance(result, Generator | AsyncGenerator):
            raise _generates(self._name)
        if isinstance(result, Awaitable | Future):
            raise ConfigError(
                f"{self._name!r} returned a {type(result).__name__}, whose work goes on after the "
                "call: guard the function that does the work, or await it in an `async def`"
            )
        return result

    async def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await a coroutine of the function inside a read."""
        try:
            async with Reading(self._guard):
                return await coroutine
        finally:
            # No read may have begun: Python warns of a coroutine that is dropped before it runs.
            coroutine.close()

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return itself, (self._function,)


def _generates(name: str) -> ConfigError:
    return ConfigError(f"{name!r} is a generator: read in it, `with scheme.reading():`")


class _Automatic(Guarded):
    """A method that is a read although the user did not ask for it, so that it must not disturb.

    Generators and awaitables that the method returns go on unguarded, with a warning, and the read
    ends if the method waits for an update.
    """

    def __init__(self, guard: Guard, function: Any, name: str = "function") -> None:
        functools.update_wrapper(self, function, updated=())
        self._guard, self._function, self._name = guard, function, name

    @automatic
    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method while no update is applied."""
        frame, began, guard = sys._getframe(), time.monotonic(), self._guard
        guard.note_call(self._name, began)
        guard.enter(frame)
        try:
            result = self._function(*args, **kwargs)
        finally:
            if time.monotonic() - began > _LONG_SECONDS and guard.has_news:
                _warn_once(guard, self._name, *_LONG)
            guard.leave(frame)
            del frame
        if isinstance(result, Generator | AsyncGenerator | Awaitable | Future):
            _warn_once(guard, self._name, *_GOES_ON)
        return result


_LONG = "kept an update waiting", "opts out, and reading() guards a part of it"
_GOES_ON = "goes on after its call, unguarded", "opts out; read inside, with reading()"
_warned: weakref.WeakKeyDictionary[Guard, set[str]] = weakref.WeakKeyDictionary()


def _warn_once(guard: Guard, name: str, what: str, advice: str) -> None:
    """Warn once that an automatic read held an update back for long, or goes on unguarded."""
    warned = _warned.setdefault(guard, set())
    if name not in warned:
        warned.add(name)
        warnings.warn(
            f"{name}(), which is a read although nobody named it, {what}: "
            f"init_on_receiver(methods=()) {advice}",
            stacklevel=3,
        )


def warn_of_long_calls(guard: Guard) -> None:
    """Warn once of each automatic read that has kept an update waiting for long, and goes on."""
    for name in guard.calls_since(time.monotonic() - _LONG_SECONDS):
        _warn_once(guard, name, *_LONG)


def _automatic_names(model: nn.Module) -> list[str]:
    """Return the public methods that the user's classes define, if a model has no forward.

    If it has one, return ``__call__`` if they define that: it may call parts beside the forward.
    """
    own, has_forward = type(model).__module__.partition(".")[0], not has_no_forward(model)
    names: dict[str, None] = {}
    # Classes of an installed package are the user's only if the model's own class is of it, too.
    for kind in type(model).__mro__:
        package = kind.__module__.partition(".")[0]
        if package != "torch" and (package == own or not _is_installed(kind)):
            names |= dict.fromkeys(_public_methods(model, kind))
    return [name for name in names if name == "__call__"] if has_forward else list(names)


def _public_methods(model: nn.Module, kind: type) -> list[str]:
    """Return the public methods that a class of a model adds to those of every module."""
    return [
        name
        for name, value in vars(kind).items()
        if inspect.isfunction(value)
        and (name == "__call__" or not (name.startswith("_") or hasattr(nn.Module, name)))
        and getattr(model, name, None) is not None
    ]


def _is_installed(kind: type) -> bool:
    """Return True if a class is of Python or of an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    places = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return kind.__module__ == "builtins" or bool(file and file.startswith(tuple(places)))


class Methods:
    """The methods of a model whose calls are reads, as its forward passes are.

    Args:
        guard: Keeps updates out during a call.
        names: Names of the methods; ``None`` for the public methods of a model without a forward.
        log: Called with a sentence that lists these public methods.
    """

    def __init__(
        self,
        guard: Guard,
        names: Sequence[str] | None,
        log: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._guard = guard
        self._names = names
        self._log = log
        self._wrapped: list[tuple[nn.Module, type]] = []

    def check(self, model: nn.Module) -> None:
        """Raise :class:`~aiosync.ConfigError` if one of the methods cannot be guarded."""
        for name in self._names or ():
            method = getattr(model, name, None)
            if isinstance(method, nn.Module):
                raise ConfigError(
                    f"{name!r} is a module in the model, and no method: name the method that "
                    f"calls it, or call scheme.guarded(model.{name})"
                )
            Guarded(self._guard, method, name)
            _owner(model, name)

    def prepare(self, model: nn.Module) -> None:
        """Do the part of :meth:`wrap` that may fail, while the model before it stays guarded."""
        self.check(model)
        for name in self._names or ():
            self._class_for(_owner(model, name), name)

    def wrap(self, model: nn.Module | None) -> None:
        """Guard the methods of this model, and no longer those of the model before it."""
        self._unwrap()
        if model is None:
            return
        self.check(model)
        names, wrapper = self._names, Guarded
        if names is None:
            compiled = getattr(model, "_orig_mod", model)
            names, wrapper = _automatic_names(compiled), _Automatic
        for name in names:
            owner = _owner(model, name)
            kind = self._class_for(owner, name)
            if kind is None:
                return
            self._wrapped.append((owner, kind))
            guards = vars(kind)[_GUARDS].setdefault(name, {})
            guards[self._guard] = wrapper
            setattr(kind, name, _attribute(kind, name, guards))
        if names and wrapper is _Automatic:
            why = "has no forward()" if has_no_forward(compiled) else "has a __call__() of its own"
            self._log(
                f"a {type(model).__name__} {why}, so calls of its methods are reads: "
                f"{', '.join(names)}; methods=[...] of init_on_receiver() chooses others, () none"
            )

    def _class_for(self, owner: nn.Module, name: str) -> type | None:
        """Return the class of its own of a module, made if need be; ``None`` if it can have none.

        That is an error only if the user named the methods.
        """
        try:
            kind, known = type(owner), vars(type(owner)).get(_OWNER)
            return kind if known is not None and known() is owner else _own_class(owner)
        except Exception as exc:  # of the user's metaclass or registry
            if self._names is not None:
                raise ConfigError(f"{name!r} of a {type(owner).__name__}: {exc}") from exc
            return None

    def _unwrap(self) -> None:
        """Stop entering this guard; give a module its class back if no guard is left."""
        while self._wrapped:
            owner, kind = self._wrapped.pop()
            names = vars(kind)[_GUARDS]
            for guards in names.values():
                guards.pop(self._guard, None)
            if type(owner) is kind and not any(names.values()):
                object.__setattr__(owner, "__class__", kind.__bases__[-1])


# Attributes of a class that belongs to one module: the guards that each method enters, and a weak
# reference to the module.
_GUARDS, _OWNER = "_aiosync_guards", "_aiosync_owner"


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module that has a method: the model, or the module inside a wrapper."""
    try:
        inspect.getattr_static(model, name)
    except AttributeError:
        method = inspect.unwrap(getattr(model, name), stop=lambda each: hasattr(each, "__self__"))
        owner = getattr(method, "__self__", None)
        if isinstance(owner, nn.Module):
            return owner
        raise ConfigError(f"{name!r} is no method of the model: call scheme.guarded()") from None
    return model


class _Unnoticed(nn.Module):
    """First base of a module's own class, which the user's ``__init_subclass__()`` is not told."""

    def __init_subclass__(cls, **options: object) -> None:
        """Call none of the bases."""


def _own_class(module: nn.Module) -> type:
    """Give a module a class of its own, in which its methods are guarded.

    An attribute of the module itself under the name of such a method stays. A copy of the module
    computes with its own weights.
    """
    base: Any = type(module)
    # Code may make a module of the class that belongs to another one.
    if _GUARDS in vars(base):
        base = base.__bases__[-1]

    # A copy is not guarded.
    def reduce(self: object, protocol: int) -> Any:
        # Later protocols insist on the class.
        found = base.__reduce_ex__(self, min(protocol, 1))
        if isinstance(found, str):
            return found
        make, args, *state = found
        return make, tuple(base if each is kind else each for each in args), *state

    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"__reduce_ex__": reduce, _GUARDS: {}, _OWNER: weakref.ref(module)}
    kind: type = type(base)(base.__name__, (_Unnoticed, base), names)
    object.__setattr__(module, "__class__", kind)
    return kind


def _attribute(kind: type, name: str, guards: dict[Guard, type[Guarded]]) -> property:
    """Return a property that gives a method, or the module's own attribute, with its guards."""
    module = vars(kind)[_OWNER]

    def find(self: Any) -> Any:
        own = vars(self)
        found = own[name] if name in own else getattr(super(kind, self), name)
        # Another module of this class, as of `type(policy)()`, is not guarded.
        if module() is not self:
            return found
        for guard, wrapper in tuple(guards.items()):
            found = wrapper(guard, found, name)
        return found

    @never_traced
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return find(self)(*args, **kwargs)

    def get(self: Any) -> Any:
        return functools.partial(call, self) if torch.compiler.is_compiling() else find(self)

    def put(self: Any, value: object) -> None:
        vars(self)[name] = value

    def delete(self: Any) -> None:
        del vars(self)[name]

    return property(get, put, delete)
