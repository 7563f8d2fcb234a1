"""Shows a trainer that sends a model to two worker processes over Gloo, on the CPU.

Run it with `python examples/distributed_trainer.py`; it takes a few seconds.
"""

import asyncio
import multiprocessing

import torch
from torch import nn

import aiosync

NUM_WORKERS = 2
STEPS = 3


def make_policy():
    """8 MiB: larger than 4 MiB, so that it travels over a process group."""
    return nn.Sequential(nn.Linear(4, 1448), nn.Tanh(), nn.Linear(1448, 1448), nn.Linear(1448, 2))


async def act(worker_idx, scheme):
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    async with scheme:
        await scheme.connect()  # returns with the first weights, version 1
        await scheme.wait_for_version(1 + STEPS, timeout=30)
        with scheme.reading():  # one version for all parameters
            total = sum(p.double().sum().item() for p in policy.parameters())
        print(
            f"worker {worker_idx}: version {scheme.last_read.version}, sum {total:.4f}", flush=True
        )


def worker(worker_idx, scheme):
    torch.set_num_threads(1)  # threads of many processes would wait for each other
    aiosync.run(act(worker_idx, scheme))


async def train():
    torch.set_num_threads(1)
    policy = make_policy()
    # For workers on other hosts: address="tcp://HOST:0", with an address that they reach. These
    # are on this one and would read shared memory, but the example is about Gloo.
    scheme = aiosync.DistributedWeightSyncScheme(shared_memory=False)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=NUM_WORKERS)
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=worker, args=(idx, scheme), daemon=True) for idx in range(NUM_WORKERS)
    ]
    for process in workers:
        process.start()

    async with scheme:
        await scheme.connect(processes=workers)
        for _ in range(STEPS):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.01)  # stands for an optimizer step
            report = await scheme.send()  # what both workers compute next uses it
            print(
                f"trainer: version {report.version} applied by {sorted(report.acked)}, "
                f"{report.nbytes >> 10} KiB",
                flush=True,
            )
        await asyncio.to_thread(lambda: [process.join(30) for process in workers])


if __name__ == "__main__":
    aiosync.run(train())
