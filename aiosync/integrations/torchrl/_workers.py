"""A worker's collector: the versions on its frames, and the workers of nested collectors.

TorchRL labels data with the version that computed the action. A collector asks its tracker for the
version at each step of the environment, some time after the forward pass that computed the action.
An update that comes in between must not change the answer, so the tracker grows when the next
forward begins. Must not import collectors.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.receiver.guard import Guard
from aiosync.receiver.scheme_hooks import in_thread
from aiosync.schemes.internal import life_of
from aiosync.sync import WeightSyncScheme
from aiosync.sync._schemes import core_of
from aiosync.tensors import collect, lacks_memory

__all__ = [
    "Cascade",
    "Labels",
    "guard_policy",
    "has_workers",
    "is_stamped",
    "stamp",
    "watch_loading",
]

# Key of the version in a frame; 0 stands for a random action, or for weights without a version.
_KEY = ("collector", "policy_version")

# The methods that collect. An LLMCollector's `rollout` is a property that returns one of the
# others.
_ROLLOUTS = ("rollout", "_rollout_all", "_rollout_yield_trajs", "_rollout_yield_trajs_async")


class Labels:
    """Labels of a collector's data: keeps its tracker at the version of its policy.

    The tracker keeps its present value at first. It grows by one with every version that the
    trainer sends after the initial weights, whether or not this worker got all of them.

    Args:
        collector: The collector, which has ``policy_version_tracker``; referred to weakly.
        guard: The scheme's guard, which knows when forward passes begin.
        epoch: Epoch of that version.
        version: Version that the policy has already; 0 if the initial weights are to come.
        sees_forwards: True if forward passes are reads of the guard. If not, the tracker grows at
            once, and an action's label may be newer than the action.
        stamps: True if frames also get the scheme's version, as far as forward passes are seen.
    """

    def __init__(
        self,
        collector: Any,
        guard: Guard,
        epoch: int,
        version: int,
        *,
        sees_forwards: bool,
        stamps: bool,
    ) -> None:
        self._collector = weakref.ref(collector)
        self._guard = guard
        self._epoch, self._version = epoch, version
        self._grown = 0  # number of versions by which the tracker is behind
        self._stamps = stamps
        self._lock = threading.Lock()
        self._rollouts = 0  # number of rollouts under way, in any thread
        if sees_forwards:
            self._watch(collector)

    def flipped(self, epoch: int, version: int) -> None:
        """Record the version that the policy has now. Called under the guard, on any thread.

        Args:
            epoch: Epoch of the trainer.
            version: Version of the policy. The first one is that of the initial weights.
        """
        collector = self._collector()
        tracker = getattr(collector, "policy_version_tracker", None)
        if tracker is None:
            return
        if not self._version:
            self._epoch, self._version = epoch, version
            return
        grown = version - self._version if epoch == self._epoch else 1
        self._epoch, self._version = epoch, version
        with self._lock:
            self._grown += grown
            if self._rollouts:
                self._guard.before_next_read = self._set
                return
        self._set()

    def _set(self) -> None:
        """Advance the tracker by the versions that it is behind."""
        collector = self._collector()
        with self._lock:
            grown, self._grown = self._grown, 0
        if collector is None or not grown:
            return
        tracker = collector.policy_version_tracker
        if isinstance(getattr(tracker, "version", None), int):
            # increment_version() would keep a history that grows for ever.
            tracker.version += grown
        else:
            tracker.increment_version()  # this tracker's versions are names, which have no sum

    # -- rollouts ------------------------------------------------------------------------------

    def _watch(self, collector: Any) -> None:
        """Wrap the collector's rollouts, in which an action may wait for its label.

        The frames of other threads would also show whether a rollout runs. But code that looks at
        them keeps their variables alive, and may destroy them in its own thread. Some of torch's
        must end in the thread that they began in.
        """
        watch_loading(self._guard, collector)
        for name in _ROLLOUTS:
            rollout = getattr(type(collector), name, None)
            if inspect.isfunction(rollout):
                setattr(collector, name, self._watched(rollout))

    def _watched(self, rollout: Any) -> Callable[..., Any]:
        """Wrap a rollout, which counts as under way while it runs; stamp its frames."""
        # The other rollouts do not call the policy that guard_policy() has wrapped.
        stamps = self._stamps and rollout.__name__ == "rollout"

        @functools.wraps(rollout)
        def watched(*args: Any, **kwargs: Any) -> Any:
            collector = self._collector()
            with self._lock:
                self._rollouts += 1
            try:
                if stamps and is_stamped(collector):
                    # The collector may have compiled its policy since the last rollout. Frames have
                    # version 0 until its policy is called.
                    guard_policy(self._guard, collector)
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
    """Make the collector call its policy inside a read of the guard; idempotent.

    The policy itself gets no hooks. In a collector without workers it is the trainer's own policy,
    and the trainer may compile, export or script it.
    """
    policy = getattr(collector, "_wrapped_policy", None)
    called = getattr(collector, "_wrapped_policy_maybe_compiled", None)
    if callable(policy) and called is policy and not isinstance(policy, _Guarded):
        collector._wrapped_policy_maybe_compiled = _Guarded(policy, guard, collector)


def watch_loading(guard: Guard, collector: Any) -> None:
    """Have reads after a ``load_state_dict()`` of the collector see version 0 until an update."""
    load, owner = getattr(type(collector), "load_state_dict", None), weakref.ref(collector)
    if not inspect.isfunction(load):
        return

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(owner(), *args, **kwargs)
        finally:
            # The trainer never sent these weights, nor a part of them.
            guard.held = 0, 0

    collector.load_state_dict = loaded


def is_stamped(collector: Any) -> bool:
    """Return True if the collector's frames get versions: if TorchRL labels them, too."""
    tracks = getattr(collector, "policy_version_tracker", None) is not None
    return tracks and getattr(collector, "track_traj_ids", False)


def stamp(collector: Any, version: int = 0) -> None:
    """Write the version of the frame that is being collected; 0 before the first of a rollout."""
    carrier, buffers = collector._carrier, getattr(collector, "_final_rollout", None)
    device = collector.storing_device
    carrier.set(_KEY, torch.full(carrier.batch_size, version, device=device))
    if buffers is not None and not version:  # frames of a rollout that is cut short keep the zero
        zeros = torch.zeros(buffers.batch_size, dtype=torch.int64, device=device)
        buffers.update_({_KEY: zeros}) if _KEY in buffers.keys(True) else buffers.set(_KEY, zeros)


class _Guarded:
    """Wrapper of a policy: calls it inside a read of the guard and stamps its version on frames."""

    def __init__(self, policy: Any, guard: Guard, collector: Any) -> None:
        self._policy, self._guard = policy, guard
        self._collector = weakref.ref(collector)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guard, collector = self._guard, self._collector()
        frame = sys._getframe()
        # The guard knows the read by its frame, in case Ctrl-C comes before leave().
        guard.enter(frame)
        version = guard.held[1]
        try:
            return self._policy(*args, **kwargs)
        finally:
            guard.leave(frame)
            # A frame with a reference to itself would keep the variables of all callers.
            del frame
            if collector is not None and is_stamped(collector):
                stamp(collector, version)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up names before `_policy` is set.
        if name.startswith("__") or "_policy" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._policy, name)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._policy,)  # a copied or pickled collector has no guard


def _itself(policy: Any) -> Any:
    """Return the policy, which takes the place of its wrapper in a copy or pickle."""
    return policy


# -- nested collectors --------------------------------------------------------------------------


def has_workers(collector: Any) -> bool:
    """Return True if a collector passes weights on to workers of its own."""
    return bool(getattr(collector, "_weight_sync_schemes", None)) or hasattr(collector, "procs")


class Cascade:
    """Passes the updates that a nested collector receives on to its own workers.

    The trainer's ``send()`` returns when these workers have the update, too, and raises their
    errors.

    Args:
        collector: The collector between the trainer and the workers; referred to weakly.
        scheme: The scheme that the collector receives with; referred to weakly.
    """

    def __init__(self, collector: Any, scheme: WeightSyncScheme) -> None:
        self._collector = weakref.ref(collector)
        self._scheme = weakref.ref(scheme)
        # The weights that the workers have, during the first updates. The workers began with these
        # weights. The trainer mostly begins with the same weights, and RayCollector sends them once
        # more. If they were passed on, they would count as one version more.
        self._known: dict[str, Any] | None = _copy_of(scheme)
        self._looks = 2  # updates that are still compared

    async def pass_on(self, epoch: int, version: int) -> None:
        """Update the collector's workers, in a thread of its own, and wait for them."""
        del epoch, version
        # The update blocks, and the collector's own scheme may need this loop meanwhile.
        await in_thread(self._update)

    def _update(self) -> None:
        """Update the collector's workers, unless they are known to have its weights already."""
        collector, scheme = self._collector(), self._scheme()
        if collector is None or scheme is None:
            return
        with scheme.reading():  # no newer version may be applied before this one is passed on
            now = _copy_of(scheme) if self._looks else None
            before, self._known = self._known, None
            self._looks = max(0, self._looks - 1)
            if _are_equal(before, now):
                self._looks = 0  # the next version differs, so compare no more
                return
            below = (collector._weight_sync_schemes or {}).get(scheme.model_id)
            sender = life_of(core_of(below)).sender if isinstance(below, WeightSyncScheme) else None
            # The send counts on by one from here. The workers below then have the version number of
            # this collector, which their frames show.
            if sender is not None:
                sender.workers.version = max(sender.version, scheme.version - 1)
            collector.update_policy_weights_(
                policy_or_weights=scheme.weights, model_id=scheme.model_id
            )
            if self._looks:
                self._known = now  # set only now, because the update may have failed


def _are_equal(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Return True if two copies of weights are equal; ``None`` equals no other."""
    return (
        one is not None
        and other is not None
        and one.keys() == other.keys()
        and all(_is_same(value, other[name]) for name, value in one.items())
    )


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two tensors, or two values without tensors, are equal."""
    if type(one) is not type(other):
        return False
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _copy_of(scheme: WeightSyncScheme) -> dict[str, Any] | None:
    """Return copies of the weights of a scheme's model by name, extra state included.

    ``None`` if it is no module, has no memory, or has something that cannot travel.
    """
    model = scheme.model
    if not isinstance(model, nn.Module) or lacks_memory(model):
        return None
    try:
        found = collect(model, extract_as=core_of(scheme).strategy.extract_as)
    except ConfigError:
        return None
    return {**{leaf.name: leaf.tensor.detach().clone() for leaf in found.leaves}, **found.values}
