"""Views: finds tensors whose memory something else views, and makes new memory for them.

What a program keeps of a version, such as a ``state_dict()``, consists of views of the tensors of a
model. The views keep their values if these tensors get new memory for the next version. This module
must never import asyncio or a transport.
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
    """Finds, among some CPU tensors, those whose memory other tensors view, too.

    Keeps their memory alive. An array or a memoryview counts as the tensor that it keeps; a storage
    object, and a tensor that was itself handed over through DLPack, do not count.

    Args:
        tensors: The tensors. Those in one storage do not count as others for each other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        # Keeps the storages alive, as freed addresses may be reused by others.
        self._held = [tensor.detach() for tensor in tensors]
        self._storages: list[int] = [each.untyped_storage()._cdata for each in self._held]
        # A tensor and its detached one are two references to its storage.
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
    """Return by how much asking for the address of a storage raises torch's count of it."""
    tensor = torch.empty(1, device="cpu")
    address: int = tensor.untyped_storage()._cdata
    return 0 if use_count is None else use_count(address) - 1


def new_memory(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return new memory for CPU tensors, by their ids, with any content; tied ones get the same."""
    made: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        key = memory_key(tensor)
        if key not in made:
            made[key] = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
    return {id(tensor): made[memory_key(tensor)] for tensor in tensors}
