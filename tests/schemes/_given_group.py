"""A trainer and two workers use a process group that they were given, and a store to meet."""

from __future__ import annotations

import multiprocessing
import socket
from datetime import timedelta

import torch
from torch import distributed as dist
from torch import nn

import aiosync

PATIENCE = 40


def process(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=PATIENCE)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    group = dist.new_group([0, 1, 2])
    model = nn.Linear(512, 4096)
    with torch.no_grad():
        model.weight.fill_(1.0)
    scheme = aiosync.DistributedWeightSyncScheme(group=group, store=store)

    async def main() -> None:
        if rank == 0:
            scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
            async with scheme:
                await scheme.connect(timeout=PATIENCE)
                for number in (2.0, 3.0):
                    with torch.no_grad():
                        model.weight.fill_(number)
                    await scheme.send(timeout=PATIENCE)
                await scheme.send(timeout=PATIENCE)
        else:
            scheme.init_on_receiver(model_id="policy", model=model, worker_idx=rank - 1)
            async with scheme:
                await scheme.connect(timeout=PATIENCE)
                await scheme.wait_for_version(4, timeout=PATIENCE)
                assert bool((model.weight == 3.0).all())
                print(f"rank {rank} has version 3", flush=True)

    aiosync.run(main)
    number = torch.ones(1)
    dist.all_reduce(number, group=group)
    assert number == 3
    if rank == 0:
        print("the group still works", flush=True)
    dist.destroy_process_group()


def main() -> None:
    ctx = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [ctx.Process(target=process, args=(rank, port)) for rank in range(3)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(PATIENCE)
        if each.exitcode is None:
            each.kill()
        assert each.exitcode == 0, each


if __name__ == "__main__":
    main()
