"""A callback that remembers the weights of fragments. Ray's workers import this module."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from aiosync.integrations.rllib import AiosyncCallback


def digest(state: Any) -> str:
    """Return a digest of the weights in a module's state."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + torch.as_tensor(state[name]).numpy().tobytes())
    return found.hexdigest()


class Watching(AiosyncCallback):
    """Callback that keeps, for each fragment of a runner, the numbers in its steps and a digest."""

    def on_sample_end(self, *, env_runner: Any, samples: list[Any], **kwargs: Any) -> None:
        """Remember a fragment."""
        numbers: set[int] = set()
        for episode in samples:
            # Without the last step of the fragment before, which an episode keeps as well.
            numbers |= {int(each) for each in episode.get_extra_model_outputs("weights_seq_no")}
        found = digest(env_runner.module.get_state(inference_only=True))
        vars(env_runner).setdefault("fragments", []).append((numbers, found))
