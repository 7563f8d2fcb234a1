"""Shows a classic training loop without async: two workers play a small game, REINFORCE learns it.

Run it with `python examples/blocking_loop.py`.
"""

import multiprocessing

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from aiosync.sync import SharedMemWeightSyncScheme

NUM_WORKERS, ROUNDS = 2, 15


def play(scheme, idx, batches):
    torch.manual_seed(idx)
    policy = nn.Linear(4, 2)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=idx)
    with scheme:
        scheme.connect()
        for round_ in range(1, ROUNDS + 1):
            scheme.wait_for_version(round_)  # on-policy: never with older weights
            seen = torch.randn(512, 4)
            with torch.no_grad():
                chosen = Categorical(logits=policy(seen)).sample()
            reward = (chosen == (seen[:, 0] > 0)).float()  # 1 for the side of the first number
            version = scheme.last_read.version  # of the weights that chose
            batches.put((version, seen.numpy(), chosen.numpy(), reward.numpy()))


def train():
    policy = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.2)
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=NUM_WORKERS)
    spawn = multiprocessing.get_context("spawn")
    batches = spawn.Queue()
    workers = [spawn.Process(target=play, args=(scheme, i, batches)) for i in range(NUM_WORKERS)]
    for process in workers:
        process.start()
    with scheme:
        scheme.connect(processes=workers)
        for round_ in range(1, ROUNDS + 1):
            played = [batches.get(timeout=60) for _ in workers]
            versions, *columns = zip(*played, strict=True)
            seen, chosen, reward = (torch.from_numpy(np.concatenate(each)) for each in columns)
            if round_ % 5 == 0 or round_ == 1:
                print(f"round {round_}: versions {versions} played, reward {reward.mean():.2f}")
            log_prob = Categorical(logits=policy(seen)).log_prob(chosen)
            optimizer.zero_grad()
            (-log_prob * (reward - reward.mean())).mean().backward()
            optimizer.step()
            scheme.send()  # what both workers compute next uses it


if __name__ == "__main__":
    train()
