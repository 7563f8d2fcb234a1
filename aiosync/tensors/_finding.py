"""Finding the tensors of a source, those that are tied, and those that cannot travel.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from aiosync.errors import ConfigError
from aiosync.tensors._tensordict import is_tensor_collection, is_tensordict
from aiosync.tensors._tree import Found, ModuleTree, find_nested, is_extra_state, unwrap
from aiosync.tensors.dtypes import dtype_name

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = [
    "ExtractAs",
    "Source",
    "check_can_travel",
    "find",
    "find_in_tree",
    "group_tied",
    "is_fake",
    "is_wrapper",
    "memory_key",
    "refuse_hidden",
]

ExtractAs: TypeAlias = Literal["tensordict", "state_dict"]
"""What of a module is sent: everything, or what its ``state_dict()`` holds."""

Source: TypeAlias = "nn.Module | TensorDictBase | Mapping[str, Any]"
"""Where weights are read from. A mapping may be nested or have dotted keys."""


def find(source: Source, extract_as: ExtractAs) -> tuple[Found, ModuleTree | None]:
    """Walk a source. Returns what was found, and the tree if the source is a plain module.

    Raises:
        ConfigError: As for :func:`collect`.
    """
    if isinstance(source, nn.Module) and not is_tensordict(source):
        tree = ModuleTree(unwrap(source))
        if extract_as == "tensordict":
            refuse_hidden(tree)
        return find_in_tree(tree, extract_as), tree
    if is_tensor_collection(source) or isinstance(source, Mapping):
        return find_nested(source), None
    raise ConfigError(
        f"cannot take weights from a {type(source).__module__}.{type(source).__qualname__}; "
        "supported: torch.nn.Module, TensorDict, and a mapping of tensors (nested, or a state_dict)"
    )


def find_in_tree(tree: ModuleTree, extract_as: ExtractAs) -> Found:
    """Select what of a module is sent, and pack its extra states.

    Raises:
        ConfigError: An extra state cannot travel.
    """
    if extract_as == "state_dict" and not tree.standard_state_dict():
        found = find_nested(tree.root.state_dict())
        kinds = {place.name: place.kind for place in tree.found.places}
        found.places = [
            place._replace(kind=kinds.get(place.name, place.kind)) for place in found.places
        ]
        return found
    found = Found()
    for place, tensor in zip(tree.found.places, tree.found.tensors, strict=True):
        if place.persistent or extract_as == "tensordict":
            found.add(place, tensor)
    for name, module in tree.extra.items():
        found.add_value(name, module.get_extra_state())
    return found


def refuse_hidden(tree: ModuleTree) -> None:
    """Raise if a module saves more than its parameters, buffers and extra state.

    Raises:
        ConfigError: All such entries of the ``state_dict()`` are named.
    """
    shown = {place.name for place in tree.found.places}
    hidden: list[str] = []
    for module in tree.modules:
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
            state: dict[str, Any] = {}
            module._save_to_state_dict(state, tree.prefixes[id(module)][0], True)
            hidden += [n for n, v in state.items() if v is not None and not is_extra_state(n)]
    hidden = [name for name in hidden if name not in shown]
    if hidden:
        raise ConfigError(
            "these weights are neither parameters nor buffers, only the state_dict() has them: "
            f"{', '.join(map(repr, hidden))}; give the sender strategy='state_dict' and the worker "
            "load= instead of model=, or register them as buffers"
        )


def group_tied(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the positions of tensors that are one and the same, in order of first occurrence."""
    groups: list[list[int]] = []
    by_object: dict[int, int] = {}
    by_memory: dict[Any, int] = {}
    for position, tensor in enumerate(tensors):
        group = by_object.get(id(tensor))
        key = memory_key(tensor) if group is None else None
        if group is None and key is not None:
            group = by_memory.get(key)
        if group is None:
            group = len(groups)
            groups.append([])
        if key is not None:
            by_memory.setdefault(key, group)
        by_object[id(tensor)] = group
        groups[group].append(position)
    return groups


def memory_key(tensor: torch.Tensor) -> Any:
    """Return a key that two tensors share if they are the same elements in memory, or ``None``."""
    if (
        is_lazy(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_meta
        or is_wrapper(tensor)
        or tensor.numel() == 0
    ):
        return None
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def is_wrapper(tensor: Any) -> bool:
    """Whether a subclass only wraps other tensors, without memory of its own."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch's ``FakeTensorMode``, which has no values."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def check_can_travel(found: Found) -> None:
    """Check every tensor and every name.

    Raises:
        ConfigError: Naming every tensor that cannot travel, and why.
    """
    problems = []
    names: set[str] = set()
    for place, tensor in zip(found.places, found.tensors, strict=True):
        why = obstacle(tensor)
        if why:
            problems.append(f"{place.name!r} {why}")
        if not place.name:
            problems.append("a tensor has an empty name")
        elif place.name in names or place.name in found.values:
            problems.append(f"the name {place.name!r} occurs twice")
        names.add(place.name)
    if problems:
        raise ConfigError(f"these weights cannot be sent: {'; '.join(problems)}")


def obstacle(tensor: torch.Tensor) -> str:
    """Say why a tensor cannot travel; empty if it can."""
    if is_lazy(tensor):
        return "is not initialised yet: run the lazy module once first"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"has the layout {'nested' if tensor.is_nested else tensor.layout}, not strided"
    if is_wrapper(tensor):
        return f"is a {type(tensor).__name__}: gather or unwrap it into a plain tensor first"
    if tensor.is_meta:
        return "is on the meta device: it has no values"
    if is_fake(tensor):
        return "is a FakeTensor: it has no values"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype})"
    try:
        dtype_name(tensor.dtype)
    except ConfigError as exc:
        return f"has a dtype that cannot travel: {exc}"
    return ""
