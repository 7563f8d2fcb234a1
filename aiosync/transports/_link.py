"""What the two directions of one framed link share: its loop, its name and how it ended.

Must not import torch, anyio or anything above ``transports``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiosync.errors import AiosyncError, ProtocolError, TransportClosed, TransportError

__all__ = ["LinkError", "LinkState", "again", "wake", "without_frames"]

LinkError = TransportError | ProtocolError
_Error = TypeVar("_Error", bound=BaseException)


class LinkState:
    """Open, ended with an error (sticky), or closed by this side."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.name = name
        self.closed = False
        self.error: LinkError | None = None
        self.on_end: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        """Whether no operation can succeed any more."""
        return self.closed or self.error is not None

    def check(self) -> None:
        """Raise what ended the link, if anything did."""
        if self.closed:
            raise TransportClosed(f"this end of the link to {self.name} was closed")
        if self.error is not None:
            raise again(self.error)

    def fail(self, error: LinkError) -> None:
        """End the link with ``error``; every waiter and every later operation raises it."""
        if self.ended:
            return
        self.error = without_frames(error)
        for callback in self.on_end:
            callback()

    def describe(self) -> str:
        """One word for a repr."""
        if self.closed:
            return "closed"
        return type(self.error).__name__ if self.error else "open"


def without_frames(error: _Error) -> _Error:
    """Drop the tracebacks of an error that is going to be kept.

    Their frames, and those that called them, would keep alive what was in hand: buffers of the
    size of a model. A traceback that shows a bug stays.
    """
    link: BaseException | None = error
    while isinstance(link, (AiosyncError, OSError)):
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def wake(waiter: asyncio.Future[None] | None) -> None:
    """Let the task that waits on ``waiter`` look again."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def again(error: _Error) -> _Error:
    """A fresh exception for each raise of one that is kept: tracebacks would pile up on it."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh
