"""Shows a classic trainer: the same as `async_trainer.py` with `aiosync.sync` and no async at all.

Run it with `python examples/classic_trainer.py`; it takes a few seconds.
"""

import multiprocessing
import statistics
import time

import gymnasium
import torch
from torch import nn

from aiosync.sync import SharedMemWeightSyncScheme

NUM_WORKERS = 2
SECONDS = 2.5


def make_policy():
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def play(worker_idx, scheme, episodes, stop):
    """Play episodes until told to stop, always with the newest policy that has arrived."""
    torch.set_num_threads(1)
    episodes.cancel_join_thread()  # unread episodes must not delay the end
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx)
    with scheme:
        scheme.connect()
        env = gymnasium.make("CartPole-v1")
        while not stop.is_set():
            observations, actions, done = [], [], False
            obs, _ = env.reset()
            while not done:
                with torch.no_grad():
                    logits = policy(torch.as_tensor(obs))  # never changes during a forward
                action = torch.multinomial(logits.softmax(-1), 1).item()
                observations.append(obs)
                actions.append(action)
                obs, _, terminated, truncated, _ = env.step(action)
                done = terminated or truncated
            episodes.put((scheme.version, observations, actions))


def learn(optimizer, policy, batch):
    """REINFORCE with the returns of the batch as baseline."""
    observations = torch.tensor([list(obs) for _, seen, _ in batch for obs in seen])
    actions = torch.tensor([action for _, _, chosen in batch for action in chosen])
    to_go = torch.cat([torch.arange(len(seen), 0, -1.0) for _, seen, _ in batch])
    advantages = (to_go - to_go.mean()) / (to_go.std() + 1e-6)
    log_probs = policy(observations).log_softmax(-1)[range(len(actions)), actions]
    optimizer.zero_grad()
    (-(log_probs * advantages).mean()).backward()
    optimizer.step()


def train():
    torch.set_num_threads(1)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=NUM_WORKERS)

    spawn = multiprocessing.get_context("spawn")
    episodes, stop = spawn.Queue(maxsize=8), spawn.Event()
    workers = [
        spawn.Process(target=play, args=(idx, scheme, episodes, stop), daemon=True)
        for idx in range(NUM_WORKERS)
    ]
    for process in workers:
        process.start()

    returns = []
    with scheme:
        scheme.connect()  # the workers have the first weights when this returns
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            batch = [episodes.get(timeout=30) for _ in range(8)]
            returns += [len(seen) for _, seen, _ in batch]
            learn(optimizer, policy, batch)
            report = scheme.send()  # returns when both workers have applied it
        stop.set()
        for process in workers:
            process.join(10)

    lag = report.version - 1 - batch[-1][0]
    print(f"{report.version} versions; the last took {report.elapsed * 1e3:.2f} ms to apply")
    print(f"the last episode ended {lag} versions behind the trainer")
    print(
        f"mean return {statistics.mean(returns[:40]):.0f} -> {statistics.mean(returns[-40:]):.0f}"
    )


if __name__ == "__main__":
    train()
