"""The tensors of a target as they are now, and the places where they are.

Looking at a target changes nothing. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors.flatten import Signature
from aiosync.tensors.matching import Spot
from aiosync.tensors.values import (
    is_plain_tensordict,
    is_tensor_collection,
    is_tensordict_params,
)
from aiosync.tensors.walk import PLAIN, Found, ModuleTree, find_nested, memory_key, walk

__all__ = ["TargetTensors", "in_shared_memory", "is_ordinary"]


class _Extent(NamedTuple):
    """The memory of a tensor, from its first element to the last one.

    Attributes:
        leaves: The leaf that the tensor gets; empty if it gets none.
        memory: Its memory key.
    """

    device: str
    start: int
    end: int
    name: str
    leaves: list[int]
    memory: object

    @classmethod
    def of(cls, spot: Spot) -> _Extent:
        """Return the extent of a spot's tensor, which has elements."""
        tensor = spot.tensor
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        nbytes = (sum((n - 1) * step for n, step in steps) + 1) * tensor.element_size()
        start, leaves, memory = tensor.data_ptr(), spot.leaves[:1], memory_key(tensor)
        return cls(str(tensor.device), start, start + nbytes, spot.name, leaves, memory)

    def clashes_with(self, other: _Extent) -> bool:
        """Return True if weights for one of two overlapping tensors do not suit the other one."""
        differ = self.leaves != other.leaves or self.memory != other.memory
        return differ and bool(self.leaves or other.leaves)


class TargetTensors:
    """The tensors of a target, each object once.

    Args:
        target: A module, a TensorDict or a dict.

    Attributes:
        found: All tensors with their places, and the places of values.
        tree: The walk of a module; ``None`` for other targets.
        spots: The tensors with their places, and the leaves that they get.
        tensors: The tensors of the spots.

    Raises:
        ConfigError: The target is of an unsupported type, or has parameters that are not
            initialised yet.
        ManifestMismatch: It holds a tensor of a kind that cannot be a target.
    """

    def __init__(self, target: Any) -> None:
        self.found: Found
        self.tree: ModuleTree | None
        self.found, self.tree = walk(target)
        by_object: dict[int, Spot] = {}
        for place in self.found.places:
            by_object.setdefault(id(place.tensor), Spot(place.tensor, [])).places.append(place)
        self.spots: list[Spot] = list(by_object.values())
        self.tensors: list[torch.Tensor] = [spot.tensor for spot in self.spots]
        self._refuse_kinds()
        self._signature = Signature(self.tensors)
        # Tensors of a module leave shared memory in any case.
        kept = self.tensors if self.tree is None else []
        self._ordinary: list[torch.Tensor] = [*filter(is_ordinary, kept)]
        self._shared = list(map(in_shared_memory, self._ordinary))

    def _refuse_kinds(self) -> None:
        """Raise if a tensor, or its container, is of a kind that cannot get weights."""
        lazy = [spot.name for spot in self.spots if is_lazy(spot.tensor)]
        if lazy:
            raise ConfigError(
                f"the target is not initialised yet: {', '.join(lazy)}; run the lazy module first"
            )
        made = [
            place.name
            for place in self.found.places
            if is_tensor_collection(place.owner)
            and not (is_plain_tensordict(place.owner) or is_tensordict_params(place.owner))
        ]
        if made:
            raise ConfigError(
                f"cannot apply weights to {', '.join(made)}: of containers only TensorDict, "
                "TensorDictParams and dict can be targets, no lazy stack, part or tensorclass"
            )

    def are_those_of(self, target: Any) -> bool:
        """Return True if the target still has these tensors as they were. Cheap for a module."""
        tree = self.tree
        same = tree.unchanged() if tree is not None else self._are_in(target)
        return same and self._signature.same(self.tensors)

    def _are_in(self, target: Any) -> bool:
        """Return True if a container still has these tensors, and torch shares the same ones."""
        same = find_nested(target).same_as(self.found)
        return same and list(map(in_shared_memory, self._ordinary)) == self._shared

    def _extents(self) -> list[_Extent]:
        """Return the memory of all tensors that have some, in order."""
        ordinary = (spot for spot in self.spots if is_ordinary(spot.tensor))
        extents = [_Extent.of(spot) for spot in ordinary if spot.tensor.numel()]
        return sorted(extents, key=attrgetter("device", "start"))

    def refuse_overlapping(self) -> None:
        """Raise if a tensor that gets weights shares memory with one that gets others, or none.

        Raises:
            ManifestMismatch: Some do; all names are listed.
        """
        mismatched: dict[str, str] = {}
        before: list[_Extent] = []
        for other in self._extents():
            # A large tensor may reach beyond several others, so that its neighbour is not enough.
            before = [x for x in before if x.device == other.device and x.end > other.start]
            for one in filter(other.clashes_with, before):
                refused, cause = (other, one) if other.leaves else (one, other)
                why = f"has memory in common with {cause.name}: give each its own"
                mismatched.setdefault(refused.name, why)
            before.append(other)
        if mismatched:
            raise ManifestMismatch(mismatched=mismatched, hint="Nothing was changed.")


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a plain strided tensor or parameter with memory to write to."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.is_inference())
    )


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Return True if a CPU tensor is in memory that torch shares between processes."""
    return tensor.is_cpu and tensor.untyped_storage().is_shared()
