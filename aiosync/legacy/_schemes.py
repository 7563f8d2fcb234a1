"""The schemes of the older generation: the blocking schemes, used through senders and receivers.

Each is a subclass of the scheme of the same name in :mod:`aiosync.sync`, whose methods
it also has. Must not import torch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import aiosync.schemes as aio
from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.legacy._attachment import Attachment
from aiosync.legacy._links import PipeLinks
from aiosync.legacy._pipes import of_old_context, take_socket, take_sockets
from aiosync.legacy._receiver import WeightReceiver
from aiosync.legacy._running import Running
from aiosync.legacy._sender import WeightSender
from aiosync.rendezvous.handshake import ANY_STRATEGY
from aiosync.schemes.sources import resolve_model, resolve_path
from aiosync.strategy import get_strategy
from aiosync.sync._schemes import AsyncClass

__all__ = ["WeightSyncScheme"]

StrategyName = Literal["tensordict", "state_dict"]


class WeightSyncScheme(Running):
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
        strategy: ``"state_dict"`` or ``"tensordict"``: which leaves of a module travel. The
            other side may have the other one.
        options: Keyword arguments of :class:`aiosync.sync.WeightSyncScheme`.

    Raises:
        ConfigError: An option has an illegal value (a ``ValueError``).
    """

    _async_class: ClassVar[AsyncClass] = aio.NoWeightSyncScheme
    _needs_pipes = False  # with the names of this generation
    _pipe_apply: Literal["auto", "manual"] = "auto"

    def __init__(self, strategy: StrategyName = "state_dict", **options: Any) -> None:
        super().__init__(strategy, **options)
        # A send of this generation ends when the weights are in the model, whoever looks at it.
        self._scheme._promises = False
        self._apply_given = "apply" in options

    @property  # type: ignore[override]  # a string in this generation
    def strategy(self) -> StrategyName:
        """Name of the strategy."""
        return self._scheme.strategy.extract_as

    @strategy.setter
    def strategy(self, value: Any) -> None:
        self._scheme.strategy = get_strategy(getattr(value, "extract_as", value))

    @property
    def strategy_str(self) -> str:
        """The same, under the name that the newer generation has for it."""
        return self.strategy

    @strategy_str.setter
    def strategy_str(self, value: str) -> None:
        self.strategy = value

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
            pipes = of_old_context(context, "pipes")
        cached = kwargs.pop("cached_weights", None)
        if pipes is None:
            given = any(value is not None for name, value in kwargs.items() if name != "ctx")
            if self._needs_pipes and context is None and not given:
                raise ConfigError("pipes must be provided via context or kwargs")
            super().init_on_sender(model_id, context, **kwargs)
        elif self._has_other_role("sender"):
            self._twin = copy.copy(self)
            self._twin.init_on_sender(
                model_id, context, pipes=pipes, cached_weights=cached, **kwargs
            )
            return
        elif self._makes_links:
            self._init_pipes(model_id, context, list(pipes), **kwargs)
        else:
            self._init_transports(model_id, context, list(pipes), **kwargs)
        self._cached = cached

    def _has_other_role(self, role: str) -> bool:
        scheme = self._scheme
        if self._twin is not None or scheme._role in (None, role):
            return False
        return not (scheme._inherited or scheme._closed)

    def _init_pipes(
        self,
        model_id: str | None,
        context: Any,
        pipes: Sequence[Any],
        *,
        num_workers: int | None = None,
        model: Any = None,
        weights: Any = None,
    ) -> None:
        if num_workers is None:
            num_workers = getattr(context, "num_workers", None)
        if num_workers is not None and num_workers != len(pipes):
            raise ConfigError(f"num_workers is {num_workers}, but there are {len(pipes)} pipes")
        super().init_on_sender(model_id, model=model, weights=weights, transports={})
        self._scheme._sources.num_workers = None  # nobody is waited for
        try:
            self.context = context
            self._links = PipeLinks(self._scheme, take_sockets(pipes))
        except BaseException:  # goes on to the caller
            self._scheme._role = None
            raise

    def _init_transports(
        self,
        model_id: str | None,
        context: Any,
        ends: Sequence[Any],
        *,
        model: Any = None,
        weights: Any = None,
    ) -> None:
        """Become a sender over transports of this generation, one for each of ``ends``."""
        scheme = self._scheme
        scheme._check_role("init_on_sender")
        scheme._model_id = model_id or scheme._model_id or "policy"
        scheme._model = model
        scheme._sources.weights = weights
        self.context = context
        sender = self.create_sender()
        for idx, end in enumerate(ends):
            sender._register_worker(idx, end)
        scheme._role, self._sender = "sender", sender

    def init_on_worker(  # type: ignore[misc]  # the facade's takes no old-style context
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Make this object a receiver. Begins to attach in the background and waits for nobody.

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
            pipe = of_old_context(context, "pipe")
        if pipe is None:
            if self._needs_pipes and context is None and kwargs.get("transport") is None:
                raise ConfigError("pipe must be provided via context or kwargs")
            super().init_on_receiver(model_id, context, **kwargs)
            self._take_any_strategy()
            self._pipeless = True
        elif self._has_other_role("receiver"):
            self._twin = copy.copy(self)
            self._twin.init_on_worker(model_id, context, pipe=pipe, **kwargs)
        else:
            self._init_pipe(model_id, context, pipe, **kwargs)

    def _take_any_strategy(self) -> None:
        # In this generation the two sides need not have the same: what comes is recognised.
        self._scheme.strategy_str = ANY_STRATEGY

    def _init_pipe(
        self,
        model_id: str | None,
        context: Any,
        pipe: Any,
        *,
        model: Any = None,
        weights: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        target = model if model is not None else weights
        if self._makes_links:
            if not self._apply_given:
                self._scheme.apply = self._pipe_apply
            self._scheme._check_guard(None if isinstance(target, str) else target)
            pipe = take_socket(pipe)
        super().init_on_receiver(
            model_id, worker_idx=worker_idx, pipe=pipe if self._makes_links else None
        )
        self._take_any_strategy()
        self._receiver = receiver = self.create_receiver()
        receiver.register_model(target)
        receiver.context = context
        if not self._makes_links:
            receiver._register_worker_transport(pipe)
            return
        model, context_ref = None, None
        if self._scheme.apply == "auto":
            if isinstance(target, str):
                model = receiver.model
            else:
                model, context_ref = target, receiver._context_ref
        self._attachment = Attachment(self._scheme, pipe, model=model, context_ref=context_ref)
        self._call(self._attachment.start())

    def get_sender(self) -> WeightSender:
        """The sender of this object, always the same.

        Raises:
            LocalProtocolError: Before :meth:`init_on_sender` (a ``RuntimeError``).
        """
        self._after_fork()
        if self._sender is None and self.initialized_on_sender:
            self._sender = self.create_sender()
        if self._sender is None and self._twin is not None:
            return self._twin.get_sender()
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
        if self._receiver is None and self._twin is not None:
            return self._twin.get_receiver()
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

    # -- weights -------------------------------------------------------------------------------

    def prepare_weights(  # type: ignore[misc]  # the facade's extracts what is not a model, too
        self, weights: Any, model_id: str | None = None, strategy: Any = None, context: Any = None
    ) -> Any:
        """Resolve and extract weights as ``send()`` does, without sending them.

        Args:
            weights: ``None`` for the model of the context, else that of this scheme; a module;
                a dotted name in the context; anything else is returned as it is.
            model_id: Model to look up when ``weights`` is ``None``; this scheme's by default.
            strategy: A :class:`WeightStrategy`, or its name; this scheme's by default.
            context: Where names are looked up; this scheme's by default.

        Returns:
            Weights on the memory of the source, or ``None`` when there are none.

        Raises:
            ConfigError: A name was given, and there is no context (a ``ValueError``).
        """
        if strategy is None or isinstance(strategy, str):
            strategy = get_strategy(strategy or self.strategy)
        if context is None:
            context = self.context
        source = weights
        if weights is None:
            source = self._find_source(model_id or self.model_id or "policy", context)
        elif isinstance(weights, str):
            if context is None:
                raise ConfigError(f"Cannot resolve string reference {weights!r} without context")
            source = resolve_path(context, weights)
        if hasattr(source, "state_dict") and hasattr(source, "parameters"):
            return strategy.extract_weights(source)
        return source

    def _find_source(self, model_id: str, context: Any) -> Any:
        found = self._scheme._sources.weights
        if found is None:
            found = self._scheme._model
        if found is None and context is not None:
            try:
                found = resolve_model(context, model_id)
            except AttributeError:
                found = getattr(context, "_fallback_policy", None)
        if found is None and hasattr(context, "get_cached_weights"):
            found = context.get_cached_weights(model_id)
        return self._cached if found is None else found


_SCHEMES: list[type[WeightSyncScheme]] = []  # what from_backend() makes
