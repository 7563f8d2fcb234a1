"""What ``aiosync serve`` does: runs a weight server until a signal ends it, and shows it.

Must not import typer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from aiosync.cli._options import INTERRUPTED, plain
from aiosync.cli._status import models_table, refusal_line, version_line
from aiosync.server import WeightServer

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import RenderableType

__all__ = ["run_server"]

_LOOK_SECONDS = 0.25


async def run_server(make: Callable[[], WeightServer], errors: Console) -> int:
    """Serve until SIGINT or SIGTERM, or until the server breaks.

    Prints the address, and nothing else, as the first line of stdout: scripts wait for it.

    Args:
        make: Makes the server, on this loop.
        errors: On stderr, for one line for each new version where stdout is no terminal, and for
            one for each version that could not be stored.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C; 1 after either if a version that came
        before could not be stored at the end.

    Raises:
        ConfigError: See :class:`aiosync.server.WeightServer`.
        StoreError: A file of the store is damaged.
    """
    log = _Log()
    with _Signals() as signals:
        try:
            server = make()
            try:
                async with server:
                    sys.stdout.write(f"{server.url}\n")
                    sys.stdout.flush()
                    await _watch(server, errors, log)
            finally:
                late = log.refused(server.status())  # of what was written last
        except asyncio.CancelledError:
            if signals.first is None:
                raise
    for line in late:
        errors.print(line, markup=False)
    if signals.first == signal.SIGINT:
        errors.print("Stopped by Ctrl-C.")
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
            os._exit(128 + number)
        self.first = number
        assert self._task is not None
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)


async def _watch(server: WeightServer, errors: Console, log: _Log) -> None:
    """Show what the server has, until it ends."""
    console = Console(highlight=False)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def show() -> None:
        status = server.status()
        if live is not None:
            live.update(_render(status), refresh=True)
        lines = log.refused(status) if live is not None else log.changed(status)
        for line in lines:
            errors.print(line, markup=False)

    ended = asyncio.ensure_future(server.wait_closed())
    with live or contextlib.nullcontext():
        try:
            while not ended.done():
                show()
                await asyncio.wait({ended}, timeout=_LOOK_SECONDS)
            await ended
        finally:
            ended.cancel()
            show()


def _render(status: Mapping[str, Any]) -> RenderableType:
    if not status["models"]:
        return Text(f"{plain(status['connections'])} connections, no models yet; Ctrl-C ends it")
    table = models_table(status)
    table.caption = f"{plain(status['connections'])} connections; Ctrl-C ends it"
    table.caption_justify = "left"
    return table


class _Log:
    """One line for each change that is seen; at most one for each look."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], Any] = {}

    def refused(self, status: Mapping[str, Any]) -> list[str]:
        """Lines about what could not be stored since the last call."""
        return [
            f"{time.strftime('%H:%M:%S')} {refusal_line(model)}"
            for model in status["models"]
            if self._is_new(model, "refused", model["refused"]) and model["refused"]
        ]

    def changed(self, status: Mapping[str, Any]) -> list[str]:
        """Lines about new versions, and about what could not be stored, since the last call."""
        versions = [
            f"{time.strftime('%H:%M:%S')} {version_line(model)}"
            for model in status["models"]
            if self._is_new(model, "version", (model["epoch"], model["version"]))
            and model["version"]
        ]
        return versions + self.refused(status)

    def _is_new(self, model: Mapping[str, Any], name: str, value: Any) -> bool:
        key = model["model_id"], name
        before, self._seen[key] = self._seen.get(key), value
        return bool(before != value)
