"""A program whose own blocking calls fill the loop's default executor does not hold aiosync up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import distributed as dist

import aiosync
from aiosync.server import WeightServer
from tests.schemes import _models as models

pytestmark = [pytest.mark.one_loop, pytest.mark.asyncio]

SECONDS = 10.0


@contextlib.contextmanager
def full_executor() -> Iterator[None]:
    """Have one call of the program's fill the default executor of this loop."""
    end = threading.Event()
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    executor.submit(end.wait)
    try:
        yield
    finally:
        end.set()


async def test_a_store_of_a_process_group() -> None:
    store, target = dist.HashStore(), models.linear(0.0)
    sender = aiosync.DistributedWeightSyncScheme(timeout=SECONDS, store=store)
    receiver = aiosync.DistributedWeightSyncScheme(timeout=SECONDS, store=store)
    sender.init_on_sender(model_id="policy", model=models.linear(1.0), num_workers=1)
    receiver.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    with full_executor():
        async with sender, receiver:
            await asyncio.gather(sender.connect(), receiver.connect())
            assert (await sender.send()).acked == {0}
            assert models.filled(target, 1.0)


async def test_a_weight_server_with_files(tmp_path: Path) -> None:
    with full_executor():
        async with WeightServer("tcp://127.0.0.1:0", store=tmp_path) as server:
            trainer = aiosync.TCPWeightSyncScheme(server.url, dial="both", timeout=SECONDS)
            trainer.init_on_sender(model_id="policy", model=models.linear(1.0))
            async with trainer:
                await trainer.connect()
                assert (await trainer.send(timeout=SECONDS)).acked
        async with WeightServer("tcp://127.0.0.1:0", store=tmp_path) as again:
            [model] = again.status()["models"]
            assert model["version"] > 0
