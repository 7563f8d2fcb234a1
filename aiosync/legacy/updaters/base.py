"""The base class of the legacy weight updaters, and the updaters that reach no other process.

The hooks are those of TorchRL's ``WeightUpdaterBase``, so that a subclass written for it works
after its import line was changed. Must not import torchrl.
"""

from __future__ import annotations

import abc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    TransportBroken,
)
from aiosync.protocol import finite_or_none, validate_seconds
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
    """Base class of updaters, which copy a trainer's weights to a collector's policies. Legacy.

    A collector calls its updater in ``update_policy_weights_()``. New code passes a weight sync
    scheme to the collector instead, which has versions, deadlines and errors for workers that die.
    This class keeps updaters working that were written for TorchRL's class of the same name.
    TorchRL's collectors accept an instance as one of their own updaters if it was made after
    ``torchrl`` was imported.

    A subclass has to define :meth:`_sync_weights_with_worker`. It may define
    :meth:`_get_server_weights`, :meth:`_maybe_map_weights`, :meth:`all_worker_ids`,
    :meth:`_skip_update`, :meth:`init` and :meth:`from_policy`; or :meth:`_push_weights`, which
    calls these.

    Threads:
        Use it on the thread that uses the collector.
    """

    post_hooks: list[Callable[[], Any]]
    """Functions that are called after each update, in this order."""

    _collector_wrs: list[weakref.ref[Any]]
    _takes_any_form: ClassVar[bool] = False  # True if weights are not converted for the workers

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an object that TorchRL's collectors accept, if TorchRL is imported."""
        del args, kwargs  # they are for __init__()
        # This is done for each object, because TorchRL may be imported after this module. TorchRL's
        # collectors only check isinstance().
        module = sys.modules.get("torchrl.collectors.weight_update")
        if module is not None:
            module.WeightUpdaterBase.register(WeightUpdaterBase)
        updater = super().__new__(cls)
        # Set here because subclasses need not call __init__().
        updater._collector_wrs, updater.post_hooks = [], []
        return updater

    @classmethod
    def from_policy(cls, policy: nn.Module) -> WeightUpdaterBase | None:
        """Make an updater for a policy; return ``None`` if this class needs more arguments.

        Args:
            policy: The policy to update.
        """
        del policy
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - a hook that may stay empty
        """Do nothing; ``collector.init_updater()`` calls this hook with its arguments."""

    # -- collectors ----------------------------------------------------------------------------

    def register_collector(self, collector: Any) -> None:
        """Remember a collector, by a weak reference. Collectors call it themselves.

        Args:
            collector: The owner of the policies.
        """
        self._collector_wrs.append(weakref.ref(collector))

    @property
    def collector(self) -> Any | None:
        """Registered collector; ``None`` without one, or if it was garbage-collected.

        Raises:
            ValueError: Several collectors were registered.
        """
        if len(self._collector_wrs) > 1:
            raise ValueError("Cannot access `collector` with multiple collectors.")
        return self._collector_wrs[0]() if self._collector_wrs else None

    @property
    def collectors(self) -> list[Any] | None:
        """Registered collectors, with ``None`` for a deleted one; ``None`` without any."""
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
            policy_or_weights: A policy, a TensorDict or a dict of tensors; ``None`` takes the
                weights of :meth:`_get_server_weights`.
            worker_ids: The id of a worker, or an iterable of ids, as :meth:`all_worker_ids` returns
                them; ``None`` for all workers.

        Raises:
            TypeError: The weights are none of these.
            Exception: Any error of the hooks. The post hooks are not called then.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        self._call_post_hooks()

    def __call__(
        self, policy_or_weights: Any = None, worker_ids: Any = None, **options: Any
    ) -> None:
        """Call :meth:`push_weights`; collectors call their updater this way.

        Args:
            policy_or_weights: As for :meth:`push_weights`.
            worker_ids: As for :meth:`push_weights`.
            options: Further arguments, for a :meth:`push_weights` that takes more.
                ``policy_weights`` is an older name of ``policy_or_weights``, which TorchRL still
                uses in places.
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
        """Send the weights to these workers, one after the other."""
        for worker_id in worker_ids:
            self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)

    def _resolve_workers(self, worker_ids: Any) -> list[Any] | None:
        """Return the ids that an update names, or all; ``None`` if there is one target only."""
        if worker_ids is None:
            every = self.all_worker_ids()
            return None if every is None else list(every)
        if isinstance(worker_ids, int | torch.device):
            return [worker_ids]
        return list(worker_ids)

    @abc.abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
        """Send the weights to one worker.

        Args:
            worker_id: Id of the worker; left out if :meth:`all_worker_ids` returns ``None``.
            server_weights: Result of :meth:`_maybe_map_weights`.
        """

    def _get_server_weights(self) -> Any:
        """Return the weights for an update without weights; ``None`` in this class."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Convert the weights of an update into the form that workers get.

        Args:
            policy_or_weights: A module, a TensorDict or a dict.

        Returns:
            A TensorDict or a dict; for a module its live weights, detached.

        Raises:
            TypeError: The argument has another type, or is ``None``.
        """
        as_it_is = self._takes_any_form or isinstance(policy_or_weights, dict)
        if as_it_is or is_tensordict(policy_or_weights):
            return policy_or_weights
        if isinstance(policy_or_weights, nn.Module):
            from tensordict import TensorDict  # loaded only when it is needed

            return TensorDict.from_module(policy_or_weights).data
        raise TypeError(
            "policy_or_weights must be None, TensorDictModuleBase, TensorDictBase or dict, got "
            f"{type(policy_or_weights)}"
            + (" from _get_server_weights()" if policy_or_weights is None else "")
        )

    def all_worker_ids(self) -> Iterable[Any] | None:
        """Return the ids of all workers; ``None`` if there is one target and no worker."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        """Return True to leave a worker out of this update. Called once for each update."""
        del worker_id
        return False

    # -- hooks ---------------------------------------------------------------------------------

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Add a hook that is called after each successful update.

        Args:
            hook: Function without arguments. The update raises its errors.
        """
        self.post_hooks.append(hook)

    def _call_post_hooks(self) -> None:
        """Call the post hooks; a :meth:`push_weights` of a subclass ends with it."""
        for hook in list(self.post_hooks):
            hook()


class AtOnceWeightUpdater(WeightUpdaterBase):
    """Base class of updaters that send to all workers at the same time.

    If a subclass overrides :meth:`_sync_weights_with_worker`, an update calls it for one worker
    after the other, and ``timeout`` counts for each of them.

    Args:
        timeout: Seconds for each update; ``None`` waits for ever.

    Raises:
        ConfigError: The timeout is not positive.
    """

    _takes_any_form = True

    def __init__(self, timeout: float | None) -> None:
        validate_seconds("timeout", timeout, endless=True, none=True)
        self.timeout: float | None = finite_or_none(timeout)
        self._reached: set[Any] = set()  # ids that calls of the hook have sent to
        self._lost: set[int] = set()  # workers whose loss an update with the hook has named

    def register_collector(self, collector: Any) -> None:
        """Remember the collector, by a weak reference.

        Args:
            collector: The collector.

        Raises:
            ConfigError: A collector was registered before.
        """
        if self._collector_wrs:
            raise ConfigError(f"this {type(self).__name__} already has a collector")
        super().register_collector(collector)

    @abc.abstractmethod
    def _send_at_once(self, weights: Any, worker_ids: list[Any]) -> None:
        """Send the weights to these workers at the same time."""

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        """Send to one worker, for an override of this hook, or code that calls it itself."""
        self._send_at_once(server_weights, [worker_id])
        self._reached.add(worker_id)

    def _sync_workers(self, weights: Any, worker_ids: list[Any]) -> None:
        """Send to these workers at the same time, or let an overridden hook send to each."""
        hook = getattr(self._sync_weights_with_worker, "__func__", None)
        if hook is AtOnceWeightUpdater._sync_weights_with_worker:
            self._send_at_once(weights, worker_ids)
        else:
            self._sync_each(weights, worker_ids)

    def _sync_each(self, weights: Any, worker_ids: list[Any]) -> None:
        """Let the overridden hook send to each of these workers, and raise one error for all."""
        self._reached.clear()
        acked, failed, returned = set[int](), dict[int, AiosyncError](), 0
        for worker_id in worker_ids:
            # A worker that fails must not keep the weights from the workers after it.
            try:
                self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)
                returned += 1
            except PartialSyncError as exc:
                acked |= exc.acked
                failed.update(exc.failed)
        if self._reached:
            acked.update(self._indices([*self._reached]))
        lost = {idx for idx, why in failed.items() if isinstance(why, PeerClosed | TransportBroken)}
        # As without an override, a loss is named once, unless the update reaches nobody.
        for idx in lost & self._lost if returned or acked else ():
            del failed[idx]
        self._lost = lost | (self._lost - acked)
        if failed:
            raise PartialSyncError(acked=acked, failed=failed)

    def _known(self, name: str, value: Any = None) -> Any:
        """Return a value; if it is ``None``, return the collector's attribute ``name``.

        Raises:
            LocalProtocolError: There is neither a value nor such an attribute.
        """
        found = getattr(self.collector, name, None) if value is None else value
        if found is None:
            raise LocalProtocolError(
                f"{type(self).__name__}: there is no {name.lstrip('_')}: pass it, or register a "
                "collector that has it"
            )
        return found

    def _num_workers(self) -> int:
        """Return the number of workers."""
        return int(self._known("num_workers"))

    def all_worker_ids(self) -> Iterable[Any]:
        """Return the indices of all workers, from 0."""
        return range(self._num_workers())

    def _indices(self, worker_ids: list[Any]) -> list[int]:
        """Return the indices of the workers with these ids.

        Raises:
            ConfigError: There is no worker with one of the ids.
        """
        count = self._num_workers()
        if wrong := [idx for idx in worker_ids if idx not in range(count)]:
            raise ConfigError(f"there are no workers {wrong}: there are {count}")
        return [int(idx) for idx in worker_ids]


def copy_weights(target: Any, weights: Any) -> None:
    """Copy weights into a TensorDict in place: all of them, or none if there is an error.

    Args:
        target: TensorDict whose memory gets the values.
        weights: A module, a TensorDict or a dict. It may have a subset of the target's names, and
            other floating dtypes.

    Raises:
        ManifestMismatch: The weights do not fit the target; nothing was changed.
    """
    strategy = WeightStrategy()
    if isinstance(weights, nn.Module):
        weights = strategy.extract_weights(weights)
    strategy.apply_weights(target, weights, strict=False)


class VanillaWeightUpdater(WeightUpdaterBase):
    """Updater that copies weights into a policy of this process.

    Args:
        weight_getter: Returns the weights for an update without weights. Without this function
            such an update does nothing.
        policy_weights: Live weights of the policy, which are written in place, as
            ``TensorDict.from_module(policy)`` returns them.
    """

    _takes_any_form = True

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: Any
    ) -> None:
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self:
        """Make an updater of a policy's own weights.

        Args:
            policy: The policy, whose parameters and buffers are written in place.
        """
        from tensordict import TensorDict  # loaded only when it is needed

        return cls(policy_weights=TensorDict.from_module(policy).lock_())

    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        del worker_id
        if server_weights is not None:
            copy_weights(self.policy_weights, server_weights)


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """Updater that only checks that weights are given; other code sends them to the workers."""

    _takes_any_form = True

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        del worker_id
        if server_weights is None:
            raise LocalProtocolError(
                "RemoteModuleWeightUpdater requires weights to be passed explicitly: call "
                "update_policy_weights_(weights)"
            )
