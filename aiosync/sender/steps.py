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
from types import FrameType
from typing import TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from aiosync.errors import SendTimeout, WeightsChanged
from aiosync.tensors.layout import Layout

__all__ = ["STEPS", "STILL_STEPPING", "steadily"]

STILL_STEPPING = "an optimizer's step in another thread did not end within {:g} s"

_T = TypeVar("_T")

_LOOK_SECONDS = 0.05  # between two looks whether a step raised or a copy is gone: nobody tells
_PATIENCE_SECONDS = 60.0  # of a step; then it goes on, and the copy finds out


class _Steps:
    """Who steps, and who copies.

    Each notes itself before it looks for the other, so that one of the two sees the other one.

    Attributes:
        open: The frame of the step that a thread is in.
        copies: Those that are made, or are about to be.
        num_steps: How many steps have begun.
        num_waiting: Of them, how many wait for copies.
    """

    def __init__(self) -> None:
        self._watched = False
        self.num_steps = 0
        self.reset()

    def reset(self) -> None:
        """In a forked child: no other thread is left."""
        self._changed = threading.Condition()
        self.open: dict[int, FrameType] = {}
        self.copies: set[object] = set()
        self.num_waiting = 0

    def watch(self) -> None:
        """Have torch tell of steps, for the rest of the process.

        Hooks that are removed while a step goes through them would make it raise.
        """
        with self._changed:
            if not self._watched:
                self._watched = True
                register_optimizer_step_pre_hook(self._before)
                register_optimizer_step_post_hook(self._after)

    def _before(self, *_of_step: object) -> None:
        if torch.compiler.is_compiling():
            return
        me, until = threading.get_ident(), time.monotonic() + _PATIENCE_SECONDS
        with self._changed:
            if self._is_open(me):  # this one is a step's own
                return
            self.num_waiting += 1
            try:
                while True:
                    self.open[me] = sys._getframe(1)
                    if not self.copies or time.monotonic() > until:
                        break
                    del self.open[me]
                    self._changed.notify_all()
                    self._changed.wait(_LOOK_SECONDS)
            finally:
                self.num_waiting -= 1
            self.num_steps += 1

    def _after(self, *_of_step: object) -> None:
        if not torch.compiler.is_compiling():
            if self.open.get(threading.get_ident()) is sys._getframe(1):
                self.leave()

    def leave(self) -> None:
        """Whoever calls this sends: no step of this thread is open, or it waits for the call."""
        if self.open:
            with self._changed:
                if self.open.pop(threading.get_ident(), None) is not None:
                    self._changed.notify_all()

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

    def wait(self, timeout: float = 0.0) -> bool | None:
        """Wait until no step is open, once a copy was noted.

        Returns:
            Whether one was; ``None`` if one still is after ``timeout`` seconds.
        """
        until, waited = time.monotonic() + timeout, False
        with self._changed:
            while any(self._is_open(each) for each in [*self.open]):
                left, waited = until - time.monotonic(), True
                if left <= 0:
                    return None
                self._changed.wait(min(left, _LOOK_SECONDS))
        return waited

    def end(self, copy: object) -> None:
        """A copy has ended. Idempotent."""
        self.copies.discard(copy)
        if self.num_waiting:
            with self._changed:
                self._changed.notify_all()


STEPS = _Steps()
"""Of this process."""

os.register_at_fork(after_in_child=STEPS.reset)


def steadily(
    start: Callable[[Callable[[], _T]], asyncio.Future[_T]],
    call: Callable[[], _T],
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    timeout: float,
) -> asyncio.Future[_T]:
    """Have another thread copy tensors, which must not change from now on.

    Args:
        start: Makes a call in another thread.
        call: Copies.
        layout: Names the tensors.
        tensors: What it copies.
        timeout: Seconds that it waits for a step which is open now.

    Returns:
        What the call returns, for the loop of the caller; or :class:`SendTimeout`, as the step did
        not end, or :class:`WeightsChanged`.
    """
    copy, num_steps, calm, before = object(), -1, False, list[int]()

    def check() -> None:
        for leaf, tensor, num in zip(layout.manifest.leaves, tensors, before, strict=True):
            if num >= 0 and tensor._version != num:
                raise WeightsChanged(
                    f"{leaf.name} was written to while it was copied, and nothing was sent: await "
                    "send() before the weights change, or call send_nowait(), which copies at once"
                )

    def run() -> _T:
        nonlocal before, num_steps
        try:
            waited = STEPS.wait(timeout)
            if waited is None:
                raise SendTimeout(STILL_STEPPING.format(timeout))
            if waited or not calm:
                before = _num_writes(tensors)
            result = call()
            check()
            return result
        finally:
            num_steps = STEPS.num_steps
            STEPS.end(copy)

    def settle(running: asyncio.Future[_T]) -> None:
        # A write counts when it ends: on this thread none is under way now.
        try:
            result = running.result()
            if STEPS.num_steps == num_steps:
                check()
        except BaseException as exc:  # noqa: BLE001 - whoever waits raises it
            done.set_exception(exc)
            done.exception()  # and if nobody does, it is no news
        else:
            done.set_result(result)

    weakref.finalize(run, STEPS.end, copy)  # also if nobody calls it
    STEPS.copies.add(copy)
    calm = STEPS.wait() is False
    before = _num_writes(tensors)
    running = start(run)
    done: asyncio.Future[_T] = running.get_loop().create_future()
    running.add_done_callback(settle)
    return done


def _num_writes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was written to, as torch counts; -1 for those of inference mode."""
    return [-1 if each.is_inference() else each._version for each in tensors]
