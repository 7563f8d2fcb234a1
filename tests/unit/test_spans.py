"""Version spans of samples, and their staleness."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync import ConfigError, VersionSpan, staleness

MINE, OTHER = "00000000000000aa", "00000000000000bb"


def test_a_span_is_a_value() -> None:
    span = VersionSpan(3, 5, MINE, ((3, 10), (5, 2)))
    assert pickle.loads(pickle.dumps(span)) == span
    assert len({span, dataclasses.replace(span)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        span.first = 1  # type: ignore[misc]


def test_runs_are_merged_and_keep_their_order() -> None:
    span = VersionSpan.from_runs([(3, 4), (3, 6), (5, 1), (4, 2), (4, 0)], MINE)
    assert span == VersionSpan(3, 5, MINE, ((3, 10), (5, 1), (4, 2)))
    with pytest.raises(ConfigError, match="at least one"):
        VersionSpan.from_runs(())


@pytest.mark.parametrize("epoch", [0xAA, b"00000000000000aa"])
def test_an_epoch_that_is_no_text_is_refused(epoch: Any) -> None:
    """``scheme.epoch`` is a number, and no span of another worker would equal it."""
    for refuses in (
        lambda: VersionSpan(3, 3, epoch),
        lambda: VersionSpan.from_runs([(3, 1)], epoch),
        lambda: staleness(5, VersionSpan(3, 3, MINE), epoch=epoch),
    ):
        with pytest.raises(ConfigError, match="16 hexadecimal digits"):
            refuses()


@pytest.mark.parametrize(
    ("now", "span", "sample", "token"),
    [
        (5, VersionSpan(5, 5), 0.0, 0.0),
        # This span has no counts.
        (7, VersionSpan(4, 6), 3.0, None),
        (7, VersionSpan(4, 6, runs=((4, 0), (6, 0))), 3.0, None),
        (7, VersionSpan(4, 6, runs=((4, 1), (6, 3))), 3.0, 1.5),
        (7, VersionSpan(4, 4, runs=((4, 9),)), 3.0, 3.0),
        (7, None, None, None),
        # Weights without a version have version 0.
        (7, VersionSpan(0, 0), None, None),
        (7, VersionSpan(0, 6, runs=((0, 1), (6, 3))), None, None),
        # These spans have versions that are newer than the trainer's newest.
        (7, VersionSpan(6, 8, runs=((6, 1), (8, 1))), None, None),
        (0, VersionSpan(1, 1), None, None),
    ],
)
def test_staleness(
    now: int, span: VersionSpan | None, sample: float | None, token: float | None
) -> None:
    assert staleness(now, span) == staleness(now, span, "sample") == sample
    assert staleness(now, span, "token") == token


@pytest.mark.parametrize(
    ("epoch", "first", "last", "first_version", "expected"),
    [
        (MINE, 101, 103, 101, 9.0),
        # A span without an epoch counts as one of the trainer's own run.
        (None, 101, 103, 101, 9.0),
        # If a trainer begins at version 1 again, the oldest samples would look fresh.
        (OTHER, 3, 3, 1, None),
        # This sample is from before the checkpoint with which the trainer's run began.
        (OTHER, 98, 100, 101, 12.0),
        # The other run went on after that checkpoint with the same version numbers.
        (OTHER, 98, 101, 101, None),
        (OTHER, 105, 105, 101, None),
    ],
)
def test_another_run_is_comparable_where_the_count_goes_on(
    epoch: str | None, first: int, last: int, first_version: int, expected: float | None
) -> None:
    span = VersionSpan(first, last, epoch)
    assert staleness(110, span, epoch=MINE, first_version=first_version) == expected


def test_an_unknown_weight_is_refused() -> None:
    weight: Any = "mean"
    with pytest.raises(ConfigError, match="mean"):
        staleness(1, None, weight)


versions = st.integers(0, 20)
runs = st.lists(st.tuples(versions, st.integers(0, 5)), min_size=1, max_size=8)


@given(versions, runs, st.sampled_from([None, MINE, OTHER]), st.integers(1, 20))
def test_it_is_never_negative_and_never_zero_by_mistake(
    now: int, made: list[tuple[int, int]], epoch: str | None, first_version: int
) -> None:
    span = VersionSpan.from_runs(made, epoch)
    sample = staleness(now, span, epoch=MINE, first_version=first_version)
    token = staleness(now, span, "token", epoch=MINE, first_version=first_version)
    assert sum(count for _, count in span.runs) == sum(count for _, count in made)
    if sample is None:
        assert token is None
        return
    assert sample == now - min(version for version, _ in made)
    assert token is None or 0 <= token <= sample
    assert span.epoch != OTHER or span.last < first_version
