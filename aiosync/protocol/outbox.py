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
        epoch: Epoch of the sender.
        worker_idx: As given.
    """

    __slots__ = (
        "_applied",
        "_error",
        "_in_flight",
        "_last_offered",
        "_pending",
        "_skipped",
        "_stray",
        "_unreceived",
        "_visible",
        "_waiting",
        "epoch",
        "worker_idx",
    )

    def __init__(self, epoch: int, *, worker_idx: int | None = None) -> None:
        self.epoch: int = epoch
        self.worker_idx: int | None = worker_idx
        self._pending: int | None = None
        self._in_flight: list[int] = []  # ascending
        self._waiting: list[int] = []  # for all before them; ascending, and after the pending one
        self._unreceived: int | None = None  # the one in flight that shuts the window
        self._last_offered = 0
        self._applied = 0
        self._visible = 0
        self._skipped = 0
        self._stray = 0
        self._error: AiosyncError | None = None

    def __repr__(self) -> str:
        state = "closed" if self._error is not None else "open"
        return (
            f"Outbox({state}, pending={self._pending}, in_flight={self._in_flight}, "
            f"applied={self._applied})"
        )

    @property
    def pending(self) -> int | None:
        """The version that waits for the link."""
        return self._pending

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Versions that the link took and that are not resolved, oldest first."""
        return tuple(self._in_flight)

    @property
    def applied(self) -> int:
        """Newest version that the receiver said it applied; 0 before the first."""
        return self._applied

    @property
    def skipped(self) -> int:
        """How many versions were overtaken by a newer one."""
        return self._skipped

    @property
    def stray(self) -> int:
        """How many acknowledgements were ignored, because they concern nothing in flight."""
        return self._stray

    @property
    def error(self) -> AiosyncError | None:
        """Why this outbox was closed, or ``None``. Sticky."""
        return self._error

    @property
    def can_take(self) -> bool:
        """Whether a version is pending, the window is open, and there is room in flight."""
        return (
            self._pending is not None
            and self._unreceived is None
            and self._error is None
            and len(self._in_flight) < MAX_IN_FLIGHT
        )

    @property
    def is_idle(self) -> bool:
        """Whether every version that was offered is resolved."""
        return self._pending is None and not self._in_flight

    def offer(self, version: int) -> list[Outcome]:
        """Make a version pending; the newest one wins.

        Returns:
            The outcomes of the versions that it replaced: the pending one, and those that
            waited behind it.

        Raises:
            LocalProtocolError: Not greater than the version offered last, or closed.
        """
        self._check_newer(version)
        replaced = self._waiting if self._pending is None else [self._pending, *self._waiting]
        self._pending = self._last_offered = version
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
        self._waiting = [older for older in self._waiting if older in kept]
        self._waiting.append(version)
        self._last_offered = version
        self._promote()
        return [self._skip(older, version) for older in replaced]

    def _check_newer(self, version: int) -> None:
        if self._error is not None:
            raise LocalProtocolError(f"the outbox was closed: {self._error}") from self._error
        if version <= self._last_offered:
            raise LocalProtocolError(
                f"version {version} is not newer than version {self._last_offered}"
            )

    def _promote(self) -> None:
        if self._waiting and self.is_idle:
            self._pending = self._waiting.pop(0)

    def take(self) -> int:
        """Move the pending version into flight, and shut the window.

        Raises:
            LocalProtocolError: :attr:`can_take` is false.
        """
        version = self._pending
        if version is None or not self.can_take:
            raise LocalProtocolError("nothing can be taken now")
        self._pending = None
        self._unreceived = version
        self._in_flight.append(version)
        return version

    def offer_and_take(self, version: int) -> bool:
        """Both in one, where nothing is pending, the window is open, and there is room.

        Returns:
            Whether the version is in flight now. If not, nothing changed.
        """
        if (
            self._pending is not None
            or self._waiting
            or self._unreceived is not None
            or self._error is not None
            or version <= self._last_offered
            or len(self._in_flight) >= MAX_IN_FLIGHT
        ):
            return False
        self._last_offered = self._unreceived = version
        self._in_flight.append(version)
        return True

    def start_at(self, version: int) -> None:
        """Register what the receiver had before the link was opened; nothing older is offered.

        Raises:
            LocalProtocolError: Something was offered already.
        """
        if self._last_offered:
            raise LocalProtocolError("this outbox is in use already")
        self._last_offered = self._applied = version

    def seen(self, version: int) -> None:
        """Register a version that the receiver sees without being told: nothing waits for it.

        Raises:
            LocalProtocolError: Not greater than the version offered last, closed, or something
                else is not resolved yet.
        """
        if self._error is not None or version <= self._last_offered:
            self._check_newer(version)
        if self._in_flight or self._pending is not None:
            raise LocalProtocolError(f"version {version} overtakes others")
        self._last_offered = self._visible = version

    @property
    def visible(self) -> int:
        """Newest version that the receiver sees without being told; 0 for none."""
        return self._visible

    @property
    def newest(self) -> int:
        """The version that was offered last, or that the receiver had; 0 for none."""
        return self._last_offered

    @property
    def window_open(self) -> bool:
        """Whether the receiver answered to everything that was sent to it."""
        return self._unreceived is None

    def give_up(self, version: int, error: AiosyncError) -> list[Outcome]:
        """Fail a version that was taken last and that the link cannot carry.

        The window opens for the next version. Does nothing when the outbox was closed meanwhile.

        Raises:
            LocalProtocolError: It is not the version that was taken last, or the receiver
                has answered to it.
        """
        if self._error is not None:
            return []
        if version != self._unreceived:
            raise LocalProtocolError(f"version {version} is not on the link")
        self._in_flight.remove(version)
        self._unreceived = None
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
        version = ack.version
        in_flight = self._in_flight
        if ack.status == AckStatus.APPLIED and ack.epoch == self.epoch:
            return self.on_applied(version)
        if ack.epoch != self.epoch or version not in in_flight:
            if (
                ack.epoch == self.epoch
                and version == self._visible
                and ack.status == AckStatus.NACK
            ):
                self._visible = 0  # it looked, and could not take what it saw
                return [Outcome(version, OutcomeKind.FAILED, error=self._apply_error(ack))]
            self._stray += 1
            return []
        if ack.status == AckStatus.SKIPPED:
            return self._on_skipped(version)
        if self._unreceived is not None and version >= self._unreceived:
            self._unreceived = None
        if ack.status == AckStatus.RECEIVED:
            return []
        in_flight.remove(version)
        self._promote()
        return [Outcome(version, OutcomeKind.FAILED, error=self._apply_error(ack))]

    def _on_skipped(self, version: int) -> list[Outcome]:
        in_flight = self._in_flight
        index = in_flight.index(version)
        if index + 1 == len(in_flight):  # there is nothing newer that could have replaced it
            self._stray += 1
            return []
        del in_flight[index]
        return [self._skip(version, in_flight[index])]

    def on_applied(self, version: int) -> list[Outcome]:
        """The same for an APPLIED of this epoch."""
        in_flight = self._in_flight
        if version not in in_flight:
            self._stray += 1
            return []
        if self._unreceived is not None and version >= self._unreceived:
            self._unreceived = None
        self._applied = version
        if len(in_flight) == 1:
            in_flight.clear()
            self._promote()
            return [Outcome(version, OutcomeKind.APPLIED)]
        overtaken = in_flight[: in_flight.index(version)]
        del in_flight[: len(overtaken) + 1]
        self._promote()
        outcomes = [self._skip(older, version) for older in overtaken]
        outcomes.append(Outcome(version, OutcomeKind.APPLIED))
        return outcomes

    def close(self, error: AiosyncError) -> list[Outcome]:
        """Fail everything that is unresolved. Sticky: a second call changes nothing.

        Args:
            error: Why the receiver can get no more updates.

        Returns:
            A FAILED outcome for every version that is not resolved, oldest first.
        """
        if self._error is not None:
            return []
        self._error = error
        pending = [] if self._pending is None else [self._pending]
        versions = [*self._in_flight, *pending, *self._waiting]
        self._in_flight, self._waiting = [], []
        self._pending = None
        self._unreceived = None
        return [Outcome(version, OutcomeKind.FAILED, error=error) for version in versions]

    def _skip(self, version: int, by: int) -> Outcome:
        self._skipped += 1
        return Outcome(version, OutcomeKind.SKIPPED, by=by)

    def _apply_error(self, ack: Ack) -> ApplyError:
        who = "the receiver" if self.worker_idx is None else f"worker {self.worker_idx}"
        reason = f"{ack.error_type}: {ack.error_text}" if ack.error_type else ack.error_text
        return ApplyError(
            f"{who} refused version {ack.version}: {reason or 'no reason given'}",
            worker_idx=self.worker_idx,
            version=ack.version,
            remote_type=ack.error_type,
        )
