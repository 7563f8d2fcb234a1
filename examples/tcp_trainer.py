"""Shows a trainer that workers on other machines dial, whenever they like, over TCP.

Run it with `python examples/tcp_trainer.py --listen tcp://127.0.0.1:7000`, and start workers in
other shells with `python examples/tcp_worker.py tcp://127.0.0.1:7000`, before it or meanwhile. An
address that other hosts can reach needs a token: `--token-file FILE`, or AIOSYNC_TOKEN.
"""

import argparse
import asyncio
import os
from pathlib import Path

import torch
from torch import nn

import aiosync


def make_policy():
    """The same architecture as in the worker."""
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def read_token(path):
    if path is not None:
        return path.read_text().strip()
    return os.environ.get("AIOSYNC_TOKEN")


def learn(optimizer, policy):
    """One step towards a made-up target; stands for a step of PPO."""
    observations = torch.randn(64, 4)
    loss = (policy(observations) - observations[:, :2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


async def train(args):
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    scheme = aiosync.TCPWeightSyncScheme(args.listen, token=read_token(args.token_file))
    # Without num_workers any number of workers may come, and connect() waits for none.
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=args.workers)
    print(f"listening on {scheme.address}", flush=True)
    async with scheme:
        await scheme.connect()
        for step in range(1, args.steps + 1):
            loss = learn(optimizer, policy)
            try:
                report = await scheme.send()
                told = f"applied by {sorted(report.acked)}"
            except aiosync.PartialSyncError as error:
                told = str(error)  # names the lost workers; training goes on
            print(f"step {step}: loss {loss:.3f}, version {scheme.version} {told}", flush=True)
            await asyncio.sleep(args.pause)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="tcp://127.0.0.1:7000", metavar="URL")
    parser.add_argument("--token-file", type=Path, metavar="FILE")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two steps")
    parser.add_argument("--workers", type=int, help="wait for this many, and accept no more")
    torch.set_num_threads(1)
    aiosync.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
