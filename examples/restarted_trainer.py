"""Shows a trainer that is killed and started again: its worker keeps acting, and connects again.

Run it with `python examples/restarted_trainer.py`.
"""

import asyncio
import multiprocessing
import tempfile

import torch
from torch import nn

import aiosync


async def send(url):
    policy = nn.Linear(4, 2)
    scheme = aiosync.TCPWeightSyncScheme(url)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    async with scheme:
        await scheme.connect()
        for _ in range(2):
            nn.init.normal_(policy.weight)  # stands for an optimizer step
            await scheme.send()
        await asyncio.sleep(60)  # it is killed here


def trainer(url):
    aiosync.run(send(url))


async def work(url):
    policy = nn.Linear(4, 2)
    scheme = aiosync.TCPWeightSyncScheme(url, reconnect=30)  # dials a lost trainer for 30 s
    scheme.init_on_receiver(model_id="policy", model=policy)
    spawn = multiprocessing.get_context("spawn")
    epochs = []
    async with scheme:
        for run in ("first", "second"):
            process = spawn.Process(target=trainer, args=(url,))
            process.start()
            if run == "first":
                await scheme.connect()  # once: the scheme connects again by itself
            while scheme.epoch in epochs or scheme.version < 3:
                await scheme.receive()
            epochs.append(scheme.epoch)
            print(f"the {run} trainer: version {scheme.version} of epoch {scheme.epoch:016x}")
            process.kill()
            process.join()
            policy(torch.ones(4))
            print(f"it was killed; the worker acts with version {scheme.last_read.version}")
        print(f"reconnects: {scheme.reconnects}, epochs: {len(set(epochs))}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Between hosts: tcp://0.0.0.0:7000 in the trainer, tcp://its-name:7000 in the worker.
        aiosync.run(work(f"unix://{folder}/trainer"))
