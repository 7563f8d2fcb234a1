"""Guards in forked children: they forget the reads of the parent's threads.

Must not import transports.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiosync.schemes.guard import Guard

__all__ = ["reset_in_children"]

_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
_registered = False


def reset_in_children(guard: Guard) -> None:
    """Have the guard forget the threads of the parent in every child that is forked."""
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_reset)
    _guards.add(guard)


def _reset() -> None:
    for guard in list(_guards):
        guard.reset()
