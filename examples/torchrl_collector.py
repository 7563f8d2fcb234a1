"""Shows PPO with a collector of TorchRL whose two workers get their weights from aiosync.

Run it with `python examples/torchrl_collector.py`; it needs torchrl and gymnasium.
"""

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv, RewardSum
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import aiosync.sync


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True).append_transform(RewardSum())


def make_net(outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


def train():
    net = TensorDictModule(make_net(2), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        net, ["logits"], distribution_class=Categorical, return_log_prob=True
    )
    critic = ValueOperator(make_net(1), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic, entropy_bonus=False)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    collector = MultiSyncCollector(
        [make_env] * 2,
        actor,
        frames_per_batch=1000,
        total_frames=4000,
        weight_sync_schemes={"policy": aiosync.sync.SharedMemWeightSyncScheme()},  # the one line
        track_policy_version=True,
    )
    try:
        for data in collector:
            versions = data["next", "policy_version"].unique().tolist()
            reward = data["next", "episode_reward"][data["next", "done"]].mean()
            print(f"{data.numel()} frames of version {versions}, mean return {reward:.0f}")
            for _ in range(8):
                losses = loss(advantage(data))
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                optimizer.step()  # no worker sees it
            collector.update_policy_weights_()  # what they compute next uses it
    finally:
        collector.shutdown()


if __name__ == "__main__":
    train()
