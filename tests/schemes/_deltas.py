"""Models of many dtypes, random changes of their bits, and a blocking worker in its own process."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import torch
from torch import nn

import aiosync.sync
from aiosync.wire import checksum
from tests.support.waiting import PATIENCE

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8]
SIZES = [40_000, 3, 20_001, 70_000]


def build() -> nn.Module:
    """Return a model of 700 KiB whose tensors of one dtype are neighbours only in part."""
    model = nn.Module()
    for number, size in enumerate(SIZES):
        for dtype in DTYPES[: 2 if size > 50_000 else None]:
            name = f"{str(dtype).removeprefix('torch.')}_{number}"
            model.register_buffer(name, torch.zeros(size, dtype=dtype))
    model.register_buffer("none", torch.zeros(0))
    return model


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array = tensor.detach().view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
    return array.view(f"u{tensor.element_size()}")


def change(model: nn.Module, rng: random.Random) -> None:
    """Change a random share of the elements: by one step, or to any bits, also of NaN and -0."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    share = rng.choice([0.0, 0.001, 0.01, 0.1, 0.5, 1.0, rng.random()])
    for tensor in model.buffers():
        bits = _bits(tensor)
        moved = numbers.random(bits.size) < share
        steps = numbers.integers(-2, 2, bits.size, endpoint=True)
        if rng.random() < 0.3:
            steps = numbers.integers(-(2**62), 2**62, bits.size)
        bits[moved] += steps[moved].astype(bits.dtype)


def digests(model: nn.Module) -> dict[str, bytes]:
    """Return a checksum of the bits of each tensor."""
    return {name: checksum(_bits(each)) for name, each in model.named_buffers()}


def worker_digests(state: Any) -> dict[str, bytes]:
    """Return the checksums of a worker's model, as a read finds it."""
    with state.scheme.reading():
        return digests(state.model)


async def wait_for(state: Any, epoch: int, version: int) -> None:
    """Wait until a worker has this version of this run of the trainer, or a newer one."""
    async with asyncio.timeout(PATIENCE):
        while (stats := state.scheme.stats()).epoch != epoch or stats.version < version:
            await asyncio.sleep(0.002)


def overwrite(state: Any) -> None:
    """Have a worker write to its weights."""
    with torch.no_grad():
        for each in state.model.buffers():
            each.fill_(1)


def reconnects(state: Any) -> int:
    found: int = state.scheme.stats().reconnects
    return found


def blocking_worker(url: str, conn: Any) -> None:
    """Answer each request with the checksums of a model that the blocking API updates."""
    torch.set_num_threads(1)
    model = build()
    with aiosync.sync.TCPWeightSyncScheme(url, delta="always") as scheme:
        scheme.init_on_receiver("policy", model=model)
        scheme.connect()
        while conn.recv():
            with scheme.reading():
                conn.send((scheme.version, digests(model)))
