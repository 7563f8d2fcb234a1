"""Find leaks of a block of code: tasks, descriptors, threads, processes, memory.

:func:`assert_no_leaks` compares the resources of the process before and after a block. Kinds that
the platform cannot list are not compared: ``/proc`` and ``/dev/shm`` exist on Linux only.

This module must never import pytest, torch or the rest of aiosync.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["LEAK_KINDS", "LeakError", "assert_no_leaks"]

# Names of the threads that a loop keeps for later calls until it closes.
_LOOP_THREADS = ("asyncio_", "uvloop_")


def _read(path: str | Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with suppress(OSError):  # the thread or process has ended, or belongs to another user
        return Path(path).read_text(errors="replace")
    return ""


def _kept(*names: str) -> set[int | None]:
    """Return descriptors or pids that multiprocessing keeps for its helpers until the exit."""
    helpers = (resource_tracker._resource_tracker, forkserver._forkserver)
    return {getattr(helper, name, None) for helper in helpers for name in names}


# The functions below list the resources of one kind: a key that identifies each, and its text.


def _tasks() -> dict[object, str]:
    """Return the tasks of the running loop that have not ended."""
    with suppress(RuntimeError):  # no loop is running
        return {task: repr(task) for task in asyncio.all_tasks()}
    return {}


def _fds() -> dict[object, str]:
    """Return the open descriptors, each with the file that it refers to."""
    found: dict[object, str] = {}
    # These are attributes of multiprocessing's helpers.
    kept = _kept("_fd", "_forkserver_alive_fd", "_forkserver_authkey_fd")
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the descriptor that listed the directory is closed already
            target = os.readlink(path)
            # The GPU's driver keeps its descriptors open until the process ends.
            if int(path.name) not in kept and not target.startswith("/dev/nvidia"):
                found[path.name, target] = f"{path.name} -> {target}"
    return found


def _threads() -> dict[object, str]:
    """Return the threads that Python knows to run, without idle ones that a loop keeps."""
    # A "Dummy-" thread is a native thread that ran Python once; Python cannot tell its end.
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("Dummy-")]
    if asyncio._get_running_loop() is not None:
        threads = [thread for thread in threads if not _waits_for_calls(thread)]
    return {thread: thread.name for thread in threads}


def _waits_for_calls(thread: threading.Thread) -> bool:
    """Return True for a thread of a loop, or of anyio on it, that no call keeps busy."""
    if thread.name.startswith(_LOOP_THREADS):
        frame = sys._current_frames().get(thread.ident or 0)
        return getattr(frame, "f_code", None) is concurrent.futures.thread._worker.__code__
    return thread in getattr(thread, "idle_workers", ())


def _processes() -> dict[object, str]:
    """Return the child processes, those included that have ended and were not waited for."""
    children = map(_read, Path("/proc/self/task").glob("*/children"))
    pids = {int(pid) for text in children for pid in text.split()}
    pids.difference_update(_kept("_pid", "_forkserver_pid"))
    return {pid: f"{pid} {_read(f'/proc/{pid}/cmdline')[:120]!r}" for pid in pids}


def _shm() -> dict[object, str]:
    """Return this user's files in ``/dev/shm`` by device and inode, as in :func:`_mappings`."""
    found: dict[object, str] = {}
    for path in Path("/dev/shm").glob("*"):
        with suppress(OSError):
            status = path.lstat()
            major, minor = os.major(status.st_dev), os.minor(status.st_dev)
            # Semaphores with these names are multiprocessing's, which removes them itself.
            if status.st_uid == os.getuid() and not path.name.startswith("sem.mp-"):
                found[f"{major:02x}:{minor:02x}", str(status.st_ino)] = path.name
    return found


def _mappings(process: str = "self") -> dict[object, str]:
    """Return the mapped memory files of a process, by device and inode.

    The addresses do not identify a mapping, because neighbouring mappings of one file merge and
    split.
    """
    lines = _read(f"/proc/{process}/maps").splitlines()
    mapped = (line.split(maxsplit=5) for line in lines if "/memfd:" in line or "/dev/shm/" in line)
    return {(device, inode): name for _, _, _, device, inode, name in mapped}


def _not_of_others(entries: dict[object, str]) -> dict[object, str]:
    """Drop the entries of ``/dev/shm`` that another process has mapped and this one has not."""
    own = _mappings()
    elsewhere: set[object] = set()
    if not own.keys() >= entries.keys():
        elsewhere.update(*(_mappings(path.name) for path in Path("/proc").glob("[0-9]*")))
    return {key: name for key, name in entries.items() if key in own or key not in elsewhere}


_LISTERS = {
    "tasks": _tasks,
    "fds": _fds,
    "threads": _threads,
    "processes": _processes,
    "shm": _shm,
    "mappings": _mappings,
}

LEAK_KINDS: Final = ("tasks", "fds", "threads", "processes", "shm", "mappings")
"""Kinds of resources that can be compared.

``tasks`` of the running loop; ``fds``, open file descriptors; ``threads``, but for those that the
running loop keeps for ``asyncio.to_thread()`` and its like; ``processes``, child processes;
``shm``, entries of ``/dev/shm`` that belong to this user and that no other process has mapped;
``mappings``, mapped anonymous files and files of ``/dev/shm``.
"""


class LeakError(AssertionError):
    """Error for a block of code that left resources behind.

    Attributes:
        leaks: Descriptions of the resources that are left, by kind.
    """

    def __init__(self, leaks: Mapping[str, tuple[str, ...]]) -> None:
        self.leaks: dict[str, tuple[str, ...]] = dict(leaks)
        super().__init__(
            "left behind: "
            + "; ".join(f"{kind}: {', '.join(things)}" for kind, things in self.leaks.items())
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The notes travel, too: that of a conformance check names it.
        return type(self), (self.leaks,), vars(self)


class assert_no_leaks:  # in small letters, because it reads as a verb
    """Context manager that raises :class:`LeakError` when the block leaves something behind.

    Use ``async with`` on a running loop, so that handles which close at the next turn of the loop
    may do so; ``with`` otherwise. A block that raises is not checked: its own error matters more.

    Args:
        kinds: Kinds to compare, out of :data:`LEAK_KINDS`.
        grace: Seconds in which resources may still disappear by themselves. If nothing is left,
            which is the normal case, there is no wait.
    """

    def __init__(self, *, kinds: tuple[str, ...] = LEAK_KINDS, grace: float = 1.0) -> None:
        self._listers = {kind: _LISTERS[kind] for kind in kinds}
        self._grace = grace
        self._before: dict[str, dict[object, str]] = {}

    def __enter__(self) -> Self:
        self._before = {kind: lister() for kind, lister in self._listers.items()}
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        *_: object,
    ) -> None:
        for pause in self._pauses() if exc_type is None else ():
            time.sleep(pause)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        *_: object,
    ) -> None:
        for pause in self._pauses() if exc_type is None else ():
            await asyncio.sleep(pause)

    def _pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before the next comparison; end when nothing is left.

        Raises:
            LeakError: Something is left after the time of grace.
        """
        give_up = time.monotonic() + self._grace
        turns = 0
        while leaks := self._leaks():
            # Garbage has to be collected at least once before anything counts as a leak.
            if turns > 5 and time.monotonic() >= give_up:
                raise LeakError(leaks)
            turns += 1
            if turns > 5:
                gc.collect()
            yield 0.0 if turns <= 5 else 0.005

    def _leaks(self) -> dict[str, tuple[str, ...]]:
        """Return the texts of the resources that were not there before the block, by kind."""
        leaks: dict[str, tuple[str, ...]] = {}
        for kind, lister in self._listers.items():
            new = {key: text for key, text in lister().items() if key not in self._before[kind]}
            new = _not_of_others(new) if kind == "shm" else new
            if new:
                leaks[kind] = tuple(new.values())
        return leaks
