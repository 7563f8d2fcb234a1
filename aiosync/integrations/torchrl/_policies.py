"""The policies of TorchRL's collectors, and the factories that make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from aiosync.errors import ConfigError
from aiosync.schemes.sources import resolve_model
from aiosync.sync import NoWeightSyncScheme, WeightSyncScheme

__all__ = [
    "factories_of",
    "find_model",
    "from_factories",
    "original_of",
    "refuse_missing_buffers",
    "refuse_no_module",
]


def find_model(collector: Any, model_id: str) -> Any:
    """Return the collector's model of this id; ``None`` if it has none."""
    try:
        return resolve_model(collector, model_id)
    except (AttributeError, TypeError, ValueError):
        return None


def original_of(collector: Any, model: Any) -> Any:
    """Return the trainer's policy if the collector's ``model`` is its copy on another device."""
    is_copy = model is collector.policy and collector.get_weights_fn is not None
    return collector._orig_policy if is_copy else None


class _NotAModule(ConfigError, TypeError):
    """Error for a policy that is not a module and has no weights to send."""


def refuse_no_module(policy: Any) -> None:
    """Raise if a policy is not a module.

    Raises:
        ConfigError: The policy is not a module (also a ``TypeError``).
    """
    if not isinstance(policy, nn.Module):
        raise _NotAModule(
            "weight synchronization requires an nn.Module policy, and the policy is a "
            f"{type(policy).__name__} and not an nn.Module. Omit weight_sync_schemes=; a Collector "
            "also accepts NoWeightSyncScheme"
        )


def refuse_missing_buffers(scheme: WeightSyncScheme, collector: Any) -> None:
    """Raise if workers would wait for buffers that the scheme does not send.

    TorchRL's collectors of processes give their workers the policy on the meta device; the scheme
    has to send all of its tensors.

    Raises:
        ConfigError: The policy has buffers outside its state dict, and the strategy sends only the
            state dict.
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
    """Return the policy factory of each worker; an empty list if there is none."""
    found = getattr(collector, "policy_factory", None)
    listed = list(found) if isinstance(found, Sequence) else [found]
    return [factory for factory in listed if factory is not None]


def from_factories(collector: Any, num_workers: int | None) -> nn.Module | dict[int, Any] | None:
    """Make the policies that the workers begin with, if the collector has only factories.

    Returns:
        One module if all workers share a factory; otherwise one module for each worker, by its
        index. ``None`` without factories, or if a policy has no parameters.

    Raises:
        ConfigError: A factory makes something that is not a module (also a ``TypeError``).
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
    """Return True if a policy has parameters; raise if it is no module."""
    refuse_no_module(policy)
    return any(True for _ in policy.parameters())
