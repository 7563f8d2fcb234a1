"""The learning half of ``aiosync demo``: a small PPO, and what workers send to it.

Plain PyTorch and NumPy, and nothing about processes or weight transfer: this module must never
import aiosync's schemes, gymnasium, typer or rich. The batches that reach :meth:`PPO.update`
come from workers whose policy may be a few versions old; the importance ratio of PPO
corrects for that, because every step carries the log-probability under the policy that took it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["NUM_ACTIONS", "OBS_SIZE", "PPO", "Fragment", "Policy"]

OBS_SIZE = 4
"""Numbers in one CartPole observation."""

NUM_ACTIONS = 2
"""CartPole's actions: push left, push right."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one worker saw during ``T`` steps of its ``E`` environments.

    Attributes:
        worker_idx: Who collected it.
        obs: Observations before each step, float32 ``[T, E, 4]``.
        next_obs: Observations after each step and before any reset, float32 ``[T, E, 4]``.
        actions: Actions taken, int64 ``[T, E]``.
        log_probs: Their log-probability under the policy that took them, float32 ``[T, E]``.
        rewards: float32 ``[T, E]``.
        terminated: The pole fell, bool ``[T, E]``.
        done: The episode ended, by a fall or by the time limit, bool ``[T, E]``.
        versions: Version of the policy that took each step, int64 ``[T]``.
        returns: Return of every episode that ended in this fragment, oldest first.
    """

    worker_idx: int
    obs: npt.NDArray[np.float32]
    next_obs: npt.NDArray[np.float32]
    actions: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    terminated: npt.NDArray[np.bool_]
    done: npt.NDArray[np.bool_]
    versions: npt.NDArray[np.int64]
    returns: tuple[float, ...]

    @property
    def num_steps(self) -> int:
        """Environment steps in the fragment, ``T * E``."""
        return self.actions.size


class Policy(nn.Module):
    """The network that workers run: observations ``[..., 4]`` to action logits ``[..., 2]``.

    Args:
        hidden: Width of the two hidden layers.
    """

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.body = _mlp(OBS_SIZE, hidden, NUM_ACTIONS, out_gain=0.01)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[..., 2]`` for observations ``[..., 4]``."""
        logits: torch.Tensor = self.body(obs)
        return logits


class PPO:
    """Proximal policy optimisation of one policy; the critic stays in the trainer.

    Args:
        policy: Trained in place. Only this module is sent to workers.
        gamma: Discount per step.
        gae_lambda: Bias against variance of the advantage estimate, 0 to 1.
        clip: How far the probability ratio may move in one update.
        lr: Initial learning rate of Adam; :meth:`update` scales it.
        num_epochs: Passes over the batch in one update.
        minibatch_size: Most steps in one gradient step.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        gamma: float = 0.98,
        gae_lambda: float = 0.9,
        clip: float = 0.2,
        lr: float = 1e-3,
        num_epochs: int = 8,
        minibatch_size: int = 256,
    ) -> None:
        self.policy = policy
        self.critic = _mlp(OBS_SIZE, 64, 1, out_gain=1.0)
        self._gamma = gamma
        self._gae_lambda = gae_lambda
        self._clip = clip
        self._lr = lr
        self._num_epochs = num_epochs
        self._minibatch_size = minibatch_size
        self._parameters = [*policy.parameters(), *self.critic.parameters()]
        self._optimizer = torch.optim.Adam(self._parameters, lr=lr, eps=1e-5, foreach=True)

    def update(self, fragments: Sequence[Fragment], *, lr_scale: float = 1.0) -> float:
        """Improve the policy on one batch.

        Args:
            fragments: At least one; of any workers and versions.
            lr_scale: Factor on the learning rate, for example to anneal it.

        Returns:
            Mean loss of the last pass.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * lr_scale
        parts = [self._prepare(fragment) for fragment in fragments]
        obs, actions, old_log_probs, advantages, targets = (
            torch.cat(tensors) for tensors in zip(*parts, strict=True)
        )
        num_minibatches = math.ceil(len(obs) / self._minibatch_size)
        loss_sum = 0.0
        for _ in range(self._num_epochs):
            loss_sum = 0.0
            for rows in torch.randperm(len(obs)).chunk(num_minibatches):
                advantage = advantages[rows]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                log_probs = self.policy(obs[rows]).log_softmax(-1)
                log_prob = log_probs.gather(-1, actions[rows, None]).squeeze(-1)
                ratio = (log_prob - old_log_probs[rows]).exp()
                clipped = ratio.clamp(1 - self._clip, 1 + self._clip)
                policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
                values = self.critic(obs[rows]).squeeze(-1)
                value_loss = (values - targets[rows]).square().mean()
                loss = policy_loss + 0.5 * value_loss
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._parameters, 0.5)
                self._optimizer.step()
                loss_sum += loss.item()
        return loss_sum / num_minibatches

    @torch.no_grad()
    def _prepare(self, fragment: Fragment) -> tuple[torch.Tensor, ...]:
        """Flatten one fragment to rows and add advantages and value targets (GAE)."""
        obs = torch.from_numpy(fragment.obs)
        values = self.critic(obs).squeeze(-1)
        next_values = self.critic(torch.from_numpy(fragment.next_obs)).squeeze(-1)
        alive = torch.from_numpy(~fragment.terminated).float()
        goes_on = torch.from_numpy(~fragment.done).float()
        rewards = torch.from_numpy(fragment.rewards)
        deltas = rewards + self._gamma * next_values * alive - values
        advantages = torch.empty_like(deltas)
        running = torch.zeros(deltas.shape[1])
        for t in reversed(range(len(deltas))):
            running = deltas[t] + self._gamma * self._gae_lambda * goes_on[t] * running
            advantages[t] = running
        return (
            obs.flatten(0, 1),
            torch.from_numpy(fragment.actions).flatten(),
            torch.from_numpy(fragment.log_probs).flatten(),
            advantages.flatten(),
            (advantages + values).flatten(),
        )


def _mlp(num_in: int, hidden: int, num_out: int, *, out_gain: float) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Linear(num_in, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, num_out),
    )
    for index, gain in ((0, 2**0.5), (2, 2**0.5), (4, out_gain)):
        layer = layers[index]
        assert isinstance(layer, nn.Linear)
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layers
