"""The older generation's schemes for workers elsewhere: RPC, ``torch.distributed``, Ray.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import aiosync.schemes as aio
from aiosync import sync as facade
from aiosync.errors import ConfigError
from aiosync.legacy.remote import RayActorTransport, RayTransport, RPCTransport
from aiosync.legacy.roles import WeightReceiver, WeightSender
from aiosync.legacy.schemes import StrategyName, WeightSyncScheme
from aiosync.legacy.updaters.distributed import DistributedTransport

__all__ = [
    "DistributedWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayWeightSyncScheme",
]


class RPCWeightSyncScheme(  # type: ignore[misc]  # the base's init_on_sender() suits both
    WeightSyncScheme, facade.RPCWeightSyncScheme
):
    """Sends weights to remote objects of ``torch.distributed.rpc``.

    Without pipes, roles and calls are those of :class:`aiosync.sync.RPCWeightSyncScheme`.
    """

    _async_class: ClassVar[type[aio.RPCWeightSyncScheme]] = aio.RPCWeightSyncScheme

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any = (), *, worker_rank: int | None = None, **named: Any
    ) -> RPCTransport:
        """A transport to one remote object.

        Args:
            pipe_or_context: ``(collector_info, collector_rref, collector_class)``.
            worker_rank: Ignored: the weights travel by RPC.
            named: The three, by these names.

        Raises:
            TypeError: It is something else.
        """
        del worker_rank
        return RPCTransport(*pipe_or_context, **named)


class DistributedWeightSyncScheme(WeightSyncScheme, facade.DistributedWeightSyncScheme):
    """Sends weights with ``torch.distributed``.

    Roles and calls are those of :class:`aiosync.sync.DistributedWeightSyncScheme`; a sender that
    :meth:`create_sender` makes has transports.

    Args:
        backend: ``"gloo"`` or ``"nccl"``: what moves large updates.
        sync: Kept for the signature: ``send()`` always waits.
        strategy: As for :class:`aiosync.legacy.WeightSyncScheme`.
        options: Keyword arguments of :class:`aiosync.sync.DistributedWeightSyncScheme`.
    """

    _async_class: ClassVar[type[aio.DistributedWeightSyncScheme]] = aio.DistributedWeightSyncScheme

    def __init__(
        self,
        backend: Literal["gloo", "nccl"] = "gloo",
        sync: bool = True,
        *,
        strategy: StrategyName = "state_dict",
        **options: Any,
    ) -> None:
        facade.DistributedWeightSyncScheme.__init__(
            self, backend, sync, strategy=strategy, **options
        )

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any = (), *, weights_buffer: Any = None, **named: Any
    ) -> DistributedTransport:
        """A transport to one worker.

        Args:
            pipe_or_context: ``(store, rank)``.
            weights_buffer: Ignored: what is sent is copied.
            named: The two by these names, and ``sync``.

        Raises:
            TypeError: It is something else.
        """
        del weights_buffer
        return DistributedTransport(*pipe_or_context, **{"sync": self.sync, **named})


class RayWeightSyncScheme(  # type: ignore[misc]  # the base's init_on_sender() suits both
    WeightSyncScheme, facade.RayWeightSyncScheme
):
    """Sends weights to Ray actors.

    Actors that are given to :meth:`init_on_sender` as ``remote_collectors``, or that its context
    has under this name, are called: each has ``update_policy_weights_(weights)``. It also takes
    ``num_collectors``, how many there are, and ``source_model``, what is sent by default. Without
    actors, or with a collector of TorchRL as the context, roles and calls are those of
    :class:`aiosync.sync.RayWeightSyncScheme`.
    """

    _async_class: ClassVar[type[aio.RayWeightSyncScheme]] = aio.RayWeightSyncScheme
    _ends: ClassVar[Sequence[str]] = ("remote_collectors", "pipes")
    _renamed: ClassVar[Mapping[str, str]] = {
        "source_model": "model",
        "num_collectors": "num_workers",
    }

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self,
        pipe_or_context: Any = None,
        *,
        remote_actor: Any = None,
        remote_collector: Any = None,
        worker_idx: int | None = None,
    ) -> RayTransport | RayActorTransport:
        """A transport to one actor.

        Args:
            pipe_or_context: Handle of the actor.
            remote_actor: The same.
            remote_collector: The same.
            worker_idx: Ignored: a transport has one actor.

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
        return RayTransport(actor)

    def get_receiver(self) -> WeightReceiver:
        """See :meth:`aiosync.legacy.WeightSyncScheme.get_receiver`; an actor needs no pipe.

        It is called with weights, and has :meth:`WeightReceiver.apply_weights` for them.
        """
        self._after_fork()
        if self._receiver is None and self._scheme.initialized_on_receiver:
            self._receive_as_given()
        return super().get_receiver()


class RayModuleTransformSender(WeightSender):
    """Sends weights to the actors of :class:`RayModuleTransformScheme`."""


class RayModuleTransformReceiver(WeightReceiver):
    """What an actor of :class:`RayModuleTransformScheme` applies weights with.

    They come by a call of the actor, and not by :meth:`receive`.
    """


class RayModuleTransformScheme(  # type: ignore[misc]  # create_sender() is this generation's
    RayWeightSyncScheme, facade.RayModuleTransformScheme
):
    """Sends weights to Ray actors that wrap a module.

    Actors are given to :meth:`init_on_sender` as ``actor_refs``, ``actors`` or
    ``remote_collectors``. Otherwise roles and calls are those of
    :class:`aiosync.sync.RayModuleTransformScheme`.
    """

    _async_class: ClassVar[type[aio.RayModuleTransformScheme]] = aio.RayModuleTransformScheme
    _ends = ("actor_refs", "actors", "remote_collectors", "pipes")

    def __init__(self, strategy: StrategyName = "tensordict", **options: Any) -> None:
        super().__init__(strategy, **options)

    def _transport_to(self, actor: Any) -> RayActorTransport:
        return RayActorTransport(actor, self.strategy)

    def create_sender(self) -> RayModuleTransformSender:  # type: ignore[misc, override]  # see the class
        """A sender for this scheme."""
        return RayModuleTransformSender(self)

    def create_receiver(self) -> RayModuleTransformReceiver:
        """A receiver for this scheme."""
        return RayModuleTransformReceiver(self)
