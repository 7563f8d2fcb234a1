"""Waiting for what no event tells about, and ports to wait at."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable

PATIENCE = float(os.environ.get("PATIENCE", "40"))
"""Seconds that anything may take on a busy machine before a test fails."""


async def until(condition: Callable[[], bool], limit: float = PATIENCE) -> None:
    """Let the loop turn until ``condition()``."""
    async with asyncio.timeout(limit):
        while not condition():
            await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], bool], limit: float = PATIENCE) -> None:
    """The same for a thread without a loop."""
    deadline = time.monotonic() + limit
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        pause.wait(0.001)


def free_port() -> int:
    """A port of the loopback interface where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
