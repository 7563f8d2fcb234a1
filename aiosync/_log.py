"""Records of the logger ``aiosync``. Nothing is shown unless the program configures ``logging``.

WARNING: a call has waited for long, and for what; or a trainer is lost. INFO: a peer comes, goes,
refuses, or comes back. DEBUG: each send, and each update that a loop applies. Every record has the
attributes ``model``, ``worker``, ``version`` and ``phase``. Names and errors of peers are parts of
records, so control characters are escaped: no peer can forge a line, or move a terminal's cursor.
Must not import torch, nor anything of aiosync.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from types import TracebackType

__all__ = [
    "FIRST_SECONDS",
    "LOGGER",
    "NEXT_SECONDS",
    "Waiting",
    "escape_controls",
    "log",
    "say_waiting",
]

LOGGER: logging.Logger = logging.getLogger("aiosync")

FIRST_SECONDS = 5.0
"""Seconds that a call waits before it logs that."""

NEXT_SECONDS = 30.0
"""Seconds until the call logs it once more."""


def escape_controls(text: str) -> str:
    """Return a text with an escape in place of each character that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def log(
    level: int,
    phase: str,
    text: str,
    *,
    model: str | None,
    worker: int | None = None,
    version: int | None = None,
    error: BaseException | None = None,
) -> None:
    """Log one record.

    Args:
        level: Level of :mod:`logging`.
        phase: The event, in one word.
        text: The event, as a sentence.
        model: Name of the model, if the event is about one.
        worker: Index of the worker.
        version: The version.
        error: The exception of this process, to be shown with its traceback, which is not escaped:
            an error of a peer belongs into the text.
    """
    if model is not None:
        model = escape_controls(model)
        text = f"{model}: {text}"
    told = {"phase": phase, "model": model, "worker": worker, "version": version}
    LOGGER.log(level, "%s", escape_controls(text), exc_info=error, extra=told)


def say_waiting(
    call: str,
    waited: float,
    timeout: float | None,
    what: str,
    *,
    model: str | None,
    worker: int | None = None,
    version: int | None = None,
) -> None:
    """Log what a call waits for, and for how much longer."""
    left = "it has no timeout"
    if timeout is not None and timeout != math.inf:
        left = f"it gives up in {max(0.0, timeout - waited):.0f} s (timeout=)"
    text = f"{call} has waited for {waited:.0f} s: {what}; {left}"
    log(logging.WARNING, "waiting", text, model=model, worker=worker, version=version)


class Waiting:
    """Context manager of a wait: logs a warning if the wait takes long, and then at intervals.

    Args:
        call: Name of the call that waits, as the user knows it.
        timeout: Seconds that the call may take.
        what: Returns what the call waits for at present, and from which peer.
        model: Name of the model, if the call is about one.
        worker: Index of the worker that waits.
    """

    def __init__(
        self,
        call: str,
        timeout: float | None,
        what: Callable[[], str],
        *,
        model: str | None,
        worker: int | None = None,
    ) -> None:
        self._call, self._timeout, self._what = call, timeout, what
        self._model, self._worker = model, worker

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(FIRST_SECONDS, self._tell)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    def _tell(self) -> None:
        self._timer = self._loop.call_later(NEXT_SECONDS, self._tell)
        waited = self._loop.time() - self._since
        model, worker = self._model, self._worker
        say_waiting(self._call, waited, self._timeout, self._what(), model=model, worker=worker)
