"""Deadlines as values: the time is always an argument.

This module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiosync.errors import ConfigError

__all__ = ["Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on some monotonic clock, or none.

    Attributes:
        at: Seconds on that clock; ``None`` never passes.
    """

    at: float | None = None

    @classmethod
    def after(cls, timeout: float | None, now: float) -> Deadline:
        """Return the deadline ``timeout`` seconds from ``now``.

        Args:
            timeout: Seconds, 0 or more; ``None`` for no limit.
            now: The present time of the clock, in seconds.

        Raises:
            ConfigError: The timeout is negative or not a number.
        """
        if timeout is None:
            return cls(None)
        if not timeout >= 0:
            raise ConfigError(f"timeout is {timeout!r}; it must be 0 or more seconds, or None")
        return cls(now + timeout)

    def remaining(self, now: float) -> float | None:
        """Return the seconds that are left, never negative; ``None`` for no limit."""
        if self.at is None:
            return None
        return max(0.0, self.at - now)

    def expired(self, now: float) -> bool:
        """Return whether the deadline has come."""
        return self.at is not None and now >= self.at

    def earliest(self, other: Deadline) -> Deadline:
        """Return the one of the two that comes first."""
        if other.at is None or (self.at is not None and self.at <= other.at):
            return self
        return other
