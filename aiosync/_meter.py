"""Counts of one scheme's syncs, and events for its observers. Must not import torch.

Without observers, the meter only counts.
"""

from __future__ import annotations

import asyncio
import bisect
import inspect
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from aiosync._log import log
from aiosync._tasks import call_soon
from aiosync.errors import ConfigError
from aiosync.events import Observer, SyncEvent, SyncOutcome, SyncRole, SyncStats
from aiosync.wire import is_traceparent

__all__ = ["Meter", "SyncFacts"]

# Most events that wait for the loop; the oldest are dropped beyond that.
_MOST_EVENTS = 1024
_MARK_SECONDS = 0.05
# An age may be wrong by so much of it, so that few marks of old versions stay.
_AGE_SHARE = 0.1
# Number of marks beside those that the last thinning kept, before the next one.
_MORE_MARKS = 64
_OUTCOMES: tuple[SyncOutcome, ...] = ("ok", "skipped", "refused", "timeout", "error")
_NONE: Mapping[str, float] = {}

SyncFacts: TypeAlias = tuple[int, int, float, Mapping[str, float], int, int, str | None]
"""The arguments of :meth:`Meter.ended` after the outcome."""


class Meter:
    """Counts of syncs by outcome, and the observers that are told of each sync.

    One thread at a time changes a count; any thread may read the counts, and call :meth:`tell`.

    Attributes:
        role: Role of the scheme that is counted.
        model: Name of the model.
        transport: Short name of the scheme.
        finished: Number of syncs that ended, by outcome.
        nbytes: Bytes of weights in the syncs that ended well.
        num_deferred: Number of syncs that an async hook is yet to end.
        reconnects: Number of links that replaced a lost one.
        observers: Observers that are told of syncs.
        mark_due: When :meth:`mark` is next to be called, on ``time.perf_counter()``'s clock.
    """

    def __init__(
        self, role: SyncRole = "sender", model: str = "policy", transport: str = ""
    ) -> None:
        self.role: SyncRole = role
        self.model: str = model
        self.transport: str = transport
        self.finished: dict[SyncOutcome, int] = dict.fromkeys(_OUTCOMES, 0)
        self.observers: tuple[Observer, ...] = ()
        self.nbytes: int = 0
        self.num_deferred: int = 0
        self.reconnects: int = 0
        self.mark_due: float = 0.0
        self._wire_nbytes = 0
        # The greatest number that stats() returned, so that the next one is no smaller.
        self._started = 0
        # For age(): versions and when they were sent, oldest first.
        self._marks: list[tuple[int, float]] = []
        self._most_marks = _MORE_MARKS
        self._last_seconds = _NONE
        self._events: deque[SyncEvent] = deque(maxlen=_MOST_EVENTS)
        self._is_delivery_due = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, role: SyncRole, model: str) -> None:
        """Begin to count for a scheme. Called on the loop on which observers are called."""
        self.role, self.model = role, model
        self._loop = asyncio.get_running_loop()

    # -- numbers -------------------------------------------------------------------------------

    def mark(self, version: int, at: float) -> None:
        """Note for :meth:`age` that a version was sent at this time of ``time.perf_counter()``."""
        self.mark_due = at + _MARK_SECONDS
        if self._marks and version <= self._marks[-1][0]:
            # The versions of another trainer begin anew.
            self._marks = []
        self._marks.append((version, at))
        if len(self._marks) > self._most_marks:
            self._marks = _thinned(self._marks, at)
            self._most_marks = len(self._marks) + _MORE_MARKS

    def age(self, version: int) -> float:
        """Return about how many seconds ago a version was sent; 0.0 if that is not known."""
        # Another thread may note a mark: it adds one to this list, or puts another in its place.
        marks = self._marks
        found = bisect.bisect_right(marks, (version, math.inf))
        if not version or not marks:
            return 0.0
        return max(0.0, time.perf_counter() - marks[max(0, found - 1)][1])

    def stats(self, *, under_way: Callable[[], int] = int, **more: Any) -> SyncStats:
        """Return the statistics. May be called on any thread.

        Args:
            under_way: Returns the number of syncs that have begun and not ended. A sync that ends
                leaves this number before it is counted.
            **more: Fields of the result that the caller knows, in place of those counted here.
        """
        finished = self.finished.copy()
        # ``started`` never falls, although a sync may be in neither number: one that ends between
        # the two readings, or that was forgotten while it waited. It is never too large, as the
        # numbers are read against the way of a sync: those under way last.
        begun = sum(finished.values()) + self.num_deferred + under_way()
        self._started = max(self._started, begun)
        known: dict[str, Any] = {
            "started": self._started,
            "finished": finished,
            "nbytes": self.nbytes,
            "wire_nbytes": self._wire_nbytes,
            "skipped": finished["skipped"],
            "refused": finished["refused"],
            "reconnects": self.reconnects,
            "seconds": self._last_seconds if self.observers else _NONE,
        }
        return SyncStats(self.role, self.model, self.transport, **(known | more))

    # -- observers -----------------------------------------------------------------------------

    def add(self, observer: Observer) -> None:
        """Tell an observer of syncs from now on.

        Raises:
            ConfigError: The observer has no plain method ``on_sync()``.
        """
        told = getattr(observer, "on_sync", None)
        if not callable(told) or inspect.iscoroutinefunction(inspect.unwrap(told)):
            raise ConfigError(
                f"an observer has a plain method on_sync(event); a {type(observer).__name__} has "
                "none"
            )
        self.observers = (*self.observers, observer)

    def remove(self, observer: Observer) -> None:
        """Tell an observer no more. Idempotent."""
        self.observers = tuple(each for each in self.observers if each is not observer)

    def _drop(self, observer: Observer, error: Exception) -> None:
        """Remove an observer that raised, so that no sync fails for it, and log the error."""
        self.remove(observer)
        text = f"an observer raised, and is removed: {type(observer).__qualname__}"
        log(logging.WARNING, "observer", text, model=self.model, error=error)

    def trace(self, started: float) -> str | None:
        """Return the traceparent that an observer has for a send; ``None`` if none has one."""
        started_at = _wall_time(started)
        for observer in self.observers:
            ask = getattr(observer, "traceparent", None)
            try:
                found = None if ask is None else ask(started_at)
            except Exception as exc:  # noqa: BLE001 - the send goes on, and the log has it
                self._drop(observer, exc)
                continue
            if is_traceparent(found):
                return found
        return None

    def count(self, outcome: SyncOutcome, nbytes: int, wire_nbytes: int) -> None:
        """Count a sync that has ended. Called by one thread at a time."""
        self.finished[outcome] += 1
        # Bytes of an update that was skipped or refused have travelled, too.
        self._wire_nbytes += wire_nbytes
        if outcome == "ok":
            self.nbytes += nbytes

    def ended(
        self,
        outcome: SyncOutcome,
        epoch: int,
        version: int,
        started: float,
        seconds: Mapping[str, float] = _NONE,
        nbytes: int = 0,
        wire_nbytes: int = 0,
        trace: str | None = None,
    ) -> None:
        """Count a sync and call :meth:`tell` with these arguments. For one thread at a time."""
        self.count(outcome, nbytes, wire_nbytes)
        if self.observers:
            self.tell(outcome, epoch, version, started, seconds, nbytes, wire_nbytes, trace)

    def tell(
        self,
        outcome: SyncOutcome,
        epoch: int,
        version: int,
        started: float,
        seconds: Mapping[str, float],
        nbytes: int,
        wire_nbytes: int,
        trace: str | None,
    ) -> None:
        """Have the loop tell observers of a sync. May be called on any thread.

        Args:
            outcome: Outcome of the sync.
            epoch: Epoch of its version.
            version: Its version.
            started: When it began, on ``time.perf_counter()``'s clock.
            seconds: Seconds of each of its phases.
            nbytes: Bytes of its weights.
            wire_nbytes: Bytes of its payloads that travelled.
            trace: Traceparent of the trainer's span, if there is one.
        """
        self._last_seconds, at = seconds, _wall_time(started)
        named = self.role, self.model, self.transport, epoch, version, outcome
        self._events.append(SyncEvent(*named, seconds, nbytes, wire_nbytes, at, trace))
        # Two threads may add the first events at once: their number does not show that. Every 64th
        # schedules the delivery, too, in case an exception of a signal's handler has prevented it.
        if (self._is_delivery_due and len(self._events) % 64 != 1) or self._loop is None:
            return
        self._is_delivery_due = True
        if asyncio._get_running_loop() is self._loop:
            self._loop.call_soon(self.deliver)
            return
        call_soon(self._loop, self.deliver)

    def deliver(self) -> None:
        """Tell observers of the events that wait. Called on the loop."""
        # Cleared first, so that an event which this does not see schedules another delivery.
        self._is_delivery_due = False
        try:
            for _ in range(len(self._events)):
                event = self._events.popleft()
                for observer in self.observers:
                    try:
                        observer.on_sync(event)
                    except Exception as exc:  # noqa: BLE001 - the log has it, and others are told
                        self._drop(observer, exc)
        finally:
            if self._events and self._loop is not None:
                # More events came meanwhile.
                self._loop.call_soon(self.deliver)


def _thinned(marks: list[tuple[int, float]], now: float) -> list[tuple[int, float]]:
    """Return the marks without those that make a difference of less than a tenth of an age."""
    kept = marks[:1]
    for mark, (_, after) in itertools.pairwise(marks[1:]):
        # Without this mark, its versions count as sent at the time of the one before.
        if after - kept[-1][1] > _AGE_SHARE * (now - after):
            kept.append(mark)
    return [*kept, marks[-1]]


def _wall_time(at: float) -> float:
    """Return a time of ``time.perf_counter()`` in seconds since the Unix epoch."""
    return time.time() - (time.perf_counter() - at)
