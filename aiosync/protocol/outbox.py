"""What a sender owes to one receiver: updates that wait, mostly one, and those under way.

A receiver that is slower than the trainer gets the newest version and never sees the ones in
between: an update that is still waiting is replaced by the next. Only one that lacks a part of
what comes before it waits until that has arrived. Pure bookkeeping: events in, outcomes out. This
module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from aiosync.errors import AiosyncError, ApplyError, LocalProtocolError, PeerClosed
from aiosync.types import AckStatus
from aiosync.wire import Ack

__all__ = ["MAX_IN_FLIGHT", "Outbox", "Outcome", "WorkerLeft"]

MAX_IN_FLIGHT = 64
"""How many versions one receiver may leave unresolved; it gets no more before it settles one.

aiosync's own receivers say at once what was replaced, and have a handful.
"""


class WorkerLeft(PeerClosed):
    """The worker was closed, and said so: that is no failure of anything."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one version at one receiver: it is on it, unless one of the others says not.

    There is exactly one for each version offered.

    Attributes:
        version: Which version.
        by: The newer one that overtook it; the receiver never needs it again.
        error: Why the receiver did not get it, or refused it.
    """

    version: int
    by: int | None = None
    error: AiosyncError | None = None


class Outbox:
    """Versions on their way to one receiver.

    ``offer()`` queues a version, mostly in the place of all that wait. The link gets it from
    ``take()``; it is then in flight, and the window is shut until the receiver says RECEIVED (or
    more), so that at most one update is on the link. Acknowledgements resolve what is in flight,
    which is never more than :data:`MAX_IN_FLIGHT`. Not thread-safe.

    Args:
        epoch: Epoch of the sender.
        worker_idx: Named in the errors of outcomes.
        has: Version that the receiver had before the link was opened; 0 for none.

    Attributes:
        epoch: As given.
        worker_idx: As given.
        queue: The versions that wait, oldest first.
        in_flight: Versions that the link took and that are not resolved, oldest first.
        unreceived: The one of these that shuts the window.
        newest: The version that was offered last, or that the receiver had; 0 for none.
        applied: Newest version that the receiver said it applied; 0 before the first.
        visible: Newest version that the receiver sees without being told; 0 for none.
        skipped: How many versions were overtaken by a newer one.
        error: Why this outbox was closed, or ``None``. Sticky.
    """

    __slots__ = (
        "_overtakes",
        "applied",
        "epoch",
        "error",
        "in_flight",
        "newest",
        "queue",
        "skipped",
        "unreceived",
        "visible",
        "worker_idx",
    )

    def __init__(self, epoch: int, worker_idx: int, has: int = 0) -> None:
        self.epoch: int = epoch
        self.worker_idx: int = worker_idx
        self.queue: list[int] = []
        self.in_flight: tuple[int, ...] = ()
        self.unreceived: int | None = None
        self.newest: int = has
        self.applied: int = has
        self.visible: int = 0
        self.skipped: int = 0
        self.error: AiosyncError | None = None
        self._overtakes = 0  # the version that need not wait for what is in flight

    def __repr__(self) -> str:
        state = "closed" if self.error is not None else "open"
        return f"Outbox({state}, {self.queue=}, {self.in_flight=}, {self.applied=})"

    @property
    def is_idle(self) -> bool:
        """Whether every version that was offered is resolved."""
        return not (self.queue or self.in_flight)

    def offer(self, version: int, kept: Container[int] | None = None) -> list[Outcome]:
        """Queue a version; the newest one wins.

        Args:
            version: The version.
            kept: ``None`` where it replaces all that is not in flight. Otherwise it lacks
                something of an unresolved one, and goes once everything before it is resolved:
                of those that wait, these are not replaced.

        Returns:
            The outcomes of the versions that it replaced.

        Raises:
            LocalProtocolError: Not greater than the version offered last, or closed.
        """
        if self.error is not None:
            raise LocalProtocolError(f"the outbox was closed: {self.error}") from self.error
        if version <= self.newest:
            raise LocalProtocolError(f"version {version} is not newer than version {self.newest}")
        if kept is None:
            self._overtakes, kept = version, ()
        if not self.queue:  # mostly
            self.queue.append(version)
            self.newest = version
            return []
        before, self.queue = self.queue, [*(each for each in self.queue if each in kept), version]
        self.newest = version
        return [self._skip(each, version) for each in before if each not in kept]

    def take(self) -> int | None:
        """Move the first version of the queue into flight, and shut the window.

        Returns:
            ``None`` where there is none, it waits for others, the window is shut, or there is no
            room in flight.
        """
        queue, flying = self.queue, self.in_flight
        if not queue or self.unreceived is not None or len(flying) >= MAX_IN_FLIGHT:
            return None
        if flying and queue[0] != self._overtakes:
            return None
        self.unreceived = version = queue.pop(0)
        self.in_flight = (*flying, version)
        return version

    def give_up(self, version: int, error: AiosyncError) -> list[Outcome]:
        """Fail a version that was taken and that the link cannot carry; the window opens.

        Does nothing where the receiver has answered to it all the same.
        """
        if version != self.unreceived:
            return []
        self.in_flight, self.unreceived = self.in_flight[:-1], None
        return [Outcome(version, error=error)]

    def on_ack(self, ack: Ack) -> list[Outcome]:
        """Register what the receiver said.

        An acknowledgement of another epoch, or of a version that is not in flight, is ignored: it
        never counts as success.

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
            return []
        at = flying.index(version)
        if status == AckStatus.SKIPPED:
            if version == flying[-1]:  # there is nothing newer that could have replaced it
                return []
            self.in_flight = flying[:at] + flying[at + 1 :]
            return [self._skip(version, flying[at + 1])]
        if self.unreceived is not None and version >= self.unreceived:
            self.unreceived = None
        if status == AckStatus.RECEIVED:
            return []
        if status == AckStatus.APPLIED:
            self.applied, self.in_flight = version, flying[at + 1 :]
            outcomes = [self._skip(older, version) for older in flying[:at]] if at else []
            outcomes.append(Outcome(version))
        else:
            self.in_flight = flying[:at] + flying[at + 1 :]
            outcomes = [self._refused(ack)]
        return outcomes

    def close(self, error: AiosyncError) -> list[Outcome]:
        """Fail everything that is unresolved. Sticky: a second call changes nothing.

        Args:
            error: Why the receiver can get no more updates.

        Returns:
            An outcome with it for every version that is not resolved, oldest first.
        """
        self.error = self.error or error
        versions = [*self.in_flight, *self.queue]
        self.in_flight, self.queue, self.unreceived = (), [], None
        return [Outcome(version, error=error) for version in versions]

    def _skip(self, version: int, by: int) -> Outcome:
        self.skipped += 1
        return Outcome(version, by)

    def _refused(self, ack: Ack) -> Outcome:
        reason = f"{ack.error_type}: {ack.error_text}" if ack.error_type else ack.error_text
        error = ApplyError(
            f"worker {self.worker_idx} refused version {ack.version}: "
            f"{reason or 'no reason given'}",
            worker_idx=self.worker_idx,
            version=ack.version,
            remote_type=ack.error_type,
        )
        return Outcome(ack.version, error=error)
