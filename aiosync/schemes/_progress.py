"""How far the workers of a sender are, and waiting for it. Must not import torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiosync.errors import AiosyncError, PartialSyncError, SyncTimeout
from aiosync.protocol import Outcome
from aiosync.schemes._workers import Workers

__all__ = ["Progress"]

_REMEMBERED = 16  # versions of each worker


class Progress:
    """What can be waited for at a sender.

    Args:
        workers: The workers, and the word that something has changed.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        # Of each worker, the versions that it did not get or refused, and why; the newest ones.
        self._failed: dict[int, dict[int, AiosyncError]] = {}

    def note(self, worker_idx: int, outcome: Outcome) -> None:
        """Remember a version that failed."""
        if outcome.error is not None:
            versions = self._failed.setdefault(worker_idx, {})
            versions[outcome.version] = outcome.error
            while len(versions) > _REMEMBERED:
                del versions[min(versions)]

    def _failures(self, version: int) -> dict[int, AiosyncError]:
        """The workers that have failed at this version or a newer one, and have none of it."""
        found = {}
        for idx, versions in self._failed.items():
            peer = self._workers.peers.get(idx)
            if peer is not None:
                for old in [each for each in versions if each <= peer.received_version]:
                    del versions[old]
                if peer.received_version >= version:
                    continue
            newer = [each for each in versions if each >= version]
            if newer:
                found[idx] = versions[min(newer)]
        return found

    async def wait_applied(self, version: int, *, timeout: float | None, late: SyncTimeout) -> int:
        """Wait until every subscriber has applied at least ``version``."""

        def reached() -> bool:
            subscribers = self._workers.subscribers
            # With nobody there, nobody has it: who comes later gets it.
            return bool(subscribers) and all(peer.outbox.applied >= version for peer in subscribers)

        await self.wait_until(reached, timeout=timeout, late=late)
        return min(peer.outbox.applied for peer in self._workers.subscribers)

    async def wait_staged(self, version: int, *, timeout: float | None, late: SyncTimeout) -> int:
        """Wait until every subscriber has all of at least ``version``, applied or not."""

        def reached() -> bool:
            subscribers = self._workers.subscribers
            failed = self._failures(version)
            if failed:
                acked = [each.worker_idx for each in subscribers if each.outbox.applied >= version]
                raise PartialSyncError(acked=acked, failed=failed, version=version)
            # With nobody there, nobody has it: who comes later gets it.
            return bool(subscribers) and all(
                peer.received_version >= version for peer in subscribers
            )

        await self.wait_until(reached, timeout=timeout, late=late)
        return min(peer.received_version for peer in self._workers.subscribers)

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
