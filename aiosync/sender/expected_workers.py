"""The workers that ``connect()`` waits for, and the reasons why some do not come."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from aiosync._tasks import Notifier
from aiosync.errors import (
    AiosyncError,
    ConnectError,
    ConnectTimeout,
    PartialSyncError,
)
from aiosync.sender.admission import Admission
from aiosync.sender.outbox import Send
from aiosync.sender.update_queue import LateJoinerUpdates
from aiosync.sender.worker_deaths import ProcessWatch
from aiosync.sender.worker_link import WorkerLink
from aiosync.sender.worker_record import WorkerRecord, WorkerRecords
from aiosync.types import Require

__all__ = ["ExpectedWorkers"]


class JoinedWorkers(Protocol):
    """The registry as the wait for expected workers sees it.

    Attributes:
        model_id: Name of the model.
        records: Records of workers, by index.
        links: Links of the workers that are connected, by index.
        history: Updates for workers that join later.
        changed: Wakes the wait.
        admission: Admits links, and knows those in their handshake.
    """

    model_id: str
    records: WorkerRecords
    links: dict[int, WorkerLink]
    history: LateJoinerUpdates
    changed: Notifier
    admission: Admission

    def record(self, idx: int) -> WorkerRecord:
        """Return the record of a worker, made if there is none yet."""

    def check(self) -> None:
        """Raise the error that ended the sender, if it has ended."""


class Missing(NamedTuple):
    """Expected workers that have failed, are not connected, or lack the initial weights.

    Attributes:
        failed: Workers that failed, with the reason.
        absent: Workers that are not connected.
        late: Connected workers that have not applied the version.
    """

    failed: dict[int, AiosyncError]
    absent: list[int]
    late: list[int]


class ExpectedWorkers:
    """The workers that ``connect()`` waits for.

    Args:
        indices: Indices of the workers.
        registry: Owner of the records and links.

    Attributes:
        indices: As given.
    """

    def __init__(self, indices: Sequence[int], registry: JoinedWorkers) -> None:
        self.indices: Sequence[int] = indices
        self._registry = registry
        # The first error of each worker, by process id.
        self._causes: dict[int, AiosyncError] = {}

    def keep_cause(self, pid: int, error: AiosyncError) -> None:
        """Keep a process's first error for ``connect()``, as another process may get its index."""
        if self._registry.admission.is_joining:
            self._causes.setdefault(pid, error)

    def others_may_connect_after(self, error: BaseException) -> bool:
        """Return True if the scheme stays open although ``connect()`` raised this error.

        Other workers are linked then, or may still come.
        """
        if not isinstance(error, ConnectTimeout | PartialSyncError):
            return False
        # Without the initial weights there is nothing for them.
        if self._registry.admission.initial:
            return False
        # A ConnectTimeout names no workers, so only those that are linked count then.
        failed = getattr(error, "failed", self.indices)
        return bool(self._registry.links) or len(failed) < len(self.indices)

    async def wait(
        self,
        version: int,
        require: Require,
        processes: Sequence[Any],
        timeout: float | None,
        ends: float,
    ) -> None:
        """Wait until every expected worker has applied ``version``, or has failed.

        The wait ends as soon as so many processes have ended that ``require`` cannot be met. It
        ends at ``ends``, on ``time.perf_counter()``'s clock, after ``timeout`` seconds in all.

        Raises:
            ConnectTimeout: Some expected worker did not come in time.
            PartialSyncError: A worker came, but could not apply the weights or died.
            ConfigError: An element of ``processes`` is no process.
        """
        registry = self._registry
        watch = ProcessWatch(processes, registry.changed.notify)
        # So many workers may fail, and ``require`` is still met.
        tolerated = len(self.indices) - Send(version, {*self.indices}, require).needed
        missing = Missing({}, [], [])
        try:
            left = None if timeout is None else ends - time.perf_counter()
            async with asyncio.timeout(left):
                while True:
                    registry.check()
                    missing = self._missing(version)
                    short = self._add_ended(missing, watch)
                    # One process may be to become several workers: none of them has failed then.
                    too_few = short > max(0, tolerated) and missing.failed
                    if self._is_settled(missing) or too_few:
                        break
                    await registry.changed.wait()
        except TimeoutError as exc:
            ended = "".join(f"; worker {idx}: {error}" for idx, error in missing.failed.items())
            raise ConnectTimeout(
                f"model {registry.model_id!r}: after {timeout:g} s {self.awaited(version)}{ended}. "
                "Several schemes connect in the same order on both sides, or with connect_all()"
            ) from exc
        finally:
            watch.close()
            registry.admission.is_joining = False
            self._causes.clear()
        if missing.failed:
            raise self._failure(version, missing)

    def _is_settled(self, missing: Missing) -> bool:
        """Return True if each missing worker has failed or left."""
        records = self._registry.records
        left = {idx for idx in missing.absent if records[idx].has_left}
        return missing.failed.keys() | left >= {*missing.absent, *missing.late}

    def _failure(self, version: int, missing: Missing) -> PartialSyncError:
        """Return the error for the workers that failed; their records count as reported now."""
        records = self._registry.records
        for idx, error in missing.failed.items():
            if records[idx].error is None:
                records[idx].fail(error, records[idx].failed_version, reported=True)
            records[idx].report()
        # A worker that has left may have applied the version before.
        lack = {
            idx
            for idx in (*missing.absent, *missing.late)
            if not records[idx].has_left or records[idx].had < version
        }
        joined = {*self.indices} - missing.failed.keys() - lack
        return PartialSyncError(acked=joined, failed=missing.failed, version=version)

    def _missing(self, version: int) -> Missing:
        """Return the expected workers that have failed, are not connected, or lack ``version``."""
        registry, missing = self._registry, Missing({}, [], [])
        for idx in self.indices:
            record = registry.record(idx)
            link, error = registry.links.get(idx), record.error
            if error is not None and not record.has_left:
                missing.failed[idx] = error
            if link is None:
                missing.absent.append(idx)
            elif registry.history.for_worker(idx).version and _is_late(link, version):
                missing.late.append(idx)
        return missing

    def _waited_for(self, missing: Missing) -> list[int]:
        """Return the absent workers that have neither left nor are coming at this moment."""
        records, arriving = self._registry.records, self._registry.admission.arriving.values()
        return [idx for idx in missing.absent if not (records[idx].has_left or idx in arriving)]

    def _add_ended(self, missing: Missing, watch: ProcessWatch) -> int:
        """Add workers to ``missing.failed`` if too few processes are left to become them.

        Returns:
            The number of expected workers that cannot come.
        """
        records, processes = self._registry.records, watch.watch_new()
        waited = self._waited_for(missing)
        joined = self._joined_pids(missing.absent)
        # A live process that is no worker may become one. If fewer processes were given than
        # workers are expected, the rest may come from elsewhere.
        coming = sum(pid not in watch.ended and pid not in joined.values() for pid in processes)
        unknown = max(0, len(self.indices) - len(processes))
        short = max(0, len(waited) - coming - unknown)
        # Workers that have failed already are a part of those that cannot come.
        free = [idx for idx in waited if idx not in missing.failed]
        to_name = short - (len(waited) - len(free))
        became = joined | {idx: records[idx].pid for idx in missing.failed}
        for each in _ended_in_vain(processes, watch.ended, became.values())[: max(0, to_name)]:
            # The index of that process may have been given to another one.
            idx = each if each in free else free[0]
            free.remove(idx)
            missing.failed[idx] = self._ended_early(each, processes[each], watch)
        return short

    def _joined_pids(self, absent: Iterable[int]) -> dict[int, int]:
        """Return the ids of processes that became workers, also of absent workers that left."""
        records = self._registry.records
        links = self._registry.links.items()
        # A process that only pulled may still become an expected worker.
        joined = {idx: link.hello.pid for idx, link in links if idx in self.indices}
        return joined | {idx: records[idx].pid for idx in absent if records[idx].has_left}

    def _ended_early(self, number: int, pid: int, watch: ProcessWatch) -> ConnectError:
        """Return the error for a process that ended, which has this number among those given."""
        cause = self._causes.get(pid)
        why = " before it connected" if cause is None else f": {cause}"
        text = f"process {pid} ended{watch.exit_code(number)}{why}"
        return ConnectError(text + self._registry.admission.refused())

    def awaited(self, version: int) -> str:
        """Return a text on the expected workers that are absent or lack ``version``, and why."""
        records, (_, absent, late) = self._registry.records, self._missing(version)
        left = [idx for idx in absent if records[idx].has_left]
        absent = [idx for idx in absent if idx not in left]
        parts = [where() for idx in absent if (where := records[idx].where) is not None]
        others = [idx for idx in absent if records[idx].where is None]
        if left:
            parts.append(f"workers {left} connected, and left")
        if others:
            parts.append(
                f"workers {others} did not connect: each has to call init_on_receiver() and "
                "connect() on its copy of this scheme in that time (timeout=), within which its "
                "process has to start, too"
            )
        if late:
            parts.append(f"workers {late} connected but have not applied the initial weights")
        return "; ".join(parts) + self._registry.admission.refused()


def _is_late(link: WorkerLink, version: int) -> bool:
    """Return True if a worker that gets every version lacks this one."""
    # A worker without a model yet can only receive the weights.
    has = link.visible if link.hello.has_target else link.outbox.received
    return link.hello.subscribe and has < version


def _ended_in_vain(
    processes: Sequence[int], ended: Container[int], became: Iterable[int]
) -> list[int]:
    """Return the numbers of the processes that have ended, and are no worker's.

    Args:
        processes: Ids of the processes; one that was to become several workers has several places.
        ended: Ids of those that have ended.
        became: Id of the process of each worker that came. A process is excused once for each.
    """
    came, found = Counter(became), list[int]()
    for number, pid in enumerate(processes):
        came[pid] -= 1
        if pid in ended and came[pid] < 0:
            found.append(number)
    return found
