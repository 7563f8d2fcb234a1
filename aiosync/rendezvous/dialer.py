"""Reaching the other end of a stream, again and again if need be, but never in a tight loop.

Must not import torch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    LocalProtocolError,
)
from aiosync.transports.address import Address
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits

__all__ = ["Backoff", "Dialer", "is_final", "retry"]

_T = TypeVar("_T")


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

    async def wait(self) -> None:
        """Pause."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))


def is_final(error: AiosyncError) -> bool:
    """Whether another attempt would end in the same way: what this side has or says is wrong."""
    return isinstance(error, (AuthError, ConfigError, LocalProtocolError))


async def retry(
    attempt: Callable[[], Awaitable[_T]],
    timeout: float | None,
    *,
    late: Callable[[str], AiosyncError],
    final: Callable[[AiosyncError], bool] = is_final,
    backoff: Backoff | None = None,
) -> _T:
    """Await ``attempt()`` until it works.

    Args:
        attempt: Cleans up after itself where it fails, or is cancelled.
        timeout: Seconds for all attempts; ``None`` for ever.
        late: Makes the error for when they are over; of why the last attempt failed.
        final: Whether an error ends it.
        backoff: Pauses between attempts.

    Raises:
        AiosyncError: What is final, or ``late``, caused by the last attempt's error.

    Cancellation:
        Class A.
    """
    backoff = backoff or Backoff()
    last: AiosyncError | None = None
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            while True:
                try:
                    return await attempt()
                except AiosyncError as exc:
                    if final(exc):
                        raise
                    last = exc
                await backoff.wait()
    except TimeoutError as exc:
        if isinstance(exc, AiosyncError):
            raise
        why = "" if last is None else f"; the last attempt: {last}"
        raise late(why) from last or exc


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

    async def dial(self, *, again: bool = False) -> TCPTransport:
        """One attempt; see :meth:`TCPTransport.connect`.

        Args:
            again: There was a link before. Certificate files that cannot be read now, because
                they are being replaced perhaps, are a ``ConnectError`` then: of the moment.
        """
        try:
            context = self.credentials.dialling_context()
        except ConfigError as exc:
            if again:
                raise ConnectError(str(exc)) from exc
            raise
        return await TCPTransport.connect(
            self.address,
            credentials=self.credentials,
            context=context,
            limits=self.limits,
            payloads=False,
            keepalive=self.keepalive,
            untaken=self.untaken,
            timeout=self.attempt_timeout,
            name=f"{self.name} at {self.address}",
        )

    async def until(
        self,
        attempt: Callable[[], Awaitable[_T]],
        timeout: float | None,
        *,
        backoff: Backoff | None = None,
    ) -> _T:
        """Await ``attempt()``, which dials, until it works; see :func:`retry`.

        Raises:
            AuthError, ConfigError: The other end refused for good; or, unless ``again``, a
                certificate file of this side cannot be used.
            LocalProtocolError: What this side has to say is beyond the limits.
            ConnectTimeout: Not in time; the last attempt's error is the cause.
        """

        def late(why: str) -> ConnectTimeout:
            return ConnectTimeout(self.not_reached(f" within {timeout:g} s", why))

        return await retry(attempt, timeout, late=late, backoff=backoff)

    def not_reached(self, within: str = "", why: str = "") -> str:
        """What an error says while nobody is reached."""
        return f"{self.name} at {self.address} was not reached{within}: {self.advice}{why}"
