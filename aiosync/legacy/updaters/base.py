"""The base class of the legacy weight updaters, its hooks, and those that reach no other process.

The hooks are those of TorchRL's ``WeightUpdaterBase``, so that a subclass written for it works
after its import line was changed. Must not import torchrl.
"""

from __future__ import annotations

import abc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.protocol import validate_seconds
from aiosync.strategy import WeightStrategy
from aiosync.tensors.values import is_tensordict

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "AtOnceWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "copy_weights",
]


class WeightUpdaterBase(abc.ABC):
    """Brings the weights of a trainer to the policies of a collector. Legacy: prefer schemes.

    A collector calls its updater in ``update_policy_weights_()``. New code passes a weight sync
    scheme to the collector instead, which knows versions, deadlines and workers that die; this
    class keeps updaters working that were written for TorchRL's class of the same name.
    TorchRL's collectors take an instance for one of their own if it was made after ``torchrl``
    was imported.

    A subclass has to define :meth:`_sync_weights_with_worker`. It may define
    :meth:`_get_server_weights`, :meth:`_maybe_map_weights`, :meth:`all_worker_ids`,
    :meth:`_skip_update`, :meth:`init` and :meth:`from_policy`; or :meth:`_push_weights`, which
    calls these.

    Threads:
        Use it on the thread that uses the collector.
    """

    post_hooks: list[Callable[[], Any]]
    """What is called after each update, in this order."""

    _collector_wrs: list[weakref.ref[Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an object that TorchRL's collectors accept, if TorchRL is imported."""
        del args, kwargs  # those of __init__()
        # Each time, as TorchRL may be imported after this module. Its collectors ask
        # isinstance(), and nothing else of it is needed.
        module = sys.modules.get("torchrl.collectors.weight_update")
        if module is not None:
            module.WeightUpdaterBase.register(WeightUpdaterBase)
        updater = super().__new__(cls)
        updater._collector_wrs, updater.post_hooks = [], []  # subclasses need not call __init__()
        return updater

    @classmethod
    def from_policy(cls, policy: nn.Module) -> WeightUpdaterBase | None:
        """Make an updater for a policy, or ``None`` if this class needs more than that.

        Args:
            policy: The policy that updates go to.
        """
        del policy
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - a hook that may stay empty
        """Called by ``collector.init_updater()`` with its arguments. Does nothing here."""

    # -- collectors ----------------------------------------------------------------------------

    def register_collector(self, collector: Any) -> None:
        """Remember a collector, by a weak reference. Collectors call it themselves.

        Args:
            collector: The owner of the policies.
        """
        self._collector_wrs.append(weakref.ref(collector))

    @property
    def collector(self) -> Any | None:
        """The collector; ``None`` without one, or when it is gone.

        Raises:
            ValueError: Several collectors were registered.
        """
        if len(self._collector_wrs) > 1:
            raise ValueError("Cannot access `collector` with multiple collectors.")
        return self._collector_wrs[0]() if self._collector_wrs else None

    @property
    def collectors(self) -> list[Any] | None:
        """All registered collectors, ``None`` for one that is gone; ``None`` without any."""
        return [reference() for reference in self._collector_wrs] or None

    def increment_version(self) -> None:
        """Increment the policy version of every registered collector.

        Raises:
            LocalProtocolError: No collector is registered.
        """
        collectors = self.collectors
        if collectors is None:
            raise LocalProtocolError(
                "increment_version(): no collector is registered with this weight updater"
            )
        for collector in collectors:
            if collector is not None:
                collector.increment_version()

    # -- updating ------------------------------------------------------------------------------

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Update the workers, then call the post hooks.

        Args:
            policy_or_weights: A policy, a TensorDict or a dict of tensors; ``None`` takes those
                of :meth:`_get_server_weights`.
            worker_ids: A worker or an iterable of them; ``None`` for all. Of the kind that
                :meth:`all_worker_ids` returns.

        Raises:
            TypeError: The weights are none of these.
            Exception: Whatever the hooks raise. The post hooks are not called then.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        for hook in list(self.post_hooks):
            hook()

    def __call__(
        self, policy_or_weights: Any = None, worker_ids: Any = None, **options: Any
    ) -> None:
        """Call :meth:`push_weights`: this is what collectors do.

        Args:
            policy_or_weights: As for :meth:`push_weights`.
            worker_ids: As for :meth:`push_weights`.
            options: For a :meth:`push_weights` that takes more. ``policy_weights`` is an older
                name of ``policy_or_weights``, which TorchRL still uses in places.
        """
        older = options.pop("policy_weights", None)
        if policy_or_weights is None:
            policy_or_weights = older
        self.push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids, **options)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Find the weights and the workers, and call :meth:`_sync_weights_with_worker`."""
        if policy_or_weights is None:
            policy_or_weights = self._get_server_weights()
        weights = self._maybe_map_weights(policy_or_weights)
        workers = self._resolve_workers(worker_ids)
        if workers is None:
            self._sync_weights_with_worker(server_weights=weights)
            return
        if due := [each for each in workers if not self._skip_update(each)]:
            self._sync_workers(weights, due)

    def _sync_workers(self, weights: Any, worker_ids: list[Any]) -> None:
        for worker_id in worker_ids:
            self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)

    def _resolve_workers(self, worker_ids: Any) -> list[Any] | None:
        if worker_ids is None:
            every = self.all_worker_ids()
            return None if every is None else list(every)
        if isinstance(worker_ids, int | torch.device):
            return [worker_ids]
        return list(worker_ids)

    @abc.abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
        """Bring the weights to one worker.

        Args:
            worker_id: The worker; left out where :meth:`all_worker_ids` returns ``None``.
            server_weights: What :meth:`_maybe_map_weights` returned.
        """

    def _get_server_weights(self) -> Any:
        """The weights of an update that brings none. ``None`` here."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Turn what was given into what workers get.

        Args:
            policy_or_weights: A module, a TensorDict or a dict.

        Returns:
            A TensorDict or a dict; for a module its live weights, detached.

        Raises:
            TypeError: It is something else, or there are no weights.
        """
        if is_tensordict(policy_or_weights) or isinstance(policy_or_weights, dict):
            return policy_or_weights
        if isinstance(policy_or_weights, nn.Module):
            from tensordict import TensorDict  # not before it is needed

            return TensorDict.from_module(policy_or_weights).data
        raise TypeError(
            "policy_or_weights must be None, TensorDictModuleBase, TensorDictBase or dict, got "
            f"{type(policy_or_weights)}"
            + (" from _get_server_weights()" if policy_or_weights is None else "")
        )

    def all_worker_ids(self) -> Iterable[Any] | None:
        """All workers; ``None`` where there is one target and no worker."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        """Whether to leave a worker out of this update. Called once for each update."""
        del worker_id
        return False

    # -- hooks ---------------------------------------------------------------------------------

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Call ``hook()`` after each update that succeeded.

        Args:
            hook: Takes no arguments. What it raises, the update raises.
        """
        self.post_hooks.append(hook)


class _AsTheyAre(WeightUpdaterBase):
    """Takes weights in whatever form they are."""

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights


class AtOnceWeightUpdater(_AsTheyAre):
    """Sends to all workers at the same time, whatever form the weights have.

    Args:
        timeout: Seconds for each update; ``None`` waits for ever.

    Raises:
        ConfigError: The timeout is not positive.
    """

    def __init__(self, timeout: float | None) -> None:
        validate_seconds("timeout", timeout, endless=True, none=True)
        self.timeout: float | None = timeout

    def register_collector(self, collector: Any) -> None:
        """Remember the collector, by a weak reference.

        Args:
            collector: The collector.

        Raises:
            ConfigError: There is a collector already.
        """
        if self._collector_wrs:
            raise ConfigError(f"this {type(self).__name__} already has a collector")
        super().register_collector(collector)

    @abc.abstractmethod
    def _sync_workers(self, weights: Any, worker_ids: list[Any]) -> None:
        """Bring the weights to these workers."""

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self._sync_workers(server_weights, [worker_id])

    def _known(self, name: str, value: Any = None) -> Any:
        """A value, or what the collector has for it."""
        found = getattr(self.collector, name, None) if value is None else value
        if found is None:
            raise LocalProtocolError(
                f"{type(self).__name__}: there is no {name.lstrip('_')}: pass it, or register a "
                "collector that has it"
            )
        return found

    def _num_workers(self) -> int:
        """How many workers there are."""
        return int(self._known("num_workers"))

    def all_worker_ids(self) -> Iterable[Any]:
        """Indices of the workers, from 0."""
        return range(self._num_workers())

    def _indices(self, worker_ids: list[Any]) -> list[int]:
        """The workers that ids mean."""
        count = self._num_workers()
        if wrong := [idx for idx in worker_ids if idx not in range(count)]:
            raise ConfigError(f"there are no workers {wrong}: there are {count}")
        return [int(idx) for idx in worker_ids]


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


class VanillaWeightUpdater(_AsTheyAre):
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

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        del worker_id
        if server_weights is not None:
            copy_weights(self.policy_weights, server_weights)


class RemoteModuleWeightUpdater(_AsTheyAre):
    """Only checks that weights are given; somebody else brings them to the workers."""

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        del worker_id
        if server_weights is None:
            raise LocalProtocolError(
                "RemoteModuleWeightUpdater requires weights to be passed explicitly: call "
                "update_policy_weights_(weights)"
            )
