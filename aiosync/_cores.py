"""How many cores there are to use. Must not import anything of aiosync."""

from __future__ import annotations

import os
import sys

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """How many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # pragma: no cover - the tests run on Linux
