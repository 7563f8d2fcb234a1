"""Files without a name, for memory that processes share. Must not import asyncio or torch."""

from __future__ import annotations

import os
import tempfile

try:
    import fcntl
except ImportError:  # pragma: no cover - no shared segments on this platform
    fcntl = None  # type: ignore[assignment]

__all__ = ["anonymous_file", "has_memory", "take_pages"]


def take_pages(fd: int, offset: int, nbytes: int) -> None:
    """Lengthen the file if need be, and take the pages: no memory later would be a SIGBUS.

    Raises:
        OSError: The system has none left.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, nbytes)
    elif os.fstat(fd).st_size < offset + nbytes:
        os.ftruncate(fd, offset + nbytes)


def has_memory() -> bool:
    """Whether this process may make anonymous shared memory; a sandbox may forbid it."""
    try:
        os.close(anonymous_file())
    except OSError:
        return False
    return hasattr(os, "memfd_create")


def anonymous_file() -> int:
    """A descriptor of an empty file without a name. It can grow, but not shrink.

    Raises:
        OSError: The system gives none.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("aiosync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if fcntl is not None and hasattr(fcntl, "F_ADD_SEALS"):
            # A file that cannot shrink cannot take a mapped page away from a reader.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return fd
    with tempfile.TemporaryFile(prefix="aiosync-") as file:  # pragma: no cover - not Linux
        return os.dup(file.fileno())
