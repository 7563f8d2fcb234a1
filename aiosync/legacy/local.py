"""The older generation's schemes for workers on the same host: pipes, shared memory, nothing.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from aiosync import sync as facade
from aiosync.legacy.schemes import StrategyName, WeightSyncScheme, given_by, is_of_torchrl
from aiosync.legacy.transports import MPTransport, SharedMemTransport
from aiosync.schemes.options import SharedMemOptions
from aiosync.sync.twins import direct

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = [
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "SharedMemWeightSyncScheme",
]


class MultiProcessWeightSyncScheme(WeightSyncScheme, stands_on=facade.MultiProcessWeightSyncScheme):
    """Scheme that sends weights to worker processes through the pipes that it is given.

    Only ``receive()`` changes a worker's model; see :class:`aiosync.legacy.WeightSyncScheme` for
    the rest.
    """

    def create_transport(self, pipe_or_context: Any) -> MPTransport:
        """Make a blocking link over one end of a two-way pipe, which the link owns from now on."""
        return MPTransport(pipe_or_context)


class SharedMemWeightSyncScheme(
    SharedMemOptions, WeightSyncScheme, stands_on=facade.SharedMemWeightSyncScheme
):
    """Scheme that sends weights to worker processes, whose models follow without calls.

    Updates are applied between two forward passes of a worker's model; with ``apply="manual"`` in
    ``receive()``. Every ``send()`` takes a snapshot, and an update lies in the worker's own memory.
    Tensors that the program registered get the values that are sent, in place; aiosync gives these
    tensors to no worker.

    Attributes:
        policy_weights: Weights registered by the program or by a transport of this scheme, by
            model id.
        auto_register: As it was given; may be changed.

    Args:
        policy_weights: Model id -> TensorDict: models that are registered from the start. Workers
            that attach before the first send get the values at ``init_on_sender()``.
        strategy: As for :class:`aiosync.legacy.WeightSyncScheme`.
        auto_register: Send models that are not registered, too; otherwise sending one raises
            ``KeyError``.
        options: Keyword arguments of :class:`aiosync.sync.WeightSyncScheme`.

    Raises:
        ConfigError: A value of ``policy_weights`` is not a TensorDict (a ``ValueError``).
    """

    _follows = True

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | None = None,
        strategy: StrategyName = "tensordict",
        auto_register: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(strategy, **options)
        registered = SharedMemTransport(policy_weights).policy_weights
        self.policy_weights: dict[str, TensorDictBase] = registered
        self.auto_register: bool = auto_register
        # Copies of the weights that are in the newest pickle of this object.
        self._pickled: object = None

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Register a model; workers that attach before the first send get these values.

        Args:
            model_id: Name of the model.
            weights: The first values of the model, of which a copy is sent. Later sends change
                them in place.

        Raises:
            ConfigError: The weights are not a TensorDict (a ``ValueError``).
            LocalProtocolError: The model is registered already (a ``RuntimeError``).
        """
        self._after_fork()
        self.create_transport(None).register_weights(model_id, weights)
        if self._sender is not None and model_id == self.model_id:
            self._sender.offer(weights)

    def init_on_sender(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Make this object the sender; see :meth:`aiosync.legacy.WeightSyncScheme.init_on_sender`.

        With pipes, ``cached_weights``, or ``get_cached_weights(model_id)`` of a context, are the
        first values of the model, unless it is registered.
        """
        super().init_on_sender(model_id, context, **kwargs)
        first = self.policy_weights.get(self.model_id or "policy")
        if first is None:
            first = self._cached_of(context)
        if first is not None and self._sender is not None:
            self._sender.offer(first)

    def register_sent(self, weights: Any) -> None:
        """Copy the weights of a send into the weights registered for the model, if there are any.

        Raises:
            ConfigError: The weights are of another type (a ``ValueError``).
            KeyError: The model is not registered, and ``auto_register`` is off.
            ManifestMismatch: The weights do not fit the registered ones (a ``ValueError``).
        """
        name = self.model_id or "policy"
        # Without auto_register update_registered() is called in any case, because it raises.
        registered = name in self.policy_weights or not self.auto_register
        if registered and weights is not None:
            self.create_transport(None).update_registered(name, weights)

    def _transport_of(self, end: Any) -> Any:
        # An MPTransport acknowledges weights only when the model has them, unlike the
        # SharedMemTransport that create_transport() makes.
        return MPTransport(end)

    def create_transport(self, pipe_or_context: Any) -> SharedMemTransport:
        """Make a blocking link over one end of a two-way pipe, which the link owns from now on.

        Args:
            pipe_or_context: The end; ``None`` for none, or for
                ``SharedMemTransport.register_pipe()`` later.
        """
        transport = SharedMemTransport(None, self.auto_register)
        transport.policy_weights = self.policy_weights
        if pipe_or_context is not None:
            transport.register_pipe(pipe_or_context)
        return transport

    def __getstate__(self) -> dict[str, Any]:
        # The weights are copied, because multiprocessing shares the memory of pickled tensors. It
        # passes on their descriptors when it starts the process: the copies must live until then.
        own = {name: weights.detach().clone() for name, weights in self.policy_weights.items()}
        self._pickled = own
        return {**super().__getstate__(), "policy_weights": own, "_pickled": None}


class _NoTransport:
    """Transport of this generation that does nothing."""

    _takes_snapshot = True  # it looks at no weights

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send nothing."""

    send_weights = send_weights_async

    def receive_weights(self, timeout: float | None = 1.0) -> None:
        """Return ``None`` at once."""

    def check_connection(self) -> bool:
        """Return True."""
        return True


class NoWeightSyncScheme(WeightSyncScheme, stands_on=facade.NoWeightSyncScheme):
    """Scheme that does nothing: it does not use the pipes that it is given."""

    carry: Final = direct(facade.NoWeightSyncScheme.carry)

    def _init_on_sender_impl(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        # Other keywords are ignored, because they are options of schemes with links.
        pipes = given_by("pipes", kwargs, context)
        if pipes is None and is_of_torchrl(context):
            # The scheme below carries the collector's policy to its workers, which begin with it.
            self._scheme.init_on_sender(model_id, context, **kwargs)
        else:
            num_workers = given_by("num_workers", kwargs, context)
            ends = pipes or [None] * (num_workers or 1)
            self._init_sender(model_id, context, ends, num_workers=len(ends))

    def init_on_worker(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Receive without a pipe; see :meth:`aiosync.legacy.WeightSyncScheme.init_on_worker`."""
        self.init_on_receiver(model_id, context, **{"pipe": False, **kwargs})

    def _init_on_receiver_impl(
        self, model_id: str | None, context: Any = None, *, pipe: Any = None, **kwargs: Any
    ) -> None:
        if pipe is None:  # TorchRL's workers call init_on_receiver(), without a pipe
            self._scheme.init_on_receiver(model_id, context, **kwargs)
        else:
            self._init_receiver(model_id, context, None, model=kwargs.get("model"))

    def create_transport(self, pipe_or_context: Any) -> _NoTransport:
        """Make a transport that does nothing."""
        del pipe_or_context
        return _NoTransport()
