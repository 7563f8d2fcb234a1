"""Transient buffers: those that are no part of ``state_dict()``, which may be state of a process.

This module must never import asyncio or a transport.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

__all__ = ["TransientBuffers"]


class TransientBuffers:
    """Warns once if this process changes buffers that updates overwrite.

    Args:
        owner: Class name of the target that has them, for the warning.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        # The buffers after the last update, each with the number of writes to it until then.
        self._left: dict[str, tuple[torch.Tensor, int]] = {}
        self._warned = False

    def check(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Before an update, warn of buffers that changed since :meth:`note`; forget those noted."""
        left, self._left = self._left, {}
        both = left.keys() & buffers.keys()
        changed = sorted(name for name in both if _differs(buffers[name], *left[name]))
        if changed:
            # From now on note() remembers nothing, so that this is the only warning.
            self._warned = True
            warnings.warn(
                f"updates overwrite buffers of the {self._owner} that this process writes to: "
                f"{', '.join(changed)}; if they hold state of this process, such as hidden states "
                'or caches, give its scheme buffers="persistent"',
                stacklevel=2,
            )

    def note(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Remember the buffers as an update has left them, unless it was warned already."""
        if not self._warned:
            self._left = {name: (each, _num_writes(each)) for name, each in buffers.items()}


def _num_writes(tensor: torch.Tensor) -> int:
    """Return how often torch wrote to a tensor; 0 for an inference tensor, which has no count."""
    return 0 if tensor.is_inference() else tensor._version


def _differs(tensor: torch.Tensor, before: torch.Tensor, num_writes: int) -> bool:
    """Return True if a buffer was written to, or replaced by other values; not if it was moved."""
    if tensor is before:
        return _num_writes(tensor) != num_writes
    return tensor.shape != before.shape or not torch.equal(tensor, before.to(tensor))
