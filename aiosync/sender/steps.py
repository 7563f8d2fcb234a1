"""Coordination of optimizer steps in this process and copies of weights, which must not overlap.

torch calls hooks around every step of every optimizer. A copy waits for the steps that are open on
other threads, and a step that begins waits for the copies under way; neither waits for an event
loop. Compiled steps run no hooks: torch's counts of writes show what they wrote.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FrameType
from typing import TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from aiosync.errors import SendTimeout, TransportClosed, WeightsChanged
from aiosync.tensors import Prepared

__all__ = ["STEPS", "STILL_STEPPING", "steadily", "why_not_copied"]

STILL_STEPPING = "an optimizer's step in another thread did not end within {:g} s"

_T = TypeVar("_T")

# Pause between two checks whether an open step raised, which no hook reports.
_LOOK_SECONDS = 0.05
_count_writes = attrgetter("_version")
# A step waits for copies at most this long. Then it goes on, and the copy notices the change.
_PATIENCE_SECONDS = 60.0


class _OptimizerSteps:
    """Optimizer steps and copies under way in this process.

    A step and a copy each register themselves before they look for the other, so that at least one
    of the two sees the other.

    Attributes:
        open: Frame of the step that a thread is in, by the thread's identifier.
        copies: Copies that are under way, or are about to start.
        unsettled: For each copy that has ended and whose last check is still to come, a reference
            to the set of addresses of tensors stepped since: the check excuses these. Weak, as the
            loop that should make the check may be closed.
        num_waiting: Number of steps that wait for copies.
    """

    def __init__(self) -> None:
        self._watched = False
        self.reset()

    def reset(self) -> None:
        """Start without steps and copies, also in a forked child, where no other thread is left."""
        # Code here takes the lock directly: an exception of a signal's handler inside the
        # condition's methods would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.unsettled: list[weakref.ref[set[int]]] = []
        self.open: dict[int, FrameType] = {}
        self.copies: set[object] = set()
        self.num_waiting: int = 0

    def watch(self) -> None:
        """Register torch's hooks around steps, for the rest of the process.

        They are never removed: that would make a step raise that runs the hooks meanwhile.
        """
        with self._lock:
            if not self._watched:
                self._watched = True
                register_optimizer_step_pre_hook(self._before)
                register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
        """Wait for copies under way before a step; tell checks of ended ones what it changes."""
        if torch.compiler.is_dynamo_compiling():
            return
        with self._lock:
            # A step within a step of this thread is a part of the outer one.
            if self._is_open(threading.get_ident()):
                return
            # The frame of torch's wrapper, which ends with the step.
            self.begin_or_resume(sys._getframe(1))
            if self.unsettled:
                self._note_stepped(optimizer)

    def _note_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the checks of copies that ended excuse the tensors that a later step writes to."""
        groups = (each["params"] for each in optimizer.param_groups)
        stepped = {each.data_ptr() for params in groups for each in params}
        for each in [*self.unsettled]:
            noted = each()
            if noted is not None:
                noted |= stepped

    def _after(self, *_of_step: object) -> None:
        """End this thread's step, unless it is a step within the outer one."""
        if not torch.compiler.is_dynamo_compiling():
            if self.open.get(threading.get_ident()) is sys._getframe(1):
                self.pause()

    def pause(self) -> FrameType | None:
        """Leave the step of this thread, for a call that may wait for copies and writes nothing.

        Returns the step, for :meth:`begin_or_resume`; ``None`` if this thread is in none.
        """
        with self._lock:
            step = self.open.pop(threading.get_ident(), None)
            self._changed.notify_all()
        return step

    def begin_or_resume(self, step: FrameType) -> None:
        """Begin a step, or go on with it after pause(), once no copy is under way."""
        me, until = threading.get_ident(), time.monotonic() + _PATIENCE_SECONDS
        with self._lock:
            self.num_waiting += 1
            try:
                while True:
                    self.open[me] = step
                    if not self.copies or time.monotonic() > until:
                        break
                    del self.open[me]
                    self._changed.notify_all()
                    self._changed.wait(_LOOK_SECONDS)
            finally:
                self.num_waiting -= 1

    def _is_open(self, thread: int) -> bool:
        """Return True if a thread is still in its step; forget a step that raised."""
        step = self.open.get(thread)
        if step is None:
            return False
        try:
            # A frame can be cleared only once it has ended.
            step.clear()
        except RuntimeError:
            return True
        del self.open[thread]
        return False

    def wait(self, timeout: float = 0.0, gave_up: Callable[[], bool] = bool) -> bool | None:
        """Wait until no other thread is in a step, after the copy was registered.

        Args:
            timeout: Seconds to wait at most.
            gave_up: Ends the wait when it returns true.

        Returns:
            True if a step was open and has ended, False if none was open, ``None`` if one is still
            open.
        """
        me, until, waited = threading.get_ident(), time.monotonic() + timeout, False
        with self._lock:
            while any(self._is_open(each) for each in [*self.open] if each != me):
                left, waited = until - time.monotonic(), True
                if left <= 0 or gave_up():
                    return None
                self._changed.wait(min(left, _LOOK_SECONDS))
        return waited

    def end(self, copy: object) -> None:
        """Remove a copy that has ended, and wake the steps that wait for it. Idempotent."""
        self.copies.discard(copy)
        if self.num_waiting:
            with self._lock:
                self._changed.notify_all()


STEPS = _OptimizerSteps()
"""The steps and copies of this process."""

os.register_at_fork(after_in_child=STEPS.reset)


def steadily(
    start: Callable[[Callable[[], _T]], asyncio.Future[_T]],
    call: Callable[[], _T],
    *,
    prepared: Prepared,
    timeout: float,
    gave_up: Callable[[], bool],
) -> asyncio.Future[_T]:
    """Copy tensors in another thread; fail if parameters change from now on.

    Buffers may change, as a forward counts in them. So may tensors that an update of aiosync
    replaces as a whole.

    Args:
        start: Runs a call in another thread.
        call: Makes the copy.
        prepared: The weights that the call copies.
        timeout: Seconds that the copy waits for an optimizer's step which is open now.
        gave_up: Ends that wait when it returns true.

    Returns:
        A future of the caller's loop with the result of the call. It fails with
        :class:`SendTimeout` if the step did not end, :class:`TransportClosed` if it gave up, and
        :class:`WeightsChanged` if the weights changed.
    """
    layout, tensors = prepared.layout, prepared.tensors
    copy, no_step_was_open = object(), False
    before: tuple[list[int], list[int]] = [], []
    # STEPS._before adds the addresses of the tensors that a later step changes: such a step is no
    # mistake, although it may come before check_again_on_loop() runs.
    stepped = set[int]()

    def raise_if_written() -> None:
        after = _states(tensors)
        if after == before:
            return
        for leaf, writes, place, writes_before, place_before in zip(
            layout.manifest.leaves, *after, *before, strict=True
        ):
            if (
                writes != writes_before
                and place == place_before
                and leaf.kind == "param"
                and place not in stepped
            ):
                raise WeightsChanged(
                    f"{leaf.name} was written to while it was copied, and nothing was sent: await "
                    "send() before the weights change, or call send_nowait(), which copies at once"
                )

    def run() -> _T:
        nonlocal before
        try:
            waited = STEPS.wait(timeout, gave_up)
            if waited is None:
                if gave_up():
                    raise TransportClosed("this scheme was closed")
                raise SendTimeout(STILL_STEPPING.format(timeout))
            # A step that was open has written: only writes from now on are mistakes.
            if waited or not no_step_was_open:
                before = _states(tensors)
            result = call()
            raise_if_written()
            return result
        finally:
            # From here on steps may change the weights. They note their tensors in `stepped` while
            # the last check is still to come.
            STEPS.unsettled.append(weakref.ref(stepped, STEPS.unsettled.remove))
            STEPS.end(copy)

    def check_again_on_loop(running: asyncio.Future[_T]) -> None:
        # torch counts a write when it ends, and no write of the loop's thread is under way now.
        try:
            result = running.result()
            raise_if_written()
        except BaseException as exc:  # noqa: BLE001 - the caller that awaits the future raises it
            done.set_exception(exc)
            # Retrieve the exception, so that asyncio does not log it if no caller awaits the
            # future.
            done.exception()
        else:
            done.set_result(result)

    try:
        STEPS.copies.add(copy)
        no_step_was_open = STEPS.wait() is False
        before = _states(tensors)
        running = start(run)
    except BaseException:  # The error goes on to the caller of send().
        STEPS.end(copy)
        raise
    done: asyncio.Future[_T] = running.get_loop().create_future()
    running.add_done_callback(check_again_on_loop)
    return done


def _states(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return how often each tensor was written to, as torch counts, and its address."""
    try:
        writes = list(map(_count_writes, tensors))
    except RuntimeError:
        # Tensors of inference mode keep no count.
        writes = [0 if each.is_inference() else each._version for each in tensors]
    return writes, list(map(torch.Tensor.data_ptr, tensors))


def why_not_copied() -> str:
    """Return the reason why a copy has not begun, for a call that waits for it."""
    if STEPS.open:
        return "an optimizer's step in another thread has not ended"
    return "another copy is under way, or no memory for this one is free yet"
