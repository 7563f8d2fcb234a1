"""The trainer's runtime: versions, sends and their deadlines, and what can be waited for.

A scheme owns one while it is a sender. Every worker has its own flow, so a slow or dead one
never delays another. A send that is cancelled while the weights are copied leaves nothing, not even
a version; later only the wait stops: the transfer goes on, from a copy, and the next send says who
failed. Must not import the receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import select
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from aiosync._log import FIRST_SECONDS, LOGGER, NEXT_SECONDS, Waiting, log, say_waiting
from aiosync._meter import Meter
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    SyncTimeout,
    TransportClosed,
)
from aiosync.events import SyncOutcome, SyncStats
from aiosync.rendezvous.dialer import is_final
from aiosync.sender.outbox import Outcome, Send
from aiosync.sender.snapshots import STEP_SECONDS, How, Snapshot, SnapshotCopier
from aiosync.sender.steps import STEPS
from aiosync.sender.worker_link import Streaming, WorkerLink
from aiosync.sender.workers import WorkerRegistry
from aiosync.tensors import Prepared
from aiosync.types import Require, SendReport

__all__ = ["WeightSender"]

_AWAKE_NBYTES = 2**20  # of an update whose answer is worth to stay awake for
# After a small send the loop turns for a moment before it sleeps: waking an idle core costs as much
# as the whole round trip. The longer time is for where answers were as quick lately.
_AWAKE_SECONDS = (50e-6, 250e-6)
# After a copy that took longer than this, a send looks again whether somebody died.
_LOOKED_SECONDS = 100e-6
_TURN_SECONDS = 0.001  # for which sends that wait for nobody may keep the loop
_EARLY_SECONDS = 0.002  # that a loop's timer may be
_RING_SECONDS = 0.005  # until a worker that does nothing is rung
_RING_TURNS = 200  # of that length, until it is rung again at most
# First and longest pause between two looks how far workers are behind that tell nobody.
_LOOK_SECONDS = (0.001, 0.01)


class WeightSender:
    """Sends versions of one model to its workers.

    Made by a scheme's ``connect()``; use the scheme's methods. Belongs to one event loop.

    Args:
        model_id: Which model.
        strategy: Name of the strategy, compared in the handshake.
        num_workers: How many workers are expected; ``None`` for any number.
        expected: Indices of those that are waited for.
        require: What counts as success of a send.
        copier: Makes the snapshots.
        meter: Counts the sends.
        parts: Updates hold parts of the names.
        streaming: How payloads travel over links that may damage or lose them.
        how: How ``send()`` copies large weights that are for everybody, see
            :meth:`SnapshotCopier.take`. They are not borrowed while a worker reads slots, which
            have to be filled for it anyway.
        first_version: What versions are counted from.

    Attributes:
        require: As given; may change.
        workers: Who is there, and who is not.
        copier: As given.
        meter: As given.
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
        # What was planned for a worker refers to the last weights that it got.
        self.workers.on_forget = lambda idx: copier.flatteners.pop(idx, None)
        copier.ring = self._ring
        self._how: How = how
        self._first_version = first_version
        self._loop = asyncio.get_running_loop()
        self._sends: dict[int, Send] = {}  # by version; their waiters are futures
        self._copying = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None  # for all sends
        self._looks_at = math.inf  # when it is due
        self._asked_at = 0.0  # when the loop was asked to say that it had a turn; 0: it has said so
        self._bell: asyncio.TimerHandle | None = None
        self._turns: dict[tuple[int, int], int] = {}  # turns in which a worker had which version
        self._recent = 0.0  # seconds that answers took lately

    @property
    def version(self) -> int:
        """Newest version drawn; 0 before any."""
        return self.workers.version

    @property
    def lag(self) -> int:
        """How far the slowest worker is behind; in versions."""
        links = self.workers.links.values()
        return max((self.version - link.applied for link in links), default=0)

    def stats(self) -> SyncStats:
        """How it stands, on any thread."""
        version, meter, workers = self.version, self.meter, self.workers
        return meter.stats(
            under_way=lambda: len(self._sends),
            epoch=workers.epoch if version else 0,
            version=version,
            newest_version=version,
            lag=max(0, self.lag),  # some may have been named a newer one since
            age=meter.age(version),
            workers=workers.stats(version, meter.age),
            **workers.counts,
        )

    def is_ready(self) -> bool:
        """Whether every expected worker is there, and each that subscribes has a version."""
        enough = len(self.workers.links) >= max(1, self.workers.num_workers or 0)
        return enough and all(link.visible for link in self.workers.subscribers)

    # -- connecting ----------------------------------------------------------------------------

    async def connect(
        self,
        planned: Mapping[int | None, Prepared],
        *,
        timeout: float | None,
        processes: Sequence[Any] = (),
    ) -> None:
        """Send the initial weights to every worker that comes, and wait for those expected.

        Raises:
            ConnectTimeout: Some expected worker did not come in time.
            PartialSyncError: A worker came, but could not apply the initial weights or died.
        """
        workers = self.workers
        version, workers.initial = 0, set(planned)
        if planned:
            workers.version = version = self._first_version
            self.meter.mark(version, time.perf_counter())
        async with self._copying:  # a send that comes meanwhile has newer weights
            for idx, plan in planned.items():
                snapshot = await self.copier.take(plan)
                snapshot.version = version
                workers.initial.discard(idx)
                workers.history.add(idx, snapshot)
                for link in workers.subscribers:
                    if idx in (None, link.idx):
                        link.offer(snapshot)
                self.tell()
        await workers.wait_until_joined(version, self.require, processes, timeout)

    # -- sending -------------------------------------------------------------------------------

    async def send(
        self,
        planned: Mapping[int | None, Prepared],
        worker_ids: set[int] | None,
        timeout: float | None,
    ) -> SendReport:
        """Snapshot, send and wait. See ``WeightSyncScheme.send``."""
        started = time.perf_counter()
        quiet = self.is_quiet()
        if self.workers.readers is not None and (
            not quiet or (self._asked_at and started - self._asked_at > _TURN_SECONDS)
        ):
            # Workers come and go on this loop, also where sends leave it no time: what came by now
            # is looked at in the first turn, and what that means in the second.
            for _ in range(3):
                await asyncio.sleep(0)
        sent = self.start(planned, worker_ids, timeout, started)
        if isinstance(sent, SendReport):
            self.tell()
            if not self._asked_at:
                self._asked_at = started
                self._loop.call_soon(self._note_turn)
            return sent
        early: Snapshot | None = None
        future: asyncio.Future[SendReport] | None = None
        snapshots: dict[int | None, Snapshot] = {}
        if sent is None:
            model = self.workers.model_id
            with Waiting("send()", timeout, _not_copied, model=model), self._preparing(started):
                async with self._copying:
                    self.workers.check()  # it may have been closed meanwhile
                    snapshots = await self._take(planned, timeout)
            self.workers.check()
            addressed = self.workers.address(planned, worker_ids)  # others may be there by now
            early = next((each.retain() for each in snapshots.values() if each.filling), None)
        try:
            if sent is None:
                given = snapshots, addressed, worker_ids, timeout, started
                sent = self._dispatch(*given, at_once=not self.workers.has_ended())
            self.tell()
            if sent.nbytes > _AWAKE_NBYTES:
                self._ring()  # what they leave is wanted soon, and waking them costs little here
            if isinstance(sent, SendReport):
                await asyncio.sleep(0)  # workers come on this loop, also where it only sends
                return sent
            future = sent.waiter
            if future.done():
                await asyncio.sleep(0)
            elif sent.nbytes <= _AWAKE_NBYTES:
                quick = self._recent < 2 * _AWAKE_SECONDS[1]
                self._stay_awake(future, time.perf_counter() + _AWAKE_SECONDS[quick])
            report = await future
            self._recent += (report.elapsed - self._recent) / 8
            return report
        except asyncio.CancelledError:
            # The transfer goes on; a worker that fails is reported by the next send.
            if future is not None and future.done() and not future.cancelled():
                future.exception()  # seen by nobody, on purpose
            raise
        finally:
            if early is not None:  # the tensors are the caller's again
                try:
                    await self.copier.settle(early)
                finally:
                    early.release()

    def _stay_awake(self, future: asyncio.Future[Any], until: float) -> None:
        """Look for the answer without sleeping: to be woken takes longer than it does."""
        if not future.done() and time.perf_counter() < until:
            self._loop.call_soon(self._stay_awake, future, until)

    def send_nowait(
        self,
        planned: Mapping[int | None, Prepared],
        worker_ids: set[int] | None,
        timeout: float | None,
    ) -> tuple[int, asyncio.Future[SendReport]]:
        """Snapshot now and send in the background: the version, and what becomes of it."""
        started = time.perf_counter()
        self.workers.check()
        if self.workers.initial:
            raise LocalProtocolError(
                "send_nowait(): connect() is still copying the initial weights: use `await "
                "send()`, or call it after connect()"
            )
        ended = self.workers.has_ended()
        sent = None if ended else self.start(planned, worker_ids, timeout, started)
        if sent is None:
            addressed = self.workers.address(planned, worker_ids)
            patience = STEP_SECONDS if timeout is None else timeout
            with self._preparing(started):
                snapshots = {
                    key: self.copier.take_now(plan, patience) for key, plan in planned.items()
                }
            given = snapshots, addressed, worker_ids, timeout, started
            sent = self._dispatch(*given, at_once=not ended)
        self.tell()
        if isinstance(sent, Send):
            return sent.version, sent.waiter
        seen = self._loop.create_future()
        seen.set_result(sent)
        return sent.version, seen

    async def _take(
        self, planned: Mapping[int | None, Prepared], timeout: float | None
    ) -> dict[int | None, Snapshot]:
        snapshots, how, links = {}, self._how, self.workers.links.values()
        patience = STEP_SECONDS if timeout is None else timeout
        follows = any(link.transport.follows_copies_above is not None for link in links)
        reads_slots = any(link.publisher for link in links)
        if len(planned) > 1 or (reads_slots if how == "borrow" else not follows):
            how = "copy"
        try:
            for key, plan in planned.items():
                snapshots[key] = await self.copier.take(plan, how, patience)
        except BaseException:  # goes on to the caller of send()
            for snapshot in snapshots.values():
                snapshot.release()
            raise
        return snapshots

    def start(
        self,
        planned: Mapping[int | None, Prepared],
        worker_ids: set[int] | None,
        timeout: float | None,
        started: float,
        *,
        off_loop: bool = False,
    ) -> SendReport | Send | None:
        """Send small weights where memory for them is free; else ``None``, with nothing done.

        :meth:`tell` has to follow. ``off_loop``, on another thread than the loop's, does nothing
        with the loop, and nothing of which somebody has to be told: naming the update has to be
        enough. A signal's handler may raise at any step: then some workers may have the version,
        and nothing else is wrong.
        """
        workers = self.workers
        if workers.closed or workers.crash is not None:
            workers.check()
        addressed = self.workers.address(planned, worker_ids)
        if len(planned) != 1 or self._copying.locked():
            return None
        [plan] = planned.values()
        links = self._links_that_look(plan, addressed[0], worker_ids) if off_loop else []
        if off_loop and not links:
            return None
        snapshot = self.copier.take_free(plan, may_wait=off_loop)
        if snapshot is None:
            return None
        took_long = time.perf_counter() - started > _LOOKED_SECONDS
        if (took_long and self.reads_slots and not self.is_quiet()) or (
            links and not all(each.looks_for(plan.layout.digest, snapshot.slot) for each in links)
        ):
            snapshot.release()
            return None
        return self._dispatch(
            dict.fromkeys(planned, snapshot), addressed, worker_ids, timeout, started, off_loop
        )

    def _links_that_look(
        self, plan: Prepared, targets: Collection[int], worker_ids: set[int] | None
    ) -> list[WorkerLink]:
        """The links of the targets, where naming the update is enough and nothing is to be said."""
        links: list[WorkerLink] = []
        for idx in targets:
            link = self.workers.links.get(idx)
            if link is None or not link.looks_for(plan.layout.digest):
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
        all_look: bool = False,
        *,
        at_once: bool = True,
    ) -> SendReport | Send:
        """Hand snapshots to their workers, and to those who come later; takes them over.

        :meth:`tell` has to follow. Returns the report where naming the update was enough, and it
        may be given ``at_once``: nobody has ended of whom the loop does not know.
        """
        workers, meter, about = self.workers, self.meter, None
        targets, lost = addressed
        if meter.observers:
            about = time.perf_counter(), meter.trace(started), workers.counts["wire_nbytes"]
        workers.version = version = max(workers.version + 1, self._first_version)
        if started >= meter.mark_due:
            meter.mark(version, started)
        if lost:
            workers.on_listed(lost)
        nbytes = 0
        for snapshot in snapshots.values():
            snapshot.version, snapshot.trace = version, about and about[1]
            nbytes += snapshot.nbytes
        seen: set[int] = set()  # set[int]() is dear
        for idx in targets:
            record, mine = workers.records[idx], snapshots.get(idx) or snapshots.get(None)
            link = workers.links.get(idx)
            if link is not None and mine is not None and link.see(mine, all_look):
                seen.add(idx)
                if record.error is not None:
                    record.recover()
        send, require = None, self.require
        enough = worker_ids is not None or require == "all" or require <= len(seen)
        if not (seen and enough and at_once) or len(seen) < len(targets):
            send = self._sends[version] = Send(
                version,
                {*targets},
                require,
                started=started,
                nbytes=nbytes,
                lost=lost,
                named=worker_ids is not None,
                waiter=self._loop.create_future(),
                about=about,
                timeout=math.inf if timeout is None else timeout,
                acked=seen,
            )
            for idx in sorted(send.waiting):
                record, mine = workers.records[idx], snapshots.get(idx) or snapshots.get(None)
                if idx in workers.links and mine is not None:
                    workers.links[idx].offer(mine)
                else:
                    error = record.error or ConfigError(f"no weights were given for worker {idx}")
                    send.resolve(idx, Outcome(version, error=error))
        # Workers are busy with it from here on: the rest costs the sender no time.
        for key, snapshot in snapshots.items():
            if worker_ids is None:
                workers.history.add(key, snapshot)
                continue
            for idx in targets:  # also one that is to come again
                if (snapshots.get(idx) or snapshots.get(None)) is snapshot:
                    workers.history.add(idx, snapshot.retain())
            snapshot.release()
        if LOGGER.isEnabledFor(logging.DEBUG):
            text = f"version {version} is sent to workers {sorted(targets)}"
            log(logging.DEBUG, "send", text, model=workers.model_id, version=version)
        if send is None:
            elapsed, acked = time.perf_counter() - started, frozenset(seen)
            meter.finished["ok"] += 1  # the short way, as this is what a small send costs
            meter.nbytes += nbytes
            if about is not None:
                self._tell("ok", version, started, nbytes, about)
            return SendReport(
                workers.epoch, version, acked, lost=lost, elapsed=elapsed, nbytes=nbytes
            )
        if not send.waiting:
            self._settle(send)
        else:
            send.look_at = min(time.perf_counter() + FIRST_SECONDS, started + send.timeout)
            self._look_by(send.look_at)
        return send

    # -- what becomes of sends -----------------------------------------------------------------

    def _on_outcome(self, idx: int, outcome: Outcome) -> bool:
        send = self._sends.get(outcome.version)
        if send is not None and send.resolve(idx, outcome):
            # With ``require="all"`` it waits for every target, so that it names each failure.
            if not send.waiting or (send.require != "all" and send.satisfied):
                self._settle(send)
        return send is not None

    def _settle(self, send: Send) -> None:
        """Tell who waits for a send what became of it; the first time."""
        workers, future = self.workers, send.waiter
        if send.acked and send.turns and workers.has_ended():
            send.turns -= 1
            self._loop.call_soon(self._settle, send)  # the loop is about to notice
            return
        for idx in send.acked - workers.links.keys():
            gone = workers.record(idx)
            if gone.error is not None and gone.subscribes:
                send.withdraw(idx, gone.error)
        if (send.waiting and not send.satisfied) or self._sends.pop(send.version, None) is None:
            return
        records = workers.records
        outcome, error = send.result()
        if send.lost and not (send.workers or workers.links):  # nobody is there
            if not any(each.has_left for each in records.values()):
                outcome = "error"
                error = PartialSyncError(failed=send.lost, version=send.version)
        self._count(send, outcome)
        if error is not None or future.done():  # cancelled: the next send says who failed
            replaced = {idx: why for idx, why in send.lost.items() if idx in workers.links}
            workers.replaced = replaced | workers.replaced
        if future.done():
            return
        left = {idx for idx in send.left if send.named or not workers.record(idx).reported}
        late = {}  # what an earlier send did not wait for is told, too
        for idx, record in records.items():
            if idx in send.failed:
                record.reported = True
            elif idx in send.waiting and record.error is not None and not record.reported:
                if idx in workers.links:
                    late[idx] = record.error
        if error is not None and workers.closed:
            closed = TransportClosed(
                f"this scheme was closed while version {send.version} was under way"
            )
            closed.__cause__ = error
            future.set_exception(closed)
            future.exception()  # whoever closed this knows it, where nobody waits
            return
        if error is not None:
            future.set_exception(error)
            return
        for idx in left | late.keys():
            workers.record(idx).reported = True
        future.set_result(
            SendReport(
                epoch=workers.epoch,
                version=send.version,
                acked=frozenset(send.acked),
                skipped=send.skipped,
                failed={**late, **send.failed},
                lost=dict(send.lost),
                left=frozenset(left),
                waiting=frozenset(send.waiting),
                elapsed=time.perf_counter() - send.started,
                nbytes=send.nbytes,
            )
        )

    def _count(self, send: Send, outcome: SyncOutcome) -> None:
        self.meter.finished[outcome] += 1
        if outcome == "ok":
            self.meter.nbytes += send.nbytes
        if send.about is not None:
            self._tell(outcome, send.version, send.started, send.nbytes, send.about)

    def _tell(
        self,
        outcome: SyncOutcome,
        version: int,
        started: float,
        nbytes: int,
        about: tuple[float, str | None, int],
    ) -> None:
        copied, trace, before = about
        seconds = {"snapshot": copied - started, "wire": time.perf_counter() - copied}
        travelled, epoch = self.workers.counts["wire_nbytes"] - before, self.workers.epoch
        self.meter.tell(outcome, epoch, version, started, seconds, nbytes, travelled, trace)

    @contextlib.contextmanager
    def _preparing(self, started: float) -> Iterator[None]:
        """While a send has no version yet: it may end here, and counts all the same."""
        try:
            yield
        except AiosyncError as exc:
            self.meter.ended("timeout" if isinstance(exc, SyncTimeout) else "error", 0, 0, started)
            raise

    def _on_crash(self, error: BaseException) -> None:
        sends, self._sends = self._sends, {}
        for send in sends.values():
            self._count(send, "error")
            if not send.waiter.done():
                send.waiter.set_exception(error)

    def _look_by(self, when: float) -> None:
        # The timer is left to run when a send ends: making one is as dear as a small send.
        if when < self._looks_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(when - time.perf_counter(), self._look)
            self._looks_at = when

    def _look(self) -> None:
        """Some sends are still under way: their time is over, or somebody wants to know."""
        self._looks_at, now = math.inf, time.perf_counter() + _EARLY_SECONDS
        for send in list(self._sends.values()):
            ends = send.started + send.timeout
            if ends <= now:
                send.time_out()
                self._settle(send)
            elif send.look_at <= now:
                send.look_at = min(now + NEXT_SECONDS, ends)
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
        self._look_by(min((each.look_at for each in self._sends.values()), default=math.inf))

    # -- workers that look for themselves ------------------------------------------------------

    @property
    def reads_slots(self) -> bool:
        """Whether there are workers that read slots."""
        arena = self.copier.arena
        return arena is not None and arena.num_links > 0

    def is_quiet(self) -> bool:
        """Whether there are workers that read slots, and none of them said something or ended."""
        workers = self.workers
        if not self.reads_slots:
            return False
        if workers.readers is None:
            workers.readers = select.poll()
            for fd in [fd for link in workers.links.values() for fd in link.watched]:
                workers.readers.register(fd, select.POLLIN)
        return not workers.readers.poll(0)

    def has_to_tell(self) -> bool:
        """Whether :meth:`tell` has something to do."""
        return (
            self._bell is None
            or bool(self.workers.changed.waiting)
            or any(
                link.wanted is not None or (link.publisher and link.publisher.bell)
                for link in self.workers.links.values()
            )
        )

    def tell(self) -> None:
        """Tell those who wait for a version that there is one, and look later who took it."""
        workers = self.workers
        if workers.changed.waiting:  # seldom
            workers.changed.notify()
        for link in workers.links.values():
            if link.wanted is not None:
                workers.answer(link)
            if link.publisher is not None and link.publisher.bell and link.is_behind:
                link.ring()
        if self._bell is None and self.copier.arena is not None:
            self._bell = self._loop.call_later(_RING_SECONDS, self._ring_late)

    def _note_turn(self) -> None:
        self._asked_at = 0.0

    def _ring(self) -> None:
        """Ring workers that have not taken what they were named."""
        for link in self.workers.links.values():
            if link.is_behind:
                link.ring()

    def _ring_late(self) -> None:
        """Ring workers that have not looked since they were named an update.

        Each ever more seldom while it takes none, whatever the others do. One that does not compute
        follows all the same, and gives its slot back.
        """
        self._bell, before, self._turns = None, self._turns, {}
        for idx, link in self.workers.links.items():
            if link.is_behind:
                has = idx, link.applied
                self._turns[has] = turns = before.get(has, 0) + 1
                if turns & (turns - 1) == 0 or turns % _RING_TURNS == 0:
                    link.ring()
        if self._turns:
            self._bell = self._loop.call_later(_RING_SECONDS, self._ring_late)

    # -- waiting for workers -------------------------------------------------------------------

    async def wait_for(
        self,
        version: int,
        *,
        staged: bool = False,
        timeout: float | None,
        late: SyncTimeout,
        waiting: Waiting,
    ) -> int:
        """Wait until every subscriber has applied at least ``version``.

        Args:
            version: The version.
            staged: It is enough if all of it is there.
            timeout: Seconds.
            late: Raised after them.
            waiting: Entered where it has to wait.

        Returns:
            What the slowest one has.

        Raises:
            PartialSyncError: A worker refused it, and has nothing newer on its way; or it cannot
                come back; or, with ``staged``, it went before it had it.
        """

        def found() -> dict[int, int]:
            links = self.workers.subscribers
            return {each.idx: each.outbox.received if staged else each.visible for each in links}

        def reached() -> bool:
            versions, failed = found(), {}
            acked = [idx for idx, each in versions.items() if each >= version]
            for idx, record in self.workers.records.items():
                link, error = self.workers.links.get(idx), record.error
                if error is None or record.has_left or idx in acked or not record.subscribes:
                    continue
                if link is None and is_final(error):  # nothing dials it again
                    failed[idx] = error
                # What is on its way to a worker that refused one may be what is waited for.
                elif (staged or (link is not None and link.outbox.is_idle)) and (
                    record.version >= version and (link is None or link.visible < version)
                ):
                    failed[idx] = error
            if failed:
                raise PartialSyncError(acked=acked, failed=failed, version=version)
            # With nobody there, nobody has it: who comes later gets it. Who left is not waited for.
            records = self.workers.records.values()
            if not versions and version <= self.version:
                return bool(records) and all(each.has_left for each in records)
            return bool(versions) and len(acked) == len(versions)

        await self.wait_until(reached, timeout=timeout, late=late, waiting=waiting)
        # Somebody may have come or gone since.
        return max(version, min(found().values(), default=version))

    async def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout: float | None,
        late: SyncTimeout,
        waiting: Waiting,
    ) -> None:
        """Wait for something that workers change."""
        self.workers.check()
        if condition():
            await asyncio.sleep(0)  # answers come on this loop, also where nobody has to wait
            return
        try:
            with waiting:
                async with asyncio.timeout(timeout):
                    while not condition():
                        await self.workers.changed.wait()
                        self.workers.check()
        except TimeoutError as exc:
            raise late from exc

    async def wait_lag_below(
        self, limit: int, *, timeout: float | None, late: SyncTimeout, waiting: Waiting
    ) -> int:
        """Wait until no worker is ``limit`` or more versions behind.

        Of those only that have something on their way: one that refused what it was sent, or was
        sent nothing, is not waited for. Returns how far the slowest one is behind.
        """
        timer: asyncio.TimerHandle | None = None

        def behind() -> dict[int, int]:
            return {each.idx: each.lag for each in self.workers.subscribers if each.lag >= limit}

        def look(pause: float) -> None:
            nonlocal timer
            self._ring()  # one that does not compute follows all the same
            self.workers.changed.notify()
            timer = self._loop.call_later(pause, look, min(2 * pause, _LOOK_SECONDS[1]))

        look(_LOOK_SECONDS[0])
        try:
            await self.wait_until(lambda: not behind(), timeout=timeout, late=late, waiting=waiting)
        except SyncTimeout as exc:
            text = ", ".join(f"{idx} by {lag}" for idx, lag in behind().items())
            raise type(late)(f"{late}: behind are workers {text}") from exc.__cause__
        finally:
            if timer is not None:
                timer.cancel()
        return max((link.lag for link in self.workers.subscribers), default=0)

    # -- closing -------------------------------------------------------------------------------

    def _end(self) -> None:
        self.workers.end()
        for timer in (self._timer, self._bell):
            if timer is not None:
                timer.cancel()

    async def aclose(self) -> None:
        """Close every link; sends under way fail with ``TransportClosed``. Bounded."""
        if self.workers.closed:
            return
        self._end()
        try:
            await self.workers.tasks.aclose()
        finally:
            await self.copier.aclose()

    def abort(self) -> None:
        """The same from synchronous code, without waiting for the tasks."""
        if self.workers.closed:
            return
        self._end()
        self.workers.tasks.abort()
        self.copier.close()


def _not_copied() -> str:
    if STEPS.open:
        return "an optimizer's step in another thread has not ended"
    return "another copy is under way, or no memory for this one is free yet"
