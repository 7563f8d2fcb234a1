"""The threads beside a link, which end their calls at any time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from aiosync.errors import TransportBroken
from aiosync.transports.data_plane import Threads


@pytest.fixture
def often() -> Iterator[None]:
    """Have threads take turns as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.asyncio
async def test_calls_that_end_while_somebody_waits_for_them(often: None) -> None:
    for _ in range(50):
        threads = Threads("test", 8)
        for _ in range(64):
            threads.start(int)
        await threads.idle()
        for _ in range(64):
            threads.start(int)
        threads.end()
        await threads.aclose(5.0)


@pytest.mark.asyncio
@pytest.mark.timeout(10)
async def test_an_end_while_a_call_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may abort a link anywhere, also inside of an executor."""
    start, threads, ran = threading.Thread.start, Threads("test", 1), list[str]()

    def interrupted(thread: threading.Thread) -> None:
        threads.end(lambda: ran.append("last"))
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        await threads.run(lambda: ran.append("first"))
    await threads.aclose(5.0)
    assert ran == ["first", "last"]


@pytest.mark.asyncio
async def test_a_call_whose_thread_cannot_start_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, ran = Threads("test", 1), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransportBroken, match="a thread cannot start: can't start new thread"):
            await threads.run(lambda: ran.append("refused"))
    await threads.run(lambda: ran.append("started"))
    assert ran == ["started"]
    threads.end()
    await threads.aclose(5.0)
