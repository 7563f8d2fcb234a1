"""Staying awake for a moment after a small send, and between quick updates. No torch here."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

__all__ = ["Alert", "Awake"]

# After a small send the loop turns for a moment before it sleeps: waking an idle core costs as
# much as the whole round trip (docs/topics/design.md). Long enough for an answer that is
# as quick as the last ones were; only briefly where those took longer than that.
_LEAST_SECONDS, _MOST_SECONDS = 50e-6, 250e-6
# The same at the other end, between updates that come closer than this on average. Where cores
# are short they do not, as then each waits for the other's turn: two workers on two cores get
# theirs 180 us apart. One alone gets them 100 to 130 us apart before it is awake.
_CLOSE_SECONDS, _ALERT_SECONDS = 150e-6, 120e-6


class Awake:
    """Keeps a loop from sleeping while an answer is due any moment."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._recent = 0.0  # seconds that answers took lately

    def note(self, elapsed: float) -> None:
        """An answer took so many seconds."""
        self._recent += (elapsed - self._recent) / 8

    def wait_for(self, future: asyncio.Future[Any]) -> None:
        """Let the loop turn until ``future`` is done, for microseconds at most."""
        seconds = _MOST_SECONDS if self._recent < 2 * _MOST_SECONDS else _LEAST_SECONDS
        self._turn(future, time.perf_counter() + seconds)

    def _turn(self, future: asyncio.Future[Any], until: float) -> None:
        # A callback that is always ready keeps the loop from sleeping.
        if not future.done() and time.perf_counter() < until:
            self._loop.call_soon(self._turn, future, until)


class Alert:
    """Keeps a loop from sleeping between updates that come one right after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._last = -math.inf  # when an update came
        self._recent = 8 * _CLOSE_SECONDS  # between two lately
        self._until = 0.0
        self._turning = False

    def came(self) -> None:
        """A small update came."""
        now = time.perf_counter()
        # A pause shall count, but not for ever.
        apart = min(now - self._last, 8 * _CLOSE_SECONDS)
        self._last = now
        self._recent += (apart - self._recent) / 8
        if self._recent < _CLOSE_SECONDS:
            self._until = now + _ALERT_SECONDS
            if not self._turning:
                self._turning = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = time.perf_counter() < self._until
        if self._turning:
            self._loop.call_soon(self._turn)
