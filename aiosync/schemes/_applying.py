"""Applying: what a receiver does with its model, under the guard and on whatever thread.

Everything here is about the model: which one it is, what it has, and putting the staged update
into it. Links and acknowledgements are the receiver's. Must not import the sender.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import inspect
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

from aiosync._tasks import run_on_loop
from aiosync.errors import ApplyError, ConfigError
from aiosync.protocol import Inbox
from aiosync.receiver.guard import PATIENCE_SECONDS, Guard, takes_hooks
from aiosync.schemes._staging import Staged
from aiosync.tensors import Layout, Target, collect
from aiosync.tensors.apply import LoadTarget
from aiosync.transports._fork import FORKING
from aiosync.wire import NO_LIMITS

__all__ = ["Applying"]

_LOOK_SECONDS = (0.05, 1.0)  # first and last pause
_MAX_TRIES = 10


class Applying(abc.ABC):
    """The model's half of a receiver; see :class:`~aiosync.schemes.receiver.WeightReceiver`.

    Which model it is, what it views, and the version that it has change only under the guard.
    """

    def __init__(
        self,
        *,
        resolve: Callable[[], Any],
        apply: Literal["auto", "manual"],
        copy: bool,
        strict: bool,
        guard: Guard,
        install_hooks: bool,
        flipped: Callable[[int, int], None] | None = None,
    ) -> None:
        self.guard = guard
        guard.elsewhere = lambda: self._call_soon(guard.retry)
        self._flipped = flipped
        self.inbox: Inbox = Inbox()
        self.refused: tuple[int, BaseException] | None = None
        self._resolve = resolve
        self._manual = apply == "manual"
        self._copy = copy
        self._strict = strict
        self._install_hooks = install_hooks
        self._loop = asyncio.get_running_loop()
        self._target: Target | LoadTarget | None = None
        self._target_of: Any = None
        self._staged: Staged | None = None  # complete, waits to be applied; see _exchange()
        self._taking: Staged | None = None  # is being applied, if by nobody then again
        self._before: Staged | None = None  # what the model had before that
        self.owed: int = 0  # version of the newest message that asks to take what a word names
        # Of the manifest whose versions the model follows by itself, as the trainer was told.
        self.promised: bytes | None = None
        self.looks: bool = False  # reads look at the word: the trainer may still count on that
        self._lock = threading.Lock()
        # What the model has, and views unless it was copied: then only the layout is valid.
        self._current: Staged | None = None
        self._apply_outcome: tuple[int, BaseException | None] | None = None
        # What was applied, what the model left for it, and the error; or the same update twice if
        # something newer had been applied meanwhile.
        self._outcomes: deque[tuple[Staged, Staged | None, BaseException | None, bool]] = deque()
        self._adopts_late = False
        self._late_model: Any = None  # what was accepted; another may be assigned meanwhile
        self._assignments = 0  # under way: what _resolve() returns may be refused yet
        self._askers = 0  # calls under way that have what is staged applied by hand
        self._closed = False
        self._look_timer: asyncio.TimerHandle | None = None

    @abc.abstractmethod
    def _report_outcomes(self) -> None:
        """Tell the trainer and whoever waits what became of updates. Called on the loop."""

    @abc.abstractmethod
    def _leave(self, old: Staged) -> None:
        """Give back what the model does not view any more. Called on the loop."""

    def apply_by_hand(self) -> None:
        """From now on apply only on request."""
        self._manual = True
        self.withdraw_promise()

    @property
    def has_staged(self) -> bool:
        """Whether an update waits to be applied, or to be applied again."""
        if self._staged is not None or self._taking is not None or self._is_owed:
            return True
        return self._named_version > 0

    @property
    def applied_version(self) -> int:
        """Version that the model has, if it is of the newest epoch that there is; else 0."""
        inbox = self.inbox
        return inbox.version if inbox.epoch == inbox.newest_epoch else 0

    @property
    def staged_version(self) -> int:
        """Version of the update that is waiting to be applied; 0 if there is none."""
        staged = self._staged
        owed = max(self.owed if self._is_owed else 0, self._named_version)
        return owed if staged is None else max(staged.version, owed)

    @property
    def lag(self) -> int:
        """How far the applied version is behind the newest one that is here."""
        inbox, named = self.inbox, self._named_version
        if named <= inbox.newest or inbox.newest_epoch != inbox.epoch:
            return inbox.lag
        return named - inbox.version

    @property
    @abc.abstractmethod
    def _named_version(self) -> int:
        """Version that the word of the link names, if it is news; else 0."""

    @property
    def _is_owed(self) -> bool:
        """Whether the trainer waits for what its word names."""
        return self.owed > self.inbox.version or (
            self.owed > 0 and self.inbox.epoch != self.inbox.newest_epoch
        )

    def _owe(self, version: int) -> None:
        """The trainer waits for this version, which a word names; 0: for none."""
        self.owed = version

    def _promise_versions_of(self, digest: bytes | None) -> None:
        """What the trainer was told, see :attr:`promised`."""
        self.promised = digest
        self.looks |= digest is not None

    def _stop_looking(self) -> None:
        """The trainer does not count on reads any more, or has gone."""
        self.looks = False
        self.guard.ignore_word()

    # -- applying ------------------------------------------------------------------------------

    def _exchange(self, staged: Staged | None) -> Staged | None:
        """Put this in the place of what waits, and is not applied; only one thread gets that."""
        with self._lock:
            old, self._staged = self._staged, staged
            return None if old is self._taking else old  # an interrupt came in between

    def _apply_when_fit(self) -> None:
        """Apply what is staged, or have the loop do it.

        Raises:
            ApplyError: This read, which promised to see the newest version, cannot have it.
        """
        if self._taking is not None or self.guard.fit:
            self._apply_staged()
        else:
            # Under torch.func the model is not what it seems: the loop applies, and this waits.
            self._call_soon(self.withdraw_promise)
            if asyncio._get_running_loop() is self._loop:
                raise ApplyError(
                    "a new version cannot be applied inside of a transform of torch.func that the "
                    "event loop's thread runs: put `async with scheme.reading():` around it"
                )
            run_on_loop(self._loop, self._apply_staged)

    @abc.abstractmethod
    def _look(self) -> Staged | None:
        """What the word of the link names, if it is news; locked. Under the guard, any thread."""

    @abc.abstractmethod
    def _took(self, staged: Staged, error: BaseException | None) -> bool:
        """What a word named was applied, or refused. Under the guard, on any thread.

        Returns:
            Whether the loop has to be told.
        """

    @abc.abstractmethod
    def withdraw_promise(self) -> None:
        """Say that the model does not follow by itself any more. Idempotent. On the loop."""

    def _apply_staged(self) -> None:
        """Apply what is there. Runs under the guard, on any thread.

        What an interrupt cut short stays noted, and the next read applies it again before it
        computes: the model has parts of two versions until then.

        Raises:
            ApplyError: The read that begins promised to see this version, and cannot have it.
            BaseException: What the handler of a signal raised in this thread, or what a function
                raised that is no :class:`Exception`.
        """
        self._apply_outcome = None
        tries = 0
        while not self._waits_for_model():
            again = self._taking is not None
            named = None if again else self._look()
            with self._lock:
                if not again:
                    self._taking = named or self._staged
                if self._staged is self._taking:
                    self._staged = None
            if self._taking is None:
                return
            if self._taking.slot is None and self._is_overtaken(self._taking):
                self._outcomes.append((self._taking, self._taking, None, False))
                self._call_soon(self._report_outcomes)
                self._taking = None
                return
            try:
                self._apply_noted(self._taking)
                if not again and (named is None or self._staged is None):
                    return
            except BaseException as exc:  # goes to its thread
                tries += 1
                on_loop = asyncio._get_running_loop() is self._loop
                elsewhere = self.guard.at_read or not on_loop or self._taking is None
                if elsewhere or tries == _MAX_TRIES:
                    raise
                # Not to the link that brought the update, and was just as well at its work.
                self._loop.call_soon(_raise, exc)

    def _is_overtaken(self, staged: Staged) -> bool:
        """Whether something newer, which a word named, was applied meanwhile."""
        inbox = self.inbox
        return staged.epoch == inbox.epoch and staged.version < inbox.version

    def _apply_noted(self, staged: Staged) -> None:
        """Have the model get this; may be cut short anywhere, and called again."""
        error: BaseException | None = None
        inbox = self.inbox
        done = staged.version == inbox.version and staged.epoch == inbox.epoch
        if not done:
            try:
                target = self._find_target()
                # A process that another thread forks has one version, too.
                with FORKING if isinstance(target, Target) else contextlib.nullcontext():
                    target.apply_(staged.layout, staged.flat, staged.values, copy=self._copy)
            except BaseException as exc:  # the trainer sees it, and wait_for_version() raises it
                if _is_interrupt(exc):
                    raise
                error = exc  # whatever the model raised travels in the NACK
        # Nobody waits for an answer: the read has to say it.
        looked = staged.slot is not None and self.looks and not self.owed
        flipped = error is None
        if flipped:
            if self._current is not staged:
                self._before = self._current
                self._current = staged
            try:
                if self._flipped is not None:
                    self._flipped(staged.epoch, staged.version)
            except Exception as exc:  # noqa: BLE001 - of the owner, whom the trainer hears
                error = exc
            # Readers see the version together with the weights, and not before all of them.
            if not done:
                inbox.seen(staged.epoch, staged.version)
                inbox.applied(staged.epoch, staged.version)
            before = self._before
            if staged.slot is None and before is not None and before.slot is not None:
                before.give_back()  # now, and not without a copy of what still views it
        self._apply_outcome = (staged.version, error)
        silent = staged.slot is not None and not self._took(staged, None if flipped else error)
        if not silent or (flipped and error is not None):
            self._outcomes.append((staged, self._before if flipped else None, error, flipped))
            if asyncio._get_running_loop() is self._loop:
                self._report_outcomes()
            else:
                self._call_soon(self._report_outcomes)
        self._taking = self._before = None
        if error is None:
            return
        if not isinstance(error, Exception):
            raise error
        if looked and self.guard.at_read:
            raise ApplyError(
                f"version {staged.version} could not be applied: {error}",
                version=staged.version,
                remote_type=type(error).__name__,
            ) from error

    def _waits_for_model(self) -> bool:
        try:
            return self._resolve() is None or (self._target is None and self._assignments > 0)
        except Exception:  # noqa: BLE001 - _find_target() meets it again, and the trainer is told
            return False

    def _call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return  # the loop is closed: nobody is left to be told

    def apply_pending(self, *, patience: float = PATIENCE_SECONDS) -> int | None:
        """Apply the staged update now, on this thread, between two reads.

        Args:
            patience: Seconds to wait for the forward passes of other threads.

        Returns:
            The version that was applied, or ``None`` when nothing was staged.

        Raises:
            ApplyError: The model could not take it; it kept the version it had.
            LocalProtocolError: Called inside a read.
            SyncTimeout: Another thread's forward pass did not end; a loop does not wait for it.
        """
        self.guard.refuse_inside_read("apply_pending")
        if not self.has_staged:
            return None
        advice = "use `await scheme.receive()` there, or call apply_pending() again"
        try:
            self.guard.between_reads(self._apply_staged, advice=advice, patience=patience)
        finally:
            if self._taking is not None:  # it was cut short, and is done again by the next read
                self.guard.put_back(self._apply_when_fit)
        if self._apply_outcome is None:
            return None
        version, error = self._apply_outcome
        if error is not None:
            raise ApplyError(
                f"version {version} could not be applied: {error}",
                version=version,
                remote_type=type(error).__name__,
            ) from error
        return version

    @property
    def is_quick(self) -> bool:
        """Whether applying what is staged is little more than a change of pointers."""
        target = self._target
        staged = self._staged or (self._current if self._is_owed else None)
        return (
            isinstance(target, Target)
            and staged is not None
            and not self._copy
            and target.is_quick(staged.layout, staged.values)
        )

    def apply_soon(self) -> None:
        """Apply what is staged between two reads, without waiting. Called on the loop."""
        if self.has_staged and not self.guard.submit(self._apply_when_fit):
            if self._look_timer is None:
                self._look_again(_LOOK_SECONDS[0])

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """While a call waits for what is staged, which it may have asked to be applied.

        With ``apply="manual"`` nothing is applied on behalf of a call that has ended. On the loop.
        """
        self._askers += 1
        try:
            yield
        finally:
            self._askers -= 1
            unasked = self._manual and not self._askers and self._taking is None
            if unasked and self.guard.withdraw() and self._adopts_late:
                self.guard.submit(self._adopt_late)

    def _look_again(self, pause: float) -> None:
        # A forward that Ctrl-C ended leaves no word: while an update waits, see now and then.
        def look() -> None:
            self._look_timer = None
            if not self._closed and self.guard.retry():
                self._look_again(min(2 * pause, _LOOK_SECONDS[1]))

        self._look_timer = self._loop.call_later(pause, look)

    # -- the model -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def assigning(self) -> Iterator[None]:
        """While another model is assigned, which may not fit: others go on with the old one."""
        with self._lock:  # any thread may assign
            self._assignments += 1
        try:
            yield
        finally:
            with self._lock:
                self._assignments -= 1

    def _find_target(self) -> Target | LoadTarget:
        model = self._resolve()
        if model is None:
            raise ConfigError("No model registered: pass model= or context= to init_on_receiver()")
        if self._target is None or (self._target_of is not model and not self._assignments):
            self._take_over(model)
        assert self._target is not None
        return self._target

    def _take_over(self, model: Any) -> None:
        try:
            self._adopt(model)
        except ApplyError:  # the context has a model of another shape: it has no version yet
            self._let_go()
            self._use(self._target_for(model), model)

    def prepare_target(self) -> None:
        """Look for the model now, so that its forwards are guarded from the start."""
        if self._resolve() is not None:
            self._find_target()

    def model_changed(self) -> None:
        """The model was given or replaced: guard it, and give it the weights of this version.

        Called on the loop. With a forward running in another thread, it happens when that ends.

        Raises:
            ApplyError: The weights do not fit; nothing was changed.
        """
        self.withdraw_promise()  # until the new one has taken an update
        model = self._resolve()
        adopt = functools.partial(self._adopt, model)
        if model is self._target_of and self._adopts_late:  # back to it, before it was replaced
            self._forget_late()
            self._guard_forwards(model)
        if model is not self._target_of and not self.guard.exclusively(adopt, timeout=0.0):
            self._check_fits(model)
            self._guard_forwards(model)
            self._adopts_late, self._late_model = True, model
            if not self.guard.submit(self._adopt_late) and self._look_timer is None:
                self._look_again(_LOOK_SECONDS[0])
        elif not self._manual and model is not None:
            self.apply_soon()

    def _target_for(self, model: Any) -> Target | LoadTarget:
        return model if isinstance(model, LoadTarget) else Target(model, strict=self._strict)

    def _adopt(self, model: Any) -> None:
        """Put the version that the old model has into the new one. Runs under the guard."""
        if model is None:
            self._forget_late()
            self._let_go()
            return
        target = self._target_for(model)
        self._check_fits(model)
        self._forget_late()
        current = self._current
        try:
            if current is None or isinstance(target, LoadTarget):
                pass  # there is nothing yet; a function is no model, and none follows it
            elif self._copy:
                assert isinstance(self._target, Target)
                leaves = collect(self._target.target)
                tensors = [leaf.tensor for leaf in leaves.leaves]
                layout = Layout.plan(leaves, NO_LIMITS)
                target.apply_tensors(layout, tensors, leaves.values)
            else:
                self._detach()  # first, as the two may have parameters in common
                target.apply_(current.layout, current.flat, current.values, copy=False)
        except Exception as exc:  # whoever gave the model sees it
            raise _misfit(self.inbox.version, exc) from exc
        self._use(target, model)

    def _adopt_late(self) -> None:
        """The same, as the last reader leaves. Never raises: the weights were found to fit."""
        if self._adopts_late:
            model = self._late_model
            self._forget_late()
            try:
                if model is not None:
                    self._take_over(model)
                else:
                    self._adopt(None)
            except Exception as exc:  # noqa: BLE001 - wait_for_version() raises it
                self._refuse(self.inbox.version, exc)
        if not self._manual:
            self._apply_staged()

    def _forget_late(self) -> None:
        self._adopts_late, self._late_model = False, None

    def _refuse(self, version: int, error: BaseException) -> None:
        self.refused = (version, error)  # whoever waits for the version raises it

    def _forget_refusal(self) -> None:
        self.refused = None

    def _check_fits(self, model: Any) -> None:
        newest = self._current or self._staged
        if model is not None and newest is not None:
            try:
                self._target_for(model).check(newest.layout, newest.values)
            except Exception as exc:  # whoever gave the model sees it
                raise _misfit(newest.version, exc) from exc

    def _use(self, target: Target | LoadTarget, model: Any) -> None:
        self._target, self._target_of = target, model
        self._guard_forwards(model)

    def _guard_forwards(self, model: Any) -> None:
        if self._install_hooks and takes_hooks(model):
            self.guard.install(model)
        else:
            self.guard.uninstall()

    def _let_go(self) -> None:
        """Nobody has the version any more."""
        self._detach()
        current, self._current = self._current, None
        if current is not None and not self._copy:
            self._call_soon(self._leave, current)
        self.inbox.forget()
        self._target = self._target_of = None
        self.guard.uninstall()

    def _detach(self) -> None:
        """Give the model memory of its own; its values stay the same."""
        if isinstance(self._target, Target) and self._current is not None and not self._copy:
            self._target.detach_(self._current.flat)


def _is_interrupt(error: BaseException) -> bool:
    """Whether an exception is that of a signal's handler, not of the code that it came up in."""
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


def _misfit(version: int, error: BaseException) -> ApplyError:
    return ApplyError(
        f"version {version} does not fit the new model, so the old one stays: {error} For a model "
        "with another shape, set `scheme.model = None` first; it then gets the next update",
        version=version,
        remote_type=type(error).__name__,
    )
