"""The sends that are under way, and until when. Must not import torch."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiosync.errors import AckTimeout, AiosyncError
from aiosync.protocol import SendTracker
from aiosync.sender.snapshots import Snapshot
from aiosync.types import SendReport

__all__ = ["Deadlines", "Send"]


@dataclass(slots=True, eq=False)
class Send:
    """Who has answered to one version, who waits for that, and until when."""

    tracker: SendTracker
    future: asyncio.Future[SendReport]
    started: float
    nbytes: int
    lost: Mapping[int, AiosyncError]
    borrowed: Sequence[Snapshot] = ()  # whose bytes are still the caller's
    timeout: float = math.inf
    deadline: float = math.inf  # on the loop's clock

    def time_out(self) -> None:
        """Give up on the workers that have not answered."""
        version, timeout = self.tracker.version, self.timeout

        def too_late(idx: frozenset[int]) -> AckTimeout:
            return AckTimeout(
                f"no answer to version {version} within {timeout:g} s; the worker may be busy, "
                "stopped, without a model yet, or waiting for apply_pending()",
                worker_ids=idx,
                version=version,
            )

        self.tracker.timed_out(too_late)


class Deadlines:
    """Gives up on workers that have not answered in time, with one timer for all sends.

    Args:
        loop: What waits.
        sends: Those under way, by version; the sender's own.
        settle: Called with each that was given up.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sends: Mapping[int, Send],
        settle: Callable[[Send], None],
    ) -> None:
        self._loop = loop
        self._sends = sends
        self._settle = settle
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def limit(self, send: Send, timeout: float) -> None:
        """Give up on the workers that have not answered ``timeout`` seconds after the start."""
        send.timeout = timeout
        send.deadline = self._loop.time() + timeout - (time.perf_counter() - send.started)
        self._arm(send.deadline)

    def _arm(self, deadline: float) -> None:
        # The timer is left to run when a send ends: making one is as dear as a small send.
        if deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._loop.time()
        for send in list(self._sends.values()):
            if send.deadline <= now:
                send.time_out()
                self._settle(send)
        if self._sends:
            self._arm(min(send.deadline for send in self._sends.values()))

    def cancel(self) -> None:
        """Wait for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
