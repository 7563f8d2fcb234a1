"""A collector that has no workers: what it is given is for its own policy.

Must not import collectors.
"""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from aiosync.errors import ConfigError, LocalProtocolError, SyncTimeout
from aiosync.integrations.torchrl._policies import find_model
from aiosync.protocol.indices import as_index, as_indices
from aiosync.receiver.guard import Guard
from aiosync.schemes.inside import guard_of, is_closed
from aiosync.schemes.sources import is_per_worker
from aiosync.sync import NoWeightSyncScheme, WeightSyncScheme
from aiosync.sync._schemes import core_of

__all__ = ["acts_itself", "guard_forwards", "send_to_itself"]


def acts_itself(scheme: WeightSyncScheme, collector: Any) -> bool:
    """Whether this is the scheme of a collector that steps its environments itself."""
    if isinstance(scheme, NoWeightSyncScheme):
        return False
    torchrl: Any = sys.modules.get("torchrl.collectors")
    single = getattr(torchrl, "Collector", None) or getattr(torchrl, "SyncDataCollector", None)
    return single is not None and isinstance(collector, single)


def send_to_itself(
    scheme: WeightSyncScheme,
    collector: Any,
    name: str,
    proceed: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Apply what is sent to the collector's own policy, all of it or nothing.

    Index 0 is the collector, unless the scheme has workers elsewhere: these are whom the
    indices name then.

    Raises:
        ConfigError: Another index is named.
        SyncTimeout: A forward pass of the policy did not end in time.
    """
    given = dict(kwargs)
    given.update(zip(("weights", "worker_ids"), args, strict=False))
    weights: Any = given.get("weights")
    worker_ids: Any = given.get("worker_ids")
    scheme._check(name)  # before anything changes
    named = None if worker_ids is None else as_indices("worker_ids", worker_ids)
    if scheme.worker_versions:
        if named is None and not is_per_worker(weights):
            _apply(scheme, collector, weights, given.get("timeout"))
        return proceed(**given)
    if is_per_worker(weights):
        if not scheme.per_worker_weights:
            return proceed(**given)  # says so
        each = {as_index("a worker's index", idx): value for idx, value in weights.items()}
        _refuse_others(each.keys() if named is None else each.keys() | named)
        weights = given["weights"] = each[0]
    if named is not None:
        _refuse_others(named)
        if named:
            given["worker_ids"] = None  # who sends to nobody else
    if named is None or named:
        _apply(scheme, collector, weights, given.get("timeout"))
    return proceed(**given)


def _refuse_others(named: Any) -> None:
    for idx in sorted(named):
        if idx != 0:
            raise ConfigError(
                f"Worker {idx} not registered: a collector without workers is index 0 itself"
            )


def _apply(scheme: WeightSyncScheme, collector: Any, weights: Any, timeout: float | None) -> None:
    model = find_model(collector, scheme.model_id or "policy")
    if weights is None or isinstance(weights, str) or model is weights:
        return  # the model is the source
    if not isinstance(model, nn.Module):
        return
    core = core_of(scheme)
    guard, limit = guard_of(core), scheme.timeout if timeout is None else timeout
    if guard.reading_here:  # which exclusively() does not wait for
        raise LocalProtocolError(
            "update_policy_weights_() was called inside a forward pass of the policy or a "
            "reading() block; call it between two of them"
        )
    given = scheme.strategy.extract_weights(weights)

    def apply() -> None:
        scheme.strategy.apply_weights(model, given, strict=scheme.strict)

    if not guard.exclusively(apply, timeout=math.inf if limit is None else limit):
        raise SyncTimeout(
            f"the collector collects in another thread, where a forward pass of its policy did not "
            f"end within {limit:g} s; nothing was changed. Give the scheme a longer timeout=, or "
            "update once the policy has answered"
        )


def guard_forwards(scheme: WeightSyncScheme, collector: Any) -> None:
    """Have the forward passes of the collector's policy be reads of the scheme's guard.

    ``Collector.start()`` collects in a thread of its own, and the trainer updates in another.
    The policy itself gets no hooks: it is the trainer's, who may compile, export or script it.
    """
    core = core_of(scheme)
    if (scheme.model_id or "policy") != "policy" or core.guard != "forward":
        return
    policy = getattr(collector, "_wrapped_policy", None)
    if not callable(policy) or isinstance(policy, _Guarded):
        return
    if getattr(collector, "_wrapped_policy_maybe_compiled", None) is policy:
        collector._wrapped_policy_maybe_compiled = _Guarded(policy, scheme)


class _Guarded:
    """A policy as its collector calls it. Calls it as it is once the scheme is closed."""

    def __init__(self, policy: Any, scheme: WeightSyncScheme) -> None:
        self._policy = policy
        self._scheme = weakref.ref(core_of(scheme))
        self._guard: Guard = guard_of(core_of(scheme))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        core = self._scheme()
        if core is None or is_closed(core):
            return self._policy(*args, **kwargs)
        guard = self._guard
        frame = sys._getframe()
        guard.enter(frame)  # known by its frame, should Ctrl-C come before leave()
        try:
            return self._policy(*args, **kwargs)
        finally:
            guard.leave(frame)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_policy" not in self.__dict__:  # a copy asks before it is set
            raise AttributeError(name)
        return getattr(self._policy, name)

    def __repr__(self) -> str:
        return repr(self._policy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._policy, memo)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._policy,)  # a pickled collector has no guard


def _itself(policy: Any) -> Any:
    return policy
