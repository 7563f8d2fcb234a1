"""Chunks of a payload on their way, and as tensors on the memory of the payload.

Drives torch; must not import asyncio or schemes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch

__all__ = ["CHUNK_NBYTES", "Chunk", "tensor_of"]

# A few on their way beat one big one, and many small ones too: see docs/benchmarks.md.
CHUNK_NBYTES = 4 * 2**20


class Chunk:
    """One chunk on its way, with the memory that it uses."""

    __slots__ = ("_target", "_tensor", "_work")

    def __init__(self, work: Any, tensor: torch.Tensor, target: list[memoryview] | None) -> None:
        self._work = work
        self._tensor = tensor
        self._target = target

    def wait(self, patience: timedelta) -> None:
        """Block until it is done; ``RuntimeError`` when it failed, or not in time."""
        self._work.wait(patience)
        if self._target is not None:
            source = self._tensor.cpu().numpy()
            offset = 0
            for view in self._target:
                np.copyto(np.frombuffer(view, np.uint8), source[offset : offset + view.nbytes])
                offset += view.nbytes


def tensor_of(chunk: list[memoryview]) -> torch.Tensor:
    """The bytes of a chunk: a view of one piece, or a copy of several."""
    if len(chunk) == 1:
        array = np.frombuffer(chunk[0], np.uint8)
        if not array.flags.writeable:
            array = np.asarray(_OnlyRead(array))  # torch warns of memory it must not write to
    else:
        array = np.concatenate([np.frombuffer(view, np.uint8) for view in chunk])
    return torch.from_numpy(array)


class _OnlyRead:
    """Passes read-only memory off as writable, to code that only reads it."""

    def __init__(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._array = array  # alive as long as what is made of this
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
