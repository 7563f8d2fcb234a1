"""A manifest together with the dtypes of torch.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aiosync.errors import ConfigError
from aiosync.wire import DEFAULT_LIMITS, DTYPE_NBYTES, Manifest, plan_manifest

if TYPE_CHECKING:
    from aiosync.tensors.walk import Leaves
    from aiosync.types import Limits

__all__ = ["DTYPES", "Layout", "dtype_name", "torch_dtype"]

_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in DTYPE_NBYTES
    if isinstance(getattr(torch, name, None), torch.dtype)
}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}

DTYPES = _BY_DTYPE.keys()
"""The dtypes that can travel."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype travels, for example ``"bfloat16"``.

    Raises:
        ConfigError: Tensors of this dtype cannot travel (quantised and sub-byte dtypes).
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        raise ConfigError(
            f"tensors of dtype {dtype} cannot travel; supported: {', '.join(_BY_NAME)}"
        )
    return name


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


class Layout:
    """Where each leaf lies in a flat buffer.

    Attributes:
        manifest: The manifest, checked when it was planned or decoded.
        dtypes: The torch dtype of each leaf.
        nbytes: Bytes of the payload, a multiple of 64.
        digest: 16 bytes that identify the layout.
        index: Which leaf each name stands for, also those of tied tensors.
    """

    __slots__ = ("digest", "dtypes", "index", "manifest", "nbytes")

    def __init__(self, manifest: Manifest) -> None:
        """Prepare for a manifest.

        Args:
            manifest: The manifest.

        Raises:
            ConfigError: This version of torch lacks one of its dtypes.
        """
        self.manifest: Manifest = manifest
        self.dtypes: tuple[torch.dtype, ...] = tuple(
            torch_dtype(leaf.dtype) for leaf in manifest.leaves
        )
        self.nbytes: int = manifest.nbytes
        self.digest: bytes = manifest.digest
        self.index: dict[str, int] = {
            name: at
            for at, leaf in enumerate(manifest.leaves)
            for name in (leaf.name, *leaf.aliases)
        }

    @classmethod
    def plan(cls, leaves: Leaves, limits: Limits = DEFAULT_LIMITS) -> Layout:
        """Lay the leaves out one after the other, each on a multiple of 64 bytes.

        Args:
            leaves: What to lay out.
            limits: Bounds that the receivers are expected to have.

        Raises:
            ConfigError: A dtype or a name cannot travel, or something is beyond the limits.
        """
        facts = (
            (each.name, dtype_name(each.tensor.dtype), each.tensor.shape, each.kind, each.aliases)
            for each in leaves.leaves
        )
        return cls(plan_manifest(facts, limits))

    def padding(self) -> list[tuple[int, int]]:
        """Return the (start, end) byte ranges that belong to no leaf."""
        starts = [leaf.offset for leaf in self.manifest.leaves] + [self.nbytes]
        ends = [0] + [leaf.offset + leaf.nbytes for leaf in self.manifest.leaves]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
