"""Async workers that were never closed, and whose event loop has ended: none of them is kept."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from tests.support.waiting import PATIENCE, free_address

pytestmark = pytest.mark.slow

SCHEMES = {
    "shared memory": lambda: aiosync.SharedMemWeightSyncScheme(),
    "copies": lambda: aiosync.SharedMemWeightSyncScheme(apply_copy=True),
    "blocks": lambda: aiosync.SharedMemWeightSyncScheme(guard="reading"),
    "pipes": lambda: aiosync.MultiProcessWeightSyncScheme(),
    "TCP": lambda: aiosync.TCPWeightSyncScheme(free_address()),
}


def _train(scheme: aiosync.WeightSyncScheme, ended: Any) -> None:
    """Send until the test has ended."""

    async def train() -> None:
        scheme.init_on_sender(model=nn.Linear(64, 64), num_workers=1)
        async with scheme:
            await scheme.connect()
            while not ended.is_set():
                # The worker ends without a farewell.
                with contextlib.suppress(aiosync.PartialSyncError):
                    await scheme.send()
                await asyncio.sleep(0.005)

    asyncio.run(train())


async def _follow(scheme: aiosync.WeightSyncScheme, model: nn.Module) -> None:
    """Compute until version 20, so that some versions were taken by forwards alone."""
    scheme.init_on_receiver(model=model)
    await scheme.connect()
    async with asyncio.timeout(PATIENCE):
        while scheme.version < 20:
            with scheme.reading():
                model(torch.ones(64))
            await asyncio.sleep(0.001)


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
@pytest.mark.parametrize("keeps_model", [False, True], ids=["all", "but the model"])
@pytest.mark.parametrize("make", SCHEMES.values(), ids=SCHEMES)
def test_a_worker_that_is_forgotten_is_collected(make: Any, keeps_model: bool) -> None:
    """A worker's model, slots and descriptors go with its last reference; a kept model computes."""
    scheme, context = make(), multiprocessing.get_context("spawn")
    ended = context.Event()
    trainer = context.Process(target=_train, args=(scheme, ended))
    trainer.start()
    try:
        before = len(os.listdir("/proc/self/fd"))
        model = nn.Linear(64, 64)
        asyncio.run(_follow(scheme, model))
        found = weakref.ref(scheme), weakref.ref(model)
        kept = [model] if keeps_model else []
        output = model(torch.ones(64)) if keeps_model else None
        del scheme, model
        gc.collect()
        assert (found[0](), found[1]()) == (None, kept[0] if kept else None)
        assert len(os.listdir("/proc/self/fd")) == before
        if kept:
            assert torch.equal(kept[0](torch.ones(64)), output)
    finally:
        ended.set()
        trainer.join(PATIENCE)
    assert trainer.exitcode == 0
