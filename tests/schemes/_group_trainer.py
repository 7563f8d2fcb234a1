"""A trainer beside its default group of two ranks, and one that was given a group and a store."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiosync
from tests.schemes._driver import PATIENCE, free_port, together
from tests.schemes._harness import context
from tests.schemes._models import fill, filled


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 4096), nn.Linear(4096, 8))  # 8 MiB: over the group


def total(model: nn.Module) -> float:
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def worker(scheme: Any, idx: int, totals: Any) -> None:
    async def main() -> None:
        model = make_model()
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        async with scheme:
            await scheme.connect(timeout=PATIENCE)
            await scheme.wait_for_version(4, timeout=PATIENCE)  # 1 is the initial one
            assert not dist.is_initialized()
            assert total(model) == await asyncio.to_thread(totals.get)
            print(f"worker {idx} has the weights of step 3", flush=True)

    aiosync.run(main)


def rank(number: int, port: int, scheme: Any, totals: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=number, world_size=2)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    async def main() -> None:
        if number == 0:
            scheme.init_on_sender(model_id="policy", model=model.module, num_workers=2)
            await scheme.connect(timeout=PATIENCE)
        for step in range(3):
            torch.manual_seed(10 * step + number)
            optimizer.zero_grad()
            model(torch.randn(16, 512)).pow(2).mean().backward()  # reduces over the default group
            optimizer.step()
            if number == 0:
                await scheme.send()
        sums = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(sums, torch.tensor([total(model)], dtype=torch.float64))
        assert sums[0] == sums[1]
        if number == 0:
            for _ in range(2):
                totals.put(total(model.module))
            print("both ranks hold the same weights", flush=True)
        await scheme.aclose()

    aiosync.run(main)
    dist.destroy_process_group()


def given(number: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, 3, is_master=number == 0, timeout=timedelta(seconds=PATIENCE)
    )
    dist.init_process_group("gloo", store=store, rank=number, world_size=3)
    group = dist.new_group([0, 1, 2])
    model = nn.Linear(512, 4096)
    fill(model, 1.0)
    scheme = aiosync.DistributedWeightSyncScheme(group=group, store=store)

    async def main() -> None:
        if number == 0:
            scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
        else:
            scheme.init_on_receiver(model_id="policy", model=model, worker_idx=number - 1)
        async with scheme:
            await scheme.connect(timeout=PATIENCE)
            for version in (2, 3):
                if number == 0:
                    fill(model, float(version))
                    await scheme.send(timeout=PATIENCE)
                else:
                    await scheme.wait_for_version(version, timeout=PATIENCE)
            with scheme.reading():
                assert filled(model, 3.0)
            print(f"rank {number} has version 3", flush=True)

    aiosync.run(main)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    assert ones == 3
    if number == 0:
        print("the group still works", flush=True)
    dist.destroy_process_group()


def main() -> None:
    ctx, port = context("forkserver"), free_port()
    if sys.argv[1:] == ["given"]:
        together([ctx.Process(target=given, args=(number, port)) for number in range(3)])
        return
    scheme = aiosync.DistributedWeightSyncScheme(
        shared_memory=False, address=f"tcp://127.0.0.1:{free_port()}"
    )
    totals = ctx.SimpleQueue()
    ranks = [ctx.Process(target=rank, args=(i, port, scheme, totals)) for i in range(2)]
    workers = [ctx.Process(target=worker, args=(scheme, i, totals)) for i in range(2)]
    together(ranks + workers)


if __name__ == "__main__":
    main()
