"""assert_no_leaks() notices each kind of thing that can be left behind."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from aiosync.testing import LEAK_KINDS, LeakError, assert_no_leaks

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
NAME = f"aiosync-test-{os.getpid()}"

# Each leaves something, yields, and takes it away.


def thread() -> Iterator[None]:
    stop = threading.Event()
    left = threading.Thread(target=stop.wait, name=NAME)
    left.start()
    yield
    stop.set()
    left.join()


def descriptor() -> Iterator[None]:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield
    os.close(fd)


@linux
@pytest.mark.parametrize(
    ("leave", "kind", "named"),
    [
        (thread, "threads", NAME),  # tests/test_leak_checks.py has the other kinds
        (descriptor, "fds", os.devnull),
    ],
    ids=["thread", "descriptor"],
)
def test_what_is_left_is_seen_and_only_where_it_is_looked_for(leave, kind, named) -> None:
    steps = leave()
    others = tuple(other for other in LEAK_KINDS if other not in (kind, "fds"))
    with (
        pytest.raises(LeakError, match=f"{kind}: .*{named}") as caught,
        assert_no_leaks(grace=0.0),
        assert_no_leaks(kinds=others, grace=0.0),
    ):
        next(steps)
    with assert_no_leaks(grace=0.0):  # it was there before
        pass
    assert next(steps, None) is None
    assert named in caught.value.leaks[kind][0]
    assert set(caught.value.leaks) <= {kind, "fds"}


@pytest.mark.asyncio
async def test_task() -> None:
    with pytest.raises(LeakError, match="tasks: "):
        async with assert_no_leaks(grace=0.0):
            left = asyncio.ensure_future(asyncio.Event().wait())
    left.cancel()
    await asyncio.wait({left})


@pytest.mark.asyncio
async def test_what_ends_within_the_grace_is_no_leak() -> None:
    async with assert_no_leaks():
        task = asyncio.ensure_future(asyncio.sleep(0))
    assert task.done()
    with assert_no_leaks():
        threading.Timer(0.02, bool).start()


def test_the_error_of_the_block_comes_first() -> None:
    steps = thread()
    with pytest.raises(KeyError), assert_no_leaks(grace=0.0):
        next(steps)
        raise KeyError("its own error")
    assert next(steps, None) is None
