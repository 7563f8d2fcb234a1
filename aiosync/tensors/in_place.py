"""Copies into the tensors of a target, which keep their memory. Must never import asyncio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch

from aiosync.tensors.buffer import FlatBuffer, Layout
from aiosync.tensors.copying import copy_tensors
from aiosync.tensors.devices import DeviceCopies, copies_by_device
from aiosync.tensors.views import Viewed

__all__ = ["QUICK_NBYTES", "InPlaceCopies"]

QUICK_NBYTES = 2**18
"""Most bytes that are quick to copy, all tensors together."""

# A larger copy is shared out to threads by torch, which is slower than one call for all.
_SMALL_NUMEL = 2**15
_is_cpu = attrgetter("is_cpu")


class InPlaceCopies:
    """The tensors of a target that are copied in place, and how.

    Args:
        copies: The tensors, with the leaf that each gets.
        keeps_views: Tensors on the CPU get new memory if something else views theirs, so that
            these views keep their values.

    Attributes:
        tensors: The tensors.
        is_quick: True if they are few and small, and on the CPU.
    """

    def __init__(self, copies: Sequence[tuple[torch.Tensor, int]], *, keeps_views: bool) -> None:
        self.tensors: list[torch.Tensor] = [tensor for tensor, _ in copies]
        self.is_quick: bool = (
            all(tensor.is_cpu and tensor.numel() < _SMALL_NUMEL for tensor in self.tensors)
            and self.nbytes <= QUICK_NBYTES
        )
        self._all = copies
        # From a flat buffer of the host those on accelerators are copied together, by device.
        self._on_devices: list[tuple[DeviceCopies, dict[int, torch.Tensor]]] = []
        self._on_host = copies
        self._keeps_views = keeps_views
        self.note_memory()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def allocate_on_devices(self, layout: Layout) -> None:
        """Allocate what copies from the host to accelerators need, as a copy must not fail."""
        # If several tensors get one leaf, the first is copied with the others on its device.
        first: dict[int, torch.Tensor] = {}
        for tensor, leaf in self._all:
            first.setdefault(leaf, tensor)
        self._on_devices = [*copies_by_device(layout, first.items())]
        there = {id(each) for _, tensors in self._on_devices for each in tensors.values()}
        self._on_host = [copy for copy in self._all if id(copy[0]) not in there]

    def note_memory(self) -> None:
        """Note the addresses of the tensors and the views of their memory, as they are now."""
        self._addresses: list[int] = list(map(torch.Tensor.data_ptr, self.tensors))
        own = [each for each in self.tensors if self._keeps_views and each.is_cpu and each.numel()]
        self._viewed: Viewed | None = Viewed(own) if own else None

    def are_in_place(self) -> bool:
        """Return True if each tensor still has the memory that was noted."""
        return list(map(torch.Tensor.data_ptr, self.tensors)) == self._addresses

    def find_viewed(self) -> list[torch.Tensor]:
        """Return the tensors that have to get new memory, as something else views theirs."""
        return [] if self._viewed is None else self._viewed.find()

    def write(
        self,
        sources: Sequence[torch.Tensor],
        flat: FlatBuffer | None,
        fresh: Mapping[int, torch.Tensor],
    ) -> None:
        """Copy the weights. Nothing is written if memory to transfer from is not found any more.

        Args:
            sources: One tensor for each leaf.
            flat: The buffer that the sources are views of; ``None`` for other tensors.
            fresh: New memory of tensors, by their ids: it gets the weights instead, and the caller
                gives it to the tensors.
        """
        # This may fail, so that it comes before anything is written.
        origins = [] if flat is None else [each.source_of(flat) for each, _ in self._on_devices]
        alone = self._all if flat is None else self._on_host
        given = [sources[leaf] for _, leaf in alone]
        targets = [fresh.get(id(tensor), tensor) for tensor, _ in alone]
        if given and self.is_quick and _are_on_cpu(given):
            torch._foreach_copy_(targets, given)
        else:
            copy_tensors(zip(targets, given, strict=True))
        if flat is not None:
            for origin, (copies, tensors) in zip(origins, self._on_devices, strict=True):
                targets_there = {leaf: fresh.get(id(each), each) for leaf, each in tensors.items()}
                copies.scatter(flat, origin, targets_there)
        # The copies do not tell autograd, and a backward pass must not use new weights silently.
        torch.autograd.graph.increment_version(self.tensors)


def _are_on_cpu(tensors: Iterable[torch.Tensor]) -> bool:
    return all(map(_is_cpu, tensors))
