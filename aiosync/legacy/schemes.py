"""The schemes of the older generation: factories of transports, used by senders and receivers.

Each stands on a scheme of :mod:`aiosync.sync`, ``_scheme``. With transports it only takes the
weights, the model and the options from there; without any it passes the calls on to that scheme,
which makes links of the newer generation. Must not import torch.
"""

from __future__ import annotations

import copy
import inspect
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

import aiosync.schemes as aio
from aiosync import sync as facade
from aiosync._repr import in_every_state
from aiosync.errors import AiosyncError, ConfigError, LocalProtocolError
from aiosync.legacy.aliases import alias, register_workers
from aiosync.legacy.background import receive_in_background
from aiosync.legacy.ends import WeightReceiver, WeightSender
from aiosync.legacy.transports import (
    Answered,
    Backend,
    MPTransport,
    is_backend,
)
from aiosync.schemes.internal import life_of
from aiosync.schemes.lifecycle import check_connect_call
from aiosync.schemes.options import SchemeOptions
from aiosync.schemes.results import weights_to_apply
from aiosync.spans import LastRead
from aiosync.strategy import WeightStrategy, get_strategy
from aiosync.sync._schemes import Ready, core_of, twin_of
from aiosync.sync.twins import attribute, direct, follow_overrides, mirror_options

if TYPE_CHECKING:
    from aiosync.schemes.sources import Given

__all__ = ["StrategyName", "WeightSyncScheme", "given_by", "is_of_torchrl"]

StrategyName = Literal["tensordict", "state_dict"]

_WITHOUT_PIPES = {
    "sync": True,
    "require": "all",
    "per_worker_weights": False,
    "wire_dtype": None,
    "first_version": 1,
}
"""Options that only links of the newer generation have, and their defaults."""

_OF_THIS_PROCESS = (
    "_background_thread",
    "_cached",
    "_pid",
    "_receiver",
    "_sender",
    "_stop_event",
)
"""Attributes of a scheme that its copies do not have."""

_JOIN_SECONDS = 5.0  # time for the background thread to end what it does

_adapters: dict[type[facade.WeightSyncScheme], type[WeightSyncScheme]] = {}
"""The schemes of this generation, by the class of the scheme that each stands on."""

_SENDS_OR_RECEIVES = ("send_weights", "send_weights_async", "receive_weights")


def given_by(name: str, kwargs: dict[str, Any], context: Any) -> Any:
    """Take an argument out of ``kwargs``; without it return the attribute of an old-style context.

    ``None`` if there is neither.
    """
    # TorchRL's present collectors have such attributes, too, but with another meaning. A
    # RayCollector passes its actors to every scheme: they stay in kwargs, for the scheme below.
    of_torchrl = is_of_torchrl(context)
    value = None if of_torchrl and name == "remote_collectors" else kwargs.pop(name, None)
    return getattr(context, name, None) if value is None and not of_torchrl else value


def is_of_torchrl(context: Any) -> bool:
    """Return True if the class of a context is TorchRL's, or is derived from such a class."""
    return any(cls.__module__.partition(".")[0] == "torchrl" for cls in type(context).__mro__)


class _Unlinked(facade.WeightSyncScheme):
    """Blocking scheme without links, for schemes that have only transports of the user's."""

    _async_class = aio.NoWeightSyncScheme


class _ForReceiver(attribute[Any]):
    """The model, the weights or the context; a receiver with a transport gets a new one, too."""

    def __set__(self, scheme: Any, value: Any) -> None:
        # In a forked child the value is for the new life.
        scheme._after_fork()
        super().__set__(scheme, value)
        scheme._assign_to_receiver(self.name, value)


class WeightSyncScheme(SchemeOptions):
    """Base class of the older generation's schemes, which keep one model's weights the same.

    The trainer calls :meth:`init_on_sender` and uses :meth:`get_sender`; a worker calls
    :meth:`init_on_worker` and uses :meth:`get_receiver`. These calls never wait for the other side.
    The calls of the newer generation (``init_on_receiver()``, ``connect()``, ``send()``) work, too,
    as long as no pipes are given.

    A trainer's program should not end before its workers have the weights that it sent, or the
    workers see ``PeerClosed``: ``send()`` and ``wait_async()`` wait for all attached workers.

    This class itself has no link. To use one of your own, override :meth:`create_transport`; see
    :class:`TransportBackend`.

    Args:
        strategy: ``"state_dict"`` or ``"tensordict"``: the leaves of a module that are sent. Over
            pipes the other side may have the other strategy. By default ``"state_dict"``; but
            ``"tensordict"``, as in TorchRL's present generation, for a class without links of
            aiosync that overrides one of that generation's hooks, ``_init_on_..._impl()``.
        options: Keyword arguments of :class:`aiosync.sync.WeightSyncScheme`.

    Raises:
        ConfigError: An option has an illegal value (a ``ValueError``).
    """

    _stands_on: ClassVar[type[facade.WeightSyncScheme]] = _Unlinked
    _ends: ClassVar[Sequence[str]] = ("pipes",)  # arguments with items for create_transport()
    _renamed: ClassVar[Mapping[str, str]] = {}  # other names of arguments
    _shared_transport: Any = None
    _follows = False  # True if a worker's model may change without a call of the program

    def __init_subclass__(cls, stands_on: type[facade.WeightSyncScheme] | None = None) -> None:
        """Let objects stand on schemes of ``stands_on``, and count as instances of that class."""
        super().__init_subclass__()
        mirror_options(cls)
        if stands_on is not None:
            cls._stands_on, _adapters[stands_on] = stands_on, cls
            stands_on.register(cls)
            follow_overrides(cls, WeightSyncScheme, stands_on)

    def __init__(self, strategy: StrategyName | None = None, **options: Any) -> None:
        if strategy is None:
            strategy = "tensordict" if self._has_newer_hooks() else "state_dict"
        self._adopt(self._stands_on(strategy=strategy, **options))

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """Make this generation's scheme for a back-end name, such as ``"shared"`` or ``"none"``.

        Raises:
            ConfigError: This generation has no scheme with that name.
        """
        found = _adapters.get(twin_of(aio.scheme_class(backend)))
        if found is None:
            raise ConfigError(
                f"aiosync.legacy has no scheme for {backend!r}: aiosync.sync.WeightSyncScheme has"
            )
        return found(**options)

    @classmethod
    def _has_newer_hooks(cls) -> bool:
        """Return True for a user's class that was written for TorchRL's present generation."""
        names, base = ("_init_on_sender_impl", "_init_on_receiver_impl"), WeightSyncScheme
        overrides = any(getattr(cls, name) is not getattr(base, name) for name in names)
        return cls._stands_on is _Unlinked and overrides

    def _adopt(self, scheme: facade.WeightSyncScheme) -> None:
        """Stand on a scheme from now on, without a role."""
        self._scheme = scheme
        self._pid = os.getpid()
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        # Users' hooks look at these two, which have TorchRL's names.
        self._background_thread: threading.Thread | None = None
        self._stop_event: threading.Event | None = None
        self._cached: Any = None

    def _after_fork(self) -> None:
        # The transports belong to the parent, and so do the model and the context of its role.
        if self._pid != os.getpid():
            self._adopt(copy.copy(self._scheme) if self._roles else self._scheme)

    @property
    def _given(self) -> Given:
        """Arguments of ``init_on_*()`` and assigned values, which the scheme below keeps."""
        return life_of(core_of(self._scheme)).given

    @property
    def strategy(self) -> StrategyName:
        """Name of the strategy."""
        return self._strategy.extract_as

    @strategy.setter
    def strategy(self, value: Any) -> None:
        self._strategy = get_strategy(value)

    strategy_str = strategy

    # -- members of the scheme that this one stands on -------------------------------------------

    _strategy: attribute[WeightStrategy] = attribute(facade.WeightSyncScheme.strategy)
    model_id: attribute[str | None] = attribute(facade.WeightSyncScheme.model_id)
    worker_idx: attribute[int | None] = attribute(facade.WeightSyncScheme.worker_idx)
    context: _ForReceiver = _ForReceiver(facade.WeightSyncScheme.context)
    model: _ForReceiver = _ForReceiver(facade.WeightSyncScheme.model)
    weights: _ForReceiver = _ForReceiver(facade.WeightSyncScheme.weights)
    version: Final = attribute[int](facade.WeightSyncScheme.version)
    epoch: Final = attribute[int](facade.WeightSyncScheme.epoch)
    lag: Final = attribute[int](facade.WeightSyncScheme.lag)
    staged_version: Final = attribute[int](facade.WeightSyncScheme.staged_version)
    worker_versions: Final = attribute[dict[int, int]](facade.WeightSyncScheme.worker_versions)
    link_lost: Final = attribute[AiosyncError | None](facade.WeightSyncScheme.link_lost)
    last_read: Final = attribute[LastRead | None](facade.WeightSyncScheme.last_read)
    ready: Final = attribute[Ready](facade.WeightSyncScheme.ready)

    send_async: Final = direct(facade.WeightSyncScheme.send_async)
    wait_async: Final = direct(facade.WeightSyncScheme.wait_async)
    pull: Final = direct(facade.WeightSyncScheme.pull)
    wait_for_version: Final = direct(facade.WeightSyncScheme.wait_for_version)
    wait_staged: Final = direct(facade.WeightSyncScheme.wait_staged)
    wait_lag_below: Final = direct(facade.WeightSyncScheme.wait_lag_below)
    apply_pending: Final = direct(facade.WeightSyncScheme.apply_pending)
    reading: Final = direct(facade.WeightSyncScheme.reading)
    guarded: Final = direct(facade.WeightSyncScheme.guarded)
    span: Final = direct(facade.WeightSyncScheme.span)
    staleness: Final = direct(facade.WeightSyncScheme.staleness)
    stats: Final = direct(facade.WeightSyncScheme.stats)
    add_observer: Final = direct(facade.WeightSyncScheme.add_observer)
    remove_observer: Final = direct(facade.WeightSyncScheme.remove_observer)

    # Type checkers refuse the mistakes that these methods explain.
    if not TYPE_CHECKING:
        __aenter__ = facade.WeightSyncScheme.__aenter__
        __aexit__ = facade.WeightSyncScheme.__aexit__

    # -- roles ---------------------------------------------------------------------------------

    def init_on_sender(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Make this object the sender. Sends nothing and does not wait for workers.

        Args:
            model_id: Name of the model, the same on both sides; ``"policy"`` by default.
            context: Owner of the model, kept as a weak reference. May offer ``pipes``,
                ``num_workers``, ``get_model(model_id)`` and ``get_cached_weights(model_id)``.
            kwargs: Values that replace those of the context: ``pipes``, two-way connections to the
                workers by index, owned from now on; ``num_workers``; ``model``; ``weights``;
                ``cached_weights``, for sends without any other source. Without pipes these are
                the arguments of :meth:`aiosync.sync.WeightSyncScheme.init_on_sender`.

        Raises:
            ConfigError: The arguments exclude each other, or a pipe is not two-way (a
                ``ValueError``).
            LocalProtocolError: This object is a sender already (a ``RuntimeError``).
            TypeError: An argument is unknown.
        """
        self._after_fork()
        if self._sender is not None:
            raise LocalProtocolError("init_on_sender(): this object is already a sender")
        named = {"model_id": model_id, "context": context}
        given = {name: value for name, value in named.items() if value is not None}
        try:
            self._init_on_sender_impl(**given, **kwargs)
        except BaseException:  # raised again: the caller sees it
            sender, self._sender = self._sender, None
            if sender is not None:
                sender.close()
            raise
        # Without pipes the scheme below is the sender. A user's scheme may add its workers later.
        if not self.initialized_on_sender:
            self._sender = self.create_sender()
        # A transport for all workers has the place of worker 0's.
        if self._sender is not None and self._shared_transport is not None:
            self._sender.use(0, self._adapted(self._shared_transport))

    def _init_on_sender_impl(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Make the sender, for :meth:`init_on_sender`; a user's scheme may override it."""
        given = [given_by(name, kwargs, context) for name in self._ends]
        ends = next((each for each in given if each is not None), None)
        cached = kwargs.pop("cached_weights", None)
        kwargs = {self._renamed.get(name, name): value for name, value in kwargs.items()}
        if ends is None:
            self._check_has_links("pipes=", "_init_on_sender_impl", "_register_worker_sender")
            self._scheme.init_on_sender(model_id, context, **kwargs)
        else:
            self._init_sender(model_id, context, list(ends), **kwargs)
        self._cached = cached

    def _check_has_links(self, ends: str, impl: str, register: str) -> None:
        """Raise if this scheme, which was given no ends, has no links of its own either.

        The arguments are the names in the error's text.

        Raises:
            ConfigError: This is a user's own scheme without links (a ``ValueError``).
        """
        if self._stands_on is _Unlinked:
            raise ConfigError(
                f"{type(self).__name__} has no link to send weights over: pass {ends}, for each of "
                f"which create_transport() makes a transport, or write {impl}(), which calls "
                f"self.{register}()"
            )

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
        if num_workers is None:
            num_workers = getattr(context, "num_workers", None)
        self._check_pipes(ends, num_workers)
        self.model_id = model_id or self.model_id or "policy"
        self._sender = self.create_sender()
        for idx, end in enumerate(ends):
            self._sender.register_worker(idx, end)
        self.context = context
        self._given.sources.replace(weights if model is None else model)

    def _check_pipes(self, ends: Sequence[Any], num_workers: int | None) -> None:
        """Raise unless there is a pipe for each worker, and every option goes with pipes."""
        if num_workers not in (None, len(ends)):
            raise ConfigError(f"num_workers is {num_workers}, but there are {len(ends)} pipes")
        if any(getattr(self, name) != usual for name, usual in _WITHOUT_PIPES.items()):
            raise ConfigError(f"{'=, '.join(_WITHOUT_PIPES)}= are of schemes without pipes")

    def make_transport(self, end: Any) -> Any:
        """Make a transport over one pipe or to one actor, as senders and receivers use it."""
        return self._adapted(self._transport_of(end))

    def _transport_of(self, end: Any) -> Any:
        """Call create_transport() with an end; raise if it does not take one alone."""
        try:
            inspect.signature(self.create_transport).bind(end)
        except TypeError as exc:
            raise ConfigError(
                f"{type(self).__name__}.create_transport() does not take an end of a link as its "
                "only argument: write _init_on_sender_impl() and _init_on_receiver_impl(), which "
                "call self._register_worker_sender(worker_idx=..., **arguments) and "
                "self._register_transport_receiver(**arguments)"
            ) from exc
        return self.create_transport(end)

    def _adapted(self, transport: Any) -> Any:
        """Prepare a transport for senders and receivers; wrap it if it has TorchRL's interface."""
        if not any(hasattr(transport, name) for name in _SENDS_OR_RECEIVES):
            raise ConfigError(
                f"a {type(transport).__name__} of {type(self).__name__} has neither send_weights() "
                "nor receive_weights(): see aiosync.legacy.TransportBackend"
            )
        if is_backend(transport):
            return Backend(transport, self.model_id or "policy", get_strategy(self.strategy))
        if isinstance(transport, Answered):
            transport.timeout = self.timeout
        if isinstance(transport, MPTransport):
            # The other side may attach much later, and then needs only the newest weights.
            transport.end.patient = True
            transport.greet()
        return transport

    def _register_worker_sender(
        self, *, worker_idx: int, transport: Any = None, **transport_kwargs: Any
    ) -> None:
        """Add a worker to the sender; users' own schemes call it, at any time.

        Args:
            worker_idx: Index of the worker; nothing happens if it is registered.
            transport: The transport; ``None`` for one that ``create_transport()`` makes.
            transport_kwargs: Arguments of ``create_transport()``.
        """
        if self._sender is None:
            self._sender = self.create_sender()
        if worker_idx not in self._sender.transports:
            made = self.create_transport(**transport_kwargs) if transport is None else transport
            self._sender.use(worker_idx, self._adapted(made))

    def _register_transport_receiver(self, transport: Any = None, **transport_kwargs: Any) -> None:
        """Receive over a transport; users' own schemes call it.

        Args:
            transport: The transport; ``None`` for one that ``create_transport()`` makes.
            transport_kwargs: Arguments of ``create_transport()``.
        """
        made = self.create_transport(**transport_kwargs) if transport is None else transport
        self._receive_as_given().use(self._adapted(made), follows=False)

    def _iterate_transports(self, worker_ids: int | Sequence[int] | None = None) -> Iterator[Any]:
        """Return the transports to these workers, or to all; users' own schemes call it.

        Raises:
            ConfigError: A worker was not registered (a ``ValueError``).
        """
        sender = self.get_sender()
        return (sender.transports[idx] for idx in sender.chosen(worker_ids))

    def _receive_as_given(self) -> WeightReceiver:
        """Return the receiver; if there is none, make it for the assigned model and context."""
        if self._receiver is None:
            given, receiver = self._given, self.create_receiver()
            receiver.register_model(self._assigned_target())
            receiver.context, self._receiver = given.context, receiver
        return self._receiver

    def init_on_worker(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Make this object a receiver. Does not wait for the trainer.

        Args:
            model_id: Name of the model, as the sender calls it.
            context: Owner of the model, kept as a weak reference. May offer ``pipe`` and
                ``get_model(model_id)``.
            kwargs: Values that replace those of the context: ``pipe``, the two-way connection to
                the trainer, owned from now on; ``model``, a module or a dotted name in the context.
                Without a pipe these are the arguments of
                :meth:`aiosync.sync.WeightSyncScheme.init_on_receiver`.

        Raises:
            ConfigError: The arguments exclude each other, or the pipe is not two-way (a
                ``ValueError``).
            LocalProtocolError: This object is a receiver already (a ``RuntimeError``).
            TypeError: An argument is unknown.
        """
        pipe = given_by("pipe", kwargs, context)
        if pipe is not None:
            kwargs["pipe"] = pipe
        self.init_on_receiver(model_id, context, **kwargs)

    def init_on_receiver(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Receive like :meth:`init_on_worker` with a ``pipe``, or like :mod:`aiosync.sync`."""
        self._after_fork()
        if self._receiver is not None:
            raise LocalProtocolError("init_on_worker(): this object is already a receiver")
        try:
            self._init_on_receiver_impl(model_id=model_id, context=context, **kwargs)
        except BaseException:  # raised again: the caller sees it
            receiver, self._receiver = self._receiver, None
            if receiver is not None:
                receiver.close()
            raise
        if self._shared_transport is not None:
            self._receive_as_given().use(self._adapted(self._shared_transport), follows=False)
        elif not self.initialized_on_receiver:
            self._receive_as_given()

    def _init_on_receiver_impl(
        self, model_id: str | None, context: Any = None, *, pipe: Any = None, **kwargs: Any
    ) -> None:
        """Make the receiver, for :meth:`init_on_receiver`; a user's scheme may override it."""
        if pipe is None:
            self._check_has_links("pipe=", "_init_on_receiver_impl", "_register_transport_receiver")
            self._scheme.init_on_receiver(model_id, context, **kwargs)
        else:
            self._init_receiver(model_id, context, pipe, **kwargs)

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
        """Become a receiver over the transport of ``pipe``."""
        self.model_id = model_id or self.model_id or "policy"
        if worker_idx is not None:
            self.worker_idx = worker_idx
        self._receiver = receiver = self.create_receiver()
        receiver.register_model(model if model is not None else weights)
        receiver.context = context
        receiver.use(self.make_transport(pipe), follows=self._follows and self.apply == "auto")

    def get_sender(self) -> WeightSender:
        """Return the sender of this object, always the same one.

        Raises:
            LocalProtocolError: :meth:`init_on_sender` was not called, or got no pipes and no
                actors, so that the scheme itself sends. It is a ``RuntimeError``, too.
        """
        self._after_fork()
        if self._sender is None:
            raise LocalProtocolError(
                f"Must call init_on_sender() before get_sender() on {type(self).__name__}, with "
                "pipes= or actors; without any, call send() of the scheme"
            )
        return self._sender

    def get_receiver(self) -> WeightReceiver:
        """Return the receiver of this object, always the same one.

        Raises:
            LocalProtocolError: :meth:`init_on_worker` was not called, or got no pipe, so that the
                scheme itself receives. It is a ``RuntimeError``, too.
        """
        self._after_fork()
        if self._receiver is None:
            raise LocalProtocolError(
                f"Must call init_on_worker() before get_receiver() on {type(self).__name__}, with "
                "pipe=; without one, call receive() of the scheme"
            )
        return self._receiver

    def create_sender(self) -> WeightSender:
        """Make a sender for this scheme; programs call :meth:`get_sender` instead."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """Make a receiver for this scheme; programs call :meth:`get_receiver` instead."""
        return WeightReceiver(self)

    def create_transport(self, pipe_or_context: Any) -> Any:
        """Make a transport of this generation for one worker; see :class:`TransportBackend`.

        Raises:
            NotImplementedError: This class has no transport.
        """
        raise NotImplementedError(f"{type(self).__name__} has no transport")

    @property
    def _roles(self) -> list[Any]:
        """Sender and receiver of this object, as far as it has transports for them."""
        return [role for role in (self._sender, self._receiver) if role is not None]

    def connect(self, *, worker_idx: int | None = None, weights: Any = None, **kwargs: Any) -> None:
        """Connect, like :meth:`aiosync.sync.WeightSyncScheme.connect`; not needed with pipes.

        Transports with a method of :class:`aiosync.sync.InitialSyncTransport` meet the other side.

        Raises:
            LocalProtocolError: Called twice, or with an argument of the other side (a
                ``RuntimeError``).
            ConfigError: A sender with transports is given initial weights (a ``ValueError``).
        """
        links = self._scheme.initialized_on_sender or self._scheme.initialized_on_receiver
        if links or not self._roles:
            self._scheme.connect(worker_idx=worker_idx, weights=weights, **kwargs)
            return
        self._after_fork()
        for role in self._roles:
            self._connect_role(role, worker_idx, weights)

    def _connect_role(self, role: Any, worker_idx: int | None, weights: Any) -> None:
        """Connect the sender or the receiver of this object over its transports."""
        side = "sender" if role is self._sender else "receiver"
        check_connect_call(side, role.connected, worker_idx, weights)
        role.connected = True  # set first, because the next call may send or receive
        try:
            if side == "sender":
                self._setup_connection_and_weights_on_sender_impl(weights=weights)
            else:
                self._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx)
        except BaseException:  # raised again: the caller sees it
            role.connected = False
            raise

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        """Connect a sender with transports, for :meth:`connect`; users' schemes may override it."""
        if weights is not None:
            raise ConfigError(
                f"connect(weights=...) needs a scheme without transports, and {type(self).__name__}"
                " has some: call send(weights) after connect()"
            )
        self.get_sender().meet(worker_idx)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        """Connect a receiver with a transport, for :meth:`connect`; may be overridden, too."""
        self.get_receiver().meet(worker_idx)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        """Send like :meth:`aiosync.sync.WeightSyncScheme.send`, or with pipes like the sender."""
        role: Any = self._sender
        return (self._scheme if role is None else role).send(*args, **kwargs)

    def receive(self, timeout: float | None = None) -> aio.AppliedUpdate | None:
        """Receive like :meth:`aiosync.sync.WeightSyncScheme.receive`.

        Over a transport ``epoch`` is 0, and ``version`` counts the updates that were received.
        """
        role = None if self._scheme.initialized_on_receiver else self._receiver
        if role is None:
            return self._scheme.receive(timeout)
        if not role.receive(timeout):
            return None
        return aio.AppliedUpdate(0, role.version, self.model_id or "policy", self._read_weights)

    def _read_weights(self) -> Any:
        """Return the weights of a receiver with a transport, for an update that it received."""
        return get_strategy(self.strategy).extract_weights(self.get_receiver().model)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights like :meth:`aiosync.sync.WeightSyncScheme.apply_weights`.

        Over a transport the call also answers the trainer, if there is something to apply.
        """
        role = None if self._scheme.initialized_on_receiver else self._receiver
        if role is None:
            self._scheme.apply_weights(weights, inplace)
        elif (given := weights_to_apply(weights, self._read_weights)) is not None:
            role.apply_weights(given, inplace)

    def _start_background_receiver(self) -> None:
        """Start a thread that receives at each instruction of ``_wait_for_instruction()``."""
        self._stop_event = threading.Event()  # set first, because the thread's hook looks at it
        name = f"WeightReceiver-{self.worker_idx}"
        loop = self._background_receive_loop
        thread = threading.Thread(target=loop, name=name, daemon=True)
        thread.start()
        self._background_thread = thread

    def _background_receive_loop(self) -> None:
        """Receive until the scheme ends, in the background; a user's scheme may override it."""
        assert self._stop_event is not None
        receive_in_background(self, self._stop_event)

    def _assign_to_receiver(self, name: str, value: Any) -> None:
        """Pass an assigned value on to the receiver, unless this object is a sender, too."""
        if self._receiver is not None and self._sender is None:
            self._receiver.assign(name, value if name == "context" else self._assigned_target())

    def _assigned_target(self) -> Any:
        """Return the assigned model, or else the weights: beside a model they are a buffer."""
        given = self._given
        return given.weights if given.model is None else given.model

    @property
    def initialized_on_sender(self) -> bool:
        """True if this object is a sender."""
        return self._sender is not None or self._scheme.initialized_on_sender

    @property
    def initialized_on_receiver(self) -> bool:
        """True if this object is a receiver."""
        return self._receiver is not None or self._scheme.initialized_on_receiver

    @property
    def synchronized_on_sender(self) -> bool:
        """True if ``connect()`` succeeded on this sender. May be assigned with transports."""
        own = self._sender
        return self._scheme.synchronized_on_sender if own is None else own.connected

    @synchronized_on_sender.setter
    def synchronized_on_sender(self, value: bool) -> None:
        self.get_sender().connected = value

    @property
    def synchronized_on_receiver(self) -> bool:
        """True if ``connect()`` succeeded on this receiver. May be assigned with a transport."""
        found = self._scheme.synchronized_on_receiver
        return found or (self._receiver is not None and self._receiver.connected)

    @synchronized_on_receiver.setter
    def synchronized_on_receiver(self, value: bool) -> None:
        self.get_receiver().connected = value

    @property
    def sender_transports(self) -> dict[int, Any]:
        """Transport of each worker, by index; without any, the links of aiosync."""
        own = self._sender
        return self._scheme.sender_transports if own is None else own.transports

    @property
    def receiver_transport(self) -> Any:
        """Transport of this worker; without one, the link of aiosync."""
        own = None if self._receiver is None else self._receiver.transports.get(0)
        return self._scheme.receiver_transport if own is None else own

    # Names of TorchRL's, which hooks of users' schemes read and assign.
    _model_id: Any = alias("model_id", model_id.fset)
    _worker_idx = worker_idx
    _initialized_on_sender: Any = alias("initialized_on_sender")
    _initialized_on_receiver: Any = alias("initialized_on_receiver")
    _sender_transports: Any = alias("sender_transports", register_workers)
    _receiver_transport: Any = alias("receiver_transport", _register_transport_receiver)

    @property
    def shared_transport(self) -> Any:
        """A user's own transport for all workers, on either side, or ``None``.

        Assign it before :meth:`init_on_sender` or :meth:`init_on_receiver` end.
        """
        return self._shared_transport

    @shared_transport.setter
    def shared_transport(self, value: Any) -> None:
        self._shared_transport = value

    # -- weights -------------------------------------------------------------------------------

    def prepare_weights(
        self, weights: Any, model_id: str | None = None, strategy: Any = None, context: Any = None
    ) -> Any:
        """Resolve and extract weights as ``send()`` does, without sending them.

        Args:
            weights: ``None`` for the model of this scheme, or else of the context, or else cached
                weights; a dotted name in the context; a module, a TensorDict or a state dict.
            model_id: Model to look up when ``weights`` is ``None``; this scheme's by default.
            strategy: A :class:`WeightStrategy`, or its name; this scheme's by default.
            context: Context in which names are looked up; this scheme's by default.

        Returns:
            Weights as views of the source's memory, or ``None`` if there are none.

        Raises:
            ConfigError: A name was given, and there is no context (a ``ValueError``).
        """
        context = self.context if context is None else context
        strategy = get_strategy(strategy) if isinstance(strategy, str) else strategy
        found = self._scheme.prepare_weights(weights, model_id, strategy, context)
        return self._cached_of(context, model_id) if found is None else found

    def _cached_of(self, context: Any, model_id: str | None = None) -> Any:
        """Return cached weights: the context's, or else ``cached_weights``; ``None`` for none."""
        cached = None
        if hasattr(context, "get_cached_weights"):
            cached = context.get_cached_weights(model_id or self.model_id or "policy")
        return self._cached if cached is None else cached

    def register_sent(self, weights: Any) -> None:
        """Do nothing; the sender calls it with the weights before each send."""

    # -- closing -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()  # without a warning about connect(), which pipes do not need

    def shutdown(self) -> None:
        """Close every link, task, socket and buffer of this object. Idempotent, bounded."""
        self._after_fork()
        try:
            if self._stop_event is not None:
                self._stop_event.set()
            thread = self._background_thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
            for role in self._roles:
                role.close()
        finally:
            self._scheme.shutdown()

    def abort(self) -> None:
        """Close at once from synchronous code, for destructors and signal handlers."""
        if self._stop_event is not None:
            self._stop_event.set()
        for role in self._roles:
            role.close(at_once=True)
        self._scheme.abort()

    # -- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in _OF_THIS_PROCESS}
        # The state of the scheme below stands for that scheme: it holds a copy already, and a copy
        # of the scheme would be copied once more when it is pickled.
        below = self._scheme.__getstate__()
        if self._receiver is not None:
            # The index is that of this worker.
            below["_scheme"].worker_idx = None
        return {**own, "_scheme": below}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        scheme = object.__new__(self._stands_on)
        scheme.__setstate__(state["_scheme"])
        self._adopt(scheme)

    @in_every_state
    def __repr__(self) -> str:
        return repr(self._scheme)


mirror_options(WeightSyncScheme)
facade.WeightSyncScheme.register(WeightSyncScheme)
