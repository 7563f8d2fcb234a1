"""Steps of this process's optimizers, and copies of weights that must not meet them.

torch calls hooks around every step of every optimizer. A copy waits for the steps that are open on
other threads, and a step that begins waits for the copies under way: neither for an event loop.
Compiled steps run no hooks; the counts of writes that torch keeps tell of what they wrote.
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

from aiosync.errors import SendTimeout, WeightsChanged
from aiosync.tensors import Prepared

__all__ = ["STEPS", "STILL_STEPPING", "steadily"]

STILL_STEPPING = "an optimizer's step in another thread did not end within {:g} s"

_T = TypeVar("_T")

_LOOK_SECONDS = 0.05  # between two looks whether a step raised, which no hook tells
_count_writes = attrgetter("_version")
_PATIENCE_SECONDS = 60.0  # of a step; then it goes on, and the copy finds out


class _Steps:
    """Who steps, and who copies.

    Each notes itself before it looks for the other, so that one of the two sees the other one.

    Attributes:
        open: The frame of the step that a thread is in.
        copies: Those that are made, or are about to be.
        unsettled: For each copy that is not looked at yet, where what was stepped since is. Weak,
            as the loop that should look may be closed.
        num_waiting: How many steps wait for copies.
    """

    def __init__(self) -> None:
        self._watched = False
        self.reset()

    def reset(self) -> None:
        """In a forked child: no other thread is left."""
        # Taken by itself: a signal's handler that raises inside of a condition's leaves it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.unsettled: list[weakref.ref[set[int]]] = []
        self.open: dict[int, FrameType] = {}
        self.copies: set[object] = set()
        self.num_waiting: int = 0

    def watch(self) -> None:
        """Have torch tell of steps, for the rest of the process.

        Hooks that are removed while a step goes through them would make it raise.
        """
        with self._lock:
            if not self._watched:
                self._watched = True
                register_optimizer_step_pre_hook(self._before)
                register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        with self._lock:
            if self._is_open(threading.get_ident()):  # this one is a step's own
                return
            self.resume(sys._getframe(1))
            if self.unsettled:
                groups = (each["params"] for each in optimizer.param_groups)
                stepped = {each.data_ptr() for params in groups for each in params}
                for each in [*self.unsettled]:
                    noted = each()
                    if noted is not None:
                        noted |= stepped

    def _after(self, *_of_step: object) -> None:
        if not torch.compiler.is_dynamo_compiling():
            if self.open.get(threading.get_ident()) is sys._getframe(1):
                self.pause()

    def pause(self) -> FrameType | None:
        """Say that this thread writes nothing; for a call that may wait for copies.

        Returns:
            The step that it is in, for :meth:`resume`, or ``None``.
        """
        with self._lock:
            step = self.open.pop(threading.get_ident(), None)
            self._changed.notify_all()
        return step

    def resume(self, step: FrameType) -> None:
        """Go on with a step, or begin it, once nobody copies."""
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
        """Whether a thread still is in its step; one that raised is forgotten."""
        step = self.open.get(thread)
        if step is None:
            return False
        try:
            step.clear()  # that only works once it has ended
        except RuntimeError:
            return True
        del self.open[thread]
        return False

    def wait(self, timeout: float = 0.0, gave_up: Callable[[], bool] = bool) -> bool | None:
        """Wait until no other thread is in a step, once a copy was noted.

        Args:
            timeout: Seconds.
            gave_up: Ends the wait when it becomes true.

        Returns:
            Whether one was; ``None`` if one still is.
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
        """A copy has ended. Idempotent."""
        self.copies.discard(copy)
        if self.num_waiting:
            with self._lock:
                self._changed.notify_all()


STEPS = _Steps()
"""Of this process."""

os.register_at_fork(after_in_child=STEPS.reset)


def steadily(
    start: Callable[[Callable[[], _T]], asyncio.Future[_T]],
    call: Callable[[], _T],
    *,
    prepared: Prepared,
    timeout: float,
    gave_up: Callable[[], bool],
) -> asyncio.Future[_T]:
    """Have another thread copy tensors, which must not change from now on.

    Buffers may, as a forward counts in them, and what an update of aiosync replaces as a whole.

    Args:
        start: Makes a call in another thread.
        call: Copies.
        prepared: What it copies.
        timeout: Seconds that it waits for a step which is open now.
        gave_up: Ends that wait.

    Returns:
        What the call returns, for the loop of the caller; or :class:`SendTimeout`, as the step did
        not end, or :class:`WeightsChanged`.
    """
    layout, tensors = prepared.layout, prepared.tensors
    copy, calm = object(), False
    before: tuple[list[int], list[int]] = [], []
    stepped = set[int]()

    def check() -> None:
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
                raise SendTimeout(STILL_STEPPING.format(timeout))
            if waited or not calm:
                before = _states(tensors)
            result = call()
            check()
            return result
        finally:
            STEPS.unsettled.append(weakref.ref(stepped, STEPS.unsettled.remove))
            STEPS.end(copy)

    def settle(running: asyncio.Future[_T]) -> None:
        # A write counts when it ends: on this thread none is under way now.
        try:
            result = running.result()
            check()
        except BaseException as exc:  # noqa: BLE001 - whoever waits raises it
            done.set_exception(exc)
            done.exception()  # and if nobody does, it is no news
        else:
            done.set_result(result)

    try:
        STEPS.copies.add(copy)
        calm = STEPS.wait() is False
        before = _states(tensors)
        running = start(run)
    except BaseException:  # goes on to the caller of send()
        STEPS.end(copy)
        raise
    done: asyncio.Future[_T] = running.get_loop().create_future()
    running.add_done_callback(settle)
    return done


def _states(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """How often each tensor was written to, as torch counts, and where it is."""
    try:
        writes = list(map(_count_writes, tensors))
    except RuntimeError:  # those of inference mode keep no count
        writes = [0 if each.is_inference() else each._version for each in tensors]
    return writes, list(map(torch.Tensor.data_ptr, tensors))
