"""Places: putting tensors and values where a walk found others.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from aiosync.tensors.values import (
    is_tensor_collection,
    is_tensordict,
    is_tensordict_params,
    set_item,
)
from aiosync.tensors.walk import Place, is_nested

__all__ = ["Undo", "put", "store"]

Undo: TypeAlias = "list[Callable[[], object]]"
"""Steps that put back the old tensors and values; the last step runs first."""


def put(root: Any, place: Place, tensor: torch.Tensor, undo: Undo) -> None:
    """Put a tensor object into one place of a target; ``undo`` gets the step that reverts it."""
    owner, key = place.owner, place.key
    if is_tensordict_params(owner):
        table = owner._parameters if key in owner._parameters else owner._buffers
        path = (key,) if key in owner._param_td.keys() else tuple(key.split("."))
        set_both = partial(_put_params, root, owner, table, key, path)
        undo.append(partial(set_both, owner._param_td.get(path), table[key]))
        set_both(tensor, tensor)
    elif isinstance(owner, nn.Module):
        undo.append(partial(setattr, owner, key, getattr(owner, key)))
        # Not through the table, because an RNN also keeps a list of its weights.
        setattr(owner, key, tensor)
    else:
        store(root, owner, key, tensor, undo)


def _put_params(
    root: Any, owner: Any, table: Any, key: str, path: Any, inner: Any, own: Any
) -> None:
    """Put ``inner`` into the TensorDict of a TensorDictParams, and ``own`` into a module table."""
    with _unlocked_around(root, owner) as stack:
        _unlock(owner._param_td, stack)
        owner._param_td.set(path, inner)
    table[key] = own


def store(root: Any, owner: Any, key: str, value: Any, undo: Undo) -> None:
    """Put a tensor or a value into a container; ``undo`` gets the step that reverts it."""
    undo.append(partial(_store, root, owner, key, owner.get(key)))
    _store(root, owner, key, value)


def _store(root: Any, owner: Any, key: str, value: Any) -> None:
    """Put a tensor or a value into a container of a target, which is unlocked for that."""
    if is_tensor_collection(owner):
        with _unlocked_around(root, owner):
            set_item(owner, key, value)
    else:
        owner[key] = value


@contextmanager
def _unlocked_around(root: Any, owner: Any) -> Iterator[ExitStack]:
    """Unlock a TensorDict of a target in a block, with those that it is in."""
    with ExitStack() as stack:
        _unlock(root, stack)
        # The root may be a dict, or a TensorDict that is not locked, and has a locked one inside.
        if owner.is_locked or _is_on_meta(owner):
            for each in _path(root, owner) or [owner]:
                _unlock(each, stack)
        yield stack


def _path(root: Any, owner: Any) -> list[Any]:
    """Return the containers from a root to an owner inside; none if it is not there."""
    if root is owner:
        return [root]
    if is_tensordict_params(root):
        inner = [root._param_td]
    else:
        inner = [*root.values()] if is_nested(root) else []
    paths = (_path(each, owner) for each in inner if is_nested(each))
    return next(([root, *path] for path in paths if path), [])


def _unlock(td: Any, stack: ExitStack) -> None:
    """Unlock a TensorDict until the stack ends; one on meta may then hold tensors elsewhere."""
    if is_tensordict(td):
        if td.is_locked:
            td.unlock_()
            # The TensorDict is no context manager here, as its __exit__() would hide an error.
            stack.callback(td.lock_)
        if _is_on_meta(td):
            td.clear_device_()


def _is_on_meta(td: Any) -> bool:
    return td.device is not None and td.device.type == "meta"
