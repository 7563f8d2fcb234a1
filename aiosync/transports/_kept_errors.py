"""Errors that are kept.

Must not import torch, anyio or anything above ``transports``.
"""

from __future__ import annotations

from typing import TypeVar

from aiosync.errors import AiosyncError, ProtocolError, TransportError

__all__ = ["LinkError", "again", "without_frames"]

LinkError = TransportError | ProtocolError
_Error = TypeVar("_Error", bound=BaseException)


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


def again(error: _Error) -> _Error:
    """A fresh exception for each raise of one that is kept: tracebacks would pile up on it."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh
