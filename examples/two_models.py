"""Shows two models with a scheme each: one over pipes, one in shared memory, in two workers.

Run it with `python examples/two_models.py`; it takes a few seconds.
"""

import asyncio
import multiprocessing

import torch
from torch import nn

import aiosync

NUM_WORKERS = 2


def make_models():
    """A policy and a value network, the same architecture in every process."""
    return nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))


async def receive(worker_idx, policy_scheme, value_scheme):
    policy, value = make_models()
    policy_scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    value_scheme.init_on_receiver(model_id="value", model=value, worker_idx=worker_idx)
    async with policy_scheme, value_scheme:
        await policy_scheme.connect()
        await value_scheme.connect()
        await policy_scheme.wait_for_version(3, timeout=30)
        await value_scheme.wait_for_version(2, timeout=30)
        with policy_scheme.reading(), value_scheme.reading():
            sums = [sum(p.sum().item() for p in model.parameters()) for model in (policy, value)]
        versions = policy_scheme.last_read.version, value_scheme.last_read.version
        print(
            f"worker {worker_idx}: policy version {versions[0]} sum {sums[0]:.4f}, "
            f"value version {versions[1]} sum {sums[1]:.4f}"
        )


def worker(worker_idx, policy_scheme, value_scheme):
    torch.set_num_threads(1)
    aiosync.run(receive(worker_idx, policy_scheme, value_scheme))


async def main():
    policy, value = make_models()
    policy_scheme = aiosync.MultiProcessWeightSyncScheme()  # through one pipe per worker
    value_scheme = aiosync.SharedMemWeightSyncScheme()  # one copy whatever the number of workers
    policy_scheme.init_on_sender(model_id="policy", model=policy, num_workers=NUM_WORKERS)
    value_scheme.init_on_sender(model_id="value", model=value, num_workers=NUM_WORKERS)
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=worker, args=(idx, policy_scheme, value_scheme), daemon=True)
        for idx in range(NUM_WORKERS)
    ]
    for process in workers:
        process.start()

    async with policy_scheme, value_scheme:
        await policy_scheme.connect()  # sends the first weights, version 1
        await value_scheme.connect()
        for step in (2.0, 3.0):
            nn.init.constant_(policy.weight, step)  # no worker sees this before the send
            report = await policy_scheme.send()
            print(f"trainer: policy version {report.version} applied by {sorted(report.acked)}")
        handle = value_scheme.send_nowait()  # a snapshot: training may go on at once
        nn.init.zeros_(value[0].weight)
        report = await handle
        print(f"trainer: value version {report.version} applied by {sorted(report.acked)}")
        await asyncio.to_thread(lambda: [process.join(30) for process in workers])


if __name__ == "__main__":
    aiosync.run(main())
