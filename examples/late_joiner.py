"""Shows late joiners: workers arrive while training goes on, and have the newest weights at once.

Run it with `python examples/late_joiner.py`.
"""

import asyncio
import contextlib
import multiprocessing

from torch import nn

import aiosync


async def act(scheme, joined):
    scheme.init_on_receiver(model_id="policy", model=nn.Linear(4, 2))  # the trainer numbers it
    async with scheme:
        await scheme.connect()  # returns with the newest version
        joined.put((scheme.worker_idx, scheme.version))
        with contextlib.suppress(aiosync.PeerClosed):  # until the trainer has gone
            while True:
                await scheme.receive()


def worker(scheme, joined):
    scheme.reconnect = 0
    aiosync.run(act(scheme, joined))


async def train():
    policy = nn.Linear(4, 2)
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    scheme.init_on_sender(model_id="policy", model=policy)  # no num_workers: it waits for nobody

    async def send():
        nn.init.normal_(policy.weight)  # stands for an optimizer step
        report = await scheme.send()
        print(f"version {report.version} is applied by workers {sorted(report.acked)}")

    spawn = multiprocessing.get_context("spawn")
    joined = spawn.Queue()
    async with scheme:
        await scheme.connect()
        await send()
        await send()
        for _ in range(2):
            spawn.Process(target=worker, args=(scheme, joined)).start()
            worker_idx, version = await asyncio.to_thread(joined.get, timeout=60)
            print(f"worker {worker_idx} joins, and has version {version}")
            await send()


if __name__ == "__main__":
    aiosync.run(train())
