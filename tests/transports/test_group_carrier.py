"""A payload over Gloo whose peer stands still or dies in the middle of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from aiosync.errors import TransportBroken
from aiosync.transports._group_chunks import CHUNK_NBYTES
from aiosync.transports._process_group import GroupCarrier

PATIENCE = 0.5
CHUNKS = 16


def group(path: str, rank: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=20)
    options._threads = 1
    return dist.ProcessGroupGloo(dist.FileStore(path, 2), rank, 2, options)


def take_two_chunks(path: str, then: int) -> None:
    peer = group(path, 1)
    # All that the sender has on its way is matched: Gloo tells nobody who waits for these.
    chunks = [torch.empty(CHUNK_NBYTES, dtype=torch.uint8) for _ in range(8)]
    taking = [peer.recv([chunk], 0, 0) for chunk in chunks]
    for work in taking[:2]:
        work.wait(timedelta(seconds=20))
    os.kill(os.getpid(), then)


@pytest.mark.asyncio
@pytest.mark.parametrize("then", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_transfer_that_was_cut_ends_after_one_patience(tmp_path: Path, then: int) -> None:
    path = str(tmp_path / "store")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=take_two_chunks, args=(path, then), daemon=True)
    process.start()
    carrier = GroupCarrier(0, "127.0.0.1", patience=PATIENCE)
    try:
        carrier._group = group(path, 0)
        payload = [memoryview(bytearray(CHUNKS * CHUNK_NBYTES))]
        began = time.monotonic()
        with pytest.raises(TransportBroken):
            await carrier._in_thread(lambda: carrier._move(payload, carrier._post_send))
        assert time.monotonic() - began < 3 * PATIENCE
    finally:
        process.kill()
        process.join()
        await carrier.aclose()
