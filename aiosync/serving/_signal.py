"""Waking those who wait, on whatever loop they do. Must not import anything of aiosync."""

from __future__ import annotations

import asyncio

__all__ = ["Signal"]


class Signal:
    """Like :class:`asyncio.Condition` without a lock, and bound to no loop.

    What is made when a module is imported may be used by one event loop after another.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self) -> None:
        """Wait for the next :meth:`notify`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)

    def notify(self) -> None:
        """Wake everybody who waits now, in the order in which they came."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)
