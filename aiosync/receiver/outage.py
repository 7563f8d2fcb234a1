"""What a worker without a trainer may still do, and who is told.

==========  =====================================================  ============================
state       begins when                                            reads and ``receive()`` raise
==========  =====================================================  ============================
linked      a link is of use                                       never
cut off     the link ends, or a new one brings nothing newer yet   after ``max_staleness``
lost        no link replaced it in time, and nobody said farewell  with ``on_lost="raise"``
==========  =====================================================  ============================

Belongs to the loop of its receiver, but for :meth:`Outage.check`. Must not import transports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal

from aiosync.errors import AiosyncError, PeerClosed
from aiosync.receiver.guard import Guard, weakly
from aiosync.receiver.hooks import SchemeHooks, run_hook

__all__ = ["OnLost", "Outage"]

OnLost = Literal["keep", "raise"]
"""What a read does once the trainer is lost: compute with what the model has, or raise."""

_EARLY_SECONDS = 0.001  # timers fire so early at the most


class Outage:
    """Whether a worker still has a trainer, and what its reads do without one.

    Args:
        on_lost: ``"raise"`` to have reads raise once the trainer is lost.
        max_staleness: Seconds without a link of use after which they do; ``None`` for never.
        guard: Its reads ask.
        hooks: Asked for ``connected`` and ``lost``.
        log: Told what happened, in a word and a sentence, to which version, and at which level.

    Attributes:
        cut_off: Since when, on ``time.monotonic()``'s clock, no link was of use, and why the last
            one ended; ``None`` while one is.
        farewell: The trainer closed the last link, and did not die.
    """

    def __init__(
        self,
        on_lost: OnLost,
        max_staleness: float | None,
        *,
        guard: Guard,
        hooks: Callable[[], SchemeHooks],
        log: Callable[..., None],
    ) -> None:
        self.cut_off: tuple[float, AiosyncError] | None = None
        self.farewell: bool = False
        self._raises = on_lost == "raise"
        self._max_staleness = max_staleness
        self._hooks = hooks
        self._log = log
        self._lost: AiosyncError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._guard = guard
        if on_lost == "raise" or max_staleness is not None:
            guard.check = weakly(self.check)

    def check(self) -> None:
        """Raise :class:`~aiosync.PeerClosed` if the model may not compute any more."""
        lost, cut_off, limit = self._lost, self.cut_off, self._max_staleness
        if lost is not None and self._raises:
            raise PeerClosed(f"the trainer is lost, and on_lost is 'raise': {lost}") from lost
        if limit is not None and cut_off is not None:
            since, error = cut_off
            if time.monotonic() - since >= limit:
                raise PeerClosed(
                    f"no link to a trainer was of use for max_staleness={limit:g} s: {error}"
                ) from error

    async def begin_link(self) -> None:
        """There is a link: tell the hook."""
        self.farewell = False
        if (connected := self._hooks().connected) is not None:
            await run_hook(connected)

    def end_link(
        self, error: AiosyncError, version: int, is_last: bool, wake: Callable[[], object]
    ) -> None:
        """A link has ended.

        Args:
            error: Why.
            version: What the model has.
            is_last: No other one is looked for.
            wake: Called when the model becomes stale.
        """
        self.cut_off = (self.cut_off[0] if self.cut_off else time.monotonic(), error)
        held = f"; the model keeps version {version}" if is_last else ""
        if self.farewell:
            self._log("left", f"the trainer has closed its link{held}", version)
        else:
            level = logging.WARNING if is_last else logging.INFO
            self._log("lost", f"the link to the trainer was lost: {error}{held}", version, level)
        if self._timer is not None:
            self._timer.cancel()
        if self._max_staleness is not None:
            pause = max(0.0, self.cut_off[0] + self._max_staleness - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(pause + _EARLY_SECONDS, self._look, version, wake)

    def _look(self, version: int, wake: Callable[[], object]) -> None:
        try:
            self.check()
        except PeerClosed as exc:
            self._log("stale", f"version {version} is stale: {exc}", version, logging.WARNING)
            wake()

    async def give_up(self, error: AiosyncError) -> None:
        """No link replaces the last one: tell the hook, unless the trainer said farewell."""
        if not self.farewell:
            self._lost = error
            if (lost := self._hooks().lost) is not None:
                await run_hook(lost, error)

    def close(self) -> None:
        """Let reads go on, and look at the clock no more."""
        self._guard.check = None
        if self._timer is not None:
            self._timer.cancel()
