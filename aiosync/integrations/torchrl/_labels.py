"""The policy version that TorchRL stamps on data: the version that computed the action.

A collector asks its tracker for the version at each step of the environment, some time after the
forward pass that computed the action. An update that comes in between must not change the
answer, so the tracker learns of it when the next forward begins. Must not import collectors.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

from aiosync.receiver.guard import Guard

__all__ = ["Labels"]

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
    """

    def __init__(self, collector: Any, guard: Guard, version: int, *, sees_forwards: bool) -> None:
        self._collector = weakref.ref(collector)
        self._guard = guard
        self._epoch: int | None = None
        self._version = version
        self._grown = 0  # by how much the tracker is behind
        self._sees_forwards = sees_forwards
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
                setattr(collector, name, self._watched(rollout, weakref.ref(collector)))

    def _watched(self, rollout: Any, of: weakref.ref[Any]) -> Callable[..., Any]:
        @functools.wraps(rollout)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._rollouts += 1
            try:
                return rollout(of(), *args, **kwargs)
            finally:
                with self._lock:
                    self._rollouts -= 1

        return watched
