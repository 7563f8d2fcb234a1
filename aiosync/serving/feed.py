"""The weight feed: receives updates in a server and switches the weights under the server's gate.

Must not import a web framework, nor a concrete scheme.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import math
import time
import weakref
from typing import TYPE_CHECKING, Any, Self

from aiosync._repr import text_of
from aiosync._tasks import TaskOwner, WorkerThread, running_loop
from aiosync.errors import ApplyError, ConfigError, LocalProtocolError, SwapTimeout, SyncTimeout
from aiosync.protocol import as_count, validate_seconds
from aiosync.receiver.scheme_hooks import SchemeHooks
from aiosync.schemes import NoWeightSyncScheme, WeightSyncScheme
from aiosync.schemes.internal import follow, life_of, link_to_trainer
from aiosync.serving.gate import Admission, AdmissionGate, Swap
from aiosync.serving.status import Cause, Ended, FeedStatus, causes_of, is_connected, status_of

if TYPE_CHECKING:
    from aiosync.events import Observer, SyncStats
    from aiosync.receiver.applier import Applier
    from aiosync.receiver.receiver import WeightReceiver
    from aiosync.receiver.transformer import Transform
    from aiosync.schemes import Ready
    from aiosync.tensors.apply import Loader

__all__ = ["WeightFeed"]

_FIRST_PAUSE_SECONDS = 0.05
_CLOSE_SECONDS = 4.0
_POLL_SECONDS = 0.1

# The feed that sets the version of a gate, of which there is one.
_running = weakref.WeakKeyDictionary[AdmissionGate, "weakref.ref[WeightFeed]"]()


class WeightFeed:
    """Receiver for a server that keeps the server's model on the newest version.

    Updates arrive in the background, on the server's own event loop. Only when an update is
    complete and verified does the feed switch to it, under the gate. When the source is lost, the
    server goes on with the version that it has; :attr:`status` says so, and the feed dials the
    source until it answers.

    ::

        feed = WeightFeed(aiosync.TCPWeightSyncScheme("tcp://trainer:5555"), model=model)
        async with feed:                      # does not wait for the trainer
            await feed.ready                  # but this does
            async with feed.request() as version:
                answer = model(observation)

    The feed belongs to the event loop that it was started on; it is not thread-safe.

    Args:
        scheme: A scheme without a role, which says how to reach the source. The feed works on
            copies of it, with ``apply="manual"`` and, over streams, ``reconnect=None``.
        model: Module to keep up to date.
        weights: TensorDict or dict of tensors to keep up to date instead.
        load: Function that loads versions, instead; see
            :meth:`aiosync.WeightSyncScheme.init_on_receiver`. It runs in a thread of its own,
            while the gate keeps requests out.
        transform: Function that changes updates before they are applied or loaded; see
            :meth:`aiosync.WeightSyncScheme.init_on_receiver`.
        model_id: Name of the model, as the sender calls it.
        worker_idx: Index of this server among the workers; ``None`` lets the sender choose.
        gate: The gate, which no other running feed has; ``None`` makes a new one.
        max_pause: Longest time between two attempts to reach the source, in seconds.
        min_version: The lowest version, of any epoch, that the feed has to have before it answers
            requests. ``None`` takes the newest version that the source has when the feed first
            reaches it, so that a new server is no further behind than the running ones. The rule
            holds after each :meth:`start`, and not after a source that is lost later. Until the
            source is reached, a model with a version from before answers with that version.

    Raises:
        ConfigError: The arguments exclude each other, or the scheme already has a role.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        *,
        model: Any = None,
        weights: Any = None,
        load: Loader | None = None,
        transform: Transform | None = None,
        model_id: str | None = None,
        worker_idx: int | None = None,
        gate: AdmissionGate | None = None,
        max_pause: float = 5.0,
        min_version: int | None = None,
    ) -> None:
        _check_scheme(scheme)
        if sum(each is not None for each in (model, weights, load)) != 1:
            raise ConfigError("a feed needs exactly one of model, weights and load")
        validate_seconds("max_pause", max_pause, endless=True)
        if min_version is not None:
            as_count("min_version", min_version, 1)
        self.gate: AdmissionGate = AdmissionGate() if gate is None else gate
        self.min_version = min_version
        self.max_pause = max_pause
        self._init: dict[str, Any] = {
            "model": model,
            "weights": weights,
            "load": load,
            "transform": transform,
            "model_id": model_id,
            "worker_idx": worker_idx,
        }
        self._config = copy.copy(scheme)
        # Only a change of pointers is quick enough to run on the event loop.
        self._in_thread = model is None or scheme.apply_copy or not scheme.strict
        # Number of calls of start() without their aclose().
        self._num_starts = 0
        # The switch that is under way: a load that outlasts its run ends in its own switch.
        self._swap: Swap | None = None
        # Time of the last switch of any run, as the model keeps its weights.
        self._activated_at: float | None = None
        self._reset()  # so that wrong arguments raise here and not in start()
        self._scheme.abort()

    def _reset(self) -> None:
        """Make the state of one run: a copy of the scheme, a thread and a task owner."""
        self._scheme = copy.copy(self._config)
        # The counts and the observers are those of the feed, and outlive its runs.
        life_of(self._scheme).meter = life_of(self._config).meter
        self._scheme.apply = "manual"
        follow(self._scheme, longest_pause=self.max_pause)
        applied = functools.partial(self._on_flip, self._scheme)
        self._scheme.init_on_receiver(**self._init, hooks=SchemeHooks(applied=applied))
        self._thread = WorkerThread("aiosync-apply")
        self._tasks = TaskOwner(self._on_crash)
        self._receiver: WeightReceiver | None = None  # it survives the loss of a link
        self._crash: BaseException | None = None  # the error that ended the feed, if any
        # Since when, and why, the newest version waits for the gate.
        self._blocked: Cause | None = None
        self._apart_since = time.monotonic()  # since when there is no receiver

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to receive in the background, without waiting for the source.

        Calls are counted: each needs its own :meth:`aclose`, and the last one ends the feed. It
        may then be started again.

        Raises:
            ConfigError: Another feed that is running has this gate.
            LocalProtocolError: No asyncio loop runs here; the call is not counted.
        """
        if self._num_starts:
            self._num_starts += 1
            return
        other = _running.get(self.gate, lambda: None)()
        if other not in (None, self) and other._num_starts:
            raise ConfigError(
                "the gate has another feed, and one version: give each feed a gate of its own"
            )
        self._loop = running_loop()
        self._reset()
        self.gate.require(self.min_version or 0)
        # A call that raises is not counted, as its caller owes no aclose().
        self._num_starts, _running[self.gate] = 1, weakref.ref(self)
        self._tasks.start(self._run(), "aiosync weight feed")

    async def aclose(self) -> None:
        """Stop the feed, unless another :meth:`start` is still active.

        The call takes a bounded time; the model keeps its weights.
        """
        if self._num_starts == 0:
            return
        self._num_starts -= 1
        if self._num_starts == 0:
            # While this waits, start() may begin another run.
            tasks, thread = self._tasks, self._thread
            try:
                await tasks.aclose()
            finally:
                thread.close(patience=_CLOSE_SECONDS)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # -- state ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version that requests are answered with; 0 before the first."""
        return self.gate.version

    @property
    def epoch(self) -> int | None:
        """Epoch of :attr:`version`."""
        return self.gate.epoch

    @property
    def lag(self) -> int:
        """Number of versions by which :attr:`version` is behind the newest known version.

        If the newest version is of another epoch, all versions of that epoch count. It is 0 while
        no source is reached, because no newer version is known then: see :attr:`status`.
        """
        receiver = self._receiver
        if receiver is None:
            return 0
        inbox = receiver.ledger.inbox
        if inbox.newest_epoch != self.gate.epoch:
            return inbox.newest
        return max(inbox.newest - self.gate.version, 0)

    @property
    def ready(self) -> Ready:
        """Condition that the feed has a version to answer with; true or false, and awaitable."""
        return self.gate.ready

    def request(
        self, *, min_version: int = 0, epoch: int | None = None, timeout: float | None = None
    ) -> Admission:
        """Make a request at the feed's gate; see :meth:`AdmissionGate.request`."""
        return self.gate.request(min_version=min_version, epoch=epoch, timeout=timeout)

    def batch(self, *, timeout: float | None = None) -> Admission:
        """Make a batch at the feed's gate; see :meth:`AdmissionGate.batch`."""
        return self.gate.batch(timeout=timeout)

    @property
    def status(self) -> FeedStatus:
        """State of the feed and its link to the source, at this moment."""
        return status_of(
            self.gate,
            self._receiver,
            self._causes() if self._num_starts else [],
            self._activated_at,
            life_of(self._config).meter.reconnects,
            self._ended(),
        )

    def stats(self) -> SyncStats:
        """Return the counts of all runs so far and the present state. Never waits.

        May be called on any thread, also while the feed is not running.
        """
        found, version, at = self._scheme.stats(), self.gate.version, self._activated_at
        if not version or (found.version and self._ended() is None):
            return found
        # The run has brought no version yet, or has ended: the model has the one of the gate.
        return dataclasses.replace(
            found,
            epoch=self.gate.epoch or 0,
            version=version,
            newest_version=found.newest_version or version,
            lag=self.lag,
            age=0.0 if at is None else time.monotonic() - at,
        )

    def add_observer(self, observer: Observer) -> None:
        """Tell an observer of each later version.

        See :meth:`aiosync.WeightSyncScheme.add_observer`. The observer stays for all runs of the
        feed. Observers of the scheme that the feed was given hear nothing, because the feed works
        on copies.

        Args:
            observer: Has ``on_sync(event)``, which gets a :class:`aiosync.SyncEvent`.

        Raises:
            ConfigError: It has no such method.
        """
        self._config.add_observer(observer)

    def _ended(self) -> Ended | None:
        """Return the state and the reason of a feed that is not running; ``None`` if it is."""
        if not self._num_starts:
            return "closed", "the feed is not running: start it with `async with feed`"
        if self._crash is not None:
            return "failed", f"{type(self._crash).__name__}: {self._crash}"
        return ("closed", "its gate was closed") if self.gate.closed else None

    def _causes(self) -> list[Cause]:
        """Return why the feed may not be on the newest version."""
        last = self._last_attempt()
        if (receiver := self._receiver) is None:
            return [(self._apart_since, f"the source was not reached yet{last}")]
        blocked = [] if self._blocked is None else [self._blocked]
        return causes_of(receiver, "the link to the source was lost", last) + blocked

    def _last_attempt(self) -> str:
        """Return the error of the last attempt to reach the source, as the end of a reason."""
        link = None if is_connected(self._receiver) else link_to_trainer(self._scheme)
        why = None if link is None else link.why
        return "" if why is None else f"; the last attempt: {type(why).__name__}: {why}"

    # -- receiving -----------------------------------------------------------------------------

    def _on_crash(self, error: BaseException) -> None:
        # This is a bug, or other code has cancelled a task of the feed.
        self._crash = error
        asyncio.get_running_loop().call_exception_handler(
            {"message": "the weight feed ended with an error", "exception": error}
        )

    async def _run(self) -> None:
        """Connect to the source and follow it until the feed is closed."""
        scheme, receiver = self._scheme, None
        try:
            await scheme.connect(timeout=math.inf, initial=False)
            self._catch_up()
            self._receiver = receiver = life_of(scheme).receiver
            assert receiver is not None
            await self._follow(receiver)
        finally:
            if receiver is not None:
                # Memory that belongs to this process stays the model's. Otherwise the close would
                # copy a large model, which would hold the loop.
                receiver.applier.model.keep_own_memory()
                # A call that outlasts aclose() ends when another run may have begun.
                if self._receiver is receiver:
                    self._receiver, self._apart_since = None, time.monotonic()
            await scheme.aclose()

    def _catch_up(self, epoch: int | None = None) -> None:
        """Have requests wait until the feed has the version that its source had at the handshake.

        Does nothing if the user gave a ``min_version``.

        Args:
            epoch: Epoch of the version that is about to be used; ``None`` before any. If the source
                had another epoch at the handshake, a new trainer has come since, behind a weight
                server: then requests wait for no version.
        """
        link = link_to_trainer(self._scheme)
        answer = None if link is None else link.answer
        if self.min_version is None and answer is not None:
            known = epoch in (None, answer.epoch)
            self.gate.require(answer.version if known else 0, answer.epoch if known else None)

    async def _follow(self, receiver: WeightReceiver) -> None:
        """Switch to each staged version; after a refusal or a late gate try the next one."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            await receiver.waits.wait_until(
                lambda: receiver.applier.has_staged, timeout=None, late=SwapTimeout("never")
            )
            try:
                await self._switch(receiver)
            except LocalProtocolError:
                if not self.gate.closed:
                    raise
                return  # the server shuts down: leave the source
            except ApplyError:
                self._blocked = None  # the receiver itself reports the refused version
            except SwapTimeout as exc:
                self._note_blocked(receiver.applier.staged_version, exc)
                # The pause lets requests in for longer than the attempt kept them waiting.
                pause = min(2 * pause, self.max_pause)
                await asyncio.sleep(max(pause, 2 * (self.gate.swap_timeout or 0.0)))
            else:
                self._blocked = None
                pause = _FIRST_PAUSE_SECONDS

    def _note_blocked(self, version: int, error: SwapTimeout) -> None:
        """Register why the staged version waits, and since when a version has had to wait."""
        since = time.monotonic() if self._blocked is None else self._blocked[0]
        self._blocked = (since, f"version {version} waits to be switched to: {error}")

    async def _switch(self, receiver: WeightReceiver) -> None:
        """Apply the staged update while the gate keeps requests out, and raise why it was not."""
        async with self.gate.swap() as self._swap:
            self._swap.version = self.gate.version  # the gate keeps it unless _activate() is called
            try:
                await self._apply(receiver.applier)
            finally:
                self._swap = None

    async def _apply(self, applier: Applier) -> None:
        """Apply the staged update: on the loop if that is quick, or else in the feed's thread.

        The thread also applies an update that has to wait for a forward in another thread.

        Raises:
            ApplyError: The update was refused, or a function of the user's raised.
            SwapTimeout: A forward in another thread did not end in time.
        """
        limit = self.gate.swap_timeout or math.inf
        if not self._in_thread and applier.is_quick and self._apply_on_loop(applier):
            return
        late, thread = time.monotonic() + limit, self._thread

        def apply() -> None:
            # A feed that is being closed waits for no forward, also if it was started again.
            while self._num_starts and self._thread is thread:
                try:
                    applier.apply_pending(patience=min(limit, _POLL_SECONDS))
                    return
                except SyncTimeout as exc:
                    if time.monotonic() >= late:
                        text = f"a forward pass in another thread went on for {limit:g} s"
                        raise SwapTimeout(text) from exc
                except Exception:  # _follow() handles it
                    raise
                except BaseException as exc:  # a SystemExit of the user's must not end the program
                    raise ApplyError(f"{type(exc).__name__} was raised: {text_of(exc)}") from exc

        # An apply that has begun must end: no request may compute on weights half in place.
        await thread.run(apply, patience=None)

    def _apply_on_loop(self, applier: Applier) -> bool:
        """Apply the staged update here; return False if the feed's thread has to go on with it."""
        try:
            applier.apply_pending()
        except SyncTimeout:  # a forward in another thread is running: wait in the thread
            return False
        except BaseException as exc:  # noqa: BLE001 - interrupt_loop() raises or passes it on
            applier.turns.interrupt_loop(exc)  # if it returns, the thread applies the rest
            return False
        return True

    def _on_flip(self, scheme: WeightSyncScheme, epoch: int, version: int) -> None:
        """Activate the version that the model now has at the gate. Called on any thread.

        It is called before the trainer gets its ack, so the gate never knows less than the trainer.
        """
        if asyncio._get_running_loop() is self._loop:
            self._activate(scheme, epoch, version)
        else:
            self._loop.call_soon_threadsafe(self._activate, scheme, epoch, version)

    def _activate(self, scheme: WeightSyncScheme, epoch: int, version: int) -> None:
        """Have the gate serve the version that the switch under way has put into the model."""
        if self._swap is None:
            return  # the feed was closed, or a forward completed an apply that was interrupted
        # The version may be from another trainer than at the handshake. One of an earlier run says
        # nothing about the source that this run has reached.
        if self.gate.waits_for and scheme is self._scheme:
            self._catch_up(epoch)
        self._swap.activate(version, epoch)
        self._activated_at = time.monotonic()


def _check_scheme(scheme: object) -> None:
    """Refuse an object that is no scheme for a feed, and a scheme that has a role already.

    Raises:
        ConfigError: The scheme cannot be used.
    """
    if not isinstance(scheme, WeightSyncScheme) or isinstance(scheme, NoWeightSyncScheme):
        raise ConfigError(
            "a feed runs on an event loop and needs an async scheme that receives weights, "
            "such as aiosync.TCPWeightSyncScheme, not "
            f"{type(scheme).__module__}.{type(scheme).__name__}"
        )
    if scheme.initialized_on_sender or scheme.initialized_on_receiver:
        raise ConfigError(
            "a feed initialises its scheme itself: pass a scheme that has not been initialised"
        )
    if not getattr(scheme, "subscribe", True):
        raise ConfigError("a feed asks for no version: pass a scheme without subscribe=False")
