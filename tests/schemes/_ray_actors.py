"""Actors of the Ray tests."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from typing import Any

import ray
import torch

import aiosync
import aiosync.sync
from aiosync.schemes.ray import RayWeightSyncScheme
from tests.schemes import _models


def facade(scheme: Any) -> Any:
    """The blocking twin of an async scheme."""
    twin = object.__new__(
        getattr(aiosync.sync, type(scheme).__name__, aiosync.sync.WeightSyncScheme)
    )
    twin._adopt(scheme)
    return twin


def extremes(weights: dict[str, torch.Tensor]) -> set[float]:
    """The least and the greatest elements."""
    return {end.item() for each in weights.values() for end in each.aminmax()}


class Base:
    """What both kinds of workers can do."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model: Any = None
        self.scheme: Any = None
        self.kept: dict[str, torch.Tensor] = {}

    def build(self, name: str) -> None:
        self.model = getattr(_models, name)()

    def pid(self) -> int:
        return os.getpid()

    def look(self) -> tuple[int, set[float]]:
        return self.scheme.version, extremes(self.model.state_dict())

    def memory(self) -> dict[str, int]:
        """Resident bytes by kind."""
        with open("/proc/self/status", encoding="utf-8") as file:
            lines = [line.split() for line in file if line.startswith("Rss")]
        return {name.rstrip(":"): int(kib) * 1024 for name, kib, _ in lines}

    def keep(self) -> None:
        self.kept = dict(self.model.state_dict())

    def kept_values(self) -> set[float]:
        return extremes(self.kept)

    def write(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)


@ray.remote(num_cpus=0)
class Worker(Base):
    """With a receiver on its own loop."""

    async def join(self, scheme: RayWeightSyncScheme, idx: int, model: str = "medium") -> int:
        self.build(model)
        self.scheme = scheme
        scheme.init_on_receiver(model_id="policy", model=self.model, worker_idx=idx)
        await scheme.connect(timeout=30)
        return scheme.version

    async def ping(self) -> int:
        await asyncio.sleep(0)
        return self.scheme.version

    async def wait_for(self, version: int) -> int:
        return await self.scheme.wait_for_version(version, timeout=30)

    async def close(self) -> None:
        if self.scheme is not None:
            await self.scheme.aclose()
            self.scheme = None


@ray.remote(num_cpus=0)
class Serial(Base):
    """Without a loop, with the blocking facade."""

    def join(self, scheme: RayWeightSyncScheme, idx: int, model: str = "medium") -> int:
        self.build(model)
        self.scheme = facade(scheme)
        self.scheme.init_on_receiver(model_id="policy", model=self.model, worker_idx=idx)
        self.scheme.connect(timeout=30)
        return self.scheme.version

    def close(self) -> None:
        if self.scheme is not None:
            self.scheme.shutdown()
            self.scheme = None


@ray.remote(num_cpus=0)
class Owner:
    """Its objects are lost with it."""

    def make(self) -> list[Any]:
        return [ray.put(bytes(2**20))]


@ray.remote(num_cpus=0)
class Plain:
    """Knows nothing of aiosync."""

    def __init__(self) -> None:
        self.model = _models.medium()
        self.weights: dict[str, torch.Tensor] = {}

    def update(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.model.load_state_dict(weights)

    @ray.method(num_returns=2)
    def update_twice(self, weights: dict[str, torch.Tensor]) -> tuple[int, int]:
        self.update(weights)
        return len(weights), 2

    def refuse(self, weights: dict[str, torch.Tensor]) -> None:
        raise ValueError("not these")

    def end(self, weights: dict[str, torch.Tensor]) -> None:
        os._exit(1)

    def look(self) -> set[float]:
        return extremes(self.model.state_dict())

    def where(self) -> str:
        """What kind of memory the weights lie in, and who may write to it."""
        address = next(iter(self.weights.values())).data_ptr()
        with open("/proc/self/maps", encoding="utf-8") as file:
            for line in file:
                area, rights, *_ = line.split()
                start, stop = (int(each, 16) for each in area.split("-"))
                if start <= address < stop:
                    return rights
        return ""


@ray.remote(num_cpus=0)
class Transform:
    """A module inside of an actor, which computes in calls that block."""

    def __init__(self) -> None:
        self.module = _models.medium()

    def look(self) -> set[float]:
        return extremes(self.module.state_dict())

    def work(self, seconds: float) -> None:
        time.sleep(seconds)

    def replace(self) -> None:
        self.module = _models.medium()

    def save(self) -> bytes:
        return pickle.dumps(vars(self))

    def threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate()]


@ray.remote(num_cpus=0)
class TransformTrainer:
    """Sends to the module of a transform from an actor, which can be killed."""

    def connect(self, transform: Any, reconnect: float) -> None:
        self.scheme = aiosync.sync.RayModuleTransformScheme(reconnect=reconnect)
        self.scheme.init_on_sender(model=_models.medium(), ray_transform=transform)
        self.scheme.connect(timeout=30)


@ray.remote(num_cpus=0)
class NoTransform:
    """Has no module."""
