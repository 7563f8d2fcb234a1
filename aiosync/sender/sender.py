"""The trainer's sender of updates: versions, and sends with their deadlines.

A scheme owns one while it is a sender. Every worker has its own flow, so a slow or dead worker
never delays another. A send that is cancelled while the weights are copied leaves nothing, not even
a version. Later a cancellation ends only the wait: the transfer goes on, from a copy, and the next
send reports the workers that failed. Must not import the receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from aiosync._log import FIRST_SECONDS, LOGGER, NEXT_SECONDS, Waiting, log, say_waiting
from aiosync._meter import Meter
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    SendTimeout,
    SyncTimeout,
    TransportClosed,
)
from aiosync.events import SyncOutcome, SyncStats
from aiosync.sender.admission import FIRST_OF_OTHERS
from aiosync.sender.outbox import Outcome, Send
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.snapshots import (
    OVERTAKEN,
    STEP_SECONDS,
    How,
    Snapshot,
    SnapshotCopier,
    release_all,
    turn_to_copy,
)
from aiosync.sender.steps import why_not_copied
from aiosync.sender.update_chunks import Streaming
from aiosync.sender.waits import WorkerWaits
from aiosync.sender.worker_link import WorkerLink
from aiosync.tensors import Prepared
from aiosync.types import Require, SendReport

__all__ = ["WeightSender"]

# Largest update for whose answer the loop stays awake.
_AWAKE_NBYTES = 2**20
# After a small send the loop keeps turning this long before it sleeps: waking an idle core costs as
# much as the whole round trip. The longer time applies while answers are that quick.
_AWAKE_SECONDS, _LONGER_AWAKE_SECONDS = 50e-6, 250e-6
# After a copy that took longer than this, a send checks again for workers that ended.
_LONG_COPY_SECONDS = 100e-6
# Sends that wait for no worker may keep the loop busy this long.
_TURN_SECONDS = 0.001
# A loop's timer may fire this much too early.
_EARLY_SECONDS = 0.002
# Time until a worker that does nothing is rung.
_RING_SECONDS = 0.005
# Number of these periods after which it is rung again at the latest.
_RING_TURNS = 200


class WeightSender:
    """The sender of one model's updates to its workers.

    A scheme's ``connect()`` makes it; use the scheme's methods. Belongs to one event loop.

    Args:
        model_id: Name of the model.
        strategy: Name of the strategy, compared in the handshake.
        num_workers: Number of expected workers; ``None`` for any number.
        expected: Indices of the workers that ``connect()`` waits for.
        require: What counts as success of a send.
        copier: Makes the snapshots.
        meter: Counts the sends.
        parts: Updates hold parts of the names.
        streaming: Settings of links whose payloads may be damaged or lost on the way.
        how: How ``send()`` copies large weights that are for all workers, see
            :meth:`SnapshotCopier.take`. They are not borrowed while a worker reads slots, which
            have to be filled for it anyway.
        first_version: Number of the first version.

    Attributes:
        require: As given; may change.
        workers: Registry of the workers, connected or not.
        copier: As given.
        meter: As given.
        waits: The waits for versions of workers.
    """

    def __init__(
        self,
        *,
        model_id: str,
        strategy: str,
        num_workers: int | None,
        expected: Sequence[int],
        require: Require,
        copier: SnapshotCopier,
        meter: Meter,
        parts: bool = False,
        streaming: Streaming | None = None,
        how: How = "copy",
        first_version: int = 1,
    ) -> None:
        self.require: Require = require
        self.copier: SnapshotCopier = copier
        self.meter: Meter = meter
        self.workers: WorkerRegistry = WorkerRegistry(
            model_id=model_id,
            strategy=strategy,
            num_workers=num_workers,
            expected=expected,
            parts=parts,
            on_outcome=self._on_outcome,
            on_crash=self._on_crash,
            streaming=streaming,
        )
        # The flattener of a forgotten worker refers to the last weights that it got.
        self.workers.records.on_forget = lambda idx: copier.flatteners.pop(idx, None)
        copier.ring = self._ring
        self.waits: WorkerWaits = WorkerWaits(self.workers, self._ring)
        self._how: How = how
        self._first_version = first_version
        self._loop = asyncio.get_running_loop()
        # Sends under way by version. One timer serves all of them; it is due at _timer_due_at.
        self._sends: dict[int, Send] = {}
        self._copying = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_at = math.inf
        # When the loop was asked to note a turn; 0 after that turn.
        self._turn_asked_at = 0.0
        self._late_timer: asyncio.TimerHandle | None = None
        # Rounds in which a worker was behind.
        self._turns: dict[tuple[int, int], int] = {}
        # Moving average of the seconds that answers took.
        self._mean_answer_seconds = 0.0

    @property
    def version(self) -> int:
        """Newest version drawn; 0 before any."""
        return self.workers.version

    @property
    def lag(self) -> int:
        """Number of versions that the slowest worker is behind what it was sent."""
        return max((link.lag for link in self.workers.subscribers), default=0)

    def stats(self) -> SyncStats:
        """Return the counts and the state of the workers. May be called on any thread."""
        version, meter, workers = self.version, self.meter, self.workers
        return meter.stats(
            under_way=lambda: len(self._sends),
            epoch=workers.epoch if version else 0,
            version=version,
            newest_version=version,
            # A worker may have been named a newer version. One that refused this one counts, too.
            lag=max([0, *(version - each.applied for each in workers.links.values())]),
            age=meter.age(version),
            workers=workers.stats(version, meter.age),
            **workers.counts,
        )

    def is_ready(self) -> bool:
        """Return True if every expected worker is connected and each subscriber has a version."""
        links, number = self.workers.links, self.workers.admission.num_workers
        here = sum(idx < FIRST_OF_OTHERS for idx in links) if number else len(links)
        return here >= (number or 1) and all(link.visible for link in self.workers.subscribers)

    # -- connecting ----------------------------------------------------------------------------

    async def connect(
        self,
        planned: Mapping[int | None, Prepared],
        *,
        timeout: float | None,
        processes: Sequence[Any] = (),
    ) -> None:
        """Send the initial weights to every worker that joins, and wait for the expected ones.

        Raises:
            ConnectTimeout: Some expected worker did not come in time, or no copy was made in time.
            PartialSyncError: A worker came, but could not apply the initial weights or died.
        """
        ends = math.inf if timeout is None else time.perf_counter() + timeout
        workers = self.workers
        version, workers.admission.initial = 0, set(planned)
        if planned:
            workers.version = version = self._first_version
            self.meter.mark(version, time.perf_counter())
        # A send() meanwhile waits: its weights are newer.
        async with self._copying:
            for idx, plan in planned.items():
                snapshot = await self.copier.take_initial(plan, ends - time.perf_counter())
                snapshot.version = version
                workers.admission.initial.discard(idx)
                workers.history.add({idx: snapshot})
                for link in workers.subscribers:
                    if idx in (None, link.idx):
                        link.offer(snapshot)
                self.tell()
        await workers.expected.wait(version, self.require, processes, timeout, ends)

    # -- sending -------------------------------------------------------------------------------

    async def send(
        self,
        planned: Mapping[int | None, Prepared],
        worker_ids: set[int] | None,
        timeout: float | None,
    ) -> SendReport:
        """Snapshot the weights, send them, and wait. See ``WeightSyncScheme.send``."""
        started = time.perf_counter()
        quiet = self.is_quiet()
        # Messages of workers wait, or a program that only sends kept the loop from reading them.
        if self.workers.polls.readers is not None and (
            not quiet or (self._turn_asked_at and started - self._turn_asked_at > _TURN_SECONDS)
        ):
            await _give_loop_turns()
        sent = self.start(planned, worker_ids, timeout, started)
        if isinstance(sent, SendReport):
            self.tell()
            if not self._turn_asked_at:
                self._turn_asked_at = started
                self._loop.call_soon(self._note_turn)
            return sent
        still_copying: Snapshot | None = None
        snapshots: dict[int | None, Snapshot] = {}
        if sent is None:
            snapshots = await self._copy(planned, timeout, started)
            copying = (each.retain() for each in snapshots.values() if each.filling)
            still_copying = next(copying, None)
        try:
            try:
                if sent is None:
                    sent = self._dispatch_copies(snapshots, planned, worker_ids, timeout, started)
                self.tell()
                if sent.nbytes > _AWAKE_NBYTES:
                    # The next send needs a slot that a worker leaves, and a ring costs little here.
                    self._ring()
                if isinstance(sent, SendReport):
                    # Workers join on this loop, even if it only sends.
                    await asyncio.sleep(0)
                    return sent
                future: asyncio.Future[SendReport] = sent.waiter
                if future.done():
                    await asyncio.sleep(0)
                elif sent.nbytes <= _AWAKE_NBYTES:
                    self._stay_awake(future)
                report = await future
                self._mean_answer_seconds += (report.elapsed - self._mean_answer_seconds) / 8
                return report
            except asyncio.CancelledError:
                cancelled, still_copying = still_copying, None
                await self.copier.settle_cancelled(cancelled)
                raise
            finally:
                # The caller may change the tensors once send() has ended.
                if still_copying is not None:
                    await self.copier.settle(still_copying)
        except asyncio.CancelledError:
            # The transfer goes on; the next send reports the workers that fail or have failed.
            if sent is not None:
                counted = isinstance(sent, Send) and _keep_out_of_log(sent.waiter)
                self.workers.take_back(sent.failed, sent.left, sent.lost, counted=counted)
            raise

    async def _copy(
        self, planned: Mapping[int | None, Prepared], timeout: float | None, started: float
    ) -> dict[int | None, Snapshot]:
        """Copy the weights after the copies of other sends, and count the send if that fails."""
        model = self.workers.model_id
        with Waiting("send()", timeout, why_not_copied, model=model), self._preparing(started):
            async with turn_to_copy(self._copying, timeout) as left:
                while True:
                    # The scheme may have been closed meanwhile.
                    self.workers.check()
                    newest = self.workers.version
                    how = self._how if len(planned) == 1 and self._can_send_early() else "copy"
                    # The time ends only the wait for an optimizer's step: no copy is cut short.
                    snapshots = await self.copier.take_all(planned, how, left)
                    if newest == self.workers.version:
                        return snapshots
                    # send_nowait() copied later, and has an older version than this send would get.
                    release_all(snapshots.values())
                    if timeout is not None:
                        left = started + timeout - time.perf_counter()
                        if left <= 0:
                            raise SendTimeout(OVERTAKEN.format(timeout))

    def _dispatch_copies(
        self,
        snapshots: Mapping[int | None, Snapshot],
        planned: Mapping[int | None, Prepared],
        worker_ids: set[int] | None,
        timeout: float | None,
        started: float,
    ) -> SendReport | Send:
        """Send copies to the targets of now, as workers may have joined or left meanwhile."""
        try:
            self.workers.check()
            addressed = self.workers.find_targets(planned, worker_ids)
        except BaseException:  # The error goes on to the caller of send().
            release_all(snapshots.values())
            raise
        given = snapshots, addressed, worker_ids, timeout, started
        return self._dispatch(*given, at_once=not self.workers.has_ended())

    def _stay_awake(self, future: asyncio.Future[Any], until: float | None = None) -> None:
        """Keep the loop awake until the answer, for a moment at most, as waking it takes longer."""
        if until is None:
            is_quick = self._mean_answer_seconds < 2 * _LONGER_AWAKE_SECONDS
            seconds = _LONGER_AWAKE_SECONDS if is_quick else _AWAKE_SECONDS
            until = time.perf_counter() + seconds
        if not future.done() and time.perf_counter() < until:
            self._loop.call_soon(self._stay_awake, future, until)

    def send_nowait(
        self,
        planned: Mapping[int | None, Prepared],
        worker_ids: set[int] | None,
        timeout: float | None,
    ) -> tuple[int, asyncio.Future[SendReport], Collection[int]]:
        """Snapshot now; return the version, a future of the report, and the unanswered targets."""
        started = time.perf_counter()
        self.workers.check()
        if self.workers.admission.initial:
            raise LocalProtocolError(
                "send_nowait(): connect() is still copying the initial weights: use `await "
                "send()`, or call it after connect()"
            )
        # A report at once would count a worker whose end the loop has not noticed yet.
        ended = self.workers.has_ended()
        sent = None if ended else self.start(planned, worker_ids, timeout, started)
        if sent is None:
            addressed = self.workers.find_targets(planned, worker_ids)
            # The copy waits so long for an optimizer's step in another thread to end.
            patience = STEP_SECONDS if timeout is None else timeout
            with self._preparing(started):
                snapshots = {
                    key: self.copier.copy_now(plan, patience) for key, plan in planned.items()
                }
            given = snapshots, addressed, worker_ids, timeout, started
            sent = self._dispatch(*given, at_once=not ended)
        self.tell()
        if isinstance(sent, Send):
            return sent.version, sent.waiter, sent.waiting
        done = self._loop.create_future()
        done.set_result(sent)
        return sent.version, done, sent.waiting

    def _can_send_early(self) -> bool:
        """Return True if links can send the bytes before they are copied, or meanwhile."""
        links = self.workers.links.values()
        if self._how == "borrow":
            return not any(link.publisher for link in links)
        return any(link.transport.follows_copies_above is not None for link in links)

    def start(
        self,
        planned: Mapping[int | None, Prepared],
        worker_ids: set[int] | None,
        timeout: float | None,
        started: float,
        *,
        off_loop: bool = False,
    ) -> SendReport | Send | None:
        """Send small weights if memory for them is free; else do nothing and return ``None``.

        The caller calls :meth:`tell` afterwards. A signal's handler may raise at any step: then
        some workers may have the version, and everything else is consistent. Returns the report if
        no answer has to be awaited, else the send.

        Args:
            planned: The weights, ready to be copied, by worker; under ``None`` those for all.
            worker_ids: The targets; ``None`` for all workers.
            timeout: Seconds that the send may take; ``None`` for no limit.
            started: When the send began.
            off_loop: This is another thread than the loop's: use nothing of the loop, and send only
                if naming the weights in shared memory is enough for every target.
        """
        workers = self.workers
        if workers.closed or workers.crash is not None:
            workers.check()
        addressed = workers.find_targets(planned, worker_ids)
        if len(planned) != 1 or self._copying.locked():
            return None
        [plan] = planned.values()
        links = self._links_that_take_named(planned, addressed[0], worker_ids) if off_loop else []
        if off_loop and not links:
            return None
        snapshot = self.copier.copy_if_free(plan)
        if snapshot is None:
            return None
        # The copy took long: the slow path handles a worker that ended meanwhile. Off the loop, the
        # workers must also be able to read this slot.
        took_long = time.perf_counter() - started > _LONG_COPY_SECONDS
        if (took_long and self.reads_slots and not self.is_quiet()) or (
            links and not all(each.can_read(snapshot.slot) for each in links)
        ):
            snapshot.release()
            return None
        return self._dispatch(
            dict.fromkeys(planned, snapshot), addressed, worker_ids, timeout, started, off_loop
        )

    def _links_that_take_named(
        self,
        planned: Mapping[int | None, Prepared],
        targets: Collection[int],
        worker_ids: set[int] | None,
    ) -> list[WorkerLink]:
        """Return the targets' links, or none if one needs a message, which only the loop sends."""
        links: list[WorkerLink] = []
        [(key, plan)] = planned.items()
        for idx in targets:
            link = self.workers.links.get(idx)
            # A target without weights fails, which the loop has to do, too.
            if link is None or key not in (None, idx):
                return []
            if not link.takes_off_loop(plan.layout.digest):
                return []
            links.append(link)
        enough = worker_ids is not None or self.require == "all" or self.require <= len(targets)
        return links if enough and not plan.values else []

    def _dispatch(
        self,
        snapshots: Mapping[int | None, Snapshot],
        addressed: tuple[set[int], dict[int, AiosyncError]],
        worker_ids: set[int] | None,
        timeout: float | None,
        started: float,
        naming_suffices: bool = False,
        *,
        at_once: bool = True,
    ) -> SendReport | Send:
        """Draw a version, and name or queue it to every target.

        The references to the snapshots go to the history of later workers. The caller calls
        :meth:`tell` afterwards, and has checked that naming is enough for all if it says
        ``naming_suffices``. Returns the report, and no send, if naming was enough and the report
        may be given ``at_once``: no worker has ended without the loop's notice.
        """
        workers, meter, observed, trace = self.workers, self.meter, None, None
        targets, lost = addressed
        if meter.observers:
            trace = meter.trace(started)
            observed = time.perf_counter(), trace, workers.counts["wire_nbytes"]
        workers.version = version = max(workers.version + 1, self._first_version)
        if started >= meter.mark_due:
            meter.mark(version, started)
        if lost:
            workers.on_listed(lost, targets)
        nbytes = 0
        for snapshot in snapshots.values():
            snapshot.version, snapshot.trace = version, trace
            nbytes += snapshot.nbytes
        # A call of set[int]() costs more.
        named: set[int] = set()
        for_all = snapshots.get(None)
        for idx in targets:
            record, mine = workers.records[idx], snapshots.get(idx, for_all)
            link = workers.links.get(idx)
            if link is not None and mine is not None and link.name_in_memory(mine, naming_suffices):
                named.add(idx)
                if record.error is not None:
                    record.recover()
        send, require = None, self.require
        enough = worker_ids is not None or require == "all" or require <= len(named)
        # A target that naming did not reach although that suffices is about to leave.
        if not (naming_suffices or (0 < len(named) == len(targets) and enough and at_once)):
            send = self._sends[version] = Send(
                version,
                {*targets},
                require,
                started=started,
                nbytes=nbytes,
                lost=lost,
                lists_targets=worker_ids is not None,
                waiter=self._loop.create_future(),
                observed=observed,
                acked=named,
            )
            self._offer(send, snapshots)
        # The workers are busy with the update from here on: the rest costs no time.
        workers.history.add(snapshots, None if worker_ids is None else targets)
        if LOGGER.isEnabledFor(logging.DEBUG):
            text = f"version {version} is sent to workers {sorted(targets)}"
            log(logging.DEBUG, "send", text, model=workers.model_id, version=version)
        if send is None:
            elapsed, acked = time.perf_counter() - started, frozenset(named)
            # Counted without _count(): a small send is as cheap as such a call.
            meter.finished["ok"] += 1
            meter.nbytes += nbytes
            if observed is not None:
                self._tell("ok", version, started, nbytes, observed)
            report = workers.epoch, version, acked
            left = frozenset(targets - named)
            return SendReport(*report, lost=lost, left=left, elapsed=elapsed, nbytes=nbytes)
        self._wait_for(send, timeout)
        return send

    def _offer(self, send: Send, snapshots: Mapping[int | None, Snapshot]) -> None:
        """Queue the update for each target that naming did not reach; fail those not linked."""
        workers = self.workers
        # A link that ends here may have others' records forgotten.
        records = {idx: workers.records[idx] for idx in sorted(send.waiting)}
        for idx, record in records.items():
            mine = snapshots.get(idx, snapshots.get(None))
            link = workers.links.get(idx)
            if link is not None and mine is not None:
                # A worker that only pulls may lack older parts.
                pulls, has = not link.hello.subscribe, link.outbox.newest
                link.offer(*(workers.history.lacked(idx, has, mine) if pulls else (mine,)))
            else:
                # A refusal that a report has named is no reason of this failure.
                known = record.error if link is None or not record.reported else None
                error = known or ConfigError(f"no weights were given for worker {idx}")
                record.failed_version = send.version
                send.resolve(idx, Outcome(send.version, error=error))

    def _wait_for(self, send: Send, timeout: float | None) -> None:
        """End a send that may end already; else see to it that it ends in time."""
        if timeout is not None:
            send.timeout = timeout
        if send.may_end:
            self._settle(send)
        if self._sends.get(send.version) is not send:
            return
        send.check_at = min(time.perf_counter() + FIRST_SECONDS, send.started + send.timeout)
        self._set_timer(send.check_at)

    # -- outcomes of sends ---------------------------------------------------------------------

    def _on_outcome(self, idx: int, outcome: Outcome) -> bool:
        """Give an outcome to its send. Return True for a failure that this send reports."""
        send = self._sends.get(outcome.version)
        if send is None:
            return False
        if send.resolve(idx, outcome) and send.may_end:
            self._settle(send)
        return idx in send.failed and not send.waiter.cancelled()

    def _settle(self, send: Send) -> None:
        """End a send that has its outcomes, once."""
        workers = self.workers
        if send.acked and send.turns_left_to_notice_ends and workers.has_ended():
            send.turns_left_to_notice_ends -= 1
            # The loop is about to notice an end.
            self._loop.call_soon(self._settle, send)
            return
        if gone := send.acked - workers.links.keys():
            self._withdraw_gone(send, gone)
        if (send.waiting and not send.satisfied) or self._sends.pop(send.version, None) is None:
            return
        outcome, error = send.result()
        if send.lost and not send.workers and workers.has_lost_all():
            outcome, error = "error", PartialSyncError(failed=send.lost, version=send.version)
        self._count(send, outcome)
        if send.lost and error is not None:
            self.workers.keep_replaced(send.lost)
        if not send.waiter.done():
            self._tell_caller(send, error)

    def _withdraw_gone(self, send: Send, gone: set[int]) -> None:
        """Count the workers that applied the version, and are gone since, as failed."""
        for idx in gone:
            record = self.workers.record(idx)
            if record.error is not None and record.subscribes:
                send.withdraw(idx, record.end or record.error)

    def _tell_caller(self, send: Send, error: PartialSyncError | None) -> None:
        """End the wait of ``send()`` with its report or error; its failures count as reported."""
        workers, future = self.workers, send.waiter
        for idx in send.failed.keys() & workers.records.keys():
            workers.records[idx].report()
        if error is None:
            future.set_result(self._report(send))
        elif workers.closed:
            text = f"this scheme was closed while version {send.version} was under way"
            closed = TransportClosed(text)
            closed.__cause__ = error
            future.set_exception(closed)
            _keep_out_of_log(future)
        else:
            future.set_exception(error)

    def _report(self, send: Send) -> SendReport:
        """Return the report of a send that succeeded; its failures count as reported then."""
        workers = self.workers
        left: set[int] = set()
        for idx in send.left:
            if send.lists_targets or not workers.record(idx).reported:
                left.add(idx)
                workers.record(idx).report()
        # Failures that no earlier send waited for are reported, too.
        for idx in send.waiting & workers.links.keys() if send.waiting else ():
            record = workers.records[idx]
            if record.error is not None and not record.reported:
                send.failed[idx] = record.error
                record.report()
        return SendReport(
            epoch=workers.epoch,
            version=send.version,
            acked=frozenset(send.acked),
            skipped=send.skipped,
            failed=dict(send.failed),
            lost=dict(send.lost),
            left=frozenset(left),
            waiting=frozenset(send.waiting),
            elapsed=time.perf_counter() - send.started,
            nbytes=send.nbytes,
        )

    def _count(self, send: Send, outcome: SyncOutcome) -> None:
        self.meter.finished[outcome] += 1
        if outcome == "ok":
            self.meter.nbytes += send.nbytes
        if send.observed is not None:
            self._tell(outcome, send.version, send.started, send.nbytes, send.observed)

    def _tell(
        self,
        outcome: SyncOutcome,
        version: int,
        started: float,
        nbytes: int,
        observed: tuple[float, str | None, int],
    ) -> None:
        """Tell the observers of a send that has ended."""
        copied, trace, before = observed
        seconds = {"snapshot": copied - started, "wire": time.perf_counter() - copied}
        travelled, epoch = self.workers.counts["wire_nbytes"] - before, self.workers.epoch
        self.meter.tell(outcome, epoch, version, started, seconds, nbytes, travelled, trace)

    @contextlib.contextmanager
    def _preparing(self, started: float) -> Iterator[None]:
        """Count a send that fails before it has a version, within the trace of its caller."""
        try:
            yield
        except AiosyncError as exc:
            outcome: SyncOutcome = "timeout" if isinstance(exc, SyncTimeout) else "error"
            self.meter.ended(outcome, 0, 0, started, trace=self.meter.trace(started))
            raise

    def _on_crash(self, error: BaseException) -> None:
        """Fail every send under way with the error of the background task that crashed."""
        sends, self._sends = self._sends, {}
        for send in sends.values():
            self._count(send, "error")
            if not send.waiter.done():
                send.waiter.set_exception(error)

    def _set_timer(self, when: float) -> None:
        """Have the deadlines checked at this time at the latest."""
        # The timer goes on when a send ends: making one costs as much as a small send.
        if when < self._timer_due_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(when - time.perf_counter(), self._time_out_sends)
            self._timer_due_at = when

    def _time_out_sends(self) -> None:
        """Time out the sends whose deadline has passed, and log those that have waited for long."""
        self._timer_due_at, now = math.inf, time.perf_counter() + _EARLY_SECONDS
        for send in list(self._sends.values()):
            ends = send.started + send.timeout
            if ends <= now:
                send.time_out()
                self._settle(send)
            elif send.check_at <= now:
                send.check_at = min(now + NEXT_SECONDS, ends)
                workers, version = self.workers, send.version
                idle = [
                    f"worker {idx} (process {workers.record(idx).pid})"
                    for idx in sorted(send.waiting)
                ]
                say_waiting(
                    f"send() of version {version}",
                    now - send.started,
                    send.timeout,
                    f"{', '.join(idle)} did not answer",
                    model=workers.model_id,
                    version=version,
                )
        self._set_timer(min((each.check_at for each in self._sends.values()), default=math.inf))

    # -- workers that read slots ---------------------------------------------------------------

    @property
    def reads_slots(self) -> bool:
        """True if some workers read slots."""
        arena = self.copier.arena
        return arena is not None and arena.num_links > 0

    def is_quiet(self) -> bool:
        """Return True if some workers read slots, and none of them sent a message or ended."""
        arena = self.copier.arena
        if arena is None or not arena.num_links:
            return False
        polls = self.workers.polls
        readers = polls.readers or polls.watch_readers(self.workers.links.values())
        return not readers.poll(0)

    def has_to_tell(self) -> bool:
        """Return True if :meth:`tell` has something to do, for which the loop has to wake."""
        return (
            self._late_timer is None
            or bool(self.workers.changed.waiting)
            or any(
                link.wanted is not None or (link.publisher and link.publisher.bell)
                for link in self.workers.links.values()
            )
        )

    def tell(self) -> None:
        """Wake calls and workers that wait for a version, and have late workers rung later."""
        workers = self.workers
        # Calls that wait are rare.
        if workers.changed.waiting:
            workers.changed.notify()
        for link in workers.links.values():
            if link.wanted is not None:
                workers.answer(link)
            if link.publisher is not None and link.publisher.bell and link.is_behind:
                link.ring()
        if self._late_timer is None and self.copier.arena is not None:
            self._late_timer = self._loop.call_later(_RING_SECONDS, self._ring_late)

    def _note_turn(self) -> None:
        """Note that the loop had a turn after a send that waited for no worker."""
        self._turn_asked_at = 0.0

    def _ring(self) -> None:
        """Ring the workers that have not taken the version named to them."""
        for link in self.workers.links.values():
            if link.is_behind:
                link.ring()

    def _ring_late(self) -> None:
        """Ring the workers that have not looked since a version was named to them.

        A worker that takes none is rung ever more seldom, whatever the others do. A worker that
        does not compute thus follows all the same, and gives its slot back.
        """
        self._late_timer, before, self._turns = None, self._turns, {}
        for idx, link in self.workers.links.items():
            if link.is_behind:
                has = idx, link.applied
                self._turns[has] = turns = before.get(has, 0) + 1
                if turns & (turns - 1) == 0 or turns % _RING_TURNS == 0:
                    link.ring()
        if self._turns:
            self._late_timer = self._loop.call_later(_RING_SECONDS, self._ring_late)

    # -- closing -------------------------------------------------------------------------------

    def _end(self) -> None:
        self.workers.end()
        for timer in filter(None, (self._timer, self._late_timer)):
            timer.cancel()

    async def aclose(self) -> None:
        """Close every link, within bounded time; sends under way fail with ``TransportClosed``."""
        if self.workers.closed:
            return
        self._end()
        try:
            await self.workers.tasks.aclose()
        finally:
            await self.copier.aclose()

    def abort(self) -> None:
        """Close like :meth:`aclose`, but from synchronous code, without waiting for the tasks."""
        if self.workers.closed:
            return
        self._end()
        self.workers.tasks.abort()
        self.copier.close()


async def _give_loop_turns() -> None:
    """Let the loop find, read and handle the messages of workers, which takes it three turns."""
    for _ in range(3):
        await asyncio.sleep(0)


def _keep_out_of_log(future: asyncio.Future[SendReport]) -> bool:
    """Retrieve the error of a send that no caller awaits any more; return True if it had ended."""
    if ended := future.done() and not future.cancelled():
        future.exception()
    return ended
