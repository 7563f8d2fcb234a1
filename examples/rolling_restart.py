"""Shows a rolling restart: workers leave and return one by one, while sends go on without an error.

Run it with `python examples/rolling_restart.py`.
"""

import asyncio
import multiprocessing

from torch import nn

import aiosync

SPAWN = multiprocessing.get_context("spawn")


async def act(scheme, idx, stop):
    scheme.init_on_receiver(model_id="policy", model=nn.Linear(4, 2), worker_idx=idx)
    async with scheme:  # the end of this block tells the trainer that the worker leaves
        await scheme.connect()
        await asyncio.to_thread(stop.wait, 60)  # it acts; updates arrive in the background


def worker(scheme, idx, stop):
    aiosync.run(act(scheme, idx, stop))


def start(scheme, idx):
    stop = SPAWN.Event()
    process = SPAWN.Process(target=worker, args=(scheme, idx, stop))
    process.start()
    return process, stop


async def train():
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=nn.Linear(4, 2), num_workers=2)
    workers = [start(scheme, idx) for idx in range(2)]
    async with scheme:
        await scheme.connect(processes=[process for process, _ in workers])
        for idx in range(2):
            process, stop = workers[idx]
            stop.set()
            await asyncio.to_thread(process.join, 60)
            report = await scheme.send()
            left, acked = sorted(report.left), sorted(report.acked)
            print(f"version {report.version}: {left} has left, {acked} has applied it")
            workers[idx] = start(scheme, idx)
            await scheme.ready.wait(timeout=60)  # both are there, and have weights
            version = await scheme.wait_for_version(report.version, timeout=60)
            print(f"worker {idx} is back, and both have version {version}")
        report = await scheme.send()
        print(f"version {report.version} is applied by workers {sorted(report.acked)}")
        for _, stop in workers:
            stop.set()


if __name__ == "__main__":
    aiosync.run(train())
