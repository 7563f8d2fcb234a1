"""The two tables of a ``TensorDictParams``, which is a TensorDict and a module.

A forward computes with the TensorDict inside; ``parameters()`` lists the tables of the module.
TensorDict's ``to_module()`` changes only the first, and TorchRL takes away the memory of its
workers' policies so. Private to :mod:`aiosync.tensors`. This module must never import asyncio or
a transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from aiosync.tensors._tensordict import (
    is_non_tensor,
    is_plain_tensordict,
    is_tensor_collection,
    is_tensordict_params,
)

if TYPE_CHECKING:
    from tensordict import TensorDictParams

__all__ = ["Inner", "inner_tensors", "lacks_memory"]


class Inner(NamedTuple):
    """What the TensorDict of one ``TensorDictParams`` holds, by dotted name."""

    module: TensorDictParams
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, module: TensorDictParams) -> Inner:
        found: dict[str, torch.Tensor] = {}
        _walk(module, "", found)
        return cls(module, found)

    def unchanged(self) -> bool:
        """Whether the TensorDict still holds the very same tensors."""
        now = Inner.of(self.module).tensors
        return now.keys() == self.tensors.keys() and all(
            map(is_, now.values(), self.tensors.values())
        )

    def in_use(self, table: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors that count, under the names in one table of the module."""
        return {
            key: _in_use(own, self.tensors.get(key))
            for key, own in table.items()
            if own is not None
        }

    def differs(self, key: str, tensor: torch.Tensor) -> bool:
        """Whether only the TensorDict holds a tensor that counts, and the module another one."""
        own = self.module._parameters.get(key, self.module._buffers.get(key))
        return tensor is not own


def _walk(td: Any, prefix: str, found: dict[str, torch.Tensor]) -> None:
    while is_tensordict_params(td):
        td = td._param_td  # its own items() go through hooks
    inner = td._tensordict if is_plain_tensordict(td) else None
    for key, value in (inner if type(inner) is dict else td).items():
        if isinstance(value, torch.Tensor):
            found[prefix + key] = value
        elif is_tensor_collection(value) and not is_non_tensor(value):
            _walk(value, f"{prefix}{key}.", found)


def _in_use(own: torch.Tensor, inner: torch.Tensor | None) -> torch.Tensor:
    if inner is None or inner is own:
        return own
    is_param = isinstance(own, nn.Parameter)
    if isinstance(inner, nn.Parameter) is is_param:
        return inner
    if not inner.is_meta:
        return own  # ``data.to_module()`` puts plain tensors there, for the time of a call
    if is_param:  # on their way to the meta device parameters became plain tensors, or vice versa
        return nn.Parameter(inner.detach(), requires_grad=own.requires_grad)
    return inner.detach()


def inner_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor in the TensorDict of a ``TensorDictParams`` in a module."""
    for each in module.modules():
        if is_tensordict_params(each):
            yield from Inner.of(each).tensors.values()


def lacks_memory(model: object) -> bool:
    """Whether a model is a module with parameters on the meta device."""
    return isinstance(model, nn.Module) and (
        any(parameter.is_meta for parameter in model.parameters())
        or any(tensor.is_meta for tensor in inner_tensors(model))
    )
