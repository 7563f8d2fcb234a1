"""Registry of a sender's workers: connected and lost ones, and the updates for late joiners.

Must not import the receiver, nor know what a send is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aiosync._log import log
from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    PartialSyncError,
    PeerClosed,
    TransportClosed,
)
from aiosync.events import WorkerState, WorkerStats
from aiosync.protocol import draw_epoch
from aiosync.rendezvous.dialer import is_final
from aiosync.rendezvous.handshake import admit
from aiosync.sender.outbox import Outcome, Send, WorkerLeft
from aiosync.sender.update_queue import LateJoinerUpdates
from aiosync.sender.worker_ends import LinkPolls, ProcessWatch, is_up, watch_process
from aiosync.sender.worker_link import Streaming, WorkerLink
from aiosync.transports.base import Transport
from aiosync.types import Require
from aiosync.wire import Current, Hello, Leave

__all__ = ["WorkerRecord", "WorkerRegistry"]

# Most records kept of workers that went and did not come back.
_REMEMBERED = 64


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """The sender's record of the worker with one index.

    Attributes:
        pid: The process that the index was given to, as its Hello said.
        session: Session of the receiver that the index was given to.
        joined: Process of the worker that joined last.
        subscribes: True if the worker gets every update, so that sends miss it when it is gone.
        error: The reason why the worker is not connected; or why it refused, or did not get,
            ``version``.
        version: Newest version that it refused or did not get; 0 for none.
        had: The version that the worker had when its last link ended; 0 for none.
        reported: True if a call of the user has reported the error, or will.
        listed: True if the report of a send to others lists the error: that is enough to forget the
            record.
        where: Text for errors while a worker that has to be dialled is not connected.
    """

    pid: int = 0
    session: bytes | None = None
    joined: int = 0
    subscribes: bool = True
    error: AiosyncError | None = None
    version: int = 0
    had: int = 0
    reported: bool = True
    listed: bool = False
    where: Callable[[], str] | None = None

    @property
    def has_left(self) -> bool:
        """True if the worker was closed and did not come back."""
        return isinstance(self.error, WorkerLeft)

    def fail(self, error: AiosyncError, version: int = 0, *, reported: bool) -> None:
        """Note why the worker is not connected, or lacks a version."""
        self.error, self.version, self.reported = error, version, reported
        self.listed = False

    def recover(self) -> None:
        """Clear the error: the worker is connected, or has a newer version."""
        self.error, self.version, self.reported = None, 0, True


class WorkerRegistry:
    """Registry: admits links, notices their end, and keeps the newest weights for late joiners.

    Args:
        model_id: Name of the model.
        strategy: Name of the strategy, compared in the handshake.
        num_workers: Number of expected workers; ``None`` for any number.
        expected: Indices of the workers that ``connect()`` waits for.
        on_outcome: Called with a worker's index and the outcome of a version there; returns True if
            a send counts it. ``None`` if no call waits for workers, and nothing is to be reported.
        on_crash: Called when a background task ends with an exception.
        parts: Updates hold parts of the names.
        streaming: Settings of links whose payloads may be damaged or lost on the way.

    Attributes:
        epoch: Epoch of the versions.
        version: The version that was drawn last; 0 before any.
        closed: True once the owner has closed the registry.
        crash: The exception that a background task ended with, and its traceback; ``None`` for
            none.
        records: Records of workers, by index.
        links: Links of the workers that are connected, by index, in its order; replaced, never
            changed, so that any thread may iterate over them.
        polls: Poll objects over the links.
        is_joining: True until ``connect()`` no longer waits for expected workers.
        replaced: Errors of workers that died unreported and whose index has a new holder, by index.
        arriving: Links in their handshake, with the worker's index once it is known, else -1.
        refusals: The reasons of the last refusals.
        initial: Indices of the workers whose initial weights are still being copied; ``None`` for
            all.
        history: Updates for workers that join later.
        changed: Wakes the calls that wait for any change here.
        on_empty: Called when the last worker's link was lost.
        on_forget: Called with the index of a worker whose record was dropped.
        counts: Counts for :class:`SyncStats`: bytes of payloads that links took, and how often a
            worker skipped or refused a version, or came back.
        note: Returns the text that a worker is sent while there is no update for it.
        strangers: Returns the refusals of peers before there was a link.
    """

    def __init__(
        self,
        *,
        model_id: str,
        strategy: str,
        num_workers: int | None,
        expected: Sequence[int] = (),
        on_outcome: Callable[[int, Outcome], bool] | None,
        on_crash: Callable[[BaseException], None],
        parts: bool = False,
        streaming: Streaming | None = None,
    ) -> None:
        self.model_id = model_id
        self.strategy = strategy
        self.num_workers = num_workers
        self.expected = expected
        self.epoch: int = draw_epoch()
        self.version: int = 0
        self.streaming = streaming
        self._on_outcome = on_outcome
        self._on_crash = on_crash
        self.crash: tuple[BaseException, TracebackType | None] | None = None
        self.closed: bool = False
        self.records: dict[int, WorkerRecord] = {}
        self.links: dict[int, WorkerLink] = {}
        self.polls: LinkPolls = LinkPolls()
        self.is_joining: bool = bool(expected)
        # The first error of each worker, by process id.
        self._causes: dict[int, AiosyncError] = {}
        self.replaced: dict[int, AiosyncError] = {}
        self.arriving: dict[Transport, int] = {}
        self.refusals: list[str] = []
        self.initial: set[int | None] = set()
        self.history: LateJoinerUpdates = LateJoinerUpdates(parts, num_workers)
        self.changed: Notifier = Notifier()
        self.on_empty: Callable[[], None] = lambda: None
        self.on_forget: Callable[[int], object] = lambda idx: None
        self.counts: dict[str, int] = dict.fromkeys(
            ("wire_nbytes", "skipped", "refused", "reconnects"), 0
        )
        self.note: Callable[[], str] = str
        self.strangers: Callable[[], list[str]] = list
        self.tasks: TaskOwner = TaskOwner(self.crashed)

    # -- records and links ---------------------------------------------------------------------

    def record(self, idx: int) -> WorkerRecord:
        """Return the record of a worker, made if there is none yet."""
        return self.records.setdefault(idx, WorkerRecord())

    @property
    def sends_parts(self) -> bool:
        """True if updates hold parts of the names."""
        return self.history.parts

    @property
    def subscribers(self) -> list[WorkerLink]:
        """Links of the workers that get every update, not only the versions that they ask for."""
        return [link for link in self.links.values() if link.hello.subscribe]

    def stats(self, newest: int, age: Callable[[int], float]) -> tuple[WorkerStats, ...]:
        """Return the state of each worker. May be called on any thread.

        Args:
            newest: The newest version.
            age: Returns how many seconds ago a version was sent.
        """
        coming = () if self.closed else (*self.expected, *self.arriving.copy().values())
        found = {idx: WorkerStats(idx, 0, 0, newest, "joining") for idx in coming if idx >= 0}
        for idx, record in self.records.copy().items():
            link, error, version = self.links.get(idx), record.error, record.had
            state: WorkerState = "left" if record.has_left else "lost"
            if link is not None:
                version = link.applied
                state = "joining" if not version else "lagging" if newest - version > 1 else "ready"
            elif error is None:
                # The worker comes back, or everything is closed.
                continue
            lag = max(0, newest - version)
            found[idx] = WorkerStats(idx, record.pid, version, lag, state, age(version))
        return tuple(each for _, each in sorted(found.items()))

    def check(self) -> None:
        """Raise the error that ended the sender, if it has ended."""
        if self.crash is not None:
            error, traceback = self.crash
            # Restore the traceback, which would grow at each raise.
            raise error.with_traceback(traceback)
        if self.closed:
            raise TransportClosed("this scheme was closed")

    def crashed(self, error: BaseException) -> None:
        """End the sender after a bug in a background task, whose work will never be done."""
        self.crash = error, error.__traceback__
        self._on_crash(error)
        # Other code cancelled a task, so that no task may be left to read the links.
        if isinstance(error, TransportClosed):
            self._end_links(error)
        self.changed.notify()

    # -- joining -------------------------------------------------------------------------------

    def welcome(
        self,
        transport: Transport,
        worker_idx: int | None = None,
        hello: Hello | None = None,
        *,
        given: bool = False,
    ) -> None:
        """Start the handshake on a new link, in the background.

        Args:
            transport: The link.
            worker_idx: Index of the worker, if the link belongs to one.
            hello: The worker's Hello, if it was read already.
            given: There will be no other link to that worker.
        """
        if self.crash is not None:
            transport.abort()
            return
        self.arriving[transport] = -1
        coroutine = self._welcome(transport, worker_idx, hello, given=given)
        self.tasks.start(coroutine, "aiosync handshake")

    async def _welcome(
        self, transport: Transport, expected_idx: int | None, hello: Hello | None, *, given: bool
    ) -> None:
        try:
            hello, idx = await admit(
                transport,
                model_id=self.model_id,
                strategy=self.strategy,
                epoch=self.epoch,
                num_workers=self.num_workers,
                worker_idx=expected_idx,
                indices=self._indices,
                holder=self._holder,
                reserve=lambda idx, hello: self._reserve(transport, idx, hello),
                hello=hello,
                given=given,
                note=self.note,
            )
        except AiosyncError as exc:
            # The worker was told the reason; connect() repeats it if it waits for the worker in
            # vain.
            self.arriving.pop(transport, None)
            self.not_let_in(str(exc))
            if expected_idx is not None and (given or is_final(exc)):
                # No other link will reach this worker.
                self.not_reached(expected_idx, exc)
            elif expected_idx is not None:
                record = self.record(expected_idx)
                is_lost = record.error is not None and not record.has_left
                if is_lost and expected_idx not in self.links and record.subscribes:
                    # With this error, send() says why the worker does not come back.
                    record.error = exc
            await transport.aclose()
            self.changed.notify()
            return
        except BaseException:
            # The task was cancelled, or has met a bug that crashed() is told.
            self.arriving.pop(transport, None)
            transport.abort()
            raise
        # A link that is gone from the dictionary has lost its index to the next one.
        if self.arriving.pop(transport, None) is not None:
            self._join(transport, idx, hello)

    def _join(self, transport: Transport, idx: int, hello: Hello) -> None:
        record, old = self.record(idx), self.links.get(idx)
        newest = max(self.version, self.history.for_worker(idx).version)
        if hello.epoch == self.epoch and (hello.version or 0) > newest:
            # No worker can have that version. If it were believed, send() would find it newer than
            # its own.
            hello = dataclasses.replace(hello, epoch=None, version=None)
        gone, is_untold = record.error, not (record.reported or record.has_left)
        # The old link has ended, though the loop has not noticed.
        if old is not None:
            gone, is_untold = PeerClosed(f"{old.name} ended"), old.hello.subscribe
        if gone is not None and is_untold and record.joined != hello.pid:
            self.replaced[idx] = gone
        record.recover()
        record.joined, record.subscribes = hello.pid, hello.subscribe
        link = WorkerLink(idx, transport, hello, self)
        self.links = dict(sorted((self.links | {idx: link}).items()))
        if old is not None and gone is not None:
            old.lose(gone)
        self.polls.reset()
        self._log("joined", f"worker {idx} (process {hello.pid}) joined", idx)
        watch_process(transport, hello.pid)
        self.tasks.start(link.read(), f"aiosync acks of worker {idx}")
        if link.hello.subscribe:
            self._offer_history(link)
        self.changed.notify()

    def _indices(self) -> Iterable[int]:
        """Return the indices in the order in which workers that ask for none get them."""
        if self.num_workers is None:
            return itertools.count()
        indices = range(self.num_workers)
        if not self.is_joining:
            return indices
        # A worker that came and left counts as one that came, as long as its index is its own.
        return sorted(indices, key=lambda idx: self.record(idx).pid != 0)

    def _holder(self, idx: int, hello: Hello) -> int | None:
        """Return the process that has an index, if it is alive and its link is up; else ``None``.

        The index is also free for the very receiver that has it, whose old link has broken.
        """
        record = self.records.get(idx)
        if record is None or (hello.session is not None and record.session == hello.session):
            return None
        links = [link for link, taken in self.arriving.items() if taken == idx]
        if idx in self.links:
            links.append(self.links[idx].transport)
        return record.pid if any(map(is_up, links)) else None

    def _reserve(self, transport: Transport, idx: int, hello: Hello) -> int:
        for link in [link for link, taken in self.arriving.items() if taken == idx]:
            # This link has ended during its handshake.
            del self.arriving[link]
            link.abort()
        self.arriving[transport] = idx
        record = self.record(idx)
        self.counts["reconnects"] += hello.session is not None and hello.session == record.session
        record.pid, record.session = hello.pid, hello.session
        if idx in self.initial or None in self.initial:
            return self.version
        return self.history.for_worker(idx).version

    def not_let_in(self, error: OSError | str) -> None:
        """Note the refusal of a worker, which connect() reports if it waits in vain."""
        text = error if isinstance(error, str) else f"a worker could not be let in: {error}"
        if text not in self.refusals:
            self._log("refused", text)
        self.refusals = [*[each for each in self.refusals if each != text][-2:], text]

    def not_reached(self, idx: int, error: AiosyncError) -> None:
        """Note that a worker which cannot dial cannot be reached any more."""
        if idx not in self.links:
            record = self.record(idx)
            record.subscribes = True
            record.fail(error, reported=False)
        self.changed.notify()

    def _log(
        self, phase: str, text: str, worker: int | None = None, version: int | None = None
    ) -> None:
        log(logging.INFO, phase, text, model=self.model_id, worker=worker, version=version)

    # -- targets of a send ---------------------------------------------------------------------

    def address(
        self, planned: Collection[int | None], worker_ids: set[int] | None
    ) -> tuple[set[int], dict[int, AiosyncError]]:
        """Return the workers that a send addresses, and the lost ones that it has to do without."""
        known, targets, lost = set(), set(), dict(self.replaced)
        for idx, record in self.records.items():
            link, error = self.links.get(idx), record.error
            if link is None and (error is None or not record.subscribes):
                continue
            known.add(idx)
            if (
                idx in worker_ids
                if worker_ids is not None
                else (None in planned or idx in planned)
                and (link.hello.subscribe if link is not None else not record.reported)
            ):
                targets.add(idx)
            elif link is None and error is not None and not record.has_left:
                lost[idx] = error
        if worker_ids is not None and worker_ids != targets:
            listed = ", ".join(map(str, sorted(known))) or "none"
            idx = min(worker_ids - targets)
            raise ConfigError(f"Worker {idx} not registered; workers that connected: {listed}")
        return targets, lost

    # -- updates for a worker ------------------------------------------------------------------

    def _offer_history(self, link: WorkerLink) -> None:
        queue = self.history.for_worker(link.idx)
        missing = [group for group in queue.groups if group[-1].version > link.outbox.newest]
        # A worker that asks gets one answer.
        if missing and not link.hello.subscribe:
            missing = [tuple(each for group in missing for each in group)]
        for group in missing:
            link.offer(*group)

    def answer(self, link: WorkerLink) -> None:
        """Answer a worker's request if its version is here: with updates, or with a message."""
        if link.wanted is None:
            return
        version = self.history.for_worker(link.idx).version
        if version < link.wanted:
            # A later send answers.
            return
        link.wanted = None
        if not version or link.outbox.newest >= version:
            link.say(Current(self.epoch, version))
        else:
            self._offer_history(link)

    def on_outcomes(self, link: WorkerLink, outcomes: Sequence[Outcome]) -> None:
        """Register the outcomes of versions at a worker."""
        record = self.records.get(link.idx)
        for outcome in outcomes:
            error, by = outcome.error, outcome.by
            self.counts["skipped"] += by is not None
            link.skipped += by is not None
            counted = self._on_outcome is None or self._on_outcome(link.idx, outcome)
            if isinstance(error, ApplyError):
                self.counts["refused"] += 1
                # Only the first line: a worker that sends long texts must not fill the log.
                first = str(error).partition("\n")[0]
                self._log("refused", first, link.idx, outcome.version)
                self._keep_cause(link, error)
            if record is None or isinstance(error, WorkerLeft):
                continue
            if error is not None and self.links.get(link.idx) is link:
                record.fail(error, outcome.version, reported=counted)
            elif error is not None and link.idx not in self.links:
                # The worker went while this version was on its way.
                record.version = outcome.version
            elif record.error is not None and error is None and by is None:
                if outcome.version > record.version:
                    record.recover()
        self.changed.notify()

    def _keep_cause(self, link: WorkerLink, error: AiosyncError) -> None:
        """Keep the first error of a process, as another process may get its index."""
        if self.is_joining:
            self._causes.setdefault(link.hello.pid, error)

    # -- leaving -------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        """Return True if the kernel shows the end of a worker that the loop has not noticed yet."""
        ends = self.polls.ends or self.polls.watch_ends(self.links.values())
        return bool(ends.poll(0))

    def on_lost(self, link: WorkerLink, error: AiosyncError) -> None:
        """Remove a link that has ended, and record why."""
        self.polls.reset()
        self._keep_cause(link, error)
        if self.links.get(link.idx) is link:
            self.links = {idx: each for idx, each in self.links.items() if each is not link}
            record = self.records[link.idx]
            record.had = link.applied
            if not self.closed:
                phase = "left" if isinstance(error, WorkerLeft) else "lost"
                self._log(phase, f"worker {link.idx} (process {link.hello.pid}): {error}", link.idx)
                # A refusal before the end is still to be reported, so it stays the error. No send
                # misses a worker that only asks for versions; connect() may.
                if record.reported:
                    told = not link.hello.subscribe or self._on_outcome is None
                    record.fail(error, reported=told)
                # Move the record to the end, as the last worker that went.
                self.records[link.idx] = self.records.pop(link.idx)
                self._forget()
        link.transport.abort()
        self.changed.notify()
        if not self.closed and not self.links:
            self.on_empty()

    def on_listed(self, lost: Mapping[int, AiosyncError]) -> None:
        """Note that a report lists these workers as lost."""
        self.replaced = {}
        for idx in lost:
            self.record(idx).listed = True
        if len(lost) > _REMEMBERED:
            self._forget()

    def _forget(self) -> None:
        """Drop all but the last records of workers that went, as new indices may come for ever."""
        kept = {*self.expected, *self.arriving.values()}
        gone = [
            idx
            for idx, each in self.records.items()
            if (each.reported or each.listed or each.has_left)
            and idx not in kept
            and idx not in self.links
        ]
        for idx in gone[:-_REMEMBERED]:
            del self.records[idx]
            self.replaced.pop(idx, None)
            self.history.forget(idx)
            self.on_forget(idx)

    def end(self) -> None:
        """Close every link; updates on their way fail with ``TransportClosed``."""
        self.closed = True
        self._end_links(TransportClosed("this scheme was closed"))
        self.history.clear()
        self.changed.notify()

    def _end_links(self, error: AiosyncError) -> None:
        for link in self.links.values():
            # The link may be writing, or may have ended.
            with contextlib.suppress(AiosyncError):
                link.transport.send_nowait(Leave())
            link.lose(error)
        # A handshake task that never ran cannot close its link.
        for transport in self.arriving:
            transport.abort()

    # -- waiting for the expected workers ------------------------------------------------------

    def may_come(self, error: BaseException) -> bool:
        """Return True if others are linked or may still come after ``connect()`` raised this."""
        if not isinstance(error, ConnectTimeout | PartialSyncError):
            return False
        failed = getattr(error, "failed", self.expected)
        return bool(self.links) or len(failed) < len(self.expected)

    async def wait_until_joined(
        self, version: int, require: Require, processes: Sequence[Any], timeout: float | None
    ) -> None:
        """Wait until every expected worker has applied ``version``, or has failed.

        The wait ends as soon as so many processes have ended that ``require`` cannot be met.

        Raises:
            ConnectTimeout: Some expected worker did not come in time.
            PartialSyncError: A worker came, but could not apply the weights or died.
            ConfigError: An element of ``processes`` is no process.
        """
        watch = ProcessWatch(processes, self.changed.notify)
        tolerated = len(self.expected) - Send(version, {*self.expected}, require).needed
        failed, absent, late = dict[int, AiosyncError](), list[int](), list[int]()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self.check()
                    failed, absent, late = self._look(version)
                    short = self._add_ended(failed, absent, watch)
                    settled = failed.keys() | {idx for idx in absent if self.records[idx].has_left}
                    if settled >= {*absent, *late} or short > max(0, tolerated):
                        break
                    await self.changed.wait()
        except TimeoutError as exc:
            ended = "".join(f"; worker {idx}: {error}" for idx, error in failed.items())
            raise ConnectTimeout(
                f"model {self.model_id!r}: after {timeout:g} s {self.awaited(version)}{ended}. "
                "Several schemes connect in the same order on both sides, or with connect_all()"
            ) from exc
        finally:
            watch.close()
            self.is_joining = False
            self._causes.clear()
        for idx, error in failed.items():
            record = self.records[idx]
            record.fail(error, record.version, reported=True)
        if failed:
            missing = {idx for idx in (*absent, *late) if not self.records[idx].has_left}
            joined = {*self.expected} - failed.keys() - missing
            raise PartialSyncError(acked=joined, failed=failed, version=version)

    def _look(self, version: int) -> tuple[dict[int, AiosyncError], list[int], list[int]]:
        """Return the expected workers that failed, that are absent, and that lack ``version``."""
        failed, absent, late = dict[int, AiosyncError](), list[int](), list[int]()
        for idx in self.expected:
            record = self.record(idx)
            link, error = self.links.get(idx), record.error
            if error is not None and not record.has_left:
                failed[idx] = error
            if link is None:
                absent.append(idx)
            elif link.hello.subscribe and self.history.for_worker(idx).version:
                has = link.visible if link.hello.has_target else link.outbox.received
                if has < version:
                    late.append(idx)
        return failed, absent, late

    def _add_ended(
        self, failed: dict[int, AiosyncError], absent: Sequence[int], watch: ProcessWatch
    ) -> int:
        """Add the workers that will not come, as too few processes are left to become them.

        Returns:
            The number of expected workers that cannot come.
        """
        records, processes = self.records, watch.processes()
        missing = [
            idx for idx in absent if not records[idx].has_left and idx not in self.arriving.values()
        ]
        joined = {link.hello.pid for link in self.links.values()}
        joined |= {records[idx].pid for idx in absent if records[idx].has_left}
        coming = sum(pid not in watch.ended and pid not in joined for pid in processes)
        unknown = max(0, len(self.expected) - len(processes))
        short = max(0, len(missing) - coming - unknown)
        free = [idx for idx in missing if idx not in failed]
        to_name = short - (len(missing) - len(free))
        came = joined | {records[idx].pid for idx in failed}
        ended = [each for each, pid in enumerate(processes) if pid in watch.ended - came]
        for each in ended[: max(0, to_name)]:
            # The index of that process may have been given to another one.
            idx = each if each in free else free[0]
            free.remove(idx)
            cause = self._causes.get(processes[each])
            why = " before it connected" if cause is None else f": {cause}"
            text = f"process {processes[each]} ended{watch.exit_code(each)}{why}"
            failed[idx] = ConnectError(text + self._refused())
        return short

    def _refused(self) -> str:
        refusals = [*self.refusals, *self.strangers()]
        return f"; refused: {'; '.join(refusals)}" if refusals else ""

    def awaited(self, version: int) -> str:
        """Say which expected workers are absent or lack ``version``, and what is known of them."""
        _, absent, late = self._look(version)
        known = [self.records[idx] for idx in absent]
        parts = [each.where() for each in known if each.where is not None and not each.has_left]
        left = [idx for idx in absent if self.records[idx].has_left]
        absent = [idx for idx in absent if self.records[idx].where is None and idx not in left]
        if left:
            parts.append(f"workers {left} connected, and left")
        if absent:
            parts.append(
                f"workers {absent} did not connect: each has to call init_on_receiver() and "
                "connect() on its copy of this scheme in that time (timeout=), within which its "
                "process has to start, too"
            )
        if late:
            parts.append(f"workers {late} connected but have not applied the initial weights")
        return "; ".join(parts) + self._refused()
