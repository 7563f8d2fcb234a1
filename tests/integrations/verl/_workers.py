"""Workers of verl on CPUs: its own worker groups and manager, with a model of a few tensors."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

MODULE = "aiosync.integrations.verl"
_DTYPES = [torch.bfloat16, torch.float32, torch.float16]
Sums = dict[str, tuple[str, list[int], str]]


def make_config(**options: Any) -> CheckpointEngineConfig:
    """Return the configuration that is all that a user of verl changes; buckets have 1 MiB."""
    return CheckpointEngineConfig(
        backend="aiosync",
        custom_backend_module=MODULE,
        update_weights_bucket_megabytes=1,
        engine_kwargs={"aiosync": {"timeout": 30.0, **options}},
    )


def make_weights(step: int, large: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of odd shapes: some are empty, and one has more than two buckets.

    Args:
        step: Seed of the values.
        large: Number of tensors of 4 MiB more.
    """
    generator = torch.Generator().manual_seed(step)
    yield "scale", torch.randn((), generator=generator)
    yield "empty", torch.empty(0, 7, dtype=torch.bfloat16)
    yield "embed", torch.randn(1237, 1009, generator=generator).bfloat16()
    for index in range(40):
        shape = (3 * index + 1, 257 + index)
        dtype = _DTYPES[index % len(_DTYPES)]
        yield f"layers.{index}.weight", torch.randn(shape, generator=generator).to(dtype)
    for index in range(large):
        yield f"large.{index}", torch.full((2**20,), float(step + index))


def sum_of(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    """Return dtype, shape and a hash of the bytes."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), list(tensor.shape), hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class Trainer(Worker):  # type: ignore[misc]  # verl has no types
    """A worker of the actor, with the parts of verl's own that send weights."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=self.rank == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )
        self._fault, self._large = "", 0
        self._gathered = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare_to(self, fault: str = "", large: int = 0) -> None:
        """Set what goes wrong in the next sync: ``"raise"`` or ``"die"``; and the model's size."""
        self._fault, self._large = fault, large

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(
            self._gather(global_steps), global_steps=global_steps
        )

    def _gather(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for count, item in enumerate(make_weights(step, self._large), 1):
            self._gathered = count
            if count == 30 and self.rank == 0 and self._fault == "raise":
                raise RuntimeError("the gather failed")
            if count == 30 and self.rank == 0 and self._fault == "die":
                time.sleep(0.5)  # some buckets are on their way
                os._exit(1)
            yield item

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gathered(self) -> int:
        """Return the number of tensors that this rank gathered for the last sync."""
        return self._gathered

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def links(self) -> list[str]:
        """Return the addresses that are connected to the port that this rank listens at."""
        source = self.checkpoint_engine.prepare().get("source")
        if source is None:
            return []
        port = f":{int(source.url.rpartition(':')[2]):04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        return sorted(row[1] for row in rows if row[2].endswith(port) and row[3] == "01")

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter:
    """The server adapter of a rollout worker, whose model is a dict."""

    def __init__(self) -> None:
        self.replica_rank, self.is_leader_rank = 0, True
        self.fault = ""
        self.weights: dict[str, torch.Tensor] = {}
        self.seconds = 0.0

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], **_: Any
    ) -> None:
        began, got = time.perf_counter(), dict[str, torch.Tensor]()
        async for name, tensor in weights:
            got[name] = tensor.clone()
            if len(got) == 20 and self.fault == "raise":
                raise RuntimeError("this model is full")
            if len(got) == 20 and self.fault == "die":
                os._exit(1)
        self.seconds = time.perf_counter() - began
        self.weights = got


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]  # verl has no types
    """verl's own worker of a rollout."""

    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config, None, Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare_to(self, fault: str) -> None:
        """Set what goes wrong in the next sync: ``"raise"`` or ``"die"``."""
        self.server_adapter.fault = fault

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sums(self) -> Sums:
        """Return what arrived in the last sync that was complete."""
        found = self.server_adapter.weights
        return {name: sum_of(tensor) for name, tensor in found.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seconds(self) -> float:
        """Return the duration of the last complete sync."""
        return self.server_adapter.seconds


class Replica:
    """A rollout replica of one worker, whose server has no requests."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]
        self.calls: list[str] = []
        self.pause = self._paused = 0.0

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._paused = time.perf_counter()
        self.calls.append("abort")

    async def release_kv_cache(self) -> None:
        self.calls.append("release")

    async def resume_kv_cache(self) -> None:
        self.calls.append("restore")

    async def resume_generation(self) -> None:
        self.pause = time.perf_counter() - self._paused
        self.calls.append("resume")


def start(cls: type, size: int, **arguments: Any) -> RayWorkerGroup:
    """Start workers of a class on CPUs, with verl's worker group."""
    pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(cls), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
