"""The worker's runtime: a link, the reader of the updates that arrive over it, and the applier.

A background task stages updates; they are applied under the guard, on the loop or the thread of a
forward, or by ``apply_pending()``. The last answer to the trainer about an update is its state:

=========  ===================================================================================
RECEIVED   every byte is here, and transformed: it waits for the model or an async hook
APPLIED    the model has it, and an async hook has ended
NACK       the transform, the model or a hook refused it; that is final
SKIPPED    a newer one took its place while it, or its async hook, waited; that is final, too
=========  ===================================================================================

A version that a word of shared memory names may need no answer, see ``receiver.promise``. Must not
import the sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from aiosync._log import LOGGER
from aiosync._meter import Meter, SyncFacts
from aiosync._repr import text_of
from aiosync._tasks import Newest, TaskOwner, work_in_thread
from aiosync.errors import (
    AiosyncError,
    PeerClosed,
    RemoteProtocolError,
    StaleVersion,
    TransportClosed,
)
from aiosync.events import SyncOutcome, SyncStats
from aiosync.protocol import Answer, Ledger
from aiosync.receiver.answers import Outgoing
from aiosync.receiver.applier import Applier
from aiosync.receiver.guard import Guard
from aiosync.receiver.model import WorkerModel
from aiosync.receiver.outage import Outage
from aiosync.receiver.promise import ReadPromise
from aiosync.receiver.reads import Methods
from aiosync.receiver.scheme_hooks import AfterApply
from aiosync.receiver.transformer import Transform, Transformer
from aiosync.receiver.update_reader import Staged, UpdateReader
from aiosync.receiver.waits import VersionWaits
from aiosync.tensors.apply import BufferChoice, Strict
from aiosync.transports.base import Received, Transport, make_ack, without_frames
from aiosync.transports.shared_memory import SlotReader
from aiosync.types import AckStatus
from aiosync.wire import Ack, Current, Fetch, Leave, ManifestMessage, Promise, Take, Update, Welcome

__all__ = ["WeightReceiver"]

_CLOSE_SECONDS = 1.0


class WeightReceiver:
    """Receives versions of one model and puts them into it.

    Made by a scheme's ``connect()``. Belongs to one event loop; ``apply_pending()`` and the guard
    may be used from any thread.

    Args:
        transport: The link; owned from now on.
        resolve, copy, strict, buffers: As for :class:`WorkerModel`.
        apply: ``"auto"``, or ``"manual"`` to apply only in calls that ask for it.
        guard: Keeps reads and updates apart.
        install_hooks: Make the forwards of the model reads of the guard.
        methods: Names of other methods of the model whose calls are reads; ``None`` for the public
            methods of a model without a forward.
        check_model: As for :class:`WorkerModel`.
        flipped, meter: As for :class:`Applier`.
        after_apply: Asked at each update for the function to await before the trainer is told.
        before_apply: Called on the loop before an update is applied; refuses it if it raises.
        transform: Turns an update, in a thread, into the weights that the model wants.
        reconnect: Dials the next link after a lost one; ``None`` if a lost link is the end. Called
            with the error, and with a value that changes whenever a link is of use.
        takes_deltas: As for :class:`UpdateReader`.
        promises: Over shared memory, forwards may take new versions before the trainer hears.
        waits_apply: With ``apply="manual"``, calls that wait for an applied update have it applied;
            false if the owner of the model applies each in its own way.
        outage: Decides what reads do without a trainer.
        log: Called with an event in a word, a sentence, the version and the level.

    Attributes:
        updates, applier: The reader of arriving updates, and the applier, which has the model.
        ledger: The versions that the worker wants, has, refused and reported.
        waits: The calls of the program that wait for a version.
        meter, outage: As given.
        error: The error after which nothing more will arrive.
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
        check_model: Callable[[Any], object],
        flipped: Callable[[int, int], object] | None = None,
        after_apply: Callable[[], AfterApply | None] = lambda: None,
        before_apply: Callable[[int, int], object] | None = None,
        transform: Transform | None = None,
        reconnect: Callable[[AiosyncError, object], Awaitable[tuple[Transport, Welcome]]]
        | None = None,
        takes_deltas: bool = False,
        promises: bool = True,
        waits_apply: bool = True,
        outage: Outage,
        meter: Meter,
        log: Callable[..., None] = lambda *told: None,
    ) -> None:
        self.transport: Transport = transport
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner(self.fail)
        self.updates: UpdateReader = UpdateReader(takes_deltas, self._on_message)
        self.updates.use_link(transport)
        self._outgoing = Outgoing(transport, self._tasks)
        self.ledger: Ledger = Ledger(awaits_hook=after_apply)
        self._transformer: Transformer | None = None
        if transform is not None or before_apply is not None:
            self._transformer = Transformer(transform, before_apply, self._tasks, self._transformed)
        self.guard: Guard = guard
        self._promise = ReadPromise(
            guard,
            say=self._outgoing.say,
            offer=self._promise_reads,
            allowed=promises and self._transformer is None,
        )
        say_methods = functools.partial(log, "methods")
        model = WorkerModel(
            guard,
            self.ledger.inbox,
            resolve=resolve,
            copy=copy,
            strict=strict,
            buffers=buffers,
            methods=Methods(guard, methods, say_methods) if install_hooks else None,
            check=check_model,
            watch=apply != "manual",
        )
        self.applier: Applier = Applier(
            model,
            guard,
            self.ledger,
            self._promise,
            self.updates,
            manual=apply == "manual",
            reads_words=self._transformer is None,
            flipped=flipped,
            meter=meter,
            report=self.report,
            fail=self.fail,
        )
        self.meter: Meter = meter
        self._after_apply = after_apply
        self._reconnect = reconnect
        self._log = log
        self._hook_calls: Newest[tuple[AfterApply, SyncFacts]]
        self._hook_calls = Newest(self._await_hook, self._tasks, "aiosync applied hook")
        self.outage: Outage = outage
        self.error: BaseException | None = None
        self._error_traceback: TracebackType | None = None
        self.waits: VersionWaits = VersionWaits(
            self.applier,
            guard,
            self.ledger,
            self.updates,
            outage,
            may_apply=waits_apply,
            check=self.check,
            fetch=self._fetch,
        )
        self._closed = False

    def start(self) -> None:
        """Guard the model, and begin to receive in the background."""
        # Each try to apply guards the model first, also if no update is here.
        self.applier.turns.submit()
        self._tasks.start(self._run(), "aiosync receiver")

    def fail(self, error: BaseException) -> None:
        """Receive nothing more, for this reason, which is no end of a link; the trainer is lost."""
        if self.error is None and not self._closed:
            notify = self.waits.changed.notify
            reason = self.outage.end_receiver(without_frames(error), self.version, notify)
            if reason is not None:
                self._tasks.start(self.outage.give_up(reason, notify), "aiosync lost hook")
        self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """Receive nothing more, for this reason; the calls that wait raise it."""
        if self.error is None and not self._closed:
            self.error = without_frames(error)
            self._error_traceback = error.__traceback__
            # The sender sees the end at once.
            self.transport.abort()
        self.waits.changed.notify()

    # -- the link ------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Receive over one link after the other, until the last is not replaced."""
        while True:
            await self.outage.begin_link()
            lost = await self._receive_until_lost()
            if self._closed or self.error is not None:
                return
            self.updates.end_link()
            found = await self._find_next_link(lost)
            if found is None:
                return
            link, welcome = found
            if self.error is not None:
                link.abort()
                return
            self._note_welcome(welcome)
            # _use_link() closes the memory of the lost link, so its last version is taken first.
            await self._take_last_word()
            self._use_link(link)

    async def _receive_until_lost(self) -> AiosyncError:
        """Handle the messages of the link; return the error that ended it."""
        try:
            self.transport.subscribe(self._on_message)
            while True:
                received = await self.transport.recv(into=self.updates.lender)
                work = self.updates.heavy_work(received)
                if work is not None:
                    await work_in_thread(work)
                self._on_message(received)
        except AiosyncError as exc:
            return without_frames(exc)

    async def _find_next_link(self, lost: AiosyncError) -> tuple[Transport, Welcome] | None:
        """Dial the link that replaces a lost one; if there is none, stop, and return ``None``."""
        outage, reconnect = self.outage, self._reconnect
        notify = self.waits.changed.notify
        outage.end_link(lost, self.version, reconnect is None, notify)
        if reconnect is None:
            await outage.give_up(lost, notify)
            self._stop(lost)
            return None
        self.transport.abort()
        try:
            return await reconnect(lost, outage.progress)
        except AiosyncError as exc:
            held = f"the model keeps version {self.version}"
            self._log("gave up", f"no trainer any more, {held}: {exc}", None, logging.WARNING)
            await outage.give_up(without_frames(exc), notify)
            self._stop(exc)
            return None

    async def _take_last_word(self) -> None:
        """Apply the version that the word of the lost link names, while its slots are here."""
        if self._owes_read:
            await self.guard.wait_free(_CLOSE_SECONDS)
            self.applier.turns.submit()

    @property
    def _owes_read(self) -> bool:
        """True if the trainer counts on a version that it named, and that no read has taken."""
        slots = self.updates.slots
        return slots is not None and slots.is_behind and self.guard.words is not None

    def _note_welcome(self, welcome: Welcome) -> None:
        """Log which trainer answers, and whether this link is of use without a newer version."""
        inbox = self.ledger.inbox
        same = welcome.epoch == inbox.newest_epoch
        if same:
            self._log("reconnected", "the trainer is reached again")
        else:
            self._log("restarted", "another trainer answers, or the same one has begun anew")
        nothing_newer = not welcome.version or (same and welcome.version <= inbox.newest)
        # A weight server without any version, which alone sends a note, does not know what is new.
        if welcome.note and inbox.newest:
            nothing_newer = False
        if nothing_newer or not self.outage.subscribes:
            self.outage.cut_off = None

    def _use_link(self, link: Transport) -> None:
        """Go on with the link that replaces the lost one."""
        self.outage.reconnect()
        self.meter.reconnects += 1
        self.ledger.lose_link()
        self.applier.keep_memory()
        self._promise.begin_link()
        self.transport = link
        self.updates.use_link(link)
        self._outgoing.use_link(link)
        epoch, version = self.updates.base
        if version:
            # The trainer ignores an answer that it does not wait for, but for this mark.
            self._outgoing.say(Ack(epoch, version, AckStatus.RECEIVED, is_base=True))
        self._fetch()

    def _on_message(self, received: Received) -> None:
        """Handle a message of the trainer; an error that this raises ends the link."""
        # The link is about to be closed.
        if self._closed:
            return
        message = received.message
        self._outgoing.check()
        if isinstance(message, Update | ManifestMessage):
            self.outage.progress += isinstance(message, Update)
            staged = self.updates.read(received)
            if isinstance(message, ManifestMessage):
                # The trainer names a version of this manifest only after the withdrawal.
                self._promise.withdraw()
            if staged is not None:
                self._stage(staged)
        elif isinstance(message, Take):
            self._on_take(message)
        elif isinstance(message, Promise):
            # The trainer confirms a withdrawal: take what the word named until then.
            self.applier.apply_soon()
            if self._promise.digest is None:
                self.guard.ignore_word()
        elif isinstance(message, Current):
            self._on_current(message)
        elif isinstance(message, Leave):
            self.outage.farewell = True
        else:
            self.updates.refuse(message)

    def _on_current(self, message: Current) -> None:
        """Handle the answer to a Fetch, which says which version is the trainer's newest."""
        self.outage.progress += 1
        if self.guard.words is not None:
            self.applier.apply_soon()
        if not self.ledger.announce(message.epoch, message.version):
            if message.version:
                # The newest version is here, so that the link is of use.
                self.outage.cut_off = None
            self._has_come(message.epoch, message.version)

    def _on_take(self, message: Take) -> None:
        """Handle a Take: apply the version that the trainer named in shared memory, and answer.

        A Take of version 0 only asks to look at the word, and gets no answer.
        """
        self.outage.cut_off = None
        epoch, version, slots = message.epoch, message.version, self.updates.slots
        if not version:
            self._on_ring()
            return
        if slots is None:
            raise RemoteProtocolError("the trainer named memory that it never announced")
        # Registered first: with the epoch set, a read may take a newer version than this one.
        news = self._transformer is None and self._register_arrival(epoch, version, named=True)
        self.updates.epoch = epoch
        if self._transformer is not None:
            self._take_through_transform(epoch, version, slots)
        elif news:
            older = self.applier.note_owed(version)
            if older:
                self._answer(epoch, older, AckStatus.SKIPPED)
                self.meter.ended("skipped", epoch, older, time.perf_counter())
            self._apply_and_answer(epoch, version)
        elif not self.ledger.is_settled(epoch, version):
            # The link before may have ended before a read was over, for which this version waits.
            self.applier.apply_soon()

    def _on_ring(self) -> None:
        """Apply what the word names, as the trainer found that no read has taken it."""
        slots = self.updates.slots
        if self._promise.digest is not None and slots is not None and slots.is_behind:
            self._promise.note_ring()
        self.applier.apply_soon()

    def _take_through_transform(self, epoch: int, version: int, slots: SlotReader) -> None:
        """Read the update that the word names, and leave its slot to the transform."""
        staged = self.applier.open_named_update()
        if staged is None:
            # At an earlier Take the word named this version, or a newer one, already.
            stale = StaleVersion(f"version {version} is older than what the model has")
            self._repeat_answer(epoch, version, stale)
            return
        if staged.slot is not None:
            # The word counts as handled. The slot stays locked until the transform has read it.
            slots.refuse(staged.slot)
        self._stage(staged)

    def _register_arrival(self, epoch: int, version: int, *, named: bool = False) -> bool:
        """Register a version that arrived; repeat the answer of an old one, and return False."""
        try:
            self.ledger.arrive(epoch, version)
        except StaleVersion as exc:
            self._repeat_answer(epoch, version, exc, named=named)
            self._has_come(epoch, version)
            return False
        if self.ledger.is_fetching:
            self._has_come(epoch, version)
        return True

    def _fetch(self) -> None:
        """Ask for the versions that calls want; the trainer keeps one request at a time."""
        least = self.ledger.to_fetch
        if least is not None:
            self._outgoing.say(Fetch(least, has_none=self.ledger.ask_again()))

    def _has_come(self, epoch: int, version: int) -> None:
        """Note that a version is here; ask for the next wanted one, and wake the calls."""
        if self.ledger.has_come(epoch, version):
            self._fetch()
        self.waits.changed.notify()

    def _stage(self, staged: Staged) -> None:
        """Pass an update that is complete to the transform or the model; give an old one back."""
        self.outage.cut_off = None
        if not self._register_arrival(staged.epoch, staged.version):
            staged.give_back()
        elif self._transformer is not None:
            old = self._transformer.updates.begin(staged)
            if old is not None:
                self._skip(old)
        else:
            self._offer_to_model(staged)

    def _offer_to_model(self, staged: Staged) -> None:
        """Have the model take this update, now or as soon as it can."""
        old = self.applier.offer(staged)
        # If there is none, another thread may be applying the update before this one.
        if old is not None:
            self._skip(old)
        self._apply_and_answer(staged.epoch, staged.version)

    def _apply_and_answer(self, epoch: int, version: int) -> None:
        """Have a version that arrived applied, and answer RECEIVED if it has to wait."""
        self.applier.apply_soon()
        if not self.ledger.has_reported(epoch, version):
            # APPLIED or NACK at once would have implied RECEIVED.
            self._answer(epoch, version, AckStatus.RECEIVED)
        self.waits.changed.notify()

    def _transformed(self, staged: Staged, error: BaseException | None) -> None:
        """Offer a transformed update to the model; with an error, refuse the untransformed one."""
        # The trainer of this update is gone.
        if staged.epoch != self.ledger.inbox.newest_epoch:
            staged.give_back()
        elif error is None:
            self._offer_to_model(staged)
        else:
            self._refuse(staged.epoch, staged.version, error)
            self.applier.note("refused", staged)
            staged.give_back()
            self.waits.changed.notify()

    # -- answers -------------------------------------------------------------------------------

    def _answer(
        self, epoch: int, version: int, status: AckStatus, error: BaseException | None = None
    ) -> None:
        """Tell the trainer what became of a version."""
        self._say(self.ledger.report(epoch, version, status, error))

    def _say(self, answer: Answer) -> None:
        """Send an answer, with the mark of a version to which the next may be a delta."""
        is_base = self.updates.base == answer[:2]
        self._outgoing.say(make_ack(*answer, is_base=is_base))

    def _repeat_answer(
        self, epoch: int, version: int, error: StaleVersion, *, named: bool = False
    ) -> None:
        """Answer again for a version that came before; with ``named``, a Take asked for it."""
        self._say(
            self.ledger.repeat(
                epoch,
                version,
                error,
                named=named,
                by_word=self.updates.slots is not None,
                transforming=self._transformer is not None,
            )
        )

    def _skip(self, staged: Staged) -> None:
        """Give back an update that a newer one has replaced, and answer SKIPPED."""
        staged.give_back()
        self.applier.note("skipped", staged)
        # This answer precedes those about the newer update. Without it the trainer would keep this
        # one until a version is applied, which may be never.
        self._answer(staged.epoch, staged.version, AckStatus.SKIPPED)

    def _refuse(self, epoch: int, version: int, error: BaseException) -> None:
        """Answer NACK for a version that the model, the transform or a hook refused."""
        answer = self.ledger.refuse(epoch, version, without_frames(error), time.monotonic())
        why = f"{type(error).__name__}: {text_of(error)}".partition("\n")[0]
        self._log("refused", f"version {version} was refused: {why}", version)
        self._promise.withdraw()
        self._say(answer)

    def report(self, changed: bool = False) -> None:
        """Tell the trainer and the calls that wait what became of updates. On the loop.

        Args:
            changed: The model has another version, also if there is nothing to tell the trainer.
        """
        results = self.applier.results
        while results:
            staged, unused = results.popleft()
            # After an interrupt the update was applied again, and so is in the queue twice.
            if staged.reported:
                continue
            staged.reported = True
            if staged.taken or staged.error is not None:
                self._report_one(staged)
                # A load function may have kept views; Ctrl-C may have come after the model changed.
                # Called later: the trainer does not wait while memory is looked at and unmapped.
                if unused is not None and unused.slot is None:
                    self._loop.call_soon(unused.give_back)
            else:
                self._skip(staged)
            changed = True
        if changed:
            self.waits.changed.notify()
            if self.outage.lost_link is not None:
                self.updates.end_link()

    def _report_one(self, staged: Staged) -> None:
        """Answer for an update that the model took or refused; with a hook, once that has ended."""
        epoch, version, applier = staged.epoch, staged.version, self.applier
        self.ledger.settle(version)
        if staged.error is not None:
            self._refuse(epoch, version, staged.error)
            applier.note("refused", staged)
            return
        if LOGGER.isEnabledFor(logging.DEBUG):
            self._log("applied", f"the model has version {version}", version, logging.DEBUG)
        # Not kept in the update, which the model keeps: the hook refers to the scheme.
        hook, staged.hook = staged.hook, None
        if hook is None or self._closed:
            if hook is not None:
                self.meter.ended("ok", *hook[1])
            self._answer(epoch, version, AckStatus.APPLIED)
        else:
            self.meter.num_deferred += 1
            if (old := self._hook_calls.begin(hook)) is not None:
                # The hook of that version had not begun, and is called for this one instead.
                self._count_deferred("ok", old[1])
                self._answer(*old[1][:2], AckStatus.SKIPPED)
        if staged.slot is not None:
            self._promise_reads()
            # A read may have taken it by the word alone, so that no message has registered it.
            if self.ledger.is_fetching:
                self._has_come(epoch, version)

    def _count_deferred(self, outcome: SyncOutcome, facts: SyncFacts) -> None:
        """Count a version whose outcome an async hook has deferred."""
        self.meter.num_deferred -= 1
        self.meter.ended(outcome, *facts)

    async def _await_hook(self, applied: tuple[AfterApply, SyncFacts]) -> None:
        """Await the hook for a version that was applied, and answer with its result."""
        after, facts = applied
        epoch, version = facts[:2]
        try:
            await after(epoch, version)
        except Exception as exc:  # noqa: BLE001 - the trainer gets it in the NACK
            self._count_deferred("refused", facts)
            self._refuse(epoch, version, exc)
        except BaseException:  # The task was cancelled, or ends with a crash: the model has it.
            self._count_deferred("ok", facts)
            raise
        else:
            self._count_deferred("ok", facts)
            self.ledger.passed_on = (epoch, version)
            self._answer(epoch, version, AckStatus.APPLIED)
        self.waits.changed.notify()

    def _promise_reads(self) -> None:
        """Promise that reads take the next versions, if the model follows the word by itself."""
        applier, slots, promise = self.applier, self.updates.slots, self._promise
        staged = applier.model.current
        if (
            promise.is_due
            and staged is not None
            and slots is not None
            and slots.words is not None
            and staged.slots is slots
            and promise.digest != staged.layout.digest
            and self.updates.knows(staged.layout.digest)
            and self._after_apply() is None
            and not applier.manual
            and applier.model.may_follow
        ):
            promise.make(staged.layout.digest, slots.words, applier.turns.take)

    # -- state ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version that the model has; 0 before any."""
        return self.ledger.inbox.version

    def is_ready(self) -> bool:
        """Return True if the model has a version, or a version waits for a model."""
        return self.version > 0 or (
            self.applier.has_staged and self.applier.model.resolve() is None
        )

    @property
    def lag(self) -> int:
        """Number of versions by which the applied version is behind the newest one that arrived."""
        return self.applier.lag

    def stats(self) -> SyncStats:
        """Return the numbers of this worker's syncs. On any thread."""
        epoch, version, newest, lag = self.applier.progress
        worker, current = self._transformer, self.applier.model.current
        return self.meter.stats(
            under_way=lambda: (
                self.applier.has_staged + (worker is not None and worker.updates.is_busy)
            ),
            epoch=epoch or 0,
            version=version,
            newest_version=newest,
            lag=lag,
            age=self.meter.age(version) if current is None else current.age,
        )

    # -- waiting -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise why no update can come: this is closed, the trainer is gone, or a task failed."""
        if self._closed:
            raise TransportClosed("this scheme was closed")
        self.outage.check()
        if self.error is not None:
            if isinstance(self.error, PeerClosed):
                closed = "the trainer closed the link, or its process ended"
                # This text says for how long a trainer was looked for.
                looked_for = str(self.error)
                raise PeerClosed(closed if self._reconnect is None else looked_for) from self.error
            # Without this the traceback would grow at each raise.
            raise self.error.with_traceback(self._error_traceback)

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
        except BaseException:  # The error goes on to the caller.
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
        """End everything but the link and the tasks, without waiting."""
        if self._closed:
            # Another call did it meanwhile.
            return
        if self.updates.slots is not None:
            self.updates.slots.take_no_more()
        if self._owes_read:
            # The trainer counts on the version that it named, and no read follows: apply it now.
            self.applier.turns.submit()
        # Each callback runs, even if others raise: after the block, and the last one first.
        with contextlib.ExitStack() as last:
            last.callback(self.waits.changed.notify)
            last.callback(self.updates.close)
            last.callback(self.applier.close)
            if self._transformer is not None:
                last.callback(self._transformer.close)
            waiting = self.applier.end()
            if waiting is not None:
                waiting.give_back()
            # Another thread may have applied an update meanwhile. No hook begins any more.
            self._closed = True
            self.report()
            if (current := self.applier.model.current) is not None:
                # The model is about to let go of the update, which knows its age.
                self.meter.mark(current.version, time.perf_counter() - current.age)
            if (untold := self._hook_calls.waiting) is not None:
                # The model has this version, and its hook is never called.
                self._hook_calls.waiting = None
                self._count_deferred("ok", untold[1])
            self._promise.end()
            self.outage.close()
