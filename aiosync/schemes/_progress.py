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
        """The workers that have failed at this version or a newer one."""
        found = {}
        for idx, versions in self._failed.items():
            peer = self._workers.peers.get(idx)
            if peer is not None:
                for old in [each for each in versions if each <= peer.visible]:
                    del versions[old]
            newer = [each for each in versions if each >= version]
            if newer:
                found[idx] = versions[min(newer)]
        return found

    def _raise(self, version: int, failed: dict[int, AiosyncError]) -> None:
        if failed:
            there = self._workers.subscribers
            acked = [each.worker_idx for each in there if each.visible >= version]
            raise PartialSyncError(acked=acked, failed=failed, version=version)

    async def wait_applied(self, version: int, *, timeout: float | None, late: SyncTimeout) -> int:
        """Wait until every subscriber has applied at least ``version``."""

        def reached() -> bool:
            subscribers = self._workers.subscribers
            refused = self._failures(version)
            # What is on its way to a worker that refused one may be what is waited for.
            late = {
                each.worker_idx
                for each in subscribers
                if each.outbox.is_idle and each.visible < version
            }
            self._raise(version, {idx: refused[idx] for idx in refused.keys() & late})
            # With nobody there, nobody has it: who comes later gets it.
            return bool(subscribers) and all(peer.visible >= version for peer in subscribers)

        await self.wait_until(reached, timeout=timeout, late=late)
        # Somebody may have come or gone since.
        found = [peer.visible for peer in self._workers.subscribers]
        return max(version, min(found, default=version))

    async def wait_staged(self, version: int, *, timeout: float | None, late: SyncTimeout) -> int:
        """Wait until every subscriber has all of at least ``version``, applied or not."""

        def reached() -> bool:
            subscribers = self._workers.subscribers
            have = {each.worker_idx for each in subscribers if each.received_version >= version}
            failed = self._failures(version)
            self._raise(version, {idx: failed[idx] for idx in failed.keys() - have})
            # With nobody there, nobody has it: who comes later gets it.
            return bool(subscribers) and all(
                peer.received_version >= version for peer in subscribers
            )

        await self.wait_until(reached, timeout=timeout, late=late)
        found = [peer.received_version for peer in self._workers.subscribers]
        return max(version, min(found, default=version))

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout: float | None, late: SyncTimeout
    ) -> None:
        """Wait for something that workers change."""
        self._workers.check()
        if condition():
            await asyncio.sleep(0)  # answers come on this loop, also where nobody has to wait
            return
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._workers.check()
                    if condition():
                        return
                    await self._workers.changed.wait()
        except TimeoutError as exc:
            raise late from exc
