"""The sender's bookkeeping without I/O: updates in flight, and the workers that have a version."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiosync.errors import (
    AiosyncError,
    ApplyError,
    StaleVersion,
    TransportBroken,
)
from aiosync.protocol import Inbox
from aiosync.sender.outbox import MAX_IN_FLIGHT, Outbox, Outcome, Send
from aiosync.types import AckStatus
from aiosync.wire import Ack

# -- updates that are offered to one worker -------------------------------------------------------


EPOCH = 42
RECEIVED, APPLIED, NACK = AckStatus.RECEIVED, AckStatus.APPLIED, AckStatus.NACK
SKIPPED = AckStatus.SKIPPED


class Part:
    """An update that holds some of the names, and counts its references."""

    def __init__(self, version: int, names: str = "abc") -> None:
        self.version = version
        self.names = {*names}
        self.references = 0

    def holds_same(self, other: Any) -> bool:
        return self.names == other.names

    def retain(self) -> Part:
        self.references += 1
        return self

    def release(self) -> None:
        self.references -= 1
        assert self.references >= 0


def offer(outbox: Outbox, part: Any) -> list[Outcome]:
    return outbox.offer((part,), parts=True)


def ack(version: int, status: AckStatus = APPLIED, epoch: int = EPOCH) -> Ack:
    return Ack(epoch, version, status)


def skipped(version: int, by: int) -> Outcome:
    return Outcome(version, by=by)


def offer_and_take(outbox: Outbox, version: int) -> bool:
    """Return True if a version that is offered now goes out at once, and replaces none."""
    replaced, taken = offer(outbox, Part(version)), outbox.take()
    return not replaced and taken is not None and taken[-1].version == version


def outbox_with(*versions: int, received: bool = True) -> Outbox:
    """Return an outbox with these versions in flight."""
    outbox = Outbox(EPOCH, 3)
    for version in versions:
        assert offer_and_take(outbox, version)
        if received:
            outbox.on_ack(ack(version, RECEIVED))
    return outbox


def test_a_receiver_that_settles_nothing_gets_no_more() -> None:
    outbox = outbox_with(*range(1, MAX_IN_FLIGHT + 1))
    offer(outbox, Part(MAX_IN_FLIGHT + 1))
    assert outbox.take() is None
    assert outbox.on_ack(ack(1, SKIPPED)) == [skipped(1, by=2)]
    assert outbox.take() is not None


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (("ManifestMismatch", "lacks a"), "worker 3 refused version 2: ManifestMismatch: lacks a"),
        (("", ""), "worker 3 refused version 2: no reason given"),
    ],
)
def test_a_nack_fails_one_version_and_says_why(reason: tuple[str, str], text: str) -> None:
    outbox = outbox_with(2, received=False)
    [outcome] = outbox.on_ack(Ack(EPOCH, 2, NACK, *reason))
    error = outcome.error
    assert isinstance(error, ApplyError)
    assert (error.worker_idx, error.version, error.remote_type) == (3, 2, reason[0])
    assert text in str(error)


@pytest.mark.parametrize("status", [APPLIED, NACK, RECEIVED])
def test_an_answer_to_another_epoch_counts_for_nothing(status: AckStatus) -> None:
    outbox = outbox_with(1, received=False)
    assert outbox.on_ack(ack(1, status, EPOCH + 1)) == []
    assert (outbox.in_flight, outbox.unreceived, outbox.applied) == ((1,), 1, 0)


def test_a_named_version_is_refused_once_also_after_a_newer_one_was_named() -> None:
    outbox = outbox_with(1, 2)
    outbox.on_ack(ack(1))
    outbox.on_ack(ack(2, NACK))
    outbox.named_version = 5
    # Both were settled before.
    assert outbox.on_ack(ack(1, NACK)) == outbox.on_ack(ack(2, NACK)) == []
    for version, named in ((3, 5), (4, 5), (5, 0)):
        [outcome] = outbox.on_ack(ack(version, NACK))
        assert isinstance(outcome.error, ApplyError)
        assert (outcome.version, outbox.named_version) == (version, named)
        assert outbox.on_ack(ack(version, NACK)) == []
    assert outbox.on_ack(ack(6, NACK)) == []


class Link(RuleBasedStateMachine):
    """A sender and a receiver that stages one update at a time, over a link that keeps order.

    A thread of the receiver takes the staged update and finishes it later, while newer updates
    arrive. Updates may hold a part of the names. The link may be cut. Each version that was offered
    must end in exactly one outcome, which must be true of the receiver. The receiver never has
    weights that the trainer never had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(EPOCH, 0)
        self.inbox = Inbox()
        self.offered = 0
        # Versions that were offered and have no outcome yet.
        self.open: set[int] = set()
        self.parts: list[Part] = []
        # For each version, the version of each name that the trainer had.
        self.had: dict[int, dict[str, int]] = {0: {}}
        # The version of each name that the receiver has.
        self.has: dict[str, int] = {}
        # For each version, the group of updates that the link took.
        self.groups: dict[int, Any] = {}
        self.updates: list[int] = []
        self.acks: list[Ack] = []
        self.staged: int | None = None
        # The version that a thread has taken and is applying.
        self.applying: int | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.applied_log: list[int] = []
        self.refused_log: set[int] = set()
        self.dropped_log: set[int] = set()
        self.seen: list[int] = []
        self.closed = False

    def record(self, outcomes: list[Outcome]) -> None:
        assert [outcome.version for outcome in outcomes] == sorted(o.version for o in outcomes)
        for outcome in outcomes:
            # A version has one outcome: a second one raises KeyError here.
            self.open.remove(outcome.version)
            self.outcomes[outcome.version] = outcome

    @initialize(known=st.booleans())
    def start(self, known: bool) -> None:
        # The receiver may have had another trainer before, with higher versions.
        if known:
            self.inbox.offer(EPOCH + 1, 1000)
            self.inbox.applied(EPOCH + 1, 1000)

    @precondition(lambda self: not self.closed)
    @rule(step=st.integers(1, 3), names=st.sampled_from(["abc", "abc", "a", "b", "ab", "bc"]))
    def offer(self, step: int, names: str) -> None:
        before, self.offered = self.offered, self.offered + step
        self.open.add(self.offered)
        self.had[self.offered] = self.had[before] | dict.fromkeys(names, self.offered)
        self.parts.append(Part(self.offered, names))
        self.record(offer(self.outbox, self.parts[-1]))

    @rule()
    def send(self) -> None:
        self.take()

    def take(self) -> bool:
        group = self.outbox.take()
        if group is not None:
            version = group[-1].version
            self.groups[version] = group
            self.updates.append(version)
            for each in group:
                each.release()
        return group is not None

    @precondition(lambda self: self.updates)
    @rule()
    def receive(self) -> None:
        version = self.updates.pop(0)
        # This never raises StaleVersion, because the link keeps the order.
        self.inbox.offer(EPOCH, version)
        self.seen.append(version)
        if self.staged is not None:
            self.dropped_log.add(self.staged)
            self.acks.append(ack(self.staged, SKIPPED))
        self.staged = version
        self.acks.append(ack(version, RECEIVED))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def receive_a_duplicate(self, data: st.DataObject) -> None:
        with pytest.raises(StaleVersion):
            self.inbox.offer(EPOCH, data.draw(st.sampled_from(self.seen)))

    @precondition(lambda self: self.staged is not None and self.applying is None)
    @rule()
    def begin_to_apply(self) -> None:
        self.applying, self.staged = self.staged, None

    @precondition(lambda self: self.applying is not None)
    @rule(fits=st.booleans())
    def end_to_apply(self, fits: bool) -> None:
        version, self.applying = self.applying, None
        assert version is not None
        if fits:
            self.inbox.applied(EPOCH, version)
            self.applied_log.append(version)
            for part in self.groups[version]:
                self.has |= dict.fromkeys(part.names, part.version)
            if not self.refused_log:
                assert self.has == self.had[version]
        else:
            self.refused_log.add(version)
        self.acks.append(ack(version, APPLIED if fits else NACK))

    @precondition(lambda self: self.acks)
    @rule(repeat=st.booleans())
    def acknowledge(self, repeat: bool) -> None:
        message = self.acks.pop(0)
        self.record(self.outbox.on_ack(message))
        if repeat and message.status is not RECEIVED:
            assert self.outbox.on_ack(message) == []

    @rule(status=st.sampled_from(AckStatus), ahead=st.integers(1, 3))
    def a_stray_acknowledgement(self, status: AckStatus, ahead: int) -> None:
        assert self.outbox.on_ack(ack(self.offered + ahead, status)) == []
        assert self.outbox.on_ack(ack(max(1, self.offered), status, EPOCH + 1)) == []

    @precondition(lambda self: not self.closed)
    @rule()
    def cut(self) -> None:
        self.closed = True
        self.updates.clear()
        self.acks.clear()
        self.record(self.outbox.close(TransportBroken("cut")))

    @invariant()
    def the_window_holds(self) -> None:
        assert len(self.updates) <= 1

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.outbox.is_idle == (not self.open)
        assert {*self.outbox.in_flight} <= self.open
        waiting = self.outbox.queue.snapshots()
        assert {group[-1].version for group in self.outbox.queue.groups} <= self.open
        assert all(part.references == (part in waiting) for part in self.parts)

    @invariant()
    def outcomes_are_true(self) -> None:
        for version, outcome in self.outcomes.items():
            if outcome.error is None and outcome.by is None:
                assert version in self.applied_log
            elif outcome.by is not None:
                assert outcome.by > version
                assert version not in self.applied_log
                assert version != self.applying
                assert version not in self.seen or version in self.dropped_log
            elif not self.closed:
                assert version in self.refused_log

    @invariant()
    def the_receiver_only_moves_forward(self) -> None:
        assert self.applied_log == sorted(set(self.applied_log))
        # Up to three versions are on the link, staged, and being applied; others await an answer.
        assert len(self.outbox.in_flight) <= 3 + len(self.acks)
        assert self.outbox.applied in [0, *self.applied_log]
        if self.applied_log:
            assert (self.inbox.epoch, self.inbox.version) == (EPOCH, self.applied_log[-1])

    def teardown(self) -> None:
        """Deliver and apply all updates; check that the receiver then has the newest version."""
        if self.closed:
            return
        while self.open:
            self.nothing_is_lost()
            while self.take():
                pass
            while self.updates:
                self.receive()
            while self.acks:
                self.acknowledge(False)
            if self.take():
                continue
            if self.applying is not None:
                self.end_to_apply(True)
            if self.staged is not None:
                self.begin_to_apply()
                self.end_to_apply(True)
            while self.acks:
                self.acknowledge(False)
        if self.offered and self.offered not in self.refused_log:
            assert self.inbox.version == self.offered == self.outbox.applied
            assert self.outcomes[self.offered] == Outcome(self.offered)


TestLink = pytest.mark.slow(Link.TestCase)
TestLink.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# -- workers that have a version, and whether they are enough -------------------------------------


V = 7
HAS_IT = Outcome(V)
HAS_NEWER = Outcome(V, by=9)


def failed(error: AiosyncError | None = None) -> Outcome:
    return Outcome(V, error=error or ApplyError("no"))


@pytest.mark.parametrize(
    ("require", "workers", "needed"),
    [
        ("all", 4, 4),
        ("all", 0, 0),
        (2, 4, 2),
        (5, 4, 5),
        (0.5, 4, 2),
        (0.5, 5, 3),
        (0.51, 4, 3),
        (1.0, 7, 7),
        (0.001, 4, 1),
        # In floating point 0.1 * 30 is more than 3.
        (0.1, 30, 3),
        (0.7, 10, 7),
        (0.5, 0, 0),
    ],
)
def test_needed(require: Any, workers: int, needed: int) -> None:
    assert Send(V, {*range(workers)}, require).needed == needed


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([HAS_IT, HAS_NEWER, failed()]), max_size=12),
    st.one_of(st.just("all"), st.integers(1, 12), st.floats(0.01, 1.0)),
)
def test_the_result_follows_the_count(outcomes: list[Outcome], require: Any) -> None:
    total = len(outcomes)
    tracker = Send(V, {*range(total)}, require)
    for worker_idx, outcome in enumerate(outcomes):
        assert len(tracker.waiting) == total - worker_idx
        assert tracker.resolve(worker_idx, outcome)
    have = sum(outcome.error is None for outcome in outcomes)
    needed = total if require == "all" else require
    if isinstance(needed, float):
        needed = needed * total - 1e-6
    outcome, error = tracker.result()
    assert (error is None) == (have >= needed) == (outcome in ("ok", "skipped"))
    found = len(tracker.acked) + len(tracker.skipped), len(tracker.failed)
    if error is not None:
        assert (len(error.acked), len(error.failed)) == found
    assert found == (have, total - have)
