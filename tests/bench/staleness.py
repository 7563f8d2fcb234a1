"""Staleness of the frames that PPO learns from, with asynchronous workers, one of them delayed.

``python -m tests.bench.staleness --svg docs/benchmarks/staleness.svg``. The policy has its version
in a buffer and writes it into each frame, where it is compared with the collector's label. The
program exits with 1 if any differs, or if no batch was made with several versions.

With ``--max-lag 2`` the trainer waits before each update until no worker is that far behind, and
leaves out batches that waited in the queue until they were older. The program exits with 1 also if
a worker was further behind after an update, or if the trainer learned from something older.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

import aiosync.sync
from aiosync import VersionSpan

with warnings.catch_warnings():
    # TorchRL warns of its own names.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import MultiAsyncCollector
    from torchrl.data import Unbounded
    from torchrl.envs import GymEnv, RewardSum, Transform
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

KEY = ("collector", "policy_version")
COLORS = ("#0072b2", "#d55e00")
NAMES = ("other worker", "delayed worker")


class Delayed(Transform):
    """Transform that pauses, and labels each frame with its worker."""

    def __init__(self, worker: int, pause: float) -> None:
        super().__init__()
        self.worker, self.pause = worker, pause

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        time.sleep(self.pause)
        return next_tensordict.set("worker", torch.tensor(self.worker))

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return tensordict_reset.set("worker", torch.tensor(self.worker))

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        observation_spec["worker"] = Unbounded((), dtype=torch.int64)
        return observation_spec


def make_env(worker: int, pause: float) -> Any:
    """Make CartPole, with a delay in each step."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True).append_transform(RewardSum())
    return env.append_transform(Delayed(worker, pause))


def make_net(num_out: int) -> nn.Module:
    """Make a small network."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, num_out))


class Net(nn.Module):
    """Network that also returns its version."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_net(2)
        self.register_buffer("version", torch.ones((), dtype=torch.int64))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the version."""
        return self.body(observation), self.version.expand(observation.shape[:-1]).clone()


def make_policy(net: Net) -> Any:
    """Make a policy that samples actions."""
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits", "made_with"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )


def span_of(data: Any) -> VersionSpan:
    """Return the versions of a batch, with the number of frames that each made."""
    versions, counts = data[KEY].reshape(-1).unique_consecutive(return_counts=True)
    return VersionSpan.from_runs(zip(versions.tolist(), counts.tolist(), strict=True))


def run(batches: int, frames: int, pause: float, seed: int, max_lag: int) -> dict[str, Any]:
    """Learn, and compare the versions; a lag of 0 sets no bound."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net = Net()
    policy, critic = make_policy(net), ValueOperator(make_net(1), in_keys=["observation"])
    loss_module = ClipPPOLoss(policy, critic, clip_epsilon=0.2, entropy_coeff=0.005)
    advantage = GAE(gamma=0.99, lmbda=0.9, value_network=critic, average_gae=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    scheme = aiosync.sync.SharedMemWeightSyncScheme()
    envs = [functools.partial(make_env, worker, worker * pause) for worker in range(2)]
    collector = MultiAsyncCollector(
        envs,
        policy,
        frames_per_batch=frames,
        total_frames=batches * frames,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    ages: list[Counter[int]] = [Counter(), Counter()]
    found: dict[str, Any] = {"batches": 0, "wrong": 0, "mixed": 0, "oldest": 0.0, "ages": ages}
    found |= {"left out": 0, "behind": 0}
    returns: list[float] = []
    try:
        for data in collector:
            span = span_of(data)
            found["batches"] += 1
            found["wrong"] += int((data[KEY] != data["made_with"]).sum())
            found["mixed"] += span.first != span.last
            oldest, mean = scheme.staleness(span), scheme.staleness(span, "token")
            assert oldest is not None
            assert mean is not None
            # This is the staleness by the weights themselves.
            stale = scheme.version - data["made_with"].reshape(-1)
            found["wrong"] += oldest != stale.max()
            found["wrong"] += abs(mean - float(stale.double().mean())) > 1e-9
            if max_lag and oldest > max_lag:
                found["left out"] += 1
                continue
            found["wrong"] += bool(max_lag) and int(stale.max()) > max_lag
            found["oldest"] = max(found["oldest"], oldest)
            ages[int(data["worker"].reshape(-1)[0])].update(stale.tolist())
            returns += data["next", "episode_reward"][data["next", "done"]].tolist()
            with torch.no_grad():
                advantage(data)
            losses = loss_module(data.reshape(-1))
            optimizer.zero_grad()
            sum(losses[f"loss_{of}"] for of in ("objective", "critic", "entropy")).backward()
            optimizer.step()
            net.version.fill_(scheme.version + 1)
            if max_lag:
                scheme.wait_lag_below(max_lag)
            collector.update_policy_weights_()
            found["behind"] = max(found["behind"], scheme.lag)
    finally:
        collector.shutdown()
    tenth = max(1, len(returns) // 10)
    found["returns"] = [sum(part) / tenth for part in (returns[:tenth], returns[-tenth:])]
    return found


def draw(ages: list[Counter[int]], path: str) -> None:
    """Draw a histogram, with one color for each worker. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    # With a fixed salt, the same picture has the same bytes.
    mpl.rcParams["svg.hashsalt"] = "aiosync"
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3), facecolor="#fbfbf8", layout="constrained")
    for worker, each in enumerate(ages):
        places = sorted(each)
        heights = [100 * each[place] / sum(each.values()) for place in places]
        left = [place + (worker - 0.5) * 0.4 for place in places]
        axis.bar(left, heights, width=0.4, color=COLORS[worker], label=NAMES[worker])
    axis.set_facecolor("#fbfbf8")
    axis.set_xlabel("versions behind the trainer when a frame was learned from")
    axis.set_ylabel("% of a worker's frames")
    axis.grid(True, axis="y", alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--frames", type=int, default=32, help="of a batch")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds a step is delayed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-lag", type=int, default=0, help="versions; 0 for no bound")
    parser.add_argument("--svg", help="where to draw")
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn", force=True)
    found = run(args.batches, args.frames, args.pause, args.seed, args.max_lag)
    first, last = found["returns"]
    print(
        f"{found['batches']} batches, {found['mixed']} of several versions: {found['wrong']} wrong"
    )
    print(f"oldest frame {found['oldest']:.0f} versions; mean return {first:.0f}, then {last:.0f}")
    print(f"workers at most {found['behind']} behind; {found['left out']} batches were too old")
    if args.svg:
        draw(found["ages"], args.svg)
    too_far = args.max_lag and found["behind"] > args.max_lag
    sys.exit(found["wrong"] > 0 or not found["mixed"] or bool(too_far))


if __name__ == "__main__":
    main()
