"""Indices of workers, as users give them. Must not import torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from aiosync.errors import ConfigError
from aiosync.wire import MAX_WORKER_IDX

__all__ = ["as_count", "as_index", "as_indices"]


def _as_int(value: Any) -> int:
    """An int, or an integer of numpy or torch.

    Raises:
        TypeError: Something else. Also a truth value: ``worker_ids=True`` never means worker 1.
        RuntimeError: Something else of torch.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        raise TypeError("a bool is not accepted as a number")
    return operator.index(value)


def as_index(name: str, value: Any) -> int:
    """A count, or the index of a worker: also one of numpy's or torch's integers.

    Raises:
        ConfigError: It is not an integer of at least 0, or none that can travel.
    """
    index = as_count(name, value, 0)
    if index > MAX_WORKER_IDX:
        raise ConfigError(f"{name} must be an int of at most {MAX_WORKER_IDX}, got {value!r}")
    return index


def as_count(name: str, value: Any, least: int) -> int:
    """A number of bytes, of connections or the like, which has no upper bound.

    Raises:
        ConfigError: It is not an integer of at least ``least``.
    """
    try:
        count = _as_int(value)
    except (TypeError, RuntimeError):  # torch has a type of its own for what is no integer
        count = least - 1
    if count < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}")
    return count


def as_indices(name: str, value: int | Iterable[int]) -> set[int]:
    """One index, or several.

    Raises:
        ConfigError: Something else.
    """
    try:
        return {_as_int(value)}
    except (TypeError, RuntimeError):
        try:
            several = None if isinstance(value, str) else list(value)  # type: ignore[arg-type]
        except TypeError:  # not all that has __iter__ can be iterated over: a number of torch
            several = None
        if several is None:
            raise ConfigError(f"{name} must be an int or ints, got {value!r}") from None
        return {as_index(f"an index in {name}", each) for each in several}
