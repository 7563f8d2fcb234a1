"""VersionClock and Inbox: what is newer, what is stale, what was applied."""

from __future__ import annotations

import pytest

from aiosync.errors import ConfigError, LocalProtocolError, StaleVersion
from aiosync.protocol import MAX_VERSION, Inbox, VersionClock, new_epoch


def test_epochs_are_in_range_and_differ() -> None:
    epochs = {new_epoch() for _ in range(200)}
    assert len(epochs) == 200
    assert all(1 <= epoch <= MAX_VERSION for epoch in epochs)
    assert VersionClock().epoch != VersionClock().epoch


@pytest.mark.parametrize("epoch", [0, -1, 2**63, True, 1.0, "1"])
def test_an_illegal_epoch_is_refused(epoch: int) -> None:
    with pytest.raises(ConfigError, match="epoch"):
        VersionClock(epoch)


def test_versions_are_counted() -> None:
    clock = VersionClock(1)
    assert clock.current == 0
    assert [clock.next() for _ in range(3)] == [1, 2, 3]
    assert clock.current == 3


Steps = list[tuple[str, int, int]]
OFFERED: Steps = [("offer", 9, 3)]
APPLIED: Steps = [*OFFERED, ("applied", 9, 3)]
OTHER: Steps = [*APPLIED, ("offer", 2, 1)]  # of another trainer
LATE: Steps = [*OFFERED, ("offer", 8, 1), ("applied", 9, 3)]  # it was being applied meanwhile
TWO: Steps = [("offer", 9, 1), ("offer", 9, 2), ("applied", 9, 1)]
BACK: Steps = [*OTHER, ("applied", 2, 1), ("offer", 9, 1), ("applied", 9, 1)]  # from its start


def played(steps: Steps) -> Inbox:
    inbox = Inbox()
    for method, epoch, version in steps:
        getattr(inbox, method)(epoch, version)
    return inbox


@pytest.mark.parametrize(
    ("steps", "applied", "newest", "lag"),
    [
        ([], (None, 0), (None, 0), 0),
        (OFFERED, (None, 0), (9, 3), 3),
        (APPLIED, (9, 3), (9, 3), 0),
        ([*APPLIED, ("offer", 9, 5)], (9, 3), (9, 5), 2),
        (OTHER, (9, 3), (2, 1), 1),
        ([*OTHER, ("applied", 2, 1)], (2, 1), (2, 1), 0),
        ([*OFFERED, ("offer", 9, 5), ("applied", 9, 5)], (9, 5), (9, 5), 0),
        (TWO, (9, 1), (9, 2), 1),
        ([*TWO, ("applied", 9, 2)], (9, 2), (9, 2), 0),
        (LATE, (9, 3), (8, 1), 1),
        ([*LATE, ("applied", 8, 1)], (8, 1), (8, 1), 0),
        (BACK, (9, 1), (9, 1), 0),
    ],
)
def test_what_is_applied_and_what_is_newest(
    steps: Steps, applied: tuple[int | None, int], newest: tuple[int | None, int], lag: int
) -> None:
    inbox = played(steps)
    assert (inbox.epoch, inbox.version) == applied
    assert (inbox.newest_epoch, inbox.newest) == newest
    assert inbox.lag == lag
    assert repr(inbox) == f"Inbox(epoch={applied[0]}, version={applied[1]}, newest={newest[1]})"


@pytest.mark.parametrize("steps", [OFFERED, APPLIED])
@pytest.mark.parametrize("version", [1, 3])
def test_a_version_seen_or_older_is_stale(steps: Steps, version: int) -> None:
    inbox = played(steps)
    with pytest.raises(StaleVersion, match=f"version {version} .* not newer than version 3"):
        inbox.offer(9, version)
    assert repr(inbox) == repr(played(steps))


@pytest.mark.parametrize(
    ("steps", "mistake", "text"),
    [
        ([], ("applied", 9, 1), "not offered"),
        (OFFERED, ("applied", 9, 4), "not offered"),
        ([*TWO, ("applied", 9, 2)], ("applied", 9, 1), "cannot be applied over"),
        (APPLIED, ("applied", 9, 3), "cannot be applied over"),
    ],
)
def test_mistakes_change_nothing(steps: Steps, mistake: tuple[str, int, int], text: str) -> None:
    inbox = played(steps)
    with pytest.raises(LocalProtocolError, match=text):
        getattr(inbox, mistake[0])(*mistake[1:])
    assert repr(inbox) == repr(played(steps))


def test_what_was_applied_may_be_forgotten() -> None:
    inbox = played(APPLIED)
    inbox.forget()
    assert (inbox.epoch, inbox.version, inbox.lag) == (None, 0, 3)
    with pytest.raises(StaleVersion):
        inbox.offer(9, 3)
