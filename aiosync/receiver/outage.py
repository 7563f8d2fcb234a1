"""Outages: what a worker without a trainer may still do, and which hooks and reads learn of it.

==========  =====================================================  ============================
state       begins when                                            reads and ``receive()`` raise
==========  =====================================================  ============================
linked      a link is of use                                       never
cut off     the link ends, or a new one brings nothing newer yet   after ``max_staleness``
lost        no link replaced it in time, and it had no farewell;   with ``on_lost="raise"``
            or the receiver ended by itself
==========  =====================================================  ============================

Belongs to the loop of its receiver, except for :meth:`Outage.check`. Must not import transports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal

from aiosync._repr import text_of
from aiosync.errors import AiosyncError, ConnectError, ConnectTimeout, PeerClosed, TransportClosed
from aiosync.receiver.guard import Guard, weakly
from aiosync.receiver.scheme_hooks import SchemeHooks, run_hook

__all__ = ["OnLost", "Outage"]

OnLost = Literal["keep", "raise"]
"""The effect of a lost trainer on a read: it computes with the model as it is, or raises."""

# Timers fire at most so early.
_EARLY_SECONDS = 0.001


class Outage:
    """The outage of one worker: since when it has no trainer, and what its reads do without one.

    Args:
        on_lost: ``"raise"`` to have reads raise once the trainer is lost.
        max_staleness: Seconds without a link of use after which reads raise; ``None`` for never.
        guard: Its reads call :meth:`check`.
        hooks: Returns the hooks, of which ``connected`` and ``lost`` are called.
        log: Called with an event in a word, a sentence, the version and the level.

    Attributes:
        cut_off: Time on ``time.monotonic()``'s clock since when no link was of use, and the error
            that ended the last link; ``None`` while a link is of use.
        farewell: True if the trainer closed the last link itself, and did not die.
        lost_link: The error that ended the last link, with that of the last attempt to replace it;
            ``None`` while there is a link.
        progress: Number of chunks of updates, and of answers, that arrived.
        subscribes: True if the trainer sends its newest version over a new link unasked.
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
        self.lost_link: AiosyncError | None = None
        self.progress: int = 0
        self.subscribes: bool = True
        self._raises = on_lost == "raise"
        self._max_staleness = max_staleness
        self._hooks = hooks
        self._log = log
        self._lost: AiosyncError | None = None
        # The error that ended the last link, and the last text that was logged of attempts since.
        self._end: AiosyncError | None = None
        self._logged = ""
        self._timer: asyncio.TimerHandle | None = None
        self._guard = guard
        if on_lost == "raise" or max_staleness is not None:
            guard.check = weakly(self, Outage.check)

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
        """Note that there is a link, and call the ``connected`` hook."""
        self.farewell = False
        if (connected := self._hooks().connected) is not None:
            await run_hook(connected)

    def reconnect(self) -> None:
        """Note that another link replaces the lost one."""
        self.lost_link = self._end = None

    def end_link(
        self, error: AiosyncError, version: int, is_last: bool, wake: Callable[[], object]
    ) -> None:
        """Note that a link has ended.

        Args:
            error: The error that ended it.
            version: The version that the model has.
            is_last: True if no other link is looked for.
            wake: Called when the model becomes stale.
        """
        self.lost_link = self._end = error
        self._logged = ""
        self.cut_off = (self.cut_off[0] if self.cut_off else time.monotonic(), error)
        self._log_end(error, version, is_last)
        if self._timer is not None:
            self._timer.cancel()
        if self._max_staleness is not None:
            pause = max(0.0, self.cut_off[0] + self._max_staleness - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(pause + _EARLY_SECONDS, self._note_stale, version, wake)

    def end_receiver(
        self, error: BaseException, version: int, wake: Callable[[], object]
    ) -> AiosyncError | None:
        """Note that the receiver ended by itself, and replaces no link any more.

        Args:
            error: The exception that ended it.
            version: The version that the model has.
            wake: As for :meth:`end_link`.

        Returns:
            The reason to :meth:`give_up` for; ``None`` if the trainer was lost before.
        """
        if self._lost is not None:
            return None
        reason = error
        if not isinstance(reason, AiosyncError):
            why = f"{type(error).__name__}: {text_of(error)}".partition("\n")[0]
            reason = TransportClosed(f"this worker receives no more: {why}")
            reason.__cause__ = error
        # A farewell of the trainer is no reason to compute on: the receiver finds no other one.
        self.farewell = False
        self.end_link(reason, version, True, wake)
        return reason

    def _log_end(self, error: AiosyncError, version: int, is_last: bool) -> None:
        """Log that the trainer has closed its link, or that the link was lost."""
        held = f"; the model keeps version {version}" if is_last else ""
        if self.farewell:
            self._log("left", f"the trainer has closed its link{held}", version)
        else:
            level = logging.WARNING if is_last else logging.INFO
            self._log("lost", f"the link to the trainer was lost: {error}{held}", version, level)

    def fail_attempt(self, error: AiosyncError) -> None:
        """Note why an attempt to replace the lost link failed; log each new reason once.

        While nobody answers there is nothing to log: that the link was lost has been.
        """
        ended, cut_off = self._end, self.cut_off
        if ended is None:
            return
        self.lost_link = PeerClosed(f"{ended}; the last attempt to dial again: {error}")
        self.lost_link.__cause__ = ended
        if cut_off is not None:
            self.cut_off = cut_off[0], self.lost_link
        # If there are several addresses, the cause is the error of one that answered, if one did.
        cause = error
        while type(cause) is ConnectError and isinstance(cause.__cause__, AiosyncError):
            cause = cause.__cause__
        nobody = isinstance(cause, ConnectTimeout) or isinstance(cause.__cause__, OSError)
        if not nobody and str(error) != self._logged:
            self._logged = str(error)
            text = f"the link to the trainer is not replaced yet: {error}"
            self._log("waiting", text, None, logging.WARNING)

    def _note_stale(self, version: int, wake: Callable[[], object]) -> None:
        """Log that the model has become stale, if it has, and wake the calls that wait."""
        try:
            self.check()
        except PeerClosed as exc:
            self._log("stale", f"version {version} is stale: {exc}", version, logging.WARNING)
            wake()

    async def give_up(self, error: AiosyncError, wake: Callable[[], object]) -> None:
        """Declare the trainer lost, and call the ``lost`` hook, unless it said farewell.

        Args:
            error: The error that ended the last link.
            wake: Called before the hook, which may take long: calls that wait may raise by now.
        """
        self.lost_link = error
        if not self.farewell and self._lost is None:
            self._lost = error
            wake()
            if (lost := self._hooks().lost) is not None:
                await run_hook(lost, error)

    def close(self) -> None:
        """Let reads go on, and stop the timer."""
        self._guard.check = None
        if self._timer is not None:
            self._timer.cancel()
