"""Find what a block of code leaves behind: tasks, descriptors, threads, processes, memory.

:func:`assert_no_leaks` compares what the process holds before and after a block. What the
platform cannot list (``/proc`` and ``/dev/shm`` are Linux) is not compared.

This module must never import pytest, torch or the rest of aiosync.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType


__all__ = ["LEAK_KINDS", "LeakError", "assert_no_leaks"]

LEAK_KINDS: Final = ("tasks", "fds", "threads", "processes", "shm", "mappings")
"""What can be compared.

``tasks`` of the running loop; ``fds``, open file descriptors; ``threads``; ``processes``, child
processes; ``shm``, entries of ``/dev/shm`` that belong to this user and that no other process has
mapped; ``mappings``, mapped anonymous files and files of ``/dev/shm``.
"""


class LeakError(AssertionError):
    """Something was left behind.

    Attributes:
        leaks: For each kind of which something is left, descriptions of the things.
    """

    def __init__(self, leaks: Mapping[str, tuple[str, ...]]) -> None:
        self.leaks: dict[str, tuple[str, ...]] = dict(leaks)
        super().__init__(
            "left behind: "
            + "; ".join(f"{kind}: {', '.join(things)}" for kind, things in self.leaks.items())
        )


class assert_no_leaks:  # reads as the verb that it is
    """Context manager that raises :class:`LeakError` when the block leaves something behind.

    Use ``async with`` on a running loop, so that handles which close at the next turn of the loop
    may do so; ``with`` otherwise. A block that raises is not checked: its own error matters more.

    Args:
        kinds: What to compare, out of :data:`LEAK_KINDS`.
        grace: Seconds in which things may still go away by themselves. Not waited for when there
            is nothing left, which is the normal case.
    """

    def __init__(self, *, kinds: tuple[str, ...] = LEAK_KINDS, grace: float = 1.0) -> None:
        unknown = set(kinds) - set(LEAK_KINDS)
        if unknown:
            raise ValueError(f"unknown kinds of leaks: {sorted(unknown)}")
        self._kinds = kinds
        self._grace = grace
        self._before: dict[str, dict[object, str]] = {}

    def __enter__(self) -> Self:
        self._before = _take(self._kinds)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            return
        give_up = time.monotonic() + self._grace
        leaks = self._leaks()
        while leaks and time.monotonic() < give_up:
            gc.collect()
            time.sleep(0.005)
            leaks = self._leaks()
        if leaks:
            raise LeakError(leaks)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            return
        give_up = time.monotonic() + self._grace
        turns = 0
        leaks = self._leaks()
        while leaks and time.monotonic() < give_up:
            turns += 1
            if turns > 5:
                gc.collect()
            await asyncio.sleep(0 if turns <= 5 else 0.005)
            leaks = self._leaks()
        if leaks:
            raise LeakError(leaks)

    def _leaks(self) -> dict[str, tuple[str, ...]]:
        now = _take(self._kinds)
        leaks: dict[str, tuple[str, ...]] = {}
        for kind, things in now.items():
            old = self._before[kind]
            new = {key: text for key, text in things.items() if key not in old}
            if new and kind == "shm":
                new = _without_others(new)
            if new:
                leaks[kind] = tuple(new.values())
        return leaks


def _take(kinds: tuple[str, ...]) -> dict[str, dict[object, str]]:
    return {kind: _LISTERS[kind]() for kind in kinds}


def _tasks() -> dict[object, str]:
    try:
        return {task: repr(task) for task in asyncio.all_tasks()}
    except RuntimeError:  # no loop is running
        return {}


def _fds() -> dict[object, str]:
    found: dict[object, str] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for name in names:
        with suppress(OSError):  # the descriptor that listed the folder is gone again
            target = os.readlink(f"/proc/self/fd/{name}")
            found[name, target] = f"{name} -> {target}"
    return found


def _threads() -> dict[object, str]:
    return {thread: thread.name for thread in threading.enumerate()}


def _processes() -> dict[object, str]:
    found: dict[object, str] = {
        child.pid: f"{child.name} (pid {child.pid})" for child in multiprocessing.active_children()
    }
    with suppress(OSError):
        for path in Path("/proc/self/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended meanwhile
                for pid in path.read_text().split():
                    found.setdefault(int(pid), f"pid {pid}")
    # multiprocessing keeps this helper of its own until the interpreter exits.
    found.pop(getattr(resource_tracker._resource_tracker, "_pid", None), None)
    return found


def _shm() -> dict[object, str]:
    found: dict[object, str] = {}
    with suppress(OSError), os.scandir("/dev/shm") as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid():
                    found[str(status.st_ino)] = entry.name
    return found


def _without_others(entries: dict[object, str]) -> dict[object, str]:
    """Drop the entries of ``/dev/shm`` that another process has mapped and this one has not."""
    own = _mapped_inodes(Path("/proc/self/maps"))
    elsewhere: set[str] = set()
    if not own.issuperset(map(str, entries)):
        for path in Path("/proc").glob("[0-9]*/maps"):
            elsewhere |= _mapped_inodes(path)
    return {
        inode: name for inode, name in entries.items() if inode in own or inode not in elsewhere
    }


def _mapped_inodes(maps: Path) -> set[str]:
    """Inodes of the files of ``/dev/shm`` that a process maps, under whatever name."""
    found: set[str] = set()
    with suppress(OSError):  # that process is not ours, or has ended
        for line in maps.read_text().splitlines():
            if "/dev/shm/" in line:
                found.add(line.split(maxsplit=5)[4])
    return found


def _mappings() -> dict[object, str]:
    found: dict[object, str] = {}
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/memfd:" in line or "/dev/shm/" in line:
                fields = line.split(maxsplit=5)
                found[fields[0], fields[4]] = f"{fields[5]} at {fields[0]}"
    return found


_LISTERS = {
    "tasks": _tasks,
    "fds": _fds,
    "threads": _threads,
    "processes": _processes,
    "shm": _shm,
    "mappings": _mappings,
}
