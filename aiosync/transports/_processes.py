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
from typing import Protocol

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


def _before_fork() -> None:
    FORKING.acquire()
    for item in list(_memory):
        item.before_fork()
    OPENING.acquire()


def _after_fork() -> None:
    OPENING.release()
    FORKING.release()


def _after_fork_in_child() -> None:
    _after_fork()
    for item in list(_open):
        if isinstance(item, socket.socket):
            item.close()
        else:
            item.close_after_fork()
    _open.clear()


@functools.cache
def _register() -> None:
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork,
        after_in_child=_after_fork_in_child,
    )


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
