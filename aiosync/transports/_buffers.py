"""Memory that payloads are sent from and land in, seen as bytes.

Must not import torch, asyncio, or anything above ``transports``.
"""

from __future__ import annotations

from typing import Any, cast

from aiosync.errors import LocalProtocolError
from aiosync.transports.base import Lender
from aiosync.types import Limits
from aiosync.wire import Message

__all__ = ["flat_view", "take_buffers"]


def flat_view(buffer: object) -> memoryview:
    """A byte view of a contiguous buffer, whatever its format and shape."""
    view = memoryview(cast("bytes", buffer))
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B")


def take_buffers(into: Lender | None, message: Message, nbytes: int, limits: Limits) -> list[Any]:
    """Borrow the buffers for a payload, or allocate them when nobody lends."""
    if into is not None:
        return list(into(message, nbytes))
    if nbytes > limits.max_buffer_nbytes:
        raise LocalProtocolError(
            f"a payload of {nbytes} bytes needs lent buffers: recv(into=...) allocates at most "
            f"{limits.max_buffer_nbytes} bytes itself (Limits.max_buffer_nbytes)"
        )
    return [bytearray(nbytes)]
