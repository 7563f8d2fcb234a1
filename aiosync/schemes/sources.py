"""Sources of a sender's weights, the number of its workers, and models in a context.

Turns each keyword form of ``init_on_sender`` into a :class:`Sources` before any I/O.

A context is the object that owns the model: a collector, a server, a trainer. It may offer
``get_model(model_id)``; otherwise the model id is a path such as ``"policy"``,
``"env.transform[0].module"`` or ``"models['critic']"``. Must not import transports.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from aiosync.errors import ConfigError
from aiosync.protocol import as_index, as_indices
from aiosync.schemes.options import refuse
from aiosync.strategy import WeightStrategy
from aiosync.tensors.values import is_tensordict
from aiosync.transports.base import Transport
from aiosync.wire import DEFAULT_LIMITS

__all__ = [
    "DeviceMap",
    "Given",
    "NoWeakReference",
    "Sources",
    "as_model_id",
    "is_per_worker",
    "model_or_fallback",
    "resolve_model",
    "resolve_path",
    "resolve_sources",
]

DeviceMap: TypeAlias = Callable[[int, Any], Any]
"""Function of a worker's index and the weights that returns the weights of that worker."""


@dataclass(slots=True)
class Sources:
    """Weights of a sender, and the workers that it expects.

    Attributes:
        weights: Module, TensorDict or mapping for every worker; ``None`` if the context or each
            call gives them.
        per_worker: Weights of single workers, instead of ``weights``.
        device_map: Maps (worker index, weights) to the weights of that worker.
        num_workers: Number of expected workers; ``None`` if any number may come.
        pipes: Connections to the workers, by index.
        indices: Indices of the expected workers, if others than 0 to ``num_workers - 1``.
    """

    weights: Any = None
    per_worker: dict[int, Any] = field(default_factory=dict)
    device_map: DeviceMap | None = None
    num_workers: int | None = None
    pipes: Sequence[Any] | None = None
    indices: Sequence[int] | None = None

    @property
    def expected(self) -> Sequence[int]:
        """Indices of the workers that ``connect()`` waits for."""
        return range(self.num_workers or 0) if self.indices is None else self.indices

    def link(self, transports: Mapping[int, Any]) -> dict[int, Any]:
        """Expect only the workers whose links are given, as no others can come; return the links.

        Raises:
            ConfigError: This is no mapping, the number of workers is another one, or pipes were
                given, too.
        """
        if not isinstance(transports, Mapping) or not all(
            isinstance(each, Transport) for each in transports.values()
        ):
            text = f"transports must be a mapping of worker_idx to link, not {transports!r}"
            raise ConfigError(f"{text}; connections are passed as pipes=[...]")
        links = {as_index("a key of transports", idx): link for idx, link in transports.items()}
        if self.pipes is not None:
            raise ConfigError("pipes cannot be provided if transports is provided")
        # With params_map the number is the greatest index plus one, and indices may be missing.
        if not self.per_worker and self.num_workers not in (None, len(links)):
            raise ConfigError(
                f"conflicting numbers of workers (num_workers: "
                f"{self.num_workers}, transports: {len(links)})"
            )
        self.num_workers, self.indices = len(links), sorted(links)
        return links

    def replace(self, weights: Any) -> None:
        """Send these weights from now on; ``None`` for those of the context, or of each call.

        Raises:
            ConfigError: They are not weights, or each worker has weights of its own.
        """
        _check_source("model or weights", weights)
        if self.per_worker:
            raise ConfigError(
                "each worker has its own weights (params_map): use send({worker_idx: weights}) to "
                "send others"
            )
        self.weights = weights

    def follow(self, weights: Any, worker_ids: int | Iterable[int] | None) -> None:
        """Register a call's weights for the workers that got them, for later calls without any."""
        each = dict(weights) if is_per_worker(weights) else None
        if each is None and worker_ids is None:
            self.weights, self.per_worker = weights, {}
            return
        if each is None:
            assert worker_ids is not None
            each = dict.fromkeys(as_indices("worker_ids", worker_ids), weights)
        others = self.per_worker or dict.fromkeys(self.expected, self.weights)
        self.weights, self.per_worker = None, {**others, **each}

    def resolve(self, weights: Any, context: Any, model_id: str) -> Any:
        """Return the weights that a call gave or named; else the registered ones, or the context's.

        Raises:
            ConfigError: There is no context to look a name up in.
        """
        if isinstance(weights, str):
            if context is None:
                raise ConfigError(
                    f"Cannot resolve string reference {weights!r} without context: a str names a "
                    "part of init_on_sender(context=...); pass the weights themselves"
                )
            return resolve_path(context, weights)
        for given in (weights, self.per_worker or None, self.weights):
            if given is not None:
                return given
        return None if context is None else model_or_fallback(context, model_id)

    def plan(
        self, weights: Any, per_worker: bool, strategy: WeightStrategy
    ) -> dict[int | None, Any]:
        """Return the weights of each worker; under ``None`` the weights that all of them get.

        Args:
            weights: Weights of a call, from :meth:`resolve`.
            per_worker: True if each worker may be given its own weights.
            strategy: Strategy of the scheme.

        Raises:
            ConfigError: Each worker is given its own weights, and must not be.
        """
        if is_per_worker(weights):
            if not (per_worker or self.per_worker):
                raise ConfigError(
                    "Per-worker weights dict provided but scheme was not initialized with "
                    "per_worker_weights=True"
                )
            return {as_index("a worker's index", i): each for i, each in weights.items()}
        if self.device_map is None:
            return {None: weights}
        return self._map_to_devices(weights, self.device_map, strategy)

    def _map_to_devices(
        self, weights: Any, device_map: DeviceMap, strategy: WeightStrategy
    ) -> dict[int | None, Any]:
        """Return what the device map makes of the weights, by worker.

        If it returns them unchanged for each worker, they are returned under ``None``, for all.
        """
        given = weights
        # Methods such as .to() change a module itself, and a state dict has no such methods.
        if hasattr(weights, "register_forward_hook") or isinstance(weights, dict):
            given = strategy.extract_weights(weights)
        mapped: dict[int | None, Any]
        mapped = {idx: device_map(idx, given) for idx in self.expected}
        same = all(value is given for value in mapped.values())
        return {None: weights} if same else mapped


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
    source, per_worker = model if weights is None else weights, dict[int, Any]()
    has_context, has_devices = context is not None, devices is not None
    has_device_map = device_map_fn is not None
    refuse(
        (
            weights is not None and model is not None,
            "weights cannot be provided if model is provided",
        )
    )
    if params_map is not None:
        others = (context, devices, device_map_fn, num_workers)
        _check_map(params_map, source, others)
    refuse(
        (has_context and has_devices, "devices cannot be provided if context is provided"),
        (
            has_context and has_device_map,
            "model/weights/device_map_fn cannot be provided if context is provided",
        ),
        (
            has_context and model_id is None,
            "model_id must be provided if context is provided",
        ),
        (
            has_device_map and not callable(device_map_fn),
            f"device_map_fn must be callable, got {device_map_fn!r}",
        ),
    )
    if params_map is not None:
        source, per_worker, num_workers = _read_map(params_map)
    _check_source("model" if weights is None else "weights", source)
    if num_workers is None:
        num_workers = _number_of(context)
    refuse(
        (
            has_device_map and num_workers is None,
            "num_workers must be provided if device_map_fn is provided",
        )
    )
    num_workers = _agree(num_workers, devices=devices, pipes=pipes)
    return Sources(source, per_worker, device_map_fn, num_workers, pipes)


def _number_of(context: Any) -> int | None:
    """Return the number of workers that a context has; ``None`` if it has no such attribute."""
    found = getattr(context, "num_workers", None)
    return None if found is None else as_index("num_workers of the context", found)


def _is_map_of_weights(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(map(_is_source, value.values()))


def _check_map(params_map: Any, source: Any, others: Iterable[Any]) -> None:
    """Raise if ``params_map`` is no map of weights, or was given beside what excludes it."""
    refuse(
        (
            source is not None,
            "model_id, weights, and model cannot be provided if params_map is provided",
        ),
        (
            any(each is not None for each in others),
            "context, devices, device_map_fn or num_workers cannot be provided if params_map is",
        ),
        (
            not _is_map_of_weights(params_map),
            "params_map must be a dict[int, TensorDictBase]: worker index -> its weights",
        ),
    )


def _read_map(params_map: Mapping[int, Any]) -> tuple[Any, dict[int, Any], int]:
    """Return the weights for all workers, those by worker, and the number of workers.

    One object that every worker has is returned as the first; otherwise that is ``None``.
    """
    each = {as_index("a key of params_map", key): w for key, w in params_map.items()}
    first, num_workers = next(iter(each.values())), max(each) + 1
    if len(each) == num_workers and all(weights is first for weights in each.values()):
        return first, {}, num_workers
    return None, each, num_workers


def _agree(num_workers: int | None, **lists: Sequence[Any] | None) -> int | None:
    """Return the number of workers, if any argument says it; raise if two say different ones."""
    counts = {} if num_workers is None else {"num_workers": num_workers}
    for name, each in lists.items():
        if each is not None:
            counts[name] = _length_of(name, each)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ConfigError(f"conflicting numbers of workers ({listed})")
    return next(iter(counts.values()), None)


def _length_of(name: str, each: object) -> int:
    """Return the length of a list with one element for each worker; raise if it is no list."""
    if isinstance(each, str) or not isinstance(each, Sequence):
        raise ConfigError(f"{name} must be a list with one for each worker, got {each!r}")
    return len(each)


def _is_source(value: Any) -> bool:
    """Return True for an object whose weights can be sent."""
    return isinstance(value, (nn.Module, Mapping)) or is_tensordict(value)


def _check_source(name: str, value: Any) -> None:
    """Raise unless the value is ``None``, or an object whose weights can be sent."""
    if value is not None and not _is_source(value):
        raise ConfigError(
            f"{name} must be an nn.Module, a TensorDict or a state dict, got "
            f"{type(value).__name__}. Non-Module policies (such as a random policy) need no weight "
            "synchronization"
        )


def is_per_worker(weights: Any) -> bool:
    """Return True if these are weights by worker index, and not by name."""
    return (
        isinstance(weights, Mapping)
        and not is_tensordict(weights)
        and bool(weights)
        and all(hasattr(key, "__index__") for key in weights)
    )


class Given:
    """Arguments of ``init_on_*()``, and values assigned since: a model, weights, or a context.

    Attributes:
        model_id: Name of the model.
        model: The model, if it was given.
        weights: The weights, if they were given.
        loader: Target that takes weights in the place of both.
        sources: Sources of a sender's weights.
        context_ref: A weak reference to the owner of the model.
    """

    def __init__(self, model_id: str | None) -> None:
        self.model_id = model_id
        self.model: Any = None
        self.weights: Any = None
        self.loader: Any = None
        self.sources: Sources = Sources()
        self.context_ref: weakref.ref[Any] | None = None

    @property
    def context(self) -> Any:
        """Owner of the model; ``None`` if there is none or it is gone."""
        return None if self.context_ref is None else self.context_ref()

    @context.setter
    def context(self, value: Any) -> None:
        try:
            self.context_ref = None if value is None else weakref.ref(value)
        except TypeError as exc:
            raise NoWeakReference(
                f"a context is kept as a weak reference, which a {type(value).__name__} cannot "
                "have: pass the model itself (model=, and num_workers= on the sender)"
            ) from exc

    def replace(self, name: str, value: Any) -> None:
        """Set the model, the weights or the context; a model and weights replace each other.

        Raises:
            ConfigError: A function loads the weights, in the place of both.
        """
        loads = self.loader is not None and name != "context" and value is not None
        refuse((loads, "load cannot be provided if model or weights are provided"))
        setattr(self, name, value)
        if value is not None and name == "model":
            self.weights = None
        elif value is not None and name == "weights":
            self.model = None

    def find(self) -> Any:
        """Return the model as it is now: as given, or from the context; ``None`` without one."""
        if self.model is not None:
            return self.model
        context = self.context
        if context is None or self.model_id is None:
            return None
        if self.sources.weights is not None or self.sources.per_worker:
            # These are sent in the place of a model, which the context need not have.
            return model_or_fallback(context, self.model_id)
        return resolve_model(context, self.model_id)

    def target(self) -> Any:
        """Return the object that a receiver applies weights to; ``None`` while there is none."""
        for given in (self.loader, self.weights, self.model):
            if given is not None:
                return given
        try:
            return self.find()
        except AttributeError:
            # The context has no such model yet.
            return None

    def lacks(self) -> str | None:
        """Return why the context has no model; ``None`` if it has one, or none is needed."""
        if self.context_ref is None or self.target() is not None:
            return None
        context = self.context
        if context is None:
            return "the context is gone, as only a weak reference is kept"
        name = self.model_id or "policy"
        return f"the context, a {type(context).__name__}, has no model {name!r}"


_STEP = re.compile(r"""\.?([A-Za-z_]\w*)|\[(?:(-?\d+)|'([^']*)'|"([^"]*)")\]""")


class NoWeakReference(ConfigError, TypeError):
    """A context to which no weak reference can be made; for TorchRL it is a ``TypeError``."""


def resolve_path(root: object, path: str) -> Any:
    """Follow a path of attributes, indices and keys.

    Args:
        root: Object at which the path starts.
        path: For example ``"env.transform[0].module"``.

    Raises:
        ConfigError: The path is malformed.
        AttributeError: An attribute, index or key of the path does not exist.
    """
    here: Any = root
    position = 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None or (position == 0 and step.group(0).startswith(".")):
            raise ConfigError(
                f"{path!r} is not a path: write attributes, indices and keys, for example "
                "'env.transform[0].module'"
            )
        missing: tuple[type[Exception], ...] = (AttributeError, IndexError, KeyError)
        if step.group(1) is None:
            # The container may still be None. An attribute's own TypeError is an error of its code.
            missing = (*missing, TypeError)
        try:
            here = _take_step(here, step)
        except missing as exc:
            raise AttributeError(
                f"Attribute {step.group(0).lstrip('.')} from {path!r} not found in "
                f"{type(root).__name__}"
            ) from exc
        position = step.end()
    return here


def _take_step(here: Any, step: re.Match[str]) -> Any:
    """Return the attribute, the item or the value that one step of a path leads to."""
    name, index, single, double = step.groups()
    if name is not None:
        return getattr(here, name)
    if index is not None:
        return here[int(index)]
    return here[single if single is not None else double]


def resolve_model(context: object, model_id: str) -> Any:
    """Return the model of that id in ``context``: from its ``get_model(model_id)``, else by path.

    Raises:
        AttributeError: There is no such model, or it is ``None``.
    """
    model = _ask_for_model(context, model_id)
    if model is None:
        model = resolve_path(context, model_id)
    if model is None:
        raise AttributeError(f"Model {model_id} was `None` in context")
    return model


def _ask_for_model(context: object, model_id: str) -> Any:
    """Return the model that the context's ``get_model()`` knows by this id, or ``None``."""
    get_model = getattr(context, "get_model", None)
    if not callable(get_model):
        return None
    try:
        return get_model(model_id)
    except (KeyError, ValueError, AttributeError):
        # The context does not know the id; it may still be a path.
        return None


def as_model_id(value: Any) -> str:
    """Check and return the name of a model, as it is told to the other side.

    Raises:
        ConfigError: It is no str, empty, too long for a Hello, or has a lone surrogate.
    """
    # The other side's own limits count only once it has read the Hello.
    most = DEFAULT_LIMITS.max_name_nbytes
    # A lone surrogate, which JSON may hold, cannot travel.
    with contextlib.suppress(UnicodeEncodeError):
        if isinstance(value, str) and 0 < len(value.encode()) <= most:
            return value
    got = f"{value!r:.80}" if isinstance(value, str) else f"a {type(value).__name__}"
    raise ConfigError(
        f"model_id must be a str of 1 to {most} bytes of UTF-8, got {got}; a model is passed as "
        "model="
    )


def model_or_fallback(context: object, model_id: str) -> Any:
    """Return the model of that id, or ``None``; as policy, also a TorchRL collector's fallback."""
    try:
        return resolve_model(context, model_id)
    except AttributeError:
        return getattr(context, "_fallback_policy", None) if model_id == "policy" else None
