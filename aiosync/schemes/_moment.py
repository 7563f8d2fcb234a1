"""Moments at which a model must not be changed, and waiting on a loop for those at which it may.

Must not import transports.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from aiosync.errors import LocalProtocolError, SyncTimeout

if TYPE_CHECKING:
    from aiosync.schemes.guard import Guard

__all__ = [
    "PATIENCE_SECONDS",
    "between_reads",
    "is_interrupt",
    "keep_for_readers",
    "refuse_inside_read",
    "run_on_loop",
    "wait_for_readers",
]

PATIENCE_SECONDS = 30.0
"""How long a call in one thread waits for another one."""

_PAUSE_SECONDS = 0.005


def is_interrupt(error: BaseException) -> bool:
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


def refuse_inside_read(guard: Guard, method: str) -> None:
    """Raise if this thread reads, which no call from it can wait for.

    Raises:
        LocalProtocolError: It does.
    """
    if guard.reading_here:
        raise LocalProtocolError(
            f"{method}() was called inside a forward pass or a reading() block; call it between "
            "two of them"
        )


def between_reads(
    guard: Guard, change: Callable[[], None], *, advice: str, patience: float = PATIENCE_SECONDS
) -> None:
    """Change the model on this thread, after the reads of others.

    Args:
        guard: Of the model.
        change: What to do.
        advice: What to do instead on a loop, which is not held: there, others' reads are not
            waited for.
        patience: Seconds to wait for them elsewhere.

    Raises:
        SyncTimeout: They did not end.
    """
    if asyncio._get_running_loop() is not None:
        patience = 0.0
    if guard.exclusively(change, timeout=patience):
        return
    if patience:
        raise SyncTimeout(f"a forward pass in another thread went on for {patience:g} s")
    raise SyncTimeout(
        "a forward pass is running in another thread, and an event loop must not be blocked until "
        f"it ends: {advice}"
    )


async def wait_for_readers(guard: Guard, seconds: float) -> None:
    """Let the reads of other threads end, for so long at most, while the loop goes on.

    New ones wait until the caller calls ``guard.let_go()``.
    """
    until = time.monotonic() + seconds
    guard.hold(seconds)
    while not guard.is_free() and time.monotonic() < until:  # noqa: ASYNC110 - threads tell nobody
        await asyncio.sleep(_PAUSE_SECONDS)


def keep_for_readers(guard: Guard, memory: object) -> None:
    """Keep something until the reads that there are have ended."""
    kept = [memory]
    guard.submit(kept.clear)


def run_on_loop(loop: asyncio.AbstractEventLoop | None, call: Callable[[], None]) -> None:
    """Call here if nobody else runs the loop, otherwise there, and wait for it.

    Raises:
        SyncTimeout: The loop, in another thread, did not run; it will not call any more.
    """
    if loop is None or asyncio._get_running_loop() is loop or not loop.is_running():
        call()
        return
    done: Future[None] = Future()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            try:
                call()
            except BaseException as exc:  # noqa: BLE001 - raised in the thread that waits
                done.set_exception(exc)
            else:
                done.set_result(None)

    loop.call_soon_threadsafe(run)
    try:
        done.result(PATIENCE_SECONDS)
    except TimeoutError as exc:
        raise SyncTimeout(
            f"the event loop of this scheme did not run within {PATIENCE_SECONDS:g} s"
        ) from exc
    finally:
        done.cancel()  # if it has not begun, it never will
