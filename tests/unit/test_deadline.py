"""Deadline: the time is an argument."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import ConfigError
from aiosync.protocol import Deadline

times = st.floats(0, 1e9)


def test_no_deadline_never_passes() -> None:
    never = Deadline.after(None, 5.0)
    assert never == Deadline(None) == Deadline()
    assert never.remaining(1e18) is None
    assert not never.expired(math.inf)


def test_it_passes_at_its_time() -> None:
    deadline = Deadline.after(2.5, 10.0)
    assert deadline == Deadline(12.5)
    assert (deadline.remaining(10.0), deadline.expired(10.0)) == (2.5, False)
    assert (deadline.remaining(12.0), deadline.expired(12.0)) == (0.5, False)
    assert (deadline.remaining(12.5), deadline.expired(12.5)) == (0.0, True)
    assert (deadline.remaining(99.0), deadline.expired(99.0)) == (0.0, True)


def test_zero_has_passed_at_once() -> None:
    assert Deadline.after(0, 10.0).expired(10.0)


def test_infinity_never_passes() -> None:
    assert not Deadline.after(math.inf, 10.0).expired(1e300)


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
    assert remaining is not None
    assert remaining >= 0
    assert (remaining == 0) == deadline.expired(now)
