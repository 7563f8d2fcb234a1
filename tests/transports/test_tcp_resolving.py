"""Host names are looked up without waiting for a name server that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import aiosync.sync
from aiosync.errors import ConnectError, ConnectTimeout
from aiosync.transports import _resolving
from aiosync.transports.tcp import TCPTransport
from tests.schemes._harness import PATIENCE
from tests.sync import _tools as tools

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "tcp://trainer.example:7000"


class Silent:
    """A name server that answers when it is told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.asked = 0
        self.found: Any = OSError("no such name")
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, *args: Any, **options: Any) -> Any:
        if host != "trainer.example" or options.get("flags"):
            return self._real(host, *args, **options)
        self.asked += 1
        assert self.answer.wait(PATIENCE)
        if isinstance(self.found, OSError):
            raise self.found
        return self.found


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    resolver = Silent()
    monkeypatch.setattr(socket, "getaddrinfo", resolver.getaddrinfo)
    yield resolver
    resolver.answer.set()
    for thread in threading.enumerate():
        if thread.name == "aiosync-lookup":
            thread.join(PATIENCE)
    assert not _resolving._under_way


@pytest.mark.asyncio
async def test_those_who_ask_at_the_same_time_share_a_thread(silent: Silent) -> None:
    for _ in range(2):  # who gave up, and who asks again
        with pytest.raises(ConnectTimeout, match=r"did not answer within 0\.05 s"):
            await TCPTransport.connect(URL, timeout=0.05)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(_resolving.look_up("trainer.example", 7000)) for _ in "ab"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_resolving.look_up("trainer.example", 7000), 0.01)
        silent.found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 7000))]
        silent.answer.set()
    assert [task.result() for task in asking] == [silent.found] * 2
    assert silent.asked == 1


@pytest.mark.asyncio
async def test_what_the_resolver_says_is_in_the_error(silent: Silent) -> None:
    silent.answer.set()
    for _ in range(2):
        with pytest.raises(ConnectError, match="cannot be looked up: no such name"):
            await TCPTransport.connect(URL, timeout=PATIENCE)
    assert silent.asked == 2


def test_an_answer_for_a_loop_that_has_gone_is_dropped(silent: Silent) -> None:
    async def ask() -> None:
        asyncio.ensure_future(_resolving.look_up("trainer.example", 7000)).add_done_callback(str)
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(ask())
    (waiter,) = _resolving._under_way["trainer.example", 7000].waiters
    for task in asyncio.all_tasks(loop):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop)))
    _resolving._under_way["trainer.example", 7000].waiters.add(waiter)  # as if it came just now
    loop.close()
    silent.answer.set()


@pytest.mark.slow
def test_the_blocking_api_keeps_its_timeout(silent: Silent) -> None:
    scheme = aiosync.sync.TCPWeightSyncScheme(URL)
    scheme.init_on_receiver(model_id="policy", model=tools.filled(0.0))
    started = time.monotonic()
    with pytest.raises(ConnectTimeout):
        scheme.connect(timeout=0.5)
    scheme.shutdown()
    assert 0.4 < time.monotonic() - started < 5.0
    assert not silent.answer.is_set()


PROGRAM = """
import os, socket, sys, threading, time
real = socket.getaddrinfo
def silent(host, *args, **options):
    if host == "trainer.example" and not options.get("flags"):
        time.sleep(600)
    return real(host, *args, **options)
socket.getaddrinfo = silent
"""
BLOCKING = """
import aiosync.sync, torch
scheme = aiosync.sync.TCPWeightSyncScheme("tcp://trainer.example:7000", timeout=0.5)
scheme.init_on_receiver(model_id="policy", model=torch.nn.Linear(1, 1))
try:
    scheme.connect()
except aiosync.ConnectTimeout:
    scheme.shutdown()
    sys.exit(7)
"""
COMMAND = """
from aiosync.cli import main
sys.exit(main(["status", "tcp://trainer.example:7000", "--timeout", "0.5"]) + 6)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", [BLOCKING, COMMAND], ids=["blocking", "command"])
def test_a_process_ends_although_a_name_server_is_silent(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        timeout=PATIENCE,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 7, done.stderr
