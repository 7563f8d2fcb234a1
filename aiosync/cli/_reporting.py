"""What a command that serves says, written by a thread of its own: who reads it cannot stop it.

A pipe that nobody reads and a paused terminal block whoever writes to them. Must not import torch
or typer.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from types import TracebackType
from typing import IO, TYPE_CHECKING, TextIO, cast

from rich.live import Live

if TYPE_CHECKING:
    from typing import Self

    from rich.console import Console, RenderableType

__all__ = ["Reporter"]

_END_SECONDS = 1.0
_KEPT_LINES = 500
"""Of the oldest lines that are not written yet, and of the newest."""


class Reporter:
    """Writes lines, and draws a table where stdout is a terminal. A context manager.

    Inside its context ``sys.stderr`` is what it writes as well, so that a log does not wait for a
    reader either. Its methods may be called in any thread, and never wait. When the context ends,
    the thread has one second for what is left; it is not waited for longer, also not by the
    interpreter.

    Args:
        console: On stdout, for the table.
    """

    def __init__(self, console: Console) -> None:
        self.drawing: bool = sys.stdout.isatty()
        self._console = console
        self._stderr = _Unbuffered(sys.stderr)
        self._redirected = contextlib.redirect_stderr(_Lines(self, sys.stderr))
        # Re-entrant: collecting garbage may print a warning at any time.
        self._changed = threading.Condition(threading.RLock())
        self._oldest: deque[str] = deque()
        self._newest: deque[str] = deque()
        self._dropped = 0
        self._picture: RenderableType | None = None
        self._live: Live | None = None
        self._drawn = False  # the picture is the last one
        self._ended = False
        self._thread = threading.Thread(target=self._main, name="aiosync-report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._redirected.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._redirected.__exit__(exc_type, exc, traceback)
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(_END_SECONDS)

    def say(self, line: str) -> None:
        """Write a line: above the table while there is one, and on stderr otherwise.

        Of the lines that nobody reads, the oldest and the newest are kept.
        """
        with self._changed:
            if not self._newest and len(self._oldest) < _KEPT_LINES:
                self._oldest.append(line)
            else:
                self._newest.append(line)
                if len(self._newest) > _KEPT_LINES:
                    self._newest.popleft()
                    self._dropped += 1
            self._changed.notify()

    def draw(self, picture: RenderableType, *, last: bool = False) -> None:
        """Show this instead of what was drawn before.

        Args:
            picture: Not changed afterwards.
            last: It stays, and lines go to stderr again.
        """
        with self._changed:
            self._picture, self._drawn = picture, last
            self._changed.notify()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._picture is not None or self._has_lines())
                picture, self._picture = self._picture, None
                line = self._next_line()
                last = self._drawn
                if picture is None and line is None:  # it has ended
                    return
            # Whatever blocks does so here, without the lock.
            if picture is not None and self._live is None:
                self._console.file = cast("TextIO", _Unbuffered(self._console.file))
                self._live = Live(
                    picture,
                    console=self._console,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            if line is not None:
                if self._live is None:
                    self._stderr.write(f"{line}\n")
                else:
                    self._live.console.print(line, markup=False)
            if picture is not None and self._live is not None:
                self._live.update(picture, refresh=True)
                if last:
                    self._live.stop()
                    self._live = None

    def _has_lines(self) -> bool:
        return self._ended or bool(self._oldest or self._newest)

    def _next_line(self) -> str | None:
        if self._oldest:
            return self._oldest.popleft()
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            return f"({dropped} lines were left out here: nobody read them)"
        return self._newest.popleft() if self._newest else None


class _InPlaceOf(io.TextIOBase):
    """Looks like another file."""

    _file: IO[str]

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute there
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()


class _Unbuffered(_InPlaceOf):
    """Writes to the descriptor of a file: the file's own lock and buffer stay free.

    The interpreter takes them when it ends. What cannot be written is dropped, as is everything
    after it: nobody reads it any more.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._broken = False

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self._write(text)
            except (OSError, ValueError):  # nobody reads it, or it was closed
                self._broken = True
        return len(text)

    def _write(self, text: str) -> None:
        try:
            fd = self._file.fileno()
        except io.UnsupportedOperation:  # in memory
            self._file.write(text)
            return
        left = memoryview(text.encode(self.encoding, "backslashreplace"))
        while left:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:  # whoever gave it to this process made it so
                select.select([], [fd], [])


class _Lines(_InPlaceOf):
    """What takes the place of ``sys.stderr``."""

    def __init__(self, reporter: Reporter, file: TextIO) -> None:
        self._reporter = reporter
        self._file = file
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._reporter.say(line)
        return len(text)
