"""Shows two processes: a trainer sends its weights through shared memory, a worker acts with them.

Run it with `python examples/two_processes.py`.
"""

import asyncio
import multiprocessing

import torch
from torch import nn

import aiosync


async def act(scheme, actions):
    policy = nn.Linear(4, 1, bias=False)
    scheme.init_on_receiver(model_id="policy", model=policy)
    async with scheme:
        await scheme.connect()  # returns with the trainer's first weights: version 1
        for version in (2, 3, 4):
            await scheme.wait_for_version(version, timeout=60)
            action = policy(torch.ones(4)).item()  # an update never changes a running forward
            actions.put((scheme.last_read.version, action))


def worker(scheme, actions):
    aiosync.run(act(scheme, actions))


async def train():
    policy = nn.Linear(4, 1, bias=False)
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    spawn = multiprocessing.get_context("spawn")
    actions = spawn.Queue()
    process = spawn.Process(target=worker, args=(scheme, actions))
    process.start()
    async with scheme:
        await scheme.connect(processes=[process])  # a worker that dies is noticed at once
        for step in (1.0, 2.0, 3.0):
            nn.init.constant_(policy.weight, step)  # stands for an optimizer step
            report = await scheme.send()  # returns when the worker has applied it
            version, action = await asyncio.to_thread(actions.get, timeout=60)
            print(f"trainer: version {report.version} is applied by workers {sorted(report.acked)}")
            print(f"worker:  version {version} acts {action}")
        process.join(60)


if __name__ == "__main__":
    aiosync.run(train())
