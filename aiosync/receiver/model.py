"""The worker's model: it is guarded, gets the weights of updates, and may be replaced.

Everything here changes only under the guard, on any thread. ``tensors.matching`` finds out whether
weights fit. Must not import transports that carry bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiosync._interrupts import is_interrupt
from aiosync._log import log
from aiosync._repr import text_of
from aiosync._tasks import call_soon
from aiosync.errors import ApplyError, ManifestMismatch
from aiosync.protocol import Inbox
from aiosync.receiver.caches import warn_if_frozen
from aiosync.receiver.copies import Copies
from aiosync.receiver.forwards import why_unguarded
from aiosync.receiver.guard import Guard
from aiosync.receiver.reads import Methods
from aiosync.receiver.update_reader import Staged
from aiosync.tensors import Layout, Target, collect
from aiosync.tensors.apply import BufferChoice, LoadTarget, Strict
from aiosync.transports._forks import FORKING
from aiosync.wire import NO_LIMITS

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["WorkerModel"]

_LOST_HINT = "With apply_copy=True only the old model has the weights, and it lacks these."


class WorkerModel:
    """The model of a worker, and the update whose weights it has.

    Args:
        guard: Keeps reads and updates apart.
        inbox: Has the version of the model.
        resolve: Returns the present model, or ``None`` while there is none.
        copy: Copy into the parameters instead of pointing them at the received memory.
        strict: Every name and dtype must match.
        buffers: Selects the buffers of the model that get weights.
        methods: Makes methods of the model reads; ``None`` if not even its forwards are.
        check: Raises if a model cannot be guarded as these options say.
        watch: Warn once if a part of the model computes outside every read.

    Attributes:
        copy, resolve, strict, watch: As given.
        current: The update that the model has. After a copy only its layout is valid.
        target: Gives weights to the model that was guarded last; ``None`` if there is none.
    """

    def __init__(
        self,
        guard: Guard,
        inbox: Inbox,
        *,
        resolve: Callable[[], Any],
        copy: bool,
        strict: Strict,
        buffers: BufferChoice,
        methods: Methods | None,
        check: Callable[[Any], object],
        watch: bool,
    ) -> None:
        self.resolve: Callable[[], Any] = resolve
        self.copy = copy
        self.strict = strict
        self.watch = watch
        self.current: Staged | None = None
        self.target: Target | LoadTarget | None = None
        self._guard = guard
        self._inbox = inbox
        self._buffers: BufferChoice = buffers
        self._methods = methods
        self._check = check
        self._copies = Copies(guard)
        self._loop = asyncio.get_running_loop()
        # Held while the forwards of a model become guarded. Re-entrant, because a signal's handler
        # may close a scheme inside.
        self._choosing = threading.RLock()
        # The model that `target` gives weights to.
        self._target_of: Any = None
        # True once it was warned that compiled code has weights in it.
        self._warned = False
        # True if None was assigned during a read: the model is still to be let go.
        self._dropped = self._was_dropped = False
        # Epoch and version of the weights that a model, chosen during a read, has yet to get. Until
        # then reads have version 0. None if it has them.
        self._lacks: tuple[int, int] | None = None

    # -- abilities -----------------------------------------------------------------------------

    def is_quick(self, staged: Staged) -> bool:
        """Return True if taking an update is little more than a change of pointers."""
        target = self.target
        return (
            not self.copy
            and isinstance(target, Target)
            and target.is_quick(staged.layout, staged.values)
        )

    @property
    def lets_go(self) -> bool:
        """True if the version goes with the model before, once reads of that one have ended."""
        return self._dropped

    def has_changed_lets_go(self) -> bool:
        """Return True if :attr:`lets_go` has changed since the last call."""
        before, self._was_dropped = self._was_dropped, self._dropped
        return before != self._dropped

    @property
    def may_follow(self) -> bool:
        """True if a forward that begins may take each named update by itself."""
        current = self.current
        return bool(
            # Without strict names an update may hold only a part, and each part has to be taken.
            self.strict
            and self._methods is not None
            and current is not None
            and self.is_quick(current)
            and why_unguarded(self._target_of) is None
        )

    @property
    def waits(self) -> bool:
        """True if taking an update waits for an accelerator."""
        target = self.target
        if target is None:
            try:
                model = self.resolve()
            except Exception as exc:  # Applying raises it, too, and the trainer gets it.
                if is_interrupt(exc):
                    raise
                return False
            target = None if model is None else self._target_for(model)
        return isinstance(target, Target) and target.waits

    # -- weights -------------------------------------------------------------------------------

    def load(self, staged: Staged) -> BaseException | None:
        """Put an update into the model; return the error if that fails, but raise an interrupt."""
        target = self.target
        try:
            assert target is not None
            if not isinstance(target, Target):
                # A load function that raises may have written a part of the weights: reads have
                # version 0 until it has taken an update.
                self._guard.held = 0, 0
            elif not self._warned:
                self._warned = warn_if_frozen(target.target)
            # A fork by another thread must not give the child a model with parts of two versions.
            # No child can use a model on an accelerator, whose copies may take long.
            on_cpu = isinstance(target, Target) and not target.waits
            with FORKING if on_cpu else contextlib.nullcontext():
                target.apply_(staged.layout, staged.flat, staged.values, copy=self.copy)
        except BaseException as exc:  # The trainer gets it, and wait_for_version() raises it.
            if is_interrupt(exc):
                raise
            return exc
        return None

    def detach(self) -> None:
        """Give the model memory of its own; its values stay the same."""
        if self._copies.model_is_gone:
            # The model is being freed, and calls of it would fail. Other views keep the memory.
            return
        if isinstance(self.target, Target) and self.current is not None and not self.copy:
            self.target.detach_(self.current.flat)

    # -- another model -------------------------------------------------------------------------

    def follow(self, waiting: Staged | None, *, closed: bool) -> bool:
        """Guard the model that :attr:`resolve` returns, and give it the weights, if it is another.

        Args:
            waiting: The update that waits for the model; ``None`` for none.
            closed: True after the end, when nothing is to change any more.

        Returns:
            True if there is a model to give weights to.
        """
        model = self.resolve()
        if model is not self._target_of and (model is not None or self._dropped) and not closed:
            self._adopt_late(model, waiting)
        elif not closed:
            if self._dropped:
                with self._choosing:
                    # The context may have the old model again, without any assignment.
                    self._dropped = self.resolve() is not self._target_of
            self._guard.follow_parts()
            if self._lacks is not None:
                with self._choosing:
                    self._show_version(model)
        return model is not None and self.target is not None

    def _adopt_late(self, model: Any, waiting: Staged | None) -> None:
        """Adopt a model; if the weights do not fit, guard it without any."""
        self._check(model)
        try:
            self._adopt(model, waiting)
        except ApplyError as exc:
            # The context has a model of another shape, or the old model was changed after the
            # check, as a read went on.
            self._let_go()
            self._use(model)
            why = text_of(exc.__cause__ or exc)
            text = f"the worker's new model has version 0 until the next update: {why}"
            log(logging.WARNING, "refused", text, model=None, version=exc.version)

    def replace(self, model: Any, chosen: Callable[[], object], waiting: Staged | None) -> None:
        """Guard another model from now on, and give it the weights of the old one. On the loop.

        While a forward runs in another thread, the model gets the weights when that ends, and reads
        have version 0 until then.

        Args:
            model: The model; ``None`` for none.
            chosen: Called once the change is certain; :attr:`resolve` returns the model from then
                on.
            waiting: The update that waits for the model; ``None`` for none.

        Raises:
            ApplyError: The weights do not fit; nothing was changed.
            ConfigError: The model cannot be guarded; nothing was changed.
        """
        self._check(model)
        # The model that is guarded now needs no weights. If another one was chosen and has not
        # replaced it yet, that choice ends here.
        same = model is self._target_of
        adopt = functools.partial(self._adopt, model, waiting, chosen)
        if same or not self._guard.exclusively(adopt, timeout=0.0):
            if not (same or self._dropped):
                self._check_fits(model, waiting)
                self._check_moves(model)
            with self._choosing:
                self._guard_forwards(model)
                if not (same or model is None):
                    self._lacks, self._guard.held = self._lacks or self._guard.held, (0, 0)
                # follow() does the rest when it finds that resolve() returns another model.
                self._dropped = (model is None or self._dropped) and not same
                chosen()

    def _target_for(self, model: Any) -> Target | LoadTarget:
        """Return what gives weights to a model: a target, or the load function in its place."""
        if isinstance(model, LoadTarget):
            return model
        return Target(model, strict=self.strict, buffers=self._buffers)

    def _adopt(
        self, model: Any, waiting: Staged | None, chosen: Callable[[], object] | None = None
    ) -> None:
        """Guard a model, and give it the version of the one that it replaces. Under the guard."""
        if model is None:
            self._let_go(chosen)
            return
        if self._dropped:
            self._let_go()
        self._check_fits(model, waiting)
        self._prepare(model)
        target = self._target_for(model)
        # There may be no version yet. A load function never takes the place of a model.
        if self.current is not None and isinstance(target, Target):
            try:
                self._move_version(self.current, target)
            except Exception as exc:  # The caller, who gave the model, sees it.
                raise _misfit(self._inbox.version, exc) from exc
        self._use(model, chosen)

    def _move_version(self, current: Staged, target: Target) -> None:
        """Put the version of the old model into the target that takes its place."""
        if self.strict and not self.copy:
            # Detach the old model first, as the two may have parameters in common.
            self.detach()
            target.apply_(current.layout, current.flat, current.values, copy=False)
            return
        self.detach()
        layout, tensors, values = self._own_weights(current, target)
        target.apply_tensors(layout, tensors, values)
        if not self.copy:
            # The old model may lack some of these names, or have them in less precision.
            target.apply_(current.layout, current.flat, current.values, copy=False)

    def _own_weights(
        self, current: Staged, target: Target
    ) -> tuple[Layout, list[torch.Tensor], Mapping[str, Any]]:
        """Return layout, tensors and values of the old model, which move to the new one's target.

        Without strict names the last update may have held only a part of them.

        Raises:
            ManifestMismatch: The update was copied, and the old model took only a part of what the
                new one needs.
        """
        assert isinstance(self.target, Target)
        if self.copy and not self.strict:
            layout, values = current.layout, current.values
            old = Target(self._target_of, strict=False, buffers=self._buffers)
            has = old.find_leaves(layout, values)
            needs = target.find_leaves(layout, values)
            lost = [name for leaf, name in needs.items() if leaf not in has]
            if lost:
                raise ManifestMismatch(missing=lost, hint=_LOST_HINT)
        leaves = collect(self.target.target)
        layout = Layout.plan(leaves.leaves, NO_LIMITS)
        return layout, [leaf.tensor for leaf in leaves.leaves], leaves.values

    def _check_moves(self, model: Any) -> None:
        """Raise :class:`ApplyError` if :meth:`_move_version` could not fill a model later."""
        current = self.current
        if model is not None and current is not None and (self.copy or not self.strict):
            try:
                target = Target(model, strict=self.strict, buffers=self._buffers)
                layout, _, values = self._own_weights(current, target)
                target.check(layout, values)
            except Exception as exc:  # The caller, who gave the model, sees it.
                raise _misfit(current.version, exc) from exc

    def _check_fits(self, model: Any, waiting: Staged | None) -> None:
        """Raise :class:`ApplyError` if the present or the waiting weights do not fit a model."""
        newest = self.current or waiting
        if model is not None and newest is not None:
            try:
                self._target_for(model).check(newest.layout, newest.values)
            except Exception as exc:  # The caller, who gave the model, sees it.
                raise _misfit(newest.version, exc) from exc

    def _use(self, model: Any, chosen: Callable[[], object] | None = None) -> None:
        """Guard this model, give updates to it from now on, and call ``chosen``."""
        with self._choosing:
            # Another model may have been chosen meanwhile, and then that one is guarded already.
            if chosen is not None or self.resolve() is model:
                self._guard_forwards(model)
                if chosen is not None:
                    chosen()
                self._show_version(model)
        self.target = None if model is None else self._target_for(model)
        self._target_of, self._dropped = model, False

    def _show_version(self, model: Any) -> None:
        """Have reads see the version again, as the chosen model has the weights of it now."""
        if self._lacks is not None and self.resolve() is model:
            held, self._lacks = self._lacks, None
            if self.current is not None:
                self._guard.held = held

    def _prepare(self, model: Any) -> bool:
        """Return True if hooks can guard a model; raise if its methods cannot be guarded."""
        if self._methods is None or why_unguarded(model) is not None:
            return False
        self._methods.prepare(model)
        return True

    def _guard_forwards(self, model: Any) -> None:
        """Make forwards, methods and copies of this model reads, if hooks can; of no other one."""
        guarded = self._prepare(model)
        # Walking over the model below is no read of it.
        self._wrap(None)
        if guarded:
            self._guard.install(model, watch=self.watch)
            self._wrap(model)
        else:
            self._guard.uninstall()

    def _wrap(self, model: nn.Module | None) -> None:
        """Make methods and copies of this model reads, and no longer those of another."""
        if self._methods is not None:
            self._methods.wrap(model)
        self._copies.wrap(model)

    def _let_go(self, chosen: Callable[[], object] | None = None) -> None:
        """Let the model go, with memory of its own; the next one begins without its version."""
        self.detach()
        current = self.current
        if current is not None and not self.copy:
            if current.slot is None:
                call_soon(self._loop, current.give_back)
            else:
                # The next model may take an update before the loop runs again, and then the trainer
                # gets back every other slot, without a copy of what is still viewed there.
                current.give_back()
        self.current = None
        self._inbox.forget()
        self._guard.held = 0, 0
        self._use(None, chosen)

    # -- the end -------------------------------------------------------------------------------

    def keep_own_memory(self) -> None:
        """Let the model keep the memory that it views, if that belongs to this process.

        Otherwise :meth:`close` copies it. Call this right before.
        """
        current = self.current
        if current is not None and current.slot is None and not current.lent:
            self.current = None

    def close(self, keep: Callable[[Staged], object]) -> None:
        """Give the model memory of its own, and forget it. On the loop.

        Args:
            keep: Gives the memory of an update to this process, as the trainer may write there.
        """
        current, gone = self.current, self._copies.model_is_gone
        try:
            # Walking over the model below is no read of it.
            self._wrap(None)
            detach = _nothing if gone else self.detach
            if current is not None and not self.copy:
                # The memory goes back to the trainer, who writes the next version into it. A
                # forward that does not end must not see that: the memory below it stays, with the
                # same values.
                if self._guard.exclusively(detach, timeout=0.0):
                    current.give_back()
                else:
                    # A thread may be applying an update: the two must come one after the other.
                    with FORKING:
                        detach()
                    keep(current)
                    # The list keeps the update alive until the open reads have ended.
                    self._guard.submit([current].clear)
        finally:
            self.current = self.target = self._target_of = None
            self._wrap(None)
            self._guard.uninstall()


def _nothing() -> None:
    return None


def _misfit(version: int, error: BaseException) -> ApplyError:
    """Return the error for weights that do not fit the new model, but raise an interrupt."""
    if is_interrupt(error):
        raise error
    return ApplyError(
        f"version {version} does not fit the new model, so the old one stays: {text_of(error)} For "
        "a model with another shape, set `scheme.model = None` first; it then gets the next update",
        version=version,
        remote_type=type(error).__name__,
    )
