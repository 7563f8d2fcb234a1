"""Shows staging: an update arrives while workers act, and they switch when they are told to.

Run it with `python examples/stage_then_switch.py`.
"""

import asyncio
import contextlib
import multiprocessing

from torch import nn

import aiosync


async def act(scheme, idx, meet):
    scheme.init_on_receiver(model_id="policy", model=nn.Linear(4, 2), worker_idx=idx)
    async with scheme:
        await scheme.connect()
        await asyncio.to_thread(meet.wait, 60)  # all have version 1, and act
        await scheme.wait_staged(2, timeout=60)  # complete and checked; the policy has version 1
        await asyncio.to_thread(meet.wait, 60)  # the end of an episode, for example
        scheme.apply_pending()  # takes microseconds
        with contextlib.suppress(aiosync.PeerClosed):  # until the trainer has gone
            while True:
                await scheme.receive()


def worker(scheme, idx, meet):
    aiosync.run(act(scheme, idx, meet))


async def train():
    policy = nn.Linear(4, 2)
    scheme = aiosync.SharedMemWeightSyncScheme(apply="manual")
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
    spawn = multiprocessing.get_context("spawn")
    meet = spawn.Barrier(3)
    workers = [spawn.Process(target=worker, args=(scheme, idx, meet)) for idx in range(2)]
    for process in workers:
        process.start()
    async with scheme:
        await scheme.connect(processes=workers)
        await asyncio.to_thread(meet.wait, 60)
        nn.init.normal_(policy.weight)  # stands for an optimizer step
        handle = scheme.send_nowait()
        staged = await scheme.wait_staged(handle.version, timeout=60)
        print(f"staged: version {staged}; in use: {dict(sorted(scheme.worker_versions.items()))}")
        await asyncio.to_thread(meet.wait, 60)
        report = await handle
        print(f"switched: version {report.version} is applied by workers {sorted(report.acked)}")


if __name__ == "__main__":
    aiosync.run(train())
