"""The bytes of a payload where they lie now: in the tensors themselves, without a copy.

For links that carry bytes, while the tensors are not allowed to change. This module must never
import asyncio or a transport.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiosync.tensors.copying import LARGE_NBYTES, as_bytes, is_plain_cpu
from aiosync.wire import ALIGNMENT

if TYPE_CHECKING:
    import torch

    from aiosync.tensors.layout import Layout

__all__ = ["LiveBytes"]

_PADDING = memoryview(bytes(ALIGNMENT))


class LiveBytes:
    """A payload made of views of tensors, and of the zeros between them.

    Args:
        layout: Where each leaf goes.
        tensors: The leaves, in order: contiguous and on the CPU.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []
        at = 0
        for leaf, tensor in zip(layout.manifest.leaves, tensors, strict=True):
            if leaf.nbytes:
                self._add(_PADDING[: leaf.offset - at], at)
                self._add(as_bytes(tensor).data, leaf.offset)
                at = leaf.offset + leaf.nbytes
        self._add(_PADDING[: layout.nbytes - at], at)

    @classmethod
    def of(cls, layout: Layout, tensors: Sequence[torch.Tensor]) -> LiveBytes | None:
        """The same, or ``None`` where a copy is better.

        That is for tensors that are not one block of memory of this process, and for many small
        ones, as each piece costs a little of every write.
        """
        if layout.nbytes < LARGE_NBYTES * max(1, len(tensors)):
            return None
        if not all(is_plain_cpu(tensor) for tensor in tensors):
            return None
        return cls(layout, tensors)

    def _add(self, piece: memoryview, start: int) -> None:
        if len(piece):
            self._starts.append(start)
            self._pieces.append(piece)

    def views(self, start: int, stop: int) -> list[memoryview]:
        """The bytes from ``start`` to ``stop``, as pieces in order."""
        found = []
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self._pieces) and self._starts[index] < stop:
            at, piece = self._starts[index], self._pieces[index]
            part = piece[max(0, start - at) : stop - at]
            if len(part):
                found.append(part)
            index += 1
        return found
