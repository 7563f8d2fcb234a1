"""Nested collectors: a worker that has workers of its own passes each update on to them."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import torch
from torch import nn

from aiosync.sync import WeightSyncScheme

__all__ = ["Cascade", "has_workers"]


def has_workers(collector: Any) -> bool:
    """Whether a collector sends weights on to others."""
    return bool(getattr(collector, "_weight_sync_schemes", None)) or hasattr(collector, "procs")


class Cascade:
    """Passes what a collector receives on to its own workers, by its own scheme.

    The trainer's ``send()`` returns when they, too, have it; what goes wrong there is raised
    there.

    Args:
        collector: The collector in between; referred to weakly.
        scheme: The scheme by which it receives.
    """

    def __init__(self, collector: Any, scheme: WeightSyncScheme) -> None:
        self._collector = weakref.ref(collector)
        self._scheme = weakref.ref(scheme)
        # What its workers have, as long as that is of interest. They began with these weights;
        # what the trainer begins with is mostly the same, and so is what RayCollector sends
        # right after that. Passing on the same again would count as one version more.
        self._known: dict[str, torch.Tensor] | None = _copy_of(scheme.model)
        self._looks = 2

    async def pass_on(self, epoch: int, version: int) -> None:
        """Update the collector's workers, in a thread of its own, and wait for them."""
        del epoch, version
        # The collector's call blocks, and its scheme may use this very loop.
        await asyncio.to_thread(self._update)

    def _update(self) -> None:
        collector, scheme = self._collector(), self._scheme()
        if collector is None or scheme is None:
            return
        with scheme.reading():  # nothing newer may come in between
            if self._is_known(scheme.model):
                return
            collector.update_policy_weights_(
                policy_or_weights=scheme.weights, model_id=scheme.model_id
            )

    def _is_known(self, model: Any) -> bool:
        if self._looks == 0:
            return False
        self._looks -= 1
        before, self._known = self._known, _copy_of(model) if self._looks else None
        if before is None or not _equal(before, _copy_of(model)):
            return False
        self._looks, self._known = 0, None  # what comes next is an update
        return True


def _copy_of(model: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(model, nn.Module):
        return None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(tensor.is_meta for tensor in tensors.values()):
        return None
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor] | None) -> bool:
    if other is None or one.keys() != other.keys():
        return False
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())
