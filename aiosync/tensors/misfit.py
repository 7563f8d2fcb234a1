"""Texts that say why a tensor of a target cannot take the leaf that was sent for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aiosync.tensors.walk import PLAIN

if TYPE_CHECKING:
    from aiosync.tensors.apply import Spot

__all__ = ["DTYPE_HINT", "STRICT_HINT", "difference"]

DTYPE_HINT = (
    " If wire_dtype= of the sender chose that dtype, name patterns there can choose another."
)
STRICT_HINT = (
    " With strict=False on the receiving scheme, what both sides have is taken, and floating-point "
    "dtypes are cast."
)


def difference(spot: Spot, shape: tuple[int, ...], dtype: torch.dtype, strict: object) -> str:
    """Return a text on the differences of a leaf from its tensor; empty if it fits."""
    tensor = spot.tensor
    if not (  # a tensor on the meta device gets memory
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and all(step or n < 2 for step, n in zip(tensor.stride(), tensor.shape, strict=True))
    ):
        kind = type(tensor)
        return (
            f"the target is a {kind.__module__}.{kind.__qualname__} ({tensor.layout}), and only "
            "plain strided tensors and parameters, that are no conjugate, negative, expanded or "
            "inference tensors, take weights: use load= instead of model="
        )
    parts = []
    if tuple(tensor.shape) != shape:
        parts.append(f"expected shape {tuple(tensor.shape)}, got {shape}")
    # A single wire_dtype does not round all buffers, but a model in less precision does.
    exact = strict and not (spot.is_buffer and tensor.dtype.itemsize <= dtype.itemsize)
    castable = (tensor.dtype.is_floating_point and dtype.is_floating_point) or (
        tensor.dtype.is_complex and dtype.is_complex
    )
    if tensor.dtype is not dtype and (exact or not castable):
        parts.append(f"expected dtype {tensor.dtype}, got {dtype}".replace("torch.", ""))
    return "; ".join(parts)
