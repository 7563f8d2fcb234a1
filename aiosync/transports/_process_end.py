"""The end of other processes, which the kernel reports through descriptors.

It does so even before a process is reaped. This module imports nothing from aiosync.
"""

from __future__ import annotations

import os
import select

__all__ = ["find_exit_code", "has_ended", "is_gone", "open_pidfd"]


def open_pidfd(pid: int) -> int:
    """Return a pidfd, a descriptor that is readable once a process has ended, or -1 without one.

    There is none if the kernel or a sandbox has no pidfds, if this process has no descriptor left,
    or if ``pid`` cannot be the id of a process.

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
    """Return True if the process of a pidfd has ended, even if it was not reaped."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def find_exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has ended and was not reaped; ``None`` otherwise.

    The code is negative, the number of a signal, if a signal ended the child. The child is not
    reaped.
    """
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def is_gone(pid: int) -> bool:
    """Return True if a process is known to have ended."""
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
