"""The thread that runs what must not hold the loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from aiosync.schemes._background import Background


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.asyncio
async def test_calls_run_in_order_in_one_thread() -> None:
    background = Background("aiosync-test")
    seen: list[tuple[int, str]] = []

    def note(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return number

    results = await asyncio.gather(
        *(background.run(lambda n=n: note(n), patience=1.0) for n in range(5))
    )
    assert results == list(range(5))
    assert seen == [(n, "aiosync-test") for n in range(5)]
    background.close(patience=5.0)
    background.close(patience=5.0)
    with pytest.raises(RuntimeError, match="was closed"):
        await background.run(lambda: None, patience=1.0)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (KeyError("k"), KeyError),
        (CancelledError(), CancelledError),
        (asyncio.CancelledError(), RuntimeError),
        (SystemExit(3), RuntimeError),
        (StopIteration(), RuntimeError),
    ],
)
@pytest.mark.asyncio
async def test_what_a_call_raises_is_raised_where_it_is_waited_for(raised, expected) -> None:
    background = Background("aiosync-test")
    with pytest.raises(expected) as info:
        await background.run(lambda: _raise(raised), patience=1.0)
    assert raised in (info.value, info.value.__cause__)
    assert await background.run(lambda: 7, patience=1.0) == 7
    background.close(patience=5.0)


@pytest.mark.asyncio
async def test_who_is_cancelled_waits_for_the_call_but_not_for_ever() -> None:
    background = Background("aiosync-test")
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait(30)

    task = asyncio.ensure_future(background.run(work, patience=0.05))
    await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    background.close(patience=5.0)  # does not wait for what is busy
    assert not go_on.is_set()
    go_on.set()
