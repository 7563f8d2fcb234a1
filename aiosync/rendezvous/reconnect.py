"""Links that are dialled, and dialled again when they were lost; and trainers that dial a worker.

Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from aiosync._tasks import Notifier
from aiosync.errors import (
    AiosyncError,
    ConnectError,
    ConnectTimeout,
    PeerClosed,
    TransportBroken,
)
from aiosync.rendezvous.dialer import Backoff, Left, is_final, retry
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS
from aiosync.rendezvous.listener import AnyListener
from aiosync.transports.base import Transport, without_frames
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Hello, Refuse

__all__ = ["Arrivals", "KeptLink", "LinkState"]

_L = TypeVar("_L", bound=Transport)
_W = TypeVar("_W")

_OF_USE_SECONDS = 1.0  # a link that lasted for so long was of use, even if nothing came over it


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


class Arrivals(AnyListener):
    """Trainers that dial a worker: one has it at a time, and the newest of its links counts.

    Args:
        takes: Whether another link would ever be taken.
    """

    def __init__(self, takes: Callable[[], bool]) -> None:
        self._takes = takes
        self._newest: tuple[TCPTransport, Hello] | None = None
        self._waits = False  # nobody has taken it so far
        self._changed = Notifier()

    def welcome(self, link: TCPTransport, hello: Hello) -> None:
        """Hear who dialled, whether or not anybody waits for a link. Owns the link."""
        holder, has = self._newest or (link, hello)
        taken = holder is not link and not holder.ended
        if hello.role != "sender":
            link.abort()
        elif taken and (hello.epoch is None or hello.epoch != has.epoch):
            # It tries again: the other one may leave.
            text = (
                f"another trainer has this worker: {holder.name}, process {has.pid}. End one of "
                "the two; the one that is left gets the worker"
            )
            with contextlib.suppress(AiosyncError):
                link.send_nowait(Refuse(ConnectError.__name__, text))
            link.abort()
        elif link.ended or not self._takes():
            link.abort()
        else:
            if holder is not link:
                # Whoever reads from it asks for another link, which is here already.
                holder.fail(TransportBroken("the trainer opened a newer link"))
                if self._waits:
                    holder.abort()
            self._newest, self._waits = (link, hello), True
            self._changed.notify()

    async def next(self, timeout: float | None) -> TCPTransport:
        """Wait for a trainer.

        Raises:
            ConnectTimeout: None came in time.

        Cancellation:
            Class A.
        """
        try:
            async with asyncio.timeout(timeout):
                while self._newest is None or not self._waits or self._newest[0].channel.ended:
                    await self._changed.wait()
        except TimeoutError as exc:
            raise ConnectTimeout(f"no trainer was accepted within {timeout:g} s") from exc
        self._waits = False
        return self._newest[0]

    def close(self) -> None:
        """End what nobody has taken."""
        if self._newest is not None and self._waits:
            self._newest[0].abort()
