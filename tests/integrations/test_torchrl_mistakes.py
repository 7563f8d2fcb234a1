"""Mistakes and unusual uses of a TorchRL program, which are either refused early or work."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import aiosync
import aiosync.sync

pytest.importorskip("torchrl")

from torchrl.modules import RandomPolicy

from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.integrations._multi_workers import SCHEMES, Collector, collecting, seen

pytestmark = workers.FORKED


# -- buffers that are in no state dict --------------------------------------------------------


class Scaled(nn.Module):
    """Module with a buffer that is in no state dict."""

    def __init__(self, value: float, scale: float = 2.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((worlds.WIDTH,), value))
        self.register_buffer("scale", torch.full((worlds.WIDTH,), scale), persistent=False)
        self.register_buffer("nothing", None, persistent=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value * self.scale + 0 * observation


def make_scaled(value: float) -> TensorDictModule:
    return TensorDictModule(Scaled(value), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("make", SCHEMES)
def test_a_buffer_that_is_in_no_state_dict(make: Any) -> None:
    """Such a policy is refused with state dicts; TensorDicts send the buffer."""
    policy = make_scaled(1.0)
    before = len(multiprocessing.active_children())
    with pytest.raises(aiosync.ConfigError, match="module.scale.*strategy='tensordict'"):
        with collecting(make(strategy="state_dict"), policy):
            pass
    workers.until(lambda: len(multiprocessing.active_children()) == before)
    with collecting(make(), policy) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == [(2.0, 0)] * 2
        policy.module.scale.fill_(7.0)
        collector.update_policy_weights_()
        assert seen(next(batches)) == [(7.0, 1)] * 2


# -- inside a running event loop, as in a notebook --------------------------------------------


@pytest.mark.parametrize("make", [SCHEMES[0]])
def test_a_collector_made_and_used_where_an_event_loop_runs(make: Any) -> None:
    async def cell() -> None:
        policy = worlds.make_policy(1.0)
        with collecting(make(), policy) as collector:
            batches = iter(collector)
            assert seen(next(batches)) == [(1.0, 0)] * 2
            worlds.set_value(policy, 2.0)
            collector.update_policy_weights_()
            assert seen(next(batches)) == [(2.0, 1)] * 2
        await asyncio.sleep(0)

    asyncio.run(cell())


# -- a policy that is no module ---------------------------------------------------------------


class Constant:
    """A policy that is no module."""

    def __call__(self, data: Any) -> Any:
        return data.set("action", torch.ones(worlds.WIDTH))


@pytest.mark.parametrize("make", [*SCHEMES, aiosync.sync.DistributedWeightSyncScheme])
@pytest.mark.parametrize("kind", ["random", "callable"])
def test_a_policy_that_is_no_module_needs_no_scheme(make: Any, kind: str) -> None:
    policy: Any = RandomPolicy(worlds.World().action_spec) if kind == "random" else Constant()
    name = type(policy).__name__
    before = len(multiprocessing.active_children())
    with pytest.raises(aiosync.ConfigError, match=f"{name}.*nn.Module.*weight_sync_schemes"):
        with collecting(make(), policy, track_policy_version=False):
            pass
    assert len(multiprocessing.active_children()) == before
    with pytest.raises(aiosync.ConfigError, match=f"{name}.*nn.Module"):
        Collector(
            worlds.World,
            policy,
            frames_per_batch=4,
            total_frames=-1,
            trust_policy=True,
            weight_sync_schemes={"policy": make()},
        )
