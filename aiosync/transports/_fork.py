"""Descriptors that a forked child must not keep.

A child made by ``fork`` inherits every open link of its parent. A copy of the parent's end of a
link would keep the peer from ever seeing the end of the stream, so the child closes its copies
as it starts. This module imports nothing from aiosync.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["close_in_child"]


class _ForkAware(Protocol):
    def close_after_fork(self) -> None:
        """Close the descriptors of this object without telling the peer."""


_open: weakref.WeakSet[_ForkAware] = weakref.WeakSet()
_registered = False


def _after_fork_in_child() -> None:
    for item in list(_open):
        item.close_after_fork()
    _open.clear()


def close_in_child(item: _ForkAware) -> None:
    """Have ``item.close_after_fork()`` called in every child that is forked from now on."""
    global _registered
    if not _registered:
        os.register_at_fork(after_in_child=_after_fork_in_child)
        _registered = True
    _open.add(item)
