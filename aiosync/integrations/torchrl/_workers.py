"""A worker's collector: the versions that it stamps on data, and workers of its own.

TorchRL stamps data with the version that computed the action. A collector asks its tracker for it
at each step of the environment, some time after the forward pass that computed the action. An
update that comes in between must not change the answer, so the tracker learns of it when the next
forward begins. Must not import collectors.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from aiosync.receiver.guard import Guard
from aiosync.receiver.hooks import in_thread
from aiosync.schemes.inside import life_of
from aiosync.sync import WeightSyncScheme
from aiosync.sync._schemes import core_of

__all__ = ["Cascade", "Labels", "guard_policy", "has_workers", "is_stamped", "stamp"]

_KEY = ("collector", "policy_version")  # 0: a random action, or weights without a version

# What collects. Of an LLMCollector `rollout` is a property, and one of the others what it returns.
_ROLLOUTS = ("rollout", "_rollout_all", "_rollout_yield_trajs", "_rollout_yield_trajs_async")


class Labels:
    """Keeps the tracker of a collector at the version of its policy.

    The tracker starts where it is; it grows by one with every version that the trainer sends
    after the initial weights, whether or not this worker got all of them.

    Args:
        collector: Has ``policy_version_tracker``; referred to weakly.
        guard: Of the scheme; knows when forward passes begin.
        version: Version that the policy has already; 0 if the initial weights are to come.
        sees_forwards: Whether forward passes are reads of the guard. If not, the tracker grows at
            once, and an action's label may be newer than the action.
        stamps: Whether frames get the scheme's version, too, as far as forward passes are seen.
    """

    def __init__(
        self, collector: Any, guard: Guard, version: int, *, sees_forwards: bool, stamps: bool
    ) -> None:
        self._collector = weakref.ref(collector)
        self._guard = guard
        self._epoch: int | None = None
        self._version = version
        self._grown = 0  # by how much the tracker is behind
        self._stamps = stamps
        self._lock = threading.Lock()
        self._rollouts = 0  # under way, in any thread
        if sees_forwards:
            self._watch(collector)

    def flipped(self, epoch: int, version: int) -> None:
        """The policy has another version now. Called under the guard, on any thread.

        Args:
            epoch: Of the trainer.
            version: What the policy has. The first one is what it begins with.
        """
        collector = self._collector()
        tracker = getattr(collector, "policy_version_tracker", None)
        if tracker is None:
            return
        if not self._version:
            self._epoch, self._version = epoch, version
            return
        restarted = self._epoch is not None and epoch != self._epoch
        grown = 1 if restarted else version - self._version
        self._epoch, self._version = epoch, version
        with self._lock:
            self._grown += grown
            if self._rollouts:
                self._guard.before_next_read = self._set
                return
        self._set()

    def _set(self) -> None:
        collector = self._collector()
        with self._lock:
            grown, self._grown = self._grown, 0
        if collector is None or not grown:
            return
        tracker = collector.policy_version_tracker
        if isinstance(getattr(tracker, "version", None), int):
            # Not increment_version(): it keeps a history that grows for ever.
            tracker.version += grown
        else:
            tracker.increment_version()  # names of versions, which cannot be counted

    # -- whether it collects -------------------------------------------------------------------

    def _watch(self, collector: Any) -> None:
        """Know when the collector is in ``rollout()``, where an action may wait for its label.

        Not from the frames of other threads: whoever looks at those keeps their variables, and
        may be the one who destroys them. Some of torch's must end in the thread they began in.
        """
        for name in _ROLLOUTS:
            rollout = getattr(type(collector), name, None)
            if inspect.isfunction(rollout):
                setattr(collector, name, self._watched(rollout))

    def _watched(self, rollout: Any) -> Callable[..., Any]:
        stamps = self._stamps and rollout.__name__ == "rollout"  # others call the policy themselves

        @functools.wraps(rollout)
        def watched(*args: Any, **kwargs: Any) -> Any:
            collector = self._collector()
            with self._lock:
                self._rollouts += 1
            try:
                if stamps and is_stamped(collector):
                    guard_policy(self._guard, collector)  # it may be compiled by now
                    stamp(collector)
                return rollout(collector, *args, **kwargs)
            finally:
                with self._lock:
                    self._rollouts -= 1

        return watched


# -- the version that computed each frame --------------------------------------------------------
#
# The calls of a collector's policy are reads of a scheme's guard, and the version of each is
# written beside TorchRL's ``("collector", "traj_ids")``.


def guard_policy(guard: Guard, collector: Any) -> None:
    """Have the collector call its policy inside of a read; idempotent.

    The policy itself gets no hooks: where there are no workers it is the trainer's, who may
    compile, export or script it.
    """
    policy = getattr(collector, "_wrapped_policy", None)
    called = getattr(collector, "_wrapped_policy_maybe_compiled", None)
    if callable(policy) and called is policy and not isinstance(policy, _Guarded):
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


# -- nested collectors --------------------------------------------------------------------------


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
        await in_thread(self._update)  # it blocks, and its scheme may use this very loop

    def _update(self) -> None:
        collector, scheme = self._collector(), self._scheme()
        if collector is None or scheme is None:
            return
        with scheme.reading():  # nothing newer may come in between
            now = _copy_of(scheme.model) if self._looks else None
            before, self._known = self._known, None
            self._looks = max(0, self._looks - 1)
            if (
                before is not None
                and now is not None
                and before.keys() == now.keys()
                and all(torch.equal(tensor, now[name]) for name, tensor in before.items())
            ):
                self._looks = 0  # what comes next is an update
                return
            below = (collector._weight_sync_schemes or {}).get(scheme.model_id)
            sender = life_of(core_of(below)).sender if isinstance(below, WeightSyncScheme) else None
            if sender is not None:  # the version that comes below is that of here, as frames show
                sender.workers.version = max(sender.version, scheme.version - 1)
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
