"""Life cycle of a scheme in one process, and its role: a trainer or a worker.

Must not import a concrete scheme.
"""

from __future__ import annotations

import asyncio
import copy
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from torch import nn

from aiosync._log import Waiting, log
from aiosync._meter import Meter
from aiosync._tasks import current_task, run_on_loop, running_loop
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectTimeout,
    LocalProtocolError,
    RemoteProtocolError,
    TransportClosed,
)
from aiosync.protocol import as_index, as_indices, validate_seconds, validate_timeout
from aiosync.receiver.forwards import why_unguarded
from aiosync.receiver.guard import Guard
from aiosync.receiver.hooks import AfterApply, SchemeHooks, Transform, in_thread, run_hook
from aiosync.receiver.outage import OnLost, Outage
from aiosync.receiver.reading import Methods
from aiosync.receiver.receiver import WeightReceiver
from aiosync.rendezvous.dialer import Backoff, KeptLink, Left
from aiosync.rendezvous.handshake import Refused, greet
from aiosync.rendezvous.listener import Listener
from aiosync.schemes.options import refuse
from aiosync.schemes.sources import Given, is_per_worker
from aiosync.sender import WeightSender
from aiosync.sender.snapshots import SnapshotCopier
from aiosync.tensors import Prepared, check_dtypes
from aiosync.tensors.apply import Loader
from aiosync.tensors.walk import is_nested
from aiosync.transports.base import Transport
from aiosync.types import SendReport
from aiosync.wire import Hello, Welcome

if TYPE_CHECKING:
    from aiosync.schemes.base import WeightSyncScheme
    from aiosync.schemes.state import SchemeState

__all__ = ["Life", "Trainer", "Worker", "check_may_connect", "named"]


def check_may_connect(role: str | None, begun: bool, worker_idx: object, weights: object) -> None:
    """Raise if ``connect()`` was called before, or is given an argument of the other side.

    Raises:
        LocalProtocolError: It was called before, or is given such an argument.
    """
    if begun:
        raise LocalProtocolError(f"Cannot synchronize weights on {role} twice.")
    name, value = ("worker_idx", worker_idx) if role == "sender" else ("weights", weights)
    if value is not None:
        raise LocalProtocolError(f"Cannot specify {name} on {role} side during synchronization.")


class Life:
    """State of a scheme in one process, from when it was made or unpickled.

    Args:
        model_id: Name of the model, if it is known.

    Attributes:
        given: Arguments of ``init_on_*()``, and values assigned since.
        side: Role of the scheme, once it has one: a trainer, or a worker.
        worker_idx: Index of the worker, once it is known.
        connected: True once ``connect()`` has succeeded.
        closed: True once the scheme was closed.
        ended: Set when the scheme is closed.
        pid: The process in which the scheme lives.
        loop: The event loop of its ``connect()``.
        connecting: The task that runs ``connect()``.
        guard: Keeps reads and updates apart.
        meter: Counts the syncs.
        listeners: Let the other side in.
        shared: Objects that links share, and links that no runtime may have taken.
    """

    def __init__(self, model_id: str | None) -> None:
        self.given: Given = Given(model_id)
        self.side: Trainer | Worker | None = None
        self.worker_idx: int | None = None
        self.connected: bool = False
        self.closed: bool = False
        self.ended: asyncio.Event = asyncio.Event()
        self.pid: int = os.getpid()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.connecting: asyncio.Task[Any] | None = None
        self.guard: Guard = Guard()
        self.meter: Meter = Meter()
        self.listeners: list[Listener] = []
        # Each has abort() and aclose().
        self.shared: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def role(self) -> Literal["sender", "receiver"] | None:
        """Name of the role, once the scheme has one."""
        return None if self.side is None else self.side.role

    @property
    def runtime(self) -> WeightSender | WeightReceiver | None:
        """The sender or the receiver, once the scheme connects."""
        return None if self.side is None else self.side.runtime

    @property
    def sender(self) -> WeightSender | None:
        """The sender, once a trainer connects."""
        return self.side.runtime if isinstance(self.side, Trainer) else None

    @property
    def receiver(self) -> WeightReceiver | None:
        """The receiver, once a worker is connected."""
        return self.side.runtime if isinstance(self.side, Worker) else None

    @property
    def link(self) -> KeptLink[Transport, Welcome] | None:
        """The link that a worker dials, with the trainer's answer or the last failure."""
        return self.side.link if isinstance(self.side, Worker) else None

    @property
    def runs(self) -> bool:
        """True if there is something to close."""
        return not self.closed and (self.runtime is not None or self.connected)

    @property
    def inherited(self) -> bool:
        """True if the process was forked since: tasks and open links are the parent's."""
        return self.pid != os.getpid()

    def is_a(self, role: str) -> bool:
        """Return True if the scheme has this role, in this process."""
        return self.role == role and not self.inherited

    def log(
        self, phase: str, text: str, version: int | None = None, level: int = logging.INFO
    ) -> None:
        """Log an event of this scheme: one word, a sentence, and the version that it is about."""
        log(level, phase, text, model=self.given.model_id, worker=self.worker_idx, version=version)

    def warn_if_unconnected(self, block: str, call: str) -> None:
        """Warn when a worker's ``with`` block ends without ``connect()``."""
        if self.role == "receiver" and self.loop is None and not self.closed:
            warnings.warn(
                f"this worker never had the trainer's weights: `{block}` does not connect, call "
                f"`{call}` inside of the block",
                stacklevel=3,
            )

    def waiting(self, call: str, timeout: float | None, what: Callable[[], str]) -> Waiting:
        """Return a context manager that logs a call which waits for long, and for what."""
        return Waiting(call, timeout, what, model=self.given.model_id, worker=self.worker_idx)

    def why_not_here(self, method: str, role: str | None) -> NoReturn:
        """Raise the reason why a scheme is not connected here, in the role that a method needs."""
        if role is None:
            self.check_has_role()
        self.check_open()
        role = role or self.role
        doing = "sending" if role == "sender" else "receiving"
        if self.role != role:
            raise LocalProtocolError(
                f"{method}(): Must be initialized on {role} before {doing} weights: call "
                f"init_on_{role}() and connect() first"
            )
        if not self.connected:
            raise LocalProtocolError(
                f"{method}(): Must be synchronized on {role} before {doing} weights: "
                "call scheme.connect() first, with `await` unless it is of aiosync.sync"
            )
        self.check_process()
        raise LocalProtocolError(
            "this scheme belongs to another event loop; connect and use it on one loop, or "
            "use aiosync.sync from threads"
        )

    def check_open(self) -> None:
        """Raise if the scheme was closed."""
        if self.closed:
            raise TransportClosed(
                "this scheme was closed; make a new one, or copy.copy(scheme), to connect again"
            )

    def check_process(self) -> None:
        """Raise if the scheme had a role, and the process was forked since."""
        if self.side is not None and self.inherited:
            done = "set up" if self.loop is None else "connected"
            raise LocalProtocolError(
                f"this scheme was {done} before the process forked; call init_on_receiver() and "
                "connect() in the child"
            )

    def check_here(self) -> None:
        """Raise if the scheme was closed, or had a role before this process was forked."""
        self.check_open()
        self.check_process()

    def check_no_role(self, method: str) -> None:
        """Raise if the scheme was closed or has a role."""
        self.check_open()
        if self.role is not None:
            raise LocalProtocolError(
                f"{method}(): this object is already a {self.role}; pickle it or use "
                "copy.copy(scheme) for the other side"
            )

    def check_has_role(self) -> None:
        """Raise if the scheme was closed or has no role."""
        self.check_open()
        if self.role is None:
            raise LocalProtocolError(
                "Neither init_on_sender nor init_on_receiver have been called. Call "
                "init_on_sender() in the trainer and init_on_receiver() in a worker first"
            )

    def check_may_connect(self, weights: object, worker_idx: object) -> None:
        """Raise if the scheme may not begin to connect.

        Raises:
            LocalProtocolError: It may not connect now, or was given an argument of the other role.
        """
        self.check_has_role()
        self.check_process()
        check_may_connect(self.role, self.loop is not None, worker_idx, weights)

    def begin_to_connect(self) -> int:
        """Bind the scheme to this loop; return how often the caller's task was cancelled before."""
        self.loop = running_loop()
        self.connecting = task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    def check_cancelled(self, error: BaseException, cancelled_before: int) -> None:
        """Raise ``TransportClosed`` if only closing the scheme has cancelled ``connect()``."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None:
            # With a higher count the caller has cancelled the task, too.
            if task.uncancel() <= cancelled_before:
                raise TransportClosed("this scheme was closed while it connected") from None

    def begin_to_close(self) -> bool:
        """Stop listening and cancel ``connect()``; return False if the scheme was closed before."""
        if self.closed:
            return False
        self.closed = True
        for listener in () if self.inherited else self.listeners:
            listener.close()
        self.ended.set()
        task, self.connecting = self.connecting, None
        if task is not None and not self.inherited and task is not current_task():
            # connect() runs in another task.
            task.cancel()
        return True

    def abort_links(self) -> None:
        """End the links that no runtime has taken, and the objects that links share."""
        if self.side is not None:
            self.side.abort_links()
        for each in self.shared:
            each.abort()


class Trainer:
    """Role of a scheme in the trainer. Refers to no scheme, so that a forgotten one is closed.

    Args:
        given: Weights to send, the number of workers, and the model or its context.
        links: Links that were given, by worker.

    Attributes:
        links: As given.
        runtime: The sender, once the scheme connects.
    """

    role: Final = "sender"

    def __init__(self, given: Given, links: Mapping[int, Transport]) -> None:
        self.links = links
        self.runtime: WeightSender | None = None
        self._given = given
        self._children: list[multiprocessing.process.BaseProcess] = []

    def assign(self, scheme: SchemeState, name: str, value: Any) -> None:
        """Send another model or other weights from now on; or look for it in another context."""
        if name != "context":
            self._given.sources.replace(value)
            self._given.model = self._given.weights = None
        setattr(self._given, name, value)

    async def connect(
        self,
        scheme: WeightSyncScheme,
        timeout: float | None,
        weights: Any,
        processes: Sequence[Any],
    ) -> None:
        """Let workers in, and bring them to the initial weights."""
        self._children = multiprocessing.active_children()
        copier = SnapshotCopier(
            scheme._make_arena(),
            scheme.strategy.extract_as,
            # A mapping may have been changed since it was checked.
            check_dtypes(scheme.wire_dtype, "wire_dtype"),
            scheme._planning_limits(),
        )
        self.runtime = sender = WeightSender(
            model_id=self._given.model_id or "policy",
            strategy=scheme.strategy_str,
            num_workers=self._given.sources.num_workers,
            expected=self._given.sources.expected,
            require=scheme.require,
            copier=copier,
            meter=scheme._life.meter,
            parts=not scheme.strict,
            streaming=scheme._streaming(),
            how=scheme._how,
            first_version=scheme.first_version,
        )
        planned = self.plan(scheme, weights, initial=True)
        for idx, link in self.links.items():
            sender.workers.welcome(link, idx, given=True)
        for idx, pipe in enumerate(self._given.sources.pipes or ()):
            sender.workers.welcome(scheme.create_transport(pipe), idx, given=True)
        scheme._start_listening(self, sender)
        try:
            await sender.connect(planned, timeout=timeout, processes=processes)
        finally:
            # Process objects that are kept would keep their pipes open.
            self._children.clear()

    def awaited(self) -> str:
        """Return a text that says what ``connect()`` waits for."""
        assert self.runtime is not None
        ended = (
            f"; process {each.pid}, which this one had started, ended with exit code "
            f"{each.exitcode}"
            for each in self._children
            if each.exitcode
        )
        return self.runtime.workers.awaited(self.runtime.version) + "".join(ended)

    def have(self) -> str:
        """Return a text with the workers' versions, for a call that waits for one."""
        return f"the workers that are connected have versions {self.versions}"

    @property
    def versions(self) -> dict[int, int]:
        """Version that each connected worker is known to have applied."""
        links = {} if self.runtime is None else self.runtime.workers.links
        return {idx: link.applied for idx, link in links.items()}

    def plan(
        self, scheme: WeightSyncScheme, weights: Any, *, initial: bool = False
    ) -> dict[int | None, Prepared]:
        """Return the weights of each worker, ready to be copied; under ``None`` those for all."""
        assert self.runtime is not None
        # The option may have been assigned since.
        self.runtime.require = scheme.require
        flatteners, given = self.runtime.copier.flatteners, self._given
        sources = given.sources
        mapped = sources.per_worker or sources.device_map
        # This is nearly always the case.
        if weights is None and sources.weights is not None and not mapped:
            return {None: flatteners[-1].prepare(sources.weights)}
        weights = sources.resolve(weights, given.context, given.model_id or "policy")
        if weights is None and initial:
            return {}
        if weights is None:
            lacks = given.lacks()
            why = f" ({lacks})" if lacks else ""
            raise ConfigError(
                f"there is nothing to send{why}: pass weights to send(), or model=, weights= or "
                "context= to init_on_sender()"
            )
        each = sources.plan(weights, scheme.per_worker_weights, scheme.strategy)
        return {
            idx: flatteners[-1 if idx is None else idx].prepare(value)
            for idx, value in each.items()
        }

    def publish(
        self,
        scheme: WeightSyncScheme,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        max_lag: int | None = None,
    ) -> tuple[SendReport | None, Callable[[], None] | None]:
        """Send without waiting, on a thread that keeps the loop idle.

        Returns:
            The report, or ``None`` with nothing done if the send has to wait; and a function that
            is to be called on the loop, or ``None``.
        """
        started, sender, life = time.perf_counter(), self.runtime, scheme._life
        if sender is None or not life.connected or life.closed or not sender.reads_slots:
            return None, None
        sources = self._given.sources
        if sources.device_map or sources.per_worker or max_lag is not None:
            # send() may have to follow, and a device map is called only once for each send.
            return None, None
        if timeout is not None:
            validate_timeout(timeout)
        planned, meant = self.plan(scheme, weights), named(weights, worker_ids)
        if not sender.is_quiet():
            return None, None
        sent = sender.start(planned, meant, None, started, off_loop=True)
        if not isinstance(sent, SendReport):
            return None, None
        return sent, sender.tell if sender.has_to_tell() else None

    def abort_links(self) -> None:
        """End the links that were given, if no runtime has taken them."""
        for link in self.links.values():
            link.abort()


def named(weights: Any, worker_ids: int | Iterable[int] | None) -> set[int] | None:
    """Return the workers that a send names; ``None`` for all. Weights by worker name theirs."""
    if worker_ids is not None:
        meant = as_indices("worker_ids", worker_ids)
        if not meant:
            raise ConfigError("worker_ids names nobody: leave it out to send to every worker")
        return meant
    if weights is None or not is_per_worker(weights):
        return None
    return {as_index("a worker's index", idx) for idx in weights}


class Worker:
    """Role of a scheme in a worker.

    Args:
        scheme: The scheme that gets the role.
        model: As given to ``init_on_receiver()``, like all the others.
        weights: As given.
        load: As given.
        transform: As given.
        pipe: As given.
        transport: As given.
        hooks: As given; they take precedence over those that the scheme carries.
        methods: As given.
        on_lost: As given.
        max_staleness: As given.

    Raises:
        ConfigError: The arguments exclude each other, or updates could tear.

    Attributes:
        hooks: Functions that are called on the way of an update.
        pipe: A connection or a link to the trainer; ``None`` if the scheme finds the trainer.
        runtime: The receiver, once the scheme is connected.
        link: The link to the trainer, once it is dialled.
    """

    role: Final = "receiver"

    def __init__(
        self,
        scheme: WeightSyncScheme,
        *,
        model: Any,
        weights: Any,
        load: Loader | None,
        transform: Transform | None,
        pipe: Any,
        transport: Transport | None,
        hooks: SchemeHooks | None,
        methods: Sequence[str] | None,
        on_lost: OnLost,
        max_staleness: float | None,
    ) -> None:
        validate_seconds("max_staleness", max_staleness, none=True)
        target = model if model is not None else weights
        refuse(
            (
                model is not None and weights is not None,
                "weights cannot be provided if model is provided",
            ),
            (
                not (target is None or isinstance(target, nn.Module) or is_nested(target)),
                (
                    f"a {type(target).__name__} has no weights to replace: pass a torch.nn.Module "
                    "as model=, tensors as weights=, or a function that takes weights as load="
                ),
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
                isinstance(methods, str) or (methods and scheme.guard != "forward"),
                "methods must be a list of names, and needs guard='forward'",
            ),
            (
                on_lost not in ("keep", "raise"),
                f"on_lost must be 'keep' or 'raise', got {on_lost!r}",
            ),
        )
        named = {} if hooks is None else hooks.given()
        self.hooks: SchemeHooks = dataclasses.replace(scheme._carried_hooks, **named)
        self.pipe: Transport | Any | None = transport if transport is not None else pipe
        self.runtime: WeightReceiver | None = None
        self.link: KeptLink[Transport, Welcome] | None = None
        self._given = scheme._life.given
        self._guard = scheme._life.guard
        self._methods = None if methods is None else tuple(methods)
        self._transform = transform
        self._outage = Outage(
            on_lost,
            max_staleness,
            guard=self._guard,
            hooks=lambda: self.hooks,
            log=scheme._life.log,
        )
        self._session = secrets.token_bytes(16)
        # True if the trainer chose the index, and not the user.
        self._idx_chosen = False
        self.check(scheme, load if target is None else target)

    def change_hooks(self, **hooks: Any) -> SchemeHooks:
        """Set hooks from now on, keep the others, and return all of them."""
        self.hooks = dataclasses.replace(self.hooks, **hooks)
        if self.runtime is not None:
            self.runtime.applier.flipped = self.hooks.at_once
        return self.hooks

    # -- the model -----------------------------------------------------------------------------

    def check(self, scheme: SchemeState, target: Any) -> None:
        """Raise if updates could tear a read of the target."""
        if isinstance(target, nn.Module):
            Methods(self._guard, self._methods).check(target)
        lacks = None if target is None else why_unguarded(target)
        if lacks is not None and scheme.apply == "auto" and scheme.guard == "forward":
            raise ConfigError(
                f"a {type(target).__name__} {lacks}: construct the scheme "
                "with guard='reading' and read inside `with scheme.reading():`, or with "
                "apply='manual' and call apply_pending()"
            )

    def assign(self, scheme: SchemeState, name: str, value: Any) -> None:
        """Set the model, weights or context, and tell the receiver; all of it or nothing."""
        if name != "context":
            self.check(scheme, value)
        receiver, given, life = self.runtime, self._given, scheme._life
        if receiver is None or life.closed or life.inherited:
            setattr(given, name, value)
            return
        changed = copy.copy(given)
        setattr(changed, name, value)
        chosen = functools.partial(setattr, given, name, value)
        use = functools.partial(receiver.applier.use_model, changed.target(), chosen)
        run_on_loop(life.loop, use)

    # -- the trainer ---------------------------------------------------------------------------

    async def connect(self, scheme: WeightSyncScheme, timeout: float | None, initial: bool) -> None:
        """Meet the trainer, and apply the initial weights."""
        clock = asyncio.get_running_loop().time
        ends = None if timeout is None else clock() + timeout
        model = self._given.target()
        if model is None and initial and self._given.context_ref is None:
            raise ConfigError(
                "this worker has nothing to apply weights to: pass model=, weights=, load= or "
                "context= to init_on_receiver(), or assign scheme.model after "
                "connect(initial=False)"
            )
        await self.prepare(scheme, model)
        self.link = kept = self._kept_link(scheme)
        try:
            transport, welcome = await kept.connect(timeout)
        except ConnectTimeout as exc:
            raise ConnectTimeout(f"model {self._given.model_id!r}: {exc}") from exc
        self.runtime = receiver = self._make_receiver(scheme, transport, kept)
        receiver.start()
        # Only a weight server sends a note: its weights will come.
        if initial and scheme._subscribes and (welcome.version or welcome.note):
            left = None if ends is None else max(0.0, ends - clock())
            late = self._say_late(scheme, welcome, timeout or 0)
            await receiver.wait_for_first(welcome, timeout=left, late=late)
        none_yet = "" if welcome.version or receiver.version else ", which has no weights yet"
        scheme._life.log("joined", f"joined the trainer{none_yet}", receiver.version)
        lacks = self._given.lacks() if scheme.apply == "auto" else None
        # The model may come late, or its name may be wrong.
        if lacks is not None:
            warnings.warn(
                f"{lacks}: updates wait until there is one, or until scheme.model is set",
                stacklevel=2,
            )

    def _make_receiver(
        self, scheme: WeightSyncScheme, transport: Transport, kept: KeptLink[Transport, Welcome]
    ) -> WeightReceiver:
        """Return the receiver of a new link, with the options of the scheme."""
        # Only streams can be restored.
        lasting = getattr(scheme, "reconnect", 0.0) if scheme._gives_up else None
        return WeightReceiver(
            transport,
            resolve=self._given.target,
            apply=scheme.apply,
            copy=scheme.apply_copy or self._given.loader is not None,
            strict=scheme.strict and scheme._strictly,
            buffers=scheme.buffers,
            guard=self._guard,
            install_hooks=scheme.guard == "forward",
            methods=self._methods,
            flipped=self.hooks.at_once,
            after_apply=functools.partial(self._after_apply, scheme),
            before_apply=self.hooks.before_apply,
            transform=self._transform,
            trainer=None if self.pipe is not None or lasting == 0 else kept,
            lasting=lasting,
            promises=scheme._promises,
            outage=self._outage,
            meter=scheme._life.meter,
            log=scheme._life.log,
        )

    def _say_late(
        self, scheme: WeightSyncScheme, welcome: Welcome, seconds: float
    ) -> ConnectTimeout:
        """Return the error for initial weights that do not arrive; log that a server has none."""
        name, note = self._given.model_id, f"; {welcome.note}" if welcome.note else ""
        late = "the initial weights did not arrive"
        if not welcome.version:
            late = f"the weight server got no version of {name!r}"
            scheme._life.log("waiting", f"the weight server has no version yet{note}")
        return ConnectTimeout(f"model {name!r}: {late} within {seconds:g} s{note}")

    async def prepare(self, scheme: WeightSyncScheme, model: Any) -> None:
        """Let a hook prepare the model, before any update is received."""
        # The model may be the context's, which was not checked before.
        if isinstance(model, nn.Module):
            self.check(scheme, model)
        if self.hooks.prepare_model is not None:
            await run_hook(self.hooks.prepare_model, model)

    def _kept_link(self, scheme: WeightSyncScheme) -> KeptLink[Transport, Welcome]:
        async def reach(left: Left, again: bool) -> Transport:
            if self.pipe is not None:
                return scheme.create_transport(self.pipe)
            return await scheme._dial_trainer(left, again)

        stranger = ""

        def final(error: AiosyncError) -> bool:
            nonlocal stranger
            if isinstance(error, RemoteProtocolError) and str(error) != stranger:
                # Attempts go on, perhaps while no call waits for them: log this once.
                stranger = str(error)
                text = f"who answers is no trainer: {stranger}"
                scheme._life.log("waiting", text, level=logging.WARNING)
            return self.pipe is not None or scheme._is_final(error)

        return KeptLink(
            "the trainer",
            reach,
            functools.partial(self._greet, scheme),
            nobody=scheme._nobody,
            final=final if scheme._gives_up else None,
            pauses=Backoff(longest=scheme._longest_pause),
        )

    async def _greet(
        self, scheme: WeightSyncScheme, link: Transport, timeout: float | None
    ) -> Welcome:
        """Make the handshake on a link, and return the trainer's answer."""
        receiver = self.runtime
        epoch, version = (None, 0) if receiver is None else receiver.held
        partial = (None if receiver is None else receiver.updates.partial) or (None, None, 0)
        hello = Hello(
            role="receiver",
            model_id=self._given.model_id or "policy",
            pid=os.getpid(),
            worker_idx=scheme._life.worker_idx,
            strategy=scheme.strategy_str,
            has_target=self._given.target() is not None and scheme.apply == "auto",
            epoch=epoch if version else None,
            version=version or None,
            session=self._session,
            subscribe=scheme._subscribes,
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
            # A new trainer may have given the index to another worker.
            scheme._life.worker_idx = None
            raise Refused(str(exc)) from exc
        self._idx_chosen = self._idx_chosen or scheme._life.worker_idx is None
        scheme._life.worker_idx = welcome.worker_idx
        return welcome

    def awaited(self) -> str:
        """Return a text that says what ``connect()`` waits for."""
        if self.runtime is not None or self.link is None:
            return "the initial weights have not arrived"
        return self.link.describe()

    def have(self) -> str:
        """Return a text with the model's version, for a call that waits for another one."""
        assert self.runtime is not None
        lost = self.runtime.lost
        also = "" if lost is None else f", and the link was lost: {lost}"
        return f"the model has version {self.runtime.version}{also}"

    def abort_links(self) -> None:
        """End the link to the trainer, dialled or given."""
        for each in (self.pipe, self.link):
            if isinstance(each, Transport | KeptLink):
                each.abort()

    # -- hooks on the way of an update ----------------------------------------------------------

    def _after_apply(self, scheme: WeightSyncScheme) -> AfterApply | None:
        """Return the function to await before the trainer is told: a hook, the context's, both."""
        hook = self.hooks.awaited
        if self._given.context_ref is None or not scheme._cascades:
            return hook
        if not callable(getattr(self._given.context, "update_policy_weights_", None)):
            return hook

        async def run(epoch: int, version: int) -> None:
            if hook is not None:
                await hook(epoch, version)
            await self._cascade(scheme)

        return run

    async def _cascade(self, scheme: WeightSyncScheme) -> None:
        """Have the context pass a version on, as TorchRL's does to the collectors below it."""
        update = getattr(self._given.context, "update_policy_weights_", None)
        if update is None:
            return

        def call() -> Any:
            return update(policy_or_weights=scheme.weights, model_id=self._given.model_id)

        if inspect.iscoroutinefunction(update):
            async with scheme.reading():
                await call()
        else:
            # The method blocks, perhaps for this very loop.
            await in_thread(scheme.guarded(call))
