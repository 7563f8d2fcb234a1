"""The page of one link through shared memory: three words, and the kernel's locks of slots.

``want`` names the slot that the worker is to compute with, and only the sender writes it; ``holds``
is the version that the worker computes with, and ``bell`` says that somebody there waits: these
only the worker writes. Must not import asyncio, torch or anything above ``transports``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct

from aiosync.transports._anonymous import anonymous_file

try:
    import fcntl
except ImportError:  # pragma: no cover - no shared slots on this platform
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "BELL",
    "HOLDS",
    "PAGE_NBYTES",
    "WANT",
    "Page",
    "can_lock",
    "reopen",
    "try_lock",
    "unlock",
]

PAGE_NBYTES = 4096
"""Bytes of a page, on any machine."""

WANT, HOLDS, BELL = 0, 8, 16
"""Where the words of a page are, counted in words: each has a cache line of its own.

``WANT`` is a count, the last byte of a segment's id, and in the last byte the number of a slot;
0 for none yet. ``HOLDS`` is a version, ``BELL`` 0 or 1.
"""

_FLOCK = struct.Struct("hhqqi4x")


def can_lock() -> bool:
    """Whether this process can lock slots; without, no worker reads them in place."""
    return hasattr(fcntl, "F_OFD_SETLK") and os.path.exists("/proc/self/fd")


def reopen(fd: int, flags: int) -> int:
    """Another open file description of the same file, to which locks belong.

    Raises:
        OSError: There is no ``/proc``, or no descriptor left.
    """
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def try_lock(fd: int, index: int, *, exclusive: bool) -> bool:
    """Lock a slot, unless another description has a lock that excludes it. Never waits."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, index, 1, 0))
    except BlockingIOError:
        return False
    return True


def unlock(fd: int, index: int) -> None:
    """Give the lock of a slot back. Idempotent."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, index, 1, 0))


class Page:
    """One side's mapping of the page of a link.

    Args:
        fd: Its file; mapped, and not kept.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_NBYTES)
        self.words: memoryview = memoryview(self._map).cast("Q")

    @classmethod
    def make(cls) -> tuple[Page, int]:
        """A new page, and the descriptor of its file, which the caller closes.

        Raises:
            OSError: The system has no memory or descriptor left.
        """
        fd = anonymous_file()
        try:
            os.ftruncate(fd, PAGE_NBYTES)
            if hasattr(fcntl, "F_ADD_SEALS"):  # else whoever cuts it ends the other side
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd), fd
        except BaseException:  # goes on to the caller
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap it. Idempotent; whoever still looks at :attr:`words` keeps it mapped."""
        with contextlib.suppress(BufferError):
            self.words.release()
            self._map.close()
