"""The older generation's strategy.

Must not import asyncio, a transport or a scheme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.errors import ConfigError
from aiosync.strategy import WeightStrategy as _Strategy

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["WeightStrategy"]


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
