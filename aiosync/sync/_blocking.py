"""Typed descriptors that make a facade class out of an async one.

``send = blocking(aiosync.WeightSyncScheme.send)`` keeps the name, the defaults, the docstring
and the types of the coroutine, and runs it on the portal. Nothing is generated. Must not import
torch or schemes.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

__all__ = ["Facade", "blocking", "direct", "initialising", "on_loop", "option"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


class Facade(Protocol):
    """What the descriptors need of the object that they are used on."""

    _scheme: Any
    _owner: Any

    def _find_owner(self, context: Any) -> None:
        """See who calls the scheme, if it is a library that needs something special."""

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the portal and wait for it."""

    def _at_once(self, function: Callable[[], tuple[Any, Callable[[], None] | None]]) -> Any:
        """Call a function while the portal's loop waits; ``None`` if there is none."""

    def _check(self, what: str) -> None:
        """Raise unless this thread may wait for the scheme."""


class _Method(Generic[_P, _R]):
    """Looks like the method of the async class; calls ``caller`` with the facade."""

    def __init__(self, method: Callable[..., Any], caller: Callable[..., Any]) -> None:
        functools.update_wrapper(caller, method)
        caller.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]  # known
        self._caller = cast("types.FunctionType", caller)
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._caller.__module__ = owner.__module__
        self._caller.__qualname__ = f"{owner.__qualname__}.{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, _P], _R]: ...

    @overload
    def __get__(self, instance: Facade, owner: type) -> Callable[_P, _R]: ...

    def __get__(self, instance: Facade | None, owner: type) -> Callable[..., _R]:
        if instance is None:
            return self._caller
        return types.MethodType(self._caller, instance)


def blocking(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]],
    *,
    at_once: Callable[Concatenate[Any, _P], tuple[_R | None, Callable[[], None] | None]]
    | None = None,
) -> _Method[_P, _R]:
    """A method that runs the coroutine method of the async class and waits for its result.

    Args:
        method: The coroutine method.
        at_once: Does the same where nobody has to be waited for, and is tried first.
    """
    name = method.__name__

    def proceed(self: Facade, /, *args: Any, **kwargs: Any) -> Any:
        self._check(name)
        if at_once is not None and getattr(type(self._scheme), name) is method:
            done = self._at_once(functools.partial(at_once, self._scheme, *args, **kwargs))
            if done is not None:
                return done
        return self._call(getattr(self._scheme, name)(*args, **kwargs))

    def call(self: Facade, /, *args: Any, **kwargs: Any) -> Any:
        if self._owner is not None:
            return self._owner.call(name, functools.partial(proceed, self), args, kwargs)
        return proceed(self, *args, **kwargs)

    return _Method(method, call)


def initialising(method: Callable[Concatenate[Any, _P], _R]) -> _Method[_P, _R]:
    """A method that gives the scheme its role: ``init_on_sender`` or ``init_on_receiver``."""
    name = method.__name__

    def proceed(self: Facade, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._scheme, name)(*args, **kwargs)

    def call(self: Facade, /, *args: Any, **kwargs: Any) -> Any:
        self._find_owner(kwargs.get("context", args[1] if len(args) > 1 else None))
        if self._owner is not None:
            return self._owner.call(name, functools.partial(proceed, self), args, kwargs)
        return proceed(self, *args, **kwargs)

    return _Method(method, call)


def on_loop(method: Callable[Concatenate[Any, _P], _R]) -> _Method[_P, _R]:
    """A method that calls the plain method of the async class on the portal's loop."""
    name = method.__name__

    def call(self: Facade, /, *args: Any, **kwargs: Any) -> Any:
        self._check(name)

        async def run() -> Any:
            return getattr(self._scheme, name)(*args, **kwargs)

        return self._call(run())

    return _Method(method, call)


def direct(method: Callable[Concatenate[Any, _P], _R]) -> _Method[_P, _R]:
    """A method that calls the plain method of the async class, on the caller's thread."""
    name = method.__name__

    def call(self: Facade, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._scheme, name)(*args, **kwargs)

    return _Method(method, call)


class option(Generic[_T]):
    """An option of the async scheme, under the same name."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: Facade, owner: type) -> _T: ...

    def __get__(self, instance: Facade | None, owner: type) -> Self | _T:
        if instance is None:
            return self
        value: _T = getattr(instance._scheme, self._name)
        return value

    def __set__(self, instance: Facade, value: _T) -> None:
        setattr(instance._scheme, self._name, value)
