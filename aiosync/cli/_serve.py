"""What ``aiosync serve`` does: runs a weight server until a signal ends it, and shows it.

Must not import typer.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from aiosync.cli._options import INTERRUPTED, plain
from aiosync.cli._reporting import Reporter
from aiosync.cli._status import models_table, refusal_line, version_line
from aiosync.server import WeightServer

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import RenderableType

__all__ = ["run_server"]

_LOOK_SECONDS = 0.25


async def run_server(make: Callable[[], WeightServer], reporter: Reporter) -> int:
    """Serve until SIGINT or SIGTERM, or until the server breaks.

    Prints the address, and nothing else, as the first line of stdout: scripts wait for it. What
    comes after it goes through the reporter, so that serving does not wait for who reads it.

    Args:
        make: Makes the server, on this loop.
        reporter: For the table on a terminal, for one line for each new version where there is
            none, and for one for each version that could not be stored.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C; 1 after either if a version that came
        before could not be stored at the end.

    Raises:
        ConfigError: See :class:`aiosync.server.WeightServer`.
        StoreError: A file of the store is damaged.
    """
    refusals = _Refusals()
    late: list[str] = []
    with _Signals() as signals:
        try:
            server = make()
            try:
                async with server:
                    sys.stdout.write(f"{server.url}\n")
                    sys.stdout.flush()
                    await _watch(server, reporter, refusals)
            finally:
                late = refusals.new(server.status())  # of what was written last
        except asyncio.CancelledError:
            if signals.first is None:
                raise
    for line in late:
        reporter.say(line)
    if signals.first == signal.SIGINT:
        reporter.say("Stopped by Ctrl-C.")
    if late:
        return 1
    return INTERRUPTED if signals.first == signal.SIGINT else 0


class _Signals:
    """Turns the first SIGINT or SIGTERM into a cancellation; the second ends the process.

    Handlers of Python and not of the loop: they run although the loop is busy.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._task: asyncio.Task[Any] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.first is not None:
            if sys.stdout.isatty() and select.select([], [1], [], 0)[1]:  # not a paused one
                os.write(1, b"\x1b[?25h\n")  # the live table hides the cursor
            os._exit(128 + number)
        self.first = number
        assert self._task is not None
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)


async def _watch(server: WeightServer, reporter: Reporter, refusals: _Refusals) -> None:
    """Show what the server has, until it ends."""
    log = _Log(reporter)

    def show(*, last: bool = False) -> None:
        status = server.status()
        if not reporter.drawing:
            log(status)
        for line in refusals.new(status):
            reporter.say(line)
        if reporter.drawing:
            reporter.draw(_render(status), last=last)

    ended = asyncio.ensure_future(server.wait_closed())
    try:
        while not ended.done():
            show()
            await asyncio.wait({ended}, timeout=_LOOK_SECONDS)
        await ended
    finally:
        ended.cancel()
        show(last=True)


def _render(status: Mapping[str, Any]) -> RenderableType:
    if not status["models"]:
        return Text(f"{plain(status['connections'])} connections, no models yet; Ctrl-C ends it")
    table = models_table(status)
    table.caption = f"{plain(status['connections'])} connections; Ctrl-C ends it"
    table.caption_justify = "left"
    return table


class _Refusals:
    """What could not be stored, one line for each look that finds something new."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def new(self, status: Mapping[str, Any]) -> list[str]:
        """Return the lines about what was refused since the last call."""
        lines = []
        for model in status["models"]:
            model_id, refused = model["model_id"], model["refused"]
            before, self._seen[model_id] = self._seen.get(model_id, 0), refused
            if refused > before:
                lines.append(f"{time.strftime('%H:%M:%S')} {refusal_line(model)}")
        return lines


class _Log:
    """One line for each change of a version that is seen; at most one for each look."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._seen: dict[str, tuple[int, int]] = {}

    def __call__(self, status: Mapping[str, Any]) -> None:
        for model in status["models"]:
            now = model["epoch"], model["version"]
            if not model["version"] or self._seen.get(model["model_id"]) == now:
                continue
            self._seen[model["model_id"]] = now
            self._reporter.say(f"{time.strftime('%H:%M:%S')} {version_line(model)}")
