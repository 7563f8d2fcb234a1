"""One send to several receivers: who has it, and whether that is enough.

What a cancelled send leaves is decided in ``sender.sender``.

Pure bookkeeping. This module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from aiosync.errors import AckTimeout, AiosyncError, ApplyError, PartialSyncError
from aiosync.events import SyncOutcome
from aiosync.protocol.outbox import Outcome, WorkerLeft
from aiosync.types import Require, SendReport

__all__ = ["SendTracker"]


class SendTracker:
    """Collects the outcomes of one version at all its targets. Not thread-safe.

    Args:
        version: The version that is sent.
        workers: Indices of the targets.
        require: What counts as success, as for :func:`validate_require`.
        started: When the send began.
        nbytes: Payload bytes of the update.
        lost: Workers that had gone before this send; they are reported and count neither as
            targets nor as failures.
        named: The caller named its targets: no more than these are needed.
        waiter: Who waits for the result; not used here.
        about: What observers are told of it, if there are any; not used here.

    Attributes:
        version: As given.
        workers: The targets, without those that left.
        require: As given.
        started: As given.
        nbytes: As given.
        lost: As given.
        named: As given.
        waiter: As given.
        about: As given.
        acked: Workers that applied exactly this version, so far.
        skipped: Workers that a newer version reached first, with that version.
        failed: Workers that did not get it, with the reason.
        left: Targets that were closed before they had it.
        waiting: Workers without an outcome.
        timeout: Seconds that the send may take.
        look_at: When to look at it again; not used here.
    """

    __slots__ = (
        "about",
        "acked",
        "failed",
        "left",
        "look_at",
        "lost",
        "named",
        "nbytes",
        "require",
        "skipped",
        "started",
        "timeout",
        "version",
        "waiter",
        "waiting",
        "workers",
    )

    def __init__(
        self,
        version: int,
        workers: Iterable[int],
        require: Require = "all",
        *,
        started: float = 0.0,
        nbytes: int = 0,
        lost: Mapping[int, AiosyncError] | None = None,
        named: bool = False,
        waiter: Any = None,
        about: Any = None,
    ) -> None:
        self.version: int = version
        self.workers: frozenset[int] = frozenset(workers)
        self.require = require
        self.started: float = started
        self.nbytes: int = nbytes
        self.lost: Mapping[int, AiosyncError] = lost or {}
        self.named: bool = named
        self.waiter: Any = waiter
        self.acked: set[int] = set()
        self.skipped: dict[int, int] = {}
        self.failed: dict[int, AiosyncError] = {}
        self.left: set[int] = set()
        self.waiting: set[int] = set(self.workers)
        self.timeout: float = math.inf
        self.look_at: float = math.inf
        self.about: Any = about

    @property
    def satisfied(self) -> bool:
        """Whether enough targets are on this version or a newer one already."""
        return len(self.acked) + len(self.skipped) >= self.needed

    @property
    def settled(self) -> bool:
        """Whether the result is known: every target answered, or as many as a quorum needs.

        With ``require="all"`` the result waits for every target, so that it names each failure.
        """
        return not self.waiting or (self.require != "all" and self.satisfied)

    @property
    def outcome(self) -> SyncOutcome:
        """How the send ended, once it is :attr:`settled`."""
        if not (self.failed or self.require != "all") or self.satisfied:
            return "ok" if self.acked or not self.skipped else "skipped"
        errors = self.failed.values()
        if any(isinstance(each, ApplyError) for each in errors):
            return "refused"
        return "timeout" if any(isinstance(each, AckTimeout) for each in errors) else "error"

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

        Outcomes of other versions and of other workers are ignored, and so is a second
        outcome of the same target: the first one counts.

        Returns:
            Whether it counted.
        """
        if outcome.version != self.version or worker_idx not in self.waiting:
            return False
        self.waiting.discard(worker_idx)
        if isinstance(outcome.error, WorkerLeft):
            self.left.add(worker_idx)
            self.workers -= {worker_idx}
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

    def result(
        self,
        elapsed: float = 0.0,
        epoch: int = 0,
        untold: Mapping[int, AiosyncError] | None = None,
    ) -> SendReport:
        """Sum the send up, once it is :attr:`settled`.

        Args:
            elapsed: Seconds that the send took.
            epoch: Epoch of the sender.
            untold: Why workers refused what an earlier send did not wait for; reported for
                those that have not answered to this one.

        Raises:
            PartialSyncError: Fewer targets than :attr:`needed` are on this version or a
                newer one.
        """
        if (self.failed or self.require != "all") and not self.satisfied:
            # With fewer targets than needed, the workers that had gone are a part of the reason.
            before = self.lost if len(self.workers) < self.needed else {}
            raise PartialSyncError(
                acked=self.acked | self.skipped.keys(),
                failed={**before, **self.failed},
                version=self.version,
            )
        late = {idx: error for idx, error in (untold or {}).items() if idx in self.waiting}
        return SendReport(
            epoch=epoch,
            version=self.version,
            acked=frozenset(self.acked),
            skipped=self.skipped,
            failed={**late, **self.failed},
            lost=dict(self.lost),
            left=frozenset(self.left),
            waiting=frozenset(self.waiting),
            elapsed=elapsed,
            nbytes=self.nbytes,
        )
