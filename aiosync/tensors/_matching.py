"""Matching what was sent with what a target has, before anything is changed.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors._finding import group_tied, memory_key
from aiosync.tensors._hidden import Hidden, find_hidden, has_tensors
from aiosync.tensors._tensordict import is_tensor_collection, is_tensordict
from aiosync.tensors._tree import Found, ModuleTree, Place, find_nested, is_extra_state, unwrap
from aiosync.tensors._values import referenced
from aiosync.tensors.layout import Layout
from aiosync.wire import encode_values

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
        hidden: What modules save and load in a way of their own.
    """

    target: Any
    tree: ModuleTree | None
    found: Found
    spots: list[Spot]
    values: dict[str, Place]
    tensors: list[torch.Tensor] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)

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
        result.hidden = [hidden for hidden in find_hidden(tree) if hidden.loads]
    elif is_tensor_collection(target) or isinstance(target, Mapping):
        found = find_nested(target, pack=False)
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
        equal_values: Values that nothing can put into the target, and that it has as well.
        hidden: What modules load in a way of their own: which name was sent for each entry.
    """

    assignments: list[Assignment] = field(default_factory=list)
    values: list[tuple[Place, str]] = field(default_factory=list)
    tensor_values: list[tuple[Place, int]] = field(default_factory=list)
    equal_values: dict[str, Any] = field(default_factory=dict)
    hidden: list[tuple[Hidden, dict[str, str]]] = field(default_factory=list)


_LAYOUTS = (torch.strided, torch.sparse_coo, torch._mkldnn)  # type: ignore[attr-defined]
"""What can be copied into. Compressed sparse tensors take only as many elements as they have."""

_DTYPE_HINT = (
    " If wire_dtype= of the sender chose that dtype, name patterns there can choose another."
)
_STRICT_HINT = (
    " With strict=False on the receiving scheme, what both sides have is taken, and floating-point "
    "dtypes are cast; shapes have to be the same in any case"
)


def match(found: Survey, layout: Layout, values: Mapping[str, Any], *, strict: bool) -> Match:
    """Decide what goes where.

    A module whose ``state_dict()`` is not the standard one is also found by the names that it
    has there. Values that a hook adds there are accepted if they are the same on both sides. What a
    module saves and loads in a way of its own is matched like its tensors.

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
    sent = index.keys() | values.keys()
    aliases, own_values = _state_dict_names(found, sent - inner)
    missing: list[str] = []
    mismatched: dict[str, str] = {}
    taken: set[str] = set()
    for spot in found.spots:
        own = [place.name for place in spot.places]
        names = own + aliases.get(id(spot), [])
        positions = list(dict.fromkeys(index[name] for name in names if name in index))
        if not positions:
            if not spot.optional:
                missing.extend(own)
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
    for hidden in found.hidden:
        wanted: dict[str, str] = {}
        for key, own_value in hidden.entries.items():
            names = [prefix + key for prefix in hidden.prefixes]
            given = [name for name in names if name in sent]
            if not given:
                missing.extend(names if has_tensors(own_value) else ())
                continue
            taken.update(names)
            wanted[key] = given[0]
            if len({index[name] for name in given if name in index}) > 1:
                mismatched[given[1]] = f"is {given[0]} here, but was sent on its own"
            elif given[0] in index and isinstance(own_value, torch.Tensor):
                leaf, dtype = leaves[index[given[0]]], layout.dtypes[index[given[0]]]
                why = _difference(own_value, leaf.shape, leaf.dtype, dtype, strict=strict)
                if why:
                    mismatched[given[0]] = why
        if wanted:
            result.hidden.append((hidden, wanted))
    for name in own_values.keys() & values.keys() - taken:
        if own_values[name] == values[name]:
            result.equal_values[name] = values[name]
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


def _state_dict_names(found: Survey, sent: Set[str]) -> tuple[dict[int, list[str]], dict[str, Any]]:
    """Return what a module calls its tensors in its ``state_dict()`` only, and the values there.

    Empty where there are no hooks, and where what was sent has no unknown names: calling
    ``state_dict()`` may be slow.

    Returns:
        Names by the id of the spot, and values, packed, by name.
    """
    tree = found.tree
    known = {place.name for place in found.found.places} | found.values.keys()
    if tree is None or sent <= known or tree.standard_state_dict():
        return {}, {}
    try:
        own = find_nested(_own_state_dict(tree.root))
        own_values = encode_values(own.values) if own.values else {}
    except ConfigError:  # holds what cannot travel; then nobody has sent it either
        return {}, {}
    # By memory as well: without keep_vars, the tensors are other objects.
    by_object = {id(spot.tensor): spot for spot in found.spots}
    by_memory = {memory_key(spot.tensor): spot for spot in found.spots}
    by_memory.pop(None, None)
    names: dict[int, list[str]] = {}
    for place, tensor in zip(own.places, own.tensors, strict=True):
        spot = by_object.get(id(tensor)) or by_memory.get(memory_key(tensor))
        if spot is not None and place.name not in known:
            names.setdefault(id(spot), []).append(place.name)
    return names, own_values


def _own_state_dict(module: nn.Module) -> Any:
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:  # overridden, without the argument
        return module.state_dict()


def inner_names(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the leaves that packed values refer to."""
    return frozenset(name for value in values.values() for name in referenced(value))


def _difference(
    tensor: torch.Tensor, shape: tuple[int, ...], name: str, dtype: torch.dtype, *, strict: bool
) -> str:
    """Say in words what does not fit; empty if it fits."""
    parts = []
    if tensor.is_nested or tensor.layout not in _LAYOUTS:
        layout = "nested" if tensor.is_nested else tensor.layout
        return f"the target has the layout {layout}, which cannot be written"
    if _overlaps_itself(tensor):
        parts.append("the target is an expanded tensor, whose elements share memory")
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


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return is_ordinary(tensor) and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def is_shared(tensor: Any) -> bool:
    """Whether a CPU tensor is in memory that torch shares between processes."""
    return tensor.device.type == "cpu" and bool(tensor.is_shared())


def shares_memory_partly(spots: Iterable[Spot]) -> set[int]:
    """Return the ids of CPU tensors whose storage also holds another tensor of the target.

    Tensors that are the very same elements do not count.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for spot in spots:
        tensor = spot.tensor
        if is_ordinary(tensor) and tensor.device.type == "cpu" and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return {
        id(tensor)
        for tensors in by_storage.values()
        if len(tensors) > 1 and len(group_tied(tensors)) > 1
        for tensor in tensors
    }


def overlapping(copied: Sequence[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
    """Return those plain tensors and leaves whose memory lies in part in that of another leaf's."""
    extents: list[tuple[str, int, int, int, int, Any]] = []
    for tensor, leaf in copied:
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            stop = start + (last + 1) * tensor.element_size()
            extents.append((str(tensor.device), start, stop, len(extents), leaf, tensor))
    result: list[tuple[torch.Tensor, int]] = []
    group: list[tuple[torch.Tensor, int]] = []
    here, end = "", 0
    for device, start, stop, _, leaf, tensor in [*sorted(extents), ("none", 0, 0, 0, 0, None)]:
        if device != here or start >= end:
            if len({each for _, each in group}) > 1:
                result += group
            group, here, end = [], device, 0
        group.append((tensor, leaf))
        end = max(end, stop)
    return result


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided tensor or parameter with memory."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
    )
