"""Leaves: the tensors of a model by dotted name, each once, and the values beside them.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiosync.tensors._finding import ExtractAs, Source, check_can_travel, find, group_tied
from aiosync.wire import encode_values

if TYPE_CHECKING:
    import torch

    from aiosync.tensors._tree import Found, Kind

__all__ = ["ExtractAs", "Leaf", "Leaves", "Source", "collect", "to_leaves"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor.

    Attributes:
        name: Dotted name, the first under which it was found.
        tensor: The live tensor, not a copy.
        kind: ``"param"`` or ``"buffer"``.
        aliases: The other names of the same tensor (tied parameters).
    """

    name: str
    tensor: torch.Tensor
    kind: Kind = "param"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaves:
    """What there is to send.

    Attributes:
        leaves: The tensors, each once.
        values: Non-tensor values by dotted name, of plain msgpack types.
    """

    leaves: tuple[Leaf, ...]
    values: dict[str, Any] = field(default_factory=dict)


def collect(source: Source, *, extract_as: ExtractAs = "tensordict") -> Leaves:
    """Find every tensor and value of a model.

    Nothing is copied: the leaves are the live tensors.

    Args:
        source: A module, a TensorDict, or a mapping of tensors, nested or with dotted keys.
            Wrappers that only add a prefix (``torch.compile``, ``DistributedDataParallel``) are
            looked through.
        extract_as: Of a module, ``"tensordict"`` takes all parameters and buffers, also those
            that are not persistent; ``"state_dict"`` what its ``state_dict()`` has. Both take
            the extra state of every submodule that defines one.

    Raises:
        ConfigError: The source is of another type, or holds something that cannot travel:
            tensors that are not initialised, on the meta device, sparse, quantised or sharded,
            and values that are neither tensors nor plain; or, for ``"tensordict"``, a module
            saves more in its ``state_dict()`` than parameters, buffers and extra state. The
            message names all such tensors.
    """
    return to_leaves(find(source, extract_as)[0])


def to_leaves(found: Found) -> Leaves:
    """Join the names of tied tensors, and check that everything can travel.

    Raises:
        ConfigError: Something cannot travel; all such tensors are named.
    """
    check_can_travel(found)
    leaves = []
    for positions in group_tied(found.tensors):
        first, *others = (found.places[position] for position in positions)
        tensor = found.tensors[positions[0]]
        aliases = tuple(place.name for place in others)
        leaves.append(Leaf(first.name, tensor, first.kind, aliases))
    return Leaves(tuple(leaves), encode_values(found.values) if found.values else {})
