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
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
)
from aiosync.protocol import Outcome, OutcomeKind, SendTracker, validate_require
from aiosync.types import SendReport

V = 7
APPLIED = Outcome(V, OutcomeKind.APPLIED)
SKIPPED = Outcome(V, OutcomeKind.SKIPPED, by=9)


def failed(error: AiosyncError | None = None) -> Outcome:
    return Outcome(V, OutcomeKind.FAILED, error=error or ApplyError("no"))


def timeout(workers: frozenset[int]) -> AckTimeout:
    return AckTimeout("late", worker_ids=workers, version=V)


def never(workers: frozenset[int]) -> AckTimeout:
    raise AssertionError("nobody is late")


@pytest.mark.parametrize("require", ["all", 1, 100, 0.001, 0.5, 1.0])
def test_legal_requirements(require: Any) -> None:
    validate_require(require)
    SendTracker(V, [0], require)


@pytest.mark.parametrize(
    "require", ["ALL", "", "any", 0, -1, 0.0, -0.5, 1.01, math.nan, math.inf, True, False, None, []]
)
def test_illegal_requirements(require: Any) -> None:
    with pytest.raises(ConfigError, match="require is"):
        validate_require(require)
    with pytest.raises(ConfigError, match="require is"):
        SendTracker(V, [0], require)


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
    tracker = SendTracker(V, [0, 1])
    assert tracker.waiting == {0, 1}
    assert tracker.resolve(0, APPLIED)
    assert not tracker.done
    assert not tracker.satisfied
    with pytest.raises(LocalProtocolError, match=r"\[1\]"):
        tracker.result()
    assert tracker.resolve(1, APPLIED)
    assert tracker.done
    gone = {5: PeerClosed("gone")}
    assert tracker.result(1.5, 1024, 3, gone) == SendReport(
        epoch=3,
        version=V,
        acked=frozenset({0, 1}),
        lost=gone,
        elapsed=1.5,
        nbytes=1024,
    )


def test_a_newer_version_counts() -> None:
    tracker = SendTracker(V, [0, 1])
    tracker.resolve(0, SKIPPED)
    tracker.resolve(1, APPLIED)
    report = tracker.result()
    assert (report.acked, report.skipped, report.failed) == ({1}, {0: 9}, {})


def test_a_failure_is_a_partial_sync() -> None:
    tracker = SendTracker(V, [0, 1, 2])
    error = PeerClosed("gone")
    tracker.resolve(0, APPLIED)
    tracker.resolve(1, failed(error))
    tracker.resolve(2, SKIPPED)
    with pytest.raises(PartialSyncError, match="worker 1: PeerClosed: gone") as info:
        tracker.result(lost={8: PeerClosed("before")})
    assert info.value.acked == {0, 2}
    assert info.value.failed == {1: error}
    assert info.value.version == V


@pytest.mark.parametrize("require", [2, 0.5, 0.6])
def test_a_tolerated_failure_is_reported(require: Any) -> None:
    tracker = SendTracker(V, [0, 1, 2], require)
    tracker.resolve(0, APPLIED)
    tracker.resolve(1, failed())
    assert not tracker.satisfied
    tracker.resolve(2, APPLIED)
    assert tracker.satisfied
    report = tracker.result()
    assert report.acked == {0, 2}
    assert list(report.failed) == [1]


def test_more_needed_than_there_are_targets() -> None:
    tracker = SendTracker(V, [0], 2)
    tracker.resolve(0, APPLIED)
    lost = {1: PeerClosed("gone")}
    with pytest.raises(PartialSyncError) as info:
        tracker.result(lost=lost)
    assert info.value.acked == {0}
    assert info.value.failed == lost


def test_the_deadline_fails_the_rest() -> None:
    tracker = SendTracker(V, [0, 1, 2])
    tracker.resolve(1, APPLIED)
    tracker.timed_out(timeout)
    assert tracker.done
    with pytest.raises(PartialSyncError) as info:
        tracker.result()
    assert info.value.acked == {1}
    late = info.value.failed[0]
    assert isinstance(late, AckTimeout)
    assert late.worker_ids == {0, 2}
    assert info.value.failed[2] is late
    assert not tracker.resolve(0, APPLIED)  # too late


def test_nobody_is_late_when_everybody_answered() -> None:
    tracker = SendTracker(V, [0])
    tracker.resolve(0, APPLIED)
    tracker.timed_out(never)
    assert tracker.result().acked == {0}


def test_other_versions_and_other_workers_do_not_count() -> None:
    tracker = SendTracker(V, [0])
    assert not tracker.resolve(0, Outcome(V - 1, OutcomeKind.APPLIED))
    assert not tracker.resolve(0, Outcome(V + 1, OutcomeKind.APPLIED))
    assert not tracker.resolve(1, APPLIED)
    assert not tracker.done
    assert tracker.resolve(0, failed())
    assert not tracker.resolve(0, APPLIED)  # the first outcome counts
    assert tracker.acked == set()


def test_incomplete_outcomes_are_refused() -> None:
    tracker = SendTracker(V, [0])
    with pytest.raises(LocalProtocolError, match="overtook"):
        tracker.resolve(0, Outcome(V, OutcomeKind.SKIPPED))
    with pytest.raises(LocalProtocolError, match="error"):
        tracker.resolve(0, Outcome(V, OutcomeKind.FAILED))
    assert not tracker.done


def test_no_targets_are_done_at_once() -> None:
    tracker = SendTracker(V, [])
    assert tracker.done
    assert tracker.result().acked == frozenset()


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([APPLIED, SKIPPED, failed()]), max_size=12),
    st.one_of(st.just("all"), st.integers(1, 12), st.floats(0.01, 1.0)),
)
def test_the_result_follows_the_count(outcomes: list[Outcome], require: Any) -> None:
    total = len(outcomes)
    tracker = SendTracker(V, range(total), require)
    for worker_idx, outcome in enumerate(outcomes):
        assert not tracker.done
        assert tracker.resolve(worker_idx, outcome)
    assert tracker.done
    have = sum(outcome.kind is not OutcomeKind.FAILED for outcome in outcomes)
    if require == "all":
        enough = have == total
    elif isinstance(require, int):
        enough = have >= require
    else:
        enough = have >= require * total - 1e-6
    if enough:
        report = tracker.result()
        assert len(report.acked) + len(report.skipped) == have
        assert len(report.failed) == total - have
    else:
        with pytest.raises(PartialSyncError) as info:
            tracker.result()
        assert len(info.value.acked) == have
        assert len(info.value.failed) == total - have


def test_too_few_workers_are_a_reason_of_their_own() -> None:
    tracker = SendTracker(V, [0], require=3)
    tracker.resolve(0, APPLIED)
    with pytest.raises(PartialSyncError, match="require= asks for more. Workers that have it: 0"):
        tracker.result()
