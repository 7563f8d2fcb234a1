"""Updates that a worker passes on: to workers of its own, for example.

Whoever owns the model may have copies of it elsewhere. Until they have an update, too, the
trainer is not told that it was applied. Must not import transports.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiosync._tasks import TaskOwner

__all__ = ["Relay", "Relaying"]

Relay: TypeAlias = Callable[[int, int], Awaitable[None]]
"""Called with the epoch and the version that the model has now."""


class Relaying:
    """Passes updates on, one at a time; of those that come meanwhile only the newest.

    Args:
        tasks: Runs it.
        answer: Called with epoch, version and ``None`` or why it could not be passed on.
    """

    def __init__(
        self, tasks: TaskOwner, answer: Callable[[int, int, BaseException | None], None]
    ) -> None:
        self._tasks = tasks
        self._answer = answer
        self._next: tuple[Relay, int, int] | None = None
        self._busy = False

    def pass_on(self, relay: Relay, epoch: int, version: int) -> None:
        """Begin, or go on with this one afterwards."""
        self._next = (relay, epoch, version)
        if not self._busy:
            self._busy = True
            self._tasks.start(self._run(), "aiosync relay")

    async def _run(self) -> None:
        try:
            while self._next is not None:
                (relay, epoch, version), self._next = self._next, None
                try:
                    await relay(epoch, version)
                except Exception as exc:  # noqa: BLE001 - the trainer gets it in the NACK
                    self._answer(epoch, version, exc)
                else:
                    self._answer(epoch, version, None)
        finally:
            self._busy = False
