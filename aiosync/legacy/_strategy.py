"""The older generation's strategy: two arguments to apply, and no silent skipping.

Must not import asyncio, a transport or a scheme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from aiosync.errors import ConfigError
from aiosync.strategy import WeightStrategy as _Strategy

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["WeightStrategy"]


class WeightStrategy:
    """How weights are taken out of a model and put into one.

    Args:
        extract_as: ``"tensordict"`` for all parameters and buffers, ``"state_dict"`` for what
            ``state_dict()`` holds.

    Raises:
        ConfigError: It is something else (a ``ValueError``).
    """

    def __init__(self, extract_as: Literal["tensordict", "state_dict"] = "tensordict") -> None:
        self._strategy = _Strategy(extract_as)

    @property
    def extract_as(self) -> Literal["tensordict", "state_dict"]:
        """The form in which weights are extracted."""
        return self._strategy.extract_as

    def extract_weights(self, source: Any) -> TensorDictBase | dict[str, Any]:
        """Return the weights of a model. They are live: nothing is copied.

        Args:
            source: A module, a TensorDict, or a mapping of tensors.

        Raises:
            ConfigError: The source is something else, ``None`` included (a ``ValueError``).
        """
        weights = self._strategy.extract_weights(source)
        if weights is None:
            raise ConfigError("cannot extract weights from None")
        return weights

    def apply_weights(self, destination: Any, weights: Any) -> None:
        """Put weights into a model in place: all of them, or none when something raises.

        Args:
            destination: A module, a TensorDict, or a dict of tensors.
            weights: A TensorDict, or a mapping of tensors, nested or with dotted keys; copied,
                never aliased. ``None`` does nothing.

        Raises:
            ConfigError: The weights or the destination are of an unsupported type (a
                ``ValueError``).
            ManifestMismatch: They do not fit; all names are listed (a ``ValueError``).
        """
        self._strategy.apply_weights(destination, weights)

    def __repr__(self) -> str:
        return f"WeightStrategy(extract_as={self.extract_as!r})"
