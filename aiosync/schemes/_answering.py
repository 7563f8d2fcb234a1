"""What the trainer is told of updates: applied, received, refused, skipped, or passed on first.

Must not import the sender.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiosync._tasks import Notifier
from aiosync.errors import AiosyncError, ApplyError, RemoteProtocolError, StaleVersion
from aiosync.receiver.guard import Guard, takes_hooks
from aiosync.schemes._applying import Applying
from aiosync.schemes._outgoing import Outgoing
from aiosync.schemes._relaying import Relay, Relaying
from aiosync.schemes._staging import Staged, Staging
from aiosync.schemes._transforming import Transforming
from aiosync.tensors import Target
from aiosync.tensors.apply import LoadTarget
from aiosync.transports._link import without_frames
from aiosync.transports.base import make_ack
from aiosync.types import AckStatus
from aiosync.wire import Ack, Promise

__all__ = ["Answering", "Refusing"]

_PATIENCE_SECONDS, _PAUSE_SECONDS = 5.0, 0.001  # for a manifest that is on its way


@dataclass(frozen=True, slots=True)
class Refusing:
    """The newest version that a model refused, while it has nothing newer."""

    epoch: int
    version: int
    text: str
    since: float  # on time.monotonic()'s clock, of the first of them

    def ended_by(self, epoch: int, version: int) -> bool:
        """Whether another version, which was applied, is newer, or of another epoch."""
        return epoch != self.epoch or version > self.version


class Answering(Applying):
    """The answers of a receiver; see :class:`~aiosync.schemes.receiver.WeightReceiver`."""

    def __init__(
        self,
        *,
        resolve: Callable[[], Any],
        apply: Literal["auto", "manual"],
        copy: bool,
        strict: bool,
        guard: Guard,
        install_hooks: bool,
        flipped: Callable[[int, int], None] | None,
        staging: Staging,
        outgoing: Outgoing,
        relaying: Relaying,
        relay: Callable[[], Relay | None],
        on_applied: Callable[[int, int], None],
        promises: bool,
    ) -> None:
        super().__init__(
            resolve=resolve,
            apply=apply,
            copy=copy,
            strict=strict,
            guard=guard,
            install_hooks=install_hooks,
            flipped=flipped,
        )
        self._staging = staging
        self._outgoing = outgoing
        self._relaying = relaying
        self._relay = relay
        self._on_applied = on_applied
        self._promises = promises
        self._refused_unread: BaseException | None = None  # what no read has raised yet
        self._overlapped = False  # reads have; never again on this link a promise
        self._answered: tuple[int, int] | None = None
        self._reported: tuple[int, int] | None = None
        self._refusal: tuple[int, int, BaseException] | None = None  # epoch, version and why
        # What the model does not have because it refused it, and since when there is such.
        self.refusing: Refusing | None = None
        self._passed_on: tuple[int | None, int] = (None, 0)
        self._changed = Notifier()
        self._transforming: Transforming | None = None

    # -- what the word of the link names -------------------------------------------------------

    def _look(self) -> Staged | None:
        if self._transforming is not None:
            return None
        staged, slots = self._open_named(), self._staging.slots
        if staged is None and slots is not None and self.looks:
            until = time.monotonic() + _PATIENCE_SECONDS
            while slots.is_behind and self.guard.at_read:
                # Its manifest is on its way, and what was named before it is lost.
                on_loop = asyncio._get_running_loop() is self._loop
                if on_loop or time.monotonic() > until:
                    raise ApplyError(
                        "the trainer has begun to send another set of weights, whose manifest has "
                        "not been read yet: let the event loop run, and compute again"
                    )
                time.sleep(_PAUSE_SECONDS)
                staged = self._open_named()
                if staged is not None:
                    break
        return staged

    def _open_named(self) -> Staged | None:
        slots = self._staging.slots
        try:
            return self._staging.open_named()
        except (AiosyncError, OSError, ValueError, KeyError) as exc:
            if slots is not self._staging.slots:  # another link took its place meanwhile
                return None
            error = exc if isinstance(exc, RemoteProtocolError) else None
            self._call_soon(self.fail, error or RemoteProtocolError(str(exc)))
            if self.looks and self.guard.at_read:
                raise ApplyError(f"the trainer's newest version cannot be read: {exc}") from exc
            return None

    @property
    def _named_version(self) -> int:
        slots = self._staging.slots
        return 0 if slots is None else slots.named_version

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """Nothing more will come, for this reason. Called on the loop."""

    def _took(self, staged: Staged, error: BaseException | None) -> bool:
        slots, slot, before = self._staging.slots, staged.slot, self._before
        promised, unread = self.promised == staged.layout.digest, False
        if slots is None or slot is None or not slots.has(slot):  # it was of a link before
            return True
        if error is not None:
            slots.refuse(slot)
            staged.give_back()
            unread = self.looks and not self.owed and not self.guard.at_read
            if not unread:
                self.guard.seen = slot.want
        else:
            slots.hold(slot)
            self.guard.seen = slot.want
            if self._copy:
                self._staging.retire(staged)
            elif before is not None and before.slot is not None and before.slot.key != slot.key:
                before.give_back()
            slots.leave_others()
        self._refused_unread = error if unread else None
        wanted = (
            self._changed.is_waited_for
            or self.owed
            or self._wishes_wait
            or self.refusing is not None
        )
        return bool(error is not None or not promised or wanted)

    @property
    @abc.abstractmethod
    def _wishes_wait(self) -> bool:
        """Whether somebody asked the trainer for a version that has not come."""

    @abc.abstractmethod
    def _has_come(self, epoch: int, version: int) -> None:
        """What was asked for may be here."""

    def _promise(self) -> None:
        """Tell the trainer that the model follows by itself from now on, if it does."""
        target, current, slots = self._target, self._current, self._staging.slots
        if (
            slots is None
            or slots.words is None
            or current is None
            or current.slot is None
            or not slots.has(current.slot)
            or self.promised == current.layout.digest
            or self._overlapped
            or not self._may_promise()
            or not isinstance(target, Target)
            or not target.is_quick(current.layout, current.values)
        ):
            return
        digest = current.layout.digest
        self._promise_versions_of(digest)
        self.guard.watch_word(slots.words, self._on_word, self._on_overlap)
        self._outgoing.say(Promise(digest))

    def _may_promise(self) -> bool:
        """Whether applying is nothing but what a forward may do on its way."""
        return not (
            self._manual
            or not self._promises
            or not self._strict  # updates may hold parts, and each has to be taken
            or self._copy
            or self._closed
            or self._transforming is not None
            or self._relay() is not None
            or not self._install_hooks
            or not takes_hooks(self._target_of)
        )

    def _on_word(self) -> None:
        unread, self._refused_unread = self._refused_unread, None
        if unread is not None:
            slots = self._staging.slots
            self.guard.seen = 0 if slots is None or slots.words is None else slots.words[0]
            raise ApplyError(f"the newest version could not be applied: {unread}") from unread
        self._apply_when_fit()

    def _on_overlap(self) -> None:
        if not self._overlapped:
            self._overlapped = True
            self._call_soon(self.withdraw_promise)

    def withdraw_promise(self) -> None:
        """Say that the model does not follow by itself any more. Idempotent. On the loop."""
        if self.promised is not None and not self._closed:
            self._promise_versions_of(None)
            self._outgoing.say(Promise(b""))

    def _forget_overlap(self) -> None:
        self._overlapped = False

    def _on_promise_withdrawn(self) -> None:
        """The trainer counts on nothing any more that the model would see by itself."""
        if self.promised is None:
            self._stop_looking()

    # -- what was applied ----------------------------------------------------------------------

    def _report_outcomes(self) -> None:
        # In the order in which they were applied, whichever threads did it.
        while self._outcomes:
            staged, old, error, flipped = self._outcomes.popleft()
            if old is staged:
                self._drop_staged(staged, by=staged)
            elif self._reported != (staged.epoch, staged.version):  # else an interrupt repeated it
                self._reported = (staged.epoch, staged.version)
                self._applied(staged, old, error, flipped)

    def _applied(
        self, staged: Staged, old: Staged | None, error: BaseException | None, flipped: bool
    ) -> None:
        epoch, version = staged.epoch, staged.version
        if version >= self.owed:
            self._owe(0)
        if error is None and self.refusing is not None and self.refusing.ended_by(epoch, version):
            self.refusing = None
        relay = self._relay() if error is None else None
        if relay is None:
            self._answered = (epoch, version)
        if error is not None:
            self._answer(epoch, version, error)
            # What loads may have kept it, and Ctrl-C may have come once the model had changed.
            if staged.slot is None and not flipped:
                self._staging.retire(staged)
        if flipped:
            if self._copy and staged.slot is None:
                old = staged
            if error is not None:
                pass  # the trainer knows
            elif relay is not None:
                self._relaying.pass_on(relay, epoch, version)
            elif not self._outgoing.say_applied_now(epoch, version):
                self._answer(epoch, version, None)
            # The trainer does not wait while the old memory is looked at and unmapped.
            if old is not None and old.slot is None:
                self._loop.call_soon(self._leave, old)
            self._on_applied(epoch, version)
            if staged.slot is not None and error is None:
                self._promise()
                if self._wishes_wait:
                    self._has_come(epoch, version)
        self._changed.notify()

    def _answer(self, epoch: int, version: int, error: BaseException | None) -> None:
        if error is not None:
            self._refuse(version, error)
            self._refusal = (epoch, version, without_frames(error))
            since = time.monotonic() if self.refusing is None else self.refusing.since
            self.refusing = Refusing(epoch, version, str(error) or type(error).__name__, since)
            self.withdraw_promise()
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._outgoing.say(make_ack(epoch, version, status, error))

    def _untransformed(self, staged: Staged, error: BaseException) -> None:
        if staged.epoch == self.inbox.newest_epoch:  # else its trainer has gone
            self._answered = (staged.epoch, staged.version)
            self._answer(staged.epoch, staged.version, error)
        self._staging.retire(staged)
        self._changed.notify()

    def _relayed(self, epoch: int, version: int, error: BaseException | None) -> None:
        if error is None:
            self._passed_on = (epoch, version)
        self._answer(epoch, version, error)
        self._changed.notify()

    @property
    def held(self) -> tuple[int | None, int]:
        """Epoch and version that the trainer may count on: applied, and passed on if need be."""
        if self._relay() is None:
            return self.inbox.epoch, self.inbox.version
        return self._passed_on

    def _leave(self, old: Staged) -> None:
        if (self._copy and not isinstance(self._target, LoadTarget)) or self._closed:
            old.give_back()
        else:
            self._staging.retire(old)

    def _withdraw(self) -> None:
        """A newer update takes the place of one that was not applied yet."""
        self._owe(0)
        if self._staged is None:
            return
        self.guard.withdraw()
        self._drop_staged(self._exchange(None))

    def _drop_staged(self, old: Staged | None, by: Staged | None = None) -> None:
        if old is not None:  # else another thread has taken it, and applies it
            old.give_back()
            if by is not None and by.epoch == old.epoch:
                # Before anything is said of the newer one. The trainer would keep it otherwise
                # until something is applied, which may be never.
                self._outgoing.say(make_ack(old.epoch, old.version, AckStatus.SKIPPED, None))
        if self._adopts_late:
            self.guard.submit(self._adopt_late)

    def _answer_to_stale(self, epoch: int, version: int, error: StaleVersion) -> Ack:
        # After a lost link the trainer may not know that the update had arrived.
        if self._refusal is not None and self._refusal[:2] == (epoch, version):
            return make_ack(epoch, version, AckStatus.NACK, self._refusal[2])
        if self.held == (epoch, version):
            return make_ack(epoch, version, AckStatus.APPLIED, None)
        if self._staging.slots is not None and epoch == self.inbox.epoch:
            if version < self.inbox.version:  # its word named something newer
                return make_ack(epoch, version, AckStatus.APPLIED, None)
        if self.owed == version:
            return make_ack(epoch, version, AckStatus.RECEIVED, None)
        waiting = self._staged
        if waiting is not None and (waiting.epoch, waiting.version) == (epoch, version):
            return make_ack(epoch, version, AckStatus.RECEIVED, None)
        if self._transforming is not None and self._transforming.has(epoch, version):
            return make_ack(epoch, version, AckStatus.RECEIVED, None)
        if (self.inbox.epoch, self.inbox.version) == (epoch, version):
            return make_ack(epoch, version, AckStatus.RECEIVED, None)  # being passed on
        return make_ack(epoch, version, AckStatus.NACK, error)
