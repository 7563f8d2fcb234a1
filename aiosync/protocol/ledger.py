"""A worker's ledger: the versions that it wants, has and refused, and what it reported of each.

The columns are the four facts of one worker. The rows are the events, with what each does to them.

===============  =====================  ==================  =============  =========================
event            wanted                 held                refused        reported
===============  =====================  ==================  =============  =========================
update arrives   newest                                                    RECEIVED, if it waits
word names one   owed, if a message                                        SKIPPED for an older owed
                 asked for it                                              version
it came before                                              a new object   the last answer again
read took it                                                               RECEIVED before an async
first                                                                      hook ends, else APPLIED
read applies it  owed is settled        it                                 APPLIED; after an async
                                                                           hook, if there is one
model refuses    owed is settled                            it             NACK
newer one came                                                             SKIPPED
pull()           least versions
trainer: newest  coming, until it is                                       nothing
is v             here
interrupt                                                                  nothing: it is applied
                                                                           again by the next read
another model                           kept, or none                      nothing
trainer: it      it and older ones, if                                     forgotten
comes again      the model has none
link is lost     owed and coming end                                       its last answer is kept,
                                                                           to be repeated
other trainer    newest, in its epoch                       forgotten      of its epoch
===============  =====================  ==================  =============  =========================

An answer about a version settles all older versions of its epoch. The word is a number in shared
memory, with which the trainer names the newest version, with or without a message. This is pure
bookkeeping: this module must never import asyncio, anyio or torch, and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from aiosync.errors import StaleVersion
from aiosync.protocol.version_order import Inbox
from aiosync.types import AckStatus

__all__ = ["Answer", "Ledger", "Refusal"]


class Answer(NamedTuple):
    """An answer to the trainer about one version, in its epoch."""

    epoch: int
    version: int
    status: AckStatus
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """A version that the model refused.

    Attributes:
        epoch: Epoch of the version.
        version: Number of the version.
        error: The reason of the refusal.
        since: Time of the refusal on ``time.monotonic()``'s clock; of several refusals in a row
            that of the first.
    """

    epoch: int
    version: int
    error: BaseException
    since: float

    @property
    def text(self) -> str:
        """The reason of the refusal as a text."""
        return str(self.error) or type(self.error).__name__


class Ledger:
    """Bookkeeping of the versions of one worker, and of the answers that it owes to its trainer.

    Each method that returns an :class:`Answer` expects that the answer is sent, in this order.

    Args:
        awaits_hook: Returns the async hook that has to end before a version counts as held, or
            ``None``.

    Attributes:
        inbox: The newest version that arrived, and the version that the model has.
        refused: The last refusal of a version of this trainer; a new object if it was repeated.
        owed: The version that a message asked for and that a word names; 0 for none.
        passed_on: Epoch and version for which the async hook ended last.
        num_waiting: Number of calls that wait for a version now.
        num_answers: Number of answers to :meth:`want` that came.
        coming: Epoch and version that the trainer announced and that did not arrive yet.
        awaits_hook: As given.
    """

    def __init__(self, awaits_hook: Callable[[], Any] = lambda: None) -> None:
        self.inbox: Inbox = Inbox()
        self.refused: Refusal | None = None
        self.owed: int = 0
        self.passed_on: tuple[int | None, int] = (None, 0)
        self.num_waiting: int = 0
        self.num_answers: int = 0
        self.coming: tuple[int, int] | None = None
        self.awaits_hook: Callable[[], Any] = awaits_hook
        # Epoch and version, let go by the model, that the trainer is asked to send again.
        self._asked_of: tuple[int | None, int] | None = None
        # The last answer about the newest version.
        self._reported = Answer(0, 0, AckStatus.SKIPPED)
        # Least versions that have not come, also those of calls that waited in vain.
        self._wanted: set[int] = set()

    # -- wanted --------------------------------------------------------------------------------

    def arrive(self, epoch: int, version: int) -> None:
        """Register a version that arrived.

        Raises:
            StaleVersion: It is of the newest epoch, and not newer: :meth:`repeat` has the answer.
        """
        if epoch != self.inbox.newest_epoch:
            # The refusal was of an earlier trainer.
            self.refused = None
        self.inbox.offer(epoch, version)

    def owe(self, version: int, begun: int) -> int:
        """Note that a message asks for a version that the word names.

        Args:
            version: The version.
            begun: The version in shared memory that the model is about to take; 0 for none.

        Returns:
            The version that a message asked for before, if the model will not take it, so that it
            is to be reported as skipped; else 0.
        """
        older, self.owed = self.owed, version
        epoch, taken = self.inbox.taken
        if epoch == self.inbox.newest_epoch:
            # A thread may have taken that version, and the loop has yet to report it.
            begun = max(begun, taken)
        return older if begun < older else 0

    def want(self, least: int) -> None:
        """Note that a call wants the newest version, from ``least`` on."""
        self._wanted.add(least)

    @property
    def to_fetch(self) -> int | None:
        """The least version to ask the trainer for; ``None`` if no call wants one."""
        return min(self._wanted, default=None)

    @property
    def _may_ask_again(self) -> bool:
        """True if the model has let the newest version go, and the trainer waits for no answer."""
        last = self._reported
        # The async hook of that version has to end first.
        is_owed = last[:2] == self.inbox.taken and last.status is AckStatus.RECEIVED
        return self.inbox.has_let_go and not is_owed

    @property
    def lacks_newest(self) -> bool:
        """True if the newest version has to come again, and the trainer was not asked for it."""
        return self._may_ask_again and self._asked_of != self.inbox.taken

    def ask_again(self) -> bool:
        """Return True if the model has let the newest version go, so that it has to come again."""
        self._asked_of = self.inbox.taken if self._may_ask_again else None
        return self._asked_of is not None

    def _reopen(self) -> None:
        """Treat what comes as new, if the model has let the newest version go."""
        if self.inbox.has_let_go:
            self.inbox.reopen()
            self._reported = Answer(0, 0, AckStatus.SKIPPED)

    @property
    def is_asked(self) -> bool:
        """True if calls wait, or a version is to come: reads then report each version they take."""
        return bool(self.num_waiting or self._wanted or self.coming)

    @property
    def is_fetching(self) -> bool:
        """True if a version that a call wants, or that the trainer announced, has not come."""
        return bool(self._wanted or self.coming)

    def announce(self, epoch: int, version: int) -> bool:
        """Register the trainer's newest version, 0 for none; return True if it has yet to arrive.

        The announcement may overtake the update that a call wants.
        """
        inbox = self.inbox
        asked_of, self._asked_of = self._asked_of, None
        # Messages before this one may still be about what the model had. If it has let another
        # version go since it asked, this is not about that one.
        if asked_of == inbox.taken:
            self._reopen()
        is_new = version and (epoch != inbox.newest_epoch or version > inbox.newest)
        self.coming = (epoch, version) if is_new else None
        return self.coming is not None

    def has_come(self, epoch: int, version: int) -> bool:
        """Note that a version is here, or was refused before, for which a call may have asked.

        Returns:
            True if the trainer has to be asked again: some of the calls have their version, so that
            it has answered the request, and others want a newer one.
        """
        refused, coming, before = self.refused, self.coming, len(self._wanted)
        # A version before the announced one is not the newest, or only a part of the answer.
        if coming is None or epoch != coming[0] or version >= coming[1]:
            self.coming = None
            self.num_answers += 1
            self._wanted = {each for each in self._wanted if each > version}
        if refused is not None and (refused.epoch, refused.version) == (epoch, version):
            # Waiting calls ignore the object that they knew before.
            self.refused = replace(refused)
        return 0 < len(self._wanted) < before

    def lose_link(self) -> None:
        """Forget what the last link asked for and announced; what was reported stays.

        A version that the model has let go comes again over the next link.
        """
        self.coming, self.owed, self._asked_of = None, 0, None
        self._reopen()

    # -- held and refused ----------------------------------------------------------------------

    @property
    def held(self) -> tuple[int | None, int]:
        """Epoch and version on which the trainer may count: applied, and any async hook ended."""
        inbox = self.inbox
        if self.awaits_hook() and inbox.version:
            return self.passed_on
        return inbox.epoch, inbox.version

    @property
    def refusing(self) -> Refusal | None:
        """The model's last refusal, while it has no newer version."""
        refused, inbox = self.refused, self.inbox
        newer = refused and inbox.epoch == refused.epoch and inbox.version > refused.version
        return None if newer else refused

    def is_settled(self, epoch: int, version: int) -> bool:
        """Return True if the model took this version, or refused it."""
        refused = self.refused
        return (epoch, version) == self.inbox.taken or (
            refused is not None and (epoch, version) == (refused.epoch, refused.version)
        )

    def settle(self, version: int) -> None:
        """Note that the model took or refused a version, and so no older one is owed."""
        if version >= self.owed:
            self.owed = 0

    def refuse(self, epoch: int, version: int, error: BaseException, now: float) -> Answer:
        """Register that the model, a transform or a hook refused a version.

        Args:
            epoch: Epoch of the version.
            version: The version.
            error: The reason; kept, and told.
            now: Time on ``time.monotonic()``'s clock.
        """
        self.inbox.seen(epoch, version)
        # An async hook of the trainer before may end late: that is no refusal of this trainer's.
        if epoch == self.inbox.newest_epoch:
            before = self.refusing
            since = now if before is None else before.since
            self.refused = Refusal(epoch, version, error, since)
        return self.report(epoch, version, AckStatus.NACK, error)

    # -- reported ------------------------------------------------------------------------------

    def report(
        self, epoch: int, version: int, status: AckStatus, error: BaseException | None = None
    ) -> Answer:
        """Return the answer about a version, and keep it for :meth:`repeat` unless it is old."""
        answer, last = Answer(epoch, version, status, error), self._reported
        if epoch == self.inbox.newest_epoch and (last.epoch != epoch or last.version <= version):
            self._reported = answer
        return answer

    def has_reported(self, epoch: int, version: int) -> bool:
        """Return True if the last answer was about this version."""
        return self._reported[:2] == (epoch, version)

    def repeat(
        self,
        epoch: int,
        version: int,
        error: StaleVersion,
        *,
        named: bool,
        by_word: bool,
        transforming: bool,
    ) -> Answer:
        """Return the answer about a version that came before, or is older than one that did.

        After a lost link the trainer may not know that the update had arrived.

        Args:
            epoch: Epoch of the version.
            version: The version.
            error: Says that the version is not news.
            named: A word names this version, and a message asked for it.
            by_word: Words of shared memory name versions, so that the model may have one that no
                message named.
            transforming: A transform takes each version first.
        """
        inbox = self.inbox
        if self.has_reported(epoch, version):
            if named and self._reported.status is AckStatus.RECEIVED:
                # The version is owed on this link, too.
                self.owed = version
            return self._reported
        # Where a word has named a newer version to the model, this one counts as applied.
        passed = epoch == inbox.epoch and version < inbox.version
        if self.held == (epoch, version) or (by_word and passed):
            return self.report(epoch, version, AckStatus.APPLIED)
        if inbox.taken == (epoch, version):
            # A read took it by the word. It may be gone again, or its async hook has yet to end.
            status = AckStatus.RECEIVED if self.awaits_hook() else AckStatus.APPLIED
            return self.report(epoch, version, status)
        # The transform has not ended yet; its result is reported later.
        if transforming and (inbox.newest_epoch, inbox.newest) == (epoch, version):
            return self.report(epoch, version, AckStatus.RECEIVED)
        return self.report(epoch, version, AckStatus.NACK, error)
