"""The end of a worker as the kernel shows it, before the event loop has noticed.

Links, processes that are to become workers, and the descriptors of all links at once are watched
here. ``transports.framed_link`` notices the end of a link from its stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from aiosync.errors import ConnectError
from aiosync.protocol import as_pids
from aiosync.rendezvous.same_host import peer_pid
from aiosync.transports._process_end import find_exit_code, has_ended, open_pidfd
from aiosync.transports.base import Transport

__all__ = ["LinkPolls", "ProcessWatch", "is_up", "watch_process"]

# Seconds in which a supervisor replaces a process that ended.
_REPLACED_SECONDS = 0.5
# Event that the peer will write no more, even while bytes of it are unread. Linux only.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)
_ENDED = _PEER_CLOSED | select.POLLHUP | select.POLLERR | select.POLLNVAL


def is_up(transport: Transport) -> bool:
    """Return True if the other end of a link is open and its process has not ended.

    A link without a stream below, in one process, counts as up.
    """
    channel = transport.channel
    if channel is None:
        return True
    if channel.ended or (channel.pidfd >= 0 and has_ended(channel.pidfd)):
        return False
    poller = select.poll()
    for sock in channel.io.socks:
        poller.register(sock.fileno(), _PEER_CLOSED)
    return not any(event & _ENDED for _, event in poller.poll(0))


def watch_process(transport: Transport, pid: int) -> None:
    """Notice the worker's end even if another process holds a copy of its end of a pipe."""
    channel = transport.channel
    # The process id of another host means nothing here.
    if channel is None or channel.ended or channel.pidfd >= 0 or transport.capabilities.cross_host:
        return
    # Nor does that of a process namespace which this process cannot see: another process has it.
    if peer_pid(channel.io.sock) != 0:
        # There may be no such process in this namespace.
        with contextlib.suppress(ConnectError):
            channel.watch_process(pid)


class PolledLink(Protocol):
    """The link of a worker, as far as it is polled.

    Attributes:
        transport: The transport below.
    """

    transport: Transport

    @property
    def watched(self) -> list[int]:
        """Descriptors that turn readable when a worker that reads slots sends a message or ends."""


class LinkPolls:
    """Poll objects over the links of all workers; those that need them have them made.

    Attributes:
        readers: Shows whether workers that read slots sent a message or ended; ``None`` before
            :meth:`watch_readers`, and after :meth:`reset`.
        ends: Shows whether workers ended; likewise.
    """

    def __init__(self) -> None:
        self.readers: select.poll | None = None
        self.ends: select.poll | None = None

    def reset(self) -> None:
        """Forget the descriptors, as a worker came or went."""
        self.readers = self.ends = None

    def watch_readers(self, links: Iterable[PolledLink]) -> select.poll:
        """Make the poll object of the workers that read slots."""
        self.readers = readers = select.poll()
        for fd in [fd for link in links for fd in link.watched]:
            readers.register(fd, select.POLLIN)
        return readers

    def watch_ends(self, links: Iterable[PolledLink]) -> select.poll:
        """Make the poll object of the ends of workers."""
        self.ends = ends = select.poll()
        for channel in [link.transport.channel for link in links]:
            if channel is not None and not channel.ended:
                for sock in channel.io.socks:
                    ends.register(sock.fileno(), _PEER_CLOSED)
                if channel.pidfd >= 0:
                    ends.register(channel.pidfd, select.POLLIN)
        return ends


class ProcessWatch:
    """Watch over the processes that are to become workers.

    Args:
        processes: Process objects or ids, by the index that each worker is expected to have. A
            supervisor may replace one that ended during the watch.
        on_end: Called when a process has ended, and a supervisor had time to replace it.

    Attributes:
        ended: Ids of the processes that have ended, once a supervisor had time to replace them.

    Raises:
        ConfigError: An element is neither a process nor an id, or was not started.
    """

    def __init__(self, processes: Sequence[Any], on_end: Callable[[], None]) -> None:
        self.ended: set[int] = set()
        self._processes = processes
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[int, int] = {}
        self.watch_new()

    def watch_new(self) -> list[int]:
        """Watch the processes that are new, and return the process ids by index."""
        pids = as_pids("processes", self._processes)
        for pid in pids:
            if pid not in self._pidfds:
                self._watch(pid)
        return pids

    def _watch(self, pid: int) -> None:
        """Have the end of a process noted, also one that has ended already."""
        # Without a descriptor, only the timeout notices the end.
        self._pidfds[pid] = -1
        try:
            self._pidfds[pid] = pidfd = open_pidfd(pid)
        except ProcessLookupError:
            self._loop.call_later(_REPLACED_SECONDS, self._note_end, pid)
        else:
            if pidfd >= 0:
                self._loop.add_reader(pidfd, self._on_end_seen, pid, pidfd)

    def _on_end_seen(self, pid: int, pidfd: int) -> None:
        """Note the end of a process later, as a supervisor may replace the process first."""
        self._loop.remove_reader(pidfd)
        self._loop.call_later(_REPLACED_SECONDS, self._note_end, pid)

    def _note_end(self, pid: int) -> None:
        """Count a process as ended, though the list may have its successor by now."""
        self.ended.add(pid)
        self._on_end()

    def exit_code(self, idx: int) -> str:
        """Return a text with the exit code of a process that has ended, or "" if unknown."""
        process = self._processes[idx]
        code = getattr(process, "exitcode", getattr(process, "returncode", None))
        if code is None:
            code = find_exit_code(process if isinstance(process, int) else process.pid)
        return "" if code is None else f" with exit code {code}"

    def close(self) -> None:
        """Stop watching."""
        for pidfd in self._pidfds.values():
            if pidfd >= 0:
                self._loop.remove_reader(pidfd)
                os.close(pidfd)
