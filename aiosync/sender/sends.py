"""One send to several workers: who has it, and whether that is enough.

What a cancelled send leaves is decided in ``sender.sender``. Pure bookkeeping, without any I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiosync.errors import AckTimeout, AiosyncError, ApplyError, PartialSyncError
from aiosync.events import SyncOutcome
from aiosync.sender.outbox import Outcome, WorkerLeft
from aiosync.types import Require

__all__ = ["Send"]


@dataclass(slots=True, eq=False)
class Send:
    """Collects the outcomes of one version at all its targets. Not thread-safe.

    Attributes:
        version: The version that is sent.
        workers: Indices of the targets, without those that left.
        require: What counts as success, as for :func:`validate_require`.
        started: When the send began.
        nbytes: Payload bytes of the update.
        lost: Workers that had gone before this send; they are reported and count neither as
            targets nor as failures.
        named: The caller named its targets: no more than these are needed.
        waiter: Who waits for the result; not used here.
        about: What observers are told of it, if there are any; not used here.
        timeout: Seconds that the send may take.
        look_at: When to look at it again; not used here.
        acked: Workers that applied exactly this version, so far.
        skipped: Workers that a newer version reached first, with that version.
        failed: Workers that did not get it, with the reason.
        left: Targets that were closed before they had it.
        waiting: Workers without an outcome.
    """

    version: int
    workers: set[int]
    require: Require = "all"
    started: float = 0.0
    nbytes: int = 0
    lost: Mapping[int, AiosyncError] = field(default_factory=dict)
    named: bool = False
    waiter: Any = None
    about: Any = None
    timeout: float = math.inf
    look_at: float = math.inf
    acked: set[int] = field(default_factory=set)
    skipped: dict[int, int] = field(default_factory=dict)
    failed: dict[int, AiosyncError] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    waiting: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = self.workers - self.acked

    @property
    def satisfied(self) -> bool:
        """Whether enough targets are on this version or a newer one already."""
        return len(self.acked) + len(self.skipped) >= self.needed

    @property
    def needed(self) -> int:
        """How many targets have to be on this version or a newer one."""
        total = len(self.workers)
        if isinstance(self.require, str):
            return total
        if isinstance(self.require, int):
            return min(self.require, total + len(self.left)) if self.named else self.require
        # 0.1 * 30 is 3.0000000000000004: a product that is an integer but for its rounding
        # must not ask for one worker more.
        return max(min(total, 1), math.ceil(self.require * total - 1e-9))

    def resolve(self, worker_idx: int, outcome: Outcome) -> bool:
        """Register what became of the version at one target.

        A second outcome of the same target, and those of other workers, are ignored.

        Returns:
            Whether it counted.
        """
        if worker_idx not in self.waiting:
            return False
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

    def time_out(self) -> None:
        """Fail every target that has no outcome yet."""
        error = AckTimeout(
            f"no answer to version {self.version} within {self.timeout:g} s; the worker may be "
            "busy, stopped, without a model yet, or waiting for apply_pending()",
            worker_ids=frozenset(self.waiting),
            version=self.version,
        )
        self.failed.update(dict.fromkeys(self.waiting, error))
        self.waiting.clear()

    def result(self) -> tuple[SyncOutcome, PartialSyncError | None]:
        """How the send ended, once that is known, and what it raises, if anything."""
        if not (self.failed or self.require != "all") or self.satisfied:
            return "ok" if self.acked or not self.skipped else "skipped", None
        # With fewer targets than needed, the workers that had gone are a part of the reason.
        before = self.lost if len(self.workers) < self.needed else {}
        error = PartialSyncError(
            acked=self.acked | self.skipped.keys(),
            failed={**before, **self.failed},
            version=self.version,
        )
        outcome: SyncOutcome = "error"
        for each in self.failed.values():
            if isinstance(each, ApplyError):
                return "refused", error
            if isinstance(each, AckTimeout):
                outcome = "timeout"
        return outcome, error
