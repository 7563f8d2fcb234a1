"""Waiting until workers have caught up with what was sent to them. Must not import the receiver."""

from __future__ import annotations

import asyncio

from aiosync._log import Waiting
from aiosync.errors import SyncTimeout
from aiosync.sender.sender import WeightSender

__all__ = ["wait_lag_below"]

# First and longest pause between two looks: workers that take versions from shared memory tell
# nobody.
_LOOK_SECONDS = (0.001, 0.01)


async def wait_lag_below(
    sender: WeightSender, limit: int, *, timeout: float | None, late: SyncTimeout, waiting: Waiting
) -> int:
    """Wait until no worker is ``limit`` or more versions behind.

    Of those only that have something on their way: one that refused what it was sent, or was sent
    nothing, is not waited for.

    Returns:
        How far the slowest one is behind.

    Raises:
        SyncTimeout: Of the type of ``late``, with the names of those that are.
    """
    loop, timer = asyncio.get_running_loop(), None

    def behind() -> dict[int, int]:
        return {link.idx: link.lag for link in sender.workers.subscribers if link.lag >= limit}

    def look(pause: float) -> None:
        nonlocal timer
        sender.copier.ring()  # one that does not compute follows all the same
        sender.workers.changed.notify()
        timer = loop.call_later(pause, look, min(2 * pause, _LOOK_SECONDS[1]))

    look(_LOOK_SECONDS[0])
    try:
        await sender.wait_until(lambda: not behind(), timeout=timeout, late=late, waiting=waiting)
    except SyncTimeout as exc:
        text = ", ".join(f"{idx} by {lag}" for idx, lag in behind().items())
        raise type(late)(f"{late}: behind are workers {text}") from exc.__cause__
    finally:
        if timer is not None:
            timer.cancel()
    return max((link.lag for link in sender.workers.subscribers), default=0)
