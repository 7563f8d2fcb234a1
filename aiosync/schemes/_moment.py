"""Moments at which a model must not be changed, and waiting on a loop for those at which it may.

Must not import transports.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiosync.schemes._guard_hooks import in_transform

if TYPE_CHECKING:
    from aiosync.schemes.guard import Guard

__all__ = ["is_unfit", "keep_for_readers", "wait_for_readers"]

_PAUSE_SECONDS = 0.005
_HOLD_SECONDS = 0.1


def is_unfit(guard: Guard) -> bool:
    """Whether an update must not be applied here, but by the loop.

    A forward inside a transform begins or ends here. New reads wait for the loop for a moment.
    """
    if not guard.at_read or not in_transform():
        return False
    guard.hold(_HOLD_SECONDS)
    return True


async def wait_for_readers(guard: Guard, seconds: float) -> None:
    """Let the reads of other threads end, for so long at most, while the loop goes on.

    New ones wait until the caller calls ``guard.let_go()``.
    """
    until = time.monotonic() + seconds
    guard.hold(seconds)
    while not guard.is_free() and time.monotonic() < until:  # noqa: ASYNC110 - threads tell nobody
        await asyncio.sleep(_PAUSE_SECONDS)


def keep_for_readers(guard: Guard, memory: object) -> None:
    """Keep something until the reads that there are have ended."""
    kept = [memory]
    guard.submit(kept.clear)
