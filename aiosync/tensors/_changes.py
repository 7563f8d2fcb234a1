"""Single changes to a target, each of which can be undone bit for bit.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from aiosync.tensors._tensordict import (
    is_non_tensor_stack,
    is_tensor_collection,
    is_tensordict,
    is_tensordict_params,
)
from aiosync.tensors.copying import CopyPool, as_bytes, copy_blocks, is_plain_cpu

if TYPE_CHECKING:
    from tensordict import TensorDictParams

    from aiosync.tensors._tree import Place

__all__ = [
    "Undo",
    "back_up",
    "copy_large",
    "flip",
    "new_memory",
    "put",
    "put_data",
    "put_value",
    "replacement",
]

Undo: TypeAlias = "list[Callable[[], object]]"

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def back_up(tensor: torch.Tensor, undo: Undo) -> None:
    """Remember the elements of a tensor that is going to be written in place."""
    old = tensor.detach().clone()

    def restore() -> None:
        tensor.copy_(old)

    undo.append(restore)


def put_data(tensor: torch.Tensor, data: torch.Tensor, undo: Undo) -> None:
    """Give a tensor object other memory."""
    back_up_data(tensor, undo)
    tensor.data = data


def back_up_data(tensor: torch.Tensor, undo: Undo) -> None:
    """Remember which memory a tensor has."""
    old = tensor.data

    def restore() -> None:
        tensor.data = old

    undo.append(restore)


def flip(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Give each tensor the memory of its view.

    The loop runs in C: no other Python thread, and no signal handler, sees some of the tensors
    flipped and others not. Autograd is told as of any change in place: some operations keep the
    parameter itself for their backward pass, which would silently be that of other weights.
    """
    deque(map(_set_data, tensors, views), maxlen=0)
    torch.autograd.graph.increment_version(tensors)


def new_memory(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of ``source``, laid out as ``tensor`` is."""
    return torch.empty_like(tensor, requires_grad=False).copy_(source)


def replacement(old: torch.Tensor, source: torch.Tensor, *, view: bool) -> torch.Tensor:
    """Return what takes the place of a tensor.

    Args:
        old: The tensor; may be on the meta device.
        source: The values.
        view: The result is a parameter that views ``source``; otherwise it has its own memory.
    """
    if view:
        data = source
    else:
        device = source.device if old.is_meta else old.device
        data = torch.empty(old.shape, dtype=old.dtype, device=device).copy_(source)
    if type(old) is nn.Parameter:
        return nn.Parameter(data, requires_grad=old.requires_grad)
    return data.requires_grad_(old.requires_grad)


def copy_large(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], pool: CopyPool | None) -> None:
    """Copy into plain contiguous CPU tensors of the same dtype without the GIL, without OpenMP.

    Sources that are not plain (strided, on another device, a conjugate view) are left to torch.
    """
    # A buffer's views are plain, but apply_tensors() takes tensors from anywhere: the bytes of
    # those are in another order, or not in this memory at all.
    blocks = []
    for target, source in pairs:
        if is_plain_cpu(source):
            blocks.append((as_bytes(target), as_bytes(source)))
        else:
            target.copy_(source)
    (copy_blocks if pool is None else pool.copy)(blocks)
    torch.autograd.graph.increment_version([target for target, _ in pairs])


def put(root: Any, place: Place, tensor: torch.Tensor, undo: Undo) -> None:
    """Put a tensor object into one place of a target."""
    owner, key = place.owner, place.key
    if is_tensordict_params(owner):
        old = owner._parameters[key] if key in owner._parameters else owner._buffers[key]
        inner = owner._param_td.get(_path(owner, key))
        undo.append(partial(_put_params, owner, key, inner, old))
        _put_params(owner, key, tensor, tensor)
    elif isinstance(owner, nn.Module):
        table = owner._parameters if key in owner._parameters else owner._buffers
        undo.append(partial(_put_module, owner, key, table[key]))
        _put_module(owner, key, tensor)
    else:
        undo.append(partial(_store, root, owner, key, owner.get(key)))
        _store(root, owner, key, tensor)


def _put_module(module: nn.Module, key: str, tensor: torch.Tensor | None) -> None:
    setattr(module, key, tensor)  # not the table: an RNN keeps a list of its weights as well
    for table in (module._parameters, module._buffers):
        if key in table:
            table[key] = tensor  # type: ignore[assignment]


def _path(params: TensorDictParams, key: str) -> tuple[str, ...]:
    """Where the TensorDict has what the module has under a dotted name."""
    return (key,) if key in params._param_td.keys() else tuple(key.split("."))


def _put_params(params: TensorDictParams, key: str, inner_tensor: Any, tensor: Any) -> None:
    inner = params._param_td
    with unlocked(inner):
        _leave_meta(inner)
        inner.set(_path(params, key), inner_tensor)
    table = params._parameters if key in params._parameters else params._buffers
    table[key] = tensor


def put_value(root: Any, place: Place, value: Any) -> None:
    """Store a value in a TensorDict or a dict."""
    owner, key = place.owner, place.key
    old = owner.get(key)
    if is_non_tensor_stack(old):
        value = _stacked(value, old.batch_dims)
    elif is_non_tensor_stack(value) and not is_tensor_collection(owner):
        value = value.tolist()
    _store(root, owner, key, value)


def _stacked(value: Any, dims: int) -> Any:
    """Make a stack of values of a list of them, as some forms of a TensorDict have it."""
    if type(value) is not list or not dims:
        return value
    from tensordict import NonTensorStack

    return NonTensorStack(*(_stacked(item, dims - 1) for item in value))


def _store(root: Any, owner: Any, key: str, value: Any) -> None:
    if not is_tensor_collection(owner):
        owner[key] = value
        return
    with unlocked(root):
        _leave_meta(root)
        if isinstance(value, torch.Tensor) or is_tensor_collection(value):
            owner.set(key, value)
        else:
            owner.set_non_tensor(key, value)


def _leave_meta(td: Any) -> None:
    """Keep a TensorDict of the meta device from moving there what is put into it."""
    if is_tensordict(td) and td.device is not None and td.device.type == "meta":
        td.clear_device_()


def unlocked(td: Any) -> AbstractContextManager[object]:
    """Unlock a TensorDict for a while, if it is one and is locked."""
    if is_tensordict(td) and td.is_locked:
        context: AbstractContextManager[object] = td.unlock_()
        return context
    return nullcontext()
