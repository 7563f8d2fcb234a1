"""Non-tensor values and extra state, in a form made of plain msgpack types.

``get_extra_state()`` may return anything. These values can travel: plain values, and lists, tuples,
dicts and TensorDicts of plain values and tensors. Tensors inside become leaves of their own; the
value then names them. Each value arrives as the type that it has, so a subclass is refused by name
as any other type is: never turned into its base, dropped or pickled. This module must never import
asyncio or a transport.

The functions at the end recognise TensorDicts without importing tensordict, which takes as long to
import as torch. Before the library is imported no value is a TensorDict: unpickling one imports the
library, too.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from aiosync._interrupts import is_interrupt
from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase, TensorDictParams

__all__ = [
    "EXTRA_STATE",
    "ROOT_STATE",
    "inner_names",
    "is_non_tensor",
    "is_plain_tensordict",
    "is_tensor_collection",
    "is_tensordict",
    "is_tensordict_params",
    "pack_value",
    "set_item",
    "unpack_value",
]

EXTRA_STATE = "_extra_state"
"""Last component of the name of a module's extra state, as in a ``state_dict()``."""

ROOT_STATE = "__extra_state__"
"""TorchRL's key of the extra state of a root module."""

_MARK = "__aiosync__"
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_SPECIAL: dict[str, tuple[Any, ...]] = {
    "OrderedDict": (OrderedDict,),
    "Counter": (Counter,),
    "Size": (torch.Size,),
    "defaultdict": (defaultdict, None),
    **{f"defaultdict {each.__name__}": (defaultdict, each) for each in (int, float, list, dict)},
}
"""Types that travel as a dict or a list, each with the constructor arguments before that."""

_MAX_DEPTH = 12


def pack_value(
    name: str,
    value: Any,
    add_tensor: Callable[[str, torch.Tensor], None],
    depth: int = _MAX_DEPTH,
) -> Any:
    """Return ``value`` as plain types; shares no container with it.

    Args:
        name: Dotted name of the value, for errors and for the names of its tensors.
        value: The value.
        add_tensor: Called with the dotted name of each tensor inside, and the tensor.
        depth: Number of levels to which it may be nested.

    Raises:
        ConfigError: Something inside cannot travel; the message names it.
    """
    kind = type(value)
    if kind is torch.Tensor:
        add_tensor(name, value)
        return {_MARK: "tensor", "name": name}
    if kind in _SCALARS:
        return value
    if depth <= 0:
        raise ConfigError(f"value {name!r} cannot travel: it is nested too deeply")

    # A stack of wrapped values is also a TensorDict, and has no single value.
    if is_non_tensor(value) and not is_tensordict(value):
        return pack_value(name, value.data, add_tensor, depth - 1)
    if (special := _special_name(value)) is not None:
        plain = dict(value) if isinstance(value, dict) else list(value)
        return {_MARK: special, "items": pack_value(name, plain, add_tensor, depth - 1)}

    # `levels` counts the containers of the packed form around an item.
    def pack(key: Any, item: Any, levels: int) -> Any:
        return pack_value(f"{name}.{key}", item, add_tensor, depth - levels)

    if (packed := _pack_container(value, pack)) is not None:
        return packed
    raise ConfigError(
        f"value {name!r} cannot travel: it is a {kind.__module__}.{kind.__qualname__}; only "
        "tensors, None, bool, int, float, str, bytes, torch.Size, and lists, tuples, TensorDicts "
        "and dicts with plain keys can (OrderedDict, Counter, and defaultdict of int, float, list, "
        "dict or None, too), and no subclass: have get_extra_state() return one of these"
    )


def _pack_container(value: Any, pack: Callable[[Any, Any, int], Any]) -> Any:
    """Return a container of a plain type with its items packed; ``None`` for any other value."""
    kind = type(value)
    if kind in (list, tuple):
        items = [pack(index, item, 1) for index, item in enumerate(value)]
        return items if kind is list else {_MARK: "tuple", "items": items}
    if is_plain_tensordict(value):
        inner = {key: pack(key, item, 2) for key, item in value.items()}
        return {_MARK: "tensordict", "batch_size": list(value.batch_size), "items": inner}
    return _pack_dict(value, pack) if kind is dict else None


def _pack_dict(value: dict[Any, Any], pack: Callable[[Any, Any, int], Any]) -> Any:
    """Return a dict with its items packed; ``None`` if a key is not of a plain type."""
    kinds = set(map(type, value))
    if kinds <= {str} and _MARK not in value:
        return {key: pack(key, item, 1) for key, item in value.items()}
    if kinds <= _SCALARS:
        return {_MARK: "dict", "items": [[key, pack(key, item, 3)] for key, item in value.items()]}
    return None


def _special_name(value: Any) -> str | None:
    """Return the mark of a container that is not of a plain type; ``None`` if it has none."""
    for name, (cls, *first) in _SPECIAL.items():
        if type(value) is cls and (not first or value.default_factory is first[0]):
            return name
    return None


def unpack_value(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Rebuild a value that :func:`pack_value` packed.

    Args:
        value: The packed value, possibly after a trip through msgpack.
        tensor: Called with the name of each tensor; returns it, in memory that the value may keep.

    Raises:
        ConfigError: The value is not of the form that :func:`pack_value` gives.
    """
    try:
        return _unpack(value, tensor)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError) as exc:
        if is_interrupt(exc):
            raise
        # A peer may send items that a container does not take, such as a list as a key.
        raise ConfigError(f"a packed value cannot be rebuilt: {type(exc).__name__}: {exc}") from exc


def _unpack(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Rebuild a value; :func:`unpack_value` catches the errors of the types that it is made of."""
    if isinstance(value, list | tuple):
        return [_unpack(item, tensor) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _MARK in value:
        return _unpack_marked(value, tensor)
    return {key: _unpack(item, tensor) for key, item in value.items()}


def _unpack_marked(value: Mapping[Any, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    """Rebuild a value that was packed as a mapping with the mark of its type."""
    match value:
        case {"__aiosync__": "tensor", "name": str(name)}:
            return tensor(name)
        case {"__aiosync__": "tuple", "items": [*items]}:
            return tuple(_unpack(item, tensor) for item in items)
        case {"__aiosync__": "dict", "items": [*pairs]} if all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            return {key: _unpack(item, tensor) for key, item in pairs}
        case {"__aiosync__": "tensordict", "batch_size": [*size], "items": dict(mapping)}:
            return _unpack_tensordict(size, mapping, tensor)
        case {"__aiosync__": str(special), "items": content} if special in _SPECIAL:
            return _unpack_special(special, content, tensor)
    raise ConfigError(f"a packed value is no {value[_MARK]!r} that a trainer packs")


def _unpack_tensordict(
    batch_size: list[Any], items: Mapping[Any, Any], tensor: Callable[[str], torch.Tensor]
) -> TensorDict:
    """Rebuild a TensorDict from its packed items."""
    from tensordict import TensorDict

    inner = TensorDict({}, batch_size=batch_size)
    for key, item in items.items():
        set_item(inner, key, _unpack(item, tensor))
    return inner


def _unpack_special(kind: str, items: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Rebuild a value of a type of _SPECIAL, such as OrderedDict, from its packed items."""
    cls, *first = _SPECIAL[kind]
    return cls(*first, _unpack(items, tensor))


def set_item(td: Any, key: Any, value: Any) -> None:
    """Put a tensor, a TensorDict or any other value into a TensorDict."""
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        td.set(key, value)
    else:
        td.set_non_tensor(key, value)


def inner_names(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tensor leaves that packed values refer to."""
    return frozenset(_referenced(list(values.values()))) if values else frozenset()


def _referenced(value: Any) -> Iterator[str]:
    """Yield the names of all tensors in a packed value."""
    if isinstance(value, Mapping) and value.get(_MARK) == "tensor":
        yield str(value.get("name"))
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _referenced(item)


# -- TensorDicts -----------------------------------------------------------------------------------

_library: Any = None


def _loaded() -> Any:
    """Return the tensordict library, or ``None`` as long as it is not imported."""
    global _library
    if _library is None and sys.modules.get("tensordict") is not None:
        # If another thread is importing the library now, this waits for it.
        import tensordict.utils

        _library = tensordict
    return _library


def is_tensordict(value: Any) -> TypeGuard[TensorDictBase]:
    """Return True if a value is a TensorDict of any kind, but no tensorclass."""
    library = _library or _loaded()
    return library is not None and isinstance(value, library.TensorDictBase)


def is_plain_tensordict(value: Any) -> TypeGuard[TensorDict]:
    """Return True if a value is of the class ``TensorDict`` itself."""
    library = _library or _loaded()
    return library is not None and type(value) is library.TensorDict


def is_tensordict_params(value: Any) -> TypeGuard[TensorDictParams]:
    """Return True if a value is a TensorDict that is also a module."""
    library = _library or _loaded()
    return library is not None and isinstance(value, library.TensorDictParams)


def is_tensor_collection(value: Any) -> bool:
    """Return True if a value is a TensorDict or a tensorclass."""
    library = _library or _loaded()
    return library is not None and bool(library.is_tensor_collection(value))


def is_non_tensor(value: Any) -> bool:
    """Return True if a value is a wrapper in which TensorDicts keep objects other than tensors."""
    library = _library or _loaded()
    return library is not None and bool(library.utils.is_non_tensor(value))
