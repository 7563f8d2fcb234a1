"""Texts of objects whose own methods may raise: for debuggers, logs, and errors of the peer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_every_state", "text_of"]

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


def text_of(error: BaseException | None) -> str:
    """Return the text of a user's exception, or the type's name if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the exception is still to be told
        return type(error).__name__
