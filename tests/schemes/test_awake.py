"""What keeps loops from sleeping, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiosync.schemes import _awake
from aiosync.schemes._awake import Alert


class Loop:
    """Takes callbacks; :meth:`turn` runs them, as one iteration of a loop does."""

    def __init__(self) -> None:
        self.ready: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self.ready.append((callback, args))

    def turn(self) -> bool:
        """Whether there was anything to do: else a loop would sleep now."""
        ready, self.ready = self.ready, []
        for callback, args in ready:
            callback(*args)
        return bool(ready)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_awake, "time", clock)
    return clock


def come(alert: Alert, clock: Clock, apart: float, times: int) -> None:
    for _ in range(times):
        clock.now += apart
        alert.came()


@pytest.mark.parametrize("apart", [60e-6, 130e-6])
def test_a_loop_stays_awake_between_quick_updates_and_sleeps_after_the_last(
    clock: Clock, apart: float
) -> None:
    loop = Loop()
    alert = Alert(loop)  # type: ignore[arg-type]
    come(alert, clock, apart, 100)
    for _ in range(9):
        assert loop.turn()
        clock.now += 10e-6
    assert len(loop.ready) == 1  # one callback, however many updates came
    clock.now += 40e-6
    assert loop.turn()
    assert not loop.turn()
    assert not loop.ready


@pytest.mark.parametrize("apart", [180e-6, 1e-3, 1.0])
def test_a_loop_sleeps_between_updates_that_take_their_time(clock: Clock, apart: float) -> None:
    loop = Loop()
    alert = Alert(loop)  # type: ignore[arg-type]
    come(alert, clock, apart, 1000)
    assert not loop.ready


def test_a_pause_ends_it_until_updates_are_quick_again(clock: Clock) -> None:
    loop = Loop()
    alert = Alert(loop)  # type: ignore[arg-type]
    come(alert, clock, 60e-6, 100)
    clock.now += 3600.0
    while loop.turn():
        pass
    alert.came()
    assert not loop.ready
    come(alert, clock, 60e-6, 50)
    assert loop.ready
