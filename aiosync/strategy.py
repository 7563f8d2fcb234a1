"""Strategies: the forms in which weights leave a model and enter another.

Keeps the names of TorchRL's ``WeightStrategy``. :mod:`aiosync.tensors` does the work. This module
must never import asyncio, a transport or a scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from aiosync._repr import in_every_state
from aiosync.errors import ConfigError
from aiosync.tensors.apply import Strict, Target
from aiosync.tensors.buffer import Layout
from aiosync.tensors.values import (
    EXTRA_STATE,
    ROOT_STATE,
    is_tensor_collection,
    is_tensordict,
    set_item,
)
from aiosync.tensors.walk import ExtractAs, Leaves, ModuleTree, collect
from aiosync.wire import NO_LIMITS

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["WeightStrategy", "get_strategy"]


class WeightStrategy:
    """The form in which weights are taken out of a model, and the way back into one.

    :meth:`apply_weights` recognises the form of its weights, whatever ``extract_as`` is.

    Attributes:
        extract_as: ``"tensordict"`` for all parameters and buffers, ``"state_dict"`` for the
            content of ``state_dict()``.
    """

    def __init__(self, extract_as: ExtractAs = "tensordict") -> None:
        """Choose a form.

        Args:
            extract_as: ``"tensordict"`` or ``"state_dict"``.

        Raises:
            ConfigError: It is something else.
        """
        if extract_as not in ("tensordict", "state_dict"):
            raise ConfigError(f"extract_as must be 'tensordict' or 'state_dict', got {extract_as}")
        self.extract_as: ExtractAs = extract_as

    @in_every_state
    def __repr__(self) -> str:
        return f"WeightStrategy(extract_as={self.extract_as!r})"

    def extract_weights(self, source: Any) -> TensorDictBase | dict[str, Any] | None:
        """Return the weights of a model. They are live: nothing is copied.

        Args:
            source: A module, a TensorDict, a mapping of tensors, or ``None``.

        Returns:
            A TensorDict or a dict, as ``extract_as`` says; ``None`` for ``None``. In a TensorDict,
            the extra state of a module is under ``"__extra_state__"`` and that of a submodule under
            its path and ``"_extra_state"``.

        Raises:
            ConfigError: The source is something else; or ``extract_as`` is ``"tensordict"``, and it
                is a module, and no TensorDict, with weights that only its ``state_dict()`` shows.
        """
        if source is None:
            return None
        is_module = isinstance(source, nn.Module) and not is_tensordict(source)
        if not is_module:
            _refuse_no_mapping(source)
        if self.extract_as == "state_dict":
            return dict(source.state_dict()) if is_module else _dict_of(source)
        if is_tensordict(source):
            return source
        return _from_module(source) if is_module else _from_mapping(source)

    def apply_weights(
        self, destination: Any, weights: Any, inplace: bool = True, *, strict: Strict = True
    ) -> None:
        """Put weights into a model: all of them, or none if something raises.

        Tied parameters stay tied. The destination never shares memory with ``weights``.

        Args:
            destination: A module, a TensorDict, or a dict of tensors. Parameters on the meta device
                get memory.
            weights: A TensorDict, or a mapping of tensors, nested or with dotted keys. ``None``
                does nothing.
            inplace: Keep the tensor objects and their memory. Otherwise new ones with memory of
                their own take their places; not for a dict.
            strict: The names, extra state and dtypes must be the same on both sides; ``"warn"``
                warns if only extra state is missing. See :class:`~aiosync.tensors.Target`.

        Raises:
            ConfigError: The weights or the destination are of an unsupported type.
            ManifestMismatch: The weights do not fit; all names are listed. (A ``KeyError``, too.)
        """
        if weights is None:
            return
        _refuse_no_container(weights)
        leaves = collect(weights)
        if not (isinstance(destination, nn.Module) or _is_container(destination)):
            _refuse_to_drop(leaves)
            return
        if isinstance(destination, Mapping) and not (inplace or is_tensor_collection(destination)):
            raise ConfigError("Cannot update state_dict out of place")
        layout = Layout.plan(leaves.leaves, NO_LIMITS)
        Target(destination, strict=strict).apply_tensors(
            layout,
            [leaf.tensor for leaf in leaves.leaves],
            leaves.values,
            "copy" if inplace else "replace",
        )


def _is_container(value: object) -> bool:
    """Return True for a mapping, a TensorDict or a tensorclass."""
    return isinstance(value, Mapping) or is_tensor_collection(value)


def _refuse_to_drop(weights: Leaves) -> None:
    """Raise if weights have no destination; none need none."""
    if weights.leaves or weights.values:
        raise ConfigError(
            "Non-empty weights are associated with a non-dict, non-td, non-Module destination."
        )


def get_strategy(strategy: str | WeightStrategy) -> WeightStrategy:
    """Return the strategy of a name; a strategy is returned as it is.

    Raises:
        ConfigError: The name is unknown; or the strategy's class overrides a method.
    """
    _refuse_own_ways(strategy)
    if isinstance(strategy, WeightStrategy):
        return strategy
    # TorchRL's strategies have the attribute, too.
    name = getattr(strategy, "extract_as", strategy)
    if name == "tensordict":
        return WeightStrategy("tensordict")
    if name == "state_dict":
        return WeightStrategy("state_dict")
    raise ConfigError(f"Unknown strategy: {strategy}. Must be 'tensordict' or 'state_dict'.")


def _refuse_own_ways(strategy: object) -> None:
    """Raise if a strategy's class overrides the methods, as schemes do not call them for a send."""
    for name in ("extract_weights", "apply_weights"):
        having = (each for each in type(strategy).__mro__ if name in vars(each))
        owner = next(having, WeightStrategy)
        # TorchRL's class has the same ways.
        if owner is not WeightStrategy and not owner.__module__.startswith("torchrl."):
            raise ConfigError(
                f"{owner.__name__} overrides {name}(), and a scheme takes only extract_as from its "
                "strategy: send(weights) with what you extract, and apply by "
                "init_on_receiver(load=...)"
            )


def _from_module(module: nn.Module) -> TensorDictBase:
    """Return the live parameters and buffers of a module, with the extra state beside them."""
    # Imported only here, because importing it takes as long as importing torch.
    from tensordict import TensorDict

    tree = ModuleTree(module)
    tree.refuse_hidden()
    weights: TensorDictBase = TensorDict.from_module(tree.root)
    for name, place in tree.found.values.items():
        path = tuple(name.split("."))
        set_item(weights, ROOT_STATE if len(path) == 1 else path, place.read())
    return weights


def _dict_of(source: Any) -> dict[str, Any]:
    """Return a TensorDict as a dict by dotted name, or another mapping as a dict."""
    given = source.flatten_keys(".").to_dict() if is_tensordict(source) else source
    return given if isinstance(given, dict) else dict(given)


def _from_mapping(source: Mapping[Any, Any]) -> TensorDictBase:
    """Return a mapping of live tensors, and each mapping of tensors in it, as a TensorDict."""
    from tensordict import TensorDict

    weights = TensorDict({}, batch_size=[])
    for key, value in source.items():
        last = key if isinstance(key, str) else key[-1]
        is_state = last == ROOT_STATE or last.endswith(EXTRA_STATE)
        is_inner = isinstance(value, Mapping) and not (is_state or is_tensor_collection(value))
        set_item(weights, key, _from_mapping(value) if is_inner else value)
    return weights


def _refuse_no_mapping(source: Any) -> None:
    """Raise ConfigError for a source that is neither a mapping nor a TensorDict, which is one."""
    if not isinstance(source, Mapping):
        raise ConfigError(
            f"cannot extract weights from a {type(source).__module__}."
            f"{type(source).__qualname__}; supported: torch.nn.Module, TensorDict and mappings "
            "of tensors"
        )


def _refuse_no_container(weights: Any) -> None:
    """Raise ConfigError for weights that are neither a dict nor a TensorDict."""
    if not _is_container(weights):
        raise ConfigError(
            f"Unsupported weights type: {type(weights)}. Must be dict or TensorDictBase."
        )
