"""Shows an asyncio trainer whose workers have no event loop: each gets the blocking twin.

Run it with `python examples/blocking_workers.py`.
"""

import asyncio
import multiprocessing

import torch
from torch import nn

import aiosync
import aiosync.sync

NUM_WORKERS = 2


def act(scheme, idx, actions):  # a plain loop: the scheme is one of aiosync.sync
    policy = nn.Linear(4, 1, bias=False)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=idx)
    with scheme:
        scheme.connect()
        for version in (2, 3):
            scheme.wait_for_version(version, timeout=60)
            action = policy(torch.ones(4)).item()
            actions.put((scheme.last_read.version, idx, action))


async def train():
    policy = nn.Linear(4, 1, bias=False)
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=NUM_WORKERS)
    blocking = aiosync.sync.twin(scheme)  # the same trainer, for workers that block
    spawn = multiprocessing.get_context("spawn")
    actions = spawn.Queue()
    workers = [spawn.Process(target=act, args=(blocking, i, actions)) for i in range(NUM_WORKERS)]
    for process in workers:
        process.start()
    async with scheme:
        await scheme.connect(processes=workers)
        for step in (1.0, 2.0):
            nn.init.constant_(policy.weight, step)  # stands for an optimizer step
            report = await scheme.send()
            print(f"trainer:  version {report.version} is applied by {sorted(report.acked)}")
            acted = [await asyncio.to_thread(actions.get, timeout=60) for _ in workers]
            for version, idx, action in sorted(acted):
                print(f"worker {idx}: version {version} acts {action}")
        for process in workers:
            await asyncio.to_thread(process.join, 60)


if __name__ == "__main__":
    aiosync.run(train())
