"""Shows bounded staleness: the trainer runs at most two versions ahead, and samples say their age.

Run it with `python examples/bounded_staleness.py`.
"""

import asyncio
import multiprocessing

import torch
from torch import nn

import aiosync


async def act(scheme, samples, busy, done):
    policy = nn.Linear(4, 2)
    scheme.init_on_receiver(model_id="policy", model=policy)
    async with scheme:
        await scheme.connect()
        async with scheme.reading() as read:  # a long rollout, all of it with one version
            busy.set()
            await asyncio.to_thread(done.wait, 60)
            policy(torch.ones(4))
        samples.put(read.span)  # beside what was sampled
        await scheme.wait_for_version(4, timeout=60)


def worker(scheme, samples, busy, done):
    aiosync.run(act(scheme, samples, busy, done))


async def train():
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=nn.Linear(4, 2), num_workers=1)
    spawn = multiprocessing.get_context("spawn")
    samples, busy, done = spawn.Queue(), spawn.Event(), spawn.Event()
    process = spawn.Process(target=worker, args=(scheme, samples, busy, done))
    process.start()
    async with scheme:
        await scheme.connect(processes=[process])
        await asyncio.to_thread(busy.wait, 60)
        for _ in range(2):
            handle = scheme.send_nowait()
            print(f"version {handle.version} is sent; the worker is {scheme.lag} behind")
        try:
            await scheme.send(max_lag=2, timeout=0)
        except aiosync.RecvTimeout as error:
            print(f"no version 4 yet: {error}")
        done.set()
        span = await asyncio.to_thread(samples.get, timeout=60)
        age = scheme.staleness(span)  # None would mean: nobody knows
        print(f"a sample of version {span.first} is {age:.0f} versions old")
        report = await scheme.send(max_lag=2)  # waits until there is room
        print(f"version {report.version} is applied by workers {sorted(report.acked)}")
        process.join(60)


if __name__ == "__main__":
    aiosync.run(train())
