"""Names of dtypes: what a manifest says, and which torch dtype that is.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from aiosync.errors import ConfigError
from aiosync.wire import DTYPE_NBYTES

__all__ = ["dtype_name", "torch_dtype"]

_BY_NAME: Mapping[str, torch.dtype] = MappingProxyType(
    {
        name: getattr(torch, name)
        for name in DTYPE_NBYTES
        if isinstance(getattr(torch, name, None), torch.dtype)
    }
)
_BY_DTYPE: Mapping[torch.dtype, str] = MappingProxyType(
    {dtype: name for name, dtype in _BY_NAME.items()}
)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype travels, for example ``"bfloat16"``.

    Raises:
        ConfigError: Tensors of this dtype cannot travel (quantised and sub-byte dtypes).
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        raise ConfigError(f"tensors of dtype {dtype} cannot travel; supported: {_supported()}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name from a manifest.

    Raises:
        ConfigError: The name is unknown, or this version of torch has no such dtype.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        why = (
            f"torch {torch.__version__} has no dtype {name!r}"
            if name in DTYPE_NBYTES
            else f"unknown dtype {name!r}; supported: {_supported()}"
        )
        raise ConfigError(why)
    return dtype


def _supported() -> str:
    return ", ".join(_BY_NAME)
