"""One send to several receivers: who has it, and whether that is enough.

Pure bookkeeping. This module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiosync.errors import AiosyncError, ConfigError, LocalProtocolError, PartialSyncError
from aiosync.protocol.outbox import Outcome, OutcomeKind
from aiosync.types import Require, SendReport

__all__ = ["SendTracker", "validate_require"]


def validate_require(require: Require) -> None:
    """Check what counts as success of a send.

    Args:
        require: ``"all"``; an int of at least 1 for at least that many workers; or a float in
            (0, 1] for at least that fraction of them.

    Raises:
        ConfigError: Something else.
    """
    value: Any = require
    if type(value) is int and value >= 1:
        return
    if type(value) is float and 0.0 < value <= 1.0:
        return
    if type(value) is not str or value != "all":
        raise ConfigError(
            f"require is {value!r}; it must be 'all', an int of at least 1, or a float in (0, 1]"
        )


class SendTracker:
    """Collects the outcomes of one version at all its targets. Not thread-safe.

    Args:
        version: The version that is sent.
        workers: Indices of the targets.
        require: What counts as success, as for :func:`validate_require`.

    Attributes:
        version: As given.
        workers: The targets.
        require: As given.
        acked: Workers that applied exactly this version, so far.
        skipped: Workers that a newer version reached first, with that version.
        failed: Workers that did not get it, with the reason.

    Raises:
        ConfigError: ``require`` is illegal.
    """

    __slots__ = ("_waiting", "acked", "failed", "require", "skipped", "version", "workers")

    def __init__(self, version: int, workers: Iterable[int], require: Require = "all") -> None:
        if require != "all":
            validate_require(require)
        self.version: int = version
        self.workers: frozenset[int] = frozenset(workers)
        self.require = require
        self.acked: set[int] = set()
        self.skipped: dict[int, int] = {}
        self.failed: dict[int, AiosyncError] = {}
        self._waiting: set[int] = set(self.workers)

    def __repr__(self) -> str:
        return (
            f"SendTracker(version={self.version}, acked={sorted(self.acked)}, "
            f"skipped={self.skipped}, failed={sorted(self.failed)}, "
            f"waiting={sorted(self._waiting)})"
        )

    @property
    def waiting(self) -> frozenset[int]:
        """Targets without an outcome."""
        return frozenset(self._waiting)

    @property
    def done(self) -> bool:
        """Whether every target has its outcome. True at once without targets."""
        return not self._waiting

    @property
    def satisfied(self) -> bool:
        """Whether enough targets are on this version or a newer one already."""
        return len(self.acked) + len(self.skipped) >= self.needed

    @property
    def settled(self) -> bool:
        """Whether the result is known: every target answered, or as many as a quorum needs.

        With ``require="all"`` the result waits for every target, so that it names each failure.
        """
        return not self._waiting or (self.require != "all" and self.satisfied)

    @property
    def needed(self) -> int:
        """How many targets have to be on this version or a newer one."""
        total = len(self.workers)
        if isinstance(self.require, str):
            return total
        if isinstance(self.require, int):
            return self.require
        # 0.1 * 30 is 3.0000000000000004: a product that is an integer but for its rounding
        # must not ask for one worker more.
        return max(min(total, 1), math.ceil(self.require * total - 1e-9))

    def resolve(self, worker_idx: int, outcome: Outcome) -> bool:
        """Register what became of the version at one target.

        Outcomes of other versions and of other workers are ignored, and so is a second
        outcome of the same target: the first one counts.

        Returns:
            Whether it counted.

        Raises:
            LocalProtocolError: A SKIPPED outcome without a newer version, or a FAILED one
                without an error.
        """
        if outcome.version != self.version or worker_idx not in self._waiting:
            return False
        if outcome.kind is OutcomeKind.APPLIED:
            self.acked.add(worker_idx)
        elif outcome.kind is OutcomeKind.SKIPPED:
            if outcome.by is None:
                raise LocalProtocolError("a skipped version needs the version that overtook it")
            self.skipped[worker_idx] = outcome.by
        else:
            if outcome.error is None:
                raise LocalProtocolError("a failed version needs an error")
            self.failed[worker_idx] = outcome.error
        self._waiting.discard(worker_idx)
        return True

    def timed_out(self, error_factory: Callable[[frozenset[int]], AiosyncError]) -> None:
        """Fail every target that has no outcome yet.

        Args:
            error_factory: Called once with the indices of those targets, if there are any;
                its error is recorded for each of them.
        """
        if not self._waiting:
            return
        error = error_factory(frozenset(self._waiting))
        for worker_idx in self._waiting:
            self.failed[worker_idx] = error
        self._waiting.clear()

    def result(
        self,
        elapsed: float = 0.0,
        nbytes: int = 0,
        epoch: int = 0,
        lost: Mapping[int, AiosyncError] | None = None,
        untold: Mapping[int, AiosyncError] | None = None,
    ) -> SendReport:
        """Sum the send up, once it is :attr:`settled`.

        Args:
            elapsed: Seconds that the send took.
            nbytes: Payload bytes of the update.
            epoch: Epoch of the sender.
            lost: Workers that had gone before this send; they are reported and count neither
                as targets nor as failures.
            untold: Why workers refused what an earlier send did not wait for; reported for
                those that have not answered to this one.

        Raises:
            PartialSyncError: Fewer targets than :attr:`needed` are on this version or a
                newer one.
            LocalProtocolError: It is not settled yet.
        """
        if self._waiting and not self.settled:
            raise LocalProtocolError(f"no outcome yet from workers {sorted(self._waiting)}")
        gone = dict(lost) if lost else {}
        if len(self.acked) == len(self.workers) and self.require == "all":  # nearly always
            return SendReport(
                epoch, self.version, self.workers, lost=gone, elapsed=elapsed, nbytes=nbytes
            )
        if not self.satisfied:
            # With fewer targets than needed, the workers that had gone are a part of the reason.
            failed = {**gone, **self.failed} if len(self.workers) < self.needed else self.failed
            raise PartialSyncError(
                acked=self.acked | self.skipped.keys(), failed=failed, version=self.version
            )
        return SendReport(
            epoch=epoch,
            version=self.version,
            acked=frozenset(self.acked),
            skipped=dict(self.skipped),
            failed={
                **{idx: error for idx, error in (untold or {}).items() if idx in self._waiting},
                **self.failed,
            },
            lost=gone,
            waiting=frozenset(self._waiting),
            elapsed=elapsed,
            nbytes=nbytes,
        )
