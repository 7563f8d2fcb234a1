"""Collectors with workers in processes of their own, and the models that their tests send."""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import warnings
from multiprocessing import resource_sharer
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.envs import Transform, TransformedEnv

import aiosync.sync
from tests.integrations import _worlds as worlds
from tests.support.waiting import wait_until as until

with warnings.catch_warnings():
    # TorchRL warns of its own classes while it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import (
        AsyncCollector,
        BaseCollector,
        Collector,
        Evaluator,
        MultiAsyncCollector,
        MultiSyncCollector,
    )
    from torchrl.weight_update import WeightSyncScheme

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensordict.nn import TensorDictModule

__all__ = [
    "FORKED",
    "FRAMES",
    "MARKS",
    "PATIENCE",
    "PIPE",
    "SCHEMES",
    "SHM",
    "TCP",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "Evaluator",
    "Factory",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "Offset",
    "WeightSyncScheme",
    "ask",
    "collecting",
    "held",
    "make_offset_world",
    "open_fds",
    "seen",
    "seen_by_one",
    "start_method",
    "until",
    "weights_of",
]

PATIENCE = 30.0
"""Seconds that an operation may take on a busy machine before a test fails."""

# A batch has 8 frames from each worker.
FRAMES = 16

SHM = aiosync.sync.SharedMemWeightSyncScheme
PIPE = aiosync.sync.MultiProcessWeightSyncScheme
TCP = aiosync.sync.TCPWeightSyncScheme
SCHEMES = [SHM, PIPE, TCP]

MARKS = [
    pytest.mark.slow,
    # These warnings announce TorchRL's next versions, which a scheme cannot change.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FORKED = [*MARKS, pytest.mark.usefixtures("forked")]


@contextlib.contextmanager
def start_method(name: str) -> Iterator[None]:
    """Start processes with this method; keep torch's number of threads, which collectors change."""
    method = multiprocessing.get_start_method(allow_none=True)
    threads = torch.get_num_threads()
    multiprocessing.set_start_method(name, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        torch.set_num_threads(threads)
        # This ends a thread that hands tensors to other processes.
        resource_sharer.stop(timeout=PATIENCE)


@contextlib.contextmanager
def collecting(
    scheme: Any,
    policy: nn.Module | None = None,
    *,
    cls: type = MultiSyncCollector,
    envs: Any = worlds.World,
    frames: int = FRAMES,
    **options: Any,
) -> Iterator[Any]:
    """Yield a collector with two workers, which is shut down afterwards; the schemes stay open.

    Args:
        scheme: Scheme of the policy, or a dictionary of schemes by model id.
        policy: Policy of the collector, or ``None``.
        cls: Class of the collector.
        envs: Makes the environment of each worker.
        frames: Number of frames in a batch.
        options: Other arguments of the collector.
    """
    options.setdefault("track_policy_version", True)
    if cls is MultiSyncCollector:
        options.setdefault("cat_results", "stack")
    collector = cls(
        [envs, envs],
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        weight_sync_schemes=scheme if isinstance(scheme, dict) else {"policy": scheme},
        **options,
    )
    try:
        yield collector
    finally:
        collector.shutdown(timeout=10)


def seen(data: TensorDictBase) -> list[tuple[float, int]]:
    """Return each worker's value that it acted by, and its label; a batch has one of each."""
    assert data.shape == (2, FRAMES // 2)
    return [seen_by_one(part) for part in data.unbind(0)]


def seen_by_one(data: TensorDictBase) -> tuple[float, int]:
    values, labels = worlds.actions(data).unique(), data["next", "policy_version"].unique()
    assert len(values) == len(labels) == 1, (values, labels)
    return values.item(), labels.item()


def ask(collector: Any, worker_idx: int, path: str, *args: Any) -> Any:
    """Return what one worker's collector has at ``path``, called if it can be.

    The other workers may be dead.
    """
    pipe = collector.pipes[worker_idx]
    pipe.send(((path, args, {}), "cascade_execute"))
    assert pipe.poll(PATIENCE), "the worker said nothing"
    answer, _ = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    # The answer may lie in memory of the worker.
    return copy.deepcopy(answer)


def held(collector: Any, worker_idx: int) -> float:
    """Return the value that one worker's policy has; not a number while an update is arriving."""
    weights = ask(collector, worker_idx, "policy.state_dict")
    values = {tensor.item() for name, tensor in weights.items() if "values" in name}
    return values.pop() if len(values) == 1 else math.nan


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- models -----------------------------------------------------------------------------------


class Offset(Transform):
    """Transform that adds the bias of its module to each observation.

    Args:
        value: Value that the module begins with.
    """

    def __init__(self, value: float = 0.0) -> None:
        super().__init__(in_keys=["observation"], out_keys=["observation"])
        self.module = nn.Linear(1, 1)
        worlds.set_value(self.module, value)

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return obs + self.module.bias.detach()

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> Any:
        del tensordict
        return self._call(tensordict_reset)


def make_offset_world() -> TransformedEnv:
    return TransformedEnv(worlds.World(), Offset())


class Factory:
    """Factory of policies with one value.

    Args:
        value: Value of the policies.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self) -> TensorDictModule:
        return worlds.make_policy(self.value)


def weights_of(policy: nn.Module) -> TensorDict:
    """Return a copy of the policy's weights."""
    return TensorDict.from_module(policy).data.clone()
