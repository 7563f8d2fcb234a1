"""Reaching the other end of a stream, again and again if need be, but never in a tight loop.

Must not import torch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
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

__all__ = ["Backoff", "Dialler"]

_T = TypeVar("_T")

_FIRST_SECONDS = 0.02
_LONGEST_SECONDS = 2.0


class Backoff:
    """Pauses that double from 20 ms to 2 s, shortened at random: many must not come at once."""

    def __init__(self) -> None:
        self._pause = _FIRST_SECONDS

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._pause = _FIRST_SECONDS

    async def wait(self) -> None:
        """Pause."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_SECONDS)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))


class Dialler:
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

    def __init__(
        self,
        address: Address,
        *,
        credentials: Credentials,
        limits: Limits | None,
        keepalive: float | None,
        untaken: float | None = None,
        attempt_timeout: float,
        name: str,
        advice: str = "it has to run init_on_sender() and connect(), or `aiosync serve`",
    ) -> None:
        self.address = address
        self._advice = advice
        self._last: AiosyncError | None = None  # why the last attempt failed
        self._reached = False  # the last attempt worked
        self._credentials = credentials
        self._limits = limits
        self._keepalive = keepalive
        self._untaken = untaken
        self._attempt_timeout = attempt_timeout
        self._name = name

    async def dial(self, *, again: bool = False) -> TCPTransport:
        """One attempt; see :meth:`TCPTransport.connect`.

        Args:
            again: There was a link before. Certificate files that cannot be read now, because
                they are being replaced perhaps, are a ``ConnectError`` then: of the moment.
        """
        try:
            context = self._credentials.dialling_context()
        except ConfigError as exc:
            if again:
                raise ConnectError(str(exc)) from exc
            raise
        return await TCPTransport.connect(
            self.address,
            credentials=self._credentials,
            context=context,
            limits=self._limits,
            payloads=False,
            keepalive=self._keepalive,
            untaken=self._untaken,
            timeout=self._attempt_timeout,
            name=f"{self._name} at {self.address}",
        )

    async def reach(
        self,
        timeout: float | None,
        *,
        greet: Callable[[TCPTransport], Awaitable[None]] | None = None,
        backoff: Backoff | None = None,
        again: bool = False,
    ) -> TCPTransport:
        """Dial until it works.

        Args:
            timeout: Seconds for all attempts; ``None`` for ever.
            greet: Awaited with each link; another attempt follows if it fails.
            backoff: Pauses between attempts.
            again: See :meth:`dial`.

        Raises:
            AuthError, ConfigError: The other end refused for good; or, unless ``again``, a
                certificate file of this side cannot be used.
            LocalProtocolError: What ``greet`` has to say is beyond the limits.
            ConnectTimeout: Not in time; the last attempt's error is the cause.

        Cancellation:
            Class A.
        """

        async def attempt() -> TCPTransport:
            link = await self.dial(again=again)
            try:
                if greet is not None:
                    await greet(link)
            except BaseException:  # goes on, to retry() or the caller
                link.abort()
                raise
            return link

        link = await self.retry(attempt, timeout, backoff=backoff)
        self._reached = True
        return link

    def not_joined(self) -> str:
        """What an error says while the other end has not let this trainer in."""
        if not self._reached:
            return self.not_reached()
        return f"{self._name} at {self.address} was reached, but has not let this trainer in"

    async def retry(
        self,
        attempt: Callable[[], Awaitable[_T]],
        timeout: float | None,
        *,
        backoff: Backoff | None = None,
    ) -> _T:
        """Await ``attempt()`` until it works, otherwise as :meth:`reach`."""
        backoff = backoff or Backoff()
        self._last = None
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        return await attempt()
                    except (AuthError, ConfigError, LocalProtocolError):
                        raise  # the last: what this side says cannot be sent, now or later
                    except AiosyncError as exc:
                        self._last, self._reached = exc, False
                    await backoff.wait()
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                raise
            raise ConnectTimeout(self.not_reached(f" within {timeout:g} s")) from (
                self._last or exc
            )

    def not_reached(self, within: str = "") -> str:
        """What an error says while nobody is reached."""
        reason = f"; the last attempt: {self._last}" if self._last is not None else ""
        return f"{self._name} at {self.address} was not reached{within}: {self._advice}{reason}"
