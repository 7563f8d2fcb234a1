"""The leak checks of conftest.py find what they are there to find."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import _loops, _Resources

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the checks read /proc"
)


def _thread() -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-behind")
    thread.start()
    yield
    stop.set()
    thread.join()


def _fd() -> Iterator[None]:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield
    os.close(fd)


def _child() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield
    process.communicate(b"\n")


def _shm_entry() -> Iterator[None]:
    path = f"/dev/shm/aiosync-test-{os.getpid()}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    yield
    os.unlink(path)


def _mapping() -> Iterator[None]:
    fd = os.memfd_create("aiosync-test")
    os.ftruncate(fd, 4096)
    mapping = mmap.mmap(fd, 4096)
    os.close(fd)
    yield
    mapping.close()


@pytest.mark.parametrize(
    ("leak", "field"),
    [
        (_thread, "threads"),
        (_fd, "fds"),
        (_child, "children"),
        (_shm_entry, "shm_entries"),
        (_mapping, "memfd_mappings"),
    ],
)
def test_a_leak_is_seen_and_its_end_too(leak, field) -> None:
    before = _Resources.now()
    steps = leak()
    next(steps)
    left = _Resources.now().since(before)
    assert getattr(left, field)
    assert field in str(left)
    assert next(steps, None) is None
    assert not _Resources.now().since(before)


@pytest.mark.asyncio
async def test_every_test_loop_is_watched() -> None:
    assert asyncio.get_running_loop() in _loops


@pytest.mark.asyncio
async def test_both_loops_are_used(request: pytest.FixtureRequest) -> None:
    expected = request.node.callspec.id
    assert type(asyncio.get_running_loop()).__module__.startswith(expected)


@pytest.mark.slow
def test_leaks_fail_a_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makeini(
        "[pytest]\naddopts = -p no:anyio -p no:cacheprovider\nasyncio_mode = strict\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    pytester.makepyfile(
        """
        import asyncio
        import os
        import pytest

        def test_leaves_a_descriptor():
            os.open(os.devnull, os.O_RDONLY)

        @pytest.mark.asyncio(loop_factories=["asyncio"])
        async def test_leaves_a_task():
            asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="stray")

        @pytest.mark.asyncio(loop_factories=["asyncio"])
        async def test_error_that_only_the_loop_sees():
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        def test_clean():
            pass
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=3, failed=1, errors=2)
    result.stdout.fnmatch_lines_random(
        ["*fds: * /dev/null*", "*tasks were left running*", "*ZeroDivisionError*"]
    )
