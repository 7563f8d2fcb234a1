"""A trainer and two workers use a process group that they were given, and a store to meet."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed as dist
from torch import nn

import aiosync
from tests.schemes._driver import PATIENCE, free_port, together
from tests.schemes._harness import context
from tests.schemes._models import fill, filled


def process(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=PATIENCE)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    group = dist.new_group([0, 1, 2])
    model = nn.Linear(512, 4096)
    fill(model, 1.0)
    scheme = aiosync.DistributedWeightSyncScheme(group=group, store=store)

    async def main() -> None:
        if rank == 0:
            scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
        else:
            scheme.init_on_receiver(model_id="policy", model=model, worker_idx=rank - 1)
        async with scheme:
            await scheme.connect(timeout=PATIENCE)
            for number in (2, 3):
                if rank == 0:
                    fill(model, float(number))
                    await scheme.send(timeout=PATIENCE)
                else:
                    await scheme.wait_for_version(number, timeout=PATIENCE)
            with scheme.reading():
                assert filled(model, 3.0)
            print(f"rank {rank} has version 3", flush=True)

    aiosync.run(main)
    number = torch.ones(1)
    dist.all_reduce(number, group=group)
    assert number == 3
    if rank == 0:
        print("the group still works", flush=True)
    dist.destroy_process_group()


def main() -> None:
    ctx, port = context("forkserver"), free_port()
    together([ctx.Process(target=process, args=(rank, port)) for rank in range(3)])


if __name__ == "__main__":
    main()
