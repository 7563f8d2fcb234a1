"""Who of the expected workers has joined, who will not come, and the wait for them.

Must not import the receiver, nor know how links are admitted, nor what a send is.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiosync._tasks import Notifier
from aiosync.errors import AiosyncError, ConnectError, ConnectTimeout, PartialSyncError
from aiosync.schemes._liveness import Processes
from aiosync.schemes._peer import Peer
from aiosync.sender.snapshots import Snapshot

__all__ = ["Joining"]


class Joining(abc.ABC):
    """What ``connect()`` waits for; see :class:`~aiosync.schemes._workers.Workers`.

    Args:
        expected: Indices of those that are waited for.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = expected
        self.peers: dict[int, Peer] = {}
        self.lost: dict[int, AiosyncError] = {}
        self.unreported: set[int] = set()
        # Workers that do not come by themselves: what an error says while one is not there.
        self.dialled: dict[int, Callable[[], str]] = {}
        self.changed: Notifier = Notifier()
        self._refused: list[str] = []
        self._failures: dict[int, AiosyncError] = {}

    @abc.abstractmethod
    def check(self) -> None:
        """Raise what ended the sender, if anything did."""

    @abc.abstractmethod
    def newest_for(self, idx: int) -> Snapshot | None:
        """The newest update for a worker that joins now."""

    def notify(self) -> None:
        """Let everybody look again who waits for a change."""
        self.changed.notify()

    def not_let_in(self, error: OSError) -> None:
        """Somebody came, but there is no link; connect() says so if it waits in vain."""
        text = f"a worker could not be let in: {error}"
        if text not in self._refused:
            self._refused = [*self._refused[-2:], text]

    def not_reached(self, worker_idx: int, error: AiosyncError) -> None:
        """A worker that cannot come by itself cannot be reached any more."""
        if worker_idx not in self.peers:
            self._failures.setdefault(worker_idx, error)
            self.lost[worker_idx] = error
            self.unreported.add(worker_idx)
        self.notify()

    async def wait_until_joined(
        self, version: int, processes: Sequence[Any], timeout: float | None
    ) -> None:
        """Wait until every expected worker has applied ``version``, or has failed.

        Raises:
            ConnectTimeout: Some expected worker did not come in time.
            PartialSyncError: A worker came, but could not apply the weights or died.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._wait(version, processes)
        except TimeoutError as exc:
            raise self._nobody_came(timeout, version) from exc

    async def _wait(self, version: int, processes: Sequence[Any]) -> None:
        expected = self.expected
        watched = Processes(processes)
        loop = asyncio.get_running_loop()
        try:
            watched.watch(loop, self.notify)
            while True:
                self.check()
                failures = self._failures_among(expected, watched)
                joined = {idx for idx in expected if self._has_joined(idx, version)}
                if len(joined | failures.keys()) == len(expected):
                    break
                await self.changed.wait()
        finally:
            watched.close(loop)
        self._failures.clear()
        if failures:
            self.lost.update({idx: e for idx, e in failures.items() if idx not in self.peers})
            self.unreported -= failures.keys()
            raise PartialSyncError(acked=joined - failures.keys(), failed=failures, version=version)

    def _failures_among(
        self, expected: Sequence[int], watched: Processes
    ) -> dict[int, AiosyncError]:
        """Why some workers are not there and will not come."""
        found = {idx: self._failures.get(idx) or self.lost.get(idx) for idx in expected}
        failures = {idx: error for idx, error in found.items() if error is not None}
        missing = [idx for idx in expected if idx not in failures and idx not in self.peers]
        failures |= {
            idx: ConnectError(f"the process of worker {idx} ended before it connected")
            for idx in missing
            if watched.has_ended(idx)
        }
        missing = [idx for idx in missing if idx not in failures]
        joined = {peer.pid for peer in self.peers.values()}
        if missing and len(expected) <= watched.count and (ended := watched.ended(joined)):
            why = f"; refused: {'; '.join(self._refused)}" if self._refused else ""
            which = f"process {ended[0]}" if len(ended) == 1 else f"processes {ended}"
            for idx in missing:
                failures[idx] = ConnectError(
                    f"no process is left that could become worker {idx}: {which} ended without "
                    f"connecting{why}"
                )
        return failures

    def _has_joined(self, idx: int, version: int) -> bool:
        peer = self.peers.get(idx)
        if peer is None:
            return False
        if not peer.subscribes or not self.newest_for(idx):
            return True
        if not peer.has_target:
            return peer.received_version >= version
        return peer.visible >= version

    def _nobody_came(self, timeout: float | None, version: int) -> ConnectTimeout:
        late = [idx for idx in self.expected if not self._has_joined(idx, version)]
        absent = set(late) - self.peers.keys()
        parts = [self.dialled[idx]() for idx in sorted(absent & self.dialled.keys())]
        if missing := sorted(absent - self.dialled.keys()):
            parts.append(
                f"workers {missing} did not connect: each has to call init_on_receiver() and "
                "connect() on its copy of this scheme in that time (timeout=), within which its "
                "process has to start, too"
            )
        if late := [idx for idx in late if idx in self.peers]:
            parts.append(f"workers {late} connected but have not applied the initial weights")
        if self._refused:
            parts.append(f"refused: {'; '.join(self._refused)}")
        return ConnectTimeout(f"after {timeout:g} s " + "; ".join(parts))
