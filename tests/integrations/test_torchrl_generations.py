"""Programs of TorchRL's older documentation in its collectors, with both generations' schemes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import aiosync.legacy
import aiosync.sync

pytest.importorskip("torchrl")

from tensordict import TensorDict

from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.integrations._multi_workers import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)

pytestmark = workers.FORKED

GENERATIONS = {"sync": aiosync.sync, "legacy": aiosync.legacy}
NAMES = ["MultiProcessWeightSyncScheme", "SharedMemWeightSyncScheme"]
ALONE, TOGETHER = [Collector, AsyncCollector], [MultiSyncCollector, MultiAsyncCollector]
BOTH = pytest.mark.parametrize("generation", GENERATIONS)
EVERYWHERE = pytest.mark.parametrize("cls", ALONE + TOGETHER, ids=lambda cls: cls.__name__)

# The program is copied word for word, except for the names that it imports.
PROGRAM = """
import torch.nn as nn
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector as SyncDataCollector
from torchrl.collectors import MultiSyncCollector as MultiSyncDataCollector
from torchrl.envs import GymEnv
from aiosync.{generation} import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

# Create environment and policy
env = GymEnv("CartPole-v1")
policy = TensorDictModule(
    nn.Linear(env.observation_spec["observation"].shape[-1],
              env.action_spec.shape[-1]),
    in_keys=["observation"],
    out_keys=["action"],
)

# Example 1: Single collector with multiprocess scheme
# -----------------------------------------------------
scheme = MultiProcessWeightSyncScheme(strategy="state_dict")

collector = SyncDataCollector(
    create_env_fn=lambda: GymEnv("CartPole-v1"),
    policy=policy,
    frames_per_batch=64,
    total_frames=1000,
    weight_sync_schemes={{"policy": scheme}},
)

# Collect data and update weights periodically
for i, data in enumerate(collector):
    # ... training step with data ...

    # Update policy weights every N iterations
    if i % 10 == 0:
        new_weights = policy.state_dict()
        collector.update_policy_weights_(new_weights)

collector.shutdown()

# Example 2: Multiple collectors with shared memory
# --------------------------------------------------
# Shared memory is more efficient for frequent updates
shared_scheme = SharedMemWeightSyncScheme(strategy="tensordict"{auto_register})

collector = MultiSyncDataCollector(
    create_env_fn=[
        lambda: GymEnv("CartPole-v1"),
        lambda: GymEnv("CartPole-v1"),
        lambda: GymEnv("CartPole-v1"),
    ],
    policy=policy,
    frames_per_batch=192,
    total_frames=10000,
    weight_sync_schemes={{"policy": shared_scheme}},
)

# Workers automatically see weight updates via shared memory
for data in collector:
    # ... training ...
    collector.update_policy_weights_(TensorDict.from_module(policy))

collector.shutdown()
"""


@pytest.mark.apart
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("generation", "auto_register"), [("legacy", ", auto_register=True"), ("sync", "")]
)
def test_the_examples_run_word_for_word(generation: str, auto_register: str) -> None:
    # The program has a process of its own, as TorchRL keeps what a process's first collector opens.
    program = PROGRAM.format(generation=generation, auto_register=auto_register)
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=280)


def _collector(cls: type, policy: Any, scheme: Any) -> Any:
    return cls(
        [worlds.World] * 2 if cls in TOGETHER else worlds.World,
        policy,
        frames_per_batch=8,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
    )


def _acts_with(batches: Any, value: float) -> bool:
    """Return True if the workers come to act with this value, after batches collected before."""
    return any(worlds.actions(next(batches)).unique().tolist() == [value] for _ in range(4))


@EVERYWHERE
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("name", NAMES)
@BOTH
def test_the_ways_of_the_examples(generation: str, name: str, strategy: Any, cls: type) -> None:
    policy = worlds.make_policy(1.0)
    scheme = getattr(GENERATIONS[generation], name)(strategy=strategy, timeout=workers.PATIENCE)
    collector = _collector(cls, policy, scheme)
    try:
        batches = iter(collector)
        assert _acts_with(batches, 1.0)
        for value, weights in (
            (2.0, worlds.make_policy(2.0).state_dict()),
            (3.0, TensorDict.from_module(worlds.make_policy(3.0))),
            (4.0, worlds.make_policy(4.0)),
        ):
            collector.update_policy_weights_(weights)
            assert _acts_with(batches, value)
        collector.update_policy_weights_(weights_dict={"policy": worlds.make_policy(5.0)})
        assert _acts_with(batches, 5.0)
        worlds.set_value(policy, 6.0)
        collector.update_policy_weights_()
        assert _acts_with(batches, 6.0)
    finally:
        collector.shutdown()
        scheme.shutdown()


@EVERYWHERE
@BOTH
def test_a_scheme_that_does_nothing(generation: str, cls: type) -> None:
    """The workers begin with the policy, and no update changes them."""
    scheme = GENERATIONS[generation].NoWeightSyncScheme()
    collector = _collector(cls, worlds.make_policy(1.0), scheme)
    try:
        batches = iter(collector)
        assert _acts_with(batches, 1.0)
        collector.update_policy_weights_(worlds.make_policy(2.0))
        assert not _acts_with(batches, 2.0)
    finally:
        collector.shutdown()
        scheme.shutdown()
