"""The worker's runtime: a link, the reader of the updates that arrive over it, and the applier.

A background task stages updates; they are applied under the guard, on the loop or the thread of a
forward, or by ``apply_pending()``. The last answer to the trainer about an update is its state:

=========  ===================================================================================
RECEIVED   every byte is here: it is transformed, waits for the model, or is passed on
APPLIED    the model has it, and an async hook has ended
NACK       the transform, the model or a hook refused it; that is final
SKIPPED    a newer one took its place while it waited; that is final, too
=========  ===================================================================================

A version that a word of shared memory names may need no answer, see ``receiver.promise``. Must not
import the sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias

from aiosync._log import LOGGER
from aiosync._meter import Meter
from aiosync._tasks import Newest, Notifier, TaskOwner
from aiosync.errors import (
    AiosyncError,
    LocalProtocolError,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    StaleVersion,
    SyncTimeout,
    TransportClosed,
)
from aiosync.events import SyncStats
from aiosync.protocol import Inbox
from aiosync.receiver.answers import Outgoing
from aiosync.receiver.applier import Applier, Refusal, not_applied
from aiosync.receiver.guard import Guard
from aiosync.receiver.outage import Outage
from aiosync.receiver.promise import ReadPromise
from aiosync.receiver.reads import is_held_by_caller
from aiosync.receiver.scheme_hooks import AfterApply
from aiosync.receiver.transformer import Transform, Transformer
from aiosync.receiver.update_reader import Staged, UpdateReader
from aiosync.rendezvous.dialer import KeptLink
from aiosync.tensors.apply import BufferChoice, Strict
from aiosync.transports.base import Received, Transport, make_ack, without_frames
from aiosync.types import AckStatus
from aiosync.wire import Current, Fetch, Leave, ManifestMessage, Promise, Take, Update, Welcome

__all__ = ["WeightReceiver"]

Context: TypeAlias = "contextlib.AbstractContextManager[None]"
_SILENT: Context = contextlib.nullcontext()
_Answer: TypeAlias = "tuple[int, int, AckStatus, BaseException | None]"

_CLOSE_SECONDS = 1.0
_BELL_SECONDS = 0.001


class WeightReceiver:
    """Receives versions of one model and puts them into it.

    Made by a scheme's ``connect()``. Belongs to one event loop; ``apply_pending()`` and the guard
    may be used from any thread.

    Args:
        transport: The link; owned from now on.
        resolve: As for :class:`Applier`, like what follows up to ``flipped``, and ``meter``.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        after_apply: Asked at each update for the function to await before the trainer is told.
        before_apply: Called on the loop before an update is applied; refuses it if it raises.
        transform: Turns an update, in a thread, into the weights that the model wants.
        trainer: Dials the next link after a lost one; ``None`` if a lost link is the end.
        lasting: Seconds for which another link is looked for; ``None`` for ever.
        promises: Over shared memory, forwards may take new versions before the trainer hears.
        outage: Decides what reads do without a trainer.
        log: Called with an event in a word, a sentence, the version and the level.

    Attributes:
        updates, applier: The reader of arriving updates, and the applier, which has the model.
        meter, outage: As given.
        lost: The error that ended the last link, while another one is looked for.
        error: The error after which nothing more will arrive.
        refused: The model's last refusal of a version of this trainer.
        progress: Number of parts of updates, and of answers, that arrived.
        reported: Epoch and version that :meth:`receive` reported last.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        resolve: Callable[[], Any],
        apply: Literal["auto", "manual"],
        copy: bool,
        strict: Strict,
        buffers: BufferChoice,
        guard: Guard,
        install_hooks: bool,
        methods: Sequence[str] | None = (),
        flipped: Callable[[int, int], object] | None = None,
        after_apply: Callable[[], AfterApply | None] = lambda: None,
        before_apply: Callable[[int, int], object] | None = None,
        transform: Transform | None = None,
        trainer: KeptLink[Transport, Welcome] | None = None,
        lasting: float | None = None,
        promises: bool = True,
        outage: Outage,
        meter: Meter,
        log: Callable[..., None] = lambda *told: None,
    ) -> None:
        self.transport: Transport = transport
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner(self.fail)
        self.updates: UpdateReader = UpdateReader()
        self.updates.use_link(transport)
        self._outgoing = Outgoing(transport, self._tasks)
        self._told: _Answer = (0, 0, AckStatus.SKIPPED, None)  # last, of the newest version
        self._wanted: list[int] = []  # least versions that pull() wants and that have not come
        self._coming: tuple[int, int] | None = None  # announced epoch and version
        self._num_answers = 0  # number of answers to pull()
        self._transformer: Transformer | None = None
        if transform is not None or before_apply is not None:
            self._transformer = Transformer(transform, before_apply, self._tasks, self._transformed)
        self.guard: Guard = guard
        self._promise = ReadPromise(
            guard,
            say=self._outgoing.say,
            offer=self._promise_next,
            allowed=promises and self._transformer is None,
        )
        self.applier: Applier = Applier(
            self.updates,
            report=self.report,
            log=functools.partial(log, "methods"),
            changed=lambda: self._changed.notify(),
            hears_of=self._hears_of,
            withdraw_promise=self._promise.withdraw,
            fail=self.fail,
            resolve=resolve,
            manual=apply == "manual",
            copy=copy,
            strict=strict,
            buffers=buffers,
            guard=guard,
            install_hooks=install_hooks,
            methods=methods,
            reads_words=self._transformer is None,
            flipped=flipped,
            meter=meter,
        )
        self.meter: Meter = meter
        self.inbox: Inbox = self.applier.inbox
        self._after_apply = after_apply
        self._trainer = trainer
        self._lasting = lasting
        self._log = log
        self.refused: Refusal | None = None
        self._to_pass_on: Newest[tuple[AfterApply, int, int]]
        self._to_pass_on = Newest(self._pass_on, self._tasks, "aiosync applied hook")
        self._passed_on: tuple[int | None, int] = (None, 0)
        self.lost: AiosyncError | None = None
        self.outage: Outage = outage
        self.error: BaseException | None = None
        self._error_traceback: TracebackType | None = None
        self.reconnects: int = 0
        self.progress: int = 0
        self.reported: tuple[int | None, int] = (None, 0)
        self._changed = Notifier()
        self._num_waiting = 0
        self._closed = False

    def start(self) -> None:
        """Guard the model, and begin to receive in the background."""
        self.applier.submit()
        self._tasks.start(self._run(), "aiosync receiver")

    def fail(self, error: BaseException) -> None:
        """Receive nothing more, for this reason; the calls that wait raise it."""
        if self.error is None and not self._closed:
            self.error = without_frames(error)
            self._error_traceback = error.__traceback__
            self.transport.abort()  # the sender sees it at once
        self._changed.notify()

    # -- the link ------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            outage = self.outage
            await outage.begin_link()
            try:
                self.transport.subscribe(self._on_message)
                while True:
                    self._on_message(await self.transport.recv(into=self.updates.lender))
            except AiosyncError as exc:
                lost = self.lost = without_frames(exc)
            if self._closed:
                return
            outage.end_link(lost, self.inbox.version, self._trainer is None, self._changed.notify)
            if self._trainer is None:
                await outage.give_up(lost)
                self.fail(lost)
                return
            self.transport.abort()
            try:
                link, welcome = await self._trainer.reconnect(lost, self._lasting, self.progress)
            except AiosyncError as exc:
                self.lost = without_frames(exc)
                held = f"the model keeps version {self.inbox.version}"
                self._log("gave up", f"no trainer any more, {held}: {exc}", None, logging.WARNING)
                await outage.give_up(self.lost)
                self.fail(exc)
                return
            same = welcome.epoch == self.inbox.newest_epoch
            begun = "another trainer answers, or the same one has begun anew"
            told = ("reconnected", "the trainer is reached again") if same else ("restarted", begun)
            self._log(*told)
            if not welcome.version or (same and welcome.version <= self.inbox.newest):
                self.outage.cut_off = None  # this link is of use without a newer version
            slots = self.updates.slots
            if slots is not None and slots.is_behind and self.guard.words is not None:
                # The trainer of the last link counts on the version that it named before the loss.
                await self.guard.wait_free(_CLOSE_SECONDS)
                self.applier.submit()
            self.lost = self._coming = None
            self.applier.keep_memory()
            self._promise.begin_link()
            self.transport = link
            self.updates.use_link(link)
            self._outgoing.use_link(link)
            self.reconnects += 1
            self._fetch()

    def _on_message(self, received: Received) -> None:
        if self._closed:  # the link is about to be closed
            return
        message = received.message
        self._outgoing.check()
        if isinstance(message, Update | ManifestMessage):
            self.progress += isinstance(message, Update)
            staged = self.updates.read(received)
            if isinstance(message, ManifestMessage):
                self._promise.withdraw()  # the trainer names its versions only after this
            if staged is not None:
                self._stage(staged)
        elif isinstance(message, Take):
            self._on_take(message)
        elif isinstance(message, Promise):
            self.applier.apply_soon()  # the word's last version before the trainer heard of it
            if self._promise.digest is None:
                self.guard.ignore_word()
        elif isinstance(message, Current):
            self.progress += 1
            inbox, newest = self.inbox, (message.epoch, message.version)
            if self.guard.words is not None:
                self.applier.apply_soon()
            if newest[1] and (newest[0] != inbox.newest_epoch or newest[1] > inbox.newest):
                # The message overtook the update that pull() wants, and that may go with the link.
                self._coming = newest
            else:
                self._coming = self.outage.cut_off = None  # the newest message counts
                self._has_come(*newest)
        elif isinstance(message, Leave):
            self.outage.farewell = True
        else:
            self.updates.refuse(message)

    def _on_take(self, message: Take) -> None:
        """Handle a slot that the trainer named; it waits for an answer unless the version is 0."""
        self.outage.cut_off = None
        epoch, version, slots = message.epoch, message.version, self.updates.slots
        if not version:
            if self._promise.digest is not None and slots is not None and slots.is_behind:
                self._promise.note_ring()
            self.applier.apply_soon()
            return
        if slots is None:
            raise RemoteProtocolError("the trainer named memory that it never announced")
        # Registered first: with the epoch set, a read may take a newer version than this one.
        news = self._transformer is None and self._is_news(epoch, version)
        self.updates.epoch = epoch
        if self._transformer is not None:
            staged = self.applier.look()
            if staged is None:
                stale = StaleVersion(f"version {version} is older than what the model has")
                self._answer_stale(epoch, version, stale)
            else:
                if staged.slot is not None:
                    slots.refuse(staged.slot)
                self._stage(staged)
        elif news:
            older = self.applier.owe(version)
            if older:
                self._answer(epoch, older, AckStatus.SKIPPED)
                self.meter.ended("skipped", epoch, older, time.perf_counter())
            self._apply_and_answer(epoch, version)

    def _is_news(self, epoch: int, version: int) -> bool:
        """Register a version that arrived; repeat the answer to one that is not new."""
        if epoch != self.inbox.newest_epoch:
            self.refused = None  # it was of an earlier trainer
        try:
            self.inbox.offer(epoch, version)
        except StaleVersion as exc:
            self._answer_stale(epoch, version, exc)
            self._has_come(epoch, version)
            return False
        if self._wanted or self._coming:
            self._has_come(epoch, version)
        return True

    def _stage(self, staged: Staged) -> None:
        self.outage.cut_off = None
        if not self._is_news(staged.epoch, staged.version):
            staged.give_back()
        elif self._transformer is not None:
            old = self._transformer.updates.begin(staged)
            if old is not None:
                self._skip(old)
        else:
            self._take(staged)

    def _take(self, staged: Staged) -> None:
        """Have the model take this update, now or as soon as it can."""
        old = self.applier.offer(staged)
        if old is not None:  # otherwise another thread is applying it, if there is one
            self._skip(old)
        self._apply_and_answer(staged.epoch, staged.version)

    def _apply_and_answer(self, epoch: int, version: int) -> None:
        self.applier.apply_soon()
        if self._told[:2] != (epoch, version):
            # The update has to wait. APPLIED or NACK at once would have implied RECEIVED.
            self._answer(epoch, version, AckStatus.RECEIVED)
        self._changed.notify()

    def _transformed(self, staged: Staged, error: BaseException | None) -> None:
        if staged.epoch != self.inbox.newest_epoch:  # its trainer is gone
            staged.give_back()
        elif error is None:
            self._take(staged)
        else:
            self._refuse(staged.epoch, staged.version, error)
            self.applier.note("refused", staged)
            staged.give_back()
            self._changed.notify()

    # -- answers -------------------------------------------------------------------------------

    def _answer(
        self, epoch: int, version: int, status: AckStatus, error: BaseException | None = None
    ) -> None:
        """Tell the trainer what became of a version."""
        told = self._told
        if epoch == self.inbox.newest_epoch and (told[0] != epoch or told[1] <= version):
            self._told = epoch, version, status, error
        self._outgoing.say(make_ack(epoch, version, status, error))

    def _answer_stale(self, epoch: int, version: int, error: StaleVersion) -> None:
        # After a lost link the trainer may not know that the update had arrived.
        inbox = self.inbox
        newest = inbox.newest_epoch, inbox.newest
        if self._told[:2] == (epoch, version):
            self._answer(*self._told)
        elif self.held == (epoch, version) or (
            # the word named a newer version, which the model has
            epoch == inbox.epoch and version < inbox.version and self.updates.slots is not None
        ):
            self._answer(epoch, version, AckStatus.APPLIED)
        elif self._transformer is not None and newest == (epoch, version):  # in the transform
            self._answer(epoch, version, AckStatus.RECEIVED)
        else:
            self._answer(epoch, version, AckStatus.NACK, error)

    def _skip(self, staged: Staged) -> None:
        staged.give_back()
        self.applier.note("skipped", staged)
        # This answer precedes those about the newer update. Without it the trainer would keep this
        # one until a version is applied, which may be never.
        self._answer(staged.epoch, staged.version, AckStatus.SKIPPED)

    def _refuse(self, epoch: int, version: int, error: BaseException) -> None:
        since = time.monotonic() if self.refusing is None else self.refusing.since
        self.refused = Refusal(epoch, version, without_frames(error), since)
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._log("refused", f"version {version} was refused: {why}", version)
        self._promise.withdraw()
        self._answer(epoch, version, AckStatus.NACK, error)

    def report(self) -> None:
        """Tell the trainer and the calls that wait what became of updates. On the loop."""
        results = self.applier.results
        while results:
            staged, unused = results.popleft()
            if staged.reported:  # an interrupt had it repeated
                continue
            staged.reported = True
            if staged.taken or staged.error is not None:
                self._report(staged)
                # A load function may have kept views; Ctrl-C may have come after the model changed.
                # Called later: the trainer does not wait while memory is looked at and unmapped.
                if unused is not None and unused.slot is None:
                    self._loop.call_soon(unused.give_back)
            else:
                self._skip(staged)
            self._changed.notify()

    def _report(self, staged: Staged) -> None:
        epoch, version, applier = staged.epoch, staged.version, self.applier
        if version >= applier.owed:
            applier.owed = 0
        if staged.error is not None:
            self._refuse(epoch, version, staged.error)
            applier.note("refused", staged)
            return
        if LOGGER.isEnabledFor(logging.DEBUG):
            self._log("applied", f"the model has version {version}", version, logging.DEBUG)
        self._applied(epoch, version)
        if staged.slot is not None:
            self._promise_next()
            if self._wanted or self._coming:
                self._has_come(epoch, version)

    def _applied(self, epoch: int, version: int) -> None:
        after = self._after_apply()
        if after is None:
            self._answer(epoch, version, AckStatus.APPLIED)
            return
        old = self._to_pass_on.begin((after, epoch, version))
        if old is not None:
            self._answer(*old[1:], AckStatus.SKIPPED)

    async def _pass_on(self, applied: tuple[AfterApply, int, int]) -> None:
        after, epoch, version = applied
        try:
            await after(epoch, version)
        except Exception as exc:  # noqa: BLE001 - the trainer gets it in the NACK
            self._refuse(epoch, version, exc)
            self.meter.ended("refused", epoch, version, time.perf_counter())
        else:
            self._passed_on = (epoch, version)
            self._answer(epoch, version, AckStatus.APPLIED)
        self._changed.notify()

    @property
    def held(self) -> tuple[int | None, int]:
        """Epoch and version on which the trainer may count: applied, and any async hook ended."""
        return self._passed_on if self._after_apply() else (self.inbox.epoch, self.inbox.version)

    def _promise_next(self) -> None:
        """Promise that reads take the next versions, if the model follows the word by itself."""
        slots, staged, promise = self.updates.slots, self.applier.current, self._promise
        if (
            promise.is_due
            and staged is not None
            and slots is not None
            and slots.words is not None
            and staged.slots is slots
            and promise.digest != staged.layout.digest
            and self._after_apply() is None
            and self.applier.may_follow
        ):
            promise.make(staged.layout.digest, slots.words, self.applier.take)

    def _hears_of(self, digest: bytes) -> bool:
        """Return True if the trainer must hear of this manifest's updates. On any thread."""
        asked = self._num_waiting or self._wanted or self._coming
        return bool(self._promise.digest != digest or asked)

    # -- state ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version that the model has; 0 before any."""
        return self.inbox.version

    @property
    def refusing(self) -> Refusal | None:
        """The model's last refusal, while it has no newer version."""
        refused, inbox = self.refused, self.inbox
        newer = refused and inbox.epoch == refused.epoch and inbox.version > refused.version
        return None if newer else refused

    def is_ready(self) -> bool:
        """Return True if the model has a version, or a version waits for a model."""
        return self.inbox.version > 0 or (
            self.applier.has_staged and self.applier.resolve() is None
        )

    @property
    def lag(self) -> int:
        """Number of versions by which the applied version is behind the newest one that arrived."""
        return self.applier.lag

    def stats(self) -> SyncStats:
        """Return the numbers of this worker's syncs. On any thread."""
        inbox, lag, current = self.inbox, self.lag, self.applier.current
        version, worker = inbox.version, self._transformer
        return self.meter.stats(
            under_way=lambda: (
                self.applier.has_staged + (worker is not None and worker.updates.is_busy)
            ),
            epoch=inbox.epoch or 0,
            version=version,
            newest_version=lag + (version if inbox.epoch == inbox.newest_epoch else 0),
            lag=lag,
            age=0.0 if current is None else current.age,
            reconnects=self.reconnects,
        )

    # -- waiting -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that ended the link, if it has ended."""
        if self._closed:
            raise TransportClosed("this scheme was closed")
        self.outage.check()
        if self.error is not None:
            if isinstance(self.error, PeerClosed):
                closed = "the trainer closed the link, or its process ended"
                looked_for = str(self.error)  # it says for how long
                raise PeerClosed(closed if self._trainer is None else looked_for) from self.error
            raise self.error.with_traceback(self._error_traceback)  # else it grows at each raise

    def check_refused(self, at_least: int = 0, *, beside: Refusal | None = None) -> None:
        """Raise the model's last refusal, if there is one.

        Args:
            at_least: Only the refusal of a version from this one on counts.
            beside: A refusal that does not count, because it was known before.

        Raises:
            ApplyError: The model refused the version.
        """
        refused = self.refused
        if refused is not None and refused is not beside and refused.version >= at_least:
            raise not_applied(refused.version, refused.error) from refused.error

    def _fetch(self) -> None:
        """Ask for the versions that :meth:`pull` wants; the trainer keeps one request at a time."""
        if self._wanted:
            self._outgoing.say(Fetch(min(self._wanted)))

    def _has_come(self, epoch: int, version: int) -> None:
        """Note that a version is here, or was refused before, for which pull() may have asked."""
        refused, coming, wanted = self.refused, self._coming, self._wanted
        # A version before the announced one is not the newest, or only a part of the answer.
        if coming is None or epoch != coming[0] or version >= coming[1]:
            self._coming = None
            self._num_answers += 1
            self._wanted = [each for each in wanted if each > version]
            if len(self._wanted) < len(wanted):
                self._fetch()
        if refused is not None and (refused.epoch, refused.version) == (epoch, version):
            self.refused = dataclasses.replace(refused)  # a new object: news to the callers
        self._changed.notify()

    async def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout: float | None,
        late: SyncTimeout,
        waiting: Context = _SILENT,
        applied: bool = False,
    ) -> None:
        """Wait for a condition that updates change, inside of ``waiting``.

        Args:
            condition: Returns True when the wait is over.
            timeout: Seconds; ``None`` for ever, and with 0 it only looks.
            late: The error to raise after the timeout.
            waiting: Entered if it has to wait.
            applied: Have the staged update applied for this, also with ``apply="manual"``.

        Raises:
            SyncTimeout: ``late``.
            PeerClosed: The trainer went away before.
        """
        applier = self.applier

        def rung() -> bool:
            slots = self.updates.slots
            if slots is not None and self.guard.words is not None:
                slots.ring_me(True)  # the trainer tells of a new version at once
                # It may have named one just before, when neither side saw the other's change.
                self._loop.call_later(_BELL_SECONDS, applier.apply_soon)
            applier.apply_soon()
            return condition()

        applier.askers += applied
        try:
            applier.apply_soon()
            if condition():
                await asyncio.sleep(0)  # updates arrive on this loop, and need a turn of it
                return
            self._num_waiting += 1  # now, not before: it has the trainer told of each update
            try:
                with waiting:
                    async with asyncio.timeout(timeout):
                        await asyncio.sleep(0)
                        while not condition():
                            self.check()
                            # Another thread may have taken it without waking this call.
                            await self._changed.wait(unless=rung)
            except TimeoutError as exc:
                if isinstance(exc, SyncTimeout):
                    raise
                applier.apply_soon()
                if not condition():
                    self.check()
                    raise late from (exc if self.outage.cut_off is None else self.outage.cut_off[1])
            finally:
                self._num_waiting -= 1
                slots = self.updates.slots
                if slots is not None and not self._num_waiting:
                    slots.ring_me(False)
        finally:
            applier.askers -= applied

    def _check_not_inside(
        self, method: str, timeout: float | None, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Raise if the caller is about to wait for an update that its own read holds back."""
        if timeout != 0 and is_held_by_caller(self.guard) and not unless():
            self.check()
            raise LocalProtocolError(
                f"{method}() was called inside a reading() block or a forward pass, which keeps "
                "updates from being applied: it would wait for ever. Call it after the block"
            )

    async def wait_for_first(
        self, welcome: Welcome, *, timeout: float | None, late: SyncTimeout
    ) -> None:
        """Wait until the model has the initial weights, or they wait for a model."""
        inbox = self.inbox

        def arrived() -> bool:
            # A version before the newest may be a mistake that all workers have refused.
            self.check_refused(welcome.version if inbox.newest_epoch == welcome.epoch else 0)
            if self.applier.resolve() is None:
                return self.applier.has_staged
            if inbox.epoch == welcome.epoch:  # parts with the newest of each name arrive one by one
                return inbox.version >= welcome.version
            return inbox.version > 0

        await self.wait_until(arrived, timeout=timeout, late=late, applied=True)
        self.reported = (inbox.epoch, inbox.version)

    async def receive(self, timeout: float | None) -> bool:
        """Wait for an applied update that was not reported yet; return True if there is one."""
        inbox, refused = self.inbox, self.refused

        def arrived() -> bool:
            if self.applier.manual:
                self.check_refused(beside=refused)
            return inbox.version > 0 and (inbox.epoch, inbox.version) != self.reported

        self.outage.check()
        self._check_not_inside("receive", timeout, arrived)
        try:
            await self.wait_until(arrived, timeout=timeout, late=RecvTimeout(), applied=True)
        except RecvTimeout:
            return False
        self.reported = (inbox.epoch, inbox.version)
        return True

    async def wait_for(
        self,
        version: int,
        *,
        staged: bool = False,
        timeout: float | None,
        late: SyncTimeout,
        waiting: Context = _SILENT,
    ) -> int:
        """Wait until the model has at least ``version``; or, with ``staged``, until it is here.

        Returns:
            The version that the model has, or that is here.

        Raises:
            ApplyError: The model refused the version.
        """
        inbox = self.inbox

        def newest() -> int:
            version = inbox.version if inbox.epoch == inbox.newest_epoch else 0
            return max(version, self.applier.staged_version if staged else 0)

        def reached() -> bool:
            if newest() >= version:
                return True
            self.check_refused(version)
            return False

        applied = not staged
        if applied:
            self._check_not_inside("wait_for_version", timeout, reached)
        await self.wait_until(reached, timeout=timeout, late=late, waiting=waiting, applied=applied)
        return max(version, newest())

    async def wait_lag_below(
        self, limit: int, *, timeout: float | None, late: SyncTimeout, waiting: Context = _SILENT
    ) -> int:
        """Wait until the model is less than ``limit`` versions behind the newest that is here.

        Returns:
            The number of versions by which it is behind.

        Raises:
            ApplyError: The model refused the newest version.
        """

        def reached() -> bool:
            if self.lag < limit:
                return True
            self.check_refused(self.inbox.newest)
            return False

        self._check_not_inside("wait_lag_below", timeout, reached)
        await self.wait_until(reached, timeout=timeout, late=late, waiting=waiting, applied=True)
        return self.lag

    async def pull(
        self, least: int, *, timeout: float | None, late: SyncTimeout, waiting: Context = _SILENT
    ) -> int:
        """Ask for the newest version, from ``least`` on, and wait until the model has it.

        Raises:
            ApplyError: The model refused the version.
        """
        inbox, refused = self.inbox, self.refused
        before = inbox.epoch, inbox.version, self._num_answers
        if least > inbox.version:
            self._check_not_inside("pull", None)
        self._wanted.append(least)
        self._fetch()

        def arrived() -> bool:
            self.check_refused(beside=refused)
            if self.applier.has_staged:
                self._check_not_inside("pull", None)
            if inbox.version < least or self.applier.has_staged or self.lag or self._coming:
                return False
            return (inbox.epoch, inbox.version, self._num_answers) != before

        await self.wait_until(arrived, timeout=timeout, late=late, waiting=waiting, applied=True)
        return inbox.version

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Stop receiving, give the module memory of its own, close the link. Idempotent."""
        if self._closed:
            return
        try:
            await self.guard.wait_free(_CLOSE_SECONDS)
            self._end()
            self._outgoing.say(Leave())
            await self._tasks.aclose()
        except BaseException:  # goes on to the caller
            self.abort()
            raise
        self.transport.abort()

    def abort(self) -> None:
        """Close from synchronous code, without waiting for the tasks. Idempotent."""
        try:
            self._end()
        finally:
            self._tasks.abort()
            self.transport.abort()

    def _end(self) -> None:
        if self._closed:
            return  # another call did it meanwhile
        with contextlib.ExitStack() as last:  # each runs, even if others raise
            last.callback(self._changed.notify)
            last.callback(self.updates.close)
            last.callback(self.applier.close)
            if self._transformer is not None:
                last.callback(self._transformer.close)
            waiting = self.applier.end()
            if waiting is not None:
                waiting.give_back()
            self.report()  # another thread may have applied an update meanwhile
            self._closed = True
            self._promise.end()
            self.outage.close()
