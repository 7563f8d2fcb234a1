"""A trainer and two workers that have a group of their own, and give the scheme its store."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed as dist
from torch import nn

import aiosync
from tests.schemes._driver import PATIENCE, free_port, together
from tests.schemes._harness import context
from tests.schemes._models import fill, filled


def given(number: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, 3, is_master=number == 0, timeout=timedelta(seconds=PATIENCE)
    )
    dist.init_process_group("gloo", store=store, rank=number, world_size=3)
    group = dist.new_group([0, 1, 2])
    model = nn.Linear(512, 4096)
    fill(model, 1.0)
    scheme = aiosync.DistributedWeightSyncScheme(store=store, shared_memory=False)

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
    together([ctx.Process(target=given, args=(number, port)) for number in range(3)])


if __name__ == "__main__":
    main()
