"""Shows a worker that dials a trainer on any machine, and goes on when the trainer restarts.

Run it with `python examples/tcp_worker.py tcp://127.0.0.1:7000`, in as many shells as you like;
`tcp_trainer.py` is the other side. It ends when no trainer was there for `--patience` seconds.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import aiosync


def make_policy():
    """The same architecture as in the trainer."""
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def read_token(path):
    if path is not None:
        return path.read_text().strip()
    return os.environ.get("AIOSYNC_TOKEN")


def show(policy, what):
    with torch.no_grad():
        out = [round(value, 3) for value in policy(torch.ones(4)).tolist()]
    print(f"{what}: policy(1) = {out}", flush=True)


async def act(args):
    policy = make_policy()
    # `reconnect` is how long a lost trainer is dialled again, `timeout` how long the first one.
    scheme = aiosync.TCPWeightSyncScheme(
        args.url, token=read_token(args.token_file), reconnect=args.patience, timeout=120
    )
    scheme.init_on_receiver(model_id="policy", model=policy)
    async with scheme:
        await scheme.connect()  # returns with the newest weights, if there are any
        show(policy, f"connected, version {scheme.version}")
        while True:
            try:
                update = await scheme.receive()  # updates arrive in the background all the same
            except aiosync.PeerClosed as error:
                print(f"no trainer any more: {error}", flush=True)
                return
            trainer = f"{update.epoch:016x}"[:4]  # another one after each restart
            show(policy, f"trainer {trainer}, version {update.version}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--token-file", type=Path, metavar="FILE")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds without a trainer")
    torch.set_num_threads(1)
    aiosync.run(act(parser.parse_args()))


if __name__ == "__main__":
    main()
