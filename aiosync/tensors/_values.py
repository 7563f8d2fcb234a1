"""Non-tensor values and extra state, in a form made of plain msgpack types.

``get_extra_state()`` may return anything. What can travel is: plain values, lists, tuples,
mappings and TensorDicts of plain values and tensors. Tensors inside become leaves of their
own; the value then names them. Anything else is refused by name, never dropped and never
pickled. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from aiosync.errors import ConfigError
from aiosync.tensors._tensordict import is_non_tensor, is_non_tensor_stack, is_tensor_collection

if TYPE_CHECKING:
    from tensordict import NonTensorStack

__all__ = ["EXTRA_STATE", "pack_value", "referenced", "unpack_value"]

EXTRA_STATE = "_extra_state"
"""Last component of the name of a module's extra state, as in a ``state_dict()``."""

_MARK = "__aiosync__"
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_MAX_DEPTH = 12


def pack_value(name: str, value: Any, add_tensor: Callable[[str, torch.Tensor], None]) -> Any:
    """Return ``value`` as plain types; shares no container with it.

    Args:
        name: Dotted name of the value, for errors and for the names of its tensors.
        value: The value.
        add_tensor: Called with the dotted name of each tensor inside, and the tensor.

    Raises:
        ConfigError: Something inside cannot travel; the message names it.
    """
    return _pack(name, value, add_tensor, _MAX_DEPTH)


def _pack(
    name: str, value: Any, add_tensor: Callable[[str, torch.Tensor], None], depth: int
) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        if kind is int and not -(2**63) <= value < 2**64:
            raise ConfigError(f"value {name!r} cannot travel: the int does not fit into 64 bits")
        return value
    if depth == 0:
        raise ConfigError(f"value {name!r} cannot travel: it is nested too deeply")
    if isinstance(value, torch.Tensor):
        add_tensor(name, value)
        return {_MARK: "tensor", "name": name}
    if is_non_tensor_stack(value):
        packed = [
            _pack(f"{name}.{idx}", item, add_tensor, depth - 2)
            for idx, item in enumerate(_unstack(value))
        ]
        return {_MARK: "stack", "items": packed}
    if is_non_tensor(value):
        return _pack(name, value.data, add_tensor, depth - 1)
    if is_tensor_collection(value):
        items = {
            key: _pack(f"{name}.{key}", item, add_tensor, depth - 2) for key, item in value.items()
        }
        return {_MARK: "tensordict", "batch_size": list(value.batch_size), "items": items}
    if isinstance(value, list | tuple):
        packed = [
            _pack(f"{name}.{idx}", item, add_tensor, depth - 1) for idx, item in enumerate(value)
        ]
        return {_MARK: "tuple", "items": packed} if isinstance(value, tuple) else packed
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _MARK not in value:
            return {
                key: _pack(f"{name}.{key}", item, add_tensor, depth - 1)
                for key, item in value.items()
            }
        pairs = []
        for key, item in value.items():
            if type(key) not in _SCALARS:
                raise ConfigError(
                    f"value {name!r} cannot travel: its key {key!r} is a {type(key).__name__}"
                )
            pairs.append([key, _pack(f"{name}.{key}", item, add_tensor, depth - 3)])
        return {_MARK: "dict", "items": pairs}
    raise ConfigError(
        f"value {name!r} cannot travel: it is a {kind.__module__}.{kind.__qualname__}; only "
        "tensors, None, bool, int, float, str, bytes, and lists, tuples, mappings and TensorDicts "
        "of these can"
    )


def _unstack(stack: NonTensorStack) -> list[Any]:
    """Return the parts along the first dimension, those of several values as stacks."""
    parts: Any = stack.tensordicts if stack.stack_dim == 0 else stack.unbind(0)
    # A part with dimensions of its own may hold one value that stands for all of its elements.
    return [
        part.maybe_to_stack() if part.batch_dims and not is_non_tensor_stack(part) else part
        for part in parts
    ]


def unpack_value(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Rebuild what :func:`pack_value` packed.

    Args:
        value: The packed value, possibly after a trip through msgpack.
        tensor: Called with the name of each tensor; returns one of its own memory.

    Raises:
        ConfigError: The value is not of the form that :func:`pack_value` gives.
    """
    if isinstance(value, list | tuple):
        return [unpack_value(item, tensor) for item in value]
    if not isinstance(value, Mapping):
        return value
    match value.get(_MARK):
        case None:
            return {key: unpack_value(item, tensor) for key, item in value.items()}
        case "tensor":
            return tensor(str(value.get("name")))
        case "tuple":
            return tuple(unpack_value(item, tensor) for item in _items(value, list))
        case "dict":
            pairs = _items(value, list)
            if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
                raise ConfigError("a packed value holds a dict that is not a list of pairs")
            return {key: unpack_value(item, tensor) for key, item in pairs}
        case "stack":
            from tensordict import NonTensorStack

            return NonTensorStack(*(unpack_value(item, tensor) for item in _items(value, list)))
        case "tensordict":
            from tensordict import TensorDict

            items = _items(value, dict)
            inner = TensorDict({}, batch_size=list(value.get("batch_size", ())))
            for key, item in items.items():
                unpacked = unpack_value(item, tensor)
                if isinstance(unpacked, torch.Tensor) or is_tensor_collection(unpacked):
                    inner.set(key, unpacked)
                else:
                    inner.set_non_tensor(key, unpacked)
            return inner
        case other:
            raise ConfigError(f"a packed value holds the unknown marker {other!r}")


def _items(value: Mapping[str, Any], kind: type) -> Any:
    items = value.get("items")
    if kind is list and isinstance(items, tuple):
        return items
    if not isinstance(items, kind):
        raise ConfigError(f"a packed {value[_MARK]} has no items")
    return items


def referenced(value: Any) -> Iterator[str]:
    """Yield the names of the tensor leaves that a packed value refers to."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from referenced(item)
    elif isinstance(value, Mapping):
        if value.get(_MARK) == "tensor":
            yield str(value.get("name"))
        else:
            for item in value.values():
                yield from referenced(item)
