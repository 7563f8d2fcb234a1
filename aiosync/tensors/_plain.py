"""Tensors whose elements are one block of bytes on the CPU.

Private to :mod:`aiosync.tensors`. This module must never import asyncio or a transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LARGE_NBYTES", "as_bytes", "is_plain_cpu"]

LARGE_NBYTES = 256 * 2**10
"""Tensors from here on are copied one by one without the GIL; smaller ones in one go, with it."""

_PLAIN = (torch.Tensor, nn.Parameter)


def is_plain_cpu(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor are one block of bytes on the CPU, in C order."""
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the memory of a plain CPU tensor as a 1-D uint8 array. Not for empty tensors."""
    with torch.no_grad():
        array: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
