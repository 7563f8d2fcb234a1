"""Single changes to a target, each of which can be undone bit for bit.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from aiosync.errors import ManifestMismatch
from aiosync.tensors._plain import as_bytes, is_plain_cpu
from aiosync.tensors._tensordict import (
    is_non_tensor_stack,
    is_tensor_collection,
    is_tensordict,
    is_tensordict_params,
)

if TYPE_CHECKING:
    from tensordict import TensorDictParams

    from aiosync.tensors._tree import Place
    from aiosync.tensors.copying import CopyPool

__all__ = [
    "Undo",
    "back_up",
    "back_up_tables",
    "copy_large",
    "copy_risky",
    "flip",
    "new_memory",
    "put",
    "put_data",
    "put_extra_state",
    "put_value",
    "replacement",
    "storage_of",
    "unwritable",
    "write_through",
]

Undo: TypeAlias = "list[Callable[[], object]]"

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def back_up(tensor: torch.Tensor, undo: Undo) -> None:
    """Remember the elements of a tensor that is going to be written in place."""
    old = tensor.detach().clone()

    def restore() -> None:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
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
    if isinstance(old, nn.Parameter):
        new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
        new.__dict__.update(old.__dict__)
        return new
    return data.requires_grad_(old.requires_grad)


def copy_risky(
    tensor: torch.Tensor,
    source: torch.Tensor,
    name_of: Callable[[torch.Tensor], str],
    undo: Undo,
) -> None:
    """Back up and copy into any kind of tensor, also a subclass or a sparse one.

    Raises:
        ManifestMismatch: A subclass raised something, which is the cause.
    """
    try:
        back_up(tensor, undo)
        if tensor.is_mkldnn:
            source = source.to(tensor.device, tensor.dtype).to_mkldnn()
        elif tensor.layout is not torch.strided:
            source = source.to_sparse(layout=tensor.layout)
        tensor.copy_(source)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as exc:  # the trainer is told, and whoever applies: what a subclass raises
        if type(tensor) in (torch.Tensor, nn.Parameter):
            raise
        raise unwritable(name_of(tensor), tensor, exc) from exc


def unwritable(
    name: str, tensor: torch.Tensor, error: BaseException | None = None
) -> ManifestMismatch:
    """Say that a subclass, such as a quantized tensor, cannot take the values of a plain tensor."""
    kind = type(tensor)
    why = f"the target is a {kind.__module__}.{kind.__qualname__}, which takes no plain weights"
    if error is not None:
        why += f" ({type(error).__name__}: {error})"
    return ManifestMismatch(
        mismatched={name: why},
        hint="Nothing was changed. Give the receiving scheme load= instead of model=, a function "
        "that loads the weights into a plain model and quantizes or wraps that",
    )


def write_through(place: Place, source: torch.Tensor, undo: Undo) -> None:
    """Write a tensor of a TensorDict that makes it anew whenever it is asked for it."""
    owner, key = place.owner, place.key
    old = owner.get(key).detach().clone()
    undo.append(lambda: owner.set_(key, old))
    owner.set_(key, source.to(old.device, old.dtype))  # some write no other dtype


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a plain tensor; 0 if there is none."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return 0


def copy_large(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], pool: CopyPool | None) -> None:
    """Copy into plain contiguous CPU tensors of the same dtype without the GIL, without OpenMP.

    Sources that are not plain (strided, on another device, a conjugate view) are left to torch.
    """
    # A buffer's views are plain, but apply_tensors() takes tensors from anywhere: the bytes of
    # those are in another order, or not in this memory at all.
    for target, source in pairs:
        if not is_plain_cpu(source):
            target.copy_(source)
    pairs = [pair for pair in pairs if is_plain_cpu(pair[1])]
    if pool is not None:
        pool.copy([(as_bytes(target), as_bytes(source)) for target, source in pairs])
    else:
        deque(
            map(
                ctypes.memmove,
                [target.data_ptr() for target, _ in pairs],
                [source.data_ptr() for _, source in pairs],
                [target.nbytes for target, _ in pairs],
            ),
            maxlen=0,
        )
    torch.autograd.graph.increment_version([target for target, _ in pairs])


def put(root: Any, place: Place, tensor: torch.Tensor, undo: Undo) -> None:
    """Put a tensor object into one place of a target."""
    owner, key = place.owner, place.key
    if is_tensordict_params(owner):
        old = owner._parameters[key] if key in owner._parameters else owner._buffers[key]
        inner = owner._param_td.get(_path(owner, key))
        undo.append(lambda: _put_params(owner, key, inner, old))
        _put_params(owner, key, tensor, tensor)
    elif isinstance(owner, nn.Module):
        table = owner._parameters if key in owner._parameters else owner._buffers
        before = table[key]
        undo.append(lambda: _put_module(owner, key, before))
        _put_module(owner, key, tensor)
    else:
        put_value(root, place, tensor, undo)


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


def put_value(root: Any, place: Place, value: Any, undo: Undo) -> None:
    """Store a value or a tensor in a TensorDict or a dict."""
    owner, key = place.owner, place.key
    old = _inside(owner).get(key) if is_tensor_collection(owner) else owner[key]
    undo.append(lambda: _store(root, owner, key, old))
    if is_non_tensor_stack(old):
        value = _stacked(value, old.batch_dims)
    elif is_non_tensor_stack(value) and not is_tensor_collection(owner):
        value = value.tolist()
    _store(root, owner, key, value)


def _inside(owner: Any) -> Any:
    """Return the TensorDict in a tensorclass, which gives a list for a stack of values."""
    return owner if is_tensordict(owner) else owner._tensordict


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


def put_extra_state(module: nn.Module, old: Any, value: Any, undo: Undo) -> None:
    """Call ``set_extra_state()``; undoing it calls it with the old state."""
    undo.append(lambda: module.set_extra_state(old))
    module.set_extra_state(value)


def back_up_tables(module: nn.Module, undo: Undo) -> None:
    """Remember which tensors a module has, because ``set_extra_state()`` may replace them."""
    saved = [(table, dict(table)) for table in (module._parameters, module._buffers)]

    def restore() -> None:
        for table, items in saved:
            if list(table) != list(items) or any(table[key] is not items[key] for key in items):
                table.clear()
                table.update(items)  # type: ignore[arg-type]

    undo.append(restore)
