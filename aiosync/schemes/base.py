"""The base class of schemes, which a user configures, pickles into workers, and calls.

A scheme is plain configuration until ``init_on_sender()`` or ``init_on_receiver()`` gives it a
role: a :class:`Trainer` or a :class:`Worker`, which never travels in a pickle. How the two meet is
up to its :class:`Fabric`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import copy
import functools
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar

from aiosync._repr import in_every_state
from aiosync.errors import (
    LocalProtocolError,
    RecvTimeout,
)
from aiosync.protocol import as_index, as_version
from aiosync.receiver.outage import OnLost
from aiosync.receiver.receiver import WeightReceiver
from aiosync.receiver.scheme_hooks import SchemeHooks
from aiosync.receiver.transformer import Transform
from aiosync.schemes.fabric import Fabric
from aiosync.schemes.lifecycle import ConnectArguments, Life
from aiosync.schemes.properties import SchemeState
from aiosync.schemes.results import AppliedUpdate, Ready, SendHandle, make_handle
from aiosync.schemes.sources import DeviceMap, as_model_id, resolve_sources
from aiosync.schemes.trainer import Trainer, addressed_workers
from aiosync.schemes.worker import Worker, WorkerTerms
from aiosync.sender import WeightSender
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Dtypes
from aiosync.tensors.apply import Loader, LoadTarget
from aiosync.transports.base import Transport
from aiosync.types import Require, SendReport

__all__ = ["WeightSyncScheme"]

_T = TypeVar("_T")

# Seconds that a call of aclose() waits for another one, which is bounded, too.
_CLOSE_SECONDS = 15.0


class WeightSyncScheme(SchemeState, abc.ABC):
    """Scheme that keeps the weights of one model the same in a trainer and its workers.

    One object is a sender (in the trainer) or a receiver (in a worker), never both; pickle it, or
    ``copy.copy`` it, to get the other side. One scheme per model; several may run side by side. Not
    thread-safe: use it on the loop that called :meth:`connect`. Any thread may use :meth:`reading`,
    :meth:`apply_pending`, :attr:`version` and :attr:`lag`, and assign a receiver's ``model``,
    ``context`` and ``weights``.

    Args:
        strategy: Which leaves of a module travel: ``"tensordict"`` (parameters and all buffers) or
            ``"state_dict"`` (what ``state_dict()`` has). The same on both sides.
        sync: For :mod:`aiosync.sync`, where false has ``send()`` return without waiting. Here
            ``send()`` always waits, and ``send_nowait()`` never does.
        per_worker_weights: ``send({0: ..., 1: ...})`` gives each worker its own weights.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        apply_copy: Copy updates into the parameters' memory.
        buffers: ``"persistent"`` keeps updates out of other buffers of a worker's module.
        guard: ``"forward"`` keeps updates out of forward passes of the model by hooks;
            ``"reading"`` leaves it to ``with scheme.reading():``.
        strict: Every name and dtype must match; see :attr:`strict`.
        require: Number of workers that must apply an update for ``send()`` to succeed: ``"all"``, a
            number, or a fraction of them. Like ``timeout`` it may be assigned between two sends;
            the other options count as they are when ``connect()`` is called. An option that is
            assigned is checked as here.
        timeout: Seconds that ``connect()`` and ``send()`` wait unless the call says otherwise;
            ``None`` waits for ever. The start of a collector's workers counts as ``connect()``; for
            a long start and short sends see ``docs/topics/cancellation.md``.
        wire_dtype: A floating-point dtype to which the sender casts the weights on their way, or
            one for each name pattern; see ``docs/topics/mapping.md``. Only the sender needs it.
        first_version: A sender's first version; a trainer that resumes continues with it.

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
        buffers: Literal["all", "persistent"] = "all",
        guard: Literal["forward", "reading"] = "forward",
        strict: bool = True,
        require: Require = "all",
        timeout: float | None = 120.0,
        wire_dtype: Dtypes | None = None,
        first_version: int = 1,
    ) -> None:
        self._set_options(
            strategy=strategy,
            sync=sync,
            per_worker_weights=per_worker_weights,
            apply=apply,
            apply_copy=apply_copy,
            buffers=buffers,
            guard=guard,
            strict=strict,
            require=require,
            timeout=timeout,
            wire_dtype=wire_dtype,
            first_version=first_version,
        )
        self._terms = WorkerTerms()
        self._use(self._fabric_type())

    def _use(self, fabric: Fabric[Any]) -> None:
        """Take this fabric, and begin a life without a role."""
        self._fabric = fabric
        self._begin(None)

    def _begin(self, model_id: str | None, worker_idx: int | None = None) -> None:
        """Begin a new life in this process: without a role, a loop or links."""
        self._life = Life(model_id, self._backend or type(self).__name__)
        self._life.worker_idx = worker_idx
        self._fabric.begin(self._life)

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """Make the scheme of a back-end name, such as ``"shared"``, ``"process"`` or ``"none"``.

        Raises:
            ConfigError: There is none with that name, or an option has an illegal value.
        """
        from aiosync.schemes import scheme_class  # That package imports this module.

        return scheme_class(backend)(**options)

    # -- pickling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "_life"}
        return {**state, "model_id": self.model_id, "worker_idx": self._life.free_idx}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model_id, worker_idx = state.pop("model_id"), state.pop("worker_idx")
        self.__dict__.update(state)
        # A copy in this process was given the other scheme's fabric.
        self._fabric = copy.copy(self._fabric)
        self._begin(model_id, worker_idx)

    @in_every_state
    def __repr__(self) -> str:
        life = self._life
        state = "closed" if life.closed else "connected" if life.connected else "not connected"
        who = f"{self.model_id or 'no model'}: {life.role or 'no role yet'}, {state}"
        return f"<{type(self).__name__} for {who}>"

    @abc.abstractmethod
    def create_transport(self, pipe_or_context: Any) -> Transport:
        """Make a link over a ``multiprocessing`` connection or a socket. Needs a running loop."""

    _backend: ClassVar[str | None] = None
    """Name of the back-end, if it is registered."""
    _fabric_type: ClassVar[type[Fabric[Any]]] = Fabric
    """The fabric of schemes of this class, unless their constructor makes one."""

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
        ``params_map``; or nothing, and every ``send()`` brings them. Workers may connect from now
        on; they are answered once :meth:`connect` runs.

        Args:
            model_id: Name of the model, the same on both sides; ``"policy"`` by default. With a
                ``context``, also the path to the model in it.
            context: Owner of the model (kept as a weak reference). May offer
                ``get_model(model_id)`` and ``num_workers``.
            params_map: Worker index -> its weights.
            weights: Weights for every worker: TensorDict or state dict, nested or dotted.
            model: Module whose weights every worker gets.
            devices: One device for each worker. Only their number counts: a model stays in place.
            device_map_fn: Called with (worker index, weights) for each worker and send.
            num_workers: Number of workers that ``connect()`` waits for; ``None`` for any number.
            pipes: Connections to the workers, by index, instead of the scheme's own socket.
            transports: Links to the workers, by index, instead. Only these workers are expected.
            ctx: Ignored; TorchRL passes its multiprocessing context.

        Raises:
            ConfigError: The arguments exclude each other, or that many workers can never connect.
            LocalProtocolError: This object already has a role.
        """
        del ctx
        self._check_no_role("init_on_sender")
        given = self._life.given
        name = as_model_id(model_id or given.model_id or "policy")
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
        given.context = context
        links = {} if transports is None else sources.link(transports)
        if transports is None and pipes is None:
            self._fabric.bind(self, sources)
        given.model_id, given.model, given.weights, given.sources = name, model, weights, sources
        self._life.side, self._fabric.sender_pid = Trainer(given, links), self._life.pid

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
        methods: Sequence[str] | None = None,
        on_lost: OnLost = "keep",
        max_staleness: float | None = None,
    ) -> None:
        """Make this object a receiver. Local only: it sends nothing and waits for nothing.

        Args:
            model_id: Name of the model, as the sender calls it.
            context: Owner of the model (kept as a weak reference). With ``apply="auto"``,
                connecting warns if it has no such model, for which updates then wait. If it has
                ``update_policy_weights_()``, plain or ``async``, that is called with
                ``policy_or_weights=`` and ``model_id=`` for each version that was applied, to pass
                it on before the trainer is told, a plain one in a thread. An error of it refuses
                the version.
            worker_idx: Index of this worker, from 0, which no other live worker has; ``None`` lets
                the sender choose.
            model: Module to keep up to date. :attr:`model` takes one, or another one, later.
            weights: TensorDict or dict of tensors to keep up to date, instead of a module.
            load: Function that is called with all names and tensors of each version, instead of a
                module: ``load(weights: Iterable[tuple[str, Tensor]])``. The tensors are views of
                received memory, valid and unchanged until it returns: it copies what it keeps, and
                writes to none. If it raises, the update is refused; it undoes what it changed,
                and reads have version 0 until an update is taken.
            transform: Turns the names and tensors of each version into those that the model
                expects: ``transform(weights) -> Iterable[tuple[str, Tensor]]``, for example a
                :class:`aiosync.WeightMap`. It runs in a thread while the event loop goes on, and
                its result is copied. If it raises, the update is refused. Values that are no
                tensors are passed on unchanged. Over streams it must not take longer than the
                ``stall_timeout`` of the trainer.
            pipe: Connection to the sender, instead of the scheme's own socket.
            transport: Link to the sender, instead of the scheme's own socket.
            hooks: Functions to call on the way of each update; see :class:`aiosync.SchemeHooks`.
            methods: Names of methods, such as ``("act", "value")``, whose calls an update waits for
                beside those of ``forward()``. ``None`` means the public methods of the model's own
                classes if it has no ``forward()``, or one that only raises, else none.
            on_lost: Once the trainer is lost, which is to say that it did not close its links and
                no other came within ``reconnect`` seconds: ``"keep"`` to compute on with what the
                model has, ``"raise"`` to have each read and :meth:`receive` raise
                :class:`~aiosync.PeerClosed`. Copies, such as ``state_dict()``, go on.
            max_staleness: Seconds without a usable link after which reads and :meth:`receive` raise
                that error, too, also during a search for a link or after a farewell, until there is
                one; ``None`` for never.

        Raises:
            ConfigError: The arguments exclude each other, or updates could tear: a target without
                hooks, such as a scripted module, needs ``guard="reading"`` or ``apply="manual"``.
            LocalProtocolError: This object already has a role.
        """
        self._check_no_role("init_on_receiver")
        loader, life = None if load is None else LoadTarget(load), self._life
        worker = Worker(
            self,
            life,
            self._terms,
            model=model,
            weights=weights,
            load=load,
            transform=transform,
            pipe=pipe,
            transport=transport,
            hooks=hooks,
            methods=methods,
            on_lost=on_lost,
            max_staleness=max_staleness,
        )
        given = life.given
        given.model_id = as_model_id(model_id or given.model_id or "policy")
        given.model, given.weights, given.loader, given.context = model, weights, loader, context
        # The index may have been assigned before.
        found = worker_idx if worker_idx is not None else life.worker_idx
        life.worker_idx = _index_of(context) if found is None else as_index("worker_idx", found)
        life.side = worker

    init_on_worker = init_on_receiver

    def _check_no_role(self, method: str) -> None:
        """Raise if the scheme has a role; one that it had before a fork is dropped instead."""
        # The role, the context and the links are the parent process's.
        if self._life.inherited:
            self._begin(self.model_id, self._life.free_idx)
        self._life.check_no_role(method)

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
        until all ``num_workers`` have applied them; others may come later. On a receiver: reach the
        sender, apply the initial weights, and receive in the background. The call waits for the
        weights of a weight server that has none; with a trainer that has none yet it returns with
        version 0.

        Args:
            worker_idx: Receiver only: index of this worker.
            weights: Sender only: the initial weights.
            timeout: Seconds in all; ``None`` takes the scheme's, ``math.inf`` waits for ever.
            processes: Sender only: the workers' processes, by index (anything with a ``pid``, or
                process ids): once so many have ended that ``require`` cannot be met, it raises. A
                supervisor has half a second to put another one into this list.
            initial: Receiver only: wait for the initial weights, as far as it subscribes. If false,
                they may come later, and so may the model.

        Raises:
            ConnectTimeout: A peer did not connect in time; the message says which. Or a live worker
                has the index, and kept it until then.
            ConnectError: The other side refused, or has ended.
            ConfigError: The two sides are set up differently, the timeout is not a number,
                ``processes`` is no list of processes, or was given without ``num_workers``, the
                context's model takes no forward hooks, or there is nothing to apply weights to.
            PartialSyncError: Sender: some worker could not apply the initial weights, or died. The
                others are connected, or still may connect.
            ApplyError: Receiver: the initial weights do not fit the model.
            LocalProtocolError: Called twice, or before ``init_on_*``, or in a child that was forked
                after it; or without an asyncio event loop, as under trio.

        Cancellation:
            Breaks the attempt: the scheme is closed.
        """
        life = self._life
        life.check_may_connect(weights, worker_idx, processes)
        limit = self._limit(timeout)
        if worker_idx is not None:
            self.worker_idx = worker_idx
        cancelled_before = life.begin_to_connect()
        side = life.side
        assert side is not None
        life.meter.start(side.role, self.model_id or "policy")
        try:
            with life.waiting("connect()", limit, side.awaited):
                arguments = ConnectArguments(weights, processes, initial)
                await self._fabric.meet(self, limit, arguments)
        except BaseException as exc:  # The error is raised again for the caller.
            sender = life.sender
            if sender is not None and sender.workers.expected.others_may_connect_after(exc):
                # The sender stays open for the workers that it has, or that may still come.
                life.connected = not life.closed
            else:
                self._end_attempt(exc, cancelled_before)
            raise
        finally:
            life.connecting = None
        life.connected = True

    def _end_attempt(self, error: BaseException, cancelled_before: int) -> None:
        """Close the scheme after a connect() that failed; raise if close() cancelled that call."""
        life = self._life
        # abort() cancels a call that still connects, and this one has ended.
        was_closed, life.connecting = life.closed, None
        self.abort()
        if life.runtime is not None:
            # Another task may have closed the scheme before this call made the runtime.
            life.runtime.abort()
        if was_closed:
            life.check_cancelled(error, cancelled_before)

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

        Through shared memory it is enough that a worker's next read uses it, if the worker looks
        for versions by itself. Workers are served at the same time; a slow one does not delay the
        others. A worker that died since the last send is named in one :class:`PartialSyncError`,
        and listed as ``lost`` in the reports of later sends. A worker that was closed has left: one
        report says so, and the send misses it only if ``require`` asks for more workers than are
        connected.

        Args:
            weights: ``None`` for the registered model; or a module, a TensorDict, a state dict,
                ``{worker_idx: weights}`` (with ``per_worker_weights=True``), or a dotted name in
                the context. The call never changes them. A step of an optimizer waits until they
                are copied; nothing else may write to them until the call returns.
            worker_ids: Only these workers change, and ``require`` asks for no more than these;
                ``None`` for all.
            timeout: Seconds for the whole call; ``None`` takes the scheme's ``timeout``,
                ``math.inf`` waits for ever.
            max_lag: First wait until this version puts no worker more versions than this, at least
                1, behind; see :meth:`wait_lag_below`. With ``timeout=0`` it raises instead. Sends
                at the same time check for themselves: await one before the next.

        Returns:
            A report that says which workers have which version.

        Raises:
            PartialSyncError: Fewer workers than ``require`` asks for applied it; ``failed`` says
                why for each: ``ApplyError`` with the worker's own words, ``PeerClosed`` or
                ``TransportBroken`` when it died, ``AckTimeout`` when it did not answer. The others
                have the new version.
            ConfigError: A worker is named that never connected, or no worker is named; the weights
                cannot travel, or the timeout is not a number.
            WeightsChanged: The weights were written to while they were copied.
            SendTimeout: An optimizer's step in another thread did not end.
            RecvTimeout: Some worker stayed too far behind for ``max_lag``; nothing was sent.
            LocalProtocolError: Not a connected sender.

        Cancellation:
            Class C: the transfer goes on in the background, from the sender's own snapshot; of a
            call that is cancelled before that has been copied, nothing is sent.
        """
        trainer = self._require("send", "sender")
        limit = self.timeout if timeout is None else self._limit(timeout)
        if max_lag is not None:
            began = time.perf_counter()
            await self.wait_lag_below(max_lag, timeout=timeout)
            # A timeout of 0 is for that wait only.
            limit = self.timeout if timeout == 0 else limit
            limit = None if limit is None else max(0.0, limit - (time.perf_counter() - began))
        planned = trainer.prepare_send(self, weights)
        sender: WeightSender = trainer.runtime
        targets = None
        if weights is not None or worker_ids is not None:
            targets = addressed_workers(weights, worker_ids)
        return await sender.send(planned, targets, limit)

    def send_nowait(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> SendHandle:
        """Take a snapshot now and send it in the background.

        The copy is made on the calling thread before this returns, so the weights may change right
        after. A worker that is still busy with an older version gets only the newest one; the
        report says which workers skipped this version, and which version overtook it.

        Args:
            weights: As for :meth:`send`.
            worker_ids: As for :meth:`send`.
            timeout: As for :meth:`send`.

        Returns:
            A handle to await for the report; it raises what :meth:`send` raises. A failure that is
            never awaited is printed by the event loop's exception handler.

        Raises:
            LocalProtocolError: Not a connected sender; or :meth:`connect` is still copying the
                initial weights.
            ConfigError: As for :meth:`send`. Errors in the workers are raised by the handle.
        """
        trainer = self._require("send_nowait", "sender")
        limit = self.timeout if timeout is None else self._limit(timeout)
        planned = trainer.prepare_send(self, weights)
        return make_handle(
            *trainer.runtime.send_nowait(planned, addressed_workers(weights, worker_ids), limit)
        )

    # -- receiving -----------------------------------------------------------------------------

    async def receive(self, timeout: float | None = None) -> AppliedUpdate | None:
        """Wait for the next update that is applied and was not returned before.

        Updates are applied in the background whether or not this is called. With ``apply="manual"``
        this applies what is staged, between two forward passes; what it could not apply in time
        stays staged.

        Args:
            timeout: Seconds; ``None`` waits until the trainer goes away, 0 does not wait. With
                ``apply="manual"`` an accelerator that applies the update is waited for.

        Returns:
            The newest applied update, or ``None`` when the timeout passed without one.

        Raises:
            ApplyError: ``apply="manual"`` and the staged update does not fit the model.
            ConfigError: The timeout is not a number.
            PeerClosed: The trainer went away; TransportBroken if a last link broke in mid-message.
            LocalProtocolError: Not a connected receiver, or it would wait inside a :meth:`reading`
                block or a forward pass of its own, which holds the update back.

        Cancellation:
            Class A.
        """
        receiver: WeightReceiver = self._require("receive", "receiver").runtime
        self._limit(timeout)
        found = await receiver.waits.receive(timeout)
        if found is None:
            return None
        return AppliedUpdate(*found, self.model_id or "policy", self._read_weights)

    async def wait_for_version(self, version: int, *, timeout: float | None = None) -> int:
        """Wait until the model has at least ``version`` (sender: until every subscriber has).

        If all subscribers of a trainer have left, the call does not wait for a version that was
        sent. A worker that the version was not sent to keeps the call until the timeout.

        Args:
            version: Version of the current epoch.
            timeout: Seconds; ``None`` takes the scheme's, ``math.inf`` waits for ever.

        Returns:
            The version that the model, or the slowest subscriber, has.

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away; TransportBroken if a last link broke in mid-message.
            ApplyError: Receiver: the update was refused by the model.
            PartialSyncError: Sender: a worker refused it, or does not let this trainer in.
            ConfigError: The timeout is not a number.
            LocalProtocolError: Not connected; or a receiver's update cannot be applied, as this is
                called inside a :meth:`reading` block or a forward pass.

        Cancellation:
            Class A.
        """
        version = as_version("version", version)
        call, text = f"wait_for_version({version})", f"version {version} was not applied"
        side = self._require("wait_for_version")
        return await self._wait(side, call, timeout, text, side.waits.wait_for, version)

    async def wait_staged(self, version: int = 1, *, timeout: float | None = None) -> int:
        """Wait until ``version`` is complete at the receiver, whether or not it is applied yet.

        With ``apply="manual"`` a worker waits with this for the update that :meth:`apply_pending`
        is to apply. A trainer, after :meth:`send_nowait`, waits for the moment at which all workers
        only have to switch. An update of some names, with ``strict=False``, that lacks a part of
        one before it is staged only when that one is applied.

        Args:
            version: Version of the current epoch, or a newer one.
            timeout: Seconds; ``None`` takes the scheme's, ``math.inf`` waits for ever.

        Returns:
            The newest version that is staged or applied (sender: at every subscriber).

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away; TransportBroken if a last link broke in mid-message.
            ApplyError: Receiver: the update was refused.
            PartialSyncError: Sender: a worker refused ``version``, or died before it had it.
            ConfigError: The timeout is not a number.

        Cancellation:
            Class A.
        """
        version = as_version("version", version)
        call, text = f"wait_staged({version})", f"version {version} was not complete"
        side = self._require("wait_staged")
        wait = functools.partial(side.waits.wait_for, staged=True)
        return await self._wait(side, call, timeout, text, wait, version)

    async def pull(self, *, min_version: int | None = None, timeout: float | None = None) -> int:
        """Ask the trainer for its newest version, and wait until the model has it.

        Args:
            min_version: The lowest acceptable version; the trainer answers once it has it. ``None``
                takes the current one, if there is any.
            timeout: Seconds; ``None`` takes the scheme's, ``math.inf`` waits for ever.

        Returns:
            The version that the model has now; 0 if the trainer has not sent any.

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away; TransportBroken if a last link broke in mid-message.
            ApplyError: The update was refused by the model.
            ConfigError: The timeout is not a number.
            LocalProtocolError: Not a connected receiver; or a newer version arrived that cannot be
                applied, because this is called inside a :meth:`reading` block or a forward pass.

        Cancellation:
            Class A; the update may still arrive.
        """
        side = self._require("pull", "receiver")
        least = 0 if min_version is None else as_version("min_version", min_version)
        text = f"no version from {least} on was applied"
        return await self._wait(side, "pull()", timeout, text, side.waits.pull, least)

    async def wait_lag_below(self, limit: int, *, timeout: float | None = None) -> int:
        """Wait until the worker is less than ``limit`` versions behind (sender: until all are).

        Of a trainer's workers those count that subscribe and have an update on its way, not one
        that refused its newest version, or has gone. Call it before :meth:`send`, which also has
        ``max_lag=``, or before sampling: no data is older. :attr:`lag` has the number without
        waiting.

        Args:
            limit: Number of versions, at least 1; with 1 the call waits until no worker is behind.
            timeout: Seconds; ``None`` takes the scheme's, ``math.inf`` waits for ever.

        Returns:
            The lag of the worker, or of the slowest worker.

        Raises:
            RecvTimeout: Not in time; of a trainer it names the workers.
            PeerClosed: The trainer went away; TransportBroken if a last link broke in mid-message.
            ApplyError: Receiver: the newest version was refused.
            ConfigError: ``limit`` is not a number of versions, or the timeout is not a number.
            LocalProtocolError: Not connected; or a receiver's update cannot be applied, as this is
                called inside a :meth:`reading` block or a forward pass.

        Cancellation:
            Class A.
        """
        side = self._require("wait_lag_below")
        as_version("a lag", limit, 1)
        call, text = f"wait_lag_below({limit})", f"the lag did not fall below {limit}"
        return await self._wait(side, call, timeout, text, side.waits.wait_lag_below, limit)

    async def _wait(
        self,
        side: Trainer | Worker,
        call: str,
        timeout: float | None,
        text: str,
        wait: Callable[..., Awaitable[_T]],
        what: object,
    ) -> _T:
        """Await ``wait(what)``, ``call`` in logs; ``text`` begins the error of a timeout."""
        limit = self._limit(timeout)
        # If the context has no model, that is the likely reason of a timeout.
        lacks = self._life.given.lacks()
        began = "" if lacks is None else f"; when this began, {lacks}"
        late = RecvTimeout(f"{text} within {limit or 0:g} s{began}")
        waiting = self._life.waiting(call, limit, side.versions_text)
        return await wait(what, timeout=limit, late=late, waiting=waiting)

    @property
    def ready(self) -> Ready:
        """The condition that there is a complete version, to check or to wait for."""
        return Ready(self._is_ready, self._wait_until_ready)

    def _is_ready(self) -> bool:
        runtime = self._life.runtime
        return runtime is not None and runtime.is_ready()

    async def _wait_until_ready(self, timeout: float | None) -> None:
        side = self._require("ready")
        text, waits = "there was no complete version", side.waits
        await self._wait(side, "ready", timeout, text, waits.wait_until, side.runtime.is_ready)

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close every link, task, socket and buffer of this object. Idempotent, bounded.

        A call while another one closes the scheme waits until that one has ended.

        A receiver's model keeps its weights, in memory of its own. Workers of a closed sender
        see ``PeerClosed``.

        Raises:
            LocalProtocolError: The scheme's own loop runs in another thread.
        """
        life = self._life
        if life.inherited:
            # The tasks are the parent's, and nothing runs them here.
            self.abort()
        elif life.loop in (None, asyncio.get_running_loop()) or not life.loop.is_running():
            await self._close_here()
        elif not life.closed:
            raise LocalProtocolError(
                "the event loop of this scheme runs in another thread: close it there, with "
                "asyncio.run_coroutine_threadsafe(scheme.aclose(), loop), or call abort()"
            )

    async def _close_here(self) -> None:
        """Close everything, after another call that closes it. Idempotent, also after `abort`."""
        life, loop = self._life, asyncio.get_running_loop()
        first = life.closing
        if first is not None and first.get_loop() is loop:
            # Not without a limit, as this call may be what the first one waits for.
            await asyncio.wait({first}, timeout=_CLOSE_SECONDS)
        life.closing = closing = loop.create_future()
        try:
            await self._close_all()
        finally:
            closing.set_result(None)

    async def _close_all(self) -> None:
        """Close the runtime first, which tells the other side, and then everything else."""
        life = self._life
        opened = (*life.listeners, *life.shared)
        try:
            if life.begin_to_close() and life.runtime is not None:
                await life.runtime.aclose()
        finally:
            life.abort_links()
            try:
                await asyncio.gather(*(each.aclose() for each in opened))
                life.meter.deliver()
            finally:
                await self._fabric.aclose()

    def abort(self) -> None:
        """Close at once from synchronous code, for destructors and signal handlers."""
        life = self._life
        if life.begin_to_close():
            if life.runtime is not None:
                life.runtime.abort()
            life.abort_links()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self._life.warn_if_unconnected("async with", "await scheme.connect()")
        await self.aclose()

    def __del__(self) -> None:
        """Close a scheme that was never closed, and warn of that if it has a runtime."""
        life: Life | None = getattr(self, "_life", None)
        if life is None or life.closed or life.inherited:
            # After a refused option there is nothing to close yet.
            return
        if life.runtime is None:
            # It has no tasks to end: only the listeners that it may have bound are closed.
            life.begin_to_close()
            return
        try:
            warnings.warn(
                f"{self!r} was never closed: use `async with scheme:` or `await scheme.aclose()`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
        finally:  # The warning may be turned into an error.
            self.abort()


def _index_of(context: Any) -> int | None:
    """Return the worker's index that a context has, such as a collector; ``None`` without one."""
    found = None
    # A collector may have no index yet.
    with contextlib.suppress(RuntimeError):
        found = getattr(context, "worker_idx", None)
    return None if found is None else as_index("worker_idx", found)
