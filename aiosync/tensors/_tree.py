"""Where the tensors of a module, a TensorDict or a mapping are, and whether that changed.

Walking a module of a thousand tensors in Python takes milliseconds; telling that nothing was
re-created, moved or replaced since the last walk takes a tenth of one. Private to
:mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors._params import Inner
from aiosync.tensors._tensordict import (
    is_non_tensor,
    is_plain_tensordict,
    is_tensor_collection,
    is_tensordict_params,
)
from aiosync.tensors._values import EXTRA_STATE, pack_value

__all__ = ["Found", "ModuleTree", "Place", "find_nested", "unwrap"]

Kind: TypeAlias = Literal["param", "buffer"]


class Place(NamedTuple):
    """One name under which a tensor or a value is found.

    Attributes:
        name: Dotted name from the root.
        owner: Module, TensorDict or mapping that holds it directly.
        key: Key in the owner.
        kind: ``"param"`` or ``"buffer"``.
        persistent: Part of ``state_dict()``.
    """

    name: str
    owner: Any
    key: str
    kind: Kind
    persistent: bool = True


_name = attrgetter("name")
_persistent = attrgetter("persistent")


class Found:
    """What a walk found: parallel lists, and the values that are not tensors.

    Attributes:
        places: One for each occurrence of a tensor.
        tensors: The tensors, parallel to ``places``.
        values: Non-tensor values, packed.
        value_places: Where the values were; only filled when values are not packed.
    """

    __slots__ = ("places", "tensors", "value_places", "values")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.tensors: list[torch.Tensor] = []
        self.values: dict[str, Any] = {}
        self.value_places: dict[str, Place] = {}

    def add(self, place: Place, tensor: torch.Tensor) -> None:
        """Append one tensor."""
        self.places.append(place)
        self.tensors.append(tensor)

    def add_value(self, name: str, value: Any, kind: Kind = "buffer") -> None:
        """Pack a value; the tensors inside become leaves. A bare tensor is a leaf itself."""
        if isinstance(value, torch.Tensor):
            self.add(Place(name, None, name, kind), value)
            return
        if name in self.values:
            raise ConfigError(f"the name {name!r} occurs twice")
        self.values[name] = pack_value(
            name, value, lambda inner, tensor: self.add(Place(inner, None, inner, kind), tensor)
        )

    def same_as(self, other: Found) -> bool:
        """Whether the same names lead to the very same tensor objects."""
        return (
            len(self.tensors) == len(other.tensors)
            and all(map(is_, self.tensors, other.tensors))
            and list(map(_name, self.places)) == list(map(_name, other.places))
            and list(map(_persistent, self.places)) == list(map(_persistent, other.places))
            and self.value_places.keys() == other.value_places.keys()
        )


_tables = itemgetter("_parameters", "_buffers", "_modules")
_non_persistent = itemgetter("_non_persistent_buffers_set")
_TABLE_NAMES = ("_parameters", "_buffers", "_modules")
_MOST_NUMEL = 2**16  # of tensors whose elements may be compared once one was replaced


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers that only add a prefix to every name.

    ``torch.compile`` and the data-parallel wrappers do so; without this, a wrapped trainer's
    names would not match those of a plain worker.
    """
    while (inner := _wrapped(module)) is not None:
        module = inner[1]
    return module


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module", module.module
    if type(module).__name__ == "OptimizedModule":
        inner = module._modules.get("_orig_mod")
        if inner is not None:
            return "_orig_mod", inner
    return None


class ModuleTree:
    """Every parameter and buffer of a module, under every name, in ``state_dict()`` order.

    Attributes:
        root: The module itself.
        found: The tensors. Places keep the module that holds each of them.
        extra: Dotted name of the extra state, and module, for each module that has one.
        modules: Every module, once.
        prefixes: By the id of a module, what its names begin with: once for each of its places.
        split: Tensors of a ``TensorDictParams`` in whose place its own tables have another one.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.found = Found()
        self.extra: dict[str, nn.Module] = {}
        self.modules: list[nn.Module] = []
        self.prefixes: dict[int, list[str]] = {}
        self.split: list[tuple[Place, torch.Tensor]] = []
        self._inner: list[Inner] = []
        self._visit(root, "", ())
        self._dicts = [module.__dict__ for module in self.modules]
        self._plain = all(
            not hasattr(type(module), name) and type(module.__dict__.get(name)) is dict
            for module in self.modules
            for name in _TABLE_NAMES
        )
        # Comparing whole dicts is the quickest way by far, but the elements of a tensor that was
        # replaced are compared as well.
        self._compares = all(
            type(tensor) in _PLAIN and tensor.numel() <= _MOST_NUMEL
            for tensor in self.found.tensors
        )
        if self._plain:
            self._hidden = list(map(set, map(_non_persistent, self._dicts)))
            if self._compares:
                self._save_dicts()
            else:
                self._keys, self._sizes, self._items = self._contents()

    def _save_dicts(self) -> None:
        self._saved = [tuple(map(dict, tables)) for tables in map(_tables, self._dicts)]
        # What takes the place of a child may say that it is equal.
        self._parents = [table for *_, table in map(_tables, self._dicts) if table]
        self._children = list(chain.from_iterable(map(dict.values, self._parents)))
        # A tensor of one element, for one, may equal another: these are told apart one by one.
        self._unsure = [
            (owner, name, key, value)
            for owner, tables in zip(self._dicts, self._saved, strict=True)
            for name, table in zip(_TABLE_NAMES, tables, strict=True)
            for key, value in table.items()
            if not _equals_only_itself(value)
        ]

    def _contents(self) -> tuple[list[str], list[int], list[Any]]:
        """All keys of all tables, how many each has, and what is under them."""
        tables = list(chain.from_iterable(map(_tables, self._dicts)))
        items = list(chain.from_iterable(map(dict.values, filter(None, tables))))
        return list(chain.from_iterable(tables)), list(map(len, tables)), items

    def _visit(self, module: nn.Module, prefix: str, above: tuple[nn.Module, ...]) -> None:
        if any(module is ancestor for ancestor in above):
            raise ConfigError(f"module {prefix[:-1]!r} contains itself")
        if id(module) not in self.prefixes:
            self.modules.append(module)
        self.prefixes.setdefault(id(module), []).append(prefix)
        params, buffers = module._parameters, module._buffers
        inner = None
        if is_tensordict_params(module):
            inner, start = Inner.of(module), len(self.found.tensors)
            self._inner.append(inner)
            params, buffers = inner.in_use(params), inner.in_use(buffers)  # type: ignore[assignment]
        for key, param in params.items():
            if param is not None:
                self.found.add(Place(prefix + key, module, key, "param"), param)
        hidden = module._non_persistent_buffers_set
        for key, buffer in buffers.items():
            if buffer is not None:
                place = Place(prefix + key, module, key, "buffer", key not in hidden)
                self.found.add(place, buffer)
        if inner is not None:
            found = zip(self.found.places[start:], self.found.tensors[start:], strict=True)
            self.split += [each for each in found if inner.differs(each[0].key, each[1])]
        if has_extra_state(module):
            self.extra[prefix + EXTRA_STATE] = module
        above = (*above, module)
        wrapped = _wrapped(module)
        for key, child in module._modules.items():
            if child is not None:
                transparent = wrapped is not None and key == wrapped[0]
                self._visit(child, prefix if transparent else f"{prefix}{key}.", above)

    def unchanged(self, *, persistence: bool = False) -> bool:
        """Whether a new walk would find the same objects under the same names. Cheap.

        Args:
            persistence: Look also at which buffers are persistent.
        """
        if self._inner and not all(map(Inner.unchanged, self._inner)):
            return False
        if not self._plain:
            new = ModuleTree(self.root)
            same = len(new.modules) == len(self.modules) and all(
                map(is_, new.modules, self.modules)
            )
            return same and new.found.same_as(self.found) and new.extra == self.extra
        if persistence and list(map(_non_persistent, self._dicts)) != self._hidden:
            return False
        if not self._compares:
            keys, sizes, items = self._contents()
            same = keys == self._keys and sizes == self._sizes
            return same and all(map(is_, items, self._items))
        try:
            # What is the same object is not compared any further.
            same = all(map(eq, map(_tables, self._dicts), self._saved))
        except Exception:  # noqa: BLE001 - two tensors have no truth value: one was replaced
            return False
        children = chain.from_iterable(map(dict.values, self._parents))
        return (
            same
            and all(map(is_, children, self._children))
            and all(owner[name][key] is value for owner, name, key, value in self._unsure)
        )

    def standard_state_dict(self) -> bool:
        """Whether ``state_dict()`` is nothing but the persistent tensors and extra states."""
        return not any(map(len, chain.from_iterable(map(_hooks, self.modules)))) and not any(
            map(_overrides_state_dict, map(type, self.modules))
        )


def _equals_only_itself(value: Any) -> bool:
    """Whether ``==`` with any other object is false or raises."""
    if type(value) in _PLAIN:
        return bool(value.numel() > 1)
    own: Any = type(value).__eq__
    return value is None or own is object.__eq__


_hooks = attrgetter("_state_dict_hooks", "_state_dict_pre_hooks")


def _overrides_state_dict(cls: type[nn.Module]) -> bool:
    return (
        cls.state_dict is not nn.Module.state_dict
        or cls._save_to_state_dict is not nn.Module._save_to_state_dict
    )


def has_extra_state(module: nn.Module) -> bool:
    """Whether the class of a module defines ``get_extra_state()``."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def find_nested(source: Any, *, pack: bool = True) -> Found:
    """Walk a TensorDict or a mapping, nested or with dotted keys.

    Args:
        source: What to walk.
        pack: Pack values that are not tensors into ``values``. Otherwise ``value_places`` says
            where they are, and extra states are values even when they are tensors inside
            containers.

    Raises:
        ConfigError: A key is not a string, or a value cannot travel.
    """
    found = Found()
    _walk(source, "", found, pack)
    return found


def _walk(source: Any, prefix: str, found: Found, pack: bool) -> None:
    for key, value in _items(source):
        if type(key) is not str:
            raise ConfigError(f"key {key!r} under {prefix[:-1]!r} is a {type(key).__name__}")
        if isinstance(value, torch.Tensor):
            name = prefix + key if key != "__extra_state__" else prefix + EXTRA_STATE
            kind: Kind = "buffer" if is_extra_state(name) or _is_buffer(value) else "param"
            found.add(Place(_clean(name), source, key, kind), value)
        elif key == "__extra_state__" or is_extra_state(key):
            stem = key.removesuffix("__extra_state__").removesuffix(EXTRA_STATE)
            name = _clean(f"{prefix}{stem}{EXTRA_STATE}")
            if key == "__extra_state__" and is_nested_tensordict(value):
                value = value.flatten_keys(".").to_dict()  # TorchRL stores a flat dict so
            _value(found, name, source, key, value, pack)
        elif is_nested(value):
            _walk(value, f"{prefix}{key}.", found, pack)
        else:
            _value(found, _clean(prefix + key), source, key, value, pack)


def _value(found: Found, name: str, owner: Any, key: Any, value: Any, pack: bool) -> None:
    if pack:
        found.add_value(name, value)
    else:
        found.value_places[name] = Place(name, owner, key, "buffer")


def outline(source: Any) -> tuple[list[object], list[torch.Tensor]] | None:
    """Return the keys and the tensors of a container, many times as fast as :func:`find_nested`.

    Two containers with equal keys have the same tensors under the same names.

    Returns:
        ``None`` if the container holds anything but plain tensors and containers of them.
    """
    keys: list[object] = []
    tensors: list[torch.Tensor] = []
    return (keys, tensors) if _outline(source, keys, tensors) else None


def _outline(source: Any, keys: list[object], tensors: list[torch.Tensor]) -> bool:
    items = dict(_items(source))
    keys.append(tuple(items))
    if set(map(type, items.values())) <= _PLAIN:
        tensors += items.values()
        return True
    for value in items.values():
        if type(value) in _PLAIN:
            tensors.append(value)
            keys.append(None)
        elif is_nested(value):
            if not _outline(value, keys, tensors):
                return False
        else:
            return False
    return True


_PLAIN = {torch.Tensor, nn.Parameter}


def _items(source: Any) -> Iterable[tuple[Any, Any]]:
    if is_plain_tensordict(source):
        inner = getattr(source, "_tensordict", None)  # items() takes ten times as long
        if type(inner) is dict:
            return inner.items()
    items: Iterable[tuple[Any, Any]] = source.items()
    return items


def is_extra_state(name: str) -> bool:
    """Whether a dotted name is that of a module's extra state."""
    return name == EXTRA_STATE or name.endswith("." + EXTRA_STATE)


def is_nested_tensordict(value: Any) -> bool:
    """Whether a value is a TensorDict or tensorclass, and no wrapped non-tensor value."""
    return is_tensor_collection(value) and not is_non_tensor(value)


def is_nested(value: Any) -> bool:
    """Whether a value is a container of tensors. A stack of values is none, although a mapping."""
    if is_tensor_collection(value):
        return not is_non_tensor(value)
    return isinstance(value, Mapping)


def _is_buffer(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Buffer)


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "") if "_orig_mod." in name else name
