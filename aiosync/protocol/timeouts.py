"""What a user may pass as a time.

This module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from aiosync.errors import ConfigError

__all__ = [
    "validate_seconds",
    "validate_timeout",
]


def _is_seconds(value: Any) -> bool:
    """Whether this is a real number that deadlines can be made of; infinity counts as one."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def validate_timeout(timeout: Any) -> None:
    """Check what a call was given as its timeout, before it does anything.

    A NaN is neither before nor after any time: it would wait for ever. What is negative is most
    often a mistake in the caller's sums; 0 asks for what is there already.

    Raises:
        ConfigError: It is neither ``None`` nor a real number of at least 0.
    """
    if timeout is not None and not (_is_seconds(timeout) and timeout >= 0):
        raise ConfigError(
            f"timeout is {timeout!r}: pass seconds as a number of at least 0, math.inf to wait for "
            "ever, or None"
        )


def validate_seconds(
    name: str, value: Any, *, zero: bool = False, endless: bool = False, none: bool = False
) -> None:
    """Check an option that is a time.

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
    if _is_seconds(value) and (value > 0 or (zero and value == 0)):
        if endless or not math.isinf(value):
            return
    wanted = "seconds of at least 0" if zero else "positive seconds"
    raise ConfigError(f"{name} must be {wanted}{' or None' if none else ''}, got {value!r}")
