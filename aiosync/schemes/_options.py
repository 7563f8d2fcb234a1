"""Options of schemes: checked when they are assigned as when they are given to a constructor.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast, overload

from aiosync.errors import ConfigError
from aiosync.protocol import validate_require, validate_seconds
from aiosync.schemes._indices import as_count
from aiosync.types import Limits, Require

__all__ = [
    "Fixed",
    "Option",
    "check_limits",
    "check_require",
    "count",
    "flag",
    "one_of",
    "seconds",
]

_T = TypeVar("_T")


class Option(Generic[_T]):
    """An option that may be assigned.

    It is kept in the object's own dict, under the same name, where pickles find it.

    Args:
        check: Called with the name and the value; returns what is kept, or raises.
    """

    def __init__(self, check: Callable[[str, Any], _T]) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:
        # Left out otherwise: Python then reads the object's dict itself, and a send reads options.
        @overload
        def __get__(self, instance: None, owner: type) -> Self: ...

        @overload
        def __get__(self, instance: object, owner: type) -> _T: ...

        def __get__(self, instance: object, owner: type) -> Self | _T: ...

    def __set__(self, instance: object, value: _T) -> None:
        vars(instance)[self._name] = self._check(self._name, value)


class Fixed:
    """An option that only the constructor takes: a later one would count for nothing.

    It cannot be read either: some are secrets.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        raise AttributeError(
            f"{self._name} cannot be read back: it is only passed to {owner.__name__}()"
        )

    def __set__(self, instance: object, value: Any) -> None:
        raise ConfigError(
            f"{self._name} cannot be assigned: pass it to {type(instance).__name__}()"
        )


def one_of(*values: _T) -> Callable[[str, Any], _T]:
    """One of these values."""
    listed = " or ".join(map(repr, values))

    def check(name: str, value: Any) -> _T:
        if value not in values:
            raise ConfigError(f"{name} must be {listed}, got {value!r}")
        return cast("_T", value)

    return check


def flag(name: str, value: Any) -> bool:
    """A truth value: 0, 1 and numpy's are, ``"no"`` and ``None`` are not."""
    if isinstance(value, str) or value not in (True, False):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def seconds(
    *, zero: bool = False, endless: bool = False, none: bool = False
) -> Callable[[str, Any], Any]:
    """A time; see :func:`aiosync.protocol.validate_seconds`."""

    def check(name: str, value: Any) -> Any:
        validate_seconds(name, value, zero=zero, endless=endless, none=none)
        return value

    return check


def count(least: int) -> Callable[[str, Any], int]:
    """An integer of at least ``least``."""
    return lambda name, value: as_count(name, value, least)


def check_limits(name: str, value: Any) -> Limits | None:
    """What a peer may announce."""
    if value is None or isinstance(value, Limits):
        return value
    raise ConfigError(f"{name} must be aiosync.Limits(...) or None, got {value!r}")


def check_require(name: str, value: Any) -> Require:
    """What counts as success of a send."""
    del name
    validate_require(value)
    return cast("Require", value)
