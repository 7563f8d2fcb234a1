"""Views: which tensors have memory that something else views, and memory in its place.

What somebody keeps of a version, such as a ``state_dict()``, is made of views of the tensors of a
model. It keeps its values if these get new memory for the next version. This module must never
import asyncio or a transport.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from aiosync.tensors.buffer import use_count
from aiosync.tensors.walk import memory_key

__all__ = ["Viewed", "new_memory"]


class Viewed:
    """Tells which of some CPU tensors have memory that other tensors view as well.

    Keeps their memory alive. An array or a memoryview counts as the tensor that it keeps; a
    storage object, and what was handed over through DLPack, do not count.

    Args:
        tensors: The tensors. Those in one storage do not count as others for each other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._held = [tensor.detach() for tensor in tensors]  # else an address may be of others
        self._storages: list[int] = [each.untyped_storage()._cdata for each in self._held]
        known = Counter(self._storages)
        self._counts = [2 * known[each] + _own_count() for each in self._storages]

    def find(self) -> list[torch.Tensor]:
        """Return the tensors whose memory something else views: all, if torch cannot tell."""
        if use_count is None:
            return list(self.tensors)
        counts = list(map(use_count, self._storages))
        if counts == self._counts:
            return []
        each = zip(self.tensors, counts, self._counts, strict=True)
        return [tensor for tensor, count, own in each if count > own]


@functools.cache
def _own_count() -> int:
    """Return what torch counts for a storage, beside tensors, once its address was asked for."""
    tensor = torch.empty(1, device="cpu")
    address: int = tensor.untyped_storage()._cdata
    return 0 if use_count is None else use_count(address) - 1


def new_memory(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Make memory for CPU tensors, by their ids; those that are the same memory stay it."""
    made: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        key = memory_key(tensor)
        if key not in made:
            made[key] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return {id(tensor): made[memory_key(tensor)] for tensor in tensors}
