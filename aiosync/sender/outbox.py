"""What workers are owed: the updates on their way to one, and those that late ones get.

A worker that is slower than the trainer gets the newest version and never sees the ones in
between: an update that still waits is replaced by the next. With ``strict=False`` an update may
hold a part of the names, such as the adapters of a model. It replaces only those of which it holds
every name; the others come before it, in order. Each stays an update of its own, as one that
workers refuse must take no other with it; but where one was replaced that is older than others,
these come together with the newest: a worker never has what the trainer never had.

Pure bookkeeping: events in, outcomes out. Must not import asyncio nor transports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aiosync.errors import AiosyncError, ApplyError, PeerClosed
from aiosync.sender.snapshots import Snapshot
from aiosync.types import AckStatus
from aiosync.wire import Ack

__all__ = ["MAX_IN_FLIGHT", "Chain", "Group", "History", "Outbox", "Outcome", "WorkerLeft"]

Group: TypeAlias = "tuple[Snapshot, ...]"
"""Updates that a worker applies as one, with the version of the last."""

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


def lacking(newest: Group, older: Sequence[Snapshot]) -> list[Snapshot]:
    """The older ones that hold something which nothing newer holds: never more than names.

    Args:
        newest: What comes next.
        older: Oldest first, as what is returned.
    """
    needed, newer = list[Snapshot](), set[str]()
    for each in reversed(older):
        if len(newest) == 1 and each.holds_same(newest[0]):  # mostly: to compare names is dear
            continue
        newer = newer or _names_of(newest)
        if not each.names <= newer:
            needed.append(each)
            newer |= each.names
    return needed[::-1]


def _names_of(snapshots: Iterable[Snapshot]) -> set[str]:
    return set[str]().union(*(each.names for each in snapshots))


class Chain:
    """Updates that come one after the other. Has a reference to each.

    Attributes:
        groups: Oldest first.
    """

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups: list[Group] = [*groups]
        for each in self.snapshots():
            each.retain()

    @property
    def version(self) -> int:
        """Of the last one; 0 for none."""
        return self.groups[-1][-1].version if self.groups else 0

    def snapshots(self) -> list[Snapshot]:
        """All of them, oldest first."""
        return [each for group in self.groups for each in group]

    def add(self, group: Group, needed: Sequence[Snapshot], *, parts: bool) -> list[int]:
        """Put a group at the end, and leave out what is not needed before it.

        Args:
            group: What comes; takes over a reference to each.
            needed: See :func:`lacking`.
            parts: What was between an update that is left out and this group comes with it.

        Returns:
            The versions of the groups that do not stay as they were.
        """
        groups, late, lost, replaced = list[Group](), list[Snapshot](), list[Snapshot](), []
        for each in self.groups:
            kept = [snapshot for snapshot in each if snapshot in needed]
            lost += [snapshot for snapshot in each if snapshot not in needed]
            if len(kept) == len(each) and not (lost and parts):
                groups.append(each)
            else:
                late += kept
                replaced.append(each[-1].version)
        self.groups = [*groups, (*late, *group)]
        for snapshot in lost:
            snapshot.release()
        return replaced

    def clear(self) -> None:
        """Give everything back."""
        snapshots, self.groups = self.snapshots(), []
        for each in snapshots:
            each.release()


class Outbox:
    """Updates on their way to one receiver.

    ``offer()`` queues a group, mostly in the place of all that wait. The link gets it from
    ``take()``; its version is then in flight, and the window is shut until the receiver says
    RECEIVED (or more), so that at most one update is on the link. Acknowledgements resolve what is
    in flight, which is never more than :data:`MAX_IN_FLIGHT`. Not thread-safe.

    Args:
        epoch: Epoch of the sender.
        worker_idx: Named in the errors of outcomes.
        has: Version that the receiver had before the link was opened; 0 for none.

    Attributes:
        epoch: As given.
        queue: What waits.
        in_flight: Versions that the link took and that are not resolved, oldest first.
        unreceived: The one of these that shuts the window.
        newest: The version that was offered last, or that the receiver had; 0 for none.
        applied: Newest version that the receiver said it applied; 0 before the first.
        received: Newest version that is complete there, applied or not; 0 before the first.
        named: Newest version that the receiver sees without being told; 0 for none.
        error: Why this outbox was closed, or ``None``. Sticky.
    """

    def __init__(self, epoch: int, worker_idx: int, has: int = 0) -> None:
        self.epoch: int = epoch
        self.queue: Chain = Chain()
        self.in_flight: tuple[int, ...] = ()
        self.unreceived: int | None = None
        self.newest: int = has
        self.applied: int = has
        self.received: int = has
        self.named: int = 0
        self.error: AiosyncError | None = None
        self._worker_idx = worker_idx
        self._taken: Group = ()  # the last group; holds every name of what is in flight

    @property
    def is_idle(self) -> bool:
        """Whether every version that was offered is resolved."""
        return not (self.queue.groups or self.in_flight)

    def offer(self, group: Group, *, parts: bool) -> list[Outcome]:
        """Queue an update newer than all before; the newest one wins.

        One that lacks a name of an unresolved one goes once everything before it is resolved.

        Args:
            group: The update; retained until the link took it.
            parts: As for :meth:`Chain.add`.

        Returns:
            The outcomes of the versions that it replaced.
        """
        queue, self.newest = self.queue, group[-1].version
        for each in group:
            each.retain()
        if not queue.groups:  # mostly
            queue.groups.append(group)
            return []
        replaced = queue.add(group, lacking(group, queue.snapshots()), parts=parts)
        return [Outcome(each, self.newest) for each in replaced]

    def take(self) -> Group | None:
        """Move the first update of the queue into flight, with its references; shut the window.

        Returns:
            ``None`` where there is none, it waits for others, the window is shut, or there is no
            room in flight.
        """
        groups, flying = self.queue.groups, self.in_flight
        if not groups or self.unreceived is not None or len(flying) >= MAX_IN_FLIGHT:
            return None
        if flying and lacking(groups[0], self._taken):
            return None  # it waits for them
        self._taken = group = groups.pop(0)
        self.unreceived = version = group[-1].version
        self.in_flight = (*flying, version)
        return group

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
            if ack.epoch == self.epoch and version == self.named and status == AckStatus.NACK:
                self.named = 0  # it looked, and could not take what it saw
                return [self._refused(ack)]
            return []
        at = flying.index(version)
        if status != AckStatus.NACK:
            self.received = max(self.received, version)
        if status == AckStatus.SKIPPED:
            if version == flying[-1]:  # there is nothing newer that could have replaced it
                return []
            self.in_flight = flying[:at] + flying[at + 1 :]
            return [Outcome(version, flying[at + 1])]
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

    def close(self, error: AiosyncError) -> list[Outcome]:
        """Fail everything that is unresolved, and give what waits back.

        Returns:
            An outcome with the error for every version that is not resolved, oldest first.
        """
        self.error = self.error or error
        versions = [*self.in_flight, *(group[-1].version for group in self.queue.groups)]
        self.in_flight, self.unreceived = (), None
        self.queue.clear()
        return [Outcome(version, error=error) for version in versions]

    def _refused(self, ack: Ack) -> Outcome:
        reason = f"{ack.error_type}: {ack.error_text}" if ack.error_type else ack.error_text
        error = ApplyError(
            f"worker {self._worker_idx} refused version {ack.version}: "
            f"{reason or 'no reason given'}",
            worker_idx=self._worker_idx,
            version=ack.version,
            remote_type=ack.error_type,
        )
        return Outcome(ack.version, error=error)


class History:
    """Updates that together hold the newest of each name, for everybody and for some.

    Nearly always that is one. Names that were never sent before are other weights, or a mistake
    that no worker can take: they come along with older ones only where the sender says that it
    sends parts. Keeps references to snapshots, and with that their memory.

    Args:
        parts: Updates hold parts of the names, also when these are new.
        num_workers: How many workers there can be; ``None`` for any number.

    Attributes:
        parts: As given; may change.
    """

    def __init__(self, parts: bool, num_workers: int | None) -> None:
        self.parts = parts
        self._num_workers = num_workers
        self._common = Chain()
        self._own: dict[int, Chain] = {}  # of workers that got others than the rest

    def add(self, key: int | None, snapshot: Snapshot) -> None:
        """Register what was sent, newest last; takes over a reference.

        Args:
            key: To which worker; ``None`` for all that got no other one of the same version.
            snapshot: The update.
        """
        common = self._common
        groups = common.groups
        if key is None and not self._own and len(groups) == 1 and len(groups[0]) == 1:  # mostly
            [(old,)] = groups
            if old.layout is snapshot.layout and old.values.keys() == snapshot.values.keys():
                common.groups = [(snapshot,)]
                old.release()  # last: a signal's handler may raise in between
                return
        if key is None:
            for idx, own in list(self._own.items()):
                if own.version < snapshot.version:
                    self._extend(own, snapshot.retain())
                    if [*map(len, own.groups)] == [1]:  # as everybody has it
                        self._own.pop(idx).clear()
            self._extend(common, snapshot)
            return
        if key not in self._own:
            older = [each for each in common.groups if each[-1].version < snapshot.version]
            self._own[key] = Chain(older)
        self._extend(self._own[key], snapshot)
        if len(self._own) == self._num_workers:
            common.clear()  # nobody is left who would get it

    def for_worker(self, idx: int) -> Chain:
        """What this worker gets when it joins, in the order in which it was sent."""
        return self._own.get(idx, self._common)

    def needed_before(self, chain: Chain, snapshot: Snapshot) -> list[Snapshot]:
        """What somebody who gets a chain would get as well if ``snapshot`` came next."""
        known = self.parts or snapshot.names <= _names_of(chain.snapshots())
        return lacking((snapshot,), chain.snapshots()) if known else []

    def forget(self, idx: int) -> None:
        """A worker that comes again under this index gets what the others get."""
        self._own.pop(idx, Chain()).clear()

    def clear(self) -> None:
        """Give everything back."""
        for chain in (self._common, *self._own.values()):
            chain.clear()
        self._own.clear()

    def _extend(self, chain: Chain, snapshot: Snapshot) -> None:
        chain.add((snapshot,), self.needed_before(chain, snapshot), parts=self.parts)
