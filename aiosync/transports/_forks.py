"""The descriptors and memory that a forked child inherits.

A child made by ``fork`` inherits every open link of its parent. A copy of the parent's end of a
link would keep the peer from ever seeing the end of the stream, so the child closes its copies as
it starts. Memory that the parent will give back to its peer is copied before the fork. This module
imports nothing from aiosync.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

__all__ = [
    "FORKING",
    "OPENING",
    "close_in_child",
    "keep_across_fork",
    "new_socket",
]

FORKING = threading.RLock()
"""Lock that a fork holds from before it until after it, so that memory copied for the child stays.

Take it to begin or to end reading memory that :func:`keep_across_fork` keeps.
"""

OPENING = threading.RLock()
"""Lock that a fork holds as well. Take it to open a descriptor and to give it to
:func:`close_in_child`, so that no fork comes in between."""


class _ForkAware(Protocol):
    def close_after_fork(self) -> None:
        """Close the descriptors of this object without telling the peer."""


class _ForkAwareMemory(Protocol):
    def before_fork(self) -> None:
        """Copy the memory that a child must go on seeing as it is."""


_memory: weakref.WeakSet[_ForkAwareMemory] = weakref.WeakSet()
_open: weakref.WeakSet[_ForkAware | socket.socket] = weakref.WeakSet()


def _keep_memory() -> None:
    """Copy the registered memory, in the parent before a fork."""
    for item in list(_memory):
        item.before_fork()


def _close_copies() -> None:
    """Close the inherited descriptors, in the child after a fork."""
    for item in list(_open):
        # Another thread may have closed it just before the fork. The others close all the same.
        with contextlib.suppress(OSError):
            _close_copy(item)
    _open.clear()


def _close_copy(item: _ForkAware | socket.socket) -> None:
    if not isinstance(item, socket.socket):
        item.close_after_fork()
        return
    item.close()
    if item.fileno() >= 0:
        # While uvloop connects a socket, close() leaves it open until a turn of the loop.
        os.close(item.detach())


@functools.cache
def _register() -> None:
    """Register the hooks of a fork: take FORKING, copy the memory, take OPENING; release both.

    A signal's handler may raise in any Python code, and Python only prints an exception of a hook.
    So functions in C take and release the locks, because no handler interrupts them once they have
    the lock. Each is a hook of its own, and every hook is registered twice, because a handler can
    end one of the two. Every hook may run twice without harm.
    """
    keeping: dict[str, Callable[[], object]]
    keeping = {"before": _keep_memory, "after_in_child": _close_copies}
    # The hook that was registered last runs first before a fork, and last after it.
    for step in (_holding(OPENING), keeping, _holding(FORKING)):
        for _ in range(2):
            os.register_at_fork(**step)


def _holding(lock: Any) -> dict[str, Callable[[], object]]:
    """Return the hooks that hold the lock from before a fork until after it, on both sides."""
    release = lock.release
    return {"before": lock.acquire, "after_in_parent": release, "after_in_child": release}


def close_in_child(item: _ForkAware | socket.socket) -> None:
    """Close ``item`` in every child that this process forks from now on.

    A socket is closed; of another object ``close_after_fork()`` is called.
    """
    _register()
    _open.add(item)


def new_socket(family: int, kind: int, protocol: int = 0) -> socket.socket:
    """Return a new socket; a child that is forked from now on closes its copy."""
    with OPENING:
        sock = socket.socket(family, kind, protocol)
        close_in_child(sock)
    return sock


def keep_across_fork(item: _ForkAwareMemory) -> None:
    """Call ``item.before_fork()`` in this process before every fork from now on."""
    _register()
    _memory.add(item)
