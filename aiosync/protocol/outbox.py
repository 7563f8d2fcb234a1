"""What a sender owes to one receiver: at most one update that waits, and those under way.

A receiver that is slower than the trainer gets the newest version and never sees the ones in
between: an update that is still waiting is replaced by the next. Only one that lacks a part of
what comes before it waits until that has arrived. Pure bookkeeping: events in, outcomes out. This
module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Container
from dataclasses import dataclass

from aiosync.errors import AiosyncError, ApplyError, LocalProtocolError
from aiosync.types import AckStatus
from aiosync.wire import Ack

__all__ = ["MAX_IN_FLIGHT", "Outbox", "Outcome", "OutcomeKind"]

MAX_IN_FLIGHT = 64
"""How many versions one receiver may leave unresolved; it gets no more before it settles one.

aiosync's own receivers say at once what was replaced, and have a handful.
"""


class OutcomeKind(enum.Enum):
    """What finally became of one version at one receiver."""

    APPLIED = "applied"
    """The receiver is on it."""
    SKIPPED = "skipped"
    """A newer version overtook it; the receiver never needs it again."""
    FAILED = "failed"
    """The receiver did not get it, or refused it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one version at one receiver. There is exactly one for each version offered.

    Attributes:
        version: Which version.
        kind: What became of it.
        by: For SKIPPED, the newer version.
        error: For FAILED, why.
    """

    version: int
    kind: OutcomeKind
    by: int | None = None
    error: AiosyncError | None = None


class Outbox:
    """Versions on their way to one receiver.

    ``offer()`` makes a version pending, or replaces the pending one. When :attr:`can_take`
    is true the link takes it with ``take()``; it is then in flight, and the window is shut
    until the receiver says RECEIVED (or more), so that at most one update is on the link.
    Acknowledgements resolve what is in flight, which is never more than
    :data:`MAX_IN_FLIGHT`. ``offer_after()`` is for a version that replaces nothing of that: it
    becomes pending when everything before it is resolved. Not thread-safe.

    Args:
        epoch: Epoch of the sender.
        worker_idx: Named in the errors of outcomes; ``None`` when there is no such index.

    Attributes:
        epoch: As given.
        worker_idx: As given.
        pending: The version that waits for the link.
        in_flight: Versions that the link took and that are not resolved, oldest first.
        newest: The version that was offered last, or that the receiver had; 0 for none.
        applied: Newest version that the receiver said it applied; 0 before the first.
        visible: Newest version that the receiver sees without being told; 0 for none.
        skipped: How many versions were overtaken by a newer one.
        stray: How many acknowledgements were ignored, because they concern nothing in flight.
        error: Why this outbox was closed, or ``None``. Sticky.
    """

    __slots__ = (
        "_unreceived",
        "_waiting",
        "applied",
        "epoch",
        "error",
        "in_flight",
        "newest",
        "pending",
        "skipped",
        "stray",
        "visible",
        "worker_idx",
    )

    def __init__(self, epoch: int, *, worker_idx: int | None = None) -> None:
        self.epoch: int = epoch
        self.worker_idx: int | None = worker_idx
        self.pending: int | None = None
        self.in_flight: tuple[int, ...] = ()
        self.newest: int = 0
        self.applied: int = 0
        self.visible: int = 0
        self.skipped: int = 0
        self.stray: int = 0
        self.error: AiosyncError | None = None
        self._waiting: list[int] = []  # for all before them; ascending, and after the pending one
        self._unreceived: int | None = None  # the one in flight that shuts the window

    def __repr__(self) -> str:
        state = "closed" if self.error is not None else "open"
        return f"Outbox({state}, {self.pending=}, {self.in_flight=}, {self.applied=})"

    @property
    def can_take(self) -> bool:
        """Whether a version is pending, the window is open, and there is room in flight."""
        return (
            self.pending is not None
            and self._unreceived is None
            and self.error is None
            and len(self.in_flight) < MAX_IN_FLIGHT
        )

    @property
    def is_idle(self) -> bool:
        """Whether every version that was offered is resolved."""
        return self.pending is None and not self.in_flight

    @property
    def window_open(self) -> bool:
        """Whether the receiver answered to everything that was sent to it."""
        return self._unreceived is None

    def offer(self, version: int) -> list[Outcome]:
        """Make a version pending; the newest one wins.

        Returns:
            The outcomes of the versions that it replaced: the pending one, and those that
            waited behind it.

        Raises:
            LocalProtocolError: Not greater than the version offered last, or closed.
        """
        self._check_newer(version)
        replaced = self._waiting if self.pending is None else [self.pending, *self._waiting]
        self.pending = self.newest = version
        self._waiting = []
        return [self._skip(older, version) for older in replaced]

    def offer_after(self, version: int, kept: Container[int]) -> list[Outcome]:
        """Make a version pending once everything before it is resolved.

        Args:
            version: The version, which lacks something of an unresolved one.
            kept: Of the versions that wait already, those of which it lacks something.

        Returns:
            The outcomes of the others, which it replaced.

        Raises:
            LocalProtocolError: Not greater than the version offered last, or closed.
        """
        self._check_newer(version)
        replaced = [older for older in self._waiting if older not in kept]
        self._waiting = [*(older for older in self._waiting if older in kept), version]
        self.newest = version
        self._promote()
        return [self._skip(older, version) for older in replaced]

    def _check_newer(self, version: int) -> None:
        if self.error is not None:
            raise LocalProtocolError(f"the outbox was closed: {self.error}") from self.error
        if version <= self.newest:
            raise LocalProtocolError(f"version {version} is not newer than version {self.newest}")

    def _promote(self) -> None:
        if self._waiting and self.is_idle:
            self.pending = self._waiting.pop(0)

    def take(self) -> int:
        """Move the pending version into flight, and shut the window.

        Raises:
            LocalProtocolError: :attr:`can_take` is false.
        """
        version = self.pending
        if version is None or not self.can_take:
            raise LocalProtocolError("nothing can be taken now")
        self.pending, self._unreceived = None, version
        self.in_flight = (*self.in_flight, version)
        return version

    def offer_and_take(self, version: int) -> bool:
        """Both in one, where nothing is pending, the window is open, and there is room.

        Returns:
            Whether the version is in flight now. If not, nothing changed.
        """
        if (
            self.pending is not None
            or self._waiting
            or self._unreceived is not None
            or self.error is not None
            or version <= self.newest
            or len(self.in_flight) >= MAX_IN_FLIGHT
        ):
            return False
        self.newest = self._unreceived = version
        self.in_flight = (*self.in_flight, version)
        return True

    def start_at(self, version: int) -> None:
        """Register what the receiver had before the link was opened; nothing older is offered.

        Raises:
            LocalProtocolError: Something was offered already.
        """
        if self.newest:
            raise LocalProtocolError("this outbox is in use already")
        self.newest = self.applied = version

    def seen(self, version: int) -> None:
        """Register a version that the receiver sees without being told: nothing waits for it.

        Raises:
            LocalProtocolError: Not greater than the version offered last, closed, or something
                else is not resolved yet.
        """
        if self.error is not None or version <= self.newest:
            self._check_newer(version)
        if self.in_flight or self.pending is not None:
            raise LocalProtocolError(f"version {version} overtakes others")
        self.newest = self.visible = version

    def give_up(self, version: int, error: AiosyncError) -> list[Outcome]:
        """Fail a version that was taken last and that the link cannot carry.

        The window opens for the next version. Does nothing when the outbox was closed meanwhile.

        Raises:
            LocalProtocolError: It is not the version that was taken last, or the receiver
                has answered to it.
        """
        if self.error is not None:
            return []
        if version != self._unreceived:
            raise LocalProtocolError(f"version {version} is not on the link")
        self.in_flight, self._unreceived = self.in_flight[:-1], None
        self._promote()
        return [Outcome(version, OutcomeKind.FAILED, error=error)]

    def on_ack(self, ack: Ack) -> list[Outcome]:
        """Register what the receiver said.

        An acknowledgement of another epoch, or of a version that is not in flight, is only
        counted in :attr:`stray`: it never counts as success.

        Returns:
            Outcomes, oldest version first. RECEIVED gives none. APPLIED resolves the version
            and every older one in flight. NACK resolves the version with an
            :class:`~aiosync.errors.ApplyError`, SKIPPED resolves it alone: an older one may be
            on its way into the model meanwhile.
        """
        version, status, flying = ack.version, ack.status, self.in_flight
        if ack.epoch != self.epoch or version not in flying:
            if ack.epoch == self.epoch and version == self.visible and status == AckStatus.NACK:
                self.visible = 0  # it looked, and could not take what it saw
                return [self._refused(ack)]
            self.stray += 1
            return []
        at = flying.index(version)
        if status == AckStatus.SKIPPED:
            if version == flying[-1]:  # there is nothing newer that could have replaced it
                self.stray += 1
                return []
            self.in_flight = flying[:at] + flying[at + 1 :]
            return [self._skip(version, flying[at + 1])]
        if self._unreceived is not None and version >= self._unreceived:
            self._unreceived = None
        if status == AckStatus.RECEIVED:
            return []
        if status == AckStatus.APPLIED:
            self.applied, self.in_flight = version, flying[at + 1 :]
            outcomes = [self._skip(older, version) for older in flying[:at]] if at else []
            outcomes.append(Outcome(version, OutcomeKind.APPLIED))
        else:
            self.in_flight = flying[:at] + flying[at + 1 :]
            outcomes = [self._refused(ack)]
        if self._waiting:
            self._promote()
        return outcomes

    def close(self, error: AiosyncError) -> list[Outcome]:
        """Fail everything that is unresolved. Sticky: a second call changes nothing.

        Args:
            error: Why the receiver can get no more updates.

        Returns:
            A FAILED outcome for every version that is not resolved, oldest first.
        """
        if self.error is not None:
            return []
        self.error = error
        pending = [] if self.pending is None else [self.pending]
        versions = [*self.in_flight, *pending, *self._waiting]
        self.in_flight, self._waiting = (), []
        self.pending = self._unreceived = None
        return [Outcome(version, OutcomeKind.FAILED, error=error) for version in versions]

    def _skip(self, version: int, by: int) -> Outcome:
        self.skipped += 1
        return Outcome(version, OutcomeKind.SKIPPED, by=by)

    def _refused(self, ack: Ack) -> Outcome:
        who = "the receiver" if self.worker_idx is None else f"worker {self.worker_idx}"
        reason = f"{ack.error_type}: {ack.error_text}" if ack.error_type else ack.error_text
        error = ApplyError(
            f"{who} refused version {ack.version}: {reason or 'no reason given'}",
            worker_idx=self.worker_idx,
            version=ack.version,
            remote_type=ack.error_type,
        )
        return Outcome(ack.version, OutcomeKind.FAILED, error=error)
