"""What the kernel tells about the processes and the links of workers, without waiting.

The loop may not have noticed yet what these say. Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping
from typing import Any

from aiosync.errors import ConfigError, ConnectError
from aiosync.transports._segment import has_ended
from aiosync.transports.base import Transport

__all__ = ["is_up", "open_pidfds", "pid_of", "watch_process"]

# Tells that the peer will write no more even while bytes of it are unread. Linux only.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)
_ENDED = _PEER_CLOSED | select.POLLHUP | select.POLLERR | select.POLLNVAL


def is_up(transport: Transport) -> bool:
    """Whether the other end of a link is open and its process has not ended.

    A link without a stream below, in one process, counts as up.
    """
    channel = getattr(transport, "channel", None)
    if channel is None:
        return True
    if channel.ended or (channel.pidfd >= 0 and has_ended(channel.pidfd)):
        return False
    poller = select.poll()
    poller.register(channel.io.read_fd, _PEER_CLOSED)
    return not any(event & _ENDED for _, event in poller.poll(0))


def watch_process(transport: Transport, pid: int) -> None:
    """Notice the worker's death even if another process holds a copy of its end of a pipe."""
    channel = getattr(transport, "channel", None)
    if transport.capabilities.cross_host:
        return  # the number may be that of a process of another host
    if channel is not None and channel.pidfd < 0:
        with contextlib.suppress(ConnectError):  # no such process in our namespace
            channel.watch_process(pid)


def pid_of(process: Any) -> int | None:
    """The id of a process that is given as an object or as its id.

    Raises:
        ConfigError: It is neither, or was not started.
    """
    pid = process if isinstance(process, int) else getattr(process, "pid", None)
    if pid is None:
        raise ConfigError(f"{process!r} is neither a started process nor a process id")
    return int(pid)


def open_pidfds(watched: Mapping[int, int | None]) -> tuple[dict[int, int], set[int]]:
    """Descriptors that tell when processes end, and the workers whose process is gone already."""
    pidfds: dict[int, int] = {}
    ended: set[int] = set()
    if hasattr(os, "pidfd_open"):
        for idx, pid in watched.items():
            try:
                pidfds[idx] = os.pidfd_open(int(pid or 0))
            except ProcessLookupError:
                ended.add(idx)
            except OSError:
                continue  # no pidfd in this kernel or sandbox: the timeout has to tell
    return pidfds, ended
