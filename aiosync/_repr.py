"""``repr()`` of objects whose constructor raised, for debuggers and tracebacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_every_state"]

_T = TypeVar("_T")


def in_every_state(method: Callable[[_T], str]) -> Callable[[_T], str]:
    """Decorate a ``__repr__`` so that it works even if attributes were never assigned."""

    @functools.wraps(method)
    def show(self: _T) -> str:
        try:
            return method(self)
        except AttributeError:
            return f"<{type(self).__name__}: not constructed>"

    return show
