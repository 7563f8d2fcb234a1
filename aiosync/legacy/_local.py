"""The older generation's schemes for workers on this host. Must not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import aiosync.schemes as aio
from aiosync import sync
from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.legacy._links import Sending
from aiosync.legacy._schemes import _SCHEMES, StrategyName, WeightSyncScheme
from aiosync.legacy._strategy import WeightStrategy
from aiosync.legacy._transports import MPTransport, SharedMemTransport
from aiosync.schemes.sources import is_per_worker
from aiosync.strategy import get_strategy
from aiosync.tensors.tensordicts import is_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = [
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "SharedMemWeightSyncScheme",
]

_SENDER_KEYWORDS = {
    *("cached_weights", "ctx", "device_map_fn", "devices", "model", "num_workers"),
    *("params_map", "pipes", "transports", "weights"),
}


class MultiProcessWeightSyncScheme(WeightSyncScheme, sync.MultiProcessWeightSyncScheme):
    """Sends weights to worker processes through the pipes that it is given.

    A worker's model changes in ``receive()`` and nowhere else; see
    :class:`aiosync.legacy.WeightSyncScheme` for the rest.
    """

    _async_class: ClassVar[type[aio.MultiProcessWeightSyncScheme]] = (
        aio.MultiProcessWeightSyncScheme
    )
    _makes_links = True
    _needs_pipes = True
    _pipe_apply = "manual"

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> MPTransport:
        """A blocking link over one end of a two-way pipe, which it owns from now on."""
        return MPTransport(pipe_or_context)


class SharedMemWeightSyncScheme(WeightSyncScheme, sync.SharedMemWeightSyncScheme):
    """Sends weights to worker processes through shared memory.

    Workers see updates without doing anything, between two forward passes of their model.
    Every ``send()`` takes a snapshot, and what arrives is in memory of the worker's own. Tensors
    that the program registered get what is sent, in place; no worker has them from aiosync.

    Args:
        policy_weights: Model id -> TensorDict: models that are registered from the start. Their
            values of now are what workers get that attach before the first send.
        strategy: As for :class:`aiosync.legacy.WeightSyncScheme`.
        auto_register: Register a model with the first send of it; otherwise sending one that is
            not registered raises ``KeyError``.
        options: Keyword arguments of :class:`aiosync.sync.WeightSyncScheme`.

    Raises:
        ConfigError: ``policy_weights`` holds something that is not a TensorDict (a
            ``ValueError``).
    """

    _async_class: ClassVar[type[aio.SharedMemWeightSyncScheme]] = aio.SharedMemWeightSyncScheme
    _makes_links = True

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | None = None,
        strategy: StrategyName = "tensordict",
        auto_register: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(strategy, **options)
        self.policy_weights: dict[str, TensorDictBase] = {}
        self.auto_register: bool = auto_register
        self._first: dict[str, TensorDictBase] = {}  # of what the program registered
        for model_id, weights in (policy_weights or {}).items():
            self._register(model_id, weights)

    def _register(self, model_id: str, weights: Any) -> None:
        if not is_tensordict(weights):
            raise ConfigError(f"the weights of {model_id!r} must be a TensorDict: {type(weights)}")
        if model_id in self.policy_weights:
            raise LocalProtocolError(f"the weights of {model_id!r} are registered already")
        self.policy_weights[model_id] = weights
        self._first[model_id] = weights.detach().clone()

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Register a model; workers that attach before the first send get these values.

        Args:
            model_id: Name of the model.
            weights: Its first values, of which a copy is taken; then kept up to date, in place.

        Raises:
            ConfigError: They are not a TensorDict (a ``ValueError``).
            LocalProtocolError: The model is registered already (a ``RuntimeError``).
        """
        self._after_fork()
        self._register(model_id, weights)
        links, mine = self._links, model_id == (self.model_id or "policy")
        if links is not None and mine and links.started:
            self._call(links.begin(self._first[model_id], None))
        elif mine:
            self._offer_registered()

    def _offer_registered(self) -> None:
        # Registered values have to be there for workers, whether or not anything is sent.
        if self._links is not None and self._initial_weights() is not None:
            self._started("register_shared_weights")

    def _initial_weights(self) -> Any:
        # What a send registered goes where it was sent to, and nowhere else.
        return self._first.get(self.model_id or "policy")

    def init_on_sender(  # type: ignore[misc]  # the facade's has no **kwargs
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """See :meth:`aiosync.legacy.WeightSyncScheme.init_on_sender`.

        ``cached_weights``, or ``get_cached_weights(model_id)`` of a context with pipes, are the
        first values of the model, unless it is registered already.
        """
        super().init_on_sender(model_id, context, **kwargs)
        self._register_cached()
        self._offer_registered()

    def _register_cached(self) -> None:
        model_id, cached = self.model_id or "policy", self._cached
        if model_id in self.policy_weights:
            return
        if cached is None and self._links is not None:
            context = self.context
            if hasattr(context, "get_cached_weights"):
                cached = context.get_cached_weights(model_id)
        if cached is not None:
            self._register(model_id, _tensordict(cached).detach().clone())

    def _check_registered(self, weights: Any) -> None:
        model_id = self.model_id or "policy"
        per_worker = isinstance(weights, Mapping) and is_per_worker(weights)
        if model_id in self._first:
            if weights is not None and not per_worker:
                WeightStrategy().apply_weights(self.policy_weights[model_id], weights)
        elif model_id not in self.policy_weights and not self.auto_register:
            raise KeyError(
                f"model {model_id!r} is not registered: call register_shared_weights(), or "
                "construct the scheme with auto_register=True"
            )
        elif model_id not in self.policy_weights and weights is not None:
            first = next(iter(weights.values())) if per_worker else weights
            self.policy_weights[model_id] = _tensordict(first).detach().clone()

    def _look(self, model: Any, timeout: float | None) -> bool:
        if self._pipeless and not self.synchronized_on_receiver:
            self._check("receive")
            return False  # nothing can have come
        return super()._look(model, timeout)

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> SharedMemTransport:
        """A blocking link over one end of a two-way pipe, which it owns from now on.

        Args:
            pipe_or_context: The end; ``None`` for none, or for
                ``SharedMemTransport.register_pipe()`` later.
        """
        transport = SharedMemTransport(auto_register=self.auto_register)
        transport._share(self.policy_weights, set(self._first))
        if pipe_or_context is not None:
            transport.register_pipe(pipe_or_context)
        return transport

    def __getstate__(self) -> dict[str, Any]:
        # Copies again: multiprocessing shares the memory of tensors that it pickles.
        own = {
            "policy_weights": _copies(self.policy_weights),
            "auto_register": self.auto_register,
            "_first": _copies(self._first),
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.policy_weights = state["policy_weights"]
        self.auto_register = state["auto_register"]
        self._first = state["_first"]


def _copies(weights: Mapping[str, TensorDictBase]) -> dict[str, TensorDictBase]:
    return {model_id: each.detach().clone() for model_id, each in weights.items()}


def _tensordict(weights: Any) -> Any:
    return get_strategy("tensordict").extract_weights(weights)


class _NoTransport:
    """A transport of this generation that does nothing."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send nothing."""

    def receive_weights(self, timeout: float | None = 1.0) -> None:
        """Return ``None`` at once."""

    def check_connection(self) -> bool:
        """Return True."""
        return True


class NoWeightSyncScheme(WeightSyncScheme, sync.NoWeightSyncScheme):
    """A scheme that does nothing: pipes that it is given stay as they are."""

    _async_class: ClassVar[type[aio.NoWeightSyncScheme]] = aio.NoWeightSyncScheme

    def init_on_sender(  # type: ignore[misc]  # the facade's has no **kwargs
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """See :meth:`aiosync.legacy.WeightSyncScheme.init_on_sender`.

        Keywords that it does not know are ignored: they are meant for schemes that do something.
        """
        known = {name: value for name, value in kwargs.items() if name in _SENDER_KEYWORDS}
        super().init_on_sender(model_id, context, **known)

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> _NoTransport:
        """A transport that does nothing."""
        del pipe_or_context
        return _NoTransport()

    def _init_transports(
        self, model_id: str | None, context: Any, ends: Sequence[Any], **sources: Any
    ) -> None:
        sync.NoWeightSyncScheme.init_on_sender(self, model_id, **sources)
        self.context = context

    def _init_pipe(self, model_id: str | None, context: Any, pipe: Any, **target: Any) -> None:
        sync.NoWeightSyncScheme.init_on_receiver(self, model_id, **target)
        self.context = context

    def _deliver(self, weights: Any, worker_ids: int | Iterable[int] | None) -> Iterable[int]:
        return ()

    def _begin(self, weights: Any, worker_ids: int | Iterable[int] | None) -> Sending:
        return Sending(0, None, frozenset())

    def _finish(self, sending: Sending) -> Iterable[int]:
        return ()

    def _look(self, model: Any, timeout: float | None) -> bool:
        return False


_SCHEMES += [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, NoWeightSyncScheme]
