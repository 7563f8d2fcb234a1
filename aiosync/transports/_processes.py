"""Other processes: whether they have ended, and what one that is forked must not keep or lose.

The kernel tells of the end of a process by a descriptor, reaped or not. A child made by ``fork``
inherits every open link of its parent. A copy of the parent's end of a link would keep the peer
from ever seeing the end of the stream, so the child closes its copies as it starts. Memory that
the parent will give back to its peer is copied before. This module imports nothing from aiosync.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

__all__ = [
    "FORKING",
    "OPENING",
    "close_in_child",
    "find_exit_code",
    "has_ended",
    "is_gone",
    "is_no_room",
    "keep_across_fork",
    "open_pidfd",
]

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

FORKING = threading.RLock()
"""Held from before a fork until after it: what is copied for the child stays as it is meanwhile.

Take it to begin or to end reading memory that :func:`keep_across_fork` keeps.
"""

OPENING = threading.RLock()
"""Held during a fork, too: take it to open what is given to :func:`close_in_child` at once."""


class _ForkAware(Protocol):
    def close_after_fork(self) -> None:
        """Close the descriptors of this object without telling the peer."""


class _ForkAwareMemory(Protocol):
    def before_fork(self) -> None:
        """Copy what a child must go on seeing."""


_memory: weakref.WeakSet[_ForkAwareMemory] = weakref.WeakSet()
_open: weakref.WeakSet[_ForkAware | socket.socket] = weakref.WeakSet()


def _keep_memory() -> None:
    for item in list(_memory):
        item.before_fork()


def _close_copies() -> None:
    for item in list(_open):
        if isinstance(item, socket.socket):
            item.close()
        else:
            item.close_after_fork()
    _open.clear()


@functools.cache
def _register() -> None:
    """Have a fork take FORKING, keep the memory, take OPENING; and give both back afterwards.

    A signal's handler may raise in any Python code, and Python only prints what a hook raises. So
    the locks are taken and given back by functions in C, which no handler interrupts once they
    have the lock, each as a hook of its own; and every hook is there twice, as a handler can end
    one of the two. All of them may run again.
    """
    keeping: dict[str, Callable[[], object]]
    keeping = {"before": _keep_memory, "after_in_child": _close_copies}
    # What was registered last runs first before a fork, and last after it.
    for step in (_holding(OPENING), keeping, _holding(FORKING)):
        for _ in range(2):
            os.register_at_fork(**step)


def _holding(lock: Any) -> dict[str, Callable[[], object]]:
    release = lock.release
    return {"before": lock.acquire, "after_in_parent": release, "after_in_child": release}


def close_in_child(item: _ForkAware | socket.socket) -> None:
    """Have a socket closed, or ``item.close_after_fork()`` called, in children forked from now."""
    _register()
    _open.add(item)


def keep_across_fork(item: _ForkAwareMemory) -> None:
    """Have ``item.before_fork()`` called in this process before every fork from now on."""
    _register()
    _memory.add(item)


def open_pidfd(pid: int) -> int:
    """A descriptor that is readable once a process has ended; -1 where there is none to be had.

    That is so where the kernel or a sandbox has no pidfds, where this process has no descriptor
    left, and for a ``pid`` that cannot be one.

    Raises:
        ProcessLookupError: There is no such process any more.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, OverflowError):
        return -1


def has_ended(pidfd: int) -> bool:
    """Whether the process behind a pidfd has ended, reaped or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def find_exit_code(pid: int) -> int | None:
    """The exit code of a child that has ended and was not reaped, negative for a signal's number.

    The child stays for its parent to reap. ``None`` of every other process.
    """
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def is_gone(pid: int) -> bool:
    """Whether a process is known to have ended."""
    try:
        pidfd = open_pidfd(pid)
    except ProcessLookupError:
        return True
    if pidfd < 0:
        return False
    try:
        return has_ended(pidfd)
    finally:
        os.close(pidfd)


def is_no_room(error: object) -> bool:
    """Whether this process, or its host, had no descriptor or memory left for what failed."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM
