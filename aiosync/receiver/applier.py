"""Applying: the updates that a worker's model takes, in their order.

This module knows nothing of messages: the outcome of an update stands in its :class:`Staged`.
Everything that belongs to the model changes only under the guard, on any thread. An exception that
a signal's handler raises while an update is applied is no refusal: the update stays noted, and is
applied again before the next read. The word is a number in shared memory, with which the trainer
names the slot of the newest version. ``receiver.model`` has the model, and ``receiver.receiver``
tells the trainer. Must not import the sender.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from aiosync._interrupts import is_interrupt
from aiosync._meter import Meter, SyncFacts
from aiosync._repr import text_of
from aiosync._tasks import call_soon
from aiosync.errors import AiosyncError, ApplyError, RemoteProtocolError, TransportError
from aiosync.events import SyncOutcome
from aiosync.protocol import Ledger
from aiosync.receiver.guard import PATIENCE_SECONDS, Guard, weakly
from aiosync.receiver.model import WorkerModel
from aiosync.receiver.promise import ReadPromise
from aiosync.receiver.turns import Turns
from aiosync.receiver.update_reader import Staged, UpdateReader
from aiosync.tensors import Target

__all__ = ["Applier", "not_applied"]

# Longest wait of a read for a manifest that the loop has not read yet, and the pause between looks.
_MANIFEST_SECONDS, _PAUSE_SECONDS = 5.0, 0.001


class Applier:
    """Gives a model the updates that are offered, and those that the word of a link names.

    Belongs to one event loop; :meth:`apply_pending` and the guard may be used from any thread.

    Args:
        model: The model.
        guard: Keeps reads and updates apart.
        ledger: Has the versions that the model has, and those of which a call has to hear.
        promise: The promise that reads take the versions of a manifest without an answer.
        updates: Reads the update that the word names.
        manual: Apply only in calls that ask for it.
        reads_words: Take the update that the word names; false if a transform takes it first.
        flipped: Called with epoch and version as soon as the model has them, under the guard, on
            any thread; must not wait. What it raises is the error of a version that was taken.
        meter: Counts the outcomes of updates.
        report: Called when there may be results, on the loop, and not under the guard unless an
            update was refused; with True if a thread has applied an update, reported or not.
        fail: Called on the loop with the reason for which no more updates can be read.

    Attributes:
        model: As given.
        flipped: As given; may be assigned.
        manual: As given; see :meth:`apply_by_hand`.
        turns: Has the updates applied between two reads.
        results: Updates that were not reported yet, each with the update whose memory the model no
            longer needs: the one before it, or itself.
        waiting: The complete update that was not applied yet.
        askers: Number of open calls that want the waiting update applied, also with ``manual``.
            Nothing is applied for a call that has ended.
    """

    def __init__(
        self,
        model: WorkerModel,
        guard: Guard,
        ledger: Ledger,
        promise: ReadPromise,
        updates: UpdateReader,
        *,
        manual: bool,
        reads_words: bool,
        flipped: Callable[[int, int], object] | None,
        meter: Meter,
        report: Callable[[bool], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.model: WorkerModel = model
        self.manual: bool = manual
        self.results: deque[tuple[Staged, Staged | None]] = deque()
        self.waiting: Staged | None = None
        self.askers: int = 0
        self.flipped = flipped
        # The guard holds no reference that keeps this object alive.
        take = weakly(self, Applier.apply)
        self.turns: Turns = Turns(guard, model, ledger.inbox, take=take, ended=self._end_turn)
        self._guard = guard
        self._ledger = ledger
        self._promise = promise
        self._updates = updates
        self._reads_words = reads_words
        self._meter = meter
        self._report = report
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        # Guards the moves of an update into `waiting`, and from there into _taking.
        self._lock = threading.Lock()
        # The update that is being applied. After an interrupt it stays here, and is applied again.
        self._taking: Staged | None = None
        # The update that the model had before that one.
        self._before: Staged | None = None
        # The word whose update was refused, and the error, for the next read to raise.
        self._refused_word: tuple[int, BaseException] | None = None

    # -- state ---------------------------------------------------------------------------------

    @property
    def has_staged(self) -> bool:
        """True if an update waits to be applied, or to be applied again after an interrupt."""
        return (
            self.waiting is not None or self._taking is not None or self._updates.named_version > 0
        )

    @property
    def staged_version(self) -> int:
        """Version of the update that waits to be applied; 0 if there is none."""
        # A thread may take the update meanwhile.
        waiting = self.waiting
        return max(0 if waiting is None else waiting.version, self._updates.named_version)

    @property
    def progress(self) -> tuple[int | None, int, int, int]:
        """Epoch and version of the model, the newest version that arrived, and the lag."""
        inbox = self._ledger.inbox
        # A thread may apply a version meanwhile: the newest one is read last, and so is no older.
        epoch, version, named = inbox.epoch, inbox.version, self._updates.named_version
        newest = max(named, inbox.newest)
        # The model has none of the versions of another epoch.
        lag = max(0, newest - version) if inbox.newest_epoch == epoch else newest
        return epoch, version, newest, lag

    @property
    def lag(self) -> int:
        """Number of versions by which the applied version is behind the newest one that arrived."""
        return self.progress[3]

    @property
    def is_quick(self) -> bool:
        """True if applying the waiting update is little more than a change of pointers."""
        # A named update is not opened for this: the present one has its layout, as a rule.
        staged = self.waiting or (self.model.current if self._updates.named_version else None)
        return staged is not None and self.model.is_quick(staged)

    # -- requests ------------------------------------------------------------------------------

    def offer(self, staged: Staged | None) -> Staged | None:
        """Make an update, or none, the waiting one; return the old one if it is never applied."""
        with self._lock:
            old, self.waiting = self.waiting, staged
            # An interrupt may have left the old one in both places: it is applied again then.
            return None if old is self._taking else old

    def note_owed(self, version: int) -> int:
        """Note that a message asks for a version that the word names.

        Returns:
            The version that a message asked for before, if the model will not take it: the caller
            answers that it was skipped; else 0.
        """
        taking = self._taking
        begun = taking.version if taking is not None and taking.slot is not None else 0
        return self._ledger.owe(version, begun)

    def _end_turn(self, changed: bool) -> None:
        """Have what became of updates reported; pulls also wait for the reads of an old model."""
        self._report(self.model.has_changed_lets_go() or changed)

    def report(self) -> None:
        """Have what other threads applied reported now. On the loop."""
        self._report(False)

    def apply_soon(self) -> None:
        """Apply the waiting or the named update if that is automatic or asked for. On the loop."""
        slots = self._updates.slots
        behind = slots is not None and slots.is_behind
        if (self.askers or not self.manual) and (behind or self.waiting or self._taking):
            self.turns.submit()

    def apply_by_hand(self) -> None:
        """Apply only on request from now on. On the loop."""
        self.manual, self.model.watch = True, False
        self._promise.withdraw()

    def use_model(self, model: object, chosen: Callable[[], object]) -> None:
        """Guard another model from now on, and give it the weights of the old one. On the loop.

        As :meth:`WorkerModel.replace`, which has the arguments and the errors.
        """
        # Until the new model has taken an update, reads promise nothing.
        self._promise.withdraw()
        self.model.replace(model, chosen, self.waiting)
        self.turns.submit()

    def apply_pending(self, *, patience: float = PATIENCE_SECONDS) -> int | None:
        """Apply the waiting update now, on this thread, between two reads.

        Args:
            patience: Seconds to wait for the forward passes of other threads.

        Returns:
            The version that was applied, or ``None`` if no update waited.

        Raises:
            ApplyError: The model could not take the update, and kept the version it had; or the
                hook ``applied`` raised after the model took it.
            LocalProtocolError: Called inside a read.
            SyncTimeout: Another thread's forward pass did not end; on an event loop it is not
                waited for.
        """
        self._guard.refuse_inside_read("apply_pending")
        if not self.has_staged:
            return None
        results: list[Staged | None] = []
        try:
            self._guard.between_reads(
                lambda: results.append(self.apply(by_hand=True)),
                method="apply_pending",
                patience=patience,
            )
        finally:
            # An interrupt cut the apply short: it runs again as soon as no thread reads.
            if self._taking is not None:
                self._guard.submit(self.turns.take)
            # On another thread, apply() has asked the loop to report.
            if asyncio._get_running_loop() is self._loop:
                self._report(False)
        [staged] = results
        if staged is None:
            return None
        if staged.error is not None:
            raise not_applied(staged.version, staged.error) from staged.error
        return staged.version if staged.taken else None

    # -- applying ------------------------------------------------------------------------------

    def apply(self, by_hand: bool = False) -> Staged | None:
        """Have the model take the noted updates. Runs under the guard, on any thread.

        An update that an interrupt cut short stays noted, and the next read applies it again before
        it computes: until then the model has parts of two versions.

        Args:
            by_hand: This call asks for it, so that it applies also with ``manual``.

        Returns:
            The last update that was taken or refused; ``None`` if there was none.

        Raises:
            ApplyError: The read that begins promised to see this version, and cannot have it.
            BaseException: The exception that a signal's handler raised in this thread, or one that
                a function raised and that is no :class:`Exception`.
        """
        if self._refused_word is not None:
            self._raise_refused(*self._refused_word)
        result: Staged | None = None
        while True:
            follow_error: Exception | None = None
            try:
                has_model = self.model.follow(self.waiting, closed=self.turns.has_ended)
            except Exception as exc:  # The trainer gets it, unless it is an interrupt.
                if is_interrupt(exc):
                    raise
                follow_error, has_model = exc, True
            if not has_model:
                return result
            was_interrupted = self._taking is not None
            if not was_interrupted and not self._choose_next(by_hand):
                return result
            result = self._apply_noted(follow_error)
            # After an interrupted update comes what arrived meanwhile. After one of the word comes
            # a waiting one, to be answered: the word has overtaken it, or it is newer still.
            if not was_interrupted and (result.slot is None or self.waiting is None):
                return result

    def _raise_refused(self, want: int, error: BaseException) -> None:
        """Raise why the word's update was refused, once, and only in a read that begins or ends."""
        guard, words = self._guard, self._guard.words
        if guard.at_read:
            self._refused_word, guard.seen = None, want
            # A newer word replaces the one whose update was refused.
            if words is None or words[0] == want:
                text = f"the newest version could not be applied: {text_of(error)}"
                raise ApplyError(text) from error

    def _choose_next(self, by_hand: bool) -> bool:
        """Note the update to take now: the one that the word names, else the waiting one.

        Returns:
            False if there is none, if the applier has ended, or if no call asked and updates are
            applied by hand.
        """
        if self.turns.has_ended or (self.manual and not (by_hand or self.askers)):
            return False
        has_word = self._reads_words and self._updates.slots is not None
        named = self.open_named_update() if has_word else None
        with self._lock:
            self._taking = named or self.waiting
            if self.waiting is self._taking:
                self.waiting = None
        return self._taking is not None

    def _apply_noted(self, follow_error: BaseException | None) -> Staged:
        """Have the model take the noted update, also again after an interrupt cut this short.

        Args:
            follow_error: The exception that ``model.follow()`` raised, with which the update is
                refused; ``None`` for none.
        """
        staged, guard, model = self._taking, self._guard, self.model
        assert staged is not None
        inbox = self._ledger.inbox
        has = inbox.version if staged.epoch == inbox.epoch else 0
        # The word has overtaken this update: it ends neither taken nor refused, so as skipped.
        if staged.slot is None and staged.version < has:
            self._tell(staged, None)
            self._taking = None
            return staged
        # The loop may close the model meanwhile.
        target = model.target
        began = time.perf_counter() if self._meter.observers else 0.0
        error = follow_error
        # A call that was interrupted may have put this version into the model.
        if error is None and staged.version != has:
            error = model.load(staged)
        # If no message asked for this version, the trainer counts it as applied already. A read has
        # to raise a refusal then, and must not compute with the version before.
        is_by_word = staged.slot is not None and guard.words is not None
        read_has_to_raise = is_by_word and not self._ledger.owed
        staged.taken = error is None
        staged.error = error = self._switch_to(staged) if staged.taken else error
        # The model no longer needs the update before; or this one, if it was copied or refused.
        unused = self._before if staged.taken and not model.copy else staged
        has_to_tell = self._finish_update(staged, unused, read_has_to_raise)
        if error is None:
            # Counted before the trainer or a waiting call hears of the update.
            self._note_taken(staged, began, has_to_tell)
        if has_to_tell:
            self._tell(staged, unused)
        self._taking = self._before = None
        if self.turns.has_ended and staged.taken:
            self._leave_model(staged, target)
        # After the hook raised, the model has the version, and the read computes with it.
        if error is not None and not staged.taken:
            self._raise_at_read(staged.version, error, read_has_to_raise)
        return staged

    def _note_taken(self, staged: Staged, began: float, has_to_tell: bool) -> None:
        """Count an update that the model took; one that an async hook may refuse, after that."""
        after = self._ledger.awaits_hook() if has_to_tell else None
        if after is not None:
            staged.hook = after, self._facts_of(staged, began)
        else:
            self.note("ok", staged, began)

    def _finish_update(
        self, staged: Staged, unused: Staged | None, read_has_to_raise: bool
    ) -> bool:
        """Note the outcome of an update, and give back a slot that the model no longer needs.

        An update that came as bytes is always answered; its buffer is given back after that. One in
        a slot is noted on the page of shared memory. If the trainer was promised that reads take
        it, it is answered only if a message asked for it, if it was refused, or if its hook raised.

        Returns:
            True if the trainer has to be told.
        """
        if staged.slot is None:
            # A slot is given back at once; if something views it, give_back() copies it first.
            if unused is not None and unused.slot is not None:
                unused.give_back()
            return True
        # If a read runs this, it raises the refusal itself, after this.
        next_read_raises = read_has_to_raise and not self._guard.at_read
        has_to_tell = self._finish_slot_update(staged, unused, next_read_raises)
        # An error of an update that was taken is that of the hook.
        return has_to_tell or (staged.taken and staged.error is not None)

    def _leave_model(self, staged: Staged, target: object) -> None:
        """Detach a model from an update that it got in a thread after the loop had closed it."""
        if not self.model.copy and isinstance(target, Target):
            target.detach_(staged.flat)
        self.model.current = None

    def _raise_at_read(self, version: int, error: BaseException, read_has_to_raise: bool) -> None:
        """Raise what is no Exception; any other error only in a read that has to see the update."""
        if not isinstance(error, Exception):
            raise error
        if read_has_to_raise and self._guard.at_read:
            raise not_applied(version, error) from error

    def _switch_to(self, staged: Staged) -> Exception | None:
        """Note that the model has an update, and call the hook; return what the hook raised."""
        if self.model.current is not staged:
            self._before, self.model.current = self.model.current, staged
        error: Exception | None = None
        try:
            if self.flipped is not None:
                self.flipped(staged.epoch, staged.version)
        except Exception as exc:  # The hook raised. The trainer gets it, if it is no interrupt.
            if is_interrupt(exc):
                raise
            error = exc
        # Readers see the new version number only once the model has all its weights.
        self._ledger.inbox.applied(staged.epoch, staged.version)
        self._guard.held = staged.epoch, staged.version
        return error

    def note(self, outcome: SyncOutcome, staged: Staged, closed_at: float = 0.0) -> None:
        """Count the outcome of an update, and have the loop tell the observers. On any thread.

        Args:
            outcome: How the update ended.
            staged: The update.
            closed_at: Time since when no read could begin, on ``time.perf_counter()``'s clock.
        """
        meter = self._meter
        if meter.observers:
            meter.ended(outcome, *self._facts_of(staged, closed_at))
        else:
            meter.count(outcome, staged.layout.nbytes, staged.wire_nbytes)

    def _facts_of(self, staged: Staged, closed_at: float) -> SyncFacts:
        """Return what an observer is told of an update, with the seconds that it took until now."""
        now, began, seconds = time.perf_counter(), staged.began or staged.at, dict[str, float]()
        if staged.began:
            seconds["stage"] = staged.at - began
        if closed_at:
            seconds |= {"apply": now - staged.at, "pause": now - closed_at}
        return (
            staged.epoch,
            staged.version,
            began,
            seconds,
            staged.layout.nbytes,
            staged.wire_nbytes,
            staged.trace if staged.slot is None else staged.slot.trace,
        )

    def _finish_slot_update(
        self, staged: Staged, unused: Staged | None, next_read_raises: bool
    ) -> bool:
        """Note that an update from a slot was taken or refused, and leave the other slots.

        Args:
            staged: The update.
            unused: The update whose memory the model no longer needs.
            next_read_raises: If the update was refused, the next read has to raise that.

        Returns:
            True if the trainer has to be told.
        """
        slots, slot, guard = self._updates.slots, staged.slot, self._guard
        # An update of an earlier link tells nothing about the slots of this one.
        if slots is None or slot is None or staged.slots is not slots:
            # The end of that link waits for this; what the model views is kept.
            staged.give_back()
            if unused is not None and unused.slot is not None:
                unused.give_back()
            return True
        if not staged.taken:
            slots.refuse(slot)
            self._note_refused_word(slot.want, staged.error if next_read_raises else None)
            staged.give_back()
            return True
        slots.hold(slot)
        guard.seen, self._refused_word = slot.want, None
        if unused is staged:
            staged.give_back()
        elif unused is not None and unused.slot is not None and unused.slot.key != slot.key:
            unused.give_back()
        if len(slot.view.locked) > 1 or len(slots.segments) > 1:
            # An interrupt may have left some locked.
            slots.leave_others()
        ledger = self._ledger
        # The trainer counts a promised version as applied, unless a message or a call asks for it.
        return self._promise.digest != staged.layout.digest or ledger.owed > 0 or ledger.is_asked

    def _note_refused_word(self, word: int, error: BaseException | None) -> None:
        """Have the next read raise the error of this word; without an error, pass over the word."""
        if error is not None:
            self._refused_word = word, error
        else:
            self._guard.seen, self._refused_word = word, None

    def open_named_update(self) -> Staged | None:
        """Return the update that the word names, locked; ``None`` if there is none to take now.

        Runs under the guard, on any thread.

        Raises:
            ApplyError: The read that begins has to see the update, and cannot.
        """
        slots, until, guard = self._updates.slots, 0.0, self._guard
        while slots is not None:
            # The guard watches the word as long as the trainer may count on reads.
            read_must_see = guard.at_read and guard.words is not None
            try:
                staged = self._updates.open_named()
            except (AiosyncError, OSError, ValueError, KeyError) as exc:
                if is_interrupt(exc):
                    raise
                # If another link has replaced this one meanwhile, the new one goes on.
                if slots is self._updates.slots:
                    self._fail_reading(exc, read_must_see)
                return None
            if staged is not None or not (read_must_see and slots.is_behind):
                return staged
            if slots.next_unread:
                # A message about this version follows its manifest, which is on its way. Until then
                # the trainer counts on no read, and reads compute with the version before it.
                guard.seen = slots.next_unread
                return None
            # If no manifest is missing, the trainer has stored a word since: look again at once.
            if slots.unread:
                # The version before it cannot be read any more, and the trainer may count on it.
                until = until or time.monotonic() + _MANIFEST_SECONDS
                self._pause_for_manifest(until)
        return None

    def _fail_reading(self, exc: Exception, read_must_see: bool) -> None:
        """Have the receiver end, as the update that the word names cannot be read.

        Raises:
            ApplyError: The read that begins has to see the update.
        """
        kept = isinstance(exc, RemoteProtocolError | TransportError)
        error = exc if kept else RemoteProtocolError(str(exc))
        call_soon(self._loop, self._fail, error)
        if read_must_see:
            raise ApplyError(f"the trainer's newest version cannot be read: {exc}") from exc

    def _pause_for_manifest(self, until: float) -> None:
        """Wait a moment for the loop to read a manifest.

        Raises:
            ApplyError: This is the loop's thread, or the time is over.
        """
        if asyncio._get_running_loop() is self._loop or time.monotonic() > until:
            raise ApplyError(
                "the trainer has begun to send another set of weights, whose manifest has "
                "not been read yet: let the event loop run, and compute again"
            )
        time.sleep(_PAUSE_SECONDS)

    def _tell(self, staged: Staged, unused: Staged | None) -> None:
        """Queue the result of an update, and have the loop report it."""
        # Results keep the order in which the updates were applied, whichever threads applied them.
        self.results.append((staged, unused))
        here = asyncio._get_running_loop() is self._loop
        if here and staged.error is not None:
            # A refusal is reported at once, as the next callback of this loop may be a send.
            self._report(False)
        elif self._guard.at_read or not (here or self.turns.is_in_thread):
            # The caller, or the end of the thread, reports otherwise.
            call_soon(self._loop, self._report, False)

    # -- links and the end ---------------------------------------------------------------------

    def keep_memory(self) -> None:
        """Replace the link's memory below the model by memory of this process, as the link ends."""
        # A copied update was given back, and an update that is read now may be in its slot.
        if not self.model.copy:
            self._updates.keep(self.model.current)
        self._updates.keep(self._taking)

    def end(self) -> Staged | None:
        """Apply nothing more; return the waiting update, which will never be applied."""
        self.turns.end()
        # Stop before the memory is given back, so that no read takes another version.
        self._guard.ignore_word()
        self._ledger.owed = 0
        self._guard.withdraw()
        waiting = self.offer(None)
        # Complete the apply that an interrupt cut short: the model keeps one version, not two.
        if self._taking is not None:
            self._guard.exclusively(self.apply, timeout=0.0)
        return waiting

    def close(self) -> None:
        """Give the module memory of its own, and forget it. On the loop."""
        self.turns.close()
        self.model.close(self._updates.keep)


def not_applied(version: int, error: BaseException) -> ApplyError:
    """Return the error that callers get for a version that the model or a hook refused."""
    kind = type(error).__name__
    text = f"version {version} was refused: {kind}: {text_of(error)}"
    return ApplyError(text, version=version, remote_type=kind)
