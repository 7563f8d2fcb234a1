"""Registry of a sender's workers: connected and lost ones, and the updates for late joiners.

Must not import the receiver, nor know what a send is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType

from aiosync._log import log
from aiosync._tasks import Notifier, TaskOwner
from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    PeerClosed,
    TransportClosed,
)
from aiosync.events import WorkerState, WorkerStats
from aiosync.protocol import draw_epoch
from aiosync.sender.admission import Admission
from aiosync.sender.deltas import Deltas
from aiosync.sender.expected_workers import ExpectedWorkers
from aiosync.sender.outbox import Outcome, WorkerLeft
from aiosync.sender.update_chunks import Streaming
from aiosync.sender.update_queue import LateJoinerUpdates
from aiosync.sender.worker_deaths import LinkPolls, watch_process
from aiosync.sender.worker_link import WorkerLink
from aiosync.sender.worker_record import REMEMBERED, WorkerRecord, WorkerRecords
from aiosync.transports.base import Transport
from aiosync.wire import MAX_BEHIND, Current, Hello, Leave

__all__ = ["WorkerRegistry"]


class WorkerRegistry:
    """Registry: has the records and links of workers, and the updates for those that join later.

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
        deltas: Encodes the changes of updates; ``None`` if all travel whole.
        epoch: Epoch of the versions.
        version: The version that was drawn last; 0 before any.
        closed: True once the owner has closed the registry.
        crash: The exception that a background task ended with, and its traceback; ``None`` for
            none.
        records: Records of workers, by index.
        links: Links of the workers that are connected, by index, in its order; replaced, never
            changed, so that any thread may iterate over them.
        polls: Poll objects over the links.
        history: Updates for workers that join later.
        changed: Wakes the calls that wait for any change here.
        on_empty: Called when the last worker's link was lost.
        counts: Counts for :class:`SyncStats`: bytes of payloads that links took, and how often a
            worker skipped or refused a version, or came back.
        tasks: Owner of the background tasks.
        admission: Admits links.
        expected: The workers that ``connect()`` waits for.
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
        self.epoch: int = draw_epoch()
        self.version: int = 0
        self.streaming = streaming
        self._on_outcome = on_outcome
        self._on_crash = on_crash
        self.crash: tuple[BaseException, TracebackType | None] | None = None
        self.closed: bool = False
        self.records: WorkerRecords = WorkerRecords()
        self.links: dict[int, WorkerLink] = {}
        self.polls: LinkPolls = LinkPolls()
        # Beside the workers, clients may pull where payloads travel in streams.
        most = num_workers if streaming is None else None
        self.history: LateJoinerUpdates = LateJoinerUpdates(parts, most)
        self.changed: Notifier = Notifier()
        self.on_empty: Callable[[], None] = lambda: None
        self.counts: dict[str, int] = dict.fromkeys(
            ("wire_nbytes", "skipped", "refused", "reconnects"), 0
        )
        self.tasks: TaskOwner = TaskOwner(self.crashed)
        self.admission: Admission = Admission(
            self, strategy, num_workers, is_joining=bool(expected)
        )
        self.expected: ExpectedWorkers = ExpectedWorkers(expected, self)
        self.deltas: Deltas | None = None
        if streaming is not None and streaming.delta != "off":
            self.deltas = Deltas(streaming.chunk_nbytes, self.tasks)

    # -- records and links ---------------------------------------------------------------------

    def record(self, idx: int) -> WorkerRecord:
        """Return the record of a worker, made if there is none yet."""
        return self.records.setdefault(idx, WorkerRecord())

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
        arriving = self.admission.arriving.copy().values()
        # A link in its handshake that has no index yet has -1.
        coming = () if self.closed else (*self.expected.indices, *arriving)
        found = {idx: WorkerStats(idx, 0, 0, newest, "joining") for idx in coming if idx >= 0}
        for idx, record in self.records.copy().items():
            link, version = self.links.get(idx), record.had
            if link is not None:
                version = link.applied
                state = _state_at(version, newest)
            elif record.error is not None:
                state = _state_without_link(record)
            else:
                # The worker comes back, or everything is closed.
                continue
            lag = max(0, newest - version)
            behind = (link and link.outbox.behind) or (0, 0)
            found[idx] = WorkerStats(idx, record.pid, version, lag, state, age(version), *behind)
        return tuple(each for _, each in sorted(found.items()))

    @property
    def behind(self) -> tuple[int, int]:
        """Number of workers that get updates from here, directly or not, and their oldest version.

        A subscriber that passes versions on counts only the workers behind it. The number stops at
        2**32 - 1.
        """
        found = [link.outbox.behind or (1, link.applied) for link in self.subscribers]
        versions = [version for count, version in found if count]
        # Each peer is believed up to the bound, so the sum may be beyond what a message can carry.
        return min(sum(count for count, _ in found), MAX_BEHIND), min(versions, default=0)

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
        # With this error other code cancelled a task: no task may be left to read the links.
        if isinstance(error, TransportClosed):
            self._end_links(error)
        self.changed.notify()

    # -- joining -------------------------------------------------------------------------------

    def join(self, transport: Transport, idx: int, hello: Hello) -> None:
        """Connect a worker that was admitted, also in place of one that had its index."""
        record, old = self.record(idx), self.links.get(idx)
        hello = self._believed(hello, idx)
        gone, is_untold = record.error, not (record.reported or record.has_left)
        # The old link has ended, though the loop has not noticed.
        if old is not None:
            gone, is_untold = PeerClosed(f"{old.name} ended"), old.hello.subscribe
        # Another process has the index now: the next report names the loss of the one before.
        if gone is not None and is_untold and record.joined != hello.pid:
            self.records.replaced[idx] = record.predecessor = gone
        record.recover()
        # A worker whose handshakes failed before was not here yet.
        is_back = hello.session is not None and hello.session == record.joined_session
        self.counts["reconnects"] += is_back
        record.joined, record.joined_session = hello.pid, hello.session
        record.subscribes = hello.subscribe
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

    def not_reached(self, idx: int, error: AiosyncError) -> None:
        """Note why no link to a worker comes any more: sends and ``connect()`` fail for it then."""
        if idx not in self.links:
            record = self.record(idx)
            record.subscribes = True
            if record.end is None:
                record.fail(error, reported=False)
            else:
                record.end = error
        self.changed.notify()

    def _log(
        self, phase: str, text: str, worker: int | None = None, version: int | None = None
    ) -> None:
        log(logging.INFO, phase, text, model=self.model_id, worker=worker, version=version)

    # -- targets of a send ---------------------------------------------------------------------

    def _believed(self, hello: Hello, idx: int) -> Hello:
        """Return the Hello of a worker, without a version that it cannot have."""
        newest = max(self.version, self.history.for_worker(idx).version)
        if hello.epoch == self.epoch and (hello.version or 0) > newest:
            # If the version were believed, send() would find it newer than its own.
            return dataclasses.replace(hello, epoch=None, version=None)
        return hello

    def find_targets(
        self, planned: Collection[int | None], worker_ids: set[int] | None
    ) -> tuple[set[int], dict[int, AiosyncError]]:
        """Return the workers that a send is for, and the errors of lost ones that it is not for.

        A lost worker is a target until a report has named it, so that this send fails for it.

        Args:
            planned: The workers that have weights of their own; ``None`` stands for all others.
            worker_ids: The workers that the user named; ``None`` for all that get every update.

        Raises:
            ConfigError: A worker that the user named has not connected.
        """
        known, targets, lost = set(), set(), dict(self.records.replaced)
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
            raise _not_registered(min(worker_ids - targets), known)
        return targets, lost

    # -- updates for a worker ------------------------------------------------------------------

    def _offer_history(self, link: WorkerLink) -> None:
        """Offer a worker the updates kept for it that are newer than all it was offered."""
        queue = self.history.for_worker(link.idx)
        missing = [group for group in queue.groups if group[-1].version > link.outbox.newest]
        # A worker that does not subscribe gets one answer to one request.
        if missing and not link.hello.subscribe:
            missing = [tuple(each for group in missing for each in group)]
        for group in missing:
            link.offer(*group)

    def catch_up(self, link: WorkerLink) -> None:
        """Offer a subscriber, whose update was abandoned, the newer ones that are kept for it."""
        if link.hello.subscribe:
            self._offer_history(link)

    def answer(self, link: WorkerLink) -> None:
        """Answer a worker's request if its version is here: with updates, or that none is newer."""
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

    def _note_refusal(self, link: WorkerLink, error: ApplyError, version: int) -> None:
        """Count and log that a worker refused a version; keep the reason for ``connect()``."""
        self.counts["refused"] += 1
        # Only the first line: a worker that sends long texts must not fill the log.
        self._log("refused", str(error).partition("\n")[0], link.idx, version)
        self.expected.keep_cause(link.hello.pid, error)

    def on_outcomes(self, link: WorkerLink, outcomes: Sequence[Outcome]) -> None:
        """Register the outcomes of versions at a worker."""
        record = self.records.get(link.idx)
        for outcome in outcomes:
            error, by = outcome.error, outcome.by
            self.counts["skipped"] += by is not None
            link.skipped += by is not None
            counted = self._on_outcome is None or self._on_outcome(link.idx, outcome)
            if isinstance(error, ApplyError):
                self._note_refusal(link, error, outcome.version)
            if record is None or isinstance(error, WorkerLeft):
                continue
            if error is None:
                # A worker that has this version may have an error: that it lacks an older one.
                if record.error is not None and by is None:
                    if outcome.version > record.failed_version:
                        record.recover()
            elif self.links.get(link.idx) is link:
                # A version named since, which the worker takes next, makes up for this one.
                if outcome.version >= link.visible:
                    record.fail(error, outcome.version, reported=counted)
            elif link.idx not in self.links:
                # The worker went while this version was on its way.
                record.failed_version = outcome.version
        self.changed.notify()

    # -- leaving -------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        """Return True if the kernel shows the end of a worker that the loop has not noticed yet."""
        ends = self.polls.ends or self.polls.watch_ends(self.links.values())
        return bool(ends.poll(0))

    def on_lost(self, link: WorkerLink, error: AiosyncError) -> None:
        """Remove a link that has ended, and record why."""
        self.polls.reset()
        # The process of a client that pulled may still be to become a worker.
        if link.idx in self.expected.indices:
            self.expected.keep_cause(link.hello.pid, error)
        if self.links.get(link.idx) is link:
            self.links = {idx: each for idx, each in self.links.items() if each is not link}
            self.records[link.idx].had = link.applied
            if not self.closed:
                self._record_loss(link, error)
        link.transport.abort()
        self.changed.notify()
        if not self.closed and not self.links:
            self.on_empty()

    def _record_loss(self, link: WorkerLink, error: AiosyncError) -> None:
        """Record why a worker went, and that it is the last one that did."""
        record = self.records[link.idx]
        phase = "left" if isinstance(error, WorkerLeft) else "lost"
        self._log(phase, f"worker {link.idx} (process {link.hello.pid}): {error}", link.idx)
        if record.reported:
            # No send misses a worker that only asks for versions: its loss counts as reported.
            told = not link.hello.subscribe or self._on_outcome is None
            record.fail(error, reported=told)
        else:
            # A refusal before the end is reported first.
            record.end = error
        # The last record is that of the last worker that went.
        self.records[link.idx] = self.records.pop(link.idx)
        self._forget()

    def on_listed(self, lost: Mapping[int, AiosyncError], targets: Collection[int]) -> None:
        """Note that a report lists these workers as lost, so that only targets keep a record."""
        self.records.replaced = {}
        for idx in lost:
            self.record(idx).listed = True
        if len(lost) > REMEMBERED:
            self._forget(targets)

    def has_lost_all(self) -> bool:
        """Return True if no worker is connected, and the last one that went did not just leave."""
        if self.links:
            return False
        went = [each for each in self.records.values() if each.subscribes and each.error]
        return bool(went) and not went[-1].has_left

    def keep_replaced(self, lost: Mapping[int, AiosyncError]) -> None:
        """Keep errors of lost workers that no report has named, if their index has a new holder.

        Only the next report can name them, as the record is that of the new holder.
        """
        replaced = {
            idx: why
            for idx, why in lost.items()
            if idx in self.links and self.records[idx].predecessor is why
        }
        self.records.replaced = replaced | self.records.replaced

    def take_back(
        self,
        failed: Mapping[int, AiosyncError],
        left: Iterable[int],
        lost: Mapping[int, AiosyncError],
        *,
        counted: bool,
    ) -> None:
        """Have the next report name again what the caller of a cancelled send never got to know.

        Args:
            failed: The workers that failed, with the reason.
            left: The workers that left.
            lost: The workers that had gone before.
            counted: The records count the reasons as reported by that send.
        """
        for idx in (*failed, *left):
            record = self.records.get(idx)
            if record is not None and record.subscribes:
                record.take_back(failed.get(idx), counted=counted)
        self.keep_replaced(lost)

    def _forget(self, kept: Collection[int] = ()) -> None:
        """Forget workers that went long ago, with the updates kept for each of them alone."""
        here = *self.admission.arriving.values(), *self.links, *kept
        for idx in self.records.forget_gone({*self.expected.indices, *here}):
            self.history.forget(idx)

    def end(self) -> None:
        """Close every link; updates on their way fail with ``TransportClosed``."""
        self.closed = True
        self._end_links(TransportClosed("this scheme was closed"))
        self.history.clear()
        if self.deltas is not None:
            self.deltas.close()
        self.changed.notify()

    def _end_links(self, error: AiosyncError) -> None:
        """Say on every link that this side leaves, and end it; end the handshakes, too."""
        for link in self.links.values():
            # The link may be writing, or may have ended.
            with contextlib.suppress(AiosyncError):
                link.transport.send_nowait(Leave())
            link.lose(error)
        self.admission.abort()


def _state_at(version: int, newest: int) -> WorkerState:
    """Return the state of a connected worker that has this version."""
    if not version:
        return "joining"
    return "lagging" if newest - version > 1 else "ready"


def _state_without_link(record: WorkerRecord) -> WorkerState:
    """Return the state of a worker whose link has ended."""
    return "left" if record.is_closed else "lost"


def _not_registered(idx: int, known: Iterable[int]) -> ConfigError:
    """Return the error for a worker that the user named and that has not connected."""
    listed = ", ".join(map(str, sorted(known))) or "none"
    return ConfigError(f"Worker {idx} not registered; workers that connected: {listed}")
