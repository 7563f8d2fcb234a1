"""What the kernel tells about the processes and the links of workers, without waiting.

The loop may not have noticed yet what these say. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Callable, Collection, Sequence
from typing import Any

from aiosync.errors import ConfigError, ConnectError
from aiosync.transports._processes import has_ended, open_pidfd
from aiosync.transports.base import Transport

__all__ = ["Processes", "is_up", "watch_process"]

# Tells that the peer will write no more even while bytes of it are unread. Linux only.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)
_ENDED = _PEER_CLOSED | select.POLLHUP | select.POLLERR | select.POLLNVAL


def is_up(transport: Transport) -> bool:
    """Whether the other end of a link is open and its process has not ended.

    A link without a stream below, in one process, counts as up.
    """
    channel = transport.channel
    if channel is None:
        return True
    if channel.ended or (channel.pidfd >= 0 and has_ended(channel.pidfd)):
        return False
    poller = select.poll()
    poller.register(channel.io.read_fd, _PEER_CLOSED)
    return not any(event & _ENDED for _, event in poller.poll(0))


def watch_process(transport: Transport, pid: int) -> None:
    """Notice the worker's death even if another process holds a copy of its end of a pipe."""
    channel = transport.channel
    if transport.capabilities.cross_host:
        return  # the number may be that of a process of another host
    if channel is not None and channel.pidfd < 0:
        with contextlib.suppress(ConnectError):  # no such process in our namespace
            channel.watch_process(pid)


def pid_of(process: Any) -> int:
    """The id of a process that is given as an object or as its id.

    Raises:
        ConfigError: It is neither, or was not started.
    """
    pid = process if isinstance(process, int) else getattr(process, "pid", None)
    if pid is None:
        raise ConfigError(f"{process!r} is neither a started process nor a process id")
    return int(pid)


class Processes:
    """The processes that are to become workers, and whether they still can.

    Args:
        processes: Process objects or ids, by the index that each worker is expected to have.

    Raises:
        ConfigError: One is neither, or was not started.
    """

    def __init__(self, processes: Sequence[Any]) -> None:
        self._pids = [pid_of(process) for process in processes]
        self.count = len(self._pids)
        self._ended: set[int] = set()
        self._pidfds: dict[int, int] = {}
        for idx, pid in enumerate(self._pids):
            try:
                pidfd = open_pidfd(pid)
            except ProcessLookupError:
                self._ended.add(idx)
            else:
                if pidfd >= 0:  # else the timeout has to tell
                    self._pidfds[idx] = pidfd

    def watch(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        """Call ``on_end`` whenever one ends."""

        def ended(pidfd: int) -> None:
            loop.remove_reader(pidfd)
            on_end()

        for pidfd in self._pidfds.values():
            loop.add_reader(pidfd, ended, pidfd)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch no longer."""
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def has_ended(self, idx: int) -> bool:
        """Whether the process of that index has ended."""
        return idx in self._ended or (idx in self._pidfds and has_ended(self._pidfds[idx]))

    def ended(self, joined: Collection[int]) -> list[int] | None:
        """Process ids of those that ended, if no other can become a worker any more.

        Workers may have other indices than their processes have here.

        Args:
            joined: The process ids of workers that are connected.

        Returns:
            ``None`` while some process runs and is not a worker yet.
        """
        ended = []
        for idx, pid in enumerate(self._pids):
            if pid not in joined:
                if not self.has_ended(idx):
                    return None
                ended.append(pid)
        return ended
