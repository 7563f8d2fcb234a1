"""The sender's records of workers, which stay when the links of the workers end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from aiosync.errors import AiosyncError, ApplyError
from aiosync.sender.outbox import WorkerLeft

__all__ = ["REMEMBERED", "WorkerRecord", "WorkerRecords"]

REMEMBERED = 64
"""Most records kept of workers that went and did not come back."""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """The sender's record of the worker with one index.

    Attributes:
        pid: The process that the index was given to, as its Hello said.
        session: Session of the receiver that the index was given to.
        joined: Process of the worker that joined last.
        joined_session: Session of its receiver.
        predecessor: The error of the holder of the index before, if no report had named it when the
            next one joined; ``None`` for none.
        subscribes: True if the worker gets every update, so that sends miss it when it is gone.
        error: The reason why the worker is not connected; or why it refused, or did not get,
            ``failed_version``.
        end: The reason why the worker is not connected, while the error is a refusal that no call
            has reported; else ``None``.
        failed_version: Newest version that it refused or did not get; 0 for none.
        had: The version that the worker had when its last link ended; 0 for none.
        reported: True if a call of the user has reported the error, or will.
        reports: Number of calls that have reported the error.
        listed: True if the report of a send to others lists the error: that is enough to forget the
            record.
        where: Text for errors while a worker that has to be dialled is not connected.
    """

    pid: int = 0
    session: bytes | None = None
    joined: int = 0
    joined_session: bytes | None = None
    predecessor: AiosyncError | None = None
    subscribes: bool = True
    error: AiosyncError | None = None
    end: AiosyncError | None = None
    failed_version: int = 0
    had: int = 0
    reported: bool = True
    reports: int = 0
    listed: bool = False
    where: Callable[[], str] | None = None

    @property
    def has_left(self) -> bool:
        """True if the worker was closed and did not come back."""
        return isinstance(self.error, WorkerLeft)

    @property
    def is_closed(self) -> bool:
        """True if the worker has left, also while a refusal before that is still to be reported."""
        return isinstance(self.end or self.error, WorkerLeft)

    def fail(self, error: AiosyncError, version: int = 0, *, reported: bool) -> None:
        """Note why the worker is not connected, or lacks a version."""
        self.error, self.failed_version, self.reported = error, version, reported
        self.end, self.reports, self.listed = None, 0, False

    def report(self) -> None:
        """Note that a call of the user reports the error; a refusal gives way to the end."""
        self.reported, self.reports = True, self.reports + 1
        self.error, self.end = self.end or self.error, None

    def take_back(self, error: AiosyncError | None, *, counted: bool) -> None:
        """Note that a cancelled call reports the error to no caller, nor that the worker left.

        Args:
            error: The reason of a failure; ``None`` if the worker left.
            counted: The call counts as one that has reported it.
        """
        now = self.error
        if self.has_left if error is None else now is error:
            self.reports -= counted
            self.reported = self.reports > 0
        elif isinstance(error, ApplyError) and not isinstance(now, ApplyError | None):
            # The worker went after its refusal, which is reported first, unless it had recovered.
            if self.had <= (version := error.version or 0):
                # A newer version may have failed with the end.
                self.fail(error, max(version, self.failed_version), reported=False)
                self.end = now

    def recover(self) -> None:
        """Clear the error: the worker is connected, or has a newer version."""
        self.error, self.end, self.failed_version, self.reported = None, None, 0, True


class WorkerRecords(dict[int, WorkerRecord]):
    """Records of workers, by index; a worker that goes has its record moved to the end.

    Attributes:
        replaced: Errors of workers that died unreported and whose index has a new holder, by index.
        on_forget: Called with the index of a worker whose record was dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replaced: dict[int, AiosyncError] = {}
        self.on_forget: Callable[[int], object] = lambda idx: None

    def forget_gone(self, kept: Collection[int]) -> list[int]:
        """Drop all but the last workers that went, as new indices may come for ever.

        A worker whose loss no report has named yet keeps its record.

        Args:
            kept: Indices of the records to keep.

        Returns:
            The indices whose records were dropped.
        """
        gone = [
            idx
            for idx, each in self.items()
            if (each.reported or each.listed or each.has_left) and idx not in kept
        ][:-REMEMBERED]
        for idx in gone:
            del self[idx]
            self.replaced.pop(idx, None)
            self.on_forget(idx)
        return gone
