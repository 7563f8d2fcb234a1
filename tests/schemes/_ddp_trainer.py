"""A DDP trainer of two ranks with a default group of its own publishes to two workers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiosync

PATIENCE = 40


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 4096), nn.Linear(4096, 8))  # 8 MiB: over the group


def total(model: nn.Module) -> float:
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def worker(scheme: Any, idx: int, expected: Any) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        model = make_model()
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        async with scheme:
            await scheme.connect(timeout=PATIENCE)
            await scheme.wait_for_version(4, timeout=PATIENCE)  # 1 is the initial one
            assert not dist.is_initialized()
            assert await asyncio.to_thread(expected.poll, PATIENCE)
            assert total(model) == expected.recv()
            print(f"worker {idx} has the weights of step 3", flush=True)

    aiosync.run(main)


def rank(number: int, port: int, scheme: Any, told: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=number, world_size=2)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    async def main() -> None:
        if number == 0:
            told[2].send(pickled(scheme, model.module))
            await scheme.connect(timeout=PATIENCE)
        for step in range(3):
            torch.manual_seed(10 * step + number)
            optimizer.zero_grad()
            loss = model(torch.randn(16, 512)).pow(2).mean()
            loss.backward()  # an all-reduce over the default group
            optimizer.step()
            if number == 0:
                await scheme.send()
        sums = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(sums, torch.tensor([total(model)], dtype=torch.float64))
        assert sums[0] == sums[1]
        if number == 0:
            for pipe in told[:2]:
                pipe.send(total(model.module))
            print("both ranks hold the same weights", flush=True)
            await scheme.aclose()

    aiosync.run(main)
    dist.destroy_process_group()


def pickled(scheme: Any, model: nn.Module) -> Any:
    scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
    return scheme


def main() -> None:
    ctx = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [ctx.Pipe() for _ in range(3)]
    told = [theirs for _, theirs in pipes]
    scheme = aiosync.DistributedWeightSyncScheme(shared_memory=False)
    processes = [ctx.Process(target=rank, args=(i, port, scheme, told)) for i in range(2)]
    for process in processes:
        process.start()
    assert pipes[2][0].poll(PATIENCE)
    copy = pipes[2][0].recv()  # rank 0's, with its address
    for idx in range(2):
        processes.append(ctx.Process(target=worker, args=(copy, idx, pipes[idx][0])))
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
        assert process.exitcode == 0, process


if __name__ == "__main__":
    main()
