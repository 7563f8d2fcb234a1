"""What makes a facade class out of an async one: methods, properties and options.

``send = blocking(aiosync.WeightSyncScheme.send)`` keeps the name, the defaults, the docstring
and the types of the coroutine, and runs it on the portal. Nothing is generated. Must not import
torch, nor a scheme.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)

from aiosync.schemes.options import Option

__all__ = [
    "Twin",
    "again",
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

if TYPE_CHECKING:

    class Twin(Generic[_P, _R]):
        """A method of the facade, as checkers of types see it; really a plain function."""

        @overload
        def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, _P], _R]: ...

        @overload
        def __get__(self, instance: object, owner: type) -> Callable[_P, _R]: ...

        def __get__(self, instance: object, owner: type) -> Callable[..., _R]: ...


def _twin(method: Callable[..., Any], way: str) -> Any:
    """A method that looks like one of the async class, and calls it in a way of the facade's.

    Args:
        method: Of the async class.
        way: Name of the facade's method that gets the name and the arguments.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, way)(name, *args, **kwargs)

    call.__module__ = __name__
    vars(call)["way"] = way
    return call


def again(member: object, method: Callable[..., Any]) -> Any:
    """The twin of an override, to be called in the way of an existing twin.

    Returns:
        ``None`` where that is no twin, or the method is not overridden.
    """
    way = getattr(member, "way", None)
    return None if way is None or vars(member)["__wrapped__"] is method else _twin(method, way)


def blocking(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]],
) -> Twin[_P, _R]:
    """A method that runs the coroutine method of the async class and waits for its result."""
    return cast("Twin[_P, _R]", _twin(method, "_wait_for"))


def on_loop(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """A method that calls the plain method of the async class on the portal's loop."""
    return cast("Twin[_P, _R]", _twin(method, "_call_there"))


def initialising(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """A method that gives the scheme its role: ``init_on_sender`` or ``init_on_receiver``."""
    return cast("Twin[_P, _R]", _twin(method, "_initialise"))


def direct(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """A method that calls the plain method of the async class, on the caller's thread."""
    return cast("Twin[_P, _R]", _twin(method, "_pass_on"))


def constructor(
    cls: Callable[_P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:
    """An ``__init__`` with the options of the async class, instead of a stub."""
    original: Any = cls

    @functools.wraps(original.__init__)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        self._adopt(self._async_class(*args, **options))

    return lambda stub: cast("Callable[Concatenate[Any, _P], None]", construct)


class attribute(property, Generic[_T]):
    """An option or a property of the async scheme, under the same name.

    Args:
        original: The property or the option of the async class.
    """

    def __init__(self, original: Any) -> None:
        of_option = isinstance(original, Option)
        name = original.name if of_option else original.fget.__name__

        def read(facade: Any) -> Any:
            return getattr(facade._scheme, name)

        def write(facade: Any, value: Any) -> None:
            setattr(facade._scheme, name, value)

        kind = {"return": original.annotation} if of_option else original.fget.__annotations__
        read.__annotations__ = kind
        super().__init__(read, write if of_option or original.fset is not None else None)
        self.__doc__ = original.__doc__

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: type) -> Self: ...

        @overload
        def __get__(self, instance: object, owner: type) -> _T: ...

        def __get__(self, instance: object, owner: type | None = None) -> Self | _T: ...

        def __set__(self, instance: Any, value: _T) -> None: ...
