"""Matching what was sent with what a target has, before anything is changed.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors._finding import memory_key
from aiosync.tensors._tensordict import is_tensor_collection, is_tensorclass, is_tensordict
from aiosync.tensors._tree import Found, ModuleTree, Place, find_nested, is_extra_state, unwrap
from aiosync.tensors._values import referenced
from aiosync.tensors.layout import Layout

__all__ = ["Assignment", "Match", "Spot", "Survey", "match", "survey"]


@dataclass(slots=True, eq=False)
class Spot:
    """One tensor of the target, with every place where it is found.

    Attributes:
        tensor: The tensor.
        places: At least one.
        optional: A buffer that is not part of ``state_dict()``: the weights may lack it, or have
            it in more precision.
    """

    tensor: torch.Tensor
    places: list[Place]
    optional: bool

    @property
    def name(self) -> str:
        """Dotted name of the first place."""
        return self.places[0].name


@dataclass(slots=True)
class Survey:
    """What a target has.

    Attributes:
        target: The module (unwrapped), TensorDict or dict.
        tree: Of a module; ``None`` otherwise.
        found: Everything that was found.
        spots: The tensors, each object once.
        values: Places of values that are not tensors; extra states of modules included.
        tensors: The tensors of ``spots``, in order.
    """

    target: Any
    tree: ModuleTree | None
    found: Found
    spots: list[Spot]
    values: dict[str, Place]
    tensors: list[torch.Tensor] = field(default_factory=list)

    def unchanged_in(self, target: Any) -> bool:
        """Whether ``target``, of which this is, has the very same objects. Cheap for a module."""
        if self.tree is not None:
            return unwrap(target) is self.tree.root and self.tree.unchanged()
        return find_nested(self.target, pack=False).same_as(self.found)


def survey(target: Any) -> Survey:
    """Find every tensor of a target.

    Raises:
        ConfigError: The target is of an unsupported type, or has parameters that are not
            initialised yet.
    """
    if isinstance(target, nn.Module) and not is_tensordict(target):
        tree = ModuleTree(unwrap(target))
        found = tree.found
        values = {name: Place(name, module, name, "buffer") for name, module in tree.extra.items()}
        result = Survey(tree.root, tree, found, [], values)
    elif is_tensor_collection(target) or isinstance(target, Mapping):
        found = find_nested(target, pack=False)
        again = find_nested(target, pack=False)
        made = [
            place.name
            for place, one, other in zip(found.places, found.tensors, again.tensors, strict=True)
            if one is not other or is_tensorclass(place.owner)
        ]
        if made:
            raise ConfigError(
                f"cannot apply weights to {', '.join(made)}: of containers only TensorDict, "
                "TensorDictParams and dict can be targets, no lazy stack, part or tensorclass"
            )
        result = Survey(target, None, found, [], found.value_places)
    else:
        raise ConfigError(
            f"cannot apply weights to a {type(target).__module__}.{type(target).__qualname__}; "
            "supported: torch.nn.Module, TensorDict and dict"
        )
    lazy = [
        place.name
        for place, tensor in zip(found.places, found.tensors, strict=True)
        if is_lazy(tensor)
    ]
    if lazy:
        raise ConfigError(
            f"the target is not initialised yet: {', '.join(lazy)}; run the lazy module once first"
        )
    by_object: dict[int, Spot] = {}
    for place, tensor in zip(found.places, found.tensors, strict=True):
        spot = by_object.get(id(tensor))
        if spot is None:
            by_object[id(tensor)] = Spot(tensor, [place], not place.persistent)
        else:
            spot.places.append(place)
            spot.optional = spot.optional and not place.persistent
    result.spots = list(by_object.values())
    result.tensors = [spot.tensor for spot in result.spots]
    return result


@dataclass(slots=True, eq=False)
class Assignment:
    """One tensor of the target and the leaf that it gets.

    Attributes:
        spot: The tensor of the target.
        leaf: Index of the leaf.
        equal: Further leaves that must have the same bytes: they were sent separately for
            names that are tied here.
    """

    spot: Spot
    leaf: int
    equal: tuple[int, ...] = ()


@dataclass(slots=True)
class Match:
    """What goes where.

    Attributes:
        assignments: For the tensors.
        values: (place, name) for each value that is applied.
        tensor_values: (place, leaf index) for extra states of modules that are bare tensors.
    """

    assignments: list[Assignment] = field(default_factory=list)
    values: list[tuple[Place, str]] = field(default_factory=list)
    tensor_values: list[tuple[Place, int]] = field(default_factory=list)


_DTYPE_HINT = (
    " If wire_dtype= of the sender chose that dtype, name patterns there can choose another."
)
_STRICT_HINT = (
    " With strict=False on the receiving scheme, what both sides have is taken, and floating-point "
    "dtypes are cast; shapes have to be the same in any case"
)


def match(found: Survey, layout: Layout, values: Mapping[str, Any], *, strict: bool) -> Match:
    """Decide what goes where.

    Args:
        found: What the target has.
        layout: What was sent.
        values: Non-tensor values that were sent, packed.
        strict: Refuse names that only one side has, and other dtypes. Buffers that are not part
            of ``state_dict()`` may be missing, and may be rounded.

    Raises:
        ManifestMismatch: The weights do not fit; all names are listed.
    """
    leaves = layout.manifest.leaves
    index = {leaf.name: position for position, leaf in enumerate(leaves)}
    for position, leaf in enumerate(leaves):
        for alias in leaf.aliases:
            index[alias] = position
    result = Match()
    inner = inner_names(values)
    missing: list[str] = []
    mismatched: dict[str, str] = {}
    taken: set[str] = set()
    for spot in found.spots:
        names = [place.name for place in spot.places]
        positions = list(dict.fromkeys(index[name] for name in names if name in index))
        if not positions:
            if not spot.optional:
                missing.extend(names)
            continue
        taken.update(names)
        for position in positions:
            leaf = leaves[position]
            name = next(name for name in names if index.get(name) == position)
            dtype = layout.dtypes[position]
            # A single wire_dtype does not round these: a model in less precision does.
            exact = strict and not (spot.optional and spot.tensor.dtype.itemsize <= dtype.itemsize)
            why = _difference(spot.tensor, leaf.shape, leaf.dtype, dtype, strict=exact)
            if why:
                mismatched[name] = why
        result.assignments.append(Assignment(spot, positions[0], tuple(positions[1:])))
    for name, place in found.values.items():
        if name in values:
            result.values.append((place, name))
        elif name in index and found.tree is not None:
            result.tensor_values.append((place, index[name]))
        elif not is_extra_state(name):
            missing.append(name)
            continue
        taken.add(name)
    unexpected = [name for name in [*index, *values] if name not in taken and name not in inner]
    lost = sorted(inner - index.keys())
    if mismatched or lost or (strict and (missing or unexpected)):
        raise ManifestMismatch(
            missing=[*missing, *lost] if strict else lost,
            unexpected=unexpected if strict else (),
            mismatched=mismatched,
            hint=f"Nothing was changed.{_hint(mismatched) if strict else ''}",
        )
    if not taken and missing and unexpected:
        raise ManifestMismatch(
            missing=missing, unexpected=unexpected, hint="They have no name in common."
        )
    return result


def inner_names(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the leaves that packed values refer to."""
    return frozenset(name for value in values.values() for name in referenced(value))


def _difference(
    tensor: torch.Tensor, shape: tuple[int, ...], name: str, dtype: torch.dtype, *, strict: bool
) -> str:
    """Say in words what does not fit; empty if it fits."""
    if not _can_be_written(tensor):
        kind = type(tensor)
        return (
            f"the target is a {kind.__module__}.{kind.__qualname__} ({tensor.layout}), and only "
            "plain strided tensors and parameters, that are no conjugate, negative, expanded or "
            "inference tensors, take weights: use load= instead of model="
        )
    parts = []
    if tuple(tensor.shape) != shape:
        parts.append(f"expected shape {tuple(tensor.shape)}, got {shape}")
    if tensor.dtype is not dtype:
        castable = (tensor.dtype.is_floating_point and dtype.is_floating_point) or (
            tensor.dtype.is_complex and dtype.is_complex
        )
        if strict or not castable:
            expected = str(tensor.dtype).removeprefix("torch.")
            parts.append(f"expected dtype {expected}, got {name}")
    return "; ".join(parts)


def _hint(mismatched: Mapping[str, str]) -> str:
    """What may help where ``strict=True`` refused something."""
    dtypes = any("expected dtype" in why for why in mismatched.values())
    return (_DTYPE_HINT if dtypes else "") + _STRICT_HINT


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that targets may have; on the meta device it gets memory."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and all(step or n < 2 for step, n in zip(tensor.stride(), tensor.shape, strict=True))
    )


def is_shared(tensor: Any) -> bool:
    """Whether a CPU tensor is in memory that torch shares between processes."""
    return tensor.device.type == "cpu" and bool(tensor.is_shared())


def refuse_overlapping(found: Survey, assignments: Sequence[Assignment]) -> None:
    """Raise if a tensor that gets weights has memory in common with one that gets others.

    Raises:
        ManifestMismatch: All such tensors are named.
    """
    leaves = {id(each.spot): each.leaf for each in assignments}
    extents = []
    for spot in found.spots:
        tensor = spot.tensor
        if is_ordinary(tensor) and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            nbytes = (sum((n - 1) * step for n, step in steps) + 1) * tensor.element_size()
            start, key = tensor.data_ptr(), (leaves.get(id(spot)), memory_key(tensor))
            extents.append((str(tensor.device), start, start + nbytes, spot.name, key))
    mismatched = {}
    extents.sort(key=itemgetter(0, 1))
    for one, other in pairwise(extents):
        if one[0] == other[0] and other[1] < one[2] and one[4] != other[4]:
            mismatched[other[3]] = f"has memory in common with {one[3]}: give each its own"
    if mismatched:
        raise ManifestMismatch(mismatched=mismatched, hint="Nothing was changed.")


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided tensor or parameter with memory."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
    )
