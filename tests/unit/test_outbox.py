"""Outbox: coalescing, the window, acknowledgements; and Outbox and Inbox over a lossless link."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aiosync.errors import (
    ApplyError,
    LocalProtocolError,
    PeerClosed,
    StaleVersion,
    TransportBroken,
)
from aiosync.protocol import MAX_IN_FLIGHT, Inbox, Outbox, Outcome, OutcomeKind
from aiosync.types import AckStatus
from aiosync.wire import Ack

EPOCH = 42
RECEIVED, APPLIED, NACK = AckStatus.RECEIVED, AckStatus.APPLIED, AckStatus.NACK
SKIPPED = AckStatus.SKIPPED


def ack(version: int, status: AckStatus = APPLIED, epoch: int = EPOCH) -> Ack:
    return Ack(epoch, version, status)


def done(version: int) -> Outcome:
    return Outcome(version, OutcomeKind.APPLIED)


def skipped(version: int, by: int) -> Outcome:
    return Outcome(version, OutcomeKind.SKIPPED, by=by)


def outbox_with(*versions: int, received: bool = True) -> Outbox:
    """An outbox with these versions in flight."""
    outbox = Outbox(EPOCH, worker_idx=3)
    for version in versions:
        outbox.offer(version)
        assert outbox.take() == version
        if received:
            outbox.on_ack(ack(version, RECEIVED))
    return outbox


def test_a_new_outbox_has_nothing_to_do() -> None:
    outbox = Outbox(EPOCH)
    assert not outbox.can_take
    assert (outbox.pending, outbox.in_flight, outbox.applied) == (None, (), 0)
    with pytest.raises(LocalProtocolError, match="nothing can be taken"):
        outbox.take()


def test_one_version_from_offer_to_applied() -> None:
    outbox = Outbox(EPOCH)
    assert outbox.offer(1) == []
    assert (outbox.pending, outbox.can_take) == (1, True)
    assert outbox.take() == 1
    assert (outbox.pending, outbox.can_take, outbox.in_flight) == (None, False, (1,))
    assert outbox.on_ack(ack(1, RECEIVED)) == []
    assert (outbox.in_flight, outbox.applied) == ((1,), 0)
    assert outbox.on_ack(ack(1)) == [done(1)]
    assert (outbox.in_flight, outbox.applied, outbox.skipped, outbox.stray) == ((), 1, 0, 0)


def test_the_newest_pending_version_wins() -> None:
    outbox = Outbox(EPOCH)
    outbox.offer(1)
    assert outbox.offer(2) == [skipped(1, by=2)]
    assert outbox.offer(9) == [skipped(2, by=9)]
    assert outbox.take() == 9
    assert outbox.skipped == 2


def test_one_that_lacks_a_part_waits_for_those_before_it() -> None:
    outbox = outbox_with(1)
    assert outbox.offer_after(2, ()) == []
    assert not outbox.can_take
    assert not outbox.offer_and_take(3)
    assert outbox.on_ack(ack(1)) == [done(1)]
    assert outbox.pending == 2
    assert outbox.take() == 2
    assert outbox.on_ack(ack(2)) == [done(2)]
    assert outbox.is_idle


def test_of_those_that_wait_the_new_one_replaces_what_it_may() -> None:
    outbox = outbox_with(1)
    outbox.offer_after(2, ())
    assert outbox.offer_after(3, {2}) == []
    assert outbox.offer_after(4, {3}) == [skipped(2, 4)]
    assert outbox.on_ack(ack(1, NACK))[0].kind is OutcomeKind.FAILED
    assert (outbox.pending, outbox.newest) == (3, 4)
    assert outbox.offer(5) == [skipped(3, 5), skipped(4, 5)]
    assert outbox.take() == 5
    assert not outbox.can_take


def test_what_waits_fails_with_the_link() -> None:
    outbox = outbox_with(1)
    outbox.offer_after(2, ())
    outbox.offer_after(3, {2})
    error = PeerClosed("gone")
    assert [each.version for each in outbox.close(error)] == [1, 2, 3]
    assert outbox.is_idle
    with pytest.raises(LocalProtocolError):
        outbox.offer_after(4, ())


def test_what_waits_comes_after_one_that_the_link_cannot_carry() -> None:
    outbox = outbox_with(1, received=False)
    outbox.offer_after(2, ())
    outbox.give_up(1, TransportBroken("too large"))
    assert outbox.take() == 2


@pytest.mark.parametrize("version", [4, 5])
def test_only_newer_versions_are_offered(version: int) -> None:
    outbox = Outbox(EPOCH)
    outbox.offer(5)
    outbox.take()
    with pytest.raises(LocalProtocolError, match="not newer than version 5"):
        outbox.offer(version)
    assert outbox.pending is None


@pytest.mark.parametrize("status", [RECEIVED, APPLIED, NACK])
def test_any_answer_opens_the_window(status: AckStatus) -> None:
    outbox = outbox_with(1, received=False)
    outbox.offer(2)
    assert not outbox.can_take
    with pytest.raises(LocalProtocolError):
        outbox.take()
    outbox.on_ack(ack(1, status))
    assert outbox.can_take
    assert outbox.take() == 2


def test_an_answer_to_an_older_version_leaves_the_window_shut() -> None:
    outbox = outbox_with(1)
    outbox.offer(2)
    outbox.take()
    outbox.offer(3)
    assert outbox.on_ack(ack(1)) == [done(1)]
    assert not outbox.can_take


def test_applied_skips_what_is_older() -> None:
    outbox = outbox_with(1, 2, 3, 4)
    assert outbox.on_ack(ack(3)) == [skipped(1, by=3), skipped(2, by=3), done(3)]
    assert (outbox.in_flight, outbox.applied, outbox.skipped) == ((4,), 3, 2)


def test_skipped_resolves_one_version_alone() -> None:
    outbox = outbox_with(1, 2, 4)
    outbox.offer(7)
    assert outbox.take() == 7
    assert outbox.on_ack(ack(2, SKIPPED)) == [skipped(2, by=4)]
    assert (outbox.in_flight, outbox.applied, outbox.skipped) == ((1, 4, 7), 0, 1)
    assert not outbox.window_open, "nothing was said about version 7"
    assert outbox.on_ack(ack(4, SKIPPED)) == [skipped(4, by=7)]
    assert outbox.on_ack(ack(1)) == [done(1)], "the older one was being applied meanwhile"
    assert outbox.on_ack(ack(7)) == [done(7)]
    assert (outbox.in_flight, outbox.applied, outbox.skipped, outbox.stray) == ((), 7, 2, 0)


def test_nothing_takes_the_place_of_the_newest_version() -> None:
    outbox = outbox_with(1, 2)
    outbox.offer(3)
    assert outbox.on_ack(ack(2, SKIPPED)) == []
    assert (outbox.in_flight, outbox.skipped, outbox.stray) == ((1, 2), 0, 1)
    assert outbox.take() == 3
    assert outbox.on_ack(ack(3, SKIPPED)) == []
    assert (outbox.in_flight, outbox.window_open, outbox.stray) == ((1, 2, 3), False, 2)


def test_a_receiver_that_settles_nothing_gets_no_more() -> None:
    outbox = outbox_with(*range(1, MAX_IN_FLIGHT + 1))
    assert not outbox.offer_and_take(MAX_IN_FLIGHT + 1)
    assert outbox.offer(MAX_IN_FLIGHT + 1) == []
    assert not outbox.can_take
    assert outbox.offer(MAX_IN_FLIGHT + 2) == [skipped(MAX_IN_FLIGHT + 1, by=MAX_IN_FLIGHT + 2)]
    assert outbox.on_ack(ack(1, SKIPPED)) == [skipped(1, by=2)]
    assert outbox.take() == MAX_IN_FLIGHT + 2
    outbox.on_ack(ack(MAX_IN_FLIGHT + 2))
    assert (outbox.in_flight, outbox.applied) == ((), MAX_IN_FLIGHT + 2)
    assert outbox.offer_and_take(MAX_IN_FLIGHT + 3)


def test_a_nack_fails_one_version_and_says_why() -> None:
    outbox = outbox_with(1, 2)
    (outcome,) = outbox.on_ack(Ack(EPOCH, 2, NACK, "ManifestMismatch", "missing: a"))
    assert (outcome.version, outcome.kind) == (2, OutcomeKind.FAILED)
    error = outcome.error
    assert isinstance(error, ApplyError)
    assert (error.worker_idx, error.version, error.remote_type) == (3, 2, "ManifestMismatch")
    assert str(error) == "worker 3 refused version 2: ManifestMismatch: missing: a"
    assert (outbox.in_flight, outbox.applied) == ((1,), 0)


def test_a_nack_without_a_reason() -> None:
    outbox = Outbox(EPOCH)
    outbox.offer(1)
    outbox.take()
    (outcome,) = outbox.on_ack(ack(1, NACK))
    assert str(outcome.error) == "the receiver refused version 1: no reason given"


@pytest.mark.parametrize("status", list(AckStatus))
def test_stray_acknowledgements_are_counted_and_never_success(status: AckStatus) -> None:
    outbox = outbox_with(5, received=False)
    outbox.offer(6)
    for stray in (
        ack(5, status, epoch=EPOCH + 1),  # another epoch
        ack(4, status),  # never offered
        ack(6, status),  # not taken yet
        ack(7, status),  # from the future
    ):
        assert outbox.on_ack(stray) == []
    assert outbox.stray == 4
    assert (outbox.in_flight, outbox.applied, outbox.can_take) == ((5,), 0, False)
    assert outbox.on_ack(ack(5)) == [done(5)]
    assert outbox.on_ack(ack(5, status)) == []  # answered already
    assert outbox.stray == 5


def test_untake_makes_it_pending_again() -> None:
    outbox = outbox_with(1, received=False)
    assert outbox.untake(1) == []
    assert (outbox.pending, outbox.in_flight, outbox.can_take) == (1, (), True)
    assert outbox.take() == 1


def test_untake_skips_it_when_a_newer_one_is_pending() -> None:
    outbox = outbox_with(1, received=False)
    outbox.offer(2)
    assert outbox.untake(1) == [skipped(1, by=2)]
    assert (outbox.pending, outbox.in_flight, outbox.skipped) == (2, (), 1)


def test_only_an_unanswered_version_is_taken_back() -> None:
    outbox = outbox_with(1)
    with pytest.raises(LocalProtocolError, match="version 1 cannot be taken back"):
        outbox.untake(1)
    outbox.offer(2)
    with pytest.raises(LocalProtocolError):
        outbox.untake(2)
    assert outbox.in_flight == (1,)


def test_a_version_that_the_link_cannot_carry_fails_alone() -> None:
    outbox = outbox_with(1)
    outbox.offer(2)
    outbox.take()
    error = LocalProtocolError("too large")
    assert outbox.give_up(2, error) == [Outcome(2, OutcomeKind.FAILED, error=error)]
    assert outbox.in_flight == (1,)
    with pytest.raises(LocalProtocolError, match="not on the link"):
        outbox.give_up(1, error)
    outbox.offer(3)
    assert outbox.can_take
    assert outbox.on_ack(ack(1)) == [done(1)]


def test_offer_and_take_in_one() -> None:
    outbox = Outbox(EPOCH)
    assert outbox.offer_and_take(1)
    assert (outbox.in_flight, outbox.pending) == ((1,), None)
    assert not outbox.offer_and_take(2), "the window is shut"
    outbox.offer(2)
    outbox.on_ack(ack(1))
    assert not outbox.offer_and_take(3), "another version is pending"
    outbox.take()
    outbox.on_ack(ack(2))
    assert not outbox.offer_and_take(2), "not newer"
    assert outbox.offer_and_take(3)
    outbox.close(PeerClosed("gone"))
    assert not outbox.offer_and_take(4)
    assert outbox.give_up(3, PeerClosed("gone")) == []


def test_close_fails_everything_once() -> None:
    outbox = outbox_with(1, 2)
    outbox.offer(3)
    error = TransportBroken("cut")
    assert outbox.close(error) == [
        Outcome(version, OutcomeKind.FAILED, error=error) for version in (1, 2, 3)
    ]
    assert outbox.close(PeerClosed("again")) == []
    assert outbox.error is error
    assert (outbox.pending, outbox.in_flight, outbox.can_take) == (None, (), False)
    with pytest.raises(LocalProtocolError, match="cut") as info:
        outbox.offer(4)
    assert info.value.__cause__ is error
    assert outbox.untake(2) == []
    assert outbox.on_ack(ack(1)) == []
    assert outbox.stray == 1
    assert "closed" in repr(outbox)


class Link(RuleBasedStateMachine):
    """A sender and a receiver that stages one update at a time, over a link that keeps order.

    A thread of the receiver takes what is staged and is done with it later, while newer ones
    come. The link may be cut. Every version that was offered must end in exactly one outcome, and
    the outcome must be the truth about the receiver.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(EPOCH, worker_idx=0)
        self.inbox = Inbox()
        self.offered = 0
        self.updates: list[int] = []
        self.acks: list[Ack] = []
        self.staged: int | None = None
        self.applying: int | None = None  # by a thread, which has taken it
        self.outcomes: dict[int, Outcome] = {}
        self.applied_log: list[int] = []
        self.refused_log: set[int] = set()
        self.dropped_log: set[int] = set()
        self.seen: list[int] = []
        self.closed = False
        self.after: dict[int, set[int]] = {}  # which versions each must not overtake

    def record(self, outcomes: list[Outcome]) -> None:
        assert [outcome.version for outcome in outcomes] == sorted(o.version for o in outcomes)
        for outcome in outcomes:
            assert outcome.version not in self.outcomes, "a version has one outcome"
            self.outcomes[outcome.version] = outcome

    @initialize(known=st.booleans())
    def start(self, known: bool) -> None:
        if known:  # the receiver comes from another trainer, which was further
            self.inbox.offer(EPOCH + 1, 1000)
            self.inbox.applied(EPOCH + 1, 1000)

    @precondition(lambda self: not self.closed)
    @rule(step=st.integers(1, 3))
    def offer(self, step: int) -> None:
        self.offered += step
        self.record(self.outbox.offer(self.offered))

    @precondition(lambda self: not self.closed)
    @rule(data=st.data())
    def offer_a_part(self, data: st.DataObject) -> None:
        waiting = self.outbox._waiting
        kept = data.draw(st.sets(st.sampled_from(waiting))) if waiting else set()
        unresolved = {v for v in self.open_versions() if v not in set(waiting) - kept}
        self.offered += 1
        self.after[self.offered] = unresolved
        self.record(self.outbox.offer_after(self.offered, kept))

    def open_versions(self) -> set[int]:
        outbox = self.outbox
        pending = [] if outbox.pending is None else [outbox.pending]
        return {*outbox.in_flight, *pending, *outbox._waiting}

    @precondition(lambda self: not self.closed)
    @rule(step=st.integers(1, 3))
    def offer_and_send(self, step: int) -> None:
        if self.outbox.offer_and_take(self.offered + step):
            self.offered += step
            self.updates.append(self.offered)

    @precondition(lambda self: self.outbox.can_take)
    @rule()
    def send(self) -> None:
        version = self.outbox.take()
        assert self.after.get(version, set()) <= self.outcomes.keys()
        self.updates.append(version)

    @precondition(lambda self: self.outbox.can_take)
    @rule(newer=st.booleans())
    def cancel_a_send(self, newer: bool) -> None:
        version = self.outbox.take()
        if newer:
            self.offered += 1
            self.record(self.outbox.offer(self.offered))
        self.record(self.outbox.untake(version))

    @precondition(lambda self: self.updates)
    @rule()
    def receive(self) -> None:
        version = self.updates.pop(0)
        self.inbox.offer(EPOCH, version)  # never stale on a link that keeps order
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
        else:
            self.inbox.refused(EPOCH, version)
            self.refused_log.add(version)
        self.acks.append(ack(version, APPLIED if fits else NACK))

    @precondition(lambda self: self.acks)
    @rule(repeat=st.booleans())
    def acknowledge(self, repeat: bool) -> None:
        message = self.acks.pop(0)
        self.record(self.outbox.on_ack(message))
        if repeat and message.status is not RECEIVED:
            before = self.outbox.stray
            assert self.outbox.on_ack(message) == []
            assert self.outbox.stray == before + 1

    @rule(status=st.sampled_from(AckStatus), ahead=st.integers(1, 3))
    def a_stray_acknowledgement(self, status: AckStatus, ahead: int) -> None:
        before = self.outbox.stray
        assert self.outbox.on_ack(ack(self.offered + ahead, status)) == []
        assert self.outbox.on_ack(ack(max(1, self.offered), status, EPOCH + 1)) == []
        assert self.outbox.stray == before + 2

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
        open_versions = self.open_versions()
        assert not open_versions & self.outcomes.keys()
        if self.closed:
            assert not open_versions
        # The newest version is open or has its outcome: coalescing never drops it.
        if self.offered:
            assert self.offered in open_versions or self.offered in self.outcomes

    @invariant()
    def outcomes_are_true(self) -> None:
        for version, outcome in self.outcomes.items():
            if outcome.kind is OutcomeKind.APPLIED:
                assert version in self.applied_log
            elif outcome.kind is OutcomeKind.SKIPPED:
                assert outcome.by is not None
                assert outcome.by > version
                assert version not in self.applied_log
                assert version != self.applying
                assert version not in self.seen or version in self.dropped_log
            elif not self.closed:
                assert version in self.refused_log

    @invariant()
    def the_receiver_only_moves_forward(self) -> None:
        assert self.applied_log == sorted(set(self.applied_log))
        # On the link or its answer, staged, being applied or its answer, dropped or its answer.
        assert len(self.outbox.in_flight) <= 3 + len(self.acks)
        assert self.outbox.applied in [0, *self.applied_log]
        if self.applied_log:
            assert (self.inbox.epoch, self.inbox.version) == (EPOCH, self.applied_log[-1])
        if self.seen:
            assert self.inbox.lag == self.inbox.newest - (
                self.applied_log[-1] if self.applied_log else 0
            )

    def teardown(self) -> None:
        """When everything is delivered and applied, the receiver has the newest version."""
        if self.closed:
            return
        while self.open_versions() - self.refused_log:
            while self.outbox.can_take:
                self.send()
            while self.updates:
                self.receive()
            while self.acks:
                self.acknowledge(False)
            if self.outbox.can_take:
                continue
            if self.applying is not None:
                self.end_to_apply(True)
            if self.staged is not None:
                self.begin_to_apply()
                self.end_to_apply(True)
            while self.acks:
                self.acknowledge(False)
        assert self.outbox.pending is None
        if self.offered and self.offered not in self.refused_log:
            assert self.inbox.version == self.offered == self.outbox.applied
            assert self.outbox.in_flight == ()
            assert self.outcomes[self.offered].kind is OutcomeKind.APPLIED


TestLink = pytest.mark.slow(Link.TestCase)
TestLink.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
