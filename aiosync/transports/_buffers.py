"""Memory that payloads are sent from and land in, seen as bytes.

Must not import torch, asyncio, or anything above ``transports``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from aiosync.errors import LocalProtocolError
from aiosync.transports.base import Lender
from aiosync.types import Limits
from aiosync.wire import Message

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["chunks_of", "copy_bytes", "flat_view", "take_buffers"]


def flat_view(buffer: object) -> memoryview:
    """A byte view of a contiguous buffer, whatever its format and shape."""
    view = memoryview(cast("bytes", buffer))
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B")


def take_buffers(
    into: Lender | None, message: Message, nbytes: int, limits: Limits
) -> list[memoryview]:
    """Borrow the buffers for a payload, or allocate them when nobody lends.

    Raises:
        LocalProtocolError: They are not as large as the payload, or nobody lends for one that is
            too large to allocate.
    """
    if into is not None:
        views = [*map(flat_view, into(message, nbytes))]
        total = sum(map(len, views))
        if total != nbytes:
            raise LocalProtocolError(f"lent {total} bytes for a payload of {nbytes}")
        return views
    if nbytes > limits.max_buffer_nbytes:
        raise LocalProtocolError(
            f"a payload of {nbytes} bytes needs lent buffers: recv(into=...) allocates at most "
            f"{limits.max_buffer_nbytes} bytes itself (Limits.max_buffer_nbytes)"
        )
    return [memoryview(bytearray(nbytes))]


def chunks_of(pieces: list[memoryview], chunk_nbytes: int) -> Iterator[list[memoryview]]:
    """Cut a payload into chunks; each is a list of views, of one if it lies in one piece."""
    chunk: list[memoryview] = []
    room = chunk_nbytes
    for piece in pieces:
        offset = 0
        while offset < piece.nbytes:
            step = min(room, piece.nbytes - offset)
            chunk.append(piece[offset : offset + step])
            offset += step
            room -= step
            if not room:
                yield chunk
                chunk, room = [], chunk_nbytes
    if chunk:
        yield chunk


def copy_bytes(sources: Iterable[NDArray[np.uint8]], targets: Iterable[memoryview]) -> None:
    """Copy, however the two sides are cut into pieces; without the GIL."""
    left = iter(targets)
    target = np.empty(0, np.uint8)
    for source in sources:
        rest = source
        while rest.size:
            while not target.size:
                target = np.frombuffer(next(left), np.uint8)
            step = min(rest.size, target.size)
            np.copyto(target[:step], rest[:step])
            rest, target = rest[step:], target[step:]
