"""Whether what was sent as several tensors agrees, where it is one tensor, or one memory, here.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from aiosync.errors import ManifestMismatch

if TYPE_CHECKING:
    from aiosync.tensors._plan import Plan
    from aiosync.tensors.layout import Layout

__all__ = ["check_equal", "check_overlapping"]


def check_equal(plan: Plan, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
    """Refuse leaves that differ although they are one tensor here."""
    leaves = layout.manifest.leaves
    mismatched = {}
    for assignment in plan.equal:
        dtype = assignment.spot.tensor.dtype
        first = _bits(sources[assignment.leaf], dtype)
        for other in assignment.equal:
            if not torch.equal(first, _bits(sources[other], dtype)):
                mismatched[leaves[other].name] = (
                    f"tied to {leaves[assignment.leaf].name} here, but sent with other values"
                )
    if mismatched:
        raise ManifestMismatch(mismatched=mismatched, hint="Nothing was changed.")


def check_overlapping(plan: Plan, sources: Sequence[torch.Tensor]) -> None:
    """Refuse leaves that undid each other, as their tensors share memory here."""
    assert plan.layout is not None
    leaves = plan.layout.manifest.leaves
    mismatched = {
        leaves[leaf].name: "shares memory with another tensor here, but was sent with other values"
        for tensor, leaf in plan.overlapping
        if not torch.equal(_bits(tensor, tensor.dtype), _bits(sources[leaf], tensor.dtype))
    }
    if mismatched:
        raise ManifestMismatch(
            mismatched=mismatched,
            hint="Nothing was changed. Give each memory of its own here, or have them share it in "
            "the trainer as well.",
        )


def _bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    cast = plain.to(dtype).contiguous().reshape(-1)
    return cast.view(torch.uint8) if cast.numel() else cast
