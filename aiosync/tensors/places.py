"""Places: putting tensors and values where a walk found others.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from aiosync.tensors.walk import Place

__all__ = ["Undo", "put", "store"]

Undo: TypeAlias = "list[Callable[[], object]]"
"""Steps that put back the old tensors and values; the last step runs first."""


def put(root: Any, place: Place, tensor: torch.Tensor, undo: Undo) -> None:
    """Put a tensor object into one place of a target; ``undo`` gets the step that reverts it."""
    owner, key = place.owner, place.key
    if is_tensordict_params(owner):
        table = owner._parameters if key in owner._parameters else owner._buffers
        path = (key,) if key in owner._param_td.keys() else tuple(key.split("."))
        undo.append(
            partial(_put_params, owner, table, key, path, owner._param_td.get(path), table[key])
        )
        _put_params(owner, table, key, path, tensor, tensor)
    elif isinstance(owner, nn.Module):
        undo.append(partial(setattr, owner, key, getattr(owner, key)))
        # Not through the table, because an RNN also keeps a list of its weights.
        setattr(owner, key, tensor)
    else:
        undo.append(partial(store, root, owner, key, owner.get(key)))
        store(root, owner, key, tensor)


def _put_params(owner: Any, table: Any, key: str, path: Any, inner: Any, own: Any) -> None:
    """Put ``inner`` into the TensorDict of a TensorDictParams, and ``own`` into a module table."""
    with _unlocked(owner._param_td) as td:
        td.set(path, inner)
    table[key] = own


def store(root: Any, owner: Any, key: str, value: Any) -> None:
    """Put a tensor or a value into a container of a target, whose root is unlocked for that."""
    if is_tensor_collection(owner):
        with _unlocked(root):
            set_item(owner, key, value)
    else:
        owner[key] = value


def _unlocked(td: Any) -> AbstractContextManager[Any]:
    """Unlock a TensorDict in a block; one on meta may then hold tensors of other devices."""
    if not is_tensordict(td):
        return nullcontext()
    context: AbstractContextManager[Any] = td.unlock_() if td.is_locked else nullcontext(td)
    if td.device is not None and td.device.type == "meta":
        td.clear_device_()
    return context
