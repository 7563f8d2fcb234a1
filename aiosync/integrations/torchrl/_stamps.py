"""The version that computed each frame, in what a collector collects.

The calls of its policy are reads of a scheme's guard, and the version of each is written beside
TorchRL's ``("collector", "traj_ids")``. Must not import collectors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from aiosync.receiver.guard import Guard

__all__ = ["guard_policy", "is_stamped", "stamp"]

_KEY = ("collector", "policy_version")  # 0: a random action, or weights without a version


def guard_policy(guard: Guard, collector: Any) -> None:
    """Have the collector call its policy inside of a read; idempotent.

    The policy itself gets no hooks: where there are no workers it is the trainer's, who may
    compile, export or script it.
    """
    policy = getattr(collector, "_wrapped_policy", None)
    if not callable(policy) or isinstance(policy, _Guarded):
        return
    if getattr(collector, "_wrapped_policy_maybe_compiled", None) is policy:
        collector._wrapped_policy_maybe_compiled = _Guarded(policy, guard, collector)


def is_stamped(collector: Any) -> bool:
    """Whether frames get versions: where TorchRL labels them, too."""
    tracks = getattr(collector, "policy_version_tracker", None) is not None
    return tracks and getattr(collector, "track_traj_ids", False)


def stamp(collector: Any, version: int = 0) -> None:
    """Write the version of the frame that is being collected; 0 before the first of a rollout."""
    carrier, buffers = collector._carrier, getattr(collector, "_final_rollout", None)
    device = collector.storing_device
    carrier.set(_KEY, torch.full(carrier.batch_size, version, device=device))
    if buffers is not None and not version:  # those of a rollout that is cut short keep it
        zeros = torch.zeros(buffers.batch_size, dtype=torch.int64, device=device)
        buffers.update_({_KEY: zeros}) if _KEY in buffers.keys(True) else buffers.set(_KEY, zeros)


class _Guarded:
    """A policy as its collector calls it."""

    def __init__(self, policy: Any, guard: Guard, collector: Any) -> None:
        self._policy, self._guard = policy, guard
        self._collector = weakref.ref(collector)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guard, collector = self._guard, self._collector()
        frame = sys._getframe()
        guard.enter(frame)  # known by its frame, should Ctrl-C come before leave()
        version = guard.held[1]
        try:
            return self._policy(*args, **kwargs)
        finally:
            guard.leave(frame)
            if collector is not None and is_stamped(collector):
                stamp(collector, version)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_policy" not in self.__dict__:  # a copy asks before it is set
            raise AttributeError(name)
        return getattr(self._policy, name)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._policy,)  # a copied or pickled collector has no guard


def _itself(policy: Any) -> Any:
    return policy
