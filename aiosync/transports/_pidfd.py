"""The ends of other processes, as the kernel tells of them: by a descriptor, reaped or not.

Who watches: the framed stream of a link, and ``sender.workers`` before there is one.

Must not import asyncio, torch, nor anything else of aiosync.
"""

from __future__ import annotations

import os
import select

__all__ = ["has_ended", "is_gone", "open_pidfd"]


def open_pidfd(pid: int) -> int:
    """A descriptor that is readable once a process has ended; -1 where there is none to be had.

    That is so where the system, this kernel or a sandbox has no pidfds, where this process has no
    descriptor left, and for a ``pid`` that cannot be one.

    Raises:
        ProcessLookupError: There is no such process any more.
    """
    if not hasattr(os, "pidfd_open"):
        return -1
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


def is_gone(pid: int) -> bool:
    """Whether a process is known to have ended; without pidfds only one that was reaped is."""
    try:
        pidfd = open_pidfd(pid)
        if pidfd < 0 and not hasattr(os, "pidfd_open"):
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's
    if pidfd < 0:
        return False
    try:
        return has_ended(pidfd)
    finally:
        os.close(pidfd)
