"""Applying: a worker's model, the version that it has, and the updates that it takes.

This module knows nothing of messages: the outcome of an update stands in its :class:`Staged`.
Everything that belongs to the model changes only under the guard, on any thread. An exception that
a signal's handler raises while an update is applied is no refusal: the update stays noted, and is
applied again before the next read. ``tensors.apply`` finds out whether an update fits, and
``receiver.receiver`` tells the trainer. Must not import the sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import nn

from aiosync._meter import Meter
from aiosync._tasks import call_soon
from aiosync.errors import AiosyncError, ApplyError, RemoteProtocolError
from aiosync.events import SyncOutcome
from aiosync.protocol import Inbox
from aiosync.receiver.caches import warn_if_frozen
from aiosync.receiver.copies import Copies
from aiosync.receiver.forwards import why_unguarded
from aiosync.receiver.guard import PATIENCE_SECONDS, Guard, weakly
from aiosync.receiver.reads import Methods
from aiosync.receiver.update_reader import Staged, UpdateReader
from aiosync.tensors import Layout, Target, collect
from aiosync.tensors.apply import BufferChoice, LoadTarget, Strict
from aiosync.transports._forks import FORKING
from aiosync.wire import NO_LIMITS

__all__ = ["Applier", "Refusal", "not_applied"]

_LOOK_SECONDS = (0.05, 1.0)  # first and longest pause between two tries
_MANIFEST_SECONDS, _PAUSE_SECONDS = 5.0, 0.001


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


class Applier:
    """Gives a model the updates that are offered, and those that the word of a link names.

    Belongs to one event loop; :meth:`apply_pending` and the guard may be used from any thread.

    Args:
        updates: Reads the update that the word names.
        report: Called when there are results: on the loop, and not under the guard unless an update
            was refused.
        log: Called with a sentence that lists the methods whose calls are reads.
        changed: Called on the loop after a thread has applied an update, reported or not.
        hears_of: Returns True if the trainer has to be told that an update of the manifest with
            this digest was taken. Called on any thread.
        withdraw_promise: Called on the loop when forwards may no longer see every new version.
        fail: Called on the loop with the reason for which no more updates can be read.
        resolve: Returns the current model, or ``None`` while there is none.
        manual: Apply only in calls that ask for it.
        copy: Copy into the parameters instead of pointing them at the received memory.
        strict: Every name and dtype must match.
        buffers: Selects the buffers of the model that get weights.
        guard: Keeps reads and updates apart.
        install_hooks: Make the forwards of the model reads of the guard.
        methods: Names of other methods of the model whose calls are reads; ``None`` for the public
            methods of a model without a forward.
        reads_words: Take the update that the word names without a transform.
        flipped: Called with epoch and version as soon as the model has them, under the guard, on
            any thread; must not wait. What it raises is the error of a version that was taken.
        meter: Counts the outcomes of updates.

    Attributes:
        resolve: As given.
        flipped: As given; may be assigned.
        take: Calls :meth:`apply` for the guard, and holds no reference that keeps this object
            alive.
        inbox: The versions that have arrived, and the version that the model has.
        results: Updates that were not reported yet, each with the update whose memory the model no
            longer needs: the one before it, or itself.
        current: The update that the model has. After a copy only its layout is valid.
        waiting: The complete update that was not applied yet.
        owed: The version that a message asked for and a word names; 0 for none.
        askers: Number of open calls that want the waiting update applied, also with ``manual``.
            Nothing is applied for a call that has ended.
    """

    def __init__(
        self,
        updates: UpdateReader,
        *,
        report: Callable[[], None],
        log: Callable[[str], object],
        changed: Callable[[], None],
        hears_of: Callable[[bytes], bool],
        withdraw_promise: Callable[[], None],
        fail: Callable[[BaseException], None],
        resolve: Callable[[], Any],
        manual: bool,
        copy: bool,
        strict: Strict,
        buffers: BufferChoice,
        guard: Guard,
        install_hooks: bool,
        methods: Sequence[str] | None,
        reads_words: bool,
        flipped: Callable[[int, int], object] | None,
        meter: Meter,
    ) -> None:
        self.guard = guard
        self.resolve: Callable[[], Any] = resolve
        self.manual: bool = manual
        self.copy = copy
        self.inbox: Inbox = Inbox()
        self.results: deque[tuple[Staged, Staged | None]] = deque()
        self.current: Staged | None = None
        self.waiting: Staged | None = None
        self.owed: int = 0
        self.askers: int = 0
        self._updates = updates
        self._report = report
        self._changed = changed
        self._hears_of = hears_of
        self._withdraw_promise = withdraw_promise
        self._fail = fail
        self._strict = strict
        self._buffers: BufferChoice = buffers
        self._install_hooks = install_hooks
        self._methods = Methods(guard, methods, log)
        self._copies = Copies(guard)
        self._reads_words = reads_words
        self.flipped = flipped
        self.take: Callable[[], object] = weakly(self.apply)
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        # Held while the forwards of a model become guarded. Re-entrant, because a signal's handler
        # may close a scheme inside.
        self._choosing = threading.RLock()
        # The update that is being applied. After an interrupt it stays here, and is applied again.
        self._taking: Staged | None = None
        # The update that the model had before that one.
        self._before: Staged | None = None
        # The word whose update was refused, and the error, for the next read to raise.
        self._unread: tuple[int, BaseException] | None = None
        self._target: Target | LoadTarget | None = None
        self._target_of: Any = None
        self._warned = False  # it was warned that compiled code has weights in it
        self._dropped = False  # None was assigned during a read: the model is still to be let go
        self._timer: asyncio.TimerHandle | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._in_thread: Future[bool] | None = None
        self._closed = False

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
        return max(0 if self.waiting is None else self.waiting.version, self._updates.named_version)

    @property
    def lag(self) -> int:
        """Number of versions by which the applied version is behind the newest one that arrived."""
        inbox = self.inbox
        newest = max(inbox.newest, self._updates.named_version)
        return newest - inbox.version if inbox.newest_epoch == inbox.epoch else newest

    @property
    def is_quick(self) -> bool:
        """True if applying the waiting update is little more than a change of pointers."""
        staged = self.waiting or (self.current if self._updates.named_version else None)
        return staged is not None and self._is_quick(staged)

    @property
    def may_follow(self) -> bool:
        """True if a forward that begins may take each named update by itself."""
        current = self.current
        return (
            not self.manual
            # Without strict names an update may hold only a part, and each part has to be taken.
            and self._strict
            and self._install_hooks
            and current is not None
            and self._is_quick(current)
            and why_unguarded(self._target_of) is None
        )

    def _is_quick(self, staged: Staged) -> bool:
        target = self._target
        return (
            not self.copy
            and isinstance(target, Target)
            and target.is_quick(staged.layout, staged.values)
        )

    # -- requests ------------------------------------------------------------------------------

    def offer(self, staged: Staged | None) -> Staged | None:
        """Make an update the waiting one; return the update that it replaces, if never applied."""
        with self._lock:
            old, self.waiting = self.waiting, staged
            return None if old is self._taking else old  # an interrupt left it in both places

    def owe(self, version: int) -> int:
        """Note that a message asks for a version that the word names.

        Returns:
            The version that a message asked for before, if the model will not take it; else 0.
        """
        taking, older = self._taking, self.owed
        self.owed = version
        begun = taking is not None and taking.slot is not None and taking.version >= older
        return 0 if begun else older

    def apply_soon(self) -> None:
        """Apply the waiting or the named update if that is automatic or asked for. On the loop."""
        slots = self._updates.slots
        behind = slots is not None and slots.is_behind
        if (self.askers or not self.manual) and (behind or self.waiting or self._taking):
            self.submit()

    def submit(self, pause: float = _LOOK_SECONDS[0]) -> None:
        """Apply the noted updates between two reads: now, or as soon as the reads end. On the loop.

        If applying waits for an accelerator, a thread does it.
        """
        if self._in_thread is not None or (self._waits and not self._closed):
            self.guard.offer(self.take)  # a read that begins before the thread does applies it
            if self._in_thread is None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(1, "aiosync-apply")
                self._in_thread = self._threads.submit(self.guard.apply_offered)
                had = self.inbox.epoch, self.inbox.version
                self._in_thread.add_done_callback(
                    lambda _: call_soon(self._loop, self._end_apply, pause, had)
                )
            return
        try:
            waits = not self.guard.submit(self.take)
        except BaseException as exc:  # noqa: BLE001 - raised here, or by the loop
            self.interrupt_loop(exc)
            waits = True
        self._submitted(waits, pause)

    @property
    def _waits(self) -> bool:
        """True if applying waits for an accelerator."""
        target = self._target
        if target is None:
            target = self.resolve()
            target = Target(target) if isinstance(target, nn.Module) else None
        return isinstance(target, Target) and target.waits

    def _end_apply(self, pause: float, had: tuple[int, int]) -> None:
        """Take over the thread's result: applied, or left to an open read. On the loop."""
        done, self._in_thread = self._in_thread, None
        assert done is not None
        try:
            waits = not done.result()
        except BaseException as exc:  # noqa: BLE001 - raised here, or by the loop
            self.interrupt_loop(exc)
            waits = True
        self._submitted(waits, pause)
        if (self.inbox.epoch, self.inbox.version) != had:
            self._changed()
            self.apply_soon()  # another update may have come

    def _submitted(self, waits: bool, pause: float) -> None:
        # A forward that Ctrl-C ended does not tell the guard, so the loop tries again now and then.
        if waits and self._timer is None and not self._closed:
            self._timer = self._loop.call_later(pause, self._look_again, pause)
        self._report()

    def interrupt_loop(self, error: BaseException) -> None:
        """Have the loop raise the exception of a signal's handler, so that it ends no link.

        Any other exception is raised here.
        """
        if not _is_interrupt(error):
            raise error
        self._loop.call_soon(_raise, error)

    def _look_again(self, pause: float) -> None:
        self._timer = None
        if not self._closed:
            self.submit(min(2 * pause, _LOOK_SECONDS[1]))

    def apply_by_hand(self) -> None:
        """Apply only on request from now on. On the loop."""
        self.manual = True
        self._withdraw_promise()

    def apply_pending(self, *, patience: float = PATIENCE_SECONDS) -> int | None:
        """Apply the waiting update now, on this thread, between two reads.

        Args:
            patience: Seconds to wait for the forward passes of other threads.

        Returns:
            The version that was applied, or ``None`` if no update waited.

        Raises:
            ApplyError: The model could not take the update; it kept the version it had.
            LocalProtocolError: Called inside a read.
            SyncTimeout: Another thread's forward pass did not end; on an event loop it is not
                waited for.
        """
        self.guard.refuse_inside_read("apply_pending")
        if not self.has_staged:
            return None
        results: list[Staged | None] = []
        try:
            self.guard.between_reads(
                lambda: results.append(self.apply(by_hand=True)),
                method="apply_pending",
                patience=patience,
            )
        finally:
            if self._taking is not None:  # an interrupt cut the apply short
                self.guard.submit(self.take)
            if asyncio._get_running_loop() is self._loop:
                self._report()
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

        Raises:
            ApplyError: The read that begins promised to see this version, and cannot have it.
            BaseException: The exception that a signal's handler raised in this thread, or one that
                a function raised and that is no :class:`Exception`.
        """
        if self._unread is not None and self.guard.at_read:
            (want, unread), self._unread = self._unread, None
            words, self.guard.seen = self.guard.words, want
            # A newer word replaces the one whose update was refused.
            if words is None or words[0] == want:
                raise ApplyError(f"the newest version could not be applied: {unread}") from unread
        result: Staged | None = None
        while True:
            error: Exception | None = None
            try:
                model = self.resolve()
                if model is not self._target_of and (model is not None or self._dropped):
                    if not self._closed:
                        self._take_over(model)
            except Exception as exc:  # the trainer gets it
                if _is_interrupt(exc):
                    raise
                error = exc
            if error is None and (model is None or self._target is None):
                return result
            again = self._taking is not None
            if not again:
                if self._closed or (self.manual and not (by_hand or self.askers)):
                    return result
                looks = self._reads_words and self._updates.slots is not None
                named = self.look() if looks else None
                with self._lock:
                    self._taking = named or self.waiting
                    if self.waiting is self._taking:
                        self.waiting = None
                if self._taking is None:
                    return result
            result = self._take(error)
            if not again and (result.slot is None or self.waiting is None):
                return result

    def _take(self, error: BaseException | None) -> Staged:
        """Have the model take the noted update, also again after an interrupt cut this short."""
        staged, inbox, guard, target = self._taking, self.inbox, self.guard, self._target
        assert staged is not None
        slot = staged.slot
        began = time.perf_counter() if self._meter.observers else 0.0
        same = staged.epoch == inbox.epoch
        if slot is None and same and staged.version < inbox.version:
            self._tell(staged, None)  # the version that the word named has overtaken it
            self._taking = None
            return staged
        if error is None and not (same and staged.version == inbox.version):
            error = self._load(staged)
        # No message asked for this version, so no answer reports a refusal: a read has to raise it.
        looked = slot is not None and guard.words is not None and not self.owed
        taken = staged.taken = error is None
        if taken:
            error = self._switch_to(staged)
        staged.error = error
        # The model no longer needs the update before; or this one, if it was copied or refused.
        unused = self._before if taken and not self.copy else staged
        silent = False
        if slot is not None:
            silent = not self._took(staged, unused, looked and not guard.at_read)
        elif unused is not None and unused.slot is not None:
            # A slot is given back at once; if something views it, give_back() copies it first.
            unused.give_back()
        # Counted before the trainer or a waiting call hears of the update.
        if error is None:
            self.note("ok", staged, began)
        if not silent or (taken and error is not None):
            self._tell(staged, unused)
        self._taking = self._before = None
        if self._closed and taken and not self.copy and isinstance(target, Target):
            # The loop has closed the applier meanwhile, and will not detach the model.
            target.detach_(staged.flat)
            self.current = None
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is not None and looked and guard.at_read:
            raise not_applied(staged.version, error) from error
        return staged

    def _load(self, staged: Staged) -> BaseException | None:
        """Put an update into the model; return why it refused it, and raise an interrupt."""
        target = self._target
        try:
            assert target is not None
            if not isinstance(target, Target):
                # A load function that raises may have written a part of the weights.
                self.guard.held = 0, 0
            elif not self._warned:
                self._warned = warn_if_frozen(target.target)
            # A fork by another thread must not give the child a model with parts of two versions.
            with FORKING if isinstance(target, Target) else contextlib.nullcontext():
                target.apply_(staged.layout, staged.flat, staged.values, copy=self.copy)
        except BaseException as exc:  # the trainer gets it, and wait_for_version() raises it
            if _is_interrupt(exc):
                raise
            return exc
        return None

    def _switch_to(self, staged: Staged) -> Exception | None:
        """Note that the model has an update, and call the hook; return what the hook raised."""
        if self.current is not staged:
            self._before, self.current = self.current, staged
        error: Exception | None = None
        try:
            if self.flipped is not None:
                self.flipped(staged.epoch, staged.version)
        except Exception as exc:  # of the flipped hook; the trainer gets it
            if _is_interrupt(exc):
                raise
            error = exc
        # Readers see the new version number only once the model has all its weights.
        self.inbox.applied(staged.epoch, staged.version)
        self.guard.held = staged.epoch, staged.version
        return error

    def note(self, outcome: SyncOutcome, staged: Staged, closed_at: float = 0.0) -> None:
        """Count the outcome of an update, and have the loop tell the observers. On any thread.

        Args:
            outcome: How the update ended.
            staged: The update.
            closed_at: Time since when no read could begin, on ``time.perf_counter()``'s clock.
        """
        meter, nbytes, wire_nbytes = self._meter, staged.layout.nbytes, staged.wire_nbytes
        meter.count(outcome, nbytes, wire_nbytes)
        if not meter.observers:
            return
        now, began, seconds = time.perf_counter(), staged.began or staged.at, dict[str, float]()
        if staged.began:
            seconds["stage"] = staged.at - began
        if closed_at:
            seconds |= {"apply": now - staged.at, "pause": now - closed_at}
        meter.tell(
            outcome,
            staged.epoch,
            staged.version,
            began,
            seconds,
            nbytes,
            wire_nbytes,
            staged.trace if staged.slot is None else staged.slot.trace,
        )

    def _took(self, staged: Staged, unused: Staged | None, unread: bool) -> bool:
        """Note that an update from a slot was taken or refused, and leave the other slots.

        Args:
            staged: The update.
            unused: The update whose memory the model no longer needs.
            unread: If the update was refused, the next read has to raise that.

        Returns:
            True if the trainer has to be told.
        """
        slots, slot = self._updates.slots, staged.slot
        if slots is None or slot is None or staged.slots is not slots:  # it is of an earlier link
            return True
        if staged.taken:
            slots.hold(slot)
        else:
            slots.refuse(slot)
        if unread and not staged.taken and staged.error is not None:
            self._unread = slot.want, staged.error
        else:
            self.guard.seen, self._unread = slot.want, None
        if unused is not None and unused.slot is not None:
            if unused is staged or unused.slot.key != slot.key:
                unused.give_back()
        if staged.taken and (len(slot.view.locked) > 1 or len(slots.segments) > 1):
            slots.leave_others()  # an interrupt may have left some locked
        return not staged.taken or self.owed > 0 or self._hears_of(staged.layout.digest)

    def look(self) -> Staged | None:
        """Return the update that the word names, locked; ``None`` if it is not new.

        Runs under the guard, on any thread.

        Raises:
            ApplyError: The read that begins has to see the update, and cannot.
        """
        slots, until = self._updates.slots, 0.0
        while slots is not None:
            read_looks = self.guard.at_read and self.guard.words is not None
            try:
                staged = self._updates.open_named()
            except (AiosyncError, OSError, ValueError, KeyError) as exc:
                if slots is not self._updates.slots:  # another link replaced it meanwhile
                    return None
                error = exc if isinstance(exc, RemoteProtocolError) else None
                call_soon(self._loop, self._fail, error or RemoteProtocolError(str(exc)))
                if read_looks:
                    raise ApplyError(f"the trainer's newest version cannot be read: {exc}") from exc
                return None
            if staged is not None or not (read_looks and slots.is_behind):
                return staged
            # The manifest of this version is on its way, and the version before it cannot be read
            # any more.
            until = until or time.monotonic() + _MANIFEST_SECONDS
            if asyncio._get_running_loop() is self._loop or time.monotonic() > until:
                raise ApplyError(
                    "the trainer has begun to send another set of weights, whose manifest has "
                    "not been read yet: let the event loop run, and compute again"
                )
            time.sleep(_PAUSE_SECONDS)
        return None

    def _tell(self, staged: Staged, unused: Staged | None) -> None:
        # Results keep the order in which the updates were applied, whichever threads applied them.
        self.results.append((staged, unused))
        here = asyncio._get_running_loop() is self._loop
        if here and staged.error is not None:
            # A refusal is reported at once, as the next callback of this loop may be a send.
            self._report()
        elif not here or self.guard.at_read:  # the caller reports otherwise
            call_soon(self._loop, self._report)

    # -- the model -----------------------------------------------------------------------------

    def use_model(self, model: Any, chosen: Callable[[], object]) -> None:
        """Guard another model from now on, and give it the weights of this version.

        On the loop. While a forward runs in another thread, the model gets the weights when that
        ends.

        Args:
            model: The model; ``None`` for none.
            chosen: Called once the change is certain; :attr:`resolve` returns the model from then
                on.

        Raises:
            ApplyError: The weights do not fit; nothing was changed.
        """
        self._withdraw_promise()  # until the new model has taken an update
        # True also if another model was chosen, and has not replaced this one yet.
        same = model is self._target_of
        adopt = functools.partial(self._adopt, model, chosen)
        if same or not self.guard.exclusively(adopt, timeout=0.0):
            if not same:
                self._check_fits(model)
            with self._choosing:
                self._guard_forwards(model)
                # apply() does the rest when it finds that resolve() returns another model.
                self._dropped = model is None and not same
                chosen()
        self.submit()

    def _target_for(self, model: Any) -> Target | LoadTarget:
        if isinstance(model, LoadTarget):
            return model
        return Target(model, strict=self._strict, buffers=self._buffers)

    def _take_over(self, model: Any) -> None:
        try:
            self._adopt(model)
        except ApplyError:  # the context has a model of another shape, which has no version yet
            self._let_go()
            self._use(model)

    def _adopt(self, model: Any, chosen: Callable[[], object] | None = None) -> None:
        """Put the version of the old model into the new one. Runs under the guard."""
        if model is None:
            self._let_go(chosen)
            return
        self._check_fits(model)
        target, current = self._target_for(model), self.current
        try:
            if current is None or isinstance(target, LoadTarget):
                # There is no version yet, or the target is a load function, which no model
                # replaces.
                pass
            elif self.copy:
                assert isinstance(self._target, Target)
                leaves = collect(self._target.target)
                tensors = [leaf.tensor for leaf in leaves.leaves]
                layout = Layout.plan(leaves.leaves, NO_LIMITS)
                target.apply_tensors(layout, tensors, leaves.values)
            else:
                # Detach the old model first, as the two may have parameters in common.
                self._detach()
                target.apply_(current.layout, current.flat, current.values, copy=False)
        except Exception as exc:  # the caller, who gave the model, sees it
            raise _misfit(self.inbox.version, exc) from exc
        self._use(model, chosen)

    def _check_fits(self, model: Any) -> None:
        newest = self.current or self.waiting
        if model is not None and newest is not None:
            try:
                self._target_for(model).check(newest.layout, newest.values)
            except Exception as exc:  # the caller, who gave the model, sees it
                raise _misfit(newest.version, exc) from exc

    def _use(self, model: Any, chosen: Callable[[], object] | None = None) -> None:
        with self._choosing:
            # Another model may have been chosen meanwhile, and then that one is guarded already.
            if chosen is not None or self.resolve() is model:
                self._guard_forwards(model)
            if chosen is not None:
                chosen()
        self._target = None if model is None else self._target_for(model)
        self._target_of, self._dropped = model, False

    def _guard_forwards(self, model: Any) -> None:
        guarded = self._install_hooks and why_unguarded(model) is None
        self._methods.wrap(model if guarded else None)
        self._copies.wrap(model if guarded else None)
        if guarded:
            self.guard.install(model, watch=not self.manual)
        else:
            self.guard.uninstall()

    def _let_go(self, chosen: Callable[[], object] | None = None) -> None:
        """Let the model go, with memory of its own, and forget the version that it had."""
        self._detach()
        current, self.current = self.current, None
        if current is not None and not self.copy:
            call_soon(self._loop, current.give_back)
        self.inbox.forget()
        self.guard.held = 0, 0
        self._use(None, chosen)

    def _detach(self) -> None:
        """Give the model memory of its own; its values stay the same."""
        if self._copies.model_is_gone:
            return  # other views keep that memory alive
        if isinstance(self._target, Target) and self.current is not None and not self.copy:
            self._target.detach_(self.current.flat)

    # -- links and the end ---------------------------------------------------------------------

    def keep_memory(self) -> None:
        """Replace the link's memory below the model by memory of this process, as the link ends."""
        self._updates.keep(self.current)
        self._updates.keep(self._taking)
        self.owed = 0

    def leave_memory(self) -> None:
        """Let the model keep the memory that it views, if that belongs to this process.

        Otherwise :meth:`close` copies it. Call this right before.
        """
        current = self.current
        if current is not None and current.slot is None and not current.lent:
            self.current = None

    def end(self) -> Staged | None:
        """Apply nothing more; return the waiting update, which will never be applied."""
        self._closed = True
        # Stop before the memory is given back, so that no read takes another version.
        self.guard.ignore_word()
        self.owed = 0
        self.guard.withdraw()
        waiting = self.offer(None)
        if self._taking is not None:  # complete it: the model keeps one version, not two
            self.guard.exclusively(self.apply, timeout=0.0)
        return waiting

    def close(self) -> None:
        """Give the module memory of its own, and forget it. On the loop."""
        if self._timer is not None:
            self._timer.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        current = self.current
        try:
            if current is not None and not self.copy:
                # The memory goes back to the trainer, who writes the next version into it. A
                # forward that does not end must not see that: the memory below it stays, with the
                # same values.
                if self.guard.exclusively(self._detach, timeout=0.0):
                    current.give_back()
                else:
                    with FORKING:  # a thread may be applying: one after the other
                        self._detach()
                    self._updates.keep(current)
                    # The list keeps the update alive until the open reads have ended.
                    self.guard.submit([current].clear)
        finally:
            self.current = self._target = self._target_of = None
            self._methods.wrap(None)
            self._copies.wrap(None)
            self.guard.uninstall()


def _is_interrupt(error: BaseException) -> bool:
    """Return True if a signal's handler raised this exception, and not the code it interrupted."""
    if isinstance(error, KeyboardInterrupt):
        return True
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if callable(handler):
            handler = inspect.unwrap(getattr(handler, "func", handler))
            if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
                handler = type(handler).__call__
            codes.add(getattr(getattr(handler, "__func__", handler), "__code__", None))
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)


def _raise(error: BaseException) -> None:
    raise error


def not_applied(version: int, error: BaseException) -> ApplyError:
    """Return the error that callers get for a version that the model refused."""
    kind = type(error).__name__
    text = f"version {version} could not be applied: {kind}: {error}"
    return ApplyError(text, version=version, remote_type=kind)


def _misfit(version: int, error: BaseException) -> ApplyError:
    return ApplyError(
        f"version {version} does not fit the new model, so the old one stays: {error} For a model "
        "with another shape, set `scheme.model = None` first; it then gets the next update",
        version=version,
        remote_type=type(error).__name__,
    )
