"""The trainer's runtime: links to workers, versions, snapshots and what becomes of each send.

A scheme owns one while it is a sender. Every worker has its own flow, so a slow or dead one
never delays another. Must not import the receiver.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PartialSyncError,
    TransportClosed,
)
from aiosync.protocol import Outcome, OutcomeKind, SendTracker, VersionClock
from aiosync.protocol.indices import as_indices
from aiosync.schemes._awake import Awake
from aiosync.schemes._peer import Peer
from aiosync.schemes._progress import Progress
from aiosync.schemes._send import Deadlines, Send
from aiosync.schemes._streaming import Streaming
from aiosync.schemes._workers import Workers
from aiosync.schemes.handles import SendHandle
from aiosync.sender.snapshots import Copying, Live, Planned, Snapshot, SnapshotCopier
from aiosync.types import Require, SendReport

__all__ = ["WeightSender"]

_AWAKE_NBYTES = 2**20  # of an update whose answer is worth to stay awake for
_TURN_SECONDS = 0.001  # for which sends that wait for nobody may keep the loop
_RING_SECONDS = (0.005, 1.0)  # until a worker that does nothing is rung, and at most between two


class WeightSender:
    """Sends versions of one model to its workers.

    Made by a scheme's ``connect()``; use the scheme's methods. Belongs to one event loop.

    Args:
        model_id: Which model.
        strategy: Name of the strategy, compared in the handshake.
        num_workers: How many workers are expected; ``None`` for any number.
        expected: Indices of those that are waited for.
        require: What counts as success of a send.
        maker: Makes the snapshots.
        clock: Draws the versions.
        parts: Updates hold parts of the names.
        streaming: How payloads travel over links that may damage or lose them.
        borrows: Large payloads go out from the tensors themselves, which stay as they are until
            ``send()`` returns; otherwise from a snapshot.
            Not while a worker reads slots, which have to be filled for it anyway.
        copies_ahead: Large payloads go out from a snapshot that is still being made.
    """

    def __init__(
        self,
        *,
        model_id: str,
        strategy: str,
        num_workers: int | None,
        expected: Sequence[int],
        require: Require,
        maker: SnapshotCopier,
        clock: VersionClock,
        parts: bool = False,
        streaming: Streaming | None = None,
        borrows: bool = False,
        copies_ahead: bool = False,
    ) -> None:
        self._copies_ahead = copies_ahead
        self._borrows = borrows
        self.require: Require = require
        self.maker = maker
        self.clock = clock
        self.skipped: int = 0
        self.workers: Workers = Workers(
            model_id=model_id,
            strategy=strategy,
            num_workers=num_workers,
            expected=expected,
            clock=clock,
            parts=parts,
            on_outcomes=self._on_outcomes,
            on_crash=self._on_crash,
            bring=maker.bring,
            streaming=streaming,
        )
        self.progress: Progress = Progress(self.workers)
        self._loop = asyncio.get_running_loop()
        maker.ring = lambda: self.ring_late(at_once=True)
        self._sends: dict[int, Send] = {}
        # What workers refused after its send had ended, as ``require`` asked for no more.
        self._untold: dict[int, tuple[Peer, AiosyncError]] = {}
        self._snapshot_lock = asyncio.Lock()
        self._deadlines = Deadlines(self._loop, self._sends, self._settle)
        self._awake = Awake(self._loop)
        self._asked_at = 0.0  # when the loop was asked to say that it had a turn; 0: it has said so
        self._bell: asyncio.TimerHandle | None = None
        self._polled: list[Peer] = []
        self._poll: select.epoll | None = None

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The connected workers, by index."""
        return self.workers.peers

    def _on_crash(self, error: BaseException) -> None:
        for send in list(self._sends.values()):
            if not send.future.done():
                send.future.set_exception(error)
        self._sends.clear()

    def _on_outcomes(self, peer: Peer, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.kind is OutcomeKind.SKIPPED:
                self.skipped += 1
            elif outcome.kind is OutcomeKind.FAILED:
                self.progress.note(peer.worker_idx, outcome)
            send = self._sends.get(outcome.version)
            if send is not None:
                if send.tracker.resolve(peer.worker_idx, outcome):
                    self._settle(send)
            elif outcome.error is not None and self.peers.get(peer.worker_idx) is peer:
                self._untold[peer.worker_idx] = peer, outcome.error
            if self._untold and outcome.kind is OutcomeKind.APPLIED:
                self._untold.pop(peer.worker_idx, None)

    # -- connecting ----------------------------------------------------------------------------

    async def connect(
        self,
        planned: Mapping[int | None, Planned],
        *,
        timeout: float | None,
        processes: Sequence[Any] = (),
    ) -> None:
        """Send the initial weights to every worker that comes, and wait for those expected.

        Raises:
            ConnectTimeout: Some expected worker did not come in time.
            PartialSyncError: A worker came, but could not apply the initial weights or died.
        """
        version = self.clock.next() if planned else 0
        self.workers.initial = set(planned)
        async with self._snapshot_lock:  # a send that comes meanwhile has newer weights
            for worker_idx, plan in planned.items():
                snapshot = await self.maker.take(plan)
                snapshot.version = version
                self.workers.initial.discard(worker_idx)
                self.workers.latest.add(worker_idx, snapshot)
                for peer in list(self.workers.peers.values()):
                    if worker_idx in (None, peer.worker_idx) and peer.subscribes:
                        peer.offer(snapshot)
                self.workers.answer_all()
        await self.workers.wait_until_joined(version, processes, timeout)

    # -- sending -------------------------------------------------------------------------------

    def targets(
        self, worker_ids: int | Iterable[int] | None, planned: Container[int | None] = (None,)
    ) -> set[int]:
        """The workers that a send addresses.

        Args:
            worker_ids: As the user gave them.
            planned: For which workers there are weights; ``None`` in it stands for all.

        Raises:
            ConfigError: A worker is named that never connected.
        """
        if worker_ids is None:
            everybody = set(self.workers.unreported)
            for idx, peer in self.workers.peers.items():
                if peer.subscribes:
                    everybody.add(idx)
            return everybody if None in planned else {idx for idx in everybody if idx in planned}
        named = as_indices("worker_ids", worker_ids)
        known = self.workers.peers.keys() | self.workers.lost.keys()
        for idx in sorted(named - known):
            listed = ", ".join(map(str, sorted(known))) or "none"
            raise ConfigError(f"Worker {idx} not registered; workers that connected: {listed}")
        return named

    async def send(
        self,
        planned: Mapping[int | None, Planned],
        worker_ids: int | Iterable[int] | None,
        timeout: float | None,
    ) -> SendReport:
        """Snapshot, send and wait. See ``WeightSyncScheme.send``."""
        started = time.perf_counter()
        quiet = self.is_quiet()
        if self._poll is not None and (
            not quiet or (self._asked_at and started - self._asked_at > _TURN_SECONDS)
        ):
            # Workers come and go on this loop, also where sends leave it no time: what came by now
            # is looked at in the first turn, and what that means in the second.
            turned = self._loop.create_future()
            self._loop.call_soon(self._loop.call_soon, _settle_future, turned)
            await turned
        report = self.publish(planned, worker_ids, started)
        if report is not None:
            self.tell()
            if not self._asked_at:
                self._asked_at = started
                self._loop.call_soon(self._note_turn)
            return report
        targets = self.targets(worker_ids, planned)
        if worker_ids is not None and not targets:
            return self._to_nobody(started)
        # The usual case, small weights and memory that is free, without any await.
        snapshots: Mapping[int | None, Snapshot] = {}
        if len(planned) == 1 and not self._snapshot_lock.locked():
            [(key, plan)] = planned.items()
            snapshot = self.maker.take_free(plan)
            snapshots = {} if snapshot is None else {key: snapshot}
        if not snapshots:
            async with self._snapshot_lock:
                self.workers.check()  # it may have been closed meanwhile
                snapshots = await self._take(planned)
                self.workers.check()
                if worker_ids is None:
                    targets = self.targets(None, planned)  # somebody may have joined meanwhile
        send = self._dispatch(snapshots, targets, worker_ids is None, started)
        if not send.future.done():
            if send.nbytes <= _AWAKE_NBYTES:
                self._awake.wait_for(send.future)
            if timeout is not None:
                self._deadlines.limit(send, timeout)
        try:
            if send.future.done():
                await asyncio.sleep(0)  # workers come on this loop, also where it only sends
            report = await send.future
        except asyncio.CancelledError:
            # The transfer goes on; a worker that fails is reported by the next send.
            if send.future.done() and not send.future.cancelled():
                send.future.exception()  # seen by nobody, on purpose
            raise
        finally:
            if send.borrowed:
                await self._copy(send.borrowed)
        self._awake.note(report.elapsed)
        return report

    def _to_nobody(self, started: float) -> SendReport:
        # A list of workers that is empty: no version is drawn that nobody would ever have.
        elapsed = time.perf_counter() - started
        return SendReport(self.clock.epoch, self.clock.current, frozenset(), elapsed=elapsed)

    async def _copy(self, borrowed: Sequence[Snapshot]) -> None:
        """Copy what belongs to the caller, for who joins later or is not done: all of it."""
        first: BaseException | None = None
        for snapshot in borrowed:
            try:
                await self.maker.copy(snapshot)
            except BaseException as exc:  # noqa: BLE001 - raised once nothing is borrowed any more
                first = first or exc
            snapshot.release()
        if first is not None:
            raise first

    async def _take(self, planned: Mapping[int | None, Planned]) -> Mapping[int | None, Snapshot]:
        snapshots = {}
        peers = self.peers.values()
        how: Literal["copy", "borrow", "copy ahead"] = "copy"
        if self._borrows and not any(peer.reads_slots for peer in peers):
            # Links that carry bytes take them from the tensors, which must not change meanwhile.
            how = "borrow"
        if self._copies_ahead and len(planned) == 1 and any(p.follows_copies for p in peers):
            how = "copy ahead"
        try:
            for key, plan in planned.items():
                snapshots[key] = await self.maker.take(plan, how)
        except BaseException:  # goes on to the caller of send()
            for snapshot in snapshots.values():
                snapshot.release()
            raise
        return snapshots

    def send_nowait(
        self,
        planned: Mapping[int | None, Planned],
        worker_ids: int | Iterable[int] | None,
        timeout: float | None,
    ) -> SendHandle:
        """Snapshot now and send in the background. See ``WeightSyncScheme.send_nowait``."""
        started = time.perf_counter()
        self.workers.check()
        if self.workers.initial:
            raise LocalProtocolError(
                "send_nowait(): connect() is still copying the initial weights: use `await "
                "send()`, or call it after connect()"
            )
        targets = self.targets(worker_ids, planned)
        if worker_ids is not None and not targets:
            done = self._loop.create_future()
            done.set_result(self._to_nobody(started))
            return SendHandle(self.clock.current, done)
        report = self.publish(planned, worker_ids, started)
        if report is not None:
            self.tell()
            seen = self._loop.create_future()
            seen.set_result(report)
            return SendHandle(report.version, seen)
        snapshots = {key: self.maker.take_nowait(plan) for key, plan in planned.items()}
        send = self._dispatch(snapshots, targets, worker_ids is None, started)
        if timeout is not None and not send.future.done():
            self._deadlines.limit(send, timeout)
        return SendHandle(send.tracker.version, send.future)

    def publish(
        self,
        planned: Mapping[int | None, Planned],
        worker_ids: int | Iterable[int] | None,
        started: float,
    ) -> SendReport | None:
        """Name an update to workers that look for themselves, which is all that they need.

        :meth:`tell` has to follow. Waits for nobody, and does nothing with the loop. A signal's
        handler may raise at any step: then some workers may have the version, and nothing else is
        wrong.

        Returns:
            ``None``, with nothing done, if any worker has to be told, or something else to be said.
        """
        self.workers.check()
        plan = planned.get(None)
        if plan is None or self._untold or self.workers.initial or self._snapshot_lock.locked():
            return None
        prepared = plan.prepared
        targets = self.targets(worker_ids)
        if not targets or prepared.values:
            return None
        peers, digest, connected = [], prepared.layout.digest, self.workers.peers
        for idx in targets:
            peer = connected.get(idx)
            if peer is None or not peer.looks_for(digest):
                return None
            peers.append(peer)
        snapshot = self.maker.take_free(plan)
        if snapshot is None:
            return None
        for peer in peers:
            if not peer.can_read(snapshot):
                snapshot.release()
                return None
        snapshot.version = version = self.clock.next()
        for peer in peers:
            peer.see(snapshot)
        latest = self.workers.latest
        if worker_ids is None:
            latest.add(None, snapshot)
        else:
            for idx in sorted(targets):
                latest.add(idx, snapshot.retain())
            snapshot.release()
        lost = self.workers.lost and {
            idx: error for idx, error in self.workers.lost.items() if idx not in targets
        }
        elapsed = time.perf_counter() - started
        nbytes, epoch = prepared.layout.nbytes, self.clock.epoch
        return SendReport(
            epoch, version, frozenset(targets), lost=lost, elapsed=elapsed, nbytes=nbytes
        )

    def has_to_tell(self) -> bool:
        """Whether :meth:`tell` has something to do."""
        return (
            self._bell is None
            or bool(self.workers.waiting)
            or self.workers.changed.is_waited_for
            or any(peer.wants_bell for peer in self.peers.values())
        )

    def tell(self) -> None:
        """Tell those who wait for a version that there is one, and look later who took it."""
        workers = self.workers
        if workers.waiting:
            workers.answer_all()
        workers.notify()
        for peer in list(workers.peers.values()):
            if peer.wants_bell:
                peer.ring()
        if self._bell is None and self.maker.arena is not None:
            self._ring_later()

    def _note_turn(self) -> None:
        self._asked_at = 0.0

    def is_quiet(self) -> bool:
        """Whether there are workers that read slots, and none of them said something or ended."""
        peers = list(self.workers.peers.values())
        if peers != self._polled:
            self._polled = peers
            fds = [fd for peer in peers for fd in peer.watched]
            if self._poll is not None:
                self._poll.close()
            self._poll = poll = select.epoll() if fds else None
            for fd in fds:
                assert poll is not None
                poll.register(fd, select.EPOLLIN)
        return self._poll is not None and not self._poll.poll(0)

    def ring_late(self, *, at_once: bool = False) -> None:
        """Ring workers that have not looked since they were named an update.

        One that does not compute follows all the same, and gives its slot back.
        """
        now = self._loop.time()
        if not at_once:
            self._bell = None
        if self.workers.closed:
            return
        late = False
        for peer in list(self.peers.values()):
            if at_once and peer.is_behind:
                peer.ring()
            late |= peer.ring_if_behind(now, *_RING_SECONDS)
        if late and self._bell is None:
            self._ring_later()

    def _ring_later(self) -> None:
        self._bell = self._loop.call_later(_RING_SECONDS[0], self.ring_late)

    def _dispatch(
        self,
        snapshots: Mapping[int | None, Snapshot],
        targets: set[int],
        everybody: bool,
        started: float,
    ) -> Send:
        version = self.clock.next()
        nbytes = 0
        for snapshot in snapshots.values():
            snapshot.version = version
            nbytes += snapshot.nbytes
        workers = self.workers
        lost = {idx: error for idx, error in workers.lost.items() if idx not in targets}
        future = self._loop.create_future()
        send = Send(SendTracker(version, targets, self.require), future, started, nbytes, lost)
        self._sends[version] = send
        send.borrowed = [
            each.retain() for each in snapshots.values() if isinstance(each.state, Live | Copying)
        ]
        for idx in sorted(targets):
            peer = workers.peers.get(idx)
            snapshot_for = snapshots.get(idx) or snapshots.get(None)
            if peer is None or snapshot_for is None:
                error = ConfigError(f"no weights were given for worker {idx}")
                outcome = Outcome(version, OutcomeKind.FAILED, error=workers.lost.get(idx, error))
                send.tracker.resolve(idx, outcome)
            elif peer.can_see(snapshot_for):
                peer.see(snapshot_for)
                send.tracker.resolve(idx, Outcome(version, OutcomeKind.APPLIED))
            else:
                peer.offer(snapshot_for)
            if not everybody and snapshot_for is not None:
                workers.latest.add(idx, snapshot_for.retain())  # also for one that is to come again
        # Workers are busy with it from here on: the rest costs the sender no time.
        if everybody:
            for key, snapshot in snapshots.items():
                workers.latest.add(key, snapshot)
        else:
            for snapshot in snapshots.values():
                snapshot.release()
        self.tell()
        if send.tracker.settled:
            self._settle(send)
        return send

    def _settle(self, send: Send) -> None:
        tracker = send.tracker
        if not tracker.settled or self._sends.get(tracker.version) is not send:
            return
        del self._sends[tracker.version]
        if send.future.done():
            return  # cancelled: nobody was told who failed, so the next send says it
        if tracker.failed:
            self.workers.unreported -= tracker.failed.keys()
        elapsed = time.perf_counter() - send.started
        if not tracker.workers and send.lost and not self.workers.peers:
            send.future.set_exception(PartialSyncError(failed=send.lost, version=tracker.version))
            return
        try:
            for idx, (peer, _) in list(self._untold.items()):
                if self.peers.get(idx) is not peer:
                    del self._untold[idx]  # it was lost, which is told
            untold = {idx: error for idx, (_, error) in self._untold.items()}
            report = tracker.result(elapsed, send.nbytes, self.clock.epoch, send.lost, untold)
            for idx in report.failed:
                self._untold.pop(idx, None)
        except PartialSyncError as exc:
            if not self.workers.closed:
                send.future.set_exception(exc)
                return
            closed = TransportClosed(
                f"this scheme was closed while version {tracker.version} was under way"
            )
            closed.__cause__ = exc
            send.future.set_exception(closed)
            send.future.exception()  # whoever closed this knows it, where nobody waits
        else:
            send.future.set_result(report)

    # -- closing -------------------------------------------------------------------------------

    def _end(self) -> None:
        self.workers.end()
        self._deadlines.cancel()
        if self._bell is not None:
            self._bell.cancel()
        if self._poll is not None:
            self._poll.close()

    async def aclose(self) -> None:
        """Close every link; sends under way fail with ``TransportClosed``. Bounded."""
        if self.workers.closed:
            return
        self._end()
        try:
            await self.workers.tasks.aclose()
        finally:
            await self.maker.aclose()

    def abort(self) -> None:
        """The same from synchronous code, without waiting for the tasks."""
        if self.workers.closed:
            return
        self._end()
        self.workers.tasks.abort()
        self.maker.close()


def _settle_future(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
