"""The dialing side: attempts to reach the other end, and to replace a lost link, with pauses.

Must not import torch.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeAlias, TypeVar

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    LocalProtocolError,
    PeerClosed,
)
from aiosync.rendezvous.handshake import HANDSHAKE_SECONDS, SentOn
from aiosync.transports.address import Address, parse_all
from aiosync.transports.base import Transport, without_frames
from aiosync.transports.credentials import Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits

__all__ = [
    "Backoff",
    "Dial",
    "Dialer",
    "KeptLink",
    "Left",
    "LinkState",
    "is_final",
    "retry",
    "to_dial",
]

_T = TypeVar("_T")
_L = TypeVar("_L", bound=Transport)
_W = TypeVar("_W")

# Timers may fire early by at most this time, so that a shorter rest counts as none.
_OVER_SECONDS = 0.001
_FIRST_PAUSE_SECONDS = 0.02
# An address that is not the last has this time at first, and twice as much in each next attempt, up
# to HANDSHAKE_SECONDS.
_PATIENCE_SECONDS = 2.0
# Addresses that servers named: how many are tried in one attempt, and the time for each handshake.
_MAX_NAMED = 8
_NAMED_SECONDS = 2.0
# A link that lasted for longer than this was of use, even if no update came over it.
_OF_USE_SECONDS = 1.0

Left: TypeAlias = Callable[[], float | None]
"""A function that returns the seconds that are left; ``None`` without a limit."""
Dial: TypeAlias = Callable[[Left, bool], Awaitable[_L]]
"""A function that makes one attempt to get a link; with True if there was a link before."""


class Backoff:
    """Pauses between attempts, each twice as long as the previous one, up to a bound.

    Each pause is shortened at random, so that many processes do not dial at the same moment.

    Args:
        longest: Greatest length of a pause, in seconds.
    """

    def __init__(self, longest: float = 2.0) -> None:
        self._pause = _FIRST_PAUSE_SECONDS
        self._longest = longest

    def reset(self) -> None:
        """Return to the first, short pause."""
        self._pause = _FIRST_PAUSE_SECONDS

    async def wait(self, most: float | None = None) -> None:
        """Sleep for the next pause, or for ``most`` seconds if that is shorter."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        pause *= random.uniform(0.5, 1.0)
        await asyncio.sleep(pause if most is None else min(pause, most))


def is_final(error: AiosyncError) -> bool:
    """Return True if another attempt would fail in the same way.

    It would, if the credentials, the configuration or a message of this side are wrong.
    """
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
    """Await ``attempt()`` again and again until it succeeds, and return its result.

    Args:
        attempt: Called with a function that returns the seconds that are left, within which the
            attempt has to end by itself. It cleans up after itself if it fails or is cancelled.
        timeout: Seconds for all attempts; ``None`` for no limit.
        late: Makes the error that is raised after ``timeout`` from the error of the last attempt.
            A ``timeout`` needs it.
        final: Returns True for an error after which no other attempt is made.
        backoff: Pauses between attempts.
        after: Error of an earlier attempt or of a lost link, if there was one; the first attempt
            then follows a pause.

    Raises:
        AiosyncError: The final error, or the error that ``late`` made, caused by that of the last
            attempt.

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
            if late is not None and left() == 0.0:
                raise late(last) from last
        try:
            return await attempt(left)
        except AiosyncError as exc:
            if last is not None and isinstance(exc, ConnectTimeout) and left() == 0.0:
                # This attempt only ran out of time. The error before it says more, so that one
                # remains the last error.
                continue
            if final(exc):
                raise
            last = without_frames(exc)


async def _try_each(
    attempts: Mapping[str, Callable[[Left, bool], Awaitable[_T]]],
    left: Left,
    is_redial: bool,
    *,
    patience: float,
) -> _T:
    """Await one attempt after the other until one succeeds, and return its result.

    Args:
        attempts: One for each address, by the address. It is called with a function that returns
            the seconds that are left for it, and with ``is_redial``.
        left: Returns the seconds that are left for all of them.
        is_redial: True if there was a link before. The error that is raised is final then only if
            the errors of all addresses are.
        patience: Most seconds for each attempt but the last.

    Raises:
        AiosyncError: No attempt succeeded: the error of the only one, or one that names all errors.
    """
    failed = dict[str, AiosyncError]()
    for number, (address, attempt) in enumerate(attempts.items(), 1):
        others = len(attempts) - number
        here = _share_of(left, others + 1, patience) if others else left
        try:
            return await attempt(here, is_redial)
        except AiosyncError as exc:
            failed[address] = without_frames(exc)
    _raise_joined(failed, is_redial)


def _raise_joined(failed: Mapping[str, AiosyncError], is_redial: bool) -> NoReturn:
    """Raise one error for attempts that failed at all addresses."""
    errors = list(failed.values())
    # All attempts may raise the same error, kept from the link before, and not of their addresses.
    if all(each is errors[0] for each in errors):
        raise errors[0]
    # The error of a peer that answered says more than that nobody did.
    told = next((each for each in errors if not _is_unanswered(each)), errors[0])
    raise _join_errors(failed, is_redial) from told


def _share_of(left: Left, count: int, most: float) -> Left:
    """Return the time that is left for the first of some addresses; the others need a share."""
    clock, rest = asyncio.get_running_loop().time, left()
    ends = clock() + (most if rest is None else min(most, rest / count))
    return lambda: max(0.0, ends - clock())


def _is_unanswered(error: AiosyncError) -> bool:
    """Return True if no process answered an attempt."""
    return isinstance(error, ConnectTimeout) or isinstance(error.__cause__, OSError)


def _join_errors(failed: Mapping[str, AiosyncError], is_redial: bool) -> AiosyncError:
    """Return one error, final or not, for an attempt that failed at each of several addresses."""
    kind = _kind_of(failed, is_redial)
    texts = {address: str(error) for address, error in failed.items()}
    return kind("; ".join(t if at in t else f"{at}: {t}" for at, t in texts.items()))


def _kind_of(failed: Mapping[str, AiosyncError], is_redial: bool) -> type[AiosyncError]:
    """Return the class of the one error for an attempt that failed at several addresses."""
    finals = [each for each in failed.values() if is_final(each)]
    # One final error is enough before the first link, as it shows a mistake of the user. Later the
    # other addresses may admit this side again; and a server that sent this side on in vain admits
    # it at the next attempt.
    is_sent_on = any(isinstance(each, SentOn) for each in failed.values())
    if finals and (len(finals) == len(failed) or not (is_redial or is_sent_on)):
        return AuthError if isinstance(finals[0], AuthError) else ConfigError
    late = all(isinstance(each, ConnectTimeout) for each in failed.values())
    return ConnectTimeout if late else ConnectError


def to_dial(urls: str | Sequence[str]) -> tuple[Address, ...]:
    """Parse an address to dial, or several in the order in which they are tried.

    Raises:
        ConfigError: There is none, or one of them is no address or has no port to dial.
    """
    addresses = parse_all(urls)
    for address in addresses:
        if address.scheme == "tcp" and not address.port:
            raise ConfigError(f"{address} has no port to dial")
    return addresses


@dataclass(frozen=True, kw_only=True)
class Dialer:
    """A dialer of one address, or of several in their order.

    Args:
        addresses: Addresses of the other end.
        credentials: Token and TLS.
        limits: Bounds on what the other end may announce.
        keepalive: See :meth:`TCPTransport.connect`.
        untaken: See :meth:`TCPTransport.connect`.
        streams: Number of connections of a link.
        attempt_timeout: Seconds for each connection of an attempt at one address, its handshakes
            included.
        name: Name of the other end in errors.
        advice: Advice in errors: what the user has to do so that the other end can be reached.
    """

    addresses: tuple[Address, ...]
    credentials: Credentials
    limits: Limits | None
    keepalive: float | None
    untaken: float | None = None
    streams: int = 1
    attempt_timeout: float
    name: str
    advice: str = "it has to run init_on_sender() and connect(), or `aiosync serve`"

    @property
    def where(self) -> str:
        """The addresses, as a piece of a text."""
        return " or ".join(map(str, self.addresses))

    @property
    def is_remote(self) -> bool:
        """True if all addresses are of TCP: only then this side dials those that servers name."""
        return all(each.scheme == "tcp" for each in self.addresses)

    @property
    def dials(self) -> dict[str, Dial[TCPTransport]]:
        """:meth:`dial` for each address, by the address."""
        return {str(each): functools.partial(self.dial, each) for each in self.addresses}

    async def dial_first(self, *, is_redial: bool = False) -> TCPTransport:
        """Try each address once, in order, and return the first link; see :meth:`dial`."""
        return await _try_each(
            self.dials, lambda: None, is_redial, patience=self.attempt_timeout / len(self.addresses)
        )

    async def dial(self, address: Address, left: Left, is_redial: bool) -> TCPTransport:
        """Make one attempt to reach an address; see :meth:`TCPTransport.connect`.

        Args:
            address: One of the addresses, or one that a server named.
            left: Returns the seconds for the attempt, if less than ``attempt_timeout``.
            is_redial: True if there was a link before, or the address was named. Unreadable
                certificate files, and a refusal by the process that answers, then raise
                ``ConnectError``, because they may be temporary.
        """
        timeout = left()
        try:
            return await TCPTransport.connect(
                address,
                credentials=self.credentials,
                limits=self.limits,
                payloads=False,
                keepalive=self.keepalive,
                untaken=self.untaken,
                streams=self.streams,
                timeout=min(
                    self.attempt_timeout * self.streams, math.inf if timeout is None else timeout
                ),
                name=f"{self.name} at {address}",
            )
        except (AuthError, ConfigError) as exc:
            if not is_redial:
                raise
            # The files may be about to be replaced, and the process that refuses this side has not
            # proved its identity.
            raise ConnectError(str(exc)) from exc

    def not_reached_text(self, within: str = "") -> str:
        """Return the text of an error that says that the other end was not reached.

        Args:
            within: The time, as a piece of the text, such as " within 5 s".
        """
        return f"{self.name} at {self.where} was not reached{within}: {self.advice}"


class LinkState(enum.Enum):
    """State of a link that is kept up: not reached (again), reached without an answer, let in."""

    DIALING = enum.auto()
    GREETING = enum.auto()
    UP = enum.auto()


class KeptLink(Generic[_L, _W]):
    """A link that is dialled until the other end admits this side, and again after it was lost.

    Args:
        name: Name of the other end in errors.
        dials: For each address a function that makes one attempt to reach the other end there, by
            the address, or by any name if there is only one. It is called with a function that
            returns the seconds that are left, and with True if there was a link before.
        greet: Sends the first message on a link, within the seconds that it is given, and returns
            the answer.
        not_reached_text: Returns the text of an error that says that the other end was not reached,
            and what to do. It is called with the time as a piece of that text.
        final: Returns True for an error that ends all attempts. With ``None`` no error does, and
            the time of each handshake is bounded.
        on_failure: Called with the error of each attempt that failed.
        pauses: Pauses between two attempts.
        dial_named: As ``dials``, for an address that a server named, which it gets first. With
            ``None`` this side is sent on by nobody.

    Attributes:
        state: State of the link.
        follows: True if the other end may send this side on to servers that it names: there is
            ``dial_named``, and the last attempt did not fail at those.
        why: Error of the last attempt; ``None`` if it succeeded or there was none.
        answer: Answer of the other end when it admitted the last link.
    """

    def __init__(
        self,
        name: str,
        dials: Mapping[str, Dial[_L]],
        greet: Callable[[_L, float | None], Awaitable[_W]],
        *,
        not_reached_text: Callable[[str], str],
        final: Callable[[AiosyncError], bool] | None = is_final,
        on_failure: Callable[[AiosyncError], None] | None = None,
        pauses: Backoff | None = None,
        dial_named: Callable[[Address, Left, bool], Awaitable[_L]] | None = None,
    ) -> None:
        self.state: LinkState = LinkState.DIALING
        self.follows: bool = dial_named is not None
        self._name = name
        self._dials = dials
        # Seconds for each address but the last; longer after each attempt that failed.
        self._patience = _PATIENCE_SECONDS
        self._greet = greet
        self._not_reached_text = not_reached_text
        self._final = final
        self._on_failure = on_failure
        self._link: _L | None = None
        self.why: BaseException | None = None
        self.answer: _W | None = None
        # The loop's time at which the other end admitted the last link.
        self._up_at = 0.0
        # The loop's time at which a link was last known to be of use.
        self._of_use_at = 0.0
        # The caller's value of ``progress`` at that time.
        self._progress: object = None
        self._pauses = pauses or Backoff()
        self._dial_named = dial_named
        # True if a server sent this side on in the last attempt.
        self._is_sent_on = False

    async def connect(self, timeout: float | None, spent: float = 0.0) -> tuple[_L, _W]:
        """Dial until the other end admits this side.

        Args:
            timeout: Seconds for all attempts; ``None`` for no limit.
            spent: Seconds of them that the caller has spent before.

        Returns:
            The link, and the other end's answer.

        Raises:
            ConnectTimeout: No attempt succeeded in time; caused by the error of the last attempt.
            AiosyncError: An error that is final.

        Cancellation:
            Class A.
        """

        def late(last: AiosyncError) -> ConnectTimeout:
            within = f" within {timeout:g} s"
            # These errors say themselves how far the attempt came.
            if self.state is LinkState.GREETING or isinstance(last, ConnectTimeout):
                return ConnectTimeout(f"{last}; no other attempt worked{within}")
            return ConnectTimeout(f"{self._not_reached_text(within)}; the last attempt: {last}")

        left = None if timeout is None else max(0.0, timeout - spent)
        return await self._dial_until_admitted(left, late)

    async def reconnect(
        self, lost: AiosyncError, progress: object, seconds: float | None
    ) -> tuple[_L, _W]:
        """Replace a link that was lost.

        Args:
            lost: The error that ended the link.
            progress: A value that changes whenever a link is of use, such as the applied version.
            seconds: Seconds to go on trying, counted from the loss of the last link that was of
                use; ``None`` for no limit.

        Returns:
            The new link, and the other end's answer.

        Raises:
            PeerClosed: No attempt succeeded in time.
            AiosyncError: An error that is final.

        Cancellation:
            Class A.
        """
        now = asyncio.get_running_loop().time()
        # A link that ends as soon as it is up, again and again, gives the attempts no new time.
        if progress != self._progress or now - self._up_at > _OF_USE_SECONDS:
            self._progress, self._of_use_at = progress, now
            self._pauses.reset()

        def late(last: AiosyncError) -> PeerClosed:
            return PeerClosed(
                f"the link to {self._name} was lost ({lost}), and not restored within {seconds:g} s"
                + ("" if last is lost else f"; the last attempt: {last}")
            )

        left = None if seconds is None else max(0.0, self._of_use_at + seconds - now)
        return await self._dial_until_admitted(left, late, lost)

    async def _dial_until_admitted(
        self,
        timeout: float | None,
        late: Callable[[AiosyncError], AiosyncError],
        lost: AiosyncError | None = None,
    ) -> tuple[_L, _W]:
        """Dial and greet until an attempt succeeds.

        Args:
            timeout: Seconds for all attempts; ``None`` for no limit.
            late: Makes the error that is raised after that time, see :func:`retry`.
            lost: Error of the link before, if there was one: a pause then comes first, and the time
                of each handshake is bounded, because no call may be waiting that has a timeout.
        """
        most = None if lost is None and self._final is not None else HANDSHAKE_SECONDS
        attempts = {
            address: functools.partial(self._reach_own, dial, most)
            for address, dial in self._dials.items()
        }

        async def attempt(left: Left) -> tuple[_L, _W]:
            self._is_sent_on = False
            try:
                admitted = await _try_each(
                    attempts, left, lost is not None, patience=self._patience
                )
            except BaseException as exc:  # raised again
                self.abort()
                self._patience = min(2 * self._patience, HANDSHAKE_SECONDS)
                self.follows = self._dial_named is not None and not self._is_sent_on
                self.why = without_frames(exc)
                if self._on_failure is not None and isinstance(exc, AiosyncError):
                    self._on_failure(exc)
                raise
            self.why, self.follows = None, self._dial_named is not None
            self._patience = _PATIENCE_SECONDS
            self.state = LinkState.UP
            self._up_at = asyncio.get_running_loop().time()
            return admitted

        return await retry(
            attempt,
            timeout,
            late=late,
            final=self._final or (lambda error: False),
            backoff=self._pauses,
            after=lost,
        )

    async def _reach_own(
        self,
        dial: Dial[_L],
        most: float | None,
        left: Left,
        is_redial: bool,
    ) -> tuple[_L, _W]:
        """Dial one of the given addresses, and those to which its server sends this side on.

        The handshake at the given address has ``most`` seconds; with ``None`` only ``left`` counts.
        """
        self.abort()
        try:
            return await self._reach(dial(left, is_redial), left, most)
        except SentOn as exc:
            self._is_sent_on = True
            return await self._reach_named(exc, left)

    async def _reach(
        self, dialling: Awaitable[_L], left: Left, most: float | None
    ) -> tuple[_L, _W]:
        """Await a link, and greet the other end within ``most`` seconds, and within ``left()``."""
        self.state = LinkState.DIALING
        self._link = link = await dialling
        self.state = LinkState.GREETING
        limit = min((each for each in (left(), most) if each is not None), default=None)
        self.answer = answer = await self._greet(link, limit)
        return link, answer

    async def _reach_named(self, sent_on: SentOn, left: Left) -> tuple[_L, _W]:
        """Try the addresses that a server named, and those that their servers name in turn.

        Raises:
            SentOn: None of them admitted this side. At the next attempt :attr:`follows` is False,
                so that the server admits it itself.
        """
        if self._dial_named is None:
            raise sent_on
        named, failed = list(sent_on.addresses), dict[Address, AiosyncError]()
        while named and len(failed) < _MAX_NAMED:
            address = named.pop(0)
            if address in failed:
                continue
            self.abort()
            rest = left()
            # Some of the time is left for the next attempt, at which the server that sent this side
            # on has to admit it.
            seconds = _NAMED_SECONDS if rest is None else min(_NAMED_SECONDS, rest / 4)
            try:
                dialling = self._dial_named(address, functools.partial(float, seconds), True)
                return await self._reach(dialling, left, seconds)
            except AiosyncError as exc:
                failed[address] = without_frames(exc)
                # The servers that this one names come first: further from the root is more room.
                named = [*exc.addresses, *named] if isinstance(exc, SentOn) else named
        listed = "; ".join(f"{address}: {error}" for address, error in failed.items())
        raise SentOn(f"{sent_on}; none of them admitted this side: {listed}")

    def abort(self) -> None:
        """End the link at once. An attempt that is under way ends when its call is cancelled."""
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def describe(self) -> str:
        """Return a text that says why the other end has not admitted this side yet."""
        if self.state is not LinkState.DIALING:
            return f"{self._name} was reached, but has not let this process in"
        why = "" if self.why is None else f"; the last attempt: {self.why}"
        return f"{self._not_reached_text('')}{why}"
