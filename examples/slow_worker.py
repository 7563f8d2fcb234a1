"""Shows a slow worker: `require=2` does not wait for the third one, and a timeout names it.

Run it with `python examples/slow_worker.py`.
"""

import asyncio
import contextlib
import multiprocessing

from torch import nn

import aiosync


async def act(scheme, idx, busy, free):
    scheme.init_on_receiver(model_id="policy", model=nn.Linear(4, 2), worker_idx=idx)
    async with scheme:
        await scheme.connect()
        if idx == 2:
            async with scheme.reading():  # a long computation with one version
                busy.set()
                await asyncio.to_thread(free.wait, 60)
        with contextlib.suppress(aiosync.PeerClosed):  # until the trainer has gone
            while True:
                await scheme.receive()


def worker(scheme, idx, busy, free):
    aiosync.run(act(scheme, idx, busy, free))


async def train():
    scheme = aiosync.MultiProcessWeightSyncScheme(require=2)  # of three workers
    scheme.init_on_sender(model_id="policy", model=nn.Linear(4, 2), num_workers=3)
    spawn = multiprocessing.get_context("spawn")
    busy, free = spawn.Event(), spawn.Event()
    workers = [spawn.Process(target=worker, args=(scheme, idx, busy, free)) for idx in range(3)]
    for process in workers:
        process.start()
    async with scheme:
        await scheme.connect(processes=workers)
        await asyncio.to_thread(busy.wait, 60)

        report = await scheme.send()  # returns when two have it
        print(f"version 2: applied by {sorted(report.acked)}, waiting for {sorted(report.waiting)}")

        scheme.require = "all"
        try:
            await scheme.send(timeout=2)
        except aiosync.PartialSyncError as error:  # those in acked have it and go on
            late = {idx: type(reason).__name__ for idx, reason in error.failed.items()}
            print(f"version 3: applied by {sorted(error.acked)}, not in time by {late}")

        free.set()
        version = await scheme.wait_for_version(3, timeout=60)
        print(f"the slow worker is free, and skips version 2: all have version {version}")


if __name__ == "__main__":
    aiosync.run(train())
