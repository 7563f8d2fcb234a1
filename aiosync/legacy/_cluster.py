"""The older generation's schemes for workers elsewhere: Ray, RPC, ``torch.distributed``.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import aiosync.schemes as aio
from aiosync import sync as facade
from aiosync.errors import ConfigError
from aiosync.legacy._pipes import of_old_context
from aiosync.legacy._receiver import WeightReceiver
from aiosync.legacy._remote import RayActorTransport, RayTransport, RPCTransport
from aiosync.legacy._schemes import _SCHEMES, StrategyName, WeightSyncScheme
from aiosync.legacy._sender import WeightSender
from aiosync.legacy._store import DistributedTransport

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
        self, pipe_or_context: Any
    ) -> RPCTransport:
        """A transport to one remote object.

        Args:
            pipe_or_context: ``(collector_info, collector_rref, collector_class)``.

        Raises:
            ConfigError: It is something else (a ``ValueError``).
        """
        if not isinstance(pipe_or_context, tuple) or len(pipe_or_context) != 3:
            raise ConfigError(
                "expected (collector_info, collector_rref, collector_class), got "
                f"{pipe_or_context!r}"
            )
        return RPCTransport(*pipe_or_context)


class DistributedWeightSyncScheme(WeightSyncScheme, facade.DistributedWeightSyncScheme):
    """Sends weights with ``torch.distributed``.

    Roles and calls are those of :class:`aiosync.sync.DistributedWeightSyncScheme`; senders and
    receivers use its links.

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
        self._apply_given = "apply" in options

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> DistributedTransport:
        """A transport to one worker.

        Args:
            pipe_or_context: ``(store, rank)``.

        Raises:
            ConfigError: It is something else (a ``ValueError``).
        """
        if not isinstance(pipe_or_context, tuple) or len(pipe_or_context) != 2:
            raise ConfigError(f"expected (store, rank), got {pipe_or_context!r}")
        store, rank = pipe_or_context
        return DistributedTransport(store, rank, self.sync)


class RayWeightSyncScheme(WeightSyncScheme, facade.RayWeightSyncScheme):
    """Sends weights to Ray actors.

    Actors that are given to :meth:`init_on_sender` without a collector of TorchRL as the
    context are called: each has ``update_policy_weights_(weights)``. Otherwise roles and calls
    are those of :class:`aiosync.sync.RayWeightSyncScheme`.
    """

    _async_class: ClassVar[type[aio.RayWeightSyncScheme]] = aio.RayWeightSyncScheme
    _handle_names: ClassVar[Sequence[str]] = ("remote_collectors",)

    def init_on_sender(  # type: ignore[misc]  # the facade's takes no old-style context
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Make this object the sender. Sends nothing and does not wait for workers.

        Args:
            model_id: Name of the model; ``"policy"`` by default.
            context: Owner of the model, which may offer ``remote_collectors``.
            kwargs: ``remote_collectors``, handles of actors; ``num_collectors``, how many;
                ``source_model`` or ``model``, what is sent by default; ``weights``.

        Raises:
            ConfigError: The arguments exclude each other (a ``ValueError``).
        """
        self._after_fork()
        handles = None
        of_torchrl = type(context).__module__.partition(".")[0] == "torchrl"
        for name in () if of_torchrl else self._handle_names:
            given = kwargs.pop(name, None)
            handles = handles if handles is not None else given
            handles = handles if handles is not None else of_old_context(context, name)
        source = kwargs.pop("source_model", None)
        if source is not None:
            kwargs["model"] = source
        if handles is None:
            super().init_on_sender(model_id, context, **kwargs)
            return
        count = kwargs.pop("num_collectors", None)
        if count is not None and count != len(handles):
            raise ConfigError(f"num_collectors is {count}, but there are {len(handles)} actors")
        self._init_transports(model_id, context, list(handles), **kwargs)

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> RayTransport | RayActorTransport:
        """A transport to one actor, of which this is the handle."""
        return RayTransport(pipe_or_context)


class RayModuleTransformSender(WeightSender):
    """Sends weights to the actors of :class:`RayModuleTransformScheme`."""


class RayModuleTransformReceiver(WeightReceiver):
    """What an actor of :class:`RayModuleTransformScheme` would receive with.

    Weights come by a call of the actor, so that :meth:`receive` finds none.
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
    _handle_names = ("actor_refs", "actors", "remote_collectors")

    def __init__(self, strategy: StrategyName = "tensordict", **options: Any) -> None:
        super().__init__(strategy, **options)

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> RayActorTransport:
        """A transport to one actor, of which this is the handle."""
        return RayActorTransport(pipe_or_context, self.strategy)

    def create_sender(self) -> RayModuleTransformSender:  # type: ignore[misc, override]  # see the class
        """A sender for this scheme."""
        return RayModuleTransformSender(self)

    def create_receiver(self) -> RayModuleTransformReceiver:
        """A receiver for this scheme."""
        return RayModuleTransformReceiver(self)


_SCHEMES += [
    RPCWeightSyncScheme,
    DistributedWeightSyncScheme,
    RayWeightSyncScheme,
    RayModuleTransformScheme,
]
