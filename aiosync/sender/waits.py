"""Waits of the trainer for versions of its workers. Must not import the receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from aiosync._log import Waiting
from aiosync.errors import AiosyncError, PartialSyncError, SyncTimeout
from aiosync.rendezvous.dialer import is_final
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.worker_record import WorkerRecord

__all__ = ["WorkerWaits"]

# Poll interval (first, longest) for workers that send no acknowledgements.
_POLL_SECONDS = (0.001, 0.01)


class WorkerWaits:
    """Waits for versions of workers, each woken by any change of the registry.

    Args:
        workers: Registry of the workers.
        ring_lagging: Rings the workers that have not taken the version named to them.
    """

    def __init__(self, workers: WorkerRegistry, ring_lagging: Callable[[], None]) -> None:
        self._workers = workers
        self._ring_lagging = ring_lagging

    async def wait_for(
        self,
        version: int,
        *,
        staged: bool = False,
        timeout: float | None,
        late: SyncTimeout,
        waiting: Waiting,
    ) -> int:
        """Wait until every subscriber has applied at least ``version``.

        Args:
            version: The version.
            staged: Wait only until subscribers have received all of it.
            timeout: Seconds to wait at most; ``None`` for no limit.
            late: The error raised after that time.
            waiting: Entered while the call has to wait.

        Returns:
            The version of the slowest subscriber.

        Raises:
            PartialSyncError: A worker refused the version, and has nothing newer on its way; or it
                cannot come back; or, with ``staged``, it went before it had the version.
        """

        def found() -> dict[int, int]:
            links = self._workers.subscribers
            return {each.idx: each.outbox.received if staged else each.visible for each in links}

        def reached() -> bool:
            versions = found()
            acked = [idx for idx, each in versions.items() if each >= version]
            failed = self._find_failed(version, acked, staged=staged)
            if failed:
                raise PartialSyncError(acked=acked, failed=failed, version=version)
            # If no subscriber is connected, those that come later get the version. The call waits
            # for the first worker, and for lost ones that may come back, but for none that left.
            records = self._workers.records.values()
            if not versions and version <= self._workers.version:
                return bool(records) and all(
                    each.is_closed or not each.subscribes for each in records
                )
            return bool(versions) and len(acked) == len(versions)

        try:
            await self.wait_until(reached, timeout=timeout, late=late, waiting=waiting)
        except SyncTimeout as exc:
            history = self._workers.history
            newest = {idx: history.for_worker(idx).version for idx in found()}
            text = ", ".join(f"{idx}" for idx, each in newest.items() if each < version)
            if not text or version > self._workers.version:
                raise
            raise type(late)(f"{late}: it was not sent to workers {text}") from exc.__cause__
        # Workers may have joined or gone meanwhile.
        return max(version, min(found().values(), default=version))

    def _find_failed(
        self, version: int, acked: Collection[int], *, staged: bool
    ) -> dict[int, AiosyncError]:
        """Return the workers that will not get ``version`` or a newer one, with the reason."""
        failed: dict[int, AiosyncError] = {}
        for idx, record in self._workers.records.items():
            error = record.error
            if error is None or record.has_left or idx in acked or not record.subscribes:
                continue
            link = self._workers.links.get(idx)
            if link is None:
                has_failed = _has_gone(record, error, version, staged)
            else:
                # An update on its way to a worker that refused one may be the awaited one.
                waits = not (staged or link.outbox.is_idle)
                has_failed = not waits and link.visible < version <= record.failed_version
            if has_failed:
                failed[idx] = error
        return failed

    async def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout: float | None,
        late: SyncTimeout,
        waiting: Waiting,
    ) -> None:
        """Wait until ``condition()`` is true; it is checked at each change of a worker.

        Args:
            condition: Checked on the loop.
            timeout: Seconds to wait; ``None`` for no limit.
            late: Raised after that time.
            waiting: Logs a wait that takes long.

        Raises:
            AiosyncError: The error that ended the sender.
        """
        self._workers.check()
        if condition():
            # The loop gets a turn all the same, as the answers of workers are read on it.
            await asyncio.sleep(0)
            return
        try:
            with waiting:
                async with asyncio.timeout(timeout):
                    while not condition():
                        await self._workers.changed.wait()
                        self._workers.check()
        except TimeoutError as exc:
            raise late from exc

    async def wait_lag_below(
        self, limit: int, *, timeout: float | None, late: SyncTimeout, waiting: Waiting
    ) -> int:
        """Wait until no worker is ``limit`` or more versions behind.

        Only workers with an update on its way count: the call does not wait for a worker that
        refused its update, or was sent none. Returns the lag of the slowest worker.
        """
        timer: asyncio.TimerHandle | None = None

        def behind() -> dict[int, int]:
            return {each.idx: each.lag for each in self._workers.subscribers if each.lag >= limit}

        def poll_lagging(pause: float) -> None:
            nonlocal timer
            # A worker that does not compute follows only if it is rung.
            self._ring_lagging()
            self._workers.changed.notify()
            later = min(2 * pause, _POLL_SECONDS[1])
            timer = asyncio.get_running_loop().call_later(pause, poll_lagging, later)

        poll_lagging(_POLL_SECONDS[0])
        try:
            await self.wait_until(lambda: not behind(), timeout=timeout, late=late, waiting=waiting)
        except SyncTimeout as exc:
            text = ", ".join(f"{idx} by {lag}" for idx, lag in behind().items())
            raise type(late)(f"{late}: behind are workers {text}") from exc.__cause__
        finally:
            if timer is not None:
                timer.cancel()
        return max((link.lag for link in self._workers.subscribers), default=0)


def _has_gone(record: WorkerRecord, error: AiosyncError, version: int, staged: bool) -> bool:
    """Return True if a worker without a link will not get a version."""
    if is_final(record.end or error) or (staged and record.failed_version >= version):
        # Nothing dials a worker whose error is final.
        return True
    return record.is_closed and record.had < version <= record.failed_version
