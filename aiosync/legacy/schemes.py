"""The schemes of the older generation: factories of transports, used by senders and receivers.

Each is a subclass of the scheme of the same name in :mod:`aiosync.sync`, whose methods it also
has: these make links of the newer generation, and have nothing to do with transports. Must not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import aiosync.schemes as aio
from aiosync import sync as facade
from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.legacy.backends import Backend
from aiosync.legacy.remote import RayActorTransport, RayTransport, RPCTransport
from aiosync.legacy.roles import WeightReceiver, WeightSender
from aiosync.legacy.store import DistributedTransport
from aiosync.legacy.strategy import WeightStrategy, nested
from aiosync.legacy.transports import MPTransport, SharedMemTransport
from aiosync.schemes.inside import change_hooks, sources_of
from aiosync.schemes.sources import is_per_worker
from aiosync.strategy import get_strategy
from aiosync.sync._schemes import AsyncClass

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = [
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "WeightSyncScheme",
]

StrategyName = Literal["tensordict", "state_dict"]


def _is_of_torchrl(context: Any) -> bool:
    return type(context).__module__.partition(".")[0] == "torchrl"


def _of_old_context(context: Any, name: str) -> Any:
    # TorchRL's present collectors have such attributes, too, but use them for something else.
    return None if _is_of_torchrl(context) else getattr(context, name, None)


def _to_nobody(epoch: int, version: int) -> None:
    """Pass on nothing."""


class WeightSyncScheme(facade.WeightSyncScheme):
    """Keeps the weights of one model the same in a trainer and its workers, the older way.

    The trainer calls :meth:`init_on_sender` and uses :meth:`get_sender`; a worker calls
    :meth:`init_on_worker` and uses :meth:`get_receiver`. These never wait
    for the other side. What the newer generation calls (``init_on_receiver()``, ``connect()``,
    ``send()``) works, too, as long as no pipes are given.

    A trainer whose program ends while child processes of ``multiprocessing`` have yet to attach,
    and to get what was sent to them, waits for that: for 5 seconds at most, and for no daemons.

    This class itself has no link. To bring one of your own, override :meth:`create_transport`;
    see :class:`TransportBackend`.

    Args:
        strategy: ``"state_dict"`` or ``"tensordict"``: which leaves of a module travel. Over
            pipes the other side may have the other one.
        options: Keyword arguments of :class:`aiosync.sync.WeightSyncScheme`.

    Raises:
        ConfigError: An option has an illegal value (a ``ValueError``).
    """

    _async_class: ClassVar[AsyncClass] = aio.NoWeightSyncScheme
    _needs_pipes: ClassVar[bool] = False  # or anything else that says who the workers are

    def __init__(self, strategy: StrategyName = "state_dict", **options: Any) -> None:
        super().__init__(strategy, **options)

    def _adopt(self, scheme: aio.WeightSyncScheme) -> None:
        super()._adopt(scheme)
        # A send of this generation ends when the weights are in the model, whoever looks at it:
        # a worker that passes them on does not promise anything.
        change_hooks(scheme, carried=True, relay=_to_nobody)
        # In a forked child the transports are the parent's.
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._cached: Any = None

    @property  # type: ignore[override]  # a string in this generation
    def strategy(self) -> StrategyName:
        """Name of the strategy."""
        return self._scheme.strategy.extract_as

    @strategy.setter
    def strategy(self, value: Any) -> None:
        self._scheme.strategy = get_strategy(getattr(value, "extract_as", value))

    strategy_str = strategy

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """The scheme of this generation for a back-end name, such as ``"shared"``.

        Args:
            backend: For example ``"shared"``, ``"process"``, ``"rpc"``, ``"ray"`` or ``"none"``.
            options: For the scheme's constructor.

        Raises:
            ConfigError: There is none with that name, or only one of the newer generation (a
                ``ValueError``).
        """
        wanted = aio.scheme_class(backend)
        for scheme in _SCHEMES:
            if scheme._async_class is wanted:
                return scheme(**options)
        raise ConfigError(
            f"Unsupported weight-sync backend {backend!r}: it is newer than aiosync.legacy; use "
            f"aiosync.sync.WeightSyncScheme.from_backend({backend!r})"
        )

    # -- roles ---------------------------------------------------------------------------------

    def init_on_sender(  # type: ignore[misc]  # the facade's takes no old-style context
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Make this object the sender. Sends nothing and does not wait for workers.

        Args:
            model_id: Name of the model, the same on both sides; ``"policy"`` by default.
            context: Owner of the model, kept as a weak reference. May offer ``pipes``,
                ``num_workers``, ``get_model(model_id)`` and ``get_cached_weights(model_id)``.
            kwargs: Instead of a context, or before it: ``pipes``, two-way connections to the
                workers by index, owned from now on; ``num_workers``; ``model``; ``weights``;
                ``cached_weights``, for sends without any other source. Without pipes these are
                the arguments of :meth:`aiosync.sync.WeightSyncScheme.init_on_sender`.

        Raises:
            ConfigError: The arguments exclude each other, or a pipe is not two-way; or
                :class:`MultiProcessWeightSyncScheme` was given neither pipes nor any other
                argument that says who the workers are or what they get (a ``ValueError``).
            LocalProtocolError: This object is a sender already (a ``RuntimeError``).
            TypeError: An argument is unknown.
        """
        self._after_fork()
        pipes = kwargs.pop("pipes", None)
        if pipes is None:
            pipes = _of_old_context(context, "pipes")
        cached = kwargs.pop("cached_weights", None)
        if pipes is not None:
            self._init_sender(model_id, context, pipes, **kwargs)
        else:
            given = any(value is not None for name, value in kwargs.items() if name != "ctx")
            if self._needs_pipes and context is None and not given:
                raise ConfigError("pipes must be provided via context or kwargs")
            super().init_on_sender(model_id, context, **kwargs)
        self._cached = cached

    def _init_sender(
        self,
        model_id: str | None,
        context: Any,
        ends: Sequence[Any],
        *,
        num_workers: int | None = None,
        model: Any = None,
        weights: Any = None,
    ) -> None:
        """Become a sender over transports, one for each of ``ends``."""
        if self.initialized_on_sender:
            raise LocalProtocolError("init_on_sender(): this object is already a sender")
        if num_workers is None:
            num_workers = getattr(context, "num_workers", None)
        if num_workers is not None and num_workers != len(ends):
            raise ConfigError(f"num_workers is {num_workers}, but there are {len(ends)} pipes")
        if self.require != "all" or self.wire_dtype is not None or self.first_version != 1:
            raise ConfigError(
                "require=, wire_dtype= and first_version= are of schemes without pipes"
            )
        self.model_id = model_id or self.model_id or "policy"
        sender = self.create_sender()
        try:
            for idx, end in enumerate(ends):
                sender.use(idx, self._transport_for(end))
        except BaseException:  # goes on to the caller
            sender.close()
            raise
        self.context, self._sender = context, sender
        sources_of(self._scheme).replace(weights if model is None else model)

    def _transport_for(self, end: Any) -> Any:
        """What a role has of one end. The worker of a pipe may come at any time."""
        transport = self._make_transport(end)
        if isinstance(transport, facade.InitialSyncTransport):
            return Backend(transport, self.model_id or "policy")
        if isinstance(transport, MPTransport):
            transport.timeout = self.timeout
            transport.link.patient = True
            transport.link.greet()
        return transport

    def _make_transport(self, end: Any) -> Any:
        return self.create_transport(end)

    def init_on_worker(  # type: ignore[misc]  # the facade's takes no old-style context
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Make this object a receiver. Waits for nobody.

        Args:
            model_id: Name of the model, as the sender calls it.
            context: Owner of the model, kept as a weak reference. May offer ``pipe`` and
                ``get_model(model_id)``.
            kwargs: Instead of a context, or before it: ``pipe``, the two-way connection to the
                trainer, owned from now on; ``model``, a module or a dotted name in the context.
                Without a pipe these are the arguments of
                :meth:`aiosync.sync.WeightSyncScheme.init_on_receiver`.

        Raises:
            ConfigError: The arguments exclude each other, or the pipe is not two-way; or
                :class:`MultiProcessWeightSyncScheme` was given no pipe, context or transport (a
                ``ValueError``).
            LocalProtocolError: This object is a receiver already (a ``RuntimeError``).
            TypeError: An argument is unknown.
        """
        self._after_fork()
        pipe = kwargs.pop("pipe", None)
        if pipe is None:
            pipe = _of_old_context(context, "pipe")
        if pipe is not None:
            self._init_receiver(model_id, context, pipe, **kwargs)
            return
        if self._needs_pipes and context is None and kwargs.get("transport") is None:
            raise ConfigError("pipe must be provided via context or kwargs")
        super().init_on_receiver(model_id, context, **kwargs)

    def init_on_receiver(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # as well
        """As :meth:`init_on_worker` with a ``pipe``; else that of :mod:`aiosync.sync`."""
        own = kwargs.get("pipe") is not None
        (self.init_on_worker if own else super().init_on_receiver)(*args, **kwargs)

    def _init_receiver(
        self,
        model_id: str | None,
        context: Any,
        pipe: Any,
        *,
        model: Any = None,
        weights: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        if self.initialized_on_receiver:
            raise LocalProtocolError("init_on_worker(): this object is already a receiver")
        self.model_id = model_id or self.model_id or "policy"
        if worker_idx is not None:
            self.worker_idx = worker_idx
        receiver = self.create_receiver()
        receiver.register_model(model if model is not None else weights)
        receiver.context = context
        receiver.use(self._transport_for(pipe), follows=self._follows)
        self._receiver = receiver

    @property
    def _follows(self) -> bool:
        """Whether a worker's model changes without a call of the program."""
        return False

    def get_sender(self) -> WeightSender:
        """The sender of this object, always the same.

        Raises:
            LocalProtocolError: Before :meth:`init_on_sender` (a ``RuntimeError``).
        """
        self._after_fork()
        if self._sender is None and self.initialized_on_sender:
            self._sender = self.create_sender()
        if self._sender is None:
            raise LocalProtocolError(
                f"Must call init_on_sender() before get_sender() on {type(self).__name__}"
            )
        return self._sender

    def get_receiver(self) -> WeightReceiver:
        """The receiver of this object, always the same.

        Raises:
            LocalProtocolError: Before :meth:`init_on_worker` (a ``RuntimeError``).
        """
        self._after_fork()
        if self._receiver is None and self.initialized_on_receiver:
            self._receiver = self.create_receiver()
        if self._receiver is None:
            raise LocalProtocolError(
                f"Must call init_on_worker() before get_receiver() on {type(self).__name__}"
            )
        return self._receiver

    def create_sender(self) -> WeightSender:
        """A sender for this scheme; :meth:`get_sender` is what programs want."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A receiver for this scheme; :meth:`get_receiver` is what programs want."""
        return WeightReceiver(self)

    def create_transport(  # type: ignore[misc]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> Any:
        """A transport of this generation for one worker; see :class:`TransportBackend`.

        Raises:
            NotImplementedError: This class has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no transport")

    @property
    def _side(self) -> Any:
        """The sender or receiver of a scheme with transports; ``None`` where it has links."""
        core = self._scheme
        links = core.initialized_on_sender or core.initialized_on_receiver
        return None if links else self._sender or self._receiver

    def connect(self, **kwargs: Any) -> None:  # type: ignore[misc]  # pipes need no connect()
        """As :meth:`aiosync.sync.WeightSyncScheme.connect`; not needed with pipes.

        Transports that are an :class:`aiosync.sync.InitialSyncTransport` meet the other side here.
        """
        side = self._side
        if side is None:
            super().connect(**kwargs)
        else:
            side.meet()

    def send(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]  # pipes have no report
        """As :meth:`aiosync.sync.WeightSyncScheme.send`; with pipes as the sender's."""
        side = self._side
        return super().send(*args, **kwargs) if side is None else side.send(*args, **kwargs)

    def receive(self, timeout: float | None = None) -> Any:  # type: ignore[misc]  # as well
        """As :meth:`aiosync.sync.WeightSyncScheme.receive`; with pipes as the receiver's."""
        side = self._side
        return super().receive(timeout) if side is None else side.receive(timeout)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this object is a sender."""
        return self._sender is not None or super().initialized_on_sender

    @property  # type: ignore[misc]  # final, but for pipes
    def initialized_on_receiver(self) -> bool:
        """Whether this object is a receiver."""
        return self._receiver is not None or self._scheme.initialized_on_receiver

    # -- weights -------------------------------------------------------------------------------

    def prepare_weights(  # type: ignore[misc]  # the facade's knows no cached weights
        self, weights: Any, model_id: str | None = None, strategy: Any = None, context: Any = None
    ) -> Any:
        """Resolve and extract weights as ``send()`` does, without sending them.

        Args:
            weights: ``None`` for the model of this scheme, else that of the context, else cached
                weights; a dotted name in the context; a module, a TensorDict or a state dict.
            model_id: Model to look up when ``weights`` is ``None``; this scheme's by default.
            strategy: A :class:`WeightStrategy`, or its name; this scheme's by default.
            context: Where names are looked up; this scheme's by default.

        Returns:
            Weights on the memory of the source, or ``None`` when there are none.

        Raises:
            ConfigError: A name was given, and there is no context (a ``ValueError``).
        """
        context = self.context if context is None else context
        strategy = get_strategy(strategy) if isinstance(strategy, str) else strategy
        found = super().prepare_weights(weights, model_id, strategy, context)
        if found is None and hasattr(context, "get_cached_weights"):
            found = context.get_cached_weights(model_id or self.model_id or "policy")
        return self._cached if found is None else found

    def register_sent(self, weights: Any) -> None:
        """A sender is about to send these."""

    # -- closing -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close every link, task, socket and buffer of this object. Idempotent, bounded."""
        self._after_fork()
        try:
            self._close_roles(at_once=False)
        finally:
            super().shutdown()

    def abort(self) -> None:
        """Close at once from synchronous code, for destructors and signal handlers."""
        self._close_roles(at_once=True)
        super().abort()

    def _close_roles(self, *, at_once: bool) -> None:
        for role in filter(None, (self._sender, self._receiver)):
            role.close(at_once=at_once)


class MultiProcessWeightSyncScheme(WeightSyncScheme, facade.MultiProcessWeightSyncScheme):
    """Sends weights to worker processes through the pipes that it is given.

    A worker's model changes in ``receive()`` and nowhere else; see
    :class:`aiosync.legacy.WeightSyncScheme` for the rest.
    """

    _async_class: ClassVar[AsyncClass] = aio.MultiProcessWeightSyncScheme
    _needs_pipes = True

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> MPTransport:
        """A blocking link over one end of a two-way pipe, which it owns from now on."""
        return MPTransport(pipe_or_context)


class SharedMemWeightSyncScheme(WeightSyncScheme, facade.SharedMemWeightSyncScheme):
    """Sends weights to worker processes, whose models follow.

    Workers see updates without doing anything, between two forward passes of their model; with
    ``apply="manual"`` in ``receive()``.
    Every ``send()`` takes a snapshot, and what arrives is in memory of the worker's own. Tensors
    that the program registered get what is sent, in place; no worker has them from aiosync.

    Attributes:
        policy_weights: What is registered: what the program did, and copies of what was sent.
        auto_register: As it was given; may be changed.

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

    _async_class: ClassVar[AsyncClass] = aio.SharedMemWeightSyncScheme

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | None = None,
        strategy: StrategyName = "tensordict",
        auto_register: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(strategy, **options)
        self.auto_register: bool = auto_register
        self.policy_weights: dict[str, TensorDictBase] = {}
        self._first: dict[str, TensorDictBase] = {}  # of what the program registered
        for model_id, weights in (policy_weights or {}).items():
            self._register(model_id, weights)

    def _register(self, model_id: str, weights: Any) -> None:
        self.create_transport(None).register_weights(model_id, weights)
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
        self._offer_first()

    def _offer_first(self) -> None:
        first = self._first.get(self.model_id or "policy")
        if self._sender is not None and first is not None:
            self._sender.offer(first)

    def init_on_sender(  # type: ignore[misc]  # the facade's has no **kwargs
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """See :meth:`aiosync.legacy.WeightSyncScheme.init_on_sender`.

        ``cached_weights``, or ``get_cached_weights(model_id)`` of a context with pipes, are the
        first values of the model, unless it is registered already.
        """
        super().init_on_sender(model_id, context, **kwargs)
        name, cached = self.model_id or "policy", self._cached
        if cached is None and self._sender is not None and hasattr(context, "get_cached_weights"):
            cached = context.get_cached_weights(name)
        if cached is not None and name not in self.policy_weights:
            self._register(name, nested(WeightStrategy().extract_weights(cached)))
        self._offer_first()

    def register_sent(self, weights: Any) -> None:
        """See :class:`SharedMemTransport`; each worker's own weights are not registered."""
        name = self.model_id or "policy"
        if weights is None or is_per_worker(weights):
            return
        if name in self._first or name not in self.policy_weights:
            self.create_transport(None).update_registered(name, weights)

    def _make_transport(self, end: Any) -> Any:
        return MPTransport(end)  # which answers when the model has the weights

    @property
    def _follows(self) -> bool:
        return self.apply == "auto"

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> SharedMemTransport:
        """A blocking link over one end of a two-way pipe, which it owns from now on.

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
        # Copies again: multiprocessing shares the memory of tensors that it pickles.
        own = {
            name: {model_id: each.detach().clone() for model_id, each in weights.items()}
            for name, weights in (("_first", self._first), ("policy_weights", self.policy_weights))
        }
        return {**super().__getstate__(), **own, "auto_register": self.auto_register}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._first, self.policy_weights = state["_first"], state["policy_weights"]
        self.auto_register = state["auto_register"]


class _NoTransport:
    """A transport of this generation that does nothing."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send nothing."""

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send nothing."""

    def receive_weights(self, timeout: float | None = 1.0) -> None:
        """Return ``None`` at once."""

    def check_connection(self) -> bool:
        """Return True."""
        return True


class NoWeightSyncScheme(WeightSyncScheme, facade.NoWeightSyncScheme):
    """A scheme that does nothing: pipes that it is given stay as they are."""

    _async_class: ClassVar[AsyncClass] = aio.NoWeightSyncScheme

    def init_on_sender(  # type: ignore[misc]  # the facade's has no **kwargs
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """See :meth:`aiosync.legacy.WeightSyncScheme.init_on_sender`.

        Keywords that it does not know are ignored: they are meant for schemes that do something.
        """
        pipes = kwargs.get("pipes") or _of_old_context(context, "pipes") or ()
        known = {name: kwargs.get(name) for name in ("model", "num_workers", "weights")}
        known["num_workers"] = known["num_workers"] or len(pipes) or None
        facade.NoWeightSyncScheme.init_on_sender(self, model_id, **known)
        self.context = context

    def init_on_worker(  # type: ignore[misc]  # the facade's takes no old-style context
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """See :meth:`aiosync.legacy.WeightSyncScheme.init_on_worker`."""
        kwargs.pop("pipe", None)
        facade.NoWeightSyncScheme.init_on_receiver(self, model_id, **kwargs)
        self.context = context

    def create_sender(self) -> WeightSender:
        """A sender for this scheme; :meth:`get_sender` is what programs want."""
        sender = WeightSender(self)
        for idx in range(sources_of(self._scheme).num_workers or 1):
            sender.use(idx, _NoTransport())
        return sender

    def create_receiver(self) -> WeightReceiver:
        """A receiver for this scheme; :meth:`get_receiver` is what programs want."""
        receiver = WeightReceiver(self)
        receiver.use(_NoTransport(), follows=False)
        return receiver

    def create_transport(  # type: ignore[misc, override]  # a blocking one in this generation
        self, pipe_or_context: Any
    ) -> _NoTransport:
        """A transport that does nothing."""
        del pipe_or_context
        return _NoTransport()


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
        return DistributedTransport(*pipe_or_context, self.sync)


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
        names = () if _is_of_torchrl(context) else self._handle_names
        given = [kwargs.pop(name, None) for name in names]
        given += [getattr(context, name, None) for name in names]
        handles = next((each for each in given if each is not None), None)
        if (source := kwargs.pop("source_model", None)) is not None:
            kwargs["model"] = source
        if handles is None:
            super().init_on_sender(model_id, context, **kwargs)
        else:
            kwargs["num_workers"] = kwargs.pop("num_collectors", None)
            self._init_sender(model_id, context, list(handles), **kwargs)

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


_SCHEMES: list[type[WeightSyncScheme]] = [  # what from_backend() makes
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    DistributedWeightSyncScheme,
    RayWeightSyncScheme,
    RayModuleTransformScheme,
]
