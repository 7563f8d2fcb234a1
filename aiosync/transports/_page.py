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
    "EXCLUSIVE",
    "HOLDS",
    "MAX_SLOTS",
    "PAGE_NBYTES",
    "SET_LOCK",
    "SHARED",
    "UNLOCKED",
    "WANT",
    "Page",
    "can_lock",
    "fcntl",
    "reopen",
]

PAGE_NBYTES = 4096
"""Bytes of a page, on any machine."""

WANT, HOLDS, BELL = 0, 8, 16
"""Where the words of a page are, counted in words: each has a cache line of its own.

``WANT`` is a count, the last byte of a segment's id, and in the last byte the number of a slot;
0 for none yet. ``HOLDS`` is a version, ``BELL`` 0 or 1.
"""

MAX_SLOTS = 256
"""Slots of a segment, as a word names them."""

# The kernel's locks belong to open file descriptions; elsewhere nobody may lock, see can_lock().
SET_LOCK: int = getattr(fcntl, "F_OFD_SETLK", -1)
"""Command of ``fcntl()`` that takes one of the next three at a slot's index; never waits."""

_pack = struct.Struct("hhqqi4x").pack
SHARED, EXCLUSIVE, UNLOCKED = (
    tuple(_pack(kind, 0, index, 1, 0) for index in range(MAX_SLOTS))
    for kind in ((fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK) if SET_LOCK >= 0 else (0, 1, 2))
)


def can_lock() -> bool:
    """Whether this process can lock slots; without, no worker reads them in place."""
    return SET_LOCK >= 0 and os.path.exists("/proc/self/fd")


def reopen(fd: int, flags: int) -> int:
    """Another open file description of the same file, to which locks belong.

    Raises:
        OSError: There is no ``/proc``, or no descriptor left.
    """
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


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
