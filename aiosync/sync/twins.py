"""Members of a blocking scheme that are those of the scheme on which it stands.

``send = blocking(aiosync.WeightSyncScheme.send)`` keeps the name, the defaults, the docstring and
the types of the method. The object that has such a member keeps the other scheme as ``_scheme``.
Must not import torch or schemes.
"""

from __future__ import annotations

import functools
import inspect
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
    "attribute",
    "blocking",
    "direct",
    "follow_overrides",
    "initialising",
    "mirror_options",
    "on_loop",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

if TYPE_CHECKING:

    class Twin(Generic[_P, _R]):
        """A method of a scheme, as type checkers see it; at run time it is a plain function."""

        @overload
        def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, _P], _R]: ...

        @overload
        def __get__(self, instance: object, owner: type) -> Callable[_P, _R]: ...

        def __get__(self, instance: object, owner: type) -> Callable[..., _R]: ...


def _twin(method: Callable[..., Any], way: str) -> Any:
    """Make a method that looks like one of the other scheme, and calls it.

    Args:
        method: The method of the other scheme's class.
        way: Name of the object's method that gets the name and the arguments.
    """
    name = method.__name__

    # The attributes stay behind: they would make the twin of an abstract method abstract.
    @functools.wraps(method, updated=())
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, way)(name, *args, **kwargs)

    call.__module__ = __name__
    # follow_overrides() makes the twin of an override in the same way.
    vars(call)["remake_twin"] = functools.partial(_twin, way=way)
    return call


def blocking(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]],
) -> Twin[_P, _R]:
    """Make a method that runs the coroutine method of the async class and waits for its result."""
    return cast("Twin[_P, _R]", _twin(method, "_wait_for"))


def on_loop(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """Make a method that calls the plain method of the async class on the portal's loop."""
    return cast("Twin[_P, _R]", _twin(method, "_call_there"))


def initialising(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """Make a method that gives the scheme its role: ``init_on_sender`` or ``init_on_receiver``."""
    return cast("Twin[_P, _R]", _twin(method, "_initialise"))


def direct(method: Callable[Concatenate[Any, _P], _R]) -> Twin[_P, _R]:
    """Make a method that calls the one of the other scheme, on the caller's thread."""
    name = method.__name__

    @functools.wraps(method, updated=())
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._scheme, name)(*args, **kwargs)

    call.__module__ = __name__
    # follow_overrides() makes the twin of an override in the same way.
    vars(call)["remake_twin"] = direct
    return cast("Twin[_P, _R]", call)


class attribute(property, Generic[_T]):
    """An option or a property of the other scheme, under the same name.

    Args:
        original: The property or the option of the other scheme's class.

    Attributes:
        name: Name of both.
    """

    def __init__(self, original: Any) -> None:
        of_option = isinstance(original, Option)
        name = original.name if of_option else original.fget.__name__

        def read(instance: Any) -> Any:
            return getattr(instance._scheme, name)

        def write(instance: Any, value: Any) -> None:
            setattr(instance._scheme, name, value)

        kind = {"return": original.annotation} if of_option else original.fget.__annotations__
        read.__name__, read.__annotations__ = name, kind
        self.name: str = name
        super().__init__(read, write if of_option or original.fset is not None else None)
        self.__doc__ = original.__doc__

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: type) -> Self: ...

        @overload
        def __get__(self, instance: object, owner: type) -> _T: ...

        def __get__(self, instance: object, owner: type | None = None) -> Self | _T: ...

        def __set__(self, instance: Any, value: _T) -> None: ...


def follow_overrides(cls: type, base: type, original: type) -> None:
    """Give a class new twins of the methods that the other scheme's class overrides.

    Args:
        cls: The class, which has the twins of ``base``.
        base: The class that names the methods.
        original: The other scheme's class.
    """
    for name, member in vars(base).items():
        if hasattr(member, "remake_twin") and name not in vars(cls):
            known = vars(member)["__wrapped__"]
            method = getattr(original, name, known)
            if method is not known:
                setattr(cls, name, member.remake_twin(method))


def mirror_options(cls: type) -> None:
    """Replace the options of a class by properties, which have the values of the other scheme."""
    for name in dir(cls):
        option = inspect.getattr_static(cls, name)
        if isinstance(option, Option):
            setattr(cls, name, attribute(option))
