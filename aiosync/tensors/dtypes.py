"""The dtypes that can travel, and their names in manifests. Must not import a transport."""

from __future__ import annotations

import torch

from aiosync.errors import ConfigError
from aiosync.wire import DTYPE_NBYTES

__all__ = ["DTYPES", "torch_dtype"]

_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in DTYPE_NBYTES
    if isinstance(getattr(torch, name, None), torch.dtype)
}
DTYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}
"""The dtypes that can travel, each with its name."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name from a manifest.

    Raises:
        ConfigError: The name is unknown, or this version of torch has no such dtype.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise ConfigError(
            f"unknown dtype {name!r}; torch {torch.__version__} has: {', '.join(_BY_NAME)}"
        )
    return dtype
