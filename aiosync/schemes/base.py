"""The scheme: what a user configures, pickles into workers, and calls.

A scheme is plain configuration until ``init_on_sender()`` or ``init_on_receiver()`` gives it a
role; ``connect()`` makes the runtime (:class:`WeightSender` or :class:`WeightReceiver`), which
never travels in a pickle. May import everything below ``schemes``.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import multiprocessing
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeAlias, TypeVar

from torch import nn

from aiosync._log import Waiting, log
from aiosync._meter import Meter
from aiosync._tasks import current_task, run_on_loop, running_loop
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectTimeout,
    LocalProtocolError,
    PartialSyncError,
    RecvTimeout,
    RemoteProtocolError,
    TransportClosed,
)
from aiosync.events import Observer, SyncStats
from aiosync.protocol import as_count, as_index, as_indices, validate_timeout
from aiosync.receiver.guard import Guard, why_unguarded
from aiosync.receiver.hooks import Relay, SchemeHooks, in_thread, run_hook
from aiosync.receiver.reading import Guarded, Methods, Reading
from aiosync.receiver.receiver import WeightReceiver
from aiosync.receiver.transform import Transform
from aiosync.rendezvous.dialer import Backoff, KeptLink, Left
from aiosync.rendezvous.handshake import Refused, greet
from aiosync.rendezvous.listener import AnyListener
from aiosync.rendezvous.same_host import new_address
from aiosync.schemes.handles import AppliedUpdate, Ready, SendHandle
from aiosync.schemes.options import SchemeOptions, refuse
from aiosync.schemes.sources import (
    DeviceMap,
    NoWeakReference,
    Sources,
    as_model_id,
    is_per_worker,
    resolve_model,
    resolve_sources,
)
from aiosync.sender import How, Streaming, WeightSender
from aiosync.sender.snapshots import SnapshotCopier
from aiosync.spans import VersionSpan, epoch_text, staleness
from aiosync.strategy import WeightStrategy, get_strategy
from aiosync.tensors import Dtypes, Prepared, check_dtypes
from aiosync.tensors.apply import Loader, LoadTarget
from aiosync.tensors.match import Strict
from aiosync.transports.base import Transport
from aiosync.transports.shared_memory import Arena
from aiosync.types import Limits, Require, SendReport
from aiosync.wire import Hello, Welcome

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["WeightSyncScheme"]

Runtime: TypeAlias = WeightSender | WeightReceiver

_P = ParamSpec("_P")
_T = TypeVar("_T")


class WeightSyncScheme(SchemeOptions, abc.ABC):
    """Keeps the weights of one model the same in a trainer and its workers.

    One object is a sender (in the trainer) or a receiver (in a worker), never both; pickle it,
    or ``copy.copy`` it, to get the other side. One scheme per model; several may run side by
    side. Not thread-safe: use it on the loop that called :meth:`connect`. Any thread may use
    :meth:`reading`, :meth:`apply_pending`, :attr:`version` and :attr:`lag`, and assign a
    receiver's ``model``, ``context`` and ``weights``.

    Args:
        strategy: Which leaves of a module travel: ``"tensordict"`` (parameters and all
            buffers) or ``"state_dict"`` (what ``state_dict()`` has). The same on both sides.
        sync: Kept for TorchRL's signature: ``send()`` always waits for the workers, and
            ``send_nowait()`` never does.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"`` applies each update as soon as no forward pass is running;
            ``"manual"`` only in :meth:`apply_pending`, and while a call waits for an update:
            :meth:`receive`, :meth:`wait_for_version`, :meth:`pull`, and :meth:`connect` for the
            initial weights.
        apply_copy: Copy updates into the parameters' memory instead of pointing the parameters
            at the received memory. Slower, but addresses stay the same.
        guard: ``"forward"`` keeps updates out of forward passes of the model by hooks;
            ``"reading"`` leaves it to ``with scheme.reading():``.
        strict: Every name and dtype must match, and a module's extra state be there; otherwise the
            declared subset is applied and floating dtypes are cast. Buffers that are not persistent
            may be missing, or be rounded, in any case. A subset never replaces, on its way to a
            slow worker, an update that holds other names: it comes after it, or together with it. A
            worker that joins later gets the newest of each name. Neither has what the trainer never
            had.
        require: How many workers must apply an update for ``send()`` to succeed: ``"all"``,
            a number, or a fraction of them. With less than ``"all"``, ``send()`` returns as
            soon as that many have. Like ``timeout`` it may be assigned between two sends; the
            other options count as they are when ``connect()`` is called. An option that is
            assigned is checked as here.
        timeout: Seconds that ``connect()`` and ``send()`` wait unless the call says otherwise;
            ``None`` waits for ever. The start of a collector's workers counts as ``connect()``; for
            a long start and short sends see ``docs/topics/cancellation.md``.
        wire_dtype: A floating-point dtype to which the sender casts the weights on their way, or
            one for each name pattern; see ``docs/topics/mapping.md``. Only the sender needs it.
            A single dtype does not round buffers that are not persistent.
        first_version: What a sender counts from. A trainer that resumes from a checkpoint passes
            the :attr:`version` that it saved there plus one: samples that were made up to then
            stay comparable. Only the sender needs it.

    Raises:
        ConfigError: An option has an illegal value.
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] | WeightStrategy = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        apply: Literal["auto", "manual"] = "auto",
        apply_copy: bool = False,
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        wire_dtype: Dtypes | None = None,
        first_version: int = 1,
    ) -> None:
        self.strategy = strategy
        self.sync = sync
        self.per_worker_weights = per_worker_weights
        self.apply = apply
        self.apply_copy = apply_copy
        self.guard = guard
        self.strict = strict
        self.require = require
        self.timeout = timeout
        self.wire_dtype = wire_dtype
        self.first_version = first_version
        self._address = new_address()
        self._model_id: str | None = None
        self._sender_pid: int | None = None
        self._carried_hooks = SchemeHooks()
        configured = set(vars(self))
        self._reset()
        self._not_pickled = frozenset(vars(self)) - configured

    # Whether workers may take what they were named in a forward, and say nothing.
    _promises: bool = True
    _strictly: Strict = True  # what strict=True asks for
    _cascades = True  # whether a context is asked to pass versions on

    def _reset(self) -> None:
        """Begin with no role. What this sets is in no pickle; all else that an object has, is."""
        self._role: Literal["sender", "receiver"] | None = None
        self._connected = False
        self._closed = False
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[Any] | None = None  # the one inside connect()
        self._worker_idx: int | None = None
        self._context_ref: weakref.ref[Any] | None = None
        self._model: Any = None
        self._weights: Any = None
        self._loader: LoadTarget | None = None
        self._transform: Transform | None = None
        self._sources = Sources()
        self._listeners: list[AnyListener] = []
        self._links: dict[int, Transport] = {}
        self._pipe: Any = None
        self._to_close: weakref.WeakSet[Any] = weakref.WeakSet()  # what has abort() and aclose()
        self._guard_object = Guard()
        self._meter = Meter()
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._trainer: KeptLink[Transport, Welcome] | None = None
        self._session = secrets.token_bytes(16)
        self._idx_chosen = False  # by the trainer, and not by the user
        self._hooks = SchemeHooks()
        self._methods: Sequence[str] = ()

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """The scheme of a back-end name, such as ``"shared"``, ``"process"`` or ``"none"``.

        Args:
            backend: The name.
            **options: For the scheme's constructor.

        Raises:
            ConfigError: There is none with that name.
        """
        from aiosync.schemes.registry import scheme_from_backend  # which imports this module

        return scheme_from_backend(backend, **options)

    # -- pickling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        mine = vars(self).items()
        state = {name: value for name, value in mine if name not in self._not_pickled}
        state["_sender_pid"] = self._pid if self._role == "sender" else self._sender_pid
        return state

    def _bind_early(self) -> None:
        """Have copies made before ``init_on_sender()`` know where the sender will be."""

    def _separate(self) -> None:
        """Have this copy meet only copies that are made of it from now on."""
        self._address = new_address()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self._connected else "not connected"
        role = self._role or "no role yet"
        return f"<{type(self).__name__} for {self._model_id or 'no model'}: {role}, {state}>"

    # -- what subclasses decide ----------------------------------------------------------------

    @abc.abstractmethod
    def create_transport(self, pipe_or_context: Any) -> Transport:
        """A link over a ``multiprocessing`` connection or a socket. Needs a running loop."""

    def _make_arena(self) -> Arena | None:
        """Shared memory for the sender's snapshots; ``None`` where links carry bytes."""
        return None

    def _planning_limits(self) -> Limits | None:
        """Bounds that the receivers are expected to have; ``None`` for the defaults."""
        return None

    # How send() copies large weights, see SnapshotCopier.take().
    _how: How = "copy"
    _gives_up = True  # if a trainer that is not met refuses for good, or a lost link is the end
    _subscribes = True  # gets every update, and not only those it asks for

    def _streaming(self) -> Streaming | None:
        """How payloads travel; ``None`` where links neither damage nor lose them."""
        return None

    def _bind(self, sources: Sources) -> None:
        """Have workers that dial be heard, once the sender connects."""

    def _start_listening(self, sender: WeightSender) -> None:
        """Let workers in from now on. Called on the loop."""

    async def _dial_trainer(self, left: Left, again: bool) -> Transport:
        """One attempt to get a link to the trainer; told if there was one before."""
        name = type(self).__name__
        raise ConfigError(f"{name} dials nobody: pass pipe= or transport= to init_on_receiver()")

    def _nobody(self, within: str) -> str:
        """What an error says while there is no trainer, within a time that it is given."""
        return f"the trainer did not answer{within}"

    def _is_final(self, error: AiosyncError) -> bool:
        """Whether no other attempt to meet the trainer follows after an error."""
        return True

    _longest_pause = 2.0  # between two attempts

    async def _reach(self, left: Left, again: bool) -> Transport:
        if self._pipe is not None:
            return self.create_transport(self._pipe)
        return await self._dial_trainer(left, again)

    async def _greet(self, link: Transport, timeout: float | None) -> Welcome:
        """The handshake on a link."""
        receiver = self._receiver
        epoch, version = (None, 0) if receiver is None else receiver.held
        partial = (None if receiver is None else receiver.updates.partial) or (None, None, 0)
        hello = Hello(
            role="receiver",
            model_id=self._model_id or "policy",
            pid=os.getpid(),
            worker_idx=self._worker_idx,
            strategy=self.strategy_str,
            has_target=self._resolve_target() is not None and self.apply == "auto",
            epoch=epoch if version else None,
            version=version or None,
            session=self._session,
            subscribe=self._subscribes,
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
            slots=link.slots is not None,
        )
        try:
            welcome = await greet(link, hello, timeout=timeout)
        except (ConfigError, Refused) as exc:
            if not self._idx_chosen:
                raise
            self._worker_idx = None  # a new trainer may have given it to another worker
            raise Refused(str(exc)) from exc
        self._idx_chosen = self._idx_chosen or self._worker_idx is None
        self._worker_idx = welcome.worker_idx
        return welcome

    # -- the model -----------------------------------------------------------------------------

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are extracted and applied."""
        return self._strategy

    @strategy.setter
    def strategy(self, value: WeightStrategy | Literal["tensordict", "state_dict"]) -> None:
        self._strategy = get_strategy(value)
        self.strategy_str = self._strategy.extract_as

    @property
    def model_id(self) -> str | None:
        """Name of the model."""
        return self._model_id

    @model_id.setter
    def model_id(self, value: str) -> None:
        if self._connected:
            raise LocalProtocolError("model_id cannot be changed once connected")
        self._model_id = as_model_id(value)

    @property
    def worker_idx(self) -> int | None:
        """Index of this worker; ``None`` on the sender or before the sender chose one."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        if self._role == "sender" and value is not None:
            raise LocalProtocolError("Worker index cannot be set after initialization on sender")
        if self._connected and value != self._worker_idx:
            raise LocalProtocolError(
                "worker_idx cannot be changed once connected: the trainer knows this worker by it"
            )
        self._worker_idx = None if value is None else as_index("worker_idx", value)

    @property
    def context(self) -> Any:
        """Owner of the model, or ``None`` when there is none or it is gone."""
        return None if self._context_ref is None else self._context_ref()

    @context.setter
    def context(self, value: Any) -> None:
        try:
            reference = None if value is None else weakref.ref(value)
        except TypeError as exc:
            raise NoWeakReference(
                f"a context is kept as a weak reference, which a {type(value).__name__} cannot "
                "have: pass the model itself (model=, and num_workers= on the sender)"
            ) from exc
        self._replace("_context_ref", reference)

    def _relay(self) -> Relay | None:
        """What passes versions on: a hook, or the context."""
        hooks = self._hooks
        if self._context_ref is not None and hooks.relay is None and self._cascades:
            if callable(getattr(self.context, "update_policy_weights_", None)):
                hooks = dataclasses.replace(hooks, relay=self._cascade)
        return hooks.after

    async def _cascade(self, epoch: int, version: int) -> None:
        """Have the context pass a version on, as TorchRL's does to the collectors below it."""
        del epoch, version
        update = getattr(self.context, "update_policy_weights_", None)
        if update is None:
            return

        def call() -> Any:
            return update(policy_or_weights=self.weights, model_id=self._model_id)

        if inspect.iscoroutinefunction(update):
            async with self.reading():
                await call()
        else:  # it blocks, perhaps for this very loop
            await in_thread(self.guarded(call))

    @property
    def model(self) -> Any:
        """The model as it is now: as given, or found in the context; ``None`` without one."""
        if self._model is not None:
            return self._model
        context = self.context
        if context is None or self._model_id is None:
            return None
        return resolve_model(context, self._model_id)

    @model.setter
    def model(self, value: Any) -> None:
        self._assign("_model", value)

    def _assign(self, name: str, value: Any) -> None:
        if self._role == "receiver":
            self._check_guard(value)
        elif self._role == "sender":
            self._sources.replace(value)
            self._model = self._weights = None
        self._replace(name, value)

    def _replace(self, name: str, value: Any) -> None:
        """Set what the target is found by, and tell the receiver; all of it or nothing."""
        before, receiver = getattr(self, name), self._receiver
        if receiver is None or self._closed or self._inherited:
            setattr(self, name, value)
            return
        with receiver.applier.assigning():
            setattr(self, name, value)
            try:
                run_on_loop(self._loop, receiver.applier.model_changed)
            except BaseException:  # raised again: the caller sees it
                setattr(self, name, before)
                raise

    @property
    def weights(self) -> Any:
        """The weights as given, or as the strategy extracts them from the model."""
        if self._weights is not None:
            return self._weights
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @weights.setter
    def weights(self, value: Any) -> None:
        self._assign("_weights", value)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this object is a sender."""
        return self._role == "sender" and not self._inherited

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this object is a receiver."""
        return self._role == "receiver" and not self._inherited

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect()`` succeeded on this sender."""
        return self.initialized_on_sender and self._connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect()`` succeeded on this receiver."""
        return self.initialized_on_receiver and self._connected

    def _why_no_model(self) -> str | None:
        """What the context lacks; ``None`` if the model is there, or not looked for in one."""
        if self._context_ref is None or self._resolve_target() is not None:
            return None
        context = self.context
        if context is None:
            return "the context is gone, as only a weak reference is kept"
        return (
            f"the context, a {type(context).__name__}, has no model {self._model_id or 'policy'!r}"
        )

    def _resolve_target(self) -> Any:
        for given in (self._loader, self._weights, self._model):
            if given is not None:
                return given
        try:
            return self.model
        except AttributeError:
            return None  # the context has no such model yet

    # -- versions ------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Sender: newest version drawn. Receiver: version that the model has. 0 before any."""
        runtime = self._runtime
        return 0 if runtime is None else runtime.version

    @property
    def epoch(self) -> int:
        """Which run of a trainer :attr:`version` is of; 0 before any version."""
        if self._sender is not None:
            return self._sender.clock.epoch if self._sender.version else 0
        return 0 if self._receiver is None else self._receiver.inbox.epoch or 0

    @property
    def lag(self) -> int:
        """How far behind: of this receiver, or of the sender's slowest worker; in versions."""
        runtime = self._runtime
        return 0 if runtime is None else runtime.lag

    def stats(self) -> SyncStats:
        """What was done so far, and how it stands. On any thread, also after closing; never waits.

        Raises:
            LocalProtocolError: It is neither a sender nor a receiver yet.
        """
        if self._role is None:
            self._check_has_role()
        if self._runtime is not None:
            return self._runtime.stats()
        self._meter.role, self._meter.model = self._role or "sender", self._model_id or "policy"
        return self._meter.stats()

    def add_observer(self, observer: Observer) -> None:
        """Tell somebody of each send of this trainer, or each version of this worker, from now on.

        On the event loop of this object, soon after it has ended. Copies of it have none.

        Args:
            observer: Has ``on_sync(event)``, which gets a :class:`aiosync.SyncEvent`.

        Raises:
            ConfigError: It has not.
        """
        self._meter.add(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Tell somebody no more. Does nothing where it was never, or is no longer told."""
        self._meter.remove(observer)

    @property
    def _runtime(self) -> Runtime | None:
        return self._receiver if self._sender is None else self._sender

    @property
    def worker_versions(self) -> dict[int, int]:
        """Sender: the version that each connected worker has applied, as far as it is known."""
        links = {} if self._sender is None else self._sender.workers.links
        return {idx: link.applied for idx, link in links.items()}

    @property
    def staged_version(self) -> int:
        """Receiver: version that is complete and waiting to be applied; 0 if there is none."""
        return 0 if self._receiver is None else self._receiver.applier.staged_version

    @property
    def link_lost(self) -> AiosyncError | None:
        """Receiver: why there is no link to the trainer; ``None`` while there is one.

        The scheme may be reconnecting at this moment. Once it has given up, this says so, and
        :meth:`receive` raises it.
        """
        return None if self._receiver is None else self._receiver.lost

    @property
    def sender_transports(self) -> dict[int, Transport]:
        """The link to each connected worker, by index; empty on a receiver.

        For inspection only: the scheme sends and receives on them, on its event loop.
        """
        links = {} if self._sender is None else self._sender.workers.links
        return {idx: link.transport for idx, link in links.items()}

    @property
    def shared_transport(self) -> Transport | None:
        """``None``: each worker has a link of its own. For what was written for TorchRL."""
        return None

    @property
    def receiver_transport(self) -> Transport | None:
        """The link to the trainer, the last one if it was lost; ``None`` where there was none.

        For inspection only: the scheme sends and receives on it, on its event loop.
        """
        return None if self._receiver is None else self._receiver.transport

    # -- roles ---------------------------------------------------------------------------------

    def init_on_sender(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        params_map: Mapping[int, Any] | None = None,
        weights: Any = None,
        model: Any = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: DeviceMap | None = None,
        num_workers: int | None = None,
        pipes: Sequence[Any] | None = None,
        transports: Mapping[int, Transport] | None = None,
        ctx: Any = None,
    ) -> None:
        """Make this object the sender. Local only: it sends nothing and waits for nothing.

        Give the weights as one of: ``model`` or ``weights``; a ``context`` that owns the model;
        ``params_map``; or nothing, and every ``send()`` brings them. Workers may connect from
        now on; they are answered once :meth:`connect` runs.

        Args:
            model_id: Name of the model, the same on both sides; ``"policy"`` by default. With a
                ``context``, also the path to the model in it.
            context: Owner of the model (kept as a weak reference). May offer
                ``get_model(model_id)`` and ``num_workers``.
            params_map: Worker index -> its weights.
            weights: Weights for every worker: TensorDict or state dict, nested or dotted.
            model: Module whose weights every worker gets.
            devices: One device for each worker. Receivers put weights where their model is; the
                list only says how many workers there are.
            device_map_fn: Called with (worker index, weights) for each worker and send.
            num_workers: How many workers ``connect()`` waits for; ``None`` for any number.
            pipes: Connections to the workers, by index, instead of the scheme's own socket.
            transports: Links to the workers, by index, instead of the scheme's own socket. Only
                these workers are expected.
            ctx: Ignored; TorchRL passes its multiprocessing context.

        Raises:
            ConfigError: The arguments exclude each other, or that many workers can never connect.
            LocalProtocolError: This object already has a role.
        """
        del ctx
        self._check_role("init_on_sender")
        name = as_model_id(model_id or self._model_id or "policy")
        sources = resolve_sources(
            context=context,
            model_id=model_id,
            params_map=params_map,
            weights=weights,
            model=model,
            devices=devices,
            device_map_fn=device_map_fn,
            num_workers=num_workers,
            pipes=pipes,
        )
        self.context = context
        if transports is not None:
            self._links = sources.link(transports)
        elif pipes is None:
            self._bind(sources)
        self._model_id, self._sources = name, sources
        self._model, self._weights = model, weights
        self._role = "sender"

    def init_on_receiver(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        worker_idx: int | None = None,
        model: Any = None,
        weights: Any = None,
        load: Loader | None = None,
        transform: Transform | None = None,
        pipe: Any = None,
        transport: Transport | None = None,
        hooks: SchemeHooks | None = None,
        methods: Sequence[str] = (),
    ) -> None:
        """Make this object a receiver. Local only: it sends nothing and waits for nothing.

        Assigning another :attr:`model`, :attr:`context` or :attr:`weights` to a connected
        receiver, also with ``apply="manual"``, guards the new model and gives it the weights of
        :attr:`version` before it returns. The old model keeps its values in memory of its own,
        and loses its hooks. If the weights do not fit, the assignment raises
        :class:`~aiosync.ApplyError`, in whatever thread it is made, and nothing changes. While a
        forward pass runs in another thread, the hooks and the check are made at once, and the
        new model gets the weights when that pass ends. ``model = None`` drops the model, also when
        that pass ends: the version is 0 then, and the next model, which may have other shapes,
        gets the next update.

        Args:
            model_id: Name of the model, as the sender calls it.
            context: Owner of the model (kept as a weak reference). With ``apply="auto"``,
                connecting warns if it has no such model, for which updates then wait. If it has
                ``update_policy_weights_()``, plain or ``async``, that is called with
                ``policy_or_weights=`` and ``model_id=`` for each version that was applied, to
                pass it on to what is below, before the trainer is told; a plain one is called in
                a thread. What it raises refuses the version.
            worker_idx: Index of this worker, from 0, which no other live worker has; ``None``
                lets the sender choose.
            model: Module to keep up to date. May be given later, by setting :attr:`model`.
            weights: TensorDict or dict of tensors to keep up to date, instead of a module.
            load: Function that is called with all names and tensors of each version, instead of
                a module: ``load(weights: Iterable[tuple[str, Tensor]])``. It is called wherever
                updates are applied. The tensors are views of received memory, valid and
                unchanged until it returns: it copies what it keeps, and writes to none. If it
                raises, the update is refused; it must itself undo what it changed.
            transform: Turns the names and tensors of each
                version into those that the model expects: ``transform(weights) ->
                Iterable[tuple[str, Tensor]]``, for example a :class:`aiosync.WeightMap`. It runs in
                a thread while the event loop goes on, and its result is copied. If it raises, the
                update is refused. Values that are not tensors, and what is inside them, are passed
                on unchanged. The trainer hears nothing meanwhile: over streams it must not take
                longer than its ``stall_timeout``.
            pipe: Connection to the sender, instead of the scheme's own socket.
            transport: Link to the sender, instead of the scheme's own socket.
            hooks: What to call on the way of each update; see :class:`aiosync.SchemeHooks`.
            methods: Names of methods of the model, beside its ``forward()``, that compute with the
                weights, such as ``("act", "evaluate")``. An update waits for a call of one of them
                as for a forward pass. See also :meth:`guarded`.

        Raises:
            ConfigError: The arguments exclude each other, or updates could tear: a target
                without forward hooks, such as a scripted module, needs ``guard="reading"``
                or ``apply="manual"``.
            LocalProtocolError: This object already has a role.
        """
        self._check_role("init_on_receiver")
        target = model if model is not None else weights
        refuse(
            (
                model is not None and weights is not None,
                "weights cannot be provided if model is provided",
            ),
            (
                load is not None and target is not None,
                "load cannot be provided if model or weights are provided",
            ),
            (
                transform is not None and not callable(transform),
                f"transform must be callable, got {type(transform).__name__}",
            ),
            (
                pipe is not None and transport is not None,
                "pipe cannot be provided if transport is provided",
            ),
            (
                hooks is not None and not isinstance(hooks, SchemeHooks),
                f"hooks must be aiosync.SchemeHooks(...), got {hooks!r}",
            ),
            (
                isinstance(methods, str) or (methods and self.guard != "forward"),
                "methods must be a list of names, and needs guard='forward'",
            ),
        )
        loader = None if load is None else LoadTarget(load)
        self._methods = tuple(methods)
        self._check_guard(load if target is None else target)
        self._model_id = as_model_id(model_id or self._model_id or "policy")
        self._model, self._weights = model, weights
        self._loader, self._transform = loader, transform
        given = {} if hooks is None else hooks.given()
        self._hooks = dataclasses.replace(self._carried_hooks, **given)
        self.context = context
        self._pipe = transport if transport is not None else pipe
        found = worker_idx if worker_idx is not None else self._worker_idx  # assigned before
        if found is None:
            with contextlib.suppress(RuntimeError):  # a collector that has no index yet
                found = getattr(context, "worker_idx", None)
        self._worker_idx = None if found is None else as_index("worker_idx", found)
        self._role = "receiver"

    init_on_worker = init_on_receiver

    # -- connecting ----------------------------------------------------------------------------

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | None = None,
        processes: Sequence[Any] = (),
        initial: bool = True,
    ) -> None:
        """Meet the other side and bring the workers to the initial weights.

        On the sender: answer workers, send them the initial weights if there are any, and wait
        until all ``num_workers`` have applied them. Workers may also come later. On a receiver:
        reach the sender, apply the initial weights, and receive in the background from then on. A
        weight server that has none is waited for; with a trainer that has none yet this returns
        with version 0, and logger ``aiosync`` says so.

        Args:
            worker_idx: Receiver only: index of this worker.
            weights: Sender only: the initial weights.
            timeout: Seconds for the whole call; ``None`` takes the scheme's ``timeout``,
                ``math.inf`` waits for ever.
            processes: Sender only: the workers' processes, by index (anything with a ``pid``,
                or process ids), so that one that dies before it connects is noticed at once.
            initial: Receiver only: wait for the initial weights, as far as it subscribes. If
                false, they may come later, and so may what they are applied to.

        Raises:
            ConnectTimeout: A peer did not connect in time; the message says which. Or a live worker
                has the index, and kept it until then.
            ConnectError: The other side refused, or has ended.
            ConfigError: The two sides are set up differently, the timeout is not a number, the
                context's model takes no forward hooks, or there is nothing to apply weights to.
            PartialSyncError: Sender: some worker could not apply the initial weights, or died.
                The others are connected.
            ApplyError: Receiver: the initial weights do not fit the model.
            LocalProtocolError: Called twice, or before ``init_on_*``, or in a child that was
                forked after it; or without an asyncio event loop, as under trio.

        Cancellation:
            Breaks the attempt: the scheme is closed.
        """
        self._check_has_role()
        self._check_process()
        if self._loop is not None:
            raise LocalProtocolError(f"Cannot synchronize weights on {self._role} twice.")
        sends = self._role == "sender"
        given = "worker_idx" if sends else "weights"
        if (worker_idx if sends else weights) is not None:
            raise LocalProtocolError(
                f"Cannot specify {given} on {self._role} side during synchronization."
            )
        limit = self._limit(timeout)
        if worker_idx is not None:
            self.worker_idx = worker_idx
        self._loop = running_loop()
        self._connecting = task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        from aiosync.schemes.registry import backend_of  # which imports this module

        model, transport = self._model_id or "policy", backend_of(type(self))
        self._meter.start("sender" if sends else "receiver", model, transport)
        children = multiprocessing.active_children() if sends else []
        try:
            with self._waiting("connect()", limit, lambda: self._awaited(children)):
                if sends:
                    await self._connect_sender(weights, limit, processes)
                else:
                    await self._connect_receiver(limit, initial)
        except BaseException as exc:  # raised again: the caller sees it
            # A sender that reached some of its workers goes on with those.
            survives = isinstance(exc, (ConnectTimeout, PartialSyncError))
            if survives and self._sender is not None and self._sender.workers.links:
                self._connected = not self._closed
                raise
            closed, self._connecting = self._closed, None
            self.abort()
            if self._runtime is not None:  # made after it was closed
                self._runtime.abort()
            if closed and isinstance(exc, asyncio.CancelledError):
                if task.uncancel() > cancelled_before:
                    raise  # the caller cancelled it, too
                # It was aiosync that cancelled it.
                raise TransportClosed("this scheme was closed while it connected") from None
            raise
        finally:
            self._connecting = None
        self._connected = True

    def _awaited(self, children: Sequence[Any]) -> str:
        """What connect() waits for."""
        if self._sender is not None:
            ended = [each for each in children if each.exitcode]
            said = "".join(
                f"; process {each.pid}, which this one had started, ended with exit code "
                f"{each.exitcode}"
                for each in ended
            )
            return self._sender.workers.awaited(self._sender.version) + said
        if self._receiver is not None or self._trainer is None:
            return "the initial weights have not arrived"
        return self._trainer.describe()

    def _log(
        self, phase: str, text: str, version: int | None = None, level: int = logging.INFO
    ) -> None:
        model, worker = self._model_id, self._worker_idx
        log(level, phase, text, model=model, worker=worker, version=version)

    def _waiting(self, call: str, timeout: float | None, what: Callable[[], str]) -> Waiting:
        return Waiting(call, timeout, what, model=self._model_id, worker=self._worker_idx)

    def _have(self) -> str:
        """What there is, where a version is waited for."""
        if self._sender is not None:
            return f"the workers that are connected have versions {self.worker_versions}"
        lost = "" if self.link_lost is None else f", and the link was lost: {self.link_lost}"
        return f"the model has version {self.version}{lost}"

    async def _connect_sender(
        self, weights: Any, timeout: float | None, processes: Sequence[Any]
    ) -> None:
        copier = SnapshotCopier(
            self._make_arena(),
            self._strategy.extract_as,
            check_dtypes(self.wire_dtype, "wire_dtype"),  # a mapping may have been changed since
            self._planning_limits(),
        )
        self._sender = sender = WeightSender(
            model_id=self._model_id or "policy",
            strategy=self.strategy_str,
            num_workers=self._sources.num_workers,
            expected=self._sources.expected,
            require=self.require,
            copier=copier,
            meter=self._meter,
            parts=not self.strict,
            streaming=self._streaming(),
            how=self._how,
            first_version=self.first_version,
        )
        planned = self._plan(weights, initial=True)
        for idx, link in self._links.items():
            sender.workers.welcome(link, idx, given=True)
        for idx, pipe in enumerate(self._sources.pipes or ()):
            sender.workers.welcome(self.create_transport(pipe), idx, given=True)
        self._start_listening(sender)
        await sender.connect(planned, timeout=timeout, processes=processes)

    async def _connect_receiver(self, timeout: float | None, initial: bool) -> None:
        clock = asyncio.get_running_loop().time
        ends = None if timeout is None else clock() + timeout
        model = self._resolve_target()
        if model is None and initial and self._context_ref is None:
            raise ConfigError(
                "this worker has nothing to apply weights to: pass model=, weights=, load= or "
                "context= to init_on_receiver(), or assign scheme.model after "
                "connect(initial=False)"
            )
        if isinstance(model, nn.Module):  # may be the context's
            self._check_guard(model)
        await self._prepare_model(model)

        foreign = set[str]()

        def final(error: AiosyncError) -> bool:
            text = str(error)
            if isinstance(error, RemoteProtocolError) and text not in foreign:
                foreign.add(text)
                self._log("waiting", f"who answers is no trainer: {text}", level=logging.WARNING)
            return self._pipe is not None or self._is_final(error)

        self._trainer = KeptLink(
            "the trainer",
            self._reach,
            self._greet,
            nobody=self._nobody,
            final=final if self._gives_up else None,
            pauses=Backoff(longest=self._longest_pause),
        )
        transport, welcome = await self._trainer.connect(timeout)
        lasting: float | None = getattr(self, "reconnect", 0.0)  # which only streams have
        if not self._gives_up:
            lasting = None
        self._receiver = receiver = WeightReceiver(
            transport,
            resolve=self._resolve_target,
            apply=self.apply,
            copy=self.apply_copy or self._loader is not None,
            strict=self.strict and self._strictly,
            guard=self._guard_object,
            install_hooks=self.guard == "forward",
            methods=self._methods,
            flipped=self._on_flip,
            relay=self._relay,
            before_apply=self._hooks.before_apply,
            transform=self._transform,
            trainer=None if self._pipe is not None or lasting == 0 else self._trainer,
            lasting=lasting,
            promises=self._promises,
            meter=self._meter,
            log=self._log,
        )
        receiver.applier.submit()  # guards the model
        receiver.start()
        # Only a weight server has a note: there will be weights.
        if initial and self._subscribes and (welcome.version or welcome.note):
            late = "the initial weights did not arrive"
            note = f"; {welcome.note}" if welcome.note else ""
            if not welcome.version:
                late = f"the weight server got no version of {self._model_id!r}"
                self._log("waiting", f"the weight server has no version yet{note}")
            left = None if ends is None else max(0.0, ends - clock())
            await receiver.wait_for_first(
                welcome,
                timeout=left,
                late=ConnectTimeout(f"{late} within {timeout or 0:g} s{note}"),
            )
        none_yet = "" if welcome.version or self.version else ", which has no weights yet"
        self._log("joined", f"joined the trainer{none_yet}", self.version)
        lacks = self._why_no_model() if self.apply == "auto" else None
        if lacks is not None:  # a model that comes late, or a name that is wrong
            warnings.warn(
                f"{lacks}: updates wait until there is one, or until scheme.model is set",
                stacklevel=2,
            )

    async def _prepare_model(self, model: Any) -> None:
        if self._hooks.prepare_model is not None:
            await run_hook(self._hooks.prepare_model, model)

    # -- sending -------------------------------------------------------------------------------

    async def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        max_lag: int | None = None,
    ) -> SendReport:
        """Send a snapshot of the weights to the workers, and wait until they have applied it.

        Through shared memory it is enough that what a worker computes next uses it, for those that
        look by themselves. Workers are served at the same time; a slow one does not delay the
        others. A worker that died since the last send is named in one :class:`PartialSyncError`,
        and listed as ``lost`` in the reports of later sends. One that was closed has left: one
        report says so, and it is missed only where ``require`` asks for more than are there.

        Args:
            weights: ``None`` for the registered model; or a module, a TensorDict, a state dict,
                ``{worker_idx: weights}`` (with ``per_worker_weights=True``), or a dotted name
                in the context. Never changed by it. A step of an optimizer waits until they are
                copied; nothing else may write to them until the call returns.
            worker_ids: Only these workers change, and ``require`` asks for no more than these;
                ``None`` for all.
            timeout: Seconds for the whole call; ``None`` takes the scheme's ``timeout``,
                ``math.inf`` waits for ever.
            max_lag: First wait until this version puts no worker more versions than this, at least
                1, behind; see :meth:`wait_lag_below`. With ``timeout=0`` it raises instead. Of
                sends at the same time each looks for itself: await one before the next.

        Returns:
            Which workers have which version.

        Raises:
            PartialSyncError: Fewer workers than ``require`` asks for applied it; ``failed``
                says why for each: ``ApplyError`` with the worker's own words, ``PeerClosed`` or
                ``TransportBroken`` when it died, ``AckTimeout`` when it did not answer. The
                others have the new version.
            ConfigError: A worker is named that never connected, or nobody is named; the weights
                cannot travel, or the timeout is not a number.
            WeightsChanged: Somebody wrote to the weights while they were copied.
            SendTimeout: An optimizer's step in another thread did not end.
            RecvTimeout: Some worker stayed too far behind for ``max_lag``; nothing was sent.
            LocalProtocolError: Not a connected sender.

        Cancellation:
            Class C: the transfer goes on in the background, from the sender's own snapshot; of a
            call that is cancelled before that has been copied, nothing is sent.
        """
        sender: WeightSender = self._require("send", "sender")
        limit = self._limit(timeout)
        if max_lag is not None:
            began = time.perf_counter()
            await self.wait_lag_below(max_lag, timeout=timeout)
            limit = None if limit is None else max(0.0, limit - (time.perf_counter() - began))
        planned = self._plan(weights)
        if weights is None and worker_ids is None:  # mostly
            return await sender.send(planned, None, limit)
        return await sender.send(planned, _named(weights, worker_ids), limit)

    def _send_at_once(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        max_lag: int | None = None,
    ) -> tuple[SendReport | None, Callable[[], None] | None]:
        """What :meth:`send` does where it waits for nobody, on a thread that keeps the loop idle.

        Returns:
            The report, or ``None`` with nothing done if somebody has to be waited for; and what is
            to be called on the loop, if anything is.
        """
        started, sender = time.perf_counter(), self._sender
        if sender is None or not self._connected or self._closed or not sender.is_quiet():
            return None, None
        several = self._sources.device_map or self._sources.per_worker  # a map is asked once a send
        if several or max_lag is not None:
            return None, None
        self._limit(timeout)
        named = None
        if weights is not None or worker_ids is not None:
            named = _named(weights, worker_ids)
        report = sender.publish(self._plan(weights), named, started)
        return report, sender.tell if report is not None and sender.has_to_tell() else None

    def send_nowait(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> SendHandle:
        """Take a snapshot now and send it in the background.

        The copy is made on the calling thread before this returns, so the weights may change
        right after. A worker that is still busy with an older version gets only the newest one;
        the report says which workers skipped this version, and which version overtook it.

        Args:
            weights: As for :meth:`send`.
            worker_ids: As for :meth:`send`.
            timeout: As for :meth:`send`.

        Returns:
            Await it for the report; it raises what :meth:`send` raises. A failure that is
            never awaited is printed by the event loop's exception handler.

        Raises:
            LocalProtocolError: Not a connected sender; or :meth:`connect` is still copying the
                initial weights.
            ConfigError: As for :meth:`send`. What happens in the workers is raised by the handle.
        """
        sender: WeightSender = self._require("send_nowait", "sender")
        limit, planned = self._limit(timeout), self._plan(weights)
        return SendHandle(*sender.send_nowait(planned, _named(weights, worker_ids), limit))

    def _plan(self, weights: Any, *, initial: bool = False) -> dict[int | None, Prepared]:
        """What each worker gets, ready to be copied; under ``None`` what all of them get."""
        assert self._sender is not None
        self._sender.require = self.require  # it may have been assigned since
        maker, sources = self._sender.copier, self._sources
        mapped = sources.per_worker or sources.device_map
        if weights is None and sources.weights is not None and not mapped:  # as nearly always
            return {None: maker.prepare(sources.weights)}
        weights = sources.resolve(weights, self.context, self._model_id or "policy")
        if weights is None and initial:
            return {}
        if weights is None:
            lacks = self._why_no_model()
            why = f" ({lacks})" if lacks else ""
            raise ConfigError(
                f"there is nothing to send{why}: pass weights to send(), or model=, weights= or "
                "context= to init_on_sender()"
            )
        each = sources.plan(weights, self.per_worker_weights, self._strategy)
        return {
            idx: maker.prepare(value, -1 if idx is None else idx) for idx, value in each.items()
        }

    def prepare_weights(
        self,
        weights: Any,
        model_id: str | None = None,
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Resolve and extract weights as :meth:`send` would, without sending them.

        Args:
            weights: As for :meth:`send`.
            model_id: Model to look up when ``weights`` is ``None``; this scheme's by default.
            strategy: Extracts the weights; this scheme's by default.
            context: Where names are looked up; this scheme's by default.

        Returns:
            A TensorDict or a state dict on the memory of the source, or ``None``.
        """
        own = context is None or context is self.context
        own = own and model_id in (None, self._model_id)
        sources = self._sources if own else Sources()
        if weights is None and own:
            weights = self._model if self._weights is None else self._weights
        context = self.context if context is None else context
        weights = sources.resolve(weights, context, model_id or self._model_id or "policy")
        if weights is None or is_per_worker(weights):
            return weights
        return (strategy or self._strategy).extract_weights(weights)

    # -- receiving -----------------------------------------------------------------------------

    async def receive(self, timeout: float | None = None) -> AppliedUpdate | None:
        """Wait for the next update that is applied and was not returned before.

        Updates are applied in the background whether or not this is called. With
        ``apply="manual"`` this applies what is staged, between two forward passes; what it could
        not apply in time stays staged.

        Args:
            timeout: Seconds; ``None`` waits until the trainer goes away, 0 only looks.

        Returns:
            The newest applied update, or ``None`` when the timeout passed without one.

        Raises:
            ApplyError: ``apply="manual"`` and the staged update does not fit the model.
            ConfigError: The timeout is not a number.
            PeerClosed: The trainer went away.
            LocalProtocolError: Not a connected receiver, or it would wait inside a
                :meth:`reading` block or a forward pass of its own, which holds the update back.

        Cancellation:
            Class A.
        """
        receiver: WeightReceiver = self._require("receive", "receiver")
        validate_timeout(timeout)
        if not await receiver.receive(timeout):
            return None
        return AppliedUpdate(
            receiver.inbox.epoch or 0,
            receiver.inbox.version,
            self._model_id or "policy",
            lambda: self.weights,
        )

    async def wait_for_version(self, version: int, *, timeout: float | None = None) -> int:
        """Wait until the model has at least ``version`` (sender: until every subscriber has).

        Where all of a trainer's workers have left, what it sent is waited for by nobody.

        Args:
            version: Version of the current epoch.
            timeout: Seconds; ``None`` takes the scheme's ``timeout``, ``math.inf`` waits for
                ever.

        Returns:
            The version that it has.

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away.
            ApplyError: Receiver: the update was refused by the model.
            PartialSyncError: Sender: a worker refused it, and has nothing newer on its way.
            ConfigError: The timeout is not a number.
            LocalProtocolError: Not connected; or a receiver's update cannot be applied, as this
                is called inside a :meth:`reading` block or a forward pass.

        Cancellation:
            Class A.
        """
        runtime: Runtime = self._require("wait_for_version")
        text = f"version {version} was not applied"
        return await self._wait(
            f"wait_for_version({version})", timeout, text, runtime.wait_for, version
        )

    async def wait_staged(self, version: int = 1, *, timeout: float | None = None) -> int:
        """Wait until ``version`` is complete at the receiver, whether or not it is applied yet.

        With ``apply="manual"`` a worker waits with this for what :meth:`apply_pending` is to
        apply, and a trainer, after :meth:`send_nowait`, for the moment at which all workers
        need no more than to switch.

        An update of some names, with ``strict=False``, that lacks a part of one before it is
        staged only when that one is applied.

        Args:
            version: Version of the current epoch, or a newer one.
            timeout: Seconds; ``None`` takes the scheme's ``timeout``, ``math.inf`` waits for
                ever.

        Returns:
            The newest version that is staged or applied (sender: at every subscriber).

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away.
            ApplyError: Receiver: the update was refused.
            PartialSyncError: Sender: a worker refused ``version``, or died before it had it.
            ConfigError: The timeout is not a number.

        Cancellation:
            Class A.
        """
        runtime: Runtime = self._require("wait_staged")
        staged = functools.partial(runtime.wait_for, staged=True)
        text = f"version {version} was not complete"
        return await self._wait(f"wait_staged({version})", timeout, text, staged, version)

    async def pull(self, *, min_version: int | None = None, timeout: float | None = None) -> int:
        """Ask the trainer for its newest version, and wait until the model has it.

        Args:
            min_version: The lowest acceptable version; the trainer answers once it has
                it. ``None`` takes the current one, if there is any.
            timeout: Seconds; ``None`` takes the scheme's ``timeout``, ``math.inf`` waits for
                ever.

        Returns:
            The version that the model has now; 0 if the trainer has not sent any.

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away.
            ApplyError: The update was refused by the model.
            ConfigError: The timeout is not a number.
            LocalProtocolError: Not a connected receiver; or something newer arrived that cannot
                be applied, because this is called inside a :meth:`reading` block or a forward pass.

        Cancellation:
            Class A; the update may still arrive.
        """
        receiver: WeightReceiver = self._require("pull", "receiver")
        least = 0 if min_version is None else min_version
        text = f"no version from {least} on was applied"
        return await self._wait("pull()", timeout, text, receiver.pull, least)

    async def wait_lag_below(self, limit: int, *, timeout: float | None = None) -> int:
        """Wait until the worker is less than ``limit`` versions behind (sender: until all are).

        Of a trainer's workers those count that subscribe and have something on their way; one that
        refused its newest version is not waited for, and neither is one that has gone. Call it
        before :meth:`send`, which also has ``max_lag=``, or before sampling: no data is older than
        that. :attr:`lag` tells without waiting.

        Args:
            limit: How many versions, at least 1; with 1 it is until nobody is behind.
            timeout: Seconds; ``None`` takes the scheme's ``timeout``, ``math.inf`` waits for
                ever.

        Returns:
            How far it, or the slowest worker, is behind.

        Raises:
            RecvTimeout: Not in time; of a trainer it names the workers.
            PeerClosed: The trainer went away.
            ApplyError: Receiver: the newest version was refused.
            ConfigError: ``limit`` is no number of versions, or the timeout is not a number.
            LocalProtocolError: Not connected; or a receiver's update cannot be applied, as this
                is called inside a :meth:`reading` block or a forward pass.

        Cancellation:
            Class A.
        """
        runtime: Runtime = self._require("wait_lag_below")
        as_count("a lag", limit, 1)
        text = f"the lag did not fall below {limit}"
        return await self._wait(
            f"wait_lag_below({limit})", timeout, text, runtime.wait_lag_below, limit
        )

    async def _wait(
        self,
        call: str,
        timeout: float | None,
        text: str,
        wait: Callable[..., Awaitable[_T]],
        what: object,
    ) -> _T:
        """Wait for something of the sender or receiver; ``text``: what is wrong if it is late."""
        limit, lacks = self._limit(timeout), self._why_no_model()
        began = "" if lacks is None else f"; when this began, {lacks}"
        late = RecvTimeout(f"{text} within {limit or 0:g} s{began}")
        waiting = self._waiting(call, limit, self._have)
        return await wait(what, timeout=limit, late=late, waiting=waiting)

    @property
    def ready(self) -> Ready:
        """The condition that there is a complete version, to look at or to wait for."""
        return Ready(self._is_ready, self._wait_until_ready)

    def _is_ready(self) -> bool:
        return self._runtime is not None and self._runtime.is_ready()

    async def _wait_until_ready(self, timeout: float | None) -> None:
        runtime: Runtime = self._require("ready")
        text = "there was no complete version"
        await self._wait("ready", timeout, text, runtime.wait_until, runtime.is_ready)

    def _on_flip(self, epoch: int, version: int) -> None:
        applied = self._hooks.at_once
        if applied is not None:
            applied(epoch, version)

    def reading(self) -> Reading:
        """Context manager: what is computed inside sees one version of the weights.

        Forward passes of the model itself do not need it. ``with`` in threads and in code without
        awaits, ``async with`` in coroutines that await inside. ``with scheme.reading() as read:``
        gives ``read.version`` inside, and ``read.span`` after the block.
        """
        return Reading(self._guard_object)

    def span(self) -> VersionSpan | None:
        """The versions of what this thread, or this task, has read since it last asked.

        Reads are forward passes, :meth:`reading` blocks and guarded methods of a receiver; one
        inside of another is part of that. They count once they have ended, from the first call in
        any thread on: call it once before. With ``strict=False`` the version is that of the newest
        update, whatever names it held. Memory is bounded: of more than 256 versions that nobody
        asked for, the oldest count as still older ones.

        Returns:
            The span, with the number of reads of each version; ``None`` if there was no read. Its
            ``first`` is 0 where a version was of another run of the trainer than the newest, or
            there was none.
        """
        return self._guard_object.span()

    def staleness(
        self, span: VersionSpan | None, weight: Literal["sample", "token"] = "sample"
    ) -> float | None:
        """How many versions older than this trainer's newest a sample is.

        See :func:`aiosync.staleness`. Spans of another run of the trainer are comparable up to
        ``first_version``, and unknown otherwise.

        Raises:
            LocalProtocolError: Not a sender.
            ConfigError: There is no such weight.
        """
        if self._role != "sender":
            raise LocalProtocolError(
                "staleness() is the trainer's: elsewhere call aiosync.staleness(newest, span)"
            )
        epoch, first_version = epoch_text(self.epoch), self.first_version
        return staleness(self.version, span, weight, epoch=epoch, first_version=first_version)

    def guarded(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """The function, or coroutine function, each call of which sees one version.

        Args:
            function: What computes with the model beside its forward passes. No generator.

        Raises:
            ConfigError: It cannot be called, or is a generator: those need :meth:`reading`.
        """
        return Guarded(self._guard_object, function, getattr(function, "__name__", "function"))

    def apply_pending(self) -> int | None:
        """Apply the staged update now, on this thread. For ``apply="manual"``.

        Returns:
            The version that was applied, or ``None`` when nothing was staged, or there is no
            model yet.

        Raises:
            ApplyError: It does not fit the model, which kept its version.
            LocalProtocolError: Not a connected receiver, or called inside a forward pass.
            SyncTimeout: A forward pass of another thread did not end within 30 seconds; on an
                event loop it is not waited for.
        """
        if self._receiver is None or self._closed:
            self._check_open()
            raise LocalProtocolError("apply_pending() needs a connected receiver")
        return self._receiver.applier.apply_pending()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Put weights into this receiver's model by hand, between two forward passes.

        Args:
            weights: TensorDict or state dict; copied, never aliased.
            inplace: Keep the parameter objects; otherwise replace them.

        Raises:
            ManifestMismatch: They do not fit; nothing was changed.
            LocalProtocolError: Not a receiver, or called inside a forward pass or a
                :meth:`reading` block, which would see two versions.
            ConfigError: There is no model.
            SyncTimeout: Another thread's forward pass did not end within 30 seconds; on an
                event loop it is not waited for.
        """
        self._check_open()
        if self._role != "receiver":
            when = "on a sender side" if self._role else "before init_on_receiver has been called"
            raise LocalProtocolError(f"apply_weights() called {when}.")
        target = self._resolve_target()
        if target is None:
            raise ConfigError("No model registered")

        self._guard_object.refuse_inside_read("apply_weights")

        def apply() -> None:
            self._strategy.apply_weights(target, weights, inplace=inplace)

        advice = "call apply_weights() again, or in a thread"
        self._guard_object.between_reads(apply, advice=advice)

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close every link, task, socket and buffer of this object. Idempotent, bounded.

        A receiver's model keeps its weights, in memory of its own. Workers of a closed sender
        see ``PeerClosed``.

        Raises:
            LocalProtocolError: The scheme's own loop runs in another thread.
        """
        loop = self._loop
        if self._inherited:
            self.abort()  # the tasks are the parent's, and nothing runs them here
        elif loop is None or loop is asyncio.get_running_loop() or not loop.is_running():
            await self._close_here()
        elif not self._closed:
            raise LocalProtocolError(
                "the event loop of this scheme runs in another thread: close it there, with "
                "asyncio.run_coroutine_threadsafe(scheme.aclose(), loop), or call abort()"
            )

    async def _close_here(self) -> None:
        """Close what there is, on its own loop. Also called again, and after :meth:`abort`."""
        opened = (*self._listeners, *self._to_close)
        try:
            if self._begin_to_close() and self._runtime is not None:
                await self._runtime.aclose()
        finally:
            self._abort_rest()
            await asyncio.gather(*(each.aclose() for each in opened))
            self._meter.deliver()

    def abort(self) -> None:
        """Close at once from synchronous code, for destructors and signal handlers."""
        if self._begin_to_close():
            if self._runtime is not None:
                self._runtime.abort()
            self._abort_rest()

    def _begin_to_close(self) -> bool:
        """Let nobody in any more; whether that is news."""
        if self._closed:
            return False
        self._closed = True
        task, self._connecting = self._connecting, None
        if task is not None and not self._inherited and task is not current_task():
            task.cancel()  # a connect() that goes on elsewhere: it raises TransportClosed
        self._close_listeners()
        return True

    def _close_listeners(self) -> None:
        for listener in () if self._inherited else self._listeners:
            listener.close()

    def _abort_rest(self) -> None:
        """End the links that no runtime has taken, and what links share."""
        for link in (*self._links.values(), *self._to_close):
            link.abort()
        if isinstance(self._pipe, Transport):
            self._pipe.abort()
        if self._trainer is not None:
            self._trainer.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None and self._role == "receiver" and self._loop is None and not self._closed:
            warnings.warn(
                "this worker never had the trainer's weights: `async with` does not connect, call "
                "`await scheme.connect()` inside of the block",
                stacklevel=2,
            )
        await self.aclose()

    def __del__(self) -> None:
        """Close what nobody closed, and say so."""
        if getattr(self, "_closed", True) or self._inherited:
            return  # also where an option was refused: there is nothing yet
        if self._runtime is None:
            self._close_listeners()
            return
        try:
            warnings.warn(
                f"{self!r} was never closed: use `async with scheme:` or `await scheme.aclose()`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
        finally:  # the warning may be an error
            self.abort()

    # -- checks --------------------------------------------------------------------------------

    def _limit(self, timeout: float | None) -> float | None:
        if timeout is not None:
            validate_timeout(timeout)
        else:
            timeout = self.timeout
        return None if timeout is None or timeout == float("inf") else timeout

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(
                "this scheme was closed; make a new one, or copy.copy(scheme), to connect again"
            )

    @property
    def _inherited(self) -> bool:
        return self._pid != os.getpid()  # forked: what runs and what is open is the parent's

    def _check_process(self) -> None:
        if self._inherited:
            done = "set up" if self._loop is None else "connected"
            raise LocalProtocolError(
                f"this scheme was {done} before the process forked; call init_on_receiver() and "
                "connect() in the child"
            )

    def _check_role(self, method: str) -> None:
        if self._inherited:
            # The role, the context and the links are not ours.
            if self._role == "sender":
                self._sender_pid = self._pid
            self._reset()
        self._check_open()
        if self._role is not None:
            raise LocalProtocolError(
                f"{method}(): this object is already a {self._role}; pickle it or use "
                "copy.copy(scheme) for the other side"
            )

    def _check_has_role(self) -> None:
        self._check_open()
        if self._role is None:
            raise LocalProtocolError(
                "Neither init_on_sender nor init_on_receiver have been called. Call "
                "init_on_sender() in the trainer and init_on_receiver() in a worker first"
            )

    def _require(self, method: str, role: str | None = None) -> Any:
        """What sends or receives, if it is connected, here, in that role or in any.

        Raises:
            LocalProtocolError: It is not: why the method cannot be called now.
        """
        if role is None:
            self._check_has_role()
            role = self._role
        here = self._loop is asyncio._get_running_loop() and self._pid == os.getpid()
        if here and self._connected and self._role == role and not self._closed:
            return self._sender or self._receiver
        self._check_open()
        doing = "sending" if role == "sender" else "receiving"
        if self._role != role:
            raise LocalProtocolError(
                f"{method}(): Must be initialized on {role} before {doing} weights: call "
                f"init_on_{role}() and connect() first"
            )
        if not self._connected:
            raise LocalProtocolError(
                f"{method}(): Must be synchronized on {role} before {doing} weights: "
                "call scheme.connect() first, with `await` unless it is of aiosync.sync"
            )
        self._check_process()
        raise LocalProtocolError(
            "this scheme belongs to another event loop; connect and use it on one loop, or "
            "use aiosync.sync from threads"
        )

    def _check_guard(self, target: Any) -> None:
        if isinstance(target, nn.Module):
            Methods(self._guard_object, self._methods).check(target)
        lacks = None if target is None else why_unguarded(target)
        if lacks is not None and self.apply == "auto" and self.guard == "forward":
            raise ConfigError(
                f"a {type(target).__name__} {lacks}: construct the scheme "
                "with guard='reading' and read inside `with scheme.reading():`, or with "
                "apply='manual' and call apply_pending()"
            )


def _named(weights: Any, worker_ids: int | Iterable[int] | None) -> set[int] | None:
    """Who is meant, ``None`` for all; weights for some workers mean these."""
    if worker_ids is not None:
        named = as_indices("worker_ids", worker_ids)
        if not named:
            raise ConfigError("worker_ids names nobody: leave it out to send to every worker")
        return named
    if weights is None or not is_per_worker(weights):
        return None
    return {as_index("a worker's index", idx) for idx in weights}
