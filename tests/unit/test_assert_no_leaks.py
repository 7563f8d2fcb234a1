"""assert_no_leaks() notices each kind of thing that can be left behind."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from aiosync.testing import LEAK_KINDS, LeakError, assert_no_leaks

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def leaks_of(leave: object) -> dict[str, tuple[str, ...]]:
    with pytest.raises(LeakError) as caught, assert_no_leaks(grace=0.0):
        leave()
    return caught.value.leaks


def test_nothing_left_is_no_leak() -> None:
    with assert_no_leaks():
        thread = threading.Thread(target=bool)
        thread.start()
        thread.join()


@linux
def test_descriptor() -> None:
    fds: list[int] = []
    try:
        leaks = leaks_of(lambda: fds.extend(os.pipe()))
    finally:
        for fd in fds:
            os.close(fd)
    assert set(leaks) == {"fds"}
    assert len(leaks["fds"]) == 2


def test_thread() -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="left-behind")
    try:
        leaks = leaks_of(thread.start)
    finally:
        event.set()
        thread.join()
    assert leaks == {"threads": ("left-behind",)}


@linux
def test_process() -> None:
    children: list[subprocess.Popen[bytes]] = []
    try:
        leaks = leaks_of(lambda: children.append(subprocess.Popen(["sleep", "60"])))
    finally:
        children[0].kill()
        children[0].wait()
    assert leaks == {"processes": (f"pid {children[0].pid}",)}


@linux
def test_shared_memory_entry() -> None:
    path = Path("/dev/shm") / f"aiosync-test-{uuid.uuid4().hex}"
    try:
        leaks = leaks_of(lambda: path.write_bytes(b"x"))
    finally:
        path.unlink()
    assert path.name in leaks["shm"]


@linux
def test_shared_memory_entry_of_another_process_is_no_leak() -> None:
    path = Path("/dev/shm") / f"aiosync-test-{uuid.uuid4().hex}"
    script = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'w+b')\n"
        "file.truncate(4096)\n"
        "mapping = mmap.mmap(file.fileno(), 4096)\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read()\n"
    )
    kinds = tuple(kind for kind in LEAK_KINDS if kind not in ("processes", "fds"))
    with assert_no_leaks(kinds=kinds, grace=0.0):
        other = subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert other.stdout is not None
        assert other.stdout.readline() == b"mapped\n"
        assert path.exists()
    other.communicate()
    path.unlink()


@linux
def test_mapping_whose_descriptor_is_closed() -> None:
    kept: list[mmap.mmap] = []

    def leave() -> None:
        fd = os.memfd_create("left-behind")
        os.truncate(fd, 4096)
        kept.append(mmap.mmap(fd, 4096, trackfd=False) if sys.version_info >= (3, 13) else _map(fd))
        os.close(fd)

    try:
        leaks = leaks_of(leave)
    finally:
        kept[0].close()
    assert any("left-behind" in text for text in leaks["mappings"])


def _map(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 4096)  # keeps a descriptor of its own as well


@pytest.mark.asyncio
async def test_task() -> None:
    left: list[asyncio.Task[bool]] = []
    with pytest.raises(LeakError) as caught:
        async with assert_no_leaks(grace=0.0):
            left.append(asyncio.ensure_future(asyncio.Event().wait()))
    left[0].cancel()
    await asyncio.wait(left)
    assert set(caught.value.leaks) == {"tasks"}


@pytest.mark.asyncio
async def test_what_ends_within_the_grace_is_no_leak() -> None:
    async with assert_no_leaks():
        task = asyncio.ensure_future(asyncio.sleep(0))
    assert task.done()


@linux
def test_the_error_of_the_block_comes_first() -> None:
    fds: list[int] = []

    def fail() -> None:
        fds.extend(os.pipe())
        raise KeyError("its own error")

    with pytest.raises(KeyError), assert_no_leaks(grace=0.0):
        fail()
    for fd in fds:
        os.close(fd)


@linux
def test_kinds_can_be_chosen() -> None:
    fds: list[int] = []
    with assert_no_leaks(kinds=("threads",), grace=0.0):
        fds.extend(os.pipe())
    for fd in fds:
        os.close(fd)
    with pytest.raises(ValueError, match="unknown kinds"):
        assert_no_leaks(kinds=("sockets",))
    assert "fds" in LEAK_KINDS
