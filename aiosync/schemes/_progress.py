"""How far the workers of a sender are, and waiting for it. Must not import torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiosync.errors import PartialSyncError, SyncTimeout
from aiosync.protocol import Outcome
from aiosync.schemes._peer import Peer
from aiosync.schemes._workers import Workers

__all__ = ["Progress"]


class Progress:
    """What can be waited for at a sender.

    Args:
        workers: The workers, and the word that something has changed.
        subscribers: Those that get every update.

    Attributes:
        failed: The last version that failed at each worker, and why.
    """

    def __init__(self, workers: Workers, subscribers: Callable[[], Sequence[Peer]]) -> None:
        self._workers = workers
        self._subscribers = subscribers
        self.failed: dict[int, Outcome] = {}

    async def wait_applied(self, version: int, *, timeout: float | None, late: SyncTimeout) -> int:
        """Wait until every subscriber has applied at least ``version``."""

        def reached() -> bool:
            return all(peer.outbox.applied >= version for peer in self._subscribers())

        await self.wait_until(reached, timeout=timeout, late=late)
        applied = (peer.outbox.applied for peer in self._subscribers())
        return min(applied, default=self._workers.clock.current)

    async def wait_staged(self, version: int, *, timeout: float | None, late: SyncTimeout) -> int:
        """Wait until every subscriber has all of at least ``version``, applied or not."""

        def reached() -> bool:
            failed = {
                idx: outcome.error
                for idx, outcome in self.failed.items()
                if outcome.version == version and outcome.error is not None
            }
            if failed:
                acked = (p.worker_idx for p in self._subscribers() if p.outbox.applied >= version)
                raise PartialSyncError(acked=acked, failed=failed, version=version)
            return all(peer.received_version >= version for peer in self._subscribers())

        await self.wait_until(reached, timeout=timeout, late=late)
        received = (peer.received_version for peer in self._subscribers())
        return min(received, default=self._workers.clock.current)

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout: float | None, late: SyncTimeout
    ) -> None:
        """Wait for something that workers change."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    changed = self._workers.changed
                    self._workers.check()
                    if condition():
                        return
                    await changed.wait()
        except TimeoutError as exc:
            raise late from exc
