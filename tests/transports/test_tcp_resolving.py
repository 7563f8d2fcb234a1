"""Host names are looked up without waiting for a name server that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
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


# -- names with several addresses -------------------------------------------------------------


def never_answering(stack: contextlib.ExitStack, family: int, host: str) -> Any:
    """The address of a listener that takes no connection any more: connect() hangs there."""
    if not sys.platform.startswith("linux"):
        pytest.skip("other kernels refuse what they cannot queue")
    listener = stack.enter_context(socket.socket(family))
    try:
        listener.bind((host, 0))
    except OSError as exc:
        pytest.skip(f"cannot bind to {host}: {exc}")
    listener.listen(0)
    where = listener.getsockname()
    for _ in range(2):  # one is queued, one waits
        filler = stack.enter_context(socket.socket(family))
        filler.setblocking(False)
        filler.connect_ex(where)
    return where


def resolves_to(silent: Silent, *places: Any) -> None:
    silent.found = [
        (socket.AF_INET6 if ":" in where[0] else socket.AF_INET, socket.SOCK_STREAM, 6, "", where)
        for where in places
    ]
    silent.answer.set()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    ids=["IPv4", "IPv6"],
)
async def test_an_address_that_never_answers_keeps_nobody_from_the_next(
    silent: Silent, family: int, host: str
) -> None:
    with contextlib.ExitStack() as stack:
        hole = never_answering(stack, family, host)
        hole_too = never_answering(stack, family, host)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        refusing = ("127.0.0.1", _free_port())
        resolves_to(silent, hole, refusing, hole_too, server.getsockname())
        server.setblocking(False)
        before = descriptors()
        began = time.monotonic()
        connecting = asyncio.ensure_future(TCPTransport.connect(URL, timeout=PATIENCE))
        loop = asyncio.get_running_loop()
        accepted, _ = await asyncio.wait_for(loop.sock_accept(server), PATIENCE)
        async with await TCPTransport.accept(accepted), await connecting:
            # Two had their quarter of a second; what is refused has its turn at once.
            assert 0.45 < time.monotonic() - began < PATIENCE / 4
            assert len(descriptors() - before) == 2  # both ends of the one that won
        assert descriptors() == before


@pytest.mark.asyncio
async def test_every_address_that_failed_is_named(silent: Silent) -> None:
    one, two = ("127.0.0.1", _free_port()), ("127.0.0.2", _free_port())
    resolves_to(silent, one, two)
    with pytest.raises(ConnectError) as found:
        await TCPTransport.connect(URL, timeout=PATIENCE)
    for host, port in (one, two):
        assert f"Connect call failed ('{host}', {port}): Connection refused" in str(found.value)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_what_is_known_of_each_address_when_the_time_is_up(silent: Silent) -> None:
    with contextlib.ExitStack() as stack:
        hole = never_answering(stack, socket.AF_INET, "127.0.0.1")
        refusing = ("127.0.0.1", _free_port())
        resolves_to(silent, hole, refusing)
        before = descriptors()
        with pytest.raises(ConnectTimeout, match=r"did not answer within 0\.5 s: ") as found:
            await TCPTransport.connect(URL, timeout=0.5)
        assert f"{refusing}: Connection refused; {hole} did not answer" in str(found.value)
        assert descriptors() == before


@pytest.mark.asyncio
@pytest.mark.slow
async def test_cancelling_closes_every_attempt(silent: Silent) -> None:
    with contextlib.ExitStack() as stack:
        holes = [never_answering(stack, socket.AF_INET, "127.0.0.1") for _ in "ab"]
        resolves_to(silent, *holes)
        before = descriptors()
        connecting = asyncio.ensure_future(TCPTransport.connect(URL, timeout=PATIENCE))
        async with asyncio.timeout(PATIENCE):
            while len(descriptors() - before) < 2:
                await asyncio.sleep(0.01)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled()
        assert descriptors() == before


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
