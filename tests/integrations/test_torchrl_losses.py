"""TorchRL losses as the models of workers: they keep detached parameters until told otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.sync import _tools as tools

pytest.importorskip("torchrl")

from torchrl.objectives import DDPGLoss

OPTIONS: dict[str, dict[str, Any]] = {
    "flip": {},
    "copy": {"apply_copy": True},
    "reading": {"guard": "reading"},
}


class Product(nn.Module):
    """The sum of the inputs times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.cat(inputs, -1).sum(-1, keepdim=True)


def make_loss() -> Any:
    actor = TensorDictModule(Product(), ["observation"], ["action"])
    critic = TensorDictModule(Product(), ["observation", "action"], ["state_action_value"])
    return DDPGLoss(actor, critic)


def fill(loss: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.fill_(value)


def computed(loss: Any) -> float:
    """Return the loss of the actor, for which the weights of the critic are detached."""
    value, _ = loss.loss_actor(TensorDict({"observation": torch.ones(1, 1)}, [1]))
    return float(value.detach())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.asyncio
async def test_a_loss_computes_with_each_version(options: dict[str, Any]) -> None:
    source, target = make_loss(), make_loss()
    scheme = aiosync.SharedMemWeightSyncScheme(**options)
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        for value in (1.0, 2.0, 3.0):
            fill(source, value)
            await sender.send()
            with receiver.reading():
                assert computed(target) == -(value + value**2)


@pytest.mark.parametrize("make", tools.SCHEMES)
def test_the_same_in_the_blocking_api(make: Any) -> None:
    source, target = make_loss(), make_loss()
    with tools.pair(make, source, target) as (sender, receiver):
        for value in (1.0, 2.0, 3.0):
            fill(source, value)
            sender.send()
            with receiver.reading():
                assert computed(target) == -(value + value**2)
