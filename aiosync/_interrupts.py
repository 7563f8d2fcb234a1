"""Interrupts: exceptions that a signal's handler raised in the middle of other code.

Such an exception is no refusal of an update, and no fault of a link: it goes on to the user.
"""

from __future__ import annotations

import inspect
import signal
import traceback
from typing import Any

__all__ = ["is_interrupt"]


def is_interrupt(error: BaseException) -> bool:
    """Return True if a signal's handler raised this exception, and not the code it interrupted."""
    if isinstance(error, KeyboardInterrupt):
        return True
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if callable(handler):
            handler = inspect.unwrap(getattr(handler, "func", handler))
            if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
                handler = type(handler).__call__
            codes.add(getattr(getattr(handler, "__func__", handler), "__code__", None))
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)
