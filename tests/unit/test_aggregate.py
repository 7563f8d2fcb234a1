"""SendTracker: who has it, and whether that is enough."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ApplyError,
    ConfigError,
    PartialSyncError,
    PeerClosed,
)
from aiosync.protocol import Outcome, SendTracker, validate_require
from aiosync.types import SendReport

V = 7
APPLIED = Outcome(V)
SKIPPED = Outcome(V, by=9)


def failed(error: AiosyncError | None = None) -> Outcome:
    return Outcome(V, error=error or ApplyError("no"))


@pytest.mark.parametrize("require", ["all", 1, 100, 0.001, 0.5, 1.0])
def test_legal_requirements(require: Any) -> None:
    validate_require(require)
    SendTracker(V, [0], require)


@pytest.mark.parametrize(
    "require", ["ALL", "", "any", 0, -1, 0.0, -0.5, 1.01, math.nan, math.inf, True, False, None, []]
)
def test_illegal_requirements(require: Any) -> None:
    for check in (validate_require, lambda each: SendTracker(V, [0], each)):
        with pytest.raises(ConfigError, match="require is"):
            check(require)


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
        (0.1, 30, 3),  # 0.1 * 30 is more than 3 in floating point
        (0.7, 10, 7),
        (0.5, 0, 0),
    ],
)
def test_needed(require: Any, workers: int, needed: int) -> None:
    assert SendTracker(V, range(workers), require).needed == needed


def test_everybody_applied() -> None:
    gone = {5: PeerClosed("gone")}
    tracker = SendTracker(V, [0, 1], nbytes=1024, lost=gone)
    assert tracker.resolve(0, APPLIED)
    assert (tracker.waiting, tracker.settled, tracker.satisfied) == ({1}, False, False)
    assert tracker.resolve(1, APPLIED)
    assert tracker.result(1.5, 3) == SendReport(
        epoch=3,
        version=V,
        acked=frozenset({0, 1}),
        lost=gone,
        elapsed=1.5,
        nbytes=1024,
    )


def test_a_failure_is_a_partial_sync_and_a_newer_version_counts() -> None:
    tracker = SendTracker(V, [0, 1, 2], lost={8: PeerClosed("before")})
    error = PeerClosed("gone")
    for worker_idx, outcome in enumerate((APPLIED, failed(error), SKIPPED)):
        tracker.resolve(worker_idx, outcome)
    with pytest.raises(PartialSyncError, match="worker 1: PeerClosed: gone") as info:
        tracker.result()
    assert (info.value.acked, info.value.failed) == ({0, 2}, {1: error})
    assert info.value.version == V


@pytest.mark.parametrize("require", [2, 0.5, 0.6])
def test_a_tolerated_failure_is_reported(require: Any) -> None:
    tracker = SendTracker(V, [0, 1, 2], require)
    tracker.resolve(0, APPLIED)
    tracker.resolve(1, failed())
    assert not tracker.satisfied
    tracker.resolve(2, SKIPPED)
    assert tracker.satisfied
    report = tracker.result()
    assert (report.acked, report.skipped, list(report.failed)) == ({0}, {2: 9}, [1])


def test_more_needed_than_there_are_targets() -> None:
    lost = {1: PeerClosed("gone")}
    for given_, text in ((lost, "gone"), ({}, "require= asks for more. Workers that have it: 0")):
        tracker = SendTracker(V, [0], require=3, lost=given_)
        tracker.resolve(0, APPLIED)
        with pytest.raises(PartialSyncError, match=text) as info:
            tracker.result()
        assert (info.value.acked, info.value.failed) == ({0}, given_)


def test_the_deadline_fails_the_rest() -> None:
    tracker = SendTracker(V, [0, 1, 2])
    tracker.resolve(1, APPLIED)
    tracker.timeout = 2.5
    tracker.time_out()
    with pytest.raises(PartialSyncError) as info:
        tracker.result()
    late = info.value.failed[0]
    assert isinstance(late, AckTimeout)
    assert (late.worker_ids, late.version, info.value.acked) == ({0, 2}, V, {1})
    assert "within 2.5 s" in str(late)
    assert info.value.failed[2] is late
    assert not tracker.resolve(0, APPLIED)  # too late


def test_nobody_is_late_when_everybody_answered() -> None:
    tracker = SendTracker(V, [0])
    tracker.resolve(0, APPLIED)
    tracker.time_out()
    assert tracker.result().acked == {0}


def test_other_versions_and_other_workers_do_not_count() -> None:
    tracker = SendTracker(V, [0])
    for version in (V - 1, V + 1):
        assert not tracker.resolve(0, Outcome(version))
    assert not tracker.resolve(1, APPLIED)
    assert tracker.waiting == {0}
    assert tracker.resolve(0, failed())
    assert not tracker.resolve(0, APPLIED)  # the first outcome counts
    assert tracker.acked == set()


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([APPLIED, SKIPPED, failed()]), max_size=12),
    st.one_of(st.just("all"), st.integers(1, 12), st.floats(0.01, 1.0)),
)
def test_the_result_follows_the_count(outcomes: list[Outcome], require: Any) -> None:
    total = len(outcomes)
    tracker = SendTracker(V, range(total), require)
    for worker_idx, outcome in enumerate(outcomes):
        assert len(tracker.waiting) == total - worker_idx
        assert tracker.resolve(worker_idx, outcome)
    assert tracker.settled
    have = sum(outcome.error is None for outcome in outcomes)
    needed = total if require == "all" else require
    if isinstance(needed, float):
        needed = needed * total - 1e-6
    if have >= needed:
        report = tracker.result()
        found = len(report.acked) + len(report.skipped), len(report.failed)
    else:
        with pytest.raises(PartialSyncError) as info:
            tracker.result()
        found = len(info.value.acked), len(info.value.failed)
    assert found == (have, total - have)
