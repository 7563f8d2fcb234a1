"""The same collector, environment and policy, with aiosync's scheme and with TorchRL's own.

Two collectors live side by side and take turns, block by block, in one run. The benchmark measures
the frames per second while the weights are updated after each batch, and the time of
``update_policy_weights_()`` of a policy of many small tensors. Every block checks that the actions
were computed with the newest weights. TorchRL's workers share the trainer's memory, while aiosync's
have a copy. Not measured: GPUs, and environments that are dearer than the policy.

    python -m tests.bench.collectors_vs_torchrl --schemes shared process --workers 2
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch
import torchrl
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

import aiosync.sync

SCHEMES = {
    "shared": (aiosync.sync.SharedMemWeightSyncScheme, SharedMemWeightSyncScheme),
    "process": (aiosync.sync.MultiProcessWeightSyncScheme, MultiProcessWeightSyncScheme),
    "tcp": (aiosync.sync.TCPWeightSyncScheme, SharedMemWeightSyncScheme),
}


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Policy(nn.Module):
    """Policy that goes left or right as its last bias says; the other tensors only travel."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.rest = nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(tensors - 2)])

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.head(observation).argmax(-1)


def steer(policy: nn.Module, action: int) -> None:
    with torch.no_grad():
        head = policy.module.head
        head.weight.zero_()
        head.bias.copy_(torch.tensor([1.0, 0.0] if action == 0 else [0.0, 1.0]))
        for parameter in policy.module.rest:
            parameter.fill_(action)


class Side:
    """One collector and its measurements."""

    def __init__(self, scheme: Any, tensors: int, workers: int, frames: int) -> None:
        self.policy = TensorDictModule(
            Policy(tensors), in_keys=["observation"], out_keys=["action"]
        )
        steer(self.policy, 0)
        self.scheme = scheme
        self.collector = MultiSyncCollector(
            [make_env] * workers,
            self.policy,
            frames_per_batch=frames,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme},
        )
        self.batches = iter(self.collector)
        self.action = 0
        self.rates: list[float] = []
        self.updates: list[float] = []

    def turn(self) -> None:
        self.action = 1 - self.action
        steer(self.policy, self.action)
        begun = time.perf_counter()
        self.collector.update_policy_weights_()
        self.updates.append(time.perf_counter() - begun)

    def block(self, batches: int) -> None:
        # These batches replace what the other side left in the caches.
        for _ in range(2):
            next(self.batches)
        begun, frames = time.perf_counter(), 0
        for _ in range(batches):
            self.turn()
            data = next(self.batches)
            frames += data.numel()
        self.rates.append(frames / (time.perf_counter() - begun))
        taken = data["action"].reshape(-1)
        assert (taken == self.action).all(), "actions were computed with older weights"

    def close(self) -> None:
        self.collector.shutdown()


def compare(name: str, tensors: int, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    ours, theirs = SCHEMES[name]
    sides = {
        "aiosync": Side(ours(), tensors, workers, args.frames),
        "torchrl": Side(theirs(), tensors, workers, args.frames),
    }
    try:
        for _ in range(args.blocks):
            for side in sides.values():
                side.block(args.batches)
    finally:
        for side in sides.values():
            side.close()
    rates = {key: statistics.median(side.rates) for key, side in sides.items()}
    updates = {key: statistics.median(side.updates) * 1e3 for key, side in sides.items()}
    found = {
        "scheme": name,
        "tensors": tensors,
        "workers": workers,
        "frames_per_second": rates,
        "frames_ratio": rates["aiosync"] / rates["torchrl"],
        "update_ms": updates,
        "update_ratio": updates["torchrl"] / updates["aiosync"],
    }
    print(
        f"{name:8} {tensors:5} tensors, {workers} workers: "
        f"{rates['aiosync']:8.0f} against {rates['torchrl']:8.0f} frames/s "
        f"({found['frames_ratio']:.2f}); update {updates['aiosync']:7.2f} against "
        f"{updates['torchrl']:7.2f} ms ({found['update_ratio']:.1f} times faster)",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", nargs="+", default=["shared", "process"], choices=SCHEMES)
    parser.add_argument("--tensors", nargs="+", type=int, default=[300])
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, torchrl {torchrl.__version__}, {platform.machine()}")
    found = [
        compare(name, tensors, workers, args)
        for name in args.schemes
        for tensors in args.tensors
        for workers in args.workers
    ]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
