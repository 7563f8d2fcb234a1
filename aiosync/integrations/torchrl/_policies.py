"""The policies of a collector, and those that its factories make. Must not import collectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from aiosync.errors import ConfigError
from aiosync.schemes.sources import resolve_model

__all__ = ["factories_of", "find_model", "from_factories", "refuse_no_module"]


def find_model(collector: Any, model_id: str) -> Any:
    """The model of that id, or ``None`` where the collector has none."""
    try:
        return resolve_model(collector, model_id)
    except (AttributeError, ValueError):
        return None


def refuse_no_module(collector: Any, model_id: str) -> None:
    """Raise if the collector's policy has no weights that could be sent.

    Raises:
        ConfigError: It is not a module.
    """
    policy = find_model(collector, model_id) if model_id == "policy" else None
    if policy is not None and not isinstance(policy, nn.Module):
        raise ConfigError(
            f"the policy is a {type(policy).__name__} and not an nn.Module: it needs no weight "
            "synchronization. Omit weight_sync_schemes=; a Collector also accepts "
            "NoWeightSyncScheme"
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
    """
    factories = factories_of(collector)
    if not factories:
        return None
    if len(set(map(id, factories))) == 1:
        made = factories[0]()
        return made if _has_parameters(made) else None
    each = {idx: factory() for idx, factory in enumerate(factories[:num_workers])}
    return each if all(map(_has_parameters, each.values())) else None


def _has_parameters(policy: Any) -> bool:
    return isinstance(policy, nn.Module) and any(True for _ in policy.parameters())
