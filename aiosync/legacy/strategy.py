"""The older generation's strategy: two arguments to apply, and no silent skipping.

Must not import asyncio, a transport or a scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiosync.errors import ConfigError, ManifestMismatch, PartialSyncError
from aiosync.strategy import WeightStrategy as _Strategy
from aiosync.tensors.match import Strict
from aiosync.tensors.tensordicts import is_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["WeightStrategy", "hint", "nested"]

_HINT = (
    "aiosync.legacy: construct the worker's scheme with strict=False to apply what both sides have "
    "and to cast dtypes, as that generation did without a word"
)


def hint(error: BaseException) -> None:
    """Add to an error about weights that do not fit what can be done about it."""
    failed = error.failed.values() if isinstance(error, PartialSyncError) else [error]
    names = {getattr(each, "remote_type", "") or type(each).__name__ for each in failed}
    if ManifestMismatch.__name__ in names and _HINT not in getattr(error, "__notes__", ()):
        error.add_note(_HINT)


class WeightStrategy(_Strategy):
    """How weights are taken out of a model and put into one.

    Args:
        extract_as: ``"tensordict"`` for all parameters and buffers, ``"state_dict"`` for what
            ``state_dict()`` holds.

    Raises:
        ConfigError: It is something else (a ``ValueError``).
    """

    def extract_weights(self, source: Any) -> TensorDictBase | dict[str, Any]:
        """Return the weights of a model. They are live: nothing is copied.

        Args:
            source: A module, a TensorDict, or a mapping of tensors.

        Raises:
            ConfigError: The source is something else, ``None`` included (a ``ValueError``).
        """
        weights = super().extract_weights(source)
        if weights is None:
            raise ConfigError("cannot extract weights from None")
        return weights

    def apply_weights(
        self, destination: Any, weights: Any, inplace: bool = True, *, strict: Strict = True
    ) -> None:
        """Put weights into a model: all of them, or none when something raises.

        Args:
            destination: A module, a TensorDict, or a dict of tensors.
            weights: A TensorDict, or a mapping of tensors, nested or with dotted keys; copied,
                never aliased. ``None`` does nothing.
            inplace: Keep the tensor objects and their memory.
            strict: Refuse names that only one side has, and other dtypes. Otherwise what both
                have is applied, and floating point numbers are cast. ``"warn"`` warns where only
                extra state is missing.

        Raises:
            ConfigError: The weights or the destination are of an unsupported type (a
                ``ValueError``).
            ManifestMismatch: They do not fit; all names are listed (a ``ValueError``).
        """
        try:
            super().apply_weights(destination, weights, inplace, strict=strict)
        except ManifestMismatch as exc:
            hint(exc)
            raise


def nested(weights: Any) -> TensorDictBase:
    """A copy as a nested TensorDict, whether names are nested or dotted."""
    if is_tensordict(weights):
        copied: TensorDictBase = weights.detach().clone()
        return copied
    from tensordict import TensorDict  # not before it is needed

    found = TensorDict({}, batch_size=[])
    for name, value in weights.items():
        key = tuple(str(name).split("."))
        if isinstance(value, Mapping) or is_tensordict(value):
            found.set(key, nested(value))
        elif hasattr(value, "detach"):
            found.set(key, value.detach().clone())
        else:
            found.set_non_tensor(key, value)
    return found
