"""One run of a weight feed: from its start to its end, with what only that run has.

Must not import a web framework, nor a concrete scheme.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiosync._tasks import TaskOwner, WorkerThread
from aiosync.errors import ApplyError, SwapTimeout, SyncTimeout
from aiosync.schemes.inside import change_hooks, not_met, receiver_of
from aiosync.serving.gate import AdmissionGate, Swap

if TYPE_CHECKING:
    from aiosync.receiver.receiver import WeightReceiver
    from aiosync.schemes import WeightSyncScheme

__all__ = ["Following"]

_FIRST_PAUSE_SECONDS = 0.05
_STALL_SECONDS = 5.0  # without a byte in the middle of an update
_SLOW_SECONDS = 5.0  # for a function of the user's, before the status mentions it
_CLOSE_SECONDS = 4.0

_STALLED = "the source has been silent for {:.0f} s in the middle of an update"
_LOADING = "a new version has been being put in place for {:.0f} s"
_TRANSFORMING = "the transform of a new version has been working for {:.0f} s"


class Following:
    """Follows a source on behalf of a feed, until it is closed. Belongs to one event loop.

    Args:
        scheme: Has its role, and looks for the source for ever. Owned from now on.
        gate: The gate.
        memory: What keeps the memory alive that the model has now.
        max_pause: Seconds between two attempts to switch, at most.
        in_thread: Every switch is more than a change of pointers.

    Attributes:
        crash: What ended it, if it was not closed.
        activated_at: When it switched the last time, on ``time.monotonic()``'s clock.
        receiver: What receives, over one link after the other; ``None`` before the first.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        *,
        gate: AdmissionGate,
        memory: Callable[[], list[Any]],
        max_pause: float,
        in_thread: bool,
    ) -> None:
        self.crash: BaseException | None = None
        self.activated_at: float | None = None
        self.receiver: WeightReceiver | None = None
        self._scheme = scheme
        self._gate = gate
        self._memory = memory
        self._max_pause = max_pause
        self._in_thread = in_thread
        self._started = time.monotonic()
        self._blocked: tuple[float, str] | None = None
        self._loading_since: float | None = None
        self._closing = False
        self._thread = WorkerThread("aiosync-apply")
        self._tasks = TaskOwner(lambda error: None)  # see _ended()

    def start(self) -> None:
        """Begin."""
        self._tasks.start(self._run(), "aiosync weight feed").add_done_callback(self._ended)

    async def aclose(self) -> None:
        """End. Bounded; the model keeps its weights."""
        self._closing = True
        try:
            await self._tasks.aclose()
        finally:
            self._thread.close(patience=_CLOSE_SECONDS)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._closing:
            return
        # A bug, or somebody cancelled a task that is not his.
        self.crash = RuntimeError("it was cancelled") if task.cancelled() else task.exception()
        task.get_loop().call_exception_handler(
            {"message": "the weight feed ended with an error", "exception": self.crash}
        )

    @property
    def connected(self) -> bool:
        """Whether there is a link to the source."""
        receiver = self.receiver
        return receiver is not None and receiver.lost is None and receiver.error is None

    def causes(self, now: float) -> list[tuple[float, str]]:
        """Since when, and why, it does not follow the source."""
        receiver, found = self.receiver, [] if self._blocked is None else [self._blocked]
        why = None if self.connected else not_met(self._scheme)
        last = "" if why is None else f"; the last attempt: {type(why).__name__}: {why}"
        if receiver is None:
            return [(self._started, f"the source was not reached yet{last}"), *found]
        if receiver.cut_off is not None:
            text = f"the link to the source was lost: {receiver.cut_off[1]}{last}"
            if receiver.lost is None:
                text = f"what is newer has not come since {text}"
            found.insert(0, (receiver.cut_off[0], text))
        if receiver.refusing is not None:
            refusing = receiver.refusing
            text = f"version {refusing.version} was refused: {refusing.text}"
            found.append((refusing.since, text))
        stalled = receiver.partial_since if self.connected else None
        for since, limit, text in (
            (stalled, _STALL_SECONDS, _STALLED),
            (self._loading_since, _SLOW_SECONDS, _LOADING),
            (receiver.transforming_since, _SLOW_SECONDS, _TRANSFORMING),
        ):
            if since is not None and now - since > limit:
                found.append((since, text.format(now - since)))
        return found

    # -- receiving -----------------------------------------------------------------------------

    async def _run(self) -> None:
        """Reach the source and follow it; both go on until this is closed."""
        scheme = self._scheme
        try:
            await scheme.connect(timeout=math.inf, initial=False)
            self.receiver = receiver = receiver_of(scheme)
            assert receiver is not None
            await self._follow(receiver)
        finally:
            if self.receiver is not None:
                self.receiver.applier.leave_memory()  # copying a large model would hold the loop
                self.receiver = None
            await scheme.aclose()

    async def _follow(self, receiver: WeightReceiver) -> None:
        """Switch to each version that is complete."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            await receiver.wait_until(
                lambda: receiver.applier.has_staged, timeout=None, late=SwapTimeout("never")
            )
            try:
                await self._switch(receiver)
            except ApplyError:
                self._blocked = None  # the receiver knows that it was refused
            except SwapTimeout as exc:
                since = time.monotonic() if self._blocked is None else self._blocked[0]
                waits = f"version {receiver.applier.staged_version} waits to be switched to"
                self._blocked = (since, f"{waits}: {exc}")
                # Requests must be let in for longer than they were kept waiting.
                pause = min(2 * pause, self._max_pause)
                await asyncio.sleep(max(pause, 2 * (self._gate.swap_timeout or 0.0)))
            else:
                self._blocked = None
                pause = _FIRST_PAUSE_SECONDS

    async def _switch(self, receiver: WeightReceiver) -> None:
        old = self._memory() if receiver.inbox.version == 0 else []
        loop = asyncio.get_running_loop()
        async with self._gate.swap() as swap:
            swap.version = self._gate.version  # nothing has changed so far
            change_hooks(self._scheme, applied=functools.partial(self._on_flip, loop, swap))
            try:
                if self._in_thread or not receiver.applier.is_quick:
                    await self._apply_in_thread(receiver)
                else:
                    await self._apply(receiver)
            finally:
                change_hooks(self._scheme, applied=None)
        if old:
            # What the model had of its own goes back to the system, which takes its time.
            self._thread.submit(old.clear)

    def _on_flip(
        self, loop: asyncio.AbstractEventLoop, swap: Swap, epoch: int, version: int
    ) -> None:
        # Before the trainer is told, so that it never knows more than the gate does.
        def activate() -> None:
            swap.activate(version, epoch)
            self.activated_at = time.monotonic()

        if asyncio._get_running_loop() is loop:
            activate()
        else:
            loop.call_soon_threadsafe(activate)

    async def _apply(self, receiver: WeightReceiver) -> None:
        """Change the pointers on the loop; or, with a forward in another thread, there."""
        limit = self._gate.swap_timeout or math.inf
        # One that was applied in the thread is no news.
        receiver.reported = (receiver.inbox.epoch, receiver.inbox.version)
        while await self._scheme.receive(timeout=limit) is None:
            if (
                receiver.applier.has_staged
            ):  # and nobody is going to apply it: receive() took that back
                raise SwapTimeout(f"a forward pass in another thread went on for {limit:g} s")
            if not receiver.guard.retry():
                return  # nothing is left that could come

    async def _apply_in_thread(self, receiver: WeightReceiver) -> None:
        limit = self._gate.swap_timeout or math.inf

        def apply() -> None:
            try:
                receiver.applier.apply_pending(patience=limit)
            except Exception:  # goes on to _follow()
                raise
            except BaseException as exc:  # of a function of the user's: no end of this program
                raise ApplyError(f"{type(exc).__name__} was raised: {exc}") from exc

        self._loading_since = time.monotonic()
        try:
            # What has begun ends: nobody may compute on weights that are half in place.
            await self._thread.run(apply, patience=None)
        except SyncTimeout as exc:
            raise SwapTimeout(f"a forward pass in another thread went on for {limit:g} s") from exc
        finally:
            self._loading_since = None
