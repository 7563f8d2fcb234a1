"""Checks of the times, counts and indices that users pass, and the text of times in errors.

This module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Rational, Real
from typing import Any

from aiosync.errors import ConfigError
from aiosync.protocol.version_order import MAX_VERSION
from aiosync.types import Require
from aiosync.wire import ALIGNMENT, MAX_WORKER_IDX

__all__ = [
    "as_chunk_nbytes",
    "as_count",
    "as_index",
    "as_indices",
    "as_pids",
    "as_version",
    "finite_or_none",
    "seconds_text",
    "validate_require",
    "validate_schemes",
    "validate_seconds",
    "validate_timeout",
]


# Most characters of a value that an error shows.
_MAX_SHOWN = 80
# Linux has no larger process ids.
_MAX_PID = 2**22


def validate_timeout(timeout: Any) -> None:
    """Check the timeout of a call, before the call does anything.

    Raises:
        ConfigError: The timeout is neither ``None`` nor a real number of at least 0; infinity is
            such a number.
    """
    validate_seconds("timeout", timeout, zero=True, endless=True, none=True)


def validate_seconds(
    name: str, value: Any, *, zero: bool = False, endless: bool = False, none: bool = False
) -> None:
    """Check an option that is a time in seconds.

    A NaN is refused: it is neither before nor after any time, so a wait for it would never end.

    Args:
        name: Name of the option, for the error.
        value: The value that the user gave.
        zero: 0 is legal.
        endless: Infinity is legal.
        none: ``None`` is legal.

    Raises:
        ConfigError: The value is not a real number, or is out of range.
    """
    if value is None and none:
        return
    seconds = _as_float(value)
    if (seconds > 0 or (zero and seconds == 0)) and (endless or not math.isinf(seconds)):
        return
    wanted = "seconds of at least 0" if zero else "positive seconds"
    raise ConfigError(f"{name} must be {wanted}{' or None' if none else ''}, got {_show(value)}")


def finite_or_none(seconds: float | None) -> float | None:
    """Return the timeout for a call to which ``None`` means for ever, and infinity means nothing.

    Threads, sockets, Ray and RPC cannot wait for an infinite number of seconds.
    """
    return None if seconds == math.inf else seconds


def _as_float(value: Any) -> float:
    """Return a real number as a float; NaN for any other value."""
    # Fractions are refused: before Python 3.12 they lack the number formats of error texts.
    exact = isinstance(value, Rational) and not isinstance(value, Integral)
    if isinstance(value, Real) and not (exact or isinstance(value, bool)):
        # An int can be larger than every float. It is then refused like a NaN.
        with contextlib.suppress(OverflowError):
            return float(value)
    return math.nan


def _show(value: Any) -> str:
    """Return the text of a value for an error, clipped to 80 characters.

    Python refuses to print an int of thousands of digits; its text names only the type.
    """
    try:
        text = repr(value)
    except ValueError:
        text = f"an {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def validate_require(require: Require) -> None:
    """Check the option that says how many workers have to apply an update.

    Args:
        require: ``"all"``; an int of at least 1 for at least that many workers; or a float in
            (0, 1] for at least that fraction of them.

    Raises:
        ConfigError: The value is none of these.
    """
    value: Any = require
    counts = type(value) is int and value >= 1
    shares = type(value) is float and 0 < value <= 1
    if not (counts or shares or (type(value) is str and value == "all")):
        wanted = "'all', an int of at least 1, or a float in (0, 1]"
        raise ConfigError(f"require is {_show(value)}; it must be {wanted}")


def as_index(name: str, value: Any) -> int:
    """Return the index of a worker, or a number of workers, as an int.

    An integer of numpy or torch is accepted.

    Raises:
        ConfigError: The value is not an integer of at least 0, or is larger than a message can
            carry (:data:`~aiosync.wire.MAX_WORKER_IDX`).
    """
    index = as_count(name, value, 0)
    if index > MAX_WORKER_IDX:
        shown = _show(value)
        raise ConfigError(f"{name} must be an int of at most {MAX_WORKER_IDX}, got {shown}")
    return index


def as_version(name: str, value: Any, least: int = 0, most: int = MAX_VERSION) -> int:
    """Return a version as an int; where ``least`` is 0, 0 stands for no version.

    Raises:
        ConfigError: The value is not an integer from ``least`` to ``most``.
    """
    version = as_count(name, value, least)
    if version > most:
        raise ConfigError(f"{name} is {_show(value)}; it must be at most {most}")
    return version


def as_count(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a number of bytes, connections or the like as an int; ``most`` is its upper bound.

    Raises:
        ConfigError: The value is not an integer of at least ``least``, or larger than ``most``.
    """
    count = least - 1
    # Integers of numpy and torch are accepted. Booleans are not, although they are integers for
    # operator.index(): ``worker_ids=True`` must never mean worker 1.
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "torch.bool":
        # Torch raises RuntimeError where Python raises TypeError: for a value that is no integer.
        with contextlib.suppress(TypeError, RuntimeError):
            count = operator.index(value)
    if count < least or (most is not None and count > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be an int {bounds}, got {_show(value)}")
    return count


def as_names(name: str, value: Any) -> tuple[str, ...]:
    """Return a collection of names.

    Raises:
        ConfigError: The value is no collection of strings, or a single string.
    """
    if isinstance(value, str):
        raise ConfigError(f"{name} must be a list of names: pass [{value!r}]")
    if not isinstance(value, Collection) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{name} must be a list of names, got {_show(value)}")
    return tuple(value)


def as_pids(name: str, value: Any) -> list[int]:
    """Return the process ids of a list of processes, or of their ids.

    Raises:
        ConfigError: The value is no list, or one of its elements is neither a started process nor
            the id of one.
    """
    wanted = f"{name} must be a list of started processes, none of them closed, or of their ids"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConfigError(f"{wanted}, got {_show(value)}")
    pids: list[int] = []
    for each in value:
        pid: Any = None
        # A closed multiprocessing.Process raises this.
        with contextlib.suppress(ValueError):
            pid = getattr(each, "pid", each)
        if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid <= _MAX_PID:
            raise ConfigError(f"{wanted}, got {_show(each)} in it")
        pids.append(pid)
    return pids


def validate_schemes(schemes: Iterable[Any], has: str, text: str) -> None:
    """Check the schemes that ``connect_all()`` is to connect.

    Args:
        schemes: The arguments of the call.
        has: Name of an attribute that these schemes have.
        text: The start of the error, which says what the call takes.

    Raises:
        ConfigError: One of them is no such scheme, but perhaps a list of them.
    """
    for each in schemes:
        if not hasattr(each, has):
            raise ConfigError(f"{text}, got {_show(each)}: of a list pass connect_all(*schemes)")


def as_chunk_nbytes(name: str, value: Any) -> int:
    """Return the size of a chunk in bytes.

    Raises:
        ConfigError: The value is not an int that is a positive multiple of 64.
    """
    if type(value) is not int or value <= 0 or value % ALIGNMENT:
        shown = _show(value)
        raise ConfigError(f"{name} is {shown}; it must be a positive multiple of {ALIGNMENT}")
    return value


def as_indices(name: str, value: int | Iterable[int]) -> set[int]:
    """Return one index, or several, as a set of ints.

    Raises:
        ConfigError: The value is neither an index of a worker nor an iterable of such indices.
    """
    try:
        several = list(value)  # type: ignore[arg-type]
    except TypeError:
        # Only list() can tell: a tensor with one number has __iter__ and cannot be iterated over.
        return {as_index(name, value)}
    return {as_index(f"an index in {name}", each) for each in several}


def seconds_text(value: float | None) -> str:
    """Return the text of a timeout for an error, rounded: "25 s" for 24.9999."""
    value = value or 0.0
    return f"{value:.2g} s" if value < 1 else f"{round(value, 1):g} s"
