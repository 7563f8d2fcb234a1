"""What the sender sends, and to how many workers: the keyword forms of ``init_on_sender``.

Turns each form into a :class:`Sources` before any I/O. Must not import transports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from aiosync.errors import ConfigError
from aiosync.protocol.indices import as_index, as_indices
from aiosync.tensors.tensordicts import is_tensordict

__all__ = ["DeviceMap", "Sources", "is_per_worker", "resolve_sources"]

DeviceMap: TypeAlias = Callable[[int, Any], Any]
"""Takes a worker's index and the weights, and gives what that worker gets."""


@dataclass(slots=True)
class Sources:
    """Where the weights of a sender come from.

    Attributes:
        weights: Module, TensorDict or mapping for every worker; ``None`` when the context or
            each call gives them.
        per_worker: Weights of single workers, instead of ``weights``.
        device_map: Maps (worker index, weights) to what that worker gets.
        num_workers: How many workers are expected; ``None`` when any number may come.
        pipes: Connections to the workers, by index.
        indices: Of the workers that are expected, if others than 0 to ``num_workers - 1``.
    """

    weights: Any = None
    per_worker: dict[int, Any] = field(default_factory=dict)
    device_map: DeviceMap | None = None
    num_workers: int | None = None
    pipes: Sequence[Any] | None = None
    indices: Sequence[int] | None = None

    @property
    def expected(self) -> Sequence[int]:
        """Indices of the workers that are waited for."""
        return range(self.num_workers or 0) if self.indices is None else self.indices

    def link(self, transports: Mapping[int, Any]) -> dict[int, Any]:
        """Expect those workers that links are given to, which are the only ones that can come.

        Raises:
            ConfigError: There are other links than workers.
        """
        links = {as_index("a key of transports", idx): link for idx, link in transports.items()}
        if self.pipes is not None:
            raise ConfigError("pipes cannot be provided if transports is provided")
        if not self.per_worker and self.num_workers not in (None, len(links)):
            raise ConfigError(
                f"conflicting numbers of workers (num_workers: "
                f"{self.num_workers}, transports: {len(links)})"
            )
        self.num_workers, self.indices = len(links), sorted(links)
        return links

    def replace(self, weights: Any) -> None:
        """Send these from now on; ``None`` for those of the context, or of each call.

        Raises:
            ConfigError: They are not weights, or each worker has some of its own.
        """
        _check_source("model or weights", weights)
        if self.per_worker:
            raise ConfigError(
                "each worker has its own weights (params_map): use send({worker_idx: weights}) to "
                "send others"
            )
        self.weights = weights

    def follow(self, weights: Any, worker_ids: int | Iterable[int] | None) -> None:
        """Send what a call sent, to those to whom it sent it, where a later call gives nothing."""
        each = dict(weights) if is_per_worker(weights) else None
        if each is None and worker_ids is None:
            self.weights, self.per_worker = weights, {}
            return
        if each is None:
            each = dict.fromkeys(as_indices("worker_ids", worker_ids or ()), weights)
        others = self.per_worker or dict.fromkeys(self.expected, self.weights)
        self.weights, self.per_worker = None, {**others, **each}


def resolve_sources(
    *,
    context: Any = None,
    model_id: str | None = None,
    params_map: Mapping[int, Any] | None = None,
    weights: Any = None,
    model: Any = None,
    devices: Sequence[Any] | None = None,
    device_map_fn: DeviceMap | None = None,
    num_workers: int | None = None,
    pipes: Sequence[Any] | None = None,
) -> Sources:
    """Check one keyword form of ``init_on_sender`` and bring it into one shape.

    Raises:
        ConfigError: The keywords exclude each other, or one has the wrong type.
    """
    if num_workers is not None:
        num_workers = as_index("num_workers", num_workers)
    if weights is not None and model is not None:
        raise ConfigError("weights cannot be provided if model is provided")
    if params_map is not None:
        return _from_params_map(
            params_map,
            model_id_given=model_id is not None,
            others=(weights, model),
            rest=(context, devices, device_map_fn, num_workers),
            pipes=pipes,
        )
    for name, value in (("model", model), ("weights", weights)):
        _check_source(name, value)
    if context is not None:
        if devices is not None:
            raise ConfigError("devices cannot be provided if context is provided")
        if device_map_fn is not None:
            raise ConfigError(
                "model/weights/device_map_fn cannot be provided if context is provided"
            )
        if model_id is None:
            raise ConfigError("model_id must be provided if context is provided")
        if num_workers is None:
            num_workers = getattr(context, "num_workers", None)
            if num_workers is not None:
                num_workers = as_index("num_workers of the context", num_workers)
    if device_map_fn is not None and not callable(device_map_fn):
        raise ConfigError(f"device_map_fn must be callable, got {device_map_fn!r}")
    if device_map_fn is not None and num_workers is None:
        raise ConfigError("num_workers must be provided if device_map_fn is provided")
    num_workers = _agree(num_workers, devices, pipes)
    if devices is not None:
        for device in devices:
            _check_device(device)
    source = weights if weights is not None else model
    return Sources(weights=source, device_map=device_map_fn, num_workers=num_workers, pipes=pipes)


def _from_params_map(
    params_map: Mapping[int, Any],
    *,
    model_id_given: bool,
    others: tuple[Any, ...],
    rest: tuple[Any, ...],
    pipes: Sequence[Any] | None,
) -> Sources:
    if any(value is not None for value in others):
        raise ConfigError(
            "model_id, weights, and model cannot be provided if params_map is provided"
        )
    if any(value is not None for value in rest):
        raise ConfigError(
            "context/devices/device_map_fn/num_workers cannot be provided if params_map is provided"
        )
    valid = isinstance(params_map, Mapping) and params_map
    if not valid or not all(map(_is_source, params_map.values())):
        raise ConfigError(
            "params_map must be a dict[int, TensorDictBase]: worker index -> its weights"
        )
    params_map = {as_index("a key of params_map", key): w for key, w in params_map.items()}
    del model_id_given  # a model id beside params_map only names the weights
    sources = list(params_map.values())
    num_workers = _agree(max(params_map) + 1, None, pipes)
    if all(source is sources[0] for source in sources) and len(sources) == num_workers:
        return Sources(weights=sources[0], num_workers=num_workers, pipes=pipes)
    return Sources(per_worker=dict(params_map), num_workers=num_workers, pipes=pipes)


def _agree(
    num_workers: int | None, devices: Sequence[Any] | None, pipes: Sequence[Any] | None
) -> int | None:
    counts = {"num_workers": num_workers}
    for name, each in (("devices", devices), ("pipes", pipes)):
        if each is not None:
            if isinstance(each, str) or not isinstance(each, Sequence):
                raise ConfigError(f"{name} must be a list with one for each worker, got {each!r}")
            counts[name] = len(each)
    named = {name: count for name, count in counts.items() if count is not None}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in named.items())
        raise ConfigError(f"conflicting numbers of workers ({listed})")
    return next(iter(named.values()), None)


def _is_source(value: Any) -> bool:
    return isinstance(value, (nn.Module, Mapping)) or is_tensordict(value)


def _check_source(name: str, value: Any) -> None:
    if value is None or _is_source(value):
        return
    raise ConfigError(
        f"{name} must be an nn.Module, a TensorDict or a state dict, got {type(value).__name__}. "
        "Non-Module policies (such as a random policy) need no weight synchronization"
    )


def _check_device(device: Any) -> None:
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(f"devices holds {device!r}, which is not a torch device") from exc


def is_per_worker(weights: Any) -> bool:
    """Whether these are weights by worker index, and not by name."""
    return (
        isinstance(weights, Mapping)
        and not is_tensordict(weights)
        and bool(weights)
        and all(hasattr(key, "__index__") for key in weights)
    )
