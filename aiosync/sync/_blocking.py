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
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    overload,
)

__all__ = [
    "Facade",
    "Twin",
    "attribute",
    "blocking",
    "constructor",
    "direct",
    "initialising",
    "on_loop",
]

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


class Twin(Generic[_P, _R]):
    """Looks like the method of the async class, and calls it its own way.

    Args:
        method: Of the async class.
        way: Calls it, given the facade and the arguments.
    """

    def __init__(self, method: Callable[..., Any], way: Callable[..., Any]) -> None:
        def call(self: Facade, /, *args: Any, **kwargs: Any) -> Any:
            return way(self, method, args, kwargs)

        functools.update_wrapper(call, method)
        call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]  # known
        self.way = way
        self._call = cast("types.FunctionType", call)
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._call.__module__ = owner.__module__
        self._call.__qualname__ = f"{owner.__qualname__}.{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, _P], _R]: ...

    @overload
    def __get__(self, instance: Facade, owner: type) -> Callable[_P, _R]: ...

    def __get__(self, instance: Facade | None, owner: type) -> Callable[..., _R]:
        return self._call if instance is None else types.MethodType(self._call, instance)


def blocking(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]], *, at_once: str = ""
) -> Twin[_P, _R]:
    """A method that runs the coroutine method of the async class and waits for its result.

    Args:
        method: The coroutine method.
        at_once: Name of a method that does the same where nobody has to be waited for; it is
            tried first.
    """

    def way(self: Facade, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = method.__name__

        def proceed(*args: Any, **kwargs: Any) -> Any:
            self._check(name)
            scheme = self._scheme
            if at_once and getattr(type(scheme), name) is method:
                function = functools.partial(getattr(scheme, at_once), *args, **kwargs)
                done = self._at_once(function)
                if done is not None:
                    return done
            return self._call(getattr(scheme, name)(*args, **kwargs))

        if self._owner is None:
            return proceed(*args, **kwargs)
        return self._owner.call(name, proceed, args, kwargs)

    return Twin(method, way)


def initialising(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """A method that gives the scheme its role: ``init_on_sender`` or ``init_on_receiver``."""

    def way(self: Facade, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._find_owner(kwargs.get("context", args[1] if len(args) > 1 else None))
        proceed = getattr(self._scheme, method.__name__)
        if self._owner is None:
            return proceed(*args, **kwargs)
        return self._owner.call(method.__name__, proceed, args, kwargs)

    return Twin(method, way)


def on_loop(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """A method that calls the plain method of the async class on the portal's loop."""

    def way(self: Facade, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._check(method.__name__)

        async def run() -> Any:
            return getattr(self._scheme, method.__name__)(*args, **kwargs)

        return self._call(run())

    return Twin(method, way)


def direct(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """A method that calls the plain method of the async class, on the caller's thread."""

    def way(self: Facade, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return getattr(self._scheme, method.__name__)(*args, **kwargs)

    return Twin(method, way)


def constructor(
    cls: Callable[_P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:
    """An ``__init__`` with the options of the async class."""

    def decorate(function: Callable[..., None]) -> Callable[Concatenate[Any, _P], None]:
        original: Any = cls
        function.__signature__ = inspect.signature(original.__init__)  # type: ignore[attr-defined]  # known
        return function

    return decorate


class attribute(property, Generic[_T]):
    """An option or a property of the async scheme, under the same name.

    Args:
        original: The property of the async class; or the description of an option.
    """

    def __init__(self, original: object) -> None:
        self._original = original

    def __set_name__(self, owner: type, name: str) -> None:
        def read(facade: Facade) -> Any:
            return getattr(facade._scheme, name)

        def write(facade: Facade, value: Any) -> None:
            setattr(facade._scheme, name, value)

        original = self._original
        if isinstance(original, property):
            read.__annotations__ = original.fget.__annotations__
        elif isinstance(original, str):
            own = owner.__annotations__[name].removeprefix("attribute[").removesuffix("]")
            read.__annotations__ = {"return": own}
        else:  # an option of both classes
            read.__annotations__ = {"return": getattr(original, "annotation", Any)}
        super().__init__(read, None if getattr(original, "fset", write) is None else write)
        self.__doc__ = original if isinstance(original, str) else original.__doc__

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: type) -> Self: ...

        @overload
        def __get__(self, instance: object, owner: type) -> _T: ...

        def __get__(self, instance: object, owner: type | None = None) -> Self | _T: ...

        def __set__(self, instance: Any, value: _T) -> None: ...
