"""Role of a scheme in a worker, which receives weights. Must not import a concrete scheme."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import logging
import os
import secrets
import warnings
from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from aiosync._tasks import run_on_loop
from aiosync.errors import AiosyncError, ConfigError, ConnectTimeout, RemoteProtocolError
from aiosync.protocol import as_names, validate_seconds
from aiosync.receiver.copies import passing_on
from aiosync.receiver.forwards import why_unguarded
from aiosync.receiver.outage import OnLost, Outage
from aiosync.receiver.reads import Methods
from aiosync.receiver.receiver import WeightReceiver
from aiosync.receiver.scheme_hooks import AfterApply, SchemeHooks, in_thread, run_hook
from aiosync.receiver.transformer import Transform
from aiosync.receiver.waits import VersionWaits
from aiosync.rendezvous.dialer import Backoff, KeptLink, Left
from aiosync.rendezvous.handshake import Refused, greet
from aiosync.schemes.fabric import Fabric
from aiosync.schemes.lifecycle import ConnectArguments, Life
from aiosync.schemes.options import refuse
from aiosync.schemes.properties import SchemeState
from aiosync.tensors.apply import Loader, Strict
from aiosync.tensors.walk import is_nested
from aiosync.transports.base import Transport
from aiosync.wire import Hello, Welcome

__all__ = ["Worker", "WorkerTerms"]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerTerms:
    """Terms that integrations set for a scheme's workers, beside its options; pickled with it.

    Attributes:
        hooks: Hooks of workers that are given no such hooks.
        strict: The strictness that ``strict=True`` asks for.
        cascades: True if a context is asked to pass versions on.
        ranked: True if the integration names workers by their ranks, from 1.
        gives_up: True if a final error, or a lost link that is not restored in time, ends the
            search for a trainer.
        longest_pause: Seconds between two attempts to meet the trainer, instead of the fabric's.
        waits_apply: As for :class:`WeightReceiver`.
    """

    hooks: SchemeHooks = dataclasses.field(default_factory=SchemeHooks)
    strict: Strict = True
    cascades: bool = True
    ranked: bool = False
    gives_up: bool = True
    longest_pause: float | None = None
    waits_apply: bool = True


class Worker:
    """Role of a scheme in a worker.

    Args:
        scheme: The scheme that gets the role.
        life: Its life in this process.
        terms: Terms that integrations set.
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
        terms: As given; may change until the scheme connects.
        hooks: Functions that are called on the way of an update.
        pipe: A connection or a link to the trainer; ``None`` if the scheme finds the trainer.
        runtime: The receiver, once the scheme is connected.
        link: The link to the trainer, once it is dialled.
    """

    role: Final = "receiver"

    def __init__(
        self,
        scheme: SchemeState,
        life: Life,
        terms: WorkerTerms,
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
        target = _target_of(model, weights, load)
        refuse(
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
        self.hooks: SchemeHooks = dataclasses.replace(terms.hooks, **named)
        self.terms: WorkerTerms = terms
        self.pipe: Transport | Any | None = transport if transport is not None else pipe
        self.runtime: WeightReceiver | None = None
        self.link: KeptLink[Transport, Welcome] | None = None
        self._given = life.given
        self._guard = life.guard
        self._methods = None if methods is None else as_names("methods", methods)
        self._transform = transform
        self._outage = Outage(
            on_lost,
            max_staleness,
            guard=self._guard,
            hooks=lambda: self.hooks,
            log=life.log,
        )
        # By this the trainer knows the worker again when it comes back over a new link.
        self._session = secrets.token_bytes(16)
        # True if the trainer chose the index, and not the user.
        self._idx_chosen = False
        self.check(scheme, load if target is None else target)

    @property
    def waits(self) -> VersionWaits:
        """The waits of a connected worker."""
        assert self.runtime is not None
        return self.runtime.waits

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

    def _check_found(self, scheme: SchemeState, model: Any) -> None:
        """Raise if updates could tear a read of a module, which a context may have had or got."""
        if isinstance(model, nn.Module):
            self.check(scheme, model)

    def assign(self, scheme: SchemeState, life: Life, name: str, value: Any) -> None:
        """Set the model, weights or context, and tell the receiver; all of it or nothing."""
        if name != "context":
            self.check(scheme, value)
        given = self._given
        before = copy.copy(given)
        if self.runtime is None or life.closed or life.inherited:
            given.replace(name, value)
            # The loop may have made the receiver meanwhile, which then has to be told.
            if self.runtime is None or life.closed or life.inherited:
                return
        changed = copy.copy(given)
        changed.replace(name, value)
        chosen = functools.partial(given.replace, name, value)
        use = functools.partial(self.runtime.applier.use_model, changed.target(), chosen)
        try:
            run_on_loop(life.loop, use)
        except BaseException:  # raised again for the caller, for whom nothing has changed
            vars(given).update(vars(before))
            raise

    # -- the trainer ---------------------------------------------------------------------------

    async def connect(
        self,
        scheme: SchemeState,
        life: Life,
        fabric: Fabric[Any],
        timeout: float | None,
        arguments: ConnectArguments,
    ) -> None:
        """Meet the trainer, and apply the initial weights."""
        clock = asyncio.get_running_loop().time
        began = clock()
        model, initial = self._given.target(), arguments.initial
        if initial:
            self._check_target(model)
        await self._prepare_in_time(scheme, model, timeout)
        self.link = kept = self._kept_link(scheme, life, fabric)
        try:
            transport, welcome = await kept.connect(timeout, spent=clock() - began)
        except ConnectTimeout as exc:
            raise ConnectTimeout(f"model {self._given.model_id!r}: {exc}") from exc
        self.runtime = receiver = self._make_receiver(scheme, life, fabric, transport, kept)
        receiver.start()
        # A worker that does not subscribe gets no version before its first pull().
        if initial and fabric.subscribes(scheme):
            await self._wait_for_first(life, welcome, timeout, spent=clock() - began)
        none_yet = "" if welcome.version or receiver.version else ", which has no weights yet"
        life.log("joined", f"joined the trainer{none_yet}", receiver.version)
        if scheme.apply == "auto":
            self._warn_without_model()

    async def _prepare_in_time(
        self, scheme: SchemeState, model: Any, timeout: float | None
    ) -> None:
        """Await :meth:`prepare`; raise ConnectTimeout if that takes too long."""
        try:
            async with asyncio.timeout(timeout) as limit:
                await self.prepare(scheme, model)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            hook = f"the prepare_model hook did not end within {timeout:g} s"
            raise ConnectTimeout(f"model {self._given.model_id!r}: {hook}") from exc

    def _warn_without_model(self) -> None:
        """Warn if the context has no model: it may come late, or its name may be wrong."""
        lacks = self._given.lacks()
        if lacks is not None:
            warnings.warn(
                f"{lacks}: updates wait until there is one, or until scheme.model is set",
                stacklevel=3,
            )

    def _check_target(self, model: Any) -> None:
        """Raise if there is nothing to apply the initial weights to, now or later."""
        if model is None and self._given.context_ref is None:
            raise ConfigError(
                "this worker has nothing to apply weights to: pass model=, weights=, load= or "
                "context= to init_on_receiver(), or assign scheme.model after "
                "connect(initial=False)"
            )

    def _make_receiver(
        self,
        scheme: SchemeState,
        life: Life,
        fabric: Fabric[Any],
        transport: Transport,
        kept: KeptLink[Transport, Welcome],
    ) -> WeightReceiver:
        """Return the receiver of a new link, with the options of the scheme."""
        # Seconds to restore a lost link; ``None`` for ever. Only streams can be restored: other
        # schemes have no such option.
        lasting = getattr(scheme, "reconnect", 0.0) if self.terms.gives_up else None
        self._outage.subscribes = fabric.subscribes(scheme)
        return WeightReceiver(
            transport,
            resolve=self._given.target,
            apply=scheme.apply,
            copy=scheme.apply_copy or fabric.copies(scheme) or self._given.loader is not None,
            strict=scheme.strict and self.terms.strict,
            buffers=scheme.buffers,
            guard=self._guard,
            install_hooks=scheme.guard == "forward",
            methods=self._methods,
            check_model=functools.partial(self._check_found, scheme),
            flipped=self.hooks.at_once,
            after_apply=functools.partial(self._make_after_apply, scheme),
            before_apply=self.hooks.before_apply,
            transform=self._transform,
            reconnect=None
            if self.pipe is not None or lasting == 0
            else functools.partial(kept.reconnect, seconds=lasting),
            takes_deltas=fabric.takes_deltas(scheme),
            promises=fabric.promises,
            waits_apply=self.terms.waits_apply,
            outage=self._outage,
            meter=life.meter,
            log=life.log,
        )

    async def _wait_for_first(
        self, life: Life, welcome: Welcome, timeout: float | None, *, spent: float
    ) -> None:
        """Wait for the first version, if the trainer has one or will have one."""
        # Only a weight server sends a note: its weights will come.
        if welcome.version or welcome.note:
            left = None if timeout is None else max(0.0, timeout - spent)
            late = self._say_late(life, welcome, timeout or 0)
            await self.waits.wait_for_first(welcome, timeout=left, late=late)

    def _say_late(self, life: Life, welcome: Welcome, seconds: float) -> ConnectTimeout:
        """Return the error for initial weights that do not arrive; log that a server has none."""
        name, note = self._given.model_id, f"; {welcome.note}" if welcome.note else ""
        late = "the initial weights did not arrive"
        if not welcome.version:
            late = f"the weight server got no version of {name!r}"
            life.log("waiting", f"the weight server has no version yet{note}")
        return ConnectTimeout(f"model {name!r}: {late} within {seconds:g} s{note}")

    async def prepare(self, scheme: SchemeState, model: Any) -> None:
        """Check the model, and let a hook prepare it, before any update is received."""
        # The model may be the context's, which was not checked before.
        self._check_found(scheme, model)
        if self.hooks.prepare_model is not None:
            await run_hook(self.hooks.prepare_model, model)

    def _kept_link(
        self, scheme: SchemeState, life: Life, fabric: Fabric[Any]
    ) -> KeptLink[Transport, Welcome]:
        """Make the link that is dialled until the trainer admits this worker, and after a loss."""
        terms = self.terms

        pipe = self.pipe

        async def wrap(left: Left, is_redial: bool) -> Transport:
            assert pipe is not None
            return fabric.wrap(scheme, pipe)

        logged = ""

        def log_stranger_once(error: AiosyncError) -> None:
            nonlocal logged
            if isinstance(error, RemoteProtocolError) and str(error) != logged:
                # Attempts go on, perhaps while no call waits for them, so no call may report this.
                logged = str(error)
                text = f"who answers is no trainer: {logged}"
                life.log("waiting", text, level=logging.WARNING)

        def on_failure(error: AiosyncError) -> None:
            if self.runtime is not None:
                self._outage.fail_attempt(error)
            elif terms.gives_up:
                log_stranger_once(error)

        def final(error: AiosyncError) -> bool:
            # There is only one connection that the user gave.
            return self.pipe is not None or not fabric.may_retry(error)

        return KeptLink(
            "the trainer",
            fabric.dials(scheme) if pipe is None else {"": wrap},
            functools.partial(self._greet, scheme, life, fabric),
            not_reached_text=functools.partial(fabric.not_reached_text, scheme),
            final=final if terms.gives_up else None,
            on_failure=on_failure,
            pauses=Backoff(longest=terms.longest_pause or fabric.longest_pause),
            dial_named=functools.partial(fabric.dial_named, scheme) if fabric.follows else None,
        )

    async def _greet(
        self,
        scheme: SchemeState,
        life: Life,
        fabric: Fabric[Any],
        link: Transport,
        timeout: float | None,
    ) -> Welcome:
        """Make the handshake on a link, and return the trainer's answer."""
        hello = self._hello(scheme, life, fabric, link)
        try:
            welcome = await greet(link, hello, timeout=timeout)
        except (ConfigError, Refused) as exc:
            if not self._idx_chosen:
                raise
            # A new trainer, or another server, may have given the index to another worker: the next
            # attempt asks for no index.
            life.worker_idx = None
            if isinstance(exc, Refused):
                raise
            raise Refused(str(exc)) from exc
        self._idx_chosen = self._idx_chosen or life.worker_idx is None
        life.worker_idx = welcome.worker_idx
        return welcome

    def _hello(
        self, scheme: SchemeState, life: Life, fabric: Fabric[Any], link: Transport
    ) -> Hello:
        """Return the message that says which versions this worker has, whole or in part."""
        receiver = self.runtime
        epoch, version = (None, 0) if receiver is None else receiver.ledger.held
        # Once it runs, its own target: a context may raise at this very moment.
        target = self._given.target() if receiver is None else receiver.applier.model.target
        partial = (receiver and receiver.updates.partial) or (None, None, 0, b"")
        return Hello(
            role="receiver",
            model_id=self._given.model_id or "policy",
            pid=os.getpid(),
            worker_idx=life.worker_idx,
            strategy=scheme.strategy_str,
            has_target=target is not None and scheme.apply == "auto",
            epoch=epoch if version else None,
            version=version or None,
            session=self._session,
            subscribe=fabric.subscribes(scheme),
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
            partial_digest=partial[3],
            slots=link.slots is not None,
            follows=self.link is not None and self.link.follows,
        )

    def awaited(self) -> str:
        """Return a text that says what ``connect()`` waits for."""
        if self.runtime is not None or self.link is None:
            return "the initial weights have not arrived"
        return self.link.describe()

    def versions_text(self) -> str:
        """Return the model's version as text, for the log of a call that waits long for another."""
        assert self.runtime is not None
        lost = self.runtime.outage.lost_link
        also = "" if lost is None else f", and the link was lost: {lost}"
        return f"the model has version {self.runtime.version}{also}"

    def abort_links(self) -> None:
        """End the link to the trainer, dialled or given."""
        for each in (self.pipe, self.link):
            if isinstance(each, Transport | KeptLink):
                each.abort()

    # -- hooks on the way of an update ----------------------------------------------------------

    def _make_after_apply(self, scheme: SchemeState) -> AfterApply | None:
        """Return the function to await before the trainer is told of a version; ``None`` for none.

        It calls the hook, or has the context pass the version on, or both.
        """
        hook = self.hooks.awaited
        if self._given.context_ref is None or not self.terms.cascades:
            return hook
        if not callable(getattr(self._given.context, "update_policy_weights_", None)):
            return hook

        async def run(epoch: int, version: int) -> None:
            if hook is not None:
                await hook(epoch, version)
            await self._cascade(scheme)

        return run

    async def _cascade(self, scheme: SchemeState) -> None:
        """Have the context pass a version on, as TorchRL's does to the collectors below it."""
        update = getattr(self._given.context, "update_policy_weights_", None)
        if update is None:
            return

        @passing_on()
        def call() -> Any:
            return update(policy_or_weights=scheme.weights, model_id=self._given.model_id)

        if inspect.iscoroutinefunction(update):
            async with scheme.reading():
                with passing_on():
                    await call()
        else:
            # The method blocks, perhaps for this very loop.
            await in_thread(scheme.guarded(call))


def _target_of(model: Any, weights: Any, load: Loader | None) -> Any:
    """Return the target that was given, or ``None``; raise if it is none, or one of several."""
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
    )
    return target
