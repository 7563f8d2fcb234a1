"""Names that a name server does not know, or that have addresses where nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from aiosync.errors import ConnectTimeout
from aiosync.transports.tcp import TCPTransport
from tests.support.waiting import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

URL = "tcp://trainer.example:7000"
PATIENCE = 20


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Have Python's resolver, which only asyncio's own loop asks, answer for the name."""
    real = socket.getaddrinfo

    def resolve_by(answer: Callable[[], list[Any]]) -> None:
        def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
            if host != "trainer.example" or options.get("flags"):
                return real(host, *args, **options)
            kind = socket.SOCK_STREAM
            return [
                (socket.AF_INET6 if ":" in where[0] else socket.AF_INET, kind, 6, "", where)
                for where in answer()
            ]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return resolve_by


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(coroutine)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def holes() -> Iterator[list[Any]]:
    """Addresses of listeners that take no connection any more: connect() hangs there."""
    if not sys.platform.startswith("linux"):
        pytest.skip("other kernels refuse what they cannot queue")
    with contextlib.ExitStack() as stack:
        found = []
        for _ in "ab":
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            found.append(listener.getsockname())
            for _ in "ab":  # one is queued, one waits
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(found[-1])
        yield found


def test_a_silent_name_server_costs_no_more_than_the_timeout(resolve) -> None:
    answer = threading.Event()

    def answer_late() -> list[Any]:
        assert answer.wait(PATIENCE)
        return []

    async def connect() -> None:
        began = time.monotonic()
        with pytest.raises(ConnectTimeout):
            await TCPTransport.connect(URL, timeout=0.05)
        assert time.monotonic() - began < PATIENCE / 4
        answer.set()  # the loop's resolver is waited for when the loop is closed

    resolve(answer_late)
    run(connect())


def test_an_address_that_never_answers_keeps_nobody_from_the_next(resolve, holes) -> None:
    async def connect(server: socket.socket) -> None:
        before = descriptors()
        connecting = asyncio.ensure_future(TCPTransport.connect(URL, timeout=PATIENCE))
        accepted, _ = await asyncio.wait_for(
            asyncio.get_running_loop().sock_accept(server), PATIENCE
        )
        async with await TCPTransport.accept(accepted), await connecting:
            assert len(descriptors() - before) == 2  # both ends of the one that won
        assert descriptors() == before

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        places = [holes[0], ("127.0.0.1", free_port()), server.getsockname(), holes[1]]
        resolve(lambda: places)
        run(connect(server))
