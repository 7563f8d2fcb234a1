"""Reaching the other end of a stream, again and again if need be, but never in a tight loop.

Must not import torch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    LocalProtocolError,
)
from aiosync.transports.address import Address
from aiosync.transports.base import without_frames
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits

__all__ = ["Backoff", "Dialer", "Left", "is_final", "retry"]

_T = TypeVar("_T")

_OVER_SECONDS = 0.001  # timers fire so early at the most

Left: TypeAlias = Callable[[], float | None]
"""The seconds that are left, none for ``None``."""


class Backoff:
    """Pauses that double, shortened at random: many must not come at once.

    Args:
        first: Seconds of the first one.
        longest: Seconds of the last ones.
    """

    def __init__(self, first: float = 0.02, longest: float = 2.0) -> None:
        self._first = self._pause = first
        self._longest = longest

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._pause = self._first

    async def wait(self, most: float | None = None) -> None:
        """Pause, for so many seconds at most."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        pause *= random.uniform(0.5, 1.0)
        await asyncio.sleep(pause if most is None else min(pause, most))


def is_final(error: AiosyncError) -> bool:
    """Whether another attempt would end in the same way: what this side has or says is wrong."""
    return isinstance(error, (AuthError, ConfigError, LocalProtocolError))


async def retry(
    attempt: Callable[[Left], Awaitable[_T]],
    timeout: float | None,
    *,
    late: Callable[[AiosyncError], AiosyncError] | None = None,
    final: Callable[[AiosyncError], bool] = is_final,
    backoff: Backoff | None = None,
    after: AiosyncError | None = None,
) -> _T:
    """Await ``attempt()`` until it works.

    Args:
        attempt: Told how to ask for the seconds that are left, in which it ends by itself. Cleans
            up after itself where it fails, or is cancelled.
        timeout: Seconds for all attempts; ``None`` for ever.
        late: Makes the error for when they are over, of why the last attempt failed; needed with a
            ``timeout``.
        final: Whether an error ends it.
        backoff: Pauses between attempts.
        after: What ended the attempt before the first one, if there was any.

    Raises:
        AiosyncError: What is final, or ``late``, caused by the last attempt's error.

    Cancellation:
        Class A.
    """
    backoff = backoff or Backoff()
    clock = asyncio.get_running_loop().time
    give_up = None if timeout is None else clock() + timeout

    def left() -> float | None:
        rest = None if give_up is None else give_up - clock()
        return rest if rest is None or rest > _OVER_SECONDS else 0.0

    last = after
    while True:
        if last is not None:
            await backoff.wait(left())
            if left() == 0.0:
                raise (late(last) if late else last) from last
        try:
            return await attempt(left)
        except AiosyncError as exc:
            if last is not None and isinstance(exc, ConnectTimeout) and left() == 0.0:
                continue  # it only ran out of time: why there was another attempt says more
            if final(exc):
                raise
            last = without_frames(exc)


@dataclass(frozen=True, kw_only=True)
class Dialer:
    """Dials one address.

    Args:
        address: Whom.
        credentials: Token and TLS.
        limits: What the other end may announce.
        keepalive: See :meth:`TCPTransport.connect`.
        untaken: See :meth:`TCPTransport.connect`.
        attempt_timeout: Seconds for one attempt, its handshakes included.
        name: How errors call the other end.
        advice: What the other end has to do to be reached.
    """

    address: Address
    credentials: Credentials
    limits: Limits | None
    keepalive: float | None
    untaken: float | None = None
    attempt_timeout: float
    name: str
    advice: str = "it has to run init_on_sender() and connect(), or `aiosync serve`"

    async def dial(self, timeout: float | None = None, *, again: bool = False) -> TCPTransport:
        """One attempt; see :meth:`TCPTransport.connect`.

        Args:
            timeout: Seconds for it, if less than ``attempt_timeout``.
            again: There was a link before. That certificate files cannot be read now, or that
                whoever is there refuses this side, is a ``ConnectError`` then: of the moment.
        """
        try:
            return await TCPTransport.connect(
                self.address,
                credentials=self.credentials,
                limits=self.limits,
                payloads=False,
                keepalive=self.keepalive,
                untaken=self.untaken,
                timeout=(
                    self.attempt_timeout if timeout is None else min(timeout, self.attempt_timeout)
                ),
                name=f"{self.name} at {self.address}",
            )
        except (AuthError, ConfigError) as exc:
            if not again:
                raise
            # The files may be about to be replaced; and who refuses has proved nothing.
            raise ConnectError(str(exc)) from exc

    def not_reached(self, within: str = "") -> str:
        """What an error says while nobody is reached."""
        return f"{self.name} at {self.address} was not reached{within}: {self.advice}"
