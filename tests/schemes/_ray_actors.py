"""Actors of the Ray tests."""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import Any

import ray
import torch

import aiosync.sync
from aiosync.schemes.ray import RayWeightSyncScheme
from tests.schemes import _models

TOKEN = "a token of these tests"

here = ray.remote(num_cpus=0)
"""Decorator of actors, which are on the driver's node unless they are told otherwise."""


def extremes(weights: dict[str, torch.Tensor]) -> set[float]:
    """Return the least and the greatest element of each tensor."""
    return {end.item() for each in weights.values() for end in each.aminmax()}


class Base:
    """Methods of both kinds of workers."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = _models.big()
        self.scheme: Any = None
        self.kept: dict[str, torch.Tensor] = {}

    def pid(self) -> int:
        return os.getpid()

    def look(self) -> tuple[int, set[float]]:
        with self.scheme.reading():
            return self.scheme.version, extremes(self.model.state_dict())

    def memory(self) -> int:
        """Return the resident bytes of memory that the process does not share."""
        with open("/proc/self/status", encoding="utf-8") as file:
            return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

    def keep(self) -> None:
        with self.scheme.reading():
            self.kept = dict(self.model.state_dict())

    def kept_values(self) -> set[float]:
        return extremes(self.kept)

    def write(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)


@here
class Worker(Base):
    """Worker with a receiver on the actor's own loop."""

    async def join(self, scheme: RayWeightSyncScheme, idx: int) -> int:
        self.scheme = scheme
        scheme.init_on_receiver(model_id="policy", model=self.model, worker_idx=idx)
        await scheme.connect(timeout=30)
        return scheme.version

    async def wait_for(self, version: int) -> int:
        return await self.scheme.wait_for_version(version, timeout=30)

    async def close(self) -> None:
        await self.scheme.aclose()


@here
class Serial(Base):
    """Worker without a loop, with the blocking twin of the scheme."""

    def join(self, scheme: RayWeightSyncScheme, idx: int) -> int:
        self.scheme = aiosync.sync.RayWeightSyncScheme(
            address=str(scheme.address), token=TOKEN, shared_memory=scheme.shared_memory
        )
        self.scheme.init_on_receiver(model_id="policy", model=self.model, worker_idx=idx)
        self.scheme.connect(timeout=30)
        return self.scheme.version

    def close(self) -> None:
        self.scheme.shutdown()


@here
class Owner:
    """Owner of objects in the store, which are lost with the actor."""

    def put(self, value: Any) -> list[Any]:
        return [ray.put(value)]


@here
class Plain:
    """Actor that knows nothing of aiosync."""

    def __init__(self) -> None:
        self.model = _models.medium()
        self.parts: dict[str, float] = {}
        self.is_free = threading.Event()

    def update(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights)

    def gather(self, weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            [self.parts[name]] = extremes({name: tensor})

    def gather_once_free(self, weights: dict[str, torch.Tensor]) -> None:
        assert self.is_free.wait(20)
        self.gather(weights)

    def free(self) -> None:
        self.is_free.set()

    def gathered(self) -> dict[str, float]:
        return self.parts

    @ray.method(num_returns=2)
    def update_twice(self, weights: dict[str, torch.Tensor]) -> tuple[int, int]:
        self.update(weights)
        return len(weights), 2

    def refuse(self, weights: dict[str, torch.Tensor]) -> None:
        raise ValueError("not these")

    def meet_death(self, weights: dict[str, torch.Tensor]) -> None:
        raise ray.exceptions.RayActorError

    def meet_restart(self, weights: dict[str, torch.Tensor]) -> None:
        raise ray.exceptions.ActorUnavailableError("another one", None)

    def end(self, weights: dict[str, torch.Tensor]) -> None:
        os._exit(1)

    def prefer(self, device: str) -> None:
        torch.set_default_device(device)

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        self.devices = {tensor.device.type for tensor in weights.values()}

    def where(self) -> set[str]:
        return self.devices

    def look(self) -> set[float]:
        return extremes(self.model.state_dict())


@here
class Bereft:
    """Actor whose module lies in another one, which has died."""

    def __init__(self) -> None:
        self.error = ray.exceptions.RayActorError()

    @property
    def module(self) -> Any:
        raise self.error


@here
class Transform:
    """Actor with a module, which computes in calls that block."""

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

    def receives(self) -> bool:
        return "aiosync-transform" in [thread.name for thread in threading.enumerate()]
