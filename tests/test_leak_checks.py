"""The checks of conftest.py around every test, and :class:`assert_no_leaks`, which they use."""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

from aiosync.testing import LeakError, assert_no_leaks

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the checks read /proc"
)


@pytest.mark.asyncio
async def test_both_loops_are_used(request: pytest.FixtureRequest) -> None:
    expected = request.node.callspec.id
    assert type(asyncio.get_running_loop()).__module__.startswith(expected)


@pytest.mark.slow
def test_leaks_fail_a_test(pytester: pytest.Pytester) -> None:
    """Each kind of leak fails a test; a thread that ends within the grace period does not."""
    pytester.makeconftest(
        Path(__file__).with_name("conftest.py").read_text().replace("GRACE = 5.0", "GRACE = 0.5")
    )
    pytester.makeini(
        "[pytest]\naddopts = -p no:anyio -p no:cacheprovider\nasyncio_mode = strict\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    pytester.makepyfile(
        """
        import asyncio
        import mmap
        import os
        import subprocess
        import threading
        import time
        import pytest

        on_asyncio = pytest.mark.asyncio(loop_factories=["asyncio"])
        kept = []

        def test_leaves_a_descriptor():
            os.open(os.devnull, os.O_RDONLY)

        def test_leaves_a_thread():
            threading.Thread(target=time.sleep, args=(2.0,), name="stray").start()

        def test_leaves_a_child():
            kept.append(subprocess.Popen(["sleep", "1"]))

        def test_leaves_shared_memory():
            with open(f"/dev/shm/aiosync-test-{os.getpid()}", "xb"):
                pass

        def test_leaves_a_mapping():
            fd = os.memfd_create("aiosync-test")
            os.ftruncate(fd, 4096)
            kept.append(mmap.mmap(fd, 4096))
            os.close(fd)

        @on_asyncio
        async def test_leaves_a_task():
            asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="stray")

        @on_asyncio
        async def test_error_that_only_the_loop_sees():
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        @on_asyncio
        async def test_its_own_error_comes_first():
            os.open(os.devnull, os.O_RDONLY)
            assert False

        def test_clean():
            threading.Thread(target=time.sleep, args=(0.1,)).start()

        def test_clean_up():
            os.unlink(f"/dev/shm/aiosync-test-{os.getpid()}")
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=8, failed=2, errors=6)
    result.stdout.fnmatch_lines_random(
        [
            "*fds: * /dev/null*",
            "*threads: stray*",
            "*processes: *sleep*",
            "*shm: aiosync-test-*",
            "*mappings: */memfd:aiosync-test*",
            "*tasks were left running*",
            "*ZeroDivisionError*",
        ]
    )


def test_what_is_left_is_seen_and_only_where_it_is_looked_for() -> None:
    with (
        pytest.raises(LeakError, match=f"fds: .*{os.devnull}") as caught,
        assert_no_leaks(grace=0.0),
        assert_no_leaks(kinds=("threads", "processes"), grace=0.0),
    ):
        fd = os.open(os.devnull, os.O_RDONLY)
    # The descriptor was open before this block.
    with assert_no_leaks(grace=0.0):
        pass
    with pytest.raises(KeyError), assert_no_leaks(grace=0.0):
        other = os.dup(fd)
        raise KeyError("the error of the block comes first")
    os.close(other)
    os.close(fd)
    assert os.devnull in caught.value.leaks["fds"][0]


def test_the_error_travels_to_other_processes() -> None:
    error = LeakError({"fds": ("3 -> /dev/null",)})
    error.add_note("a note")
    same = pickle.loads(pickle.dumps(error))
    assert (str(same), same.leaks, same.__notes__) == (str(error), error.leaks, error.__notes__)


def test_garbage_is_no_leak() -> None:
    """A cycle, which only the garbage collector frees, is no leak, even without a grace period."""
    with assert_no_leaks(grace=0.0):
        fd = os.memfd_create("aiosync-test")
        os.truncate(fd, 1)
        # The mapping has a duplicate of the descriptor.
        kept: list[Any] = [mmap.mmap(fd, 1)]
        os.close(fd)
        kept.append(kept)
        del kept


@pytest.mark.asyncio
async def test_what_ends_within_the_grace_is_no_leak() -> None:
    async with assert_no_leaks():
        asyncio.ensure_future(asyncio.sleep(0))  # noqa: RUF006 - it ends by itself
    with assert_no_leaks():
        threading.Timer(0.02, bool).start()


@pytest.mark.asyncio
async def test_threads_that_the_loop_keeps_are_no_leak() -> None:
    async with assert_no_leaks():
        await asyncio.to_thread(bool)
        await to_thread.run_sync(bool)


@pytest.mark.asyncio
@pytest.mark.parametrize("run_in_thread", [asyncio.to_thread, to_thread.run_sync])
async def test_a_call_that_goes_on_in_a_thread_of_the_loop_is_a_leak(run_in_thread: Any) -> None:
    begun, ended, options = asyncio.Event(), threading.Event(), {"abandon_on_cancel": True}
    loop = asyncio.get_running_loop()

    def wait() -> None:
        loop.call_soon_threadsafe(begun.set)
        ended.wait()

    if run_in_thread is asyncio.to_thread:
        options = {}
    with pytest.raises(LeakError) as caught:
        async with assert_no_leaks(grace=0.05):
            call = asyncio.ensure_future(run_in_thread(wait, **options))
            await begun.wait()
            call.cancel()
    ended.set()
    assert len(caught.value.leaks["threads"]) == 1
