"""What users pass as times, counts and indices of workers; and how errors spell times.

This module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable
from numbers import Integral, Rational, Real
from typing import Any

from aiosync.errors import ConfigError
from aiosync.protocol.updates import MAX_VERSION
from aiosync.types import Require
from aiosync.wire import ALIGNMENT, MAX_WORKER_IDX

__all__ = [
    "as_chunk_nbytes",
    "as_count",
    "as_index",
    "as_indices",
    "as_version",
    "seconds_text",
    "validate_require",
    "validate_seconds",
    "validate_timeout",
]


_MAX_SHOWN = 80  # characters


def validate_timeout(timeout: Any) -> None:
    """Check what a call was given as its timeout, before it does anything.

    Raises:
        ConfigError: It is neither ``None`` nor a real number of at least 0; infinity is one.
    """
    validate_seconds("timeout", timeout, zero=True, endless=True, none=True)


def validate_seconds(
    name: str, value: Any, *, zero: bool = False, endless: bool = False, none: bool = False
) -> None:
    """Check an option that is a time.

    A NaN is neither before nor after any time: it would wait for ever.

    Args:
        name: Of the option.
        value: What was given.
        zero: 0 is legal.
        endless: So is infinity.
        none: So is ``None``.

    Raises:
        ConfigError: It is not a real number, or out of range.
    """
    if value is None and none:
        return
    # A fraction is shown in no message: it has no format of numbers.
    exact = isinstance(value, Rational) and not isinstance(value, Integral)
    if isinstance(value, Real) and not (exact or isinstance(value, bool)):
        seconds = math.nan
        with contextlib.suppress(OverflowError):  # an int beyond all floats
            seconds = float(value)
        if (seconds > 0 or (zero and seconds == 0)) and (endless or not math.isinf(seconds)):
            return
    wanted = "seconds of at least 0" if zero else "positive seconds"
    raise ConfigError(f"{name} must be {wanted}{' or None' if none else ''}, got {_show(value)}")


def _show(value: Any) -> str:
    """Return what was given, clipped; an int of thousands of digits has no text at all."""
    try:
        text = repr(value)
    except ValueError:
        text = f"an {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def validate_require(require: Require) -> None:
    """Check what counts as success of a send.

    Args:
        require: ``"all"``; an int of at least 1 for at least that many workers; or a float in
            (0, 1] for at least that fraction of them.

    Raises:
        ConfigError: Something else.
    """
    value: Any = require
    counts = type(value) is int and value >= 1
    shares = type(value) is float and 0 < value <= 1
    if not (counts or shares or (type(value) is str and value == "all")):
        wanted = "'all', an int of at least 1, or a float in (0, 1]"
        raise ConfigError(f"require is {_show(value)}; it must be {wanted}")


def as_index(name: str, value: Any) -> int:
    """A count, or the index of a worker: also one of numpy's or torch's integers.

    Raises:
        ConfigError: It is not an integer of at least 0, or none that can travel.
    """
    index = as_count(name, value, 0)
    if index > MAX_WORKER_IDX:
        shown = _show(value)
        raise ConfigError(f"{name} must be an int of at most {MAX_WORKER_IDX}, got {shown}")
    return index


def as_version(name: str, value: Any, least: int = 0, most: int = MAX_VERSION) -> int:
    """A version, or 0 for none where that is legal.

    Raises:
        ConfigError: It is not an integer from ``least`` to ``most``.
    """
    version = as_count(name, value, least)
    if version > most:
        raise ConfigError(f"{name} is {_show(value)}; it must be at most {most}")
    return version


def as_count(name: str, value: Any, least: int) -> int:
    """A number of bytes, of connections or the like, which has no upper bound.

    Raises:
        ConfigError: It is not an integer of at least ``least``.
    """
    count = least - 1
    # Also an integer of numpy or torch, but ``worker_ids=True`` never means worker 1.
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "torch.bool":
        with contextlib.suppress(TypeError, RuntimeError):  # torch's, for what is no integer
            count = operator.index(value)
    if count < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {_show(value)}")
    return count


def as_chunk_nbytes(name: str, value: Any) -> int:
    """Bytes of a chunk.

    Raises:
        ConfigError: It is not a positive multiple of 64.
    """
    if type(value) is not int or value <= 0 or value % ALIGNMENT:
        shown = _show(value)
        raise ConfigError(f"{name} is {shown}; it must be a positive multiple of {ALIGNMENT}")
    return value


def as_indices(name: str, value: int | Iterable[int]) -> set[int]:
    """One index, or several.

    Raises:
        ConfigError: Something else.
    """
    try:
        several = list(value)  # type: ignore[arg-type]
    except TypeError:  # not all that has __iter__ can be iterated over: a number of torch
        return {as_index(name, value)}
    return {as_index(f"an index in {name}", each) for each in several}


def seconds_text(value: float | None) -> str:
    """How errors spell what is left of a timeout: "25 s" for 24.9999."""
    value = value or 0.0
    return f"{value:.2g} s" if value < 1 else f"{round(value, 1):g} s"
