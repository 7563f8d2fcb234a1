"""Policies of TorchRL that keep ``TensorDictParams``, in workers that get them without memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiosync.sync

pytest.importorskip("torchrl")

from tensordict.nn import TensorDictModule
from torchrl.data import Composite, Unbounded
from torchrl.modules import MultiAgentMLP

from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensordict import TensorDict

AGENTS = 3

pytestmark = workers.FORKED


class Agents(worlds.World):
    """A world of several agents, all of which observe ones."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((AGENTS, 1)))
        self.action_spec = Unbounded((AGENTS, worlds.WIDTH))

    def _reset(self, tensordict: TensorDict | None = None, **options: object) -> TensorDict:
        return super()._reset(tensordict, **options).set("observation", torch.ones(AGENTS, 1))

    def _step(self, tensordict: TensorDict) -> TensorDict:
        return super()._step(tensordict).set("observation", torch.ones(AGENTS, 1))


def _make_policy(shared: bool) -> TensorDictModule:
    net = MultiAgentMLP(
        1, worlds.WIDTH, AGENTS, centralized=False, share_params=shared, depth=1, num_cells=4
    )
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


@contextlib.contextmanager
def _batches(scheme: Any, policy: TensorDictModule) -> Iterator[tuple[Any, Iterator[TensorDict]]]:
    with workers.collecting(scheme, policy, envs=Agents) as collector:
        yield collector, iter(collector)


def _check(data: TensorDict, policy: TensorDictModule) -> None:
    actions = data["action"]
    assert not actions.is_meta
    wanted = policy.module(torch.ones(AGENTS, 1)).detach()
    torch.testing.assert_close(actions, wanted.expand_as(actions))


@pytest.mark.parametrize("shared", [False, True])
def test_the_networks_of_several_agents_follow_updates(shared: bool) -> None:
    policy = _make_policy(shared)
    scheme = aiosync.sync.SharedMemWeightSyncScheme()
    with _batches(scheme, policy) as (collector, batches):
        _check(next(batches), policy)
        for value in (0.5, 0.25, 0.75):
            worlds.set_value(policy, value)
            collector.update_policy_weights_()
            _check(next(batches), policy)
