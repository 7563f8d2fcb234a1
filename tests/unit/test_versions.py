"""VersionClock and Inbox: what is newer, what is stale, what was applied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import ConfigError, LocalProtocolError, StaleVersion
from aiosync.protocol import MAX_VERSION, Inbox, VersionClock, new_epoch


def test_epochs_are_in_range_and_differ() -> None:
    epochs = {new_epoch() for _ in range(200)}
    assert len(epochs) == 200
    assert all(1 <= epoch <= MAX_VERSION for epoch in epochs)


def test_the_clock_counts_from_one() -> None:
    clock = VersionClock(7)
    assert (clock.epoch, clock.current) == (7, 0)
    assert [clock.next(), clock.next(), clock.next()] == [1, 2, 3]
    assert clock.current == 3
    assert repr(clock) == "VersionClock(epoch=7, current=3)"
    assert VersionClock().epoch != VersionClock().epoch


def test_at_least_skips_but_never_goes_back() -> None:
    clock = VersionClock(1)
    assert clock.next(100) == 100
    assert clock.next(5) == 101
    assert clock.next(101) == 102
    assert clock.next(None) == 103


@pytest.mark.parametrize("epoch", [0, -1, 2**63, True, 1.0, "1"])
def test_an_illegal_epoch_is_refused(epoch: int) -> None:
    with pytest.raises(ConfigError, match="epoch"):
        VersionClock(epoch)


def test_the_last_version_is_the_last() -> None:
    clock = VersionClock(1)
    assert clock.next(MAX_VERSION) == MAX_VERSION
    with pytest.raises(ConfigError, match="larger"):
        clock.next()
    assert clock.current == MAX_VERSION


@pytest.mark.slow
@given(st.lists(st.none() | st.integers(-5, 50)))
def test_every_version_is_greater_than_the_one_before(bounds: list[int | None]) -> None:
    clock = VersionClock(1)
    last = 0
    for bound in bounds:
        version = clock.next(bound)
        assert version > last
        assert bound is None or version >= bound
        assert version == max(last + 1, bound or 0)
        last = version


def test_a_new_inbox_has_nothing() -> None:
    inbox = Inbox()
    assert (inbox.epoch, inbox.version, inbox.newest_epoch) == (None, 0, None)
    assert (inbox.newest, inbox.lag) == (0, 0)


def test_offer_then_apply() -> None:
    inbox = Inbox()
    inbox.offer(9, 3)
    assert (inbox.epoch, inbox.version, inbox.newest, inbox.lag) == (None, 0, 3, 3)
    inbox.applied(9, 3)
    assert (inbox.epoch, inbox.version, inbox.newest, inbox.lag) == (9, 3, 3, 0)
    inbox.offer(9, 5)
    assert (inbox.version, inbox.newest, inbox.lag) == (3, 5, 2)
    assert repr(inbox) == "Inbox(epoch=9, version=3, newest=5)"


@pytest.mark.parametrize("version", [1, 3])
def test_a_version_seen_or_older_is_stale(version: int) -> None:
    inbox = Inbox()
    inbox.offer(9, 3)
    with pytest.raises(StaleVersion, match=f"version {version} .* not newer than version 3"):
        inbox.offer(9, version)
    inbox.applied(9, 3)
    with pytest.raises(StaleVersion):
        inbox.offer(9, version)
    assert (inbox.version, inbox.newest) == (3, 3)


def test_another_epoch_is_always_accepted() -> None:
    inbox = Inbox()
    inbox.offer(9, 100)
    inbox.applied(9, 100)
    inbox.offer(2, 1)
    assert (inbox.epoch, inbox.version) == (9, 100)
    assert (inbox.newest_epoch, inbox.newest, inbox.lag) == (2, 1, 1)
    inbox.applied(2, 1)
    assert (inbox.epoch, inbox.version, inbox.lag) == (2, 1, 0)


def test_a_refused_version_is_superseded_by_any_newer_one_but_not_by_itself() -> None:
    inbox = Inbox()
    inbox.offer(9, 4)
    inbox.refused(9, 4)
    assert (inbox.version, inbox.newest, inbox.lag) == (0, 4, 4)
    with pytest.raises(StaleVersion):
        inbox.offer(9, 4)
    inbox.offer(9, 5)
    inbox.applied(9, 5)
    assert (inbox.version, inbox.lag) == (5, 0)


def test_an_older_offer_may_be_applied_while_a_newer_one_is_known() -> None:
    inbox = Inbox()
    inbox.offer(9, 1)
    inbox.offer(9, 2)
    inbox.applied(9, 1)
    assert (inbox.version, inbox.lag) == (1, 1)
    inbox.applied(9, 2)
    with pytest.raises(LocalProtocolError, match="cannot be applied over"):
        inbox.applied(9, 1)
    assert inbox.version == 2


@pytest.mark.parametrize("method", ["applied", "refused"])
def test_what_was_not_offered_cannot_be_resolved(method: str) -> None:
    inbox = Inbox()
    with pytest.raises(LocalProtocolError, match="not offered"):
        getattr(inbox, method)(9, 1)
    inbox.offer(9, 1)
    with pytest.raises(LocalProtocolError, match="not offered"):
        getattr(inbox, method)(9, 2)
    with pytest.raises(LocalProtocolError, match="not offered"):
        getattr(inbox, method)(8, 1)
    assert (inbox.epoch, inbox.version) == (None, 0)


def test_what_was_applied_may_be_forgotten() -> None:
    inbox = Inbox()
    inbox.offer(9, 1)
    inbox.applied(9, 1)
    inbox.forget()
    assert (inbox.epoch, inbox.version, inbox.lag) == (None, 0, 1)
    with pytest.raises(StaleVersion):
        inbox.offer(9, 1)
    inbox.offer(9, 2)
    inbox.applied(9, 2)
    assert (inbox.epoch, inbox.version, inbox.lag) == (9, 2, 0)


def test_what_was_applied_cannot_be_refused() -> None:
    inbox = Inbox()
    inbox.offer(9, 1)
    inbox.applied(9, 1)
    with pytest.raises(LocalProtocolError, match="was applied"):
        inbox.refused(9, 1)


def test_an_update_may_end_after_the_next_trainer_has_come() -> None:
    inbox = Inbox()
    inbox.offer(9, 4)
    inbox.offer(8, 1)
    inbox.applied(9, 4)  # it was being applied
    assert (inbox.epoch, inbox.version, inbox.lag) == (9, 4, 1)
    with pytest.raises(LocalProtocolError, match="not offered"):
        inbox.applied(9, 5)
    inbox.applied(8, 1)
    assert (inbox.epoch, inbox.version, inbox.lag) == (8, 1, 0)
    inbox.offer(9, 1)  # the former one is back, from its start
    inbox.applied(9, 1)
    assert (inbox.epoch, inbox.version, inbox.lag) == (9, 1, 0)
