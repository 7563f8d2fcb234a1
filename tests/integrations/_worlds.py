"""Environment and policy for tests with TorchRL; the policy's actions are its parameters."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

# The policy has this many parameters, all with the same value.
WIDTH = 8


class World(EnvBase):
    """Environment that takes any action, gives no reward, and never ends.

    Args:
        pause: Seconds that a step takes.
    """

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(batch_size=())
        self.pause = pause
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((WIDTH,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {"observation": torch.zeros(1), "done": done, "terminated": done.clone()}, ()
        )

    def _step(self, tensordict: TensorDict) -> TensorDict:
        if self.pause:
            time.sleep(self.pause)
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {
                "observation": torch.zeros(1),
                "reward": torch.zeros(1),
                "done": done,
                "terminated": done.clone(),
            },
            (),
        )

    def _set_seed(self, seed: int | None) -> None:
        del seed


class Values(nn.Module):
    """Module that answers with its parameters, one by one, so that a mix of versions is seen."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        # This buffer counts the module's own forwards, which must not reach another process.
        self.register_buffer("calls", torch.zeros(()))
        self.values = nn.ParameterList([nn.Parameter(torch.full((), value)) for _ in range(WIDTH)])

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.stack([each + 0 * observation[..., 0] for each in self.values], -1)


class Counting(Values):
    """Module with an extra state, like a module with statistics."""

    def get_extra_state(self) -> dict[str, float]:
        return {"seen": 1.0}

    def set_extra_state(self, state: dict[str, float]) -> None:
        assert state == {"seen": 1.0}


def make_counting(value: float = 0.0) -> TensorDictModule:
    return TensorDictModule(Counting(value), in_keys=["observation"], out_keys=["action"])


def make_policy(value: float = 0.0) -> TensorDictModule:
    return TensorDictModule(Values(value), in_keys=["observation"], out_keys=["action"])


def set_value(policy: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)


def actions(data: TensorDict) -> torch.Tensor:
    """Return the value that computed each action; fail if an action mixes two values."""
    action = data["action"].reshape(-1, WIDTH)
    assert (action == action[:, :1]).all(), "an action was computed with two versions"
    return action[:, 0]
