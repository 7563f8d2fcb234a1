"""Nested collectors: a worker that has workers of its own passes each update on to them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
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
        # The collector's call blocks, and its scheme may use this very loop. A thread of a pool
        # would keep a process from ending whose workers do not answer.
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if done.done():
                return  # cancelled: the scheme was closed
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def run() -> None:
            error: BaseException | None = None
            try:
                self._update()
            except BaseException as exc:  # noqa: BLE001 - raised in the relay, for the trainer
                error = exc
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=run, name="aiosync-cascade", daemon=True).start()
        await done

    def _update(self) -> None:
        collector, scheme = self._collector(), self._scheme()
        if collector is None or scheme is None:
            return
        with scheme.reading():  # nothing newer may come in between
            now = _copy_of(scheme.model) if self._looks else None
            before, self._known = self._known, None
            self._looks = max(0, self._looks - 1)
            if before is not None and _equal(before, now):
                self._looks = 0  # what comes next is an update
                return
            collector.update_policy_weights_(
                policy_or_weights=scheme.weights, model_id=scheme.model_id
            )
            if self._looks:
                self._known = now  # not before: it may have failed


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
