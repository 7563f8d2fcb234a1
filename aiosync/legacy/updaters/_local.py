"""Updaters without workers of their own: one that copies in place, and one that sends nothing.

Must not import torchrl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from aiosync.errors import LocalProtocolError
from aiosync.legacy.updaters._base import WeightUpdaterBase
from aiosync.strategy import WeightStrategy

if TYPE_CHECKING:
    from typing import Self

__all__ = ["RemoteModuleWeightUpdater", "VanillaWeightUpdater", "copy_weights"]


def copy_weights(target: Any, weights: Any) -> None:
    """Copy weights into other ones in place: all of them, or none when something raises.

    Args:
        target: TensorDict whose memory gets the values.
        weights: A module, a TensorDict or a dict; may be a subset of the target's names, and of
            other floating dtypes.

    Raises:
        ManifestMismatch: They do not fit; nothing was changed.
    """
    strategy = WeightStrategy()
    if isinstance(weights, nn.Module):
        weights = strategy.extract_weights(weights)
    strategy.apply_weights(target, weights, strict=False)


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into a policy of this process.

    Args:
        weight_getter: Returns the weights of an update that brings none. Without it such an
            update does nothing.
        policy_weights: Live weights of the policy, which are written in place, as
            ``TensorDict.from_module(policy)`` gives them.
    """

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: Any
    ) -> None:
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self:
        """Make an updater of this policy's own weights.

        Args:
            policy: Its parameters and buffers are written in place.
        """
        from tensordict import TensorDict  # not before it is needed

        return cls(policy_weights=TensorDict.from_module(policy).lock_())

    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        del worker_id
        if server_weights is not None:
            copy_weights(self.policy_weights, server_weights)


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """Only checks that weights are given; somebody else brings them to the workers."""

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        del worker_id
        if server_weights is None:
            raise LocalProtocolError(
                "RemoteModuleWeightUpdater requires weights to be passed explicitly: call "
                "update_policy_weights_(weights)"
            )
