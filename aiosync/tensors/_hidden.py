"""What of a module only its ``state_dict()`` shows: neither parameters, buffers nor extra state.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aiosync.tensors._changes import Undo, storage_of
from aiosync.tensors._tree import ModuleTree, is_extra_state

__all__ = ["Hidden", "find_hidden", "has_tensors", "put_hidden"]


class Hidden(NamedTuple):
    """Entries of a module in its ``state_dict()`` that are no attribute that can be walked to.

    Attributes:
        module: The module.
        prefixes: What its names begin with, once for each place where the module is.
        entries: What it adds, by name without a prefix.
    """

    module: nn.Module
    prefixes: list[str]
    entries: dict[str, Any]

    @property
    def loads(self) -> bool:
        """Whether the class loads them in a way of its own."""
        return type(self.module)._load_from_state_dict is not nn.Module._load_from_state_dict


class _Shown:
    """What a walk finds, to tell its tensors from others, also as views and under other names."""

    def __init__(self, tree: ModuleTree) -> None:
        self.names = {place.name for place in tree.found.places}
        self.ids = set(map(id, tree.found.tensors))
        self.storages = set(map(_storage, tree.found.tensors)) - {0}

    def is_missing(self, key: str, value: Any, prefix: str) -> bool:
        """Whether a walk misses an entry of a module's state."""
        if value is None or is_extra_state(key) or prefix + key in self.names:
            return False
        if not isinstance(value, torch.Tensor):
            return True
        if id(value) in self.ids or value.is_meta or not value.numel():
            return False
        return _storage(value) not in self.storages


def find_hidden(tree: ModuleTree) -> list[Hidden]:
    """Find what modules save by a ``_save_to_state_dict()`` of their own. Cheap where none has one.

    A module that leaves out a tensor of its own is not counted: what it saves then may be another
    form of that one. What hooks add is not looked for, as some talk to other processes.
    """
    overriding = list(filter(_overrides_saving, tree.modules))
    if not overriding:
        return []
    shown = _Shown(tree)
    found = []
    for module in overriding:
        prefixes = tree.prefixes[id(module)]
        state = _saved(module)
        entries = {k: v for k, v in state.items() if shown.is_missing(k, v, prefixes[0])}
        if entries and not _leaves_out(module, state):
            found.append(Hidden(module, prefixes, entries))
    return found


def put_hidden(hidden: Hidden, new: Mapping[str, Any], undo: Undo) -> None:
    """Have a module load entries of its own as ``load_state_dict()`` would.

    Its parameters and buffers are not handed to it: it would copy them into memory that it may
    share with other processes.

    Args:
        hidden: The module, and what it has.
        new: Values by name without a prefix.
        undo: Gets what loads the old values again.

    Raises:
        RuntimeError: The module did not take all of them.
    """
    module = hidden.module
    saved = _saved(module)
    old = {key: _copy(saved[key]) for key in hidden.entries if key in saved}
    undo.append(lambda: _load(module, {key: _copy(value) for key, value in old.items()}))
    _load(module, {key: _alike(value, old.get(key)) for key, value in new.items()})


def _load(module: nn.Module, state: Mapping[str, Any]) -> None:
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    load: Any = module._load_from_state_dict
    about = {"version": module._version}
    load(OrderedDict(state), "", about, True, missing, unexpected, errors)
    errors += [f"{name!r} is not loaded" for name in unexpected]
    errors += [f"{name!r} is missing" for name in missing if name in state]
    if errors:
        raise RuntimeError(f"a {type(module).__name__} refused its state: {'; '.join(errors)}")


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)


def _alike(value: Any, old: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
        return value.to(old.device, old.dtype)
    return value


def _overrides_saving(module: nn.Module) -> bool:
    return type(module)._save_to_state_dict is not nn.Module._save_to_state_dict


def _saved(module: nn.Module) -> Mapping[str, Any]:
    """Return what a module saves of itself, without its submodules."""
    state: OrderedDict[str, Any] = OrderedDict()
    versions = OrderedDict({"": {"version": module._version}})
    state._metadata = versions  # type: ignore[attr-defined]
    try:
        module._save_to_state_dict(state, "", True)
    except Exception:  # noqa: BLE001 - then its state_dict() never worked
        return {}
    return state


def _leaves_out(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether some tensor of the module is not in its state, as it is or as a view."""
    saved = [value for value in state.values() if isinstance(value, torch.Tensor)]
    ids, storages = set(map(id, saved)), set(map(_storage, saved))
    for key, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is None or key in state or key in module._non_persistent_buffers_set:
            continue
        if id(tensor) not in ids and _storage(tensor) not in storages:
            return True
    return False


def has_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a list, tuple or dict with one."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return isinstance(value, torch.Tensor)
    return any(map(has_tensors, value))


def _storage(tensor: torch.Tensor) -> int:
    return 0 if is_lazy(tensor) else storage_of(tensor)
