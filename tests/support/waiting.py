"""Waiting for conditions without an event, free ports, and the memory that a process has."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = float(os.environ.get("PATIENCE", "40"))
"""Seconds that anything may take on a busy machine before a test fails."""


async def until(condition: Callable[[], bool], limit: float = PATIENCE) -> None:
    """Let the event loop turn until ``condition()`` is true, for at most ``limit`` seconds."""
    async with asyncio.timeout(limit):
        while not condition():
            await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], bool], limit: float = PATIENCE) -> None:
    """Wait in a thread without a loop until ``condition()`` is true, at most ``limit`` seconds."""
    deadline = time.monotonic() + limit
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        pause.wait(0.001)


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped.

    On a busy machine threads go on for a while after the signal.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def have_stopped() -> bool:
        try:
            stats = [(task / "stat").read_text() for task in tasks.iterdir()]
        except OSError:
            # A thread has just ended.
            return False
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    wait_until(have_stopped)


def free_port() -> int:
    """Return a port of the loopback interface on which no socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def free_address() -> str:
    """Return the address of a port of the loopback interface on which no socket listens."""
    return f"tcp://127.0.0.1:{free_port()}"


def mapped_nbytes(name: str = "") -> int:
    """Return the number of bytes in mappings with ``name`` in their line; by default in all."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = (line.split(maxsplit=1)[0].split("-") for line in lines if name in line)
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def resident_nbytes() -> int:
    """Return the number of bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_slots() -> int:
    """Return the number of mappings of shared memory in this process, such as slots."""
    return Path("/proc/self/maps").read_text().count("memfd:")


def wake_ups(pid: int) -> dict[str, int]:
    """Return the voluntary context switches of each thread of a process, by its number."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        [switches] = re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", path.read_text(), re.M)
        found[path.parent.name] = int(switches)
    return found
