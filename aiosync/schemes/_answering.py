"""What the trainer is told of updates: applied, received, refused, skipped, or passed on first.

Must not import the sender.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiosync.errors import StaleVersion
from aiosync.schemes._applying import Applying
from aiosync.schemes._outgoing import Outgoing
from aiosync.schemes._relaying import Relay, Relaying
from aiosync.schemes._staging import Staged, Staging
from aiosync.schemes._transforming import Transforming
from aiosync.schemes.guard import Guard
from aiosync.tensors.loading import LoadTarget
from aiosync.transports._link import without_frames
from aiosync.transports.base import make_ack
from aiosync.types import AckStatus
from aiosync.wire import Ack

__all__ = ["Answering", "Refusing"]


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
        self._answered: tuple[int, int] | None = None
        self._reported: tuple[int, int] | None = None
        self._refusal: tuple[int, int, BaseException] | None = None  # epoch, version and why
        # What the model does not have because it refused it, and since when there is such.
        self.refusing: Refusing | None = None
        self._passed_on: tuple[int | None, int] = (None, 0)
        self._waited_for = False
        self._transforming: Transforming | None = None

    @abc.abstractmethod
    def _notify(self) -> None:
        """Let whoever waits look again."""

    # -- what was applied ----------------------------------------------------------------------

    def _report_outcomes(self) -> None:
        # In the order in which they were applied, whichever threads did it.
        while self._outcomes:
            staged, old, error = self._outcomes.popleft()
            if self._reported != (staged.epoch, staged.version):  # else an interrupt repeated it
                self._reported = (staged.epoch, staged.version)
                self._applied(staged, old, error)

    def _applied(self, staged: Staged, old: Staged | None, error: BaseException | None) -> None:
        epoch, version = staged.epoch, staged.version
        if error is None and self.refusing is not None and self.refusing.ended_by(epoch, version):
            self.refusing = None
        relay = self._relay() if error is None else None
        if relay is None:
            self._answered = (epoch, version)
        if error is not None:
            self._answer(epoch, version, error)
            # What loads may have kept it, and Ctrl-C may have come once the model had changed.
            self._staging.retire(staged)
        else:
            if self._copy:
                old = staged
            if relay is not None:
                self._relaying.pass_on(relay, epoch, version)
            elif not self._outgoing.say_applied_now(epoch, version):
                self._answer(epoch, version, None)
            # The trainer does not wait while the old memory is looked at and unmapped.
            if old is not None:
                self._loop.call_soon(self._leave, old)
            self._on_applied(epoch, version)
        if self._waited_for:
            self._notify()

    def _answer(self, epoch: int, version: int, error: BaseException | None) -> None:
        if error is not None:
            self._refuse(version, error)
            self._refusal = (epoch, version, without_frames(error))
            since = time.monotonic() if self.refusing is None else self.refusing.since
            self.refusing = Refusing(epoch, version, str(error) or type(error).__name__, since)
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._outgoing.say(make_ack(epoch, version, status, error))

    def _untransformed(self, staged: Staged, error: BaseException) -> None:
        if staged.epoch == self.inbox.newest_epoch:  # else its trainer has gone
            self._answered = (staged.epoch, staged.version)
            self._answer(staged.epoch, staged.version, error)
        self._staging.retire(staged)
        self._notify()

    def _relayed(self, epoch: int, version: int, error: BaseException | None) -> None:
        if error is None:
            self._passed_on = (epoch, version)
        self._answer(epoch, version, error)
        self._notify()

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

    def _answer_to_stale(self, staged: Staged, error: StaleVersion) -> Ack:
        # After a lost link the trainer may not know that the update had arrived.
        epoch, version = staged.epoch, staged.version
        if self._refusal is not None and self._refusal[:2] == (epoch, version):
            return make_ack(epoch, version, AckStatus.NACK, self._refusal[2])
        if self.held == (epoch, version):
            return make_ack(epoch, version, AckStatus.APPLIED, None)
        waiting = self._staged
        if waiting is not None and (waiting.epoch, waiting.version) == (epoch, version):
            return make_ack(epoch, version, AckStatus.RECEIVED, None)
        if self._transforming is not None and self._transforming.has(epoch, version):
            return make_ack(epoch, version, AckStatus.RECEIVED, None)
        if (self.inbox.epoch, self.inbox.version) == (epoch, version):
            return make_ack(epoch, version, AckStatus.RECEIVED, None)  # being passed on
        return make_ack(epoch, version, AckStatus.NACK, error)
