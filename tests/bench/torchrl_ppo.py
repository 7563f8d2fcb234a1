"""PPO on CartPole with one of TorchRL's collectors and a scheme of ``aiosync.sync`` in it.

    python -m tests.bench.torchrl_ppo [--scheme shm] [--torchrl] [--updates 100]

It stops when CartPole is solved. ``--scheme`` says how the weights travel, ``--torchrl`` takes
TorchRL's own scheme instead, to compare. ``examples/torchrl_collector.py`` is the short form.
"""

import argparse
import logging
import multiprocessing
import statistics
import time
import warnings
from collections import deque

import gymnasium
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

import aiosync.sync

with warnings.catch_warnings():
    # TorchRL warns of its own names.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torchrl.weight_update
    from torchrl.collectors import MultiSyncCollector
    from torchrl.envs import GymWrapper, RewardSum
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

NUM_WORKERS = 2
ENVS_PER_WORKER = 16
FRAMES_PER_BATCH = 2048
# This is the mean return of the last 30 episodes; the most that there is is 500.
SOLVED = 400.0

SCHEMES = {
    "shm": aiosync.sync.SharedMemWeightSyncScheme,
    "process": aiosync.sync.MultiProcessWeightSyncScheme,
    "tcp": aiosync.sync.TCPWeightSyncScheme,
}
TORCHRL_SCHEMES = {
    "shm": torchrl.weight_update.SharedMemWeightSyncScheme,
    "process": torchrl.weight_update.MultiProcessWeightSyncScheme,
}


def make_env():
    # TorchRL logs how it reads the specs.
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    games = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=ENVS_PER_WORKER,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
    )
    return GymWrapper(games, categorical_action_encoding=True).append_transform(RewardSum())


def make_net(num_out):
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_out)
    )


def make_policy():
    return ProbabilisticActor(
        TensorDictModule(make_net(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )


def learn(loss_module, advantage, optimizer, data):
    """Train for some epochs of PPO on one batch."""
    with torch.no_grad():
        advantage(data)
    rows = data.reshape(-1)
    for _ in range(10):
        for chosen in torch.randperm(len(rows)).split(512):
            losses = loss_module(rows[chosen])
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
            # The workers do not see this step, as they have weights of their own.
            optimizer.step()


def train(args):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    policy = make_policy()
    critic = ValueOperator(make_net(1), in_keys=["observation"])
    loss_module = ClipPPOLoss(policy, critic, clip_epsilon=0.2, entropy_coeff=0.005)
    advantage = GAE(gamma=0.99, lmbda=0.9, value_network=critic, average_gae=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)

    scheme = (TORCHRL_SCHEMES if args.torchrl else SCHEMES)[args.scheme]()
    collector = MultiSyncCollector(
        [make_env] * NUM_WORKERS,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=args.updates * FRAMES_PER_BATCH,
        # This is the one line that changes.
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    collector.set_seed(args.seed)
    recent, milliseconds = deque(maxlen=30), []
    try:
        for update, data in enumerate(collector, 1):
            ended = data["next", "done"]
            recent.extend(data["next", "episode_reward"][ended].tolist())
            version = data["next", "policy_version"].max().item()
            mean = statistics.mean(recent) if recent else 0.0
            print(f"update {update}: version {version} played, mean return {mean:.0f}", flush=True)
            if len(recent) == recent.maxlen and mean >= SOLVED:
                print("solved")
                break
            learn(loss_module, advantage, optimizer, data)
            begun = time.perf_counter()
            # This returns when both workers have applied the update.
            collector.update_policy_weights_()
            milliseconds.append((time.perf_counter() - begun) * 1e3)
        print(f"an update of the workers took {statistics.median(milliseconds):.2f} ms")
    finally:
        collector.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", choices=SCHEMES, default="shm")
    parser.add_argument("--torchrl", action="store_true", help="TorchRL's own scheme")
    parser.add_argument("--updates", type=int, default=100, help="at most this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fork", action="store_true", help="start workers sooner, by forking")
    args = parser.parse_args()
    if args.torchrl and args.scheme not in TORCHRL_SCHEMES:
        parser.error(f"TorchRL has no scheme like {args.scheme}")
    if args.fork:
        multiprocessing.set_start_method("fork", force=True)
    train(args)


if __name__ == "__main__":
    main()
