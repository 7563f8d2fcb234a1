"""Waits: the calls of a worker's program that wait for a version, and what they raise.

While a call waits, the trainer and the call hear of every version: a promised one, too. Belongs to
the loop of its receiver. Must not import transports.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeAlias

from aiosync._tasks import Notifier
from aiosync.errors import LocalProtocolError, RecvTimeout, SyncTimeout
from aiosync.protocol import Ledger, Refusal
from aiosync.receiver.applier import Applier, not_applied
from aiosync.receiver.guard import Guard
from aiosync.receiver.outage import Outage
from aiosync.receiver.reads import is_held_by_caller
from aiosync.receiver.update_reader import UpdateReader
from aiosync.wire import Welcome

__all__ = ["VersionWaits"]

Context: TypeAlias = "contextlib.AbstractContextManager[None]"
_SILENT: Context = contextlib.nullcontext()

_BELL_SECONDS = 0.001


class VersionWaits:
    """Calls that wait until the model has a version, or one is here.

    Args:
        applier: Applies the updates that the calls wait for.
        guard: Its reads hold updates back.
        ledger: The versions that the model wants, has and refused.
        updates: Reads the word of a link, and sets the bell beside it.
        outage: Has the reason of a cut-off worker.
        may_apply: Calls of the program have the staged update applied, also with
            ``apply="manual"``; false if they leave that to the owner of the model. May be assigned.
        check: Raises the error that ended the link, if it has ended.
        fetch: Asks the trainer for the versions that :meth:`pull` wants.

    Attributes:
        changed: Wakes the calls; notified by whatever may end a wait.
        reported: Epoch and version that :meth:`receive` reported last.
    """

    def __init__(
        self,
        applier: Applier,
        guard: Guard,
        ledger: Ledger,
        updates: UpdateReader,
        outage: Outage,
        *,
        may_apply: bool,
        check: Callable[[], None],
        fetch: Callable[[], None],
    ) -> None:
        self.changed: Notifier = Notifier()
        self.reported: tuple[int | None, int] = (None, 0)
        self._applier = applier
        self._guard = guard
        self._ledger = ledger
        self._updates = updates
        self._outage = outage
        self.may_apply: bool = may_apply
        self._check = check
        self._fetch = fetch
        self._loop = asyncio.get_running_loop()

    def check_refused(self, at_least: int = 0, *, beside: Refusal | None = None) -> None:
        """Raise the model's last refusal, if there is one.

        Args:
            at_least: Only the refusal of a version from this one on counts.
            beside: A refusal that does not count, because it was known before.

        Raises:
            ApplyError: The model refused the version.
        """
        refused = self._ledger.refused
        if refused is not None and refused is not beside and refused.version >= at_least:
            raise not_applied(refused.version, refused.error) from refused.error

    async def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout: float | None,
        late: SyncTimeout,
        waiting: Context = _SILENT,
        applied: bool = False,
    ) -> None:
        """Wait for a condition that updates change, inside of ``waiting``.

        Args:
            condition: Returns True when the wait is over.
            timeout: Seconds; ``None`` for ever, and with 0 it only looks.
            late: The error to raise after the timeout.
            waiting: Entered if it has to wait.
            applied: Have the staged update applied for this, also with ``apply="manual"``.

        Raises:
            SyncTimeout: ``late``.
            PeerClosed: The trainer went away; TransportBroken if a last link broke in mid-message.
        """
        applier = self._applier

        def set_bell_and_check() -> bool:
            self._set_bell()
            applier.apply_soon()
            return condition()

        applier.askers += applied
        try:
            applier.apply_soon()
            if condition():
                # Updates arrive on this loop, and need a turn of it.
                await asyncio.sleep(0)
                return
            # Not before: from here on the trainer is told of each update.
            self._ledger.num_waiting += 1
            try:
                with waiting:
                    async with asyncio.timeout(timeout):
                        await asyncio.sleep(0)
                        while not condition():
                            self._check()
                            # Another thread may have taken it without waking this call.
                            await self.changed.wait(unless=set_bell_and_check)
            except TimeoutError as exc:
                # The check or the condition raised it: the time is not over.
                if isinstance(exc, SyncTimeout):
                    raise
                applier.apply_soon()
                if applied and applier.manual:
                    # A thread that has to wait for an accelerator applies only for an open call.
                    await applier.turns.wait_for_thread(unless=condition)
                if not condition():
                    self._check()
                    cut_off = self._outage.cut_off
                    raise self._say_lost(late) from (exc if cut_off is None else cut_off[1])
            finally:
                self._end_wait()
        finally:
            applier.askers -= applied

    def _say_lost(self, late: SyncTimeout) -> SyncTimeout:
        """Return the error of a wait that was too long, which says so if there is no link."""
        lost = self._outage.lost_link
        if lost is None:
            return late
        return type(late)(f"{late}; there is no link to a trainer: {lost}")

    def _set_bell(self) -> None:
        """Have the trainer tell of new versions at once, if it only names them in memory."""
        slots = self._updates.slots
        if slots is not None and self._guard.words is not None:
            slots.ring_me(True)
            # It may have named one just before, when neither side saw the other's change.
            self._loop.call_later(_BELL_SECONDS, self._applier.apply_soon)

    def _end_wait(self) -> None:
        """Count one wait less; after the last one the trainer need not ring any more."""
        self._ledger.num_waiting -= 1
        slots = self._updates.slots
        if slots is not None and not self._ledger.num_waiting:
            slots.ring_me(False)

    def _check_not_inside(
        self, method: str, timeout: float | None, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Raise if the call would wait for what its own read holds back; not if ``unless()``."""
        if timeout != 0 and is_held_by_caller(self._guard) and not unless():
            self._check()
            raise LocalProtocolError(
                f"{method}() was called inside a reading() block or a forward pass, which keeps "
                "updates from being applied: it would wait for ever. Call it after the block"
            )

    def _fetch_again(self, least: int) -> None:
        """Ask for what was let go meanwhile, or could not be asked for before a late answer."""
        if self._ledger.lacks_newest and not self._applier.results:
            self._ledger.want(least)
            self._fetch()

    async def wait_for_first(
        self, welcome: Welcome, *, timeout: float | None, late: SyncTimeout
    ) -> None:
        """Wait until the model has the initial weights, or they wait for a model."""
        inbox = self._ledger.inbox

        def arrived() -> bool:
            # Versions before that of the welcome may be mistakes that all workers have refused. In
            # the epoch of a trainer that came since, every refusal counts.
            self.check_refused(welcome.version if inbox.newest_epoch == welcome.epoch else 0)
            if self._applier.model.resolve() is None:
                return self._applier.has_staged
            # Parts with the newest of each name arrive one by one.
            if inbox.epoch == welcome.epoch:
                return inbox.version >= welcome.version
            return inbox.version > 0

        await self.wait_until(arrived, timeout=timeout, late=late, applied=True)
        self.reported = (inbox.epoch, inbox.version)

    async def receive(self, timeout: float | None) -> tuple[int, int] | None:
        """Wait for an applied update that was not reported yet; return its epoch and version."""
        inbox, refused = self._ledger.inbox, self._ledger.refused

        def arrived() -> bool:
            if self._applier.manual:
                self.check_refused(beside=refused)
            return inbox.version > 0 and (inbox.epoch, inbox.version) != self.reported

        self._outage.check()
        self._check_not_inside("receive", timeout, arrived)
        try:
            await self.wait_until(
                arrived, timeout=timeout, late=RecvTimeout(), applied=self.may_apply
            )
        except RecvTimeout:
            # A hook that raised a RecvTimeout has ended the receiver.
            self._check()
            return None
        self.reported = found = (inbox.epoch or 0, inbox.version)
        return found

    async def wait_for(
        self,
        version: int,
        *,
        staged: bool = False,
        timeout: float | None,
        late: SyncTimeout,
        waiting: Context,
    ) -> int:
        """Wait until the model has at least ``version``; or, with ``staged``, until it is here.

        Returns:
            The version that the model has, or that is here.

        Raises:
            ApplyError: The model refused the version.
        """
        inbox = self._ledger.inbox

        def newest() -> int:
            version = inbox.version if inbox.epoch == inbox.newest_epoch else 0
            return max(version, self._applier.staged_version if staged else 0)

        def reached() -> bool:
            if newest() >= version:
                return True
            self.check_refused(version)
            return False

        if not staged:
            self._check_not_inside("wait_for_version", timeout, reached)
        applied = self.may_apply and not staged
        await self.wait_until(reached, timeout=timeout, late=late, waiting=waiting, applied=applied)
        return max(version, newest())

    async def wait_lag_below(
        self, limit: int, *, timeout: float | None, late: SyncTimeout, waiting: Context
    ) -> int:
        """Wait until the model is less than ``limit`` versions behind the newest that is here.

        Returns:
            The number of versions by which it is behind.

        Raises:
            ApplyError: The model refused the newest version.
        """

        def reached() -> bool:
            if self._applier.lag < limit:
                return True
            self.check_refused(self._ledger.inbox.newest)
            return False

        self._check_not_inside("wait_lag_below", timeout, reached)
        await self.wait_until(
            reached, timeout=timeout, late=late, waiting=waiting, applied=self.may_apply
        )
        return self._applier.lag

    async def pull(
        self, least: int, *, timeout: float | None, late: SyncTimeout, waiting: Context
    ) -> int:
        """Ask for the newest version, from ``least`` on, and wait until the model has it.

        This ends when the model has every version that was announced, and either took one since the
        call, or the trainer answered that there is none newer. An older refusal is no news.

        Raises:
            ApplyError: The model refused the version.
        """
        inbox, refused = self._ledger.inbox, self._ledger.refused
        # The trainer sends nothing again while it waits for an answer about it.
        self._applier.report()
        before = inbox.epoch, inbox.version, self._ledger.num_answers
        if least > inbox.version:
            self._check_not_inside("pull", None)
        self._ledger.want(least)
        self._fetch()

        def arrived() -> bool:
            self.check_refused(beside=refused)
            applier, coming = self._applier, self._ledger.coming
            if applier.has_staged or applier.model.lets_go:
                self._check_not_inside("pull", None)
            if applier.model.lets_go:
                return False
            self._fetch_again(least)
            if inbox.version < least or applier.has_staged or applier.lag or coming:
                return False
            return (inbox.epoch, inbox.version, self._ledger.num_answers) != before

        await self.wait_until(
            arrived, timeout=timeout, late=late, waiting=waiting, applied=self.may_apply
        )
        return inbox.version
