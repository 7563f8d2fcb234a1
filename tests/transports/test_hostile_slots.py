"""Trainers that name shared memory which they did not give, and workers that write nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aiosync
from aiosync.errors import AiosyncError
from aiosync.wire import (
    Manifest,
    ManifestMessage,
    PageMessage,
    Segment,
    Take,
    Welcome,
    encode_frame,
)
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

EPOCH = 5
SLOT = 4096


def _file(content: bytes, nbytes: int) -> int:
    fd = os.memfd_create("hostile")
    os.truncate(fd, nbytes)
    os.pwrite(fd, content, 0)
    return fd


def _header(version: int, nbytes: int, digest: bytes) -> bytes:
    return struct.pack("<QQ16sQ24x", version, nbytes, digest, 0)


DIGEST = bytes(16)
NAMED = {
    "a slot that is not there": (1 << 16 | 1 << 8 | 7, _header(2, 64, DIGEST), SLOT, SLOT),
    "a slot that holds nothing": (1 << 16 | 1 << 8, bytes(64), SLOT, SLOT),
    "more than a slot has": (1 << 16 | 1 << 8, _header(2, 2**40, DIGEST), SLOT, SLOT),
    "a page that is too short": (0, b"", 8, SLOT),
    "slots that are not there": (1 << 16 | 1 << 8, _header(2, 64, DIGEST), SLOT, 8),
}


@pytest.mark.parametrize("case", NAMED)
async def test_what_was_never_given_is_never_taken(case: str) -> None:
    want, header, page_nbytes, segment_nbytes = NAMED[case]
    mine, its = socket.socketpair()
    mine.setblocking(False)
    page = _file(want.to_bytes(8, "little"), page_nbytes)
    segment = _file(header[:segment_nbytes], segment_nbytes)
    worker, target = aiosync.SharedMemWeightSyncScheme(timeout=0.5), models.linear(1.0)
    worker.init_on_receiver(model=target, pipe=its)
    loop = asyncio.get_running_loop()
    try:
        joining = asyncio.ensure_future(worker.connect())
        # The worker's Hello is not checked here.
        await loop.sock_recv(mine, 65536)
        mine.sendall(encode_frame(Welcome(EPOCH, 1, 0)))
        mine.sendall(encode_frame(ManifestMessage(Manifest((), 0))))
        socket.send_fds(mine, [encode_frame(PageMessage())], [page])
        socket.send_fds(mine, [encode_frame(Segment(1, SLOT, 1))], [segment])
        mine.sendall(encode_frame(Take(EPOCH, 1)))
        with pytest.raises(AiosyncError):
            await joining
        assert models.filled(target, 1.0)
    finally:
        await worker.aclose()
        mine.close()
        os.close(page)
        os.close(segment)


async def test_a_descriptor_that_was_not_sent_ends_the_link() -> None:
    left, right = socket.socketpair()
    async with aiosync.SharedMemTransport(right) as transport:
        left.sendall(encode_frame(PageMessage()))
        with pytest.raises(aiosync.RemoteProtocolError):
            await transport.recv(timeout=30)
    left.close()


async def test_a_worker_that_writes_nonsense_into_its_page_harms_nobody_else() -> None:
    targets = [models.linear(), models.linear()]
    make = aiosync.SharedMemWeightSyncScheme
    ends = harness.crowd(make(), targets, sender={"model": models.linear()})
    async with ends as (sender, [_, good]):
        for value in (1.0, 2.0):
            models.fill(sender.model, value)
            await sender.send()
        _scribble_over_pages()
        models.fill(sender.model, 3.0)
        await sender.send()
        assert all(version <= sender.version for version in sender.worker_versions.values())
        assert models.holds(good, 3.0)


def _scribble_over_pages() -> None:
    """Overwrite the second word of each page, which only workers write, in each mapping of it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:aiosync" in line and "rw-s" in line:
            start, stop = (int(each, 16) for each in line.split()[0].split("-"))
            if stop - start == mmap.PAGESIZE:
                with open("/proc/self/mem", "r+b", buffering=0) as memory:
                    memory.seek(start + 64)
                    memory.write(b"\xff" * 8)


async def test_locks_that_nobody_was_given_end_a_send_and_not_the_sender() -> None:
    make = aiosync.SharedMemWeightSyncScheme
    ends = harness.here(make(), models.linear(), sender={"model": models.linear()})
    async with ends as (sender, receiver):
        await harness.deliver(sender, receiver, 2.0)
        with _locks() as lock:
            with pytest.raises(aiosync.ConfigError, match="more slots .* than they were given"):
                for number in range(20):
                    lock(number)
                    await sender.send()
        await harness.deliver(sender, receiver, 3.0)


@contextlib.contextmanager
def _locks() -> Iterator[Callable[[int], None]]:
    """A function that locks the slots 0 to ``last`` of each segment of this process.

    The locks belong to file descriptions that this context manager opens and closes.
    """
    with contextlib.ExitStack() as opened:
        fds = []
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            with contextlib.suppress(OSError):
                if "memfd:aiosync" in os.readlink(path):
                    fds.append(os.open(path, os.O_RDONLY))
                    opened.callback(os.close, fds[-1])

        def lock(last: int) -> None:
            for fd in fds:
                first = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, last + 1, 0)
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, first)

        yield lock
