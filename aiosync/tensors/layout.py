"""A manifest together with typed views of the memory it describes.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aiosync.errors import ConfigError
from aiosync.tensors.dtypes import dtype_name, torch_dtype
from aiosync.wire import ALIGNMENT, DEFAULT_LIMITS, Manifest, plan_manifest

if TYPE_CHECKING:
    from aiosync.tensors.leaves import Leaves
    from aiosync.types import Limits

__all__ = ["Layout"]


class Layout:
    """Where each leaf lies in a flat buffer.

    Attributes:
        manifest: The manifest, checked when it was planned or decoded.
        dtypes: The torch dtype of each leaf.
    """

    __slots__ = ("digest", "dtypes", "manifest", "nbytes")

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
        """Bytes of the payload, a multiple of 64."""
        self.digest: bytes = manifest.digest
        """16 bytes that identify the layout."""

    def __repr__(self) -> str:
        return f"<Layout leaves={len(self.manifest.leaves)} nbytes={self.nbytes}>"

    @classmethod
    def plan(cls, leaves: Leaves, limits: Limits = DEFAULT_LIMITS) -> Layout:
        """Lay the leaves out one after the other, each on a multiple of 64 bytes.

        Args:
            leaves: What to lay out.
            limits: Bounds that the receivers are expected to have.

        Raises:
            ConfigError: A dtype or a name cannot travel, or something is beyond the limits.
        """
        return cls(
            plan_manifest(
                (
                    (
                        leaf.name,
                        dtype_name(leaf.tensor.dtype),
                        leaf.tensor.shape,
                        leaf.kind,
                        leaf.aliases,
                    )
                    for leaf in leaves.leaves
                ),
                limits,
            )
        )

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return one typed view for each leaf, all of them sharing the storage of ``flat``.

        :meth:`FlatBuffer.views` is what models are flipped to: there each view has a storage of
        its own, so that saving one parameter does not save the whole buffer.

        Args:
            flat: 1-D uint8 tensor on the CPU, contiguous, at least ``nbytes`` long, starting on
                a multiple of 64 bytes.

        Raises:
            ConfigError: ``flat`` is not such a tensor.
        """
        if flat.dtype is not torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise ConfigError("a flat buffer must be a contiguous 1-D uint8 tensor")
        if flat.numel() < self.nbytes:
            raise ConfigError(
                f"the buffer has {flat.numel()} bytes, the layout needs {self.nbytes}"
            )
        if flat.data_ptr() % ALIGNMENT:
            raise ConfigError(f"the buffer does not start on a multiple of {ALIGNMENT} bytes")
        with torch.inference_mode(False), torch.no_grad():
            return [
                flat[leaf.offset : leaf.offset + leaf.nbytes].view(dtype).view(leaf.shape)
                if leaf.nbytes
                else torch.empty(leaf.shape, dtype=dtype, device=flat.device)
                for leaf, dtype in zip(self.manifest.leaves, self.dtypes, strict=True)
            ]

    def padding(self) -> list[tuple[int, int]]:
        """Return the (start, end) byte ranges that belong to no leaf."""
        gaps = []
        position = 0
        for leaf in self.manifest.leaves:
            if leaf.offset > position:
                gaps.append((position, leaf.offset))
            position = leaf.offset + leaf.nbytes
        if position < self.nbytes:
            gaps.append((position, self.nbytes))
        return gaps
