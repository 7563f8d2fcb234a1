"""The older generation's schemes for workers on other hosts: RPC, ``torch.distributed``, Ray.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from aiosync import sync as facade
from aiosync.errors import ConfigError
from aiosync.legacy.ends import WeightReceiver, WeightSender
from aiosync.legacy.remote import RayActorTransport, RayTransport, RPCTransport
from aiosync.legacy.schemes import StrategyName, WeightSyncScheme
from aiosync.legacy.updaters.distributed import DistributedTransport
from aiosync.schemes.options import DistributedOptions, RayOptions, RPCOptions
from aiosync.sync._schemes import StreamTwin
from aiosync.sync.twins import attribute, direct

__all__ = [
    "DistributedWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayWeightSyncScheme",
]


class RPCWeightSyncScheme(
    RPCOptions, StreamTwin, WeightSyncScheme, stands_on=facade.RPCWeightSyncScheme
):
    """Scheme that sends weights to remote objects of ``torch.distributed.rpc``.

    Without pipes, roles and calls are those of :class:`aiosync.sync.RPCWeightSyncScheme`.
    """

    def create_transport(
        self, pipe_or_context: Any = (), *, worker_rank: int | None = None, **named: Any
    ) -> RPCTransport:
        """Make a transport to one remote object.

        Args:
            pipe_or_context: ``(collector_info, collector_rref, collector_class)``.
            worker_rank: Ignored, because the weights travel by RPC.
            named: The three values by these names, instead.

        Raises:
            TypeError: The arguments are not these three.
        """
        del worker_rank
        return RPCTransport(*pipe_or_context, **named)


class DistributedWeightSyncScheme(
    DistributedOptions, StreamTwin, WeightSyncScheme, stands_on=facade.DistributedWeightSyncScheme
):
    """Scheme that sends weights with ``torch.distributed``.

    Roles and calls are those of :class:`aiosync.sync.DistributedWeightSyncScheme`; a sender that
    :meth:`create_sender` makes has transports.

    Args:
        backend: ``"gloo"`` or ``"nccl"``, the back-end for large updates.
        sync: Kept for the signature: ``send()`` always waits.
        strategy: As for :class:`aiosync.legacy.WeightSyncScheme`.
        options: Keyword arguments of :class:`aiosync.sync.DistributedWeightSyncScheme`.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"] = "gloo",
        sync: bool = True,
        *,
        strategy: StrategyName = "state_dict",
        **options: Any,
    ) -> None:
        super().__init__(strategy, backend=backend, sync=sync, **options)

    def create_transport(
        self, pipe_or_context: Any = (), *, weights_buffer: Any = None, **named: Any
    ) -> DistributedTransport:
        """Make a transport to one worker.

        Args:
            pipe_or_context: ``(store, rank)``.
            weights_buffer: Ignored, because every send copies the weights.
            named: The two values by these names, instead, and ``sync``.

        Raises:
            TypeError: The arguments are not these.
        """
        del weights_buffer
        return DistributedTransport(*pipe_or_context, **{"sync": self.sync, **named})


class RayWeightSyncScheme(
    RayOptions, StreamTwin, WeightSyncScheme, stands_on=facade.RayWeightSyncScheme
):
    """Scheme that sends weights to Ray actors.

    :meth:`init_on_sender` takes actors as ``remote_collectors``, or finds them in its context under
    this name. The sender calls ``update_policy_weights_(weights)`` of each actor. The method also
    takes ``num_collectors``, the number of actors, and ``source_model``, the model that is sent by
    default. Without actors, or with a collector of TorchRL as the context, roles and calls are
    those of :class:`aiosync.sync.RayWeightSyncScheme`.
    """

    connection_info_name: Final = attribute[str](facade.RayWeightSyncScheme.connection_info_name)
    _ends: ClassVar[Sequence[str]] = ("remote_collectors", "pipes")
    _renamed: ClassVar[Mapping[str, str]] = {
        "source_model": "model",
        "num_collectors": "num_workers",
    }

    def create_transport(
        self,
        pipe_or_context: Any = None,
        *,
        remote_actor: Any = None,
        remote_collector: Any = None,
        worker_idx: int | None = None,
    ) -> RayTransport | RayActorTransport:
        """Make a transport to one actor.

        Args:
            pipe_or_context: Handle of the actor.
            remote_actor: Handle of the actor, by another name.
            remote_collector: Handle of the actor, by another name.
            worker_idx: Ignored, because a transport has one actor.

        Raises:
            ConfigError: There is no handle (a ``ValueError``).
        """
        del worker_idx
        handles = (pipe_or_context, remote_actor, remote_collector)
        actor = next((each for each in handles if each is not None), None)
        if actor is None:
            raise ConfigError("create_transport() needs the handle of an actor")
        return self._transport_to(actor)

    def _transport_to(self, actor: Any) -> RayTransport | RayActorTransport:
        """Make the transport to an actor; a scheme for other kinds of actors overrides it."""
        return RayTransport(actor)

    def get_receiver(self) -> WeightReceiver:
        """Return the receiver of this object; an actor needs no pipe.

        The trainer calls the actor with weights, and the actor passes them to
        :meth:`WeightReceiver.apply_weights`. See
        :meth:`aiosync.legacy.WeightSyncScheme.get_receiver`.
        """
        self._after_fork()
        # Without a pipe only the scheme below became a receiver.
        if self._receiver is None and self._scheme.initialized_on_receiver:
            self._receive_as_given()
        return super().get_receiver()


class RayModuleTransformSender(WeightSender):
    """Sender of :class:`RayModuleTransformScheme`, which sends weights to its actors."""


class RayModuleTransformReceiver(WeightReceiver):
    """Receiver of :class:`RayModuleTransformScheme`, with which an actor applies weights.

    The weights come by a call of the actor, and not by :meth:`receive`.
    """


class RayModuleTransformScheme(RayWeightSyncScheme, stands_on=facade.RayModuleTransformScheme):
    """Scheme that sends weights to Ray actors that wrap a module.

    :meth:`init_on_sender` takes the actors as ``actor_refs``, ``actors`` or ``remote_collectors``.
    Otherwise roles and calls are those of :class:`aiosync.sync.RayModuleTransformScheme`.
    """

    _set_transform: Final = direct(facade.RayModuleTransformScheme._set_transform)
    _ends = ("actor_refs", "actors", "remote_collectors", "pipes")

    def __init__(self, strategy: StrategyName = "tensordict", **options: Any) -> None:
        super().__init__(strategy, **options)

    def _transport_to(self, actor: Any) -> RayActorTransport:
        return RayActorTransport(actor, self.strategy)

    def create_sender(self) -> RayModuleTransformSender:
        """Make a sender for this scheme."""
        return RayModuleTransformSender(self)

    def create_receiver(self) -> RayModuleTransformReceiver:
        """Make a receiver for this scheme."""
        return RayModuleTransformReceiver(self)
