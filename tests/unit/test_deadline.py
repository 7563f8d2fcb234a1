"""Deadline: the time is an argument."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import ConfigError
from aiosync.protocol import Deadline

times = st.floats(0, 1e9)


@pytest.mark.parametrize(
    ("timeout", "now", "remaining"),
    [
        (2.5, 10.0, 2.5),
        (2.5, 12.0, 0.5),
        (2.5, 12.5, 0.0),
        (2.5, 99.0, 0.0),
        (0, 10.0, 0.0),
        (None, math.inf, None),
        (math.inf, 1e300, math.inf),
    ],
)
def test_it_passes_at_its_time(timeout: float | None, now: float, remaining: float | None) -> None:
    deadline = Deadline.after(timeout, 10.0)
    assert deadline == Deadline(None if timeout is None else 10.0 + timeout)
    assert (deadline.remaining(now), deadline.expired(now)) == (remaining, remaining == 0)


@pytest.mark.parametrize("timeout", [-0.001, -math.inf, math.nan])
def test_an_illegal_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        Deadline.after(timeout, 0.0)


def test_earliest() -> None:
    early, late, never = Deadline(1.0), Deadline(2.0), Deadline(None)
    assert early.earliest(late) is early
    assert late.earliest(early) is early
    assert never.earliest(late) is late
    assert late.earliest(never) is late
    assert never.earliest(Deadline(None)).at is None


@given(times, times)
def test_remaining_is_never_negative_and_agrees_with_expired(timeout: float, now: float) -> None:
    deadline = Deadline.after(timeout, 100.0)
    remaining = deadline.remaining(now)
    assert remaining is not None and remaining >= 0
    assert (remaining == 0) == deadline.expired(now)
