"""SendTracker: who has it, and whether that is enough."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import (
    AiosyncError,
    ApplyError,
    PartialSyncError,
)
from aiosync.protocol import Outcome, SendTracker

V = 7
APPLIED = Outcome(V)
SKIPPED = Outcome(V, by=9)


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
        (0.1, 30, 3),  # 0.1 * 30 is more than 3 in floating point
        (0.7, 10, 7),
        (0.5, 0, 0),
    ],
)
def test_needed(require: Any, workers: int, needed: int) -> None:
    assert SendTracker(V, range(workers), require).needed == needed


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
