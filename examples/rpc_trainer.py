"""Shows a trainer that sends a model to three workers of a group of `torch.distributed.rpc`.

Run it with `python examples/rpc_trainer.py`; it takes a few seconds.
"""

import multiprocessing
import os
import socket
import warnings

import torch
from torch import nn
from torch.distributed import rpc

import aiosync

NUM_WORKERS = 3
STEPS = 3


def make_policy():
    """8 MiB."""
    return nn.Sequential(nn.Linear(4, 1448), nn.Tanh(), nn.Linear(1448, 1448), nn.Linear(1448, 2))


def join_group(name, rank, port):
    """What every program with RPC does by itself, before anything of aiosync."""
    warnings.simplefilter("ignore")  # torch's own, about its own deprecations
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(name, rank=rank, world_size=1 + NUM_WORKERS)


async def act(worker_idx, scheme):
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    async with scheme:
        await scheme.connect()  # waits until the trainer has said, by RPC, where it listens
        await scheme.wait_for_version(1 + STEPS, timeout=30)
        with scheme.reading():  # one version for all parameters
            total = sum(p.double().sum().item() for p in policy.parameters())
        print(
            f"worker {worker_idx}: version {scheme.last_read.version}, sum {total:.4f}", flush=True
        )


def worker(worker_idx, scheme, port):
    join_group(f"worker{worker_idx}", 1 + worker_idx, port)
    aiosync.run(act(worker_idx, scheme))
    rpc.shutdown()


async def train(scheme, names):
    policy = make_policy()
    scheme.init_on_sender(model_id="policy", model=policy, workers=names)
    async with scheme:
        await scheme.connect()
        for _ in range(STEPS):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.01)  # stands for an optimizer step
            report = await scheme.send()  # returns when all workers have applied it
            print(
                f"trainer: version {report.version} applied by {sorted(report.acked)}", flush=True
            )


def main():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The copies are made before there is an address. Workers on this host would read shared
    # memory, but the example is about RPC.
    scheme = aiosync.RPCWeightSyncScheme(shared_memory=False)
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=worker, args=(idx, scheme, port), daemon=True)
        for idx in range(NUM_WORKERS)
    ]
    for process in workers:
        process.start()
    join_group("trainer", 0, port)
    aiosync.run(train(scheme, [f"worker{idx}" for idx in range(NUM_WORKERS)]))
    rpc.shutdown()  # waits for the workers
    for process in workers:
        process.join(30)


if __name__ == "__main__":
    main()
