"""Walking: the tensors and values of a module, a TensorDict or a mapping, by dotted name.

Only strided tensors that have values can travel: has_values() decides that. Walking a module of a
thousand tensors takes milliseconds; finding out that no tensor was re-created, moved or replaced
since takes a tenth of a millisecond. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from operator import attrgetter, eq, is_, itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aiosync._interrupts import is_interrupt
from aiosync.errors import ConfigError
from aiosync.tensors.dtypes import DTYPES
from aiosync.tensors.values import (
    EXTRA_STATE,
    ROOT_STATE,
    is_non_tensor,
    is_plain_tensordict,
    is_tensor_collection,
    is_tensordict,
    is_tensordict_params,
    pack_value,
)
from aiosync.wire import LeafKind, encode_values

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = [
    "PLAIN",
    "ExtractAs",
    "Found",
    "Leaf",
    "Leaves",
    "ModuleTree",
    "Place",
    "Source",
    "collect",
    "find_nested",
    "group_tied",
    "has_values",
    "is_freed",
    "is_nested",
    "lacks_memory",
    "memory_key",
    "outline",
    "plain_name",
    "refuse_valueless",
    "to_leaves",
    "walk",
]

ExtractAs: TypeAlias = Literal["tensordict", "state_dict"]
"""The weights of a module that are sent: all, or the content of its ``state_dict()``."""

Source: TypeAlias = "nn.Module | TensorDictBase | Mapping[str, Any]"
"""Source of weights. A mapping may be nested or have dotted keys."""

PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Classes whose objects are tensors and nothing else."""


class Place(NamedTuple):
    """One name under which a tensor or a value is found.

    Attributes:
        name: Dotted name from the root.
        owner: Module, TensorDict or mapping that holds it directly.
        key: Key in the owner.
        tensor: The tensor that was there; ``None`` if there is a value.
        kind: ``"param"`` or ``"buffer"``.
        persistent: True if it is part of ``state_dict()``.
        path: The name with the wrappers in it that ``name`` looks through, if there are any.
    """

    name: str
    owner: Any
    key: str
    tensor: Any
    kind: LeafKind
    persistent: bool = True
    path: str = ""

    def read(self) -> Any:
        """Return the value that is there now; of a module, its extra state."""
        owner = self.owner
        if isinstance(owner, nn.Module) and not is_tensordict(owner):
            return owner.get_extra_state()
        value = owner.get(self.key)
        if self.key == ROOT_STATE and is_tensor_collection(value) and not is_non_tensor(value):
            # TorchRL stores a flat dict as a TensorDict.
            value = value.flatten_keys(".").to_dict()
        return value


class Found:
    """The result of a walk.

    Attributes:
        places: One place for each occurrence of a tensor.
        values: Places of values that are not tensors, by name.
    """

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.places: list[Place] = []
        self.values: dict[str, Place] = {}
        for place in places:
            self.add(place)

    def add(self, place: Place) -> None:
        """Add a place of a tensor or a value."""
        if place.tensor is None:
            self.values[place.name] = place
        else:
            self.places.append(place)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, parallel to ``places``."""
        return [place.tensor for place in self.places]

    def pack(self) -> dict[str, Any]:
        """Pack the values, and add a place for each tensor inside; a bare tensor is only a place.

        Raises:
            ConfigError: A value cannot travel.
        """
        packed = {}
        for name, place in self.values.items():
            value = place.read()
            if type(value) is torch.Tensor:
                self._add_inner(name, value)
            else:
                packed[name] = pack_value(name, value, self._add_inner)
        return encode_values(packed)

    def _add_inner(self, name: str, tensor: torch.Tensor) -> None:
        """Add a place for a tensor in a value, so that it travels as a leaf of its own."""
        self.add(Place(name, None, name, tensor, "buffer"))

    def same_as(self, other: Found) -> bool:
        """Return True if the same names lead to the very same tensors, and to the same values."""
        # A TensorDict keeps results made of its tensors, so that another one makes a difference.
        return (
            len(self.places) == len(other.places)
            and all(
                one.tensor is each.tensor
                and one.name == each.name
                and (one.owner is each.owner or not is_tensordict(one.owner))
                for one, each in zip(self.places, other.places, strict=True)
            )
            and self.values.keys() == other.values.keys()
            and all(
                place.owner is other.values[name].owner and place.key == other.values[name].key
                for name, place in self.values.items()
            )
        )


# -- modules ----------------------------------------------------------------------------------

_TABLES = ("_parameters", "_buffers", "_modules")
_tables = itemgetter(*_TABLES)
_facts = itemgetter(*_TABLES, "_non_persistent_buffers_set")
_hooks = attrgetter("_state_dict_hooks", "_state_dict_pre_hooks")
# torch marks an nn.Buffer with it. isinstance() looks for it, too, and takes ten times as long.
_BUFFER = "_is_buffer"
_persistence = attrgetter("persistent")
# Up to this size, elements of tensors may be compared once a tensor was replaced.
_MOST_NUMEL = 2**16


# Wrappers add a component to every name: with it, a wrapped trainer's names would not match those
# of a plain worker. A class that is not imported yet wraps nothing.
_COMPILED, _CHECKPOINTED = "_orig_mod", "_checkpoint_wrapped_module"
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", _COMPILED),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        _CHECKPOINTED,
    ),
)


def _wrapped(module: nn.Module) -> str | None:
    """Return the key under which a wrapper has its module; ``None`` for other modules."""
    for where, name, key in _WRAPPERS:
        kind = getattr(sys.modules.get(where), name, None)
        if kind is not None and isinstance(module, kind) and key in module._modules:
            return key
    return None


def plain_name(name: str) -> str:
    """Return a name without the components that only a wrapper of torch adds to it."""
    if _COMPILED not in name and _CHECKPOINTED not in name:
        return name
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in (_COMPILED, _CHECKPOINTED)), last])


def _differs_soon(value: Any) -> bool:
    """Return True if ``==`` is sure, and quick, to tell a value in a table from any other object.

    It is then false, or raises. But a replaced child may say that it is equal to the old one, a
    tensor of one element may equal another, and comparing large tensors takes long.
    """
    return value is None or (type(value) in PLAIN and 1 < value.numel() <= _MOST_NUMEL)


class ModuleTree:
    """Every parameter and buffer of a module, under every name, in ``state_dict()`` order.

    Attributes:
        source: The module itself.
        root: The module inside its wrappers.
        found: The tensors and extra states. Places keep the module that holds each of them.
        modules: Every module and the first of the prefixes that its names have.
    """

    def __init__(self, source: nn.Module) -> None:
        self.source: nn.Module = source
        self.root: nn.Module = source
        # Keys of the wrappers, which the names in the root's state_dict() lack.
        self._root_path = ""
        while (key := _wrapped(self.root)) is not None:
            self.root = getattr(self.root, key)
            self._root_path += f"{key}."
        self.found: Found = Found()
        self.modules: list[tuple[nn.Module, str]] = []
        self._seen: set[int] = set()
        # Each TensorDictParams and its tensors, which may be replaced while its tables stay.
        self._params: list[tuple[Any, dict[str, torch.Tensor]]] = []
        self._visit(source, "", "")
        self._dicts = [module.__dict__ for module, _ in self.modules]
        self._plain = self._has_plain_tables()
        if self._plain:
            self._save_tables()

    def _has_plain_tables(self) -> bool:
        """Return True if the tables of each module are its own dicts, which can be compared."""
        return all(
            type(owner.get(name)) is dict and not hasattr(type(module), name)
            for (module, _), owner in zip(self.modules, self._dicts, strict=True)
            for name in _TABLES
        )

    def _save_tables(self) -> None:
        """Keep the tables of all modules, for :meth:`unchanged`."""
        # Comparing whole dicts is by far the quickest way, because identical objects are not
        # compared any further.
        self._saved = [tuple(map(copy, _facts(each))) for each in self._dicts]
        # In these tables the objects themselves are compared, as `==` may mislead or take long.
        self._exact = [
            table
            for each in self._dicts
            for table in _tables(each)
            if not all(map(_differs_soon, table.values()))
        ]
        self._objects = list(chain.from_iterable(map(dict.values, self._exact)))

    def _visit(self, module: nn.Module, prefix: str, path: str) -> None:
        """Add a module and its children; of both prefixes only ``path`` has the wrappers' keys."""
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self.modules.append((module, prefix))
        self._add_tensors(module, prefix, path)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = prefix + EXTRA_STATE
            self.found.add(
                Place(name, module, EXTRA_STATE, None, "buffer", path=path + EXTRA_STATE)
            )
        wrapped = _wrapped(module)
        for key, child in module._modules.items():
            if child is not None:
                below = prefix if key == wrapped else f"{prefix}{key}."
                self._visit(child, below, f"{path}{key}.")

    def _add_tensors(self, module: nn.Module, prefix: str, path: str) -> None:
        """Add the parameters and buffers of one module, without its children."""
        params, buffers = self._tables_in_use(module)
        for key, param in params.items():
            if param is not None:
                name = prefix + key
                self.found.add(Place(name, module, key, param, "param", path=path + key))
        wrapped = _wrapped(module)
        hidden = module._non_persistent_buffers_set
        for key, buffer in buffers.items():
            if buffer is not None:
                # The counter of an AveragedModel is no buffer of the model inside it.
                persistent = key not in hidden and wrapped is None
                name = prefix + key
                self.found.add(Place(name, module, key, buffer, "buffer", persistent, path + key))

    def _tables_in_use(self, module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tables with which a module computes; note it if it is a TensorDictParams."""
        params, buffers = module._parameters, module._buffers
        if not is_tensordict_params(module):
            return params, buffers
        inner = _inner_tensors(module)
        self._params.append((module, inner))
        return _in_use(params, inner), _in_use(buffers, inner)

    def unchanged(self) -> bool:
        """Return True if a new walk would find the same objects under the same names. Cheap."""
        try:
            return (
                self._plain
                and all(map(is_, chain.from_iterable(map(dict.values, self._exact)), self._objects))
                and all(map(eq, map(_facts, self._dicts), self._saved))
                and (not self._params or self._have_same_tensors())
            )
        except Exception as exc:  # Two tensors have no truth value: one was replaced.
            if is_interrupt(exc):
                raise
            return False

    def _have_same_tensors(self) -> bool:
        """Return True if each ``TensorDictParams`` still has the tensors that were found in it."""
        return all(
            (now := _inner_tensors(module)).keys() == then.keys()
            and all(map(is_, now.values(), then.values()))
            for module, then in self._params
        )

    def standard_state_dict(self) -> bool:
        """Return True if no hook or override may change the content of ``state_dict()``."""
        return not any(
            any(_hooks(module))
            or type(module).state_dict is not nn.Module.state_dict
            or type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
            for module, _ in self.modules
        )

    def select(self, extract_as: ExtractAs) -> Found:
        """Return the tensors and values of the module that are sent.

        Raises:
            ConfigError: For ``"tensordict"``, see :meth:`refuse_hidden`.
        """
        if extract_as == "state_dict" and not self.standard_state_dict():
            return self._found_in_state_dict()
        if extract_as == "tensordict":
            self.refuse_hidden()
        everything = [*self.found.places, *self.found.values.values()]
        return Found(each for each in everything if each.persistent or extract_as == "tensordict")

    def _found_in_state_dict(self) -> Found:
        """Return the content of the root's ``state_dict()``, under the names of this module."""
        known = {
            plain_name(place.path.removeprefix(self._root_path)): place
            for place in (*self.found.places, *self.found.values.values())
        }
        state = find_nested(self.root.state_dict())
        return Found(
            place._replace(name=like.name, kind=like.kind)
            if (like := known.get(place.name)) is not None
            else place
            for place in (*state.places, *state.values.values())
        )

    def refuse_hidden(self) -> None:
        """Raise if a module's ``_save_to_state_dict()`` saves more than the tensors that are sent.

        Raises:
            ConfigError: All such entries of the ``state_dict()`` are named.
        """
        state: dict[str, Any] = {}
        for module, prefix in self.modules:
            if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
                module._save_to_state_dict(state, prefix, True)
        shown = {place.name for place in self.found.places} | self.found.values.keys()
        hidden = [name for name, value in state.items() if value is not None and name not in shown]
        if hidden:
            raise ConfigError(
                "these weights are neither parameters nor buffers, only the state_dict() has "
                f"them: {', '.join(map(repr, hidden))}; give the sender strategy='state_dict' and "
                "the worker load= instead of model=, or register them as buffers"
            )


# A TensorDictParams is a TensorDict and a module. A forward computes with the TensorDict inside,
# parameters() lists the tables of the module. TensorDict's to_module() changes only the TensorDict,
# and that is how TorchRL takes away the memory of its workers' policies.


def _inner_tensors(td: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in the TensorDict of a ``TensorDictParams``, by dotted name."""
    return {place.name: place.tensor for place in _walk(td, "") if place.tensor is not None}


def _in_use(table: Mapping[str, Any], inner: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a table of a ``TensorDictParams`` with the tensors that its forwards compute with.

    Args:
        table: Parameters or buffers of the module.
        inner: Result of :func:`_inner_tensors` for it.
    """
    found = dict(table)
    for key in table.keys() & inner.keys():
        own, used = table[key], inner[key]
        is_param = isinstance(own, nn.Parameter)
        if isinstance(used, nn.Parameter) is is_param:
            found[key] = used
        # On their way to the meta device parameters became plain tensors, or vice versa.
        elif used.is_meta:
            used = used.detach()
            found[key] = nn.Parameter(used, requires_grad=own.requires_grad) if is_param else used
        # Any other tensor was put there for one call, by ``data.to_module()``: the table counts.
    return found


def lacks_memory(model: object) -> bool:
    """Return True if a model is a module with tensors on the meta device."""
    return isinstance(model, nn.Module) and any(
        each.is_meta for each in (*model.parameters(), *ModuleTree(model).found.tensors)
    )


# -- TensorDicts and mappings -----------------------------------------------------------------


def find_nested(source: Any) -> Found:
    """Walk a TensorDict or a mapping, nested or with dotted keys; leave wrappers out of the names.

    Raises:
        ConfigError: A key is not a string.
    """
    places = list(_walk(source, ""))
    names = [plain_name(place.name) for place in places]
    # If two names become the same, the parts that were left out are no wrappers, and stay.
    if len(set(names)) == len(names):
        pairs = zip(places, names, strict=True)
        places = [each if each.name == name else each._replace(name=name) for each, name in pairs]
    return Found(places)


def _walk(source: Any, prefix: str) -> Iterator[Place]:
    """Yield the places of a container, at any depth; an extra state is one place as a whole."""
    for key, value in _items(source):
        if type(key) is not str:
            raise ConfigError(f"key {key!r} under {prefix[:-1]!r} is a {type(key).__name__}")
        name = prefix + (EXTRA_STATE if key == ROOT_STATE else key)
        is_state = _is_state(key)
        tensor = value if isinstance(value, torch.Tensor) else None
        if is_state or tensor is not None or not is_nested(value):
            is_marked = not is_state and isinstance(value, nn.Buffer)
            kind: Literal["param", "buffer"] = "buffer" if is_state or is_marked else "param"
            yield Place(name, source, key, tensor, kind, not is_marked or value.persistent)
        else:
            yield from _walk(value, f"{prefix}{key}.")


def _is_state(key: object) -> bool:
    """Return True if a key of a container is that of an extra state."""
    return type(key) is str and (key == ROOT_STATE or key.rpartition(".")[2] == EXTRA_STATE)


def outline(source: Any) -> tuple[list[object], list[torch.Tensor]] | None:
    """Return the keys and the tensors of a container, many times as fast as :func:`find_nested`.

    Two containers with equal keys have the same tensors, of the same kinds, under the same names.

    Returns:
        ``None`` if it is anything but a container of plain tensors and such containers. An extra
        state is no such container, as it is one value.
    """
    if not is_nested(source) or is_tensordict_params(source):
        return None
    items = dict(_items(source))
    keys: list[object] = [tuple(items)]
    if PLAIN.issuperset(map(type, items.values())):
        marks = [*map(hasattr, items.values(), repeat(_BUFFER))]
        keys += [*marks, *map(_persistence, compress(items.values(), marks))]
        return keys, list(items.values())
    tensors: list[torch.Tensor] = []
    for key, value in items.items():
        if type(value) in PLAIN:
            keys += [hasattr(value, _BUFFER), getattr(value, "persistent", None)]
            tensors.append(value)
            continue
        inner = None if _is_state(key) else outline(value)
        if inner is None:
            return None
        keys += inner[0]
        tensors += inner[1]
    return keys, tensors


def _items(source: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a container, past the slow ``items()`` of TensorDicts."""
    while is_tensordict_params(source):
        # TensorDictParams.items() goes through hooks.
        source = source._param_td
    inner = getattr(source, "_tensordict", None) if is_plain_tensordict(source) else None
    # TensorDict.items() takes ten times as long.
    items: Any = source if inner is None else inner
    return items.items()  # type: ignore[no-any-return]


def is_nested(value: Any) -> bool:
    """Return True if a value is a container of tensors.

    A stack of values is none, although it is a mapping.
    """
    if is_tensor_collection(value):
        return not is_non_tensor(value)
    return isinstance(value, Mapping)


# -- sources ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor to send.

    Attributes:
        name: Dotted name, the first under which it was found.
        tensor: The live tensor, not a copy.
        kind: ``"param"``, ``"buffer"``, or ``"transient"`` for one that is not persistent.
        aliases: The other names of the same tensor (tied parameters).
    """

    name: str
    tensor: torch.Tensor
    kind: LeafKind = "param"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaves:
    """The tensors and values to send.

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
            Wrappers that only add a prefix are looked through: ``torch.compile``, the data-parallel
            ones, ``AveragedModel``, ``checkpoint_wrapper`` and ``offload_wrapper``.
        extract_as: Of a module, ``"tensordict"`` takes all parameters and buffers, also those that
            are not persistent; ``"state_dict"`` takes the content of its ``state_dict()``. Both
            take the extra state of every submodule that defines one.

    Raises:
        ConfigError: The source is of another type, or holds something that cannot travel: tensors
            that are not initialised, on the meta device, sparse, quantised or sharded, and values
            that are neither tensors nor plain; or, for ``"tensordict"``, a module saves more in its
            ``state_dict()`` than parameters, buffers and extra state. The message names all such
            tensors.
    """
    found, _ = walk(source, extract_as)
    return to_leaves(found, found.pack())


def walk(source: Any, extract_as: ExtractAs | None = None) -> tuple[Found, ModuleTree | None]:
    """Walk a module, a TensorDict or a mapping; return the places found, and a module's tree.

    Args:
        source: The source to walk.
        extract_as: The weights of a module to find, see :func:`collect`; ``None`` for all it has.

    Raises:
        ConfigError: The source is something else, or a key or a name is not allowed.
    """
    if isinstance(source, nn.Module) and not is_tensordict(source):
        tree = ModuleTree(source)
        return (tree.found if extract_as is None else tree.select(extract_as)), tree
    if is_nested(source):
        return find_nested(source), None
    raise ConfigError(
        f"a {type(source).__module__}.{type(source).__qualname__} has no weights to take or to "
        "replace; supported: torch.nn.Module, TensorDict, and a mapping of tensors (nested, or a "
        "state_dict)"
    )


def to_leaves(found: Found, values: dict[str, Any]) -> Leaves:
    """Join the names of tied tensors into leaves; the values are packed already.

    Raises:
        ConfigError: Something cannot travel; all such tensors are named.
    """
    refuse_valueless((place.name, place.tensor) for place in found.places)
    names = Counter([*values, *(place.name for place in found.places)])
    wrong = [name for name, count in names.items() if count > 1 or not name]
    if wrong:
        raise ConfigError(f"the name {wrong[0]!r} occurs twice, or is empty")
    leaves = []
    for first, *others in group_tied(found.tensors):
        place = found.places[first]
        aliases = tuple(found.places[other].name for other in others)
        persistent = any(found.places[each].persistent for each in (first, *others))
        kind = place.kind if persistent else "transient"
        leaves.append(Leaf(place.name, place.tensor, kind, aliases))
    return Leaves(tuple(leaves), values)


def refuse_valueless(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise if tensors cannot travel, or their memory was freed, with the names of all of them.

    Raises:
        ConfigError: Some cannot.
    """
    bad = [
        f"{name!r} is a {type(tensor).__name__} on the {tensor.device} device"
        f" ({'nested' if tensor.is_nested else tensor.layout}, {tensor.dtype})"
        + (" whose storage was freed" if sound else "")
        for name, tensor in tensors
        if not (sound := has_values(tensor)) or is_freed(tensor)
    ]
    if bad:
        raise ConfigError(
            f"these weights cannot be sent: {'; '.join(bad)}; only strided tensors that are "
            "initialised and in memory of their own can, not quantised: run a lazy module once, "
            "call aiosync.gather_weights() for sharded ones on every rank, unwrap others"
        )


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has memory of its own, of a kind that can travel."""
    # Wrappers of other tensors, sharded tensors and fake ones have no memory of their own.
    dispatch = type(tensor).__torch_dispatch__
    return not (
        dispatch is not torch.Tensor.__torch_dispatch__
        or is_lazy(tensor)
        or tensor.is_nested
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.dtype not in DTYPES
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Return True if the storage of a strided tensor was resized, and lacks some of its elements.

    ``untyped_storage().resize_(0)`` is the usual way to offload weights.
    """
    if not tensor.numel():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in steps)
    return (last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes()


def group_tied(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the positions of tensors that are one and the same, in order of first occurrence."""
    groups: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(memory_key(tensor), []).append(position)
    return list(groups.values())


def memory_key(tensor: torch.Tensor) -> Any:
    """Return a key that two tensors share if they are the same elements in memory."""
    if not has_values(tensor) or not tensor.numel():
        return id(tensor)
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )
