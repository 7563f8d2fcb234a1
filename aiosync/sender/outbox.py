"""Outbox of one worker, and the outcomes of one send to several workers.

A worker that is slower than the trainer gets the newest version and never sees the ones in between:
the next update replaces those that are still queued, as ``sender.update_queue`` says for updates of
some of the names.

A cancelled send leaves its updates here: the transfer goes on, and the next send reports the
workers that failed. ``transports.framed_link`` says what it leaves of the bytes on a link. Pure
bookkeeping: events in, outcomes out. Must not import asyncio nor transports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiosync.errors import AckTimeout, AiosyncError, ApplyError, PartialSyncError, PeerClosed
from aiosync.events import SyncOutcome
from aiosync.protocol import seconds_text
from aiosync.sender.snapshots import Snapshot
from aiosync.sender.update_queue import UpdateQueue, still_needed
from aiosync.types import AckStatus, Require
from aiosync.wire import Ack

__all__ = ["MAX_IN_FLIGHT", "Outbox", "Outcome", "Send", "WorkerLeft"]

MAX_IN_FLIGHT = 64
"""Most versions that one receiver may leave unresolved.

A receiver that has so many gets no update before it resolves one. aiosync's own receivers answer at
once which versions were replaced, and have a handful.
"""


class WorkerLeft(PeerClosed):
    """The worker was closed and said so, which is no failure."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one version at one receiver.

    With neither ``by`` nor ``error``, the receiver has the version. There is exactly one outcome
    for each version offered.

    Attributes:
        version: The version.
        by: The newer version that overtook this one, which the receiver never needs any more.
        error: The reason why the receiver did not get the version, or refused it.
    """

    version: int
    by: int | None = None
    error: AiosyncError | None = None


class Outbox:
    """Updates on their way to one receiver.

    ``offer()`` queues an update, which mostly replaces all that are queued. The link gets it from
    ``take()``. Its version is then in flight, and the window is shut until the receiver answers
    RECEIVED (or more), so that at most one update is on the link. Acknowledgements resolve the
    versions in flight, of which there are never more than :data:`MAX_IN_FLIGHT`. Not thread-safe.

    Args:
        epoch: Epoch of the sender.
        worker_idx: Index of the worker, named in the errors of outcomes.
        has: Version that the receiver had before the link was opened; 0 for none.

    Attributes:
        epoch: As given.
        queue: Updates that the link has not taken yet.
        in_flight: Versions that the link took and that are not resolved, oldest first.
        unreceived: The version in flight that shuts the window; ``None`` while it is open.
        newest: The version that was offered last, or that the receiver had; 0 for none.
        applied: Newest version that the receiver said it applied; 0 before the first.
        received: Newest version that the receiver has completely, applied or not; 0 before the
            first.
        named_version: Newest version that was named to the receiver in shared memory, without a
            message; 0 for none.
        error: The reason why this outbox was closed, or ``None``. It stays the first one.
        let_go: Version of which the link carries a part, and that it gives up for an older one, as
            the receiver has none any more; 0 for none.
        behind: Number of workers behind a receiver that passes versions on, and the oldest version
            among them; ``None`` for a worker.
    """

    def __init__(self, epoch: int, worker_idx: int, has: int = 0) -> None:
        self.epoch: int = epoch
        self.queue: UpdateQueue = UpdateQueue()
        self.in_flight: tuple[int, ...] = ()
        self.unreceived: int | None = None
        self.newest: int = has
        self.applied: int = has
        self.received: int = has
        self.named_version: int = 0
        self.error: AiosyncError | None = None
        self.let_go: int = 0
        self.behind: tuple[int, int] | None = None
        self._worker_idx = worker_idx
        # The newest version that the receiver refused; 0 for none.
        self._refused_version = 0
        # The update taken last holds every name of the versions in flight.
        self._taken: tuple[Snapshot, ...] = ()

    @property
    def is_idle(self) -> bool:
        """True if every version that was offered is resolved."""
        return not (self.queue.groups or self.in_flight)

    @property
    def carries_part(self) -> bool:
        """True if the link carries an update of which the rest has not arrived at this side."""
        return self.unreceived is not None and self._taken[-1].incoming is not None

    def offer(self, group: tuple[Snapshot, ...], *, parts: bool) -> list[Outcome]:
        """Queue an update newer than all before; the newest one wins.

        An update that lacks a name of an unresolved one is sent once everything before it is
        resolved.

        Args:
            group: The snapshots of the update, oldest first; a reference to each is kept until the
                link takes it.
            parts: Updates hold parts of the names. If not, a name that this update lacks is never
                delivered together with it, see :meth:`UpdateQueue.add`.

        Returns:
            The outcomes of the versions that it replaced.
        """
        queue, self.newest = self.queue, group[-1].version
        for each in group:
            each.retain()
        # An empty queue is the usual case.
        if not queue.groups:
            queue.groups.append(group)
            return []
        return [Outcome(each, self.newest) for each in queue.add(group, parts=parts)]

    def take(self) -> tuple[Snapshot, ...] | None:
        """Move the first update of the queue into flight, with its references; shut the window.

        Returns:
            The snapshots of the update; ``None`` if the queue is empty, the update has to wait for
            others, the window is shut, or too many versions are in flight.
        """
        groups, flying = self.queue.groups, self.in_flight
        if not groups or self.unreceived is not None or len(flying) >= MAX_IN_FLIGHT:
            return None
        if flying and still_needed(self._taken, groups[0]):
            # The update lacks names of those in flight, and waits until they are resolved.
            return None
        self._taken = group = groups.pop(0)
        self.unreceived = version = group[-1].version
        self.in_flight = (*flying, version)
        return group

    def give_up(self, version: int, error: AiosyncError) -> list[Outcome]:
        """Fail a version that was taken and that the link cannot carry; open the window.

        Do nothing if the receiver has answered to the version all the same.
        """
        if version != self.unreceived:
            return []
        self.in_flight, self.unreceived = self.in_flight[:-1], None
        if version == self.let_go:
            self.applied = self.received = self.let_go = 0
        # With a lower ``newest`` the version may be offered again.
        queued = (group[-1].version for group in self.queue.groups)
        self.newest = max(self.applied, self.received, *self.in_flight, *queued)
        return [Outcome(version, error=error)]

    def forget(self) -> None:
        """Note that the receiver has no version any more. Nothing may be on its way to it."""
        self.newest = self.applied = self.received = self.named_version = 0
        self._refused_version = 0

    def on_ack(self, ack: Ack) -> list[Outcome]:
        """Register an acknowledgement of the receiver.

        An acknowledgement of another epoch is ignored. One of a version that is not in flight
        never counts as success: it may only refuse a named version, or tell of workers behind.

        Returns:
            Outcomes, oldest version first. RECEIVED gives none. APPLIED resolves the version and
            every older one in flight. NACK resolves the version with an
            :class:`~aiosync.errors.ApplyError`. SKIPPED resolves it alone: an older one may be on
            its way into the model meanwhile.
        """
        version, status, flying = ack.version, ack.status, self.in_flight
        if ack.epoch != self.epoch or version not in flying:
            return self._on_other_ack(ack)
        at = flying.index(version)
        if status != AckStatus.NACK:
            self.received = max(self.received, version)
        if status == AckStatus.SKIPPED:
            return self._on_skipped(version, at)
        if self.unreceived is not None and version >= self.unreceived:
            self.unreceived = None
        if status == AckStatus.RECEIVED:
            return []
        if status == AckStatus.APPLIED:
            self.applied, self.in_flight = version, flying[at + 1 :]
            outcomes = [Outcome(older, version) for older in flying[:at]] if at else []
            return [*outcomes, Outcome(version)]
        self.in_flight = flying[:at] + flying[at + 1 :]
        return [self._refused(ack)]

    def _on_other_ack(self, ack: Ack) -> list[Outcome]:
        """Register the workers behind, or a NACK of a named version; ignore any other ack."""
        if ack.epoch == self.epoch:
            self.behind = ack.behind or self.behind
            if ack.status == AckStatus.NACK and (
                max(self.applied, self._refused_version) < ack.version <= self.named_version
            ):
                # The receiver read the version, and could not take it; it may find a newer one.
                if ack.version == self.named_version:
                    self.named_version = 0
                return [self._refused(ack)]
        return []

    def _on_skipped(self, version: int, at: int) -> list[Outcome]:
        """Register that the next version in flight has replaced the one at this position."""
        flying = self.in_flight
        # Ignore a wrong answer: no newer version is in flight that could have replaced this one.
        if version == flying[-1]:
            return []
        self.in_flight = flying[:at] + flying[at + 1 :]
        return [Outcome(version, flying[at + 1])]

    def close(self, error: AiosyncError) -> list[Outcome]:
        """Close with an error: fail every unresolved version, and release the queued updates.

        Returns:
            An outcome with the error for every version that is not resolved, oldest first.
        """
        self.error = self.error or error
        versions = [*self.in_flight, *(group[-1].version for group in self.queue.groups)]
        self.in_flight, self.unreceived = (), None
        self.queue.clear()
        return [Outcome(version, error=error) for version in versions]

    def _refused(self, ack: Ack) -> Outcome:
        """Return the outcome of a version that the receiver refused, from its NACK."""
        self._refused_version = max(self._refused_version, ack.version)
        reason = f"{ack.error_type}: {ack.error_text}" if ack.error_type else ack.error_text
        error = ApplyError(
            f"worker {self._worker_idx} refused version {ack.version}: "
            f"{reason or 'no reason given'}",
            worker_idx=self._worker_idx,
            version=ack.version,
            remote_type=ack.error_type,
        )
        return Outcome(ack.version, error=error)


@dataclass(slots=True, eq=False)
class Send:
    """Outcomes of one version at all its targets. Not thread-safe.

    Attributes:
        version: The version that is sent.
        workers: Indices of the targets, without those that left.
        require: What counts as success, as for :func:`validate_require`.
        started: When the send began.
        nbytes: Payload bytes of the update.
        lost: Workers that had gone before this send, with the reason. They are reported, and count
            neither as targets nor as failures.
        lists_targets: True if the caller listed the targets: no more than these are needed.
        waiter: The future that gets the report; not used here.
        observed: Details for observers, if there are any; not used here.
        timeout: Seconds that the send may take.
        check_at: When the sender next checks this send; not used here.
        turns_left_to_notice_ends: Turns of the loop that the send may still wait for the loop to
            notice the end of workers; not used here.
        acked: Workers that applied exactly this version, so far.
        skipped: Workers that a newer version reached first, with that version.
        failed: Workers that did not get the version, with the reason.
        left: Targets that were closed before they had the version.
        waiting: Targets without an outcome.
    """

    version: int
    workers: set[int]
    require: Require = "all"
    started: float = 0.0
    nbytes: int = 0
    lost: Mapping[int, AiosyncError] = field(default_factory=dict)
    lists_targets: bool = False
    waiter: Any = None
    observed: Any = None
    timeout: float = math.inf
    check_at: float = math.inf
    turns_left_to_notice_ends: int = 20
    acked: set[int] = field(default_factory=set)
    skipped: dict[int, int] = field(default_factory=dict)
    failed: dict[int, AiosyncError] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    waiting: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = self.workers - self.acked

    @property
    def satisfied(self) -> bool:
        """True if enough targets are on this version or a newer one already."""
        return len(self.acked) + len(self.skipped) >= self.needed

    @property
    def needed(self) -> int:
        """Number of targets that have to be on this version or a newer one."""
        total = len(self.workers)
        if isinstance(self.require, str):
            return total
        if isinstance(self.require, int):
            listed = total + len(self.left)
            return min(self.require, listed) if self.lists_targets else self.require
        # 0.1 * 30 is 3.0000000000000004. A product that is an integer but for its rounding must not
        # ask for one worker more.
        return max(min(total, 1), math.ceil(self.require * total - 1e-9))

    @property
    def may_end(self) -> bool:
        """True if no outcome is missed any more; ``require="all"`` is to name each failure."""
        return not self.waiting or (self.require != "all" and self.satisfied)

    def resolve(self, worker_idx: int, outcome: Outcome) -> bool:
        """Register the outcome of the version at one target.

        A second outcome of the same target is ignored, and so are those of other workers. But a
        version that was named counts as applied at once, and the read that takes it may refuse it.

        Returns:
            True if the outcome counted.
        """
        if worker_idx not in self.waiting:
            if worker_idx not in self.acked or not isinstance(outcome.error, ApplyError):
                return False
            self.acked.discard(worker_idx)
        self.waiting.discard(worker_idx)
        if isinstance(outcome.error, WorkerLeft):
            self.left.add(worker_idx)
            self.workers.discard(worker_idx)
        elif outcome.error is not None:
            self.failed[worker_idx] = outcome.error
        elif outcome.by is not None:
            self.skipped[worker_idx] = outcome.by
        else:
            self.acked.add(worker_idx)
        return True

    def withdraw(self, worker_idx: int, error: AiosyncError) -> None:
        """Count a worker that applied the version, and then was lost, as failed.

        A worker that said farewell after it had applied the version stays acked.
        """
        if isinstance(error, WorkerLeft):
            return
        self.acked.discard(worker_idx)
        self.waiting.add(worker_idx)
        self.resolve(worker_idx, Outcome(self.version, error=error))

    def time_out(self) -> None:
        """Fail every target that has no outcome yet."""
        error = AckTimeout(
            f"no answer to version {self.version} within {seconds_text(self.timeout)}; the worker "
            "may be busy, stopped, without a model yet, or waiting for apply_pending()",
            worker_ids=frozenset(self.waiting),
            version=self.version,
        )
        self.failed.update(dict.fromkeys(self.waiting, error))
        self.waiting.clear()

    def result(self) -> tuple[SyncOutcome, PartialSyncError | None]:
        """Return the outcome of a finished send, and the error that it raises, if any."""
        # With "all" and no failure every target is on this version or a newer one.
        if (self.require == "all" and not self.failed) or self.satisfied:
            return "ok" if self.acked or not self.skipped else "skipped", None
        return self._failure()

    def _failure(self) -> tuple[SyncOutcome, PartialSyncError]:
        """Return the outcome of a send that too few workers have, and its error."""
        # With fewer targets than needed, the workers lost before the send are a part of the reason.
        lost = self.lost if len(self.workers) < self.needed else {}
        # The index of a lost worker may have a new holder, whose outcome the error has.
        before = {idx: why for idx, why in lost.items() if idx not in self.workers}
        error = PartialSyncError(
            acked=self.acked | self.skipped.keys(),
            failed={**before, **self.failed},
            version=self.version,
        )
        errors = self.failed.values()
        if any(isinstance(each, ApplyError) for each in errors):
            return "refused", error
        is_late = any(isinstance(each, AckTimeout) for each in errors)
        return "timeout" if is_late else "error", error
