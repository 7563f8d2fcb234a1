"""How tensors look, to be compared again many times as fast as one by one.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

__all__ = ["Signature", "any_nested"]

_is_nested = attrgetter("is_nested")

_new_guards: Callable[..., Any] | None
try:  # C++ comparison of type, dtype, shape, strides and device: 0.1 us a tensor. Private API.
    from torch._C._dynamo.guards import TensorGuards as _new_guards
except ImportError:  # pragma: no cover - depends on the version of torch
    _new_guards = None


class Signature:
    """Type, dtype, shape, strides and device of a list of tensors, to be compared again.

    Also whether each is a conjugate or negative view, whose memory holds other numbers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._facts = _facts(tensors)
        self._guards = _make_guards(tensors)

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether other (or the same) tensor objects still look the same. Cheap.

        Args:
            tensors: The objects that this was made of, or others. Others must not be nested
                tensors: see :func:`any_nested`.
        """
        if len(tensors) != len(self._facts):
            return False
        if self._guards is not None and self._guards.check(*tensors):
            return True
        # The guards also look at things that do not matter here (requires_grad, autocast).
        if _facts(tensors) != self._facts:
            return False
        self._guards = _make_guards(tensors)
        return True


def _facts(tensors: Sequence[torch.Tensor]) -> list[Any]:
    getters = attrgetter("dtype", "device", "layout")
    # A conjugate view differs from its base in nothing but its flag, not even in its address.
    return [
        (
            type(tensor),
            getters(tensor),
            tensor.shape if _has_shape(tensor) else None,
            tensor.stride() if _is_strided(tensor) else None,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        for tensor in tensors
    ]


def any_nested(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them is a nested tensor.

    To be asked before tensors of which nothing is known are compared: torch ends the process
    when its C++ comparison meets a nested tensor, which has neither sizes nor strides.
    """
    return any(map(_is_nested, tensors))


def _has_shape(tensor: torch.Tensor) -> bool:
    return not tensor.is_nested or tensor.layout is not torch.strided


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _make_guards(tensors: Sequence[torch.Tensor]) -> Any:
    if _new_guards is None or not tensors:
        return None
    if not all(map(_is_strided, tensors)):
        return None  # torch ends the process for some that have no strides
    try:
        return _new_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (RuntimeError, TypeError, ValueError):  # pragma: no cover - private API, may change
        return None
