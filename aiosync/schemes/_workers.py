"""The workers of a sender: who is there, who was lost, and what a late joiner gets.

Must not import the receiver, nor know what a send is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from aiosync._tasks import TaskOwner
from aiosync.errors import AiosyncError, ConfigError, TransportClosed
from aiosync.protocol import Outcome, OutcomeKind, VersionClock
from aiosync.rendezvous.handshake import admit
from aiosync.schemes._joining import Joining
from aiosync.schemes._latest import Latest
from aiosync.schemes._liveness import is_up, watch_process
from aiosync.schemes._peer import Peer
from aiosync.schemes._streaming import Streaming
from aiosync.sender.snapshots import Snapshot
from aiosync.transports.base import Transport
from aiosync.wire import Current, Hello

__all__ = ["Workers"]


class Workers(Joining):
    """Admits links, notices their end, and keeps the newest weights for those that join later.

    Args:
        model_id: Which model.
        strategy: Name of the strategy, compared in the handshake.
        num_workers: How many workers are expected; ``None`` for any number.
        expected: Indices of those that are waited for.
        clock: Draws the versions.
        on_outcomes: Told what became of versions at a worker.
        on_crash: Told when a background task ends with an exception.
        parts: Updates hold parts of the names.
        streaming: How payloads travel over links that may damage or lose them.
        bring: Brings a snapshot's bytes to where workers read them that do so in place.
    """

    def __init__(
        self,
        *,
        model_id: str,
        strategy: str,
        num_workers: int | None,
        expected: Sequence[int] = (),
        clock: VersionClock,
        on_outcomes: Callable[[Peer, Sequence[Outcome]], None],
        on_crash: Callable[[BaseException], None],
        parts: bool = False,
        streaming: Streaming | None = None,
        bring: Callable[[Snapshot], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(expected)
        self.streaming = streaming
        self._bring = bring
        self.model_id = model_id
        self.strategy = strategy
        self.num_workers = num_workers
        self.clock = clock
        self.closed: bool = False
        self.on_empty: Callable[[], None] = lambda: None  # the last worker's link was lost
        self._crash: tuple[BaseException, TracebackType | None] | None = None
        self._on_outcomes = on_outcomes
        self._on_crash = on_crash
        self.initial: set[int | None] = set()  # whose initial weights are still being copied
        # Links in their handshake, with the worker's index once it is known.
        self._arriving: dict[Transport, int] = {}
        self._pids: dict[int, int] = {}  # the process that each index was given to, as it said
        self._sessions: dict[int, bytes | None] = {}
        self.waiting: set[Peer] = set()  # those that asked for a version that is not here yet
        self.latest: Latest = Latest(num_workers, parts=parts)  # for those that join later
        self.tasks: TaskOwner = TaskOwner(self._crashed)

    def _crashed(self, error: BaseException) -> None:
        # A bug in a background task: nothing it was to do will happen, so every call says so.
        self._crash = error, error.__traceback__
        self._on_crash(error)
        if isinstance(error, TransportClosed):  # cancelled by others: nobody reads the links
            self._end_links(error)
        self.notify()

    @property
    def subscribers(self) -> list[Peer]:
        """The connected workers that get every update, and not only what they ask for."""
        return [peer for peer in self.peers.values() if peer.subscribes]

    def check(self) -> None:
        """Raise what ended the sender, if anything did."""
        if self._crash is not None:
            error, traceback = self._crash
            raise error.with_traceback(traceback)  # which would grow at each raise
        if self.closed:
            raise TransportClosed("this scheme was closed")

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
            worker_idx: Whose link it is.
            hello: What was read from it already.
            given: There will be no other link to that worker.
        """
        if self._crash is not None:
            transport.abort()
            return
        self._arriving[transport] = -1
        coroutine = self._welcome(transport, worker_idx, hello, given=given)
        self.tasks.start(coroutine, "aiosync handshake")

    async def _welcome(
        self, transport: Transport, expected_idx: int | None, hello: Hello | None, *, given: bool
    ) -> None:
        try:
            hello, worker_idx = await admit(
                transport,
                model_id=self.model_id,
                strategy=self.strategy,
                epoch=self.clock.epoch,
                num_workers=self.num_workers,
                worker_idx=expected_idx,
                holder=self._holder,
                reserve=lambda idx, hello: self._reserve(transport, idx, hello),
                hello=hello,
                given=given,
            )
        except AiosyncError as exc:
            # The worker was told why; connect() repeats it if it waits for that worker in vain.
            self._arriving.pop(transport, None)
            others = [text for text in self._refused if text != str(exc)]
            self._refused = [*others[-2:], str(exc)]  # the last ones, for the error
            if expected_idx is not None and (given or isinstance(exc, ConfigError)):
                self.not_reached(expected_idx, exc)  # for good
            elif expected_idx in self.lost and expected_idx not in self.peers:
                self.lost[expected_idx] = exc  # send() says why it does not come back
            await transport.aclose()
            self.notify()
            return
        except BaseException:  # cancelled, or a bug that _crashed() is told
            self._arriving.pop(transport, None)
            transport.abort()
            raise
        if self._arriving.pop(transport, None) is None:
            return  # it had ended, and its index was given to the next one
        old = self.peers.pop(worker_idx, None)
        if old is not None:  # it has ended, though nobody noticed; the worker started again
            old.lose(TransportClosed(f"worker {worker_idx} opened a newer link"))
            old.transport.abort()
        self.lost.pop(worker_idx, None)
        self._failures.pop(worker_idx, None)
        self.unreported.discard(worker_idx)
        snapshot = self.newest_for(worker_idx)
        newest = max(self.clock.current, 0 if snapshot is None else snapshot.version)
        if hello.epoch == self.clock.epoch and (hello.version or 0) > newest:
            # Nobody can have it: not to be believed, or send() would find it newer than its own.
            hello = dataclasses.replace(hello, epoch=None, version=None)
        peer = Peer(
            worker_idx,
            transport,
            epoch=self.clock.epoch,
            hello=hello,
            streaming=self.streaming,
            tasks=self.tasks,
            on_outcomes=self._outcomes,
            on_lost=self._on_lost,
            on_fetch=self.answer,
            bring=self._bring,
        )
        self.peers[worker_idx] = peer
        watch_process(transport, hello.pid)
        peer.start()
        if peer.subscribes:
            self._offer_latest(peer)
        self.notify()

    def _offer_latest(self, peer: Peer) -> None:
        latest = self.latest.for_worker(peer.worker_idx)
        missing = [snapshot for snapshot in latest if not peer.has(snapshot.version)]
        if len(missing) > 1 and not peer.subscribes:
            peer.say(Current(self.clock.epoch, missing[-1].version))  # the first is not all
        for snapshot in missing:
            peer.offer(snapshot)

    def answer(self, peer: Peer) -> None:
        """Give a worker what it asked for, if that is here: the newest version, or a word."""
        if peer.wanted is None:
            return
        snapshot = self.newest_for(peer.worker_idx)
        version = 0 if snapshot is None else snapshot.version
        if version < peer.wanted:
            self.waiting.add(peer)  # a later send answers
            return
        peer.wanted = None
        self.waiting.discard(peer)
        if snapshot is None or peer.has(version):
            peer.say(Current(self.clock.epoch, version))
        else:
            self._offer_latest(peer)

    def answer_all(self) -> None:
        """There is a new version: answer those who wait for one."""
        for peer in list(self.waiting):
            self.answer(peer)

    def _holder(self, worker_idx: int, hello: Hello) -> int | None:
        """The process that has an index and is alive, its link too; ``None`` if it is free.

        It is free, too, for the very receiver that has it: its old link broke in the middle.
        """
        if hello.session is not None and self._sessions.get(worker_idx) == hello.session:
            return None
        links = [link for link, idx in self._arriving.items() if idx == worker_idx]
        if worker_idx in self.peers:
            links.append(self.peers[worker_idx].transport)
        return self._pids[worker_idx] if any(map(is_up, links)) else None

    def _reserve(self, transport: Transport, worker_idx: int, hello: Hello) -> int:
        for link in [link for link, idx in self._arriving.items() if idx == worker_idx]:
            del self._arriving[link]  # it ended during its handshake
            link.abort()
        self._arriving[transport] = worker_idx
        self._pids[worker_idx] = hello.pid
        self._sessions[worker_idx] = hello.session
        if worker_idx in self.initial or None in self.initial:
            return self.clock.current
        snapshot = self.newest_for(worker_idx)
        return 0 if snapshot is None else snapshot.version

    def _on_lost(self, peer: Peer, error: AiosyncError) -> None:
        self.waiting.discard(peer)
        if self.peers.get(peer.worker_idx) is peer:
            del self.peers[peer.worker_idx]
            if not self.closed and not peer.subscribes:
                self._failures[peer.worker_idx] = error  # no send misses it; connect() may
            elif not self.closed:
                self.lost[peer.worker_idx] = error
                self.unreported.add(peer.worker_idx)
        peer.transport.abort()
        self.notify()
        if not self.peers and not self.closed:
            self.on_empty()

    def _outcomes(self, peer: Peer, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.kind is OutcomeKind.FAILED and outcome.error is not None:
                self._failures[peer.worker_idx] = outcome.error
        self._on_outcomes(peer, outcomes)
        self.notify()

    def newest_for(self, idx: int) -> Snapshot | None:
        """The newest update for a worker that joins now."""
        return self.latest.newest_for(idx)

    def end(self) -> None:
        """Close every link; what is on its way fails with ``TransportClosed``."""
        self.closed = True
        self._end_links(TransportClosed("this scheme was closed"))
        self.peers.clear()
        self.latest.clear()
        self.notify()

    def _end_links(self, error: AiosyncError) -> None:
        for peer in list(self.peers.values()):
            peer.lose(error)
            peer.transport.abort()
        for transport in self._arriving:  # a task that never ran cannot close its link
            transport.abort()
