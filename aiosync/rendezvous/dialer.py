"""Reaching the other end of a stream, and again when the link was lost, but never in a tight loop.

Must not import torch.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    LocalProtocolError,
    PeerClosed,
)
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS
from aiosync.transports.address import Address
from aiosync.transports.base import Transport, without_frames
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits

__all__ = ["Backoff", "Dialer", "KeptLink", "Left", "LinkState", "is_final", "retry"]

_T = TypeVar("_T")
_L = TypeVar("_L", bound=Transport)
_W = TypeVar("_W")

_OVER_SECONDS = 0.001  # timers fire so early at the most
_OF_USE_SECONDS = 1.0  # a link that lasted for so long was of use, even if nothing came over it

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


class LinkState(enum.Enum):
    """Where a link is on its way."""

    DIALING = "nobody is reached yet, or again"
    GREETING = "the other end was reached, and has not answered"
    UP = "it was let in"
    GAVE_UP = "nothing replaces it any more"


class KeptLink(Generic[_L, _W]):
    """A link that is dialled until somebody lets it in, and again whenever it was lost.

    Args:
        name: How errors call the other end.
        dial: One attempt to reach it: told how to ask for the seconds that are left, and whether
            there was a link before.
        greet: What is said first on a link, in so many seconds; it returns the answer.
        nobody: Says that nobody is reached, within a time that it is given, and what to do.
        final: Whether an error ends all attempts; ``None`` where none does, and each handshake has
            to end in time.
        pauses: Between two attempts.

    Attributes:
        state: Where it is on its way.
        why: Why the last attempt failed; ``None`` if it did not.
        answer: What the other end answered when it let the last link in.
    """

    def __init__(
        self,
        name: str,
        dial: Callable[[Left, bool], Awaitable[_L]],
        greet: Callable[[_L, float | None], Awaitable[_W]],
        *,
        nobody: Callable[[str], str],
        final: Callable[[AiosyncError], bool] | None = is_final,
        pauses: Backoff | None = None,
    ) -> None:
        self.state: LinkState = LinkState.DIALING
        self._name = name
        self._dial = dial
        self._greet = greet
        self._nobody = nobody
        self._final = final
        self._link: _L | None = None
        self.why: BaseException | None = None
        self.answer: _W | None = None
        self._up_at = 0.0
        self._of_use_at = 0.0  # until when a link was
        self._progress: object = None  # that was made by then
        self._pauses = pauses or Backoff()

    async def connect(self, timeout: float | None) -> tuple[_L, _W]:
        """Reach the other end and be let in.

        Returns:
            The link, and what was answered.

        Raises:
            ConnectTimeout: Not in time, caused by the error of the last attempt.
            AiosyncError: What is final.

        Cancellation:
            Class A.
        """

        def late(last: AiosyncError) -> ConnectTimeout:
            within = f" within {timeout:g} s"
            if self.state is LinkState.GREETING or isinstance(last, ConnectTimeout):
                return ConnectTimeout(f"{last}; no other attempt worked{within}")
            return ConnectTimeout(f"{self._nobody(within)}; the last attempt: {last}")

        return await self._meet(timeout, late)

    async def reconnect(
        self, lost: AiosyncError, seconds: float | None, progress: object
    ) -> tuple[_L, _W]:
        """Replace a link that was lost.

        Args:
            lost: Why.
            seconds: For how long to try, since a link was of use; ``None`` for ever.
            progress: Something that changes when a link is of use.

        Raises:
            PeerClosed: Not in time.
            AiosyncError: What is final.

        Cancellation:
            Class A.
        """
        now = asyncio.get_running_loop().time()
        if progress != self._progress or now - self._up_at > _OF_USE_SECONDS:
            self._progress, self._of_use_at = progress, now
            self._pauses.reset()

        def late(last: AiosyncError) -> PeerClosed:
            return PeerClosed(
                f"the link to {self._name} was lost ({lost}), and not restored within {seconds:g} s"
                + ("" if last is lost else f"; the last attempt: {last}")
            )

        left = None if seconds is None else max(0.0, self._of_use_at + seconds - now)
        return await self._meet(left, late, lost)

    async def _meet(
        self,
        timeout: float | None,
        late: Callable[[AiosyncError], AiosyncError],
        lost: AiosyncError | None = None,
    ) -> tuple[_L, _W]:
        async def attempt(left: Left) -> tuple[_L, _W]:
            self.state = LinkState.DIALING
            try:
                self._link = link = await self._dial(left, lost is not None)
                self.state = LinkState.GREETING
                bounded = lost is not None or self._final is None
                limits = (left(), HANDSHAKE_SECONDS if bounded else None)
                limit = min((each for each in limits if each is not None), default=None)
                self.answer = answer = await self._greet(link, limit)
            except BaseException as exc:  # raised again
                self.abort()
                self.why = without_frames(exc)
                raise
            self.why = None
            self.state = LinkState.UP
            self._up_at = asyncio.get_running_loop().time()
            return link, answer

        try:
            return await retry(
                attempt,
                timeout,
                late=late,
                final=self._final or (lambda error: False),
                backoff=self._pauses,
                after=lost,
            )
        except AiosyncError:
            self.state = LinkState.GAVE_UP
            raise

    def abort(self) -> None:
        """End the link at once. What is dialled ends when that is cancelled."""
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def describe(self) -> str:
        """What an error of a trainer says while the other end has not let it in."""
        if self.state is LinkState.UP:
            return f"{self._name} was reached, but has not let this trainer in"
        why = "" if self.why is None else f"; the last attempt: {self.why}"
        return f"{self._nobody('')}{why}"
