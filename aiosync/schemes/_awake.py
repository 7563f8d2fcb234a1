"""Staying awake for a moment after a small send. No torch here."""

from __future__ import annotations

import asyncio
import time
from typing import Any

__all__ = ["Awake"]

# After a small send the loop turns for a moment before it sleeps: waking an idle core costs as
# much as the whole round trip (docs/topics/design.md). Long enough for an answer that is
# as quick as the last ones were; only briefly where those took longer than that.
_LEAST_SECONDS, _MOST_SECONDS = 50e-6, 250e-6


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
