"""The policies of a collector, those that its factories make, and those that it acts by itself.

A collector without workers steps its environments itself: what it is given is for its own policy.
Must not import collectors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from aiosync.errors import ConfigError, LocalProtocolError, SyncTimeout
from aiosync.integrations.torchrl._stamps import guard_policy, is_stamped, stamp
from aiosync.protocol import as_index, as_indices
from aiosync.schemes.inside import check_open, guard_of
from aiosync.schemes.sources import is_per_worker, resolve_model
from aiosync.sync import NoWeightSyncScheme, WeightSyncScheme
from aiosync.sync._schemes import core_of

__all__ = [
    "acts_itself",
    "factories_of",
    "find_model",
    "from_factories",
    "guard_forwards",
    "note_version",
    "refuse_missing_buffers",
    "refuse_no_module",
    "send_to_itself",
]


def find_model(collector: Any, model_id: str) -> Any:
    """The model of that id, or ``None`` where the collector has none."""
    try:
        return resolve_model(collector, model_id)
    except (AttributeError, ValueError):
        return None


class _NotAModule(ConfigError, TypeError):
    """A policy has no weights that could be sent."""


def refuse_no_module(policy: Any) -> None:
    """Raise if a policy is not a module.

    Raises:
        ConfigError: It is not (a ``TypeError``, too).
    """
    if not isinstance(policy, nn.Module):
        raise _NotAModule(
            f"the policy is a {type(policy).__name__} and not an nn.Module: it needs no weight "
            "synchronization. Omit weight_sync_schemes=; a Collector also accepts "
            "NoWeightSyncScheme"
        )


def refuse_missing_buffers(scheme: WeightSyncScheme, collector: Any) -> None:
    """Raise if workers would wait for buffers that nothing brings them.

    TorchRL's collectors of processes send their workers the policy on the meta device, and leave
    the rest to the scheme.

    Raises:
        ConfigError: The policy has buffers that are in no state dict, and the strategy sends that.
    """
    if scheme.strategy_str != "state_dict" or isinstance(scheme, NoWeightSyncScheme):
        return
    policy = find_model(collector, "policy")
    if not isinstance(policy, nn.Module) or factories_of(collector):
        return
    sent = policy.state_dict()
    if hidden := sorted(name for name, _ in policy.named_buffers() if name not in sent):
        raise ConfigError(
            "the policy has buffers that are not in its state dict, and a collector's workers get "
            f"it on the meta device: {', '.join(hidden)}. Make the scheme with "
            "strategy='tensordict', which sends them"
        )


def factories_of(collector: Any) -> list[Callable[[], Any]]:
    """The policy factory of each worker; empty where there is none."""
    found = getattr(collector, "policy_factory", None)
    if found is None:
        return []
    listed = list(found) if isinstance(found, Sequence) else [found]
    return [factory for factory in listed if factory is not None]


def from_factories(collector: Any, num_workers: int | None) -> nn.Module | dict[int, Any] | None:
    """What the workers shall begin with where only factories are given.

    Returns:
        One module for all workers where they share a factory; otherwise one for each; ``None``
        without factories, or where what they make has no parameters.

    Raises:
        ConfigError: One makes something that is not a module (a ``TypeError``, too).
    """
    factories = factories_of(collector)
    if not factories:
        return None
    if len(set(map(id, factories))) == 1:
        made = factories[0]()
        return made if _has_parameters(made) else None
    each = {idx: factory() for idx, factory in enumerate(factories[:num_workers])}
    return each if all(map(_has_parameters, each.values())) else None


def _has_parameters(policy: nn.Module) -> bool:
    refuse_no_module(policy)
    return any(True for _ in policy.parameters())


# -- a collector that has no workers ---------------------------------------------------------------


def acts_itself(scheme: WeightSyncScheme, collector: Any) -> bool:
    """Whether this is the scheme of a collector that steps its environments itself."""
    if isinstance(scheme, NoWeightSyncScheme):
        return False
    torchrl: Any = sys.modules["torchrl.collectors"]
    return isinstance(collector, torchrl.Collector)


def send_to_itself(
    scheme: WeightSyncScheme, collector: Any, proceed: Callable[..., Any], given: dict[str, Any]
) -> Any:
    """Apply what is sent to the collector's own policy, all of it or nothing.

    Index 0 is the collector, unless the scheme has workers elsewhere: these are whom the
    indices name then.

    Raises:
        ConfigError: Another index is named.
        SyncTimeout: A forward pass of the policy did not end in time.
    """
    check_open(core_of(scheme))  # before anything changes
    weights: Any = given.get("weights")
    worker_ids: Any = given.get("worker_ids")
    named = None if worker_ids is None else as_indices("worker_ids", worker_ids)
    if scheme.worker_versions:
        if named is None and not is_per_worker(weights):
            _apply(scheme, collector, weights, given.get("timeout"))
        return proceed(**given)
    others = set(named or ()) - {0}
    if is_per_worker(weights):
        if not scheme.per_worker_weights:
            return proceed(**given)  # says so
        others |= {as_index("a worker's index", idx) for idx in weights} - {0}
        weights = given["weights"] = weights.get(0)
    for idx in sorted(others):
        raise ConfigError(
            f"Worker {idx} not registered: a collector without workers is index 0 itself"
        )
    if named:
        given["worker_ids"] = None  # who sends to nobody else
    if named is None or named:
        _apply(scheme, collector, weights, given.get("timeout"))
    return proceed(**given)


def _apply(scheme: WeightSyncScheme, collector: Any, weights: Any, timeout: float | None) -> None:
    model = find_model(collector, scheme.model_id or "policy")
    coming = scheme.version + 1 if scheme.version else scheme.first_version
    if weights is None or isinstance(weights, str) or model is weights:
        note_version(scheme, coming)
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
        scheme.strategy.apply_weights(model, given, strict=scheme.strict and "warn")
        note_version(scheme, coming)

    if not guard.exclusively(apply, timeout=math.inf if limit is None else limit):
        raise SyncTimeout(
            f"the collector collects in another thread, where a forward pass of its policy did not "
            f"end within {limit:g} s; nothing was changed. Give the scheme a longer timeout=, or "
            "update once the policy has answered"
        )


def guard_forwards(scheme: WeightSyncScheme, collector: Any) -> None:
    """Have the forward passes of the collector's policy be reads of the scheme's guard.

    ``Collector.start()`` collects in a thread of its own, and the trainer updates in another.
    """
    core = core_of(scheme)
    if (scheme.model_id or "policy") == "policy" and core.guard == "forward":
        guard_policy(guard_of(core), collector)
        if is_stamped(collector):
            stamp(collector)


def note_version(scheme: WeightSyncScheme, version: int) -> None:
    """The collector's own policy has a version, which may be about to be drawn."""
    guard_of(core_of(scheme)).held = scheme.epoch, version
