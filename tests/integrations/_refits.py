"""Workers of refits through the engine for NeMo-RL: its life cycle, without NeMo-RL and Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from aiosync.integrations.nemo_rl import Engine

BUCKET = 4096
Tensors = dict[str, torch.Tensor]
_FLOATS = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]


def make_weights(seed: int) -> Tensors:
    """Return tensors of several dtypes and shapes; one is larger than a bucket, some are empty."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "scalar": torch.randn((), generator=generator),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "large": torch.randn(37, 101, generator=generator).bfloat16(),
        "strided": torch.randn(5, 9, generator=generator).t(),
        "flags": torch.rand(7, generator=generator) > 0.5,
        "last.empty": torch.empty(2, 0),
    }
    for index in range(24):
        shape = (index + 1, 2 * index + 1)
        dtype = _FLOATS[index % len(_FLOATS)]
        weights[f"layers.{index}.weight"] = torch.randn(shape, generator=generator).to(dtype)
    return weights


def as_bytes(weights: Tensors) -> dict[str, tuple[Any, ...]]:
    """Return dtype, shape and bytes of each tensor, in order."""
    return {
        name: (each.dtype, tuple(each.shape), _flat(each).numpy().tobytes())
        for name, each in weights.items()
    }


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def through_one_buffer(weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of which each one overwrites the memory of the one before."""
    memory = torch.zeros(max(each.nbytes for each in weights.values()), dtype=torch.uint8)
    for name, each in weights.items():
        memory.fill_(0xAA)
        memory[: each.nbytes] = _flat(each)
        yield name, memory[: each.nbytes].view(each.dtype).view(each.shape)


async def take(engine: Engine) -> Tensors:
    """Receive one refit, and copy what comes."""
    taken: Tensors = {}
    async for batch in engine.receive_weight_batches():
        taken |= {name: tensor.clone() for name, tensor in batch}
    return taken


class Refits:
    """Policy and rollout workers.

    Args:
        policies: Engines of the policy ranks.
        rollouts: Engines of the rollout ranks.
    """

    def __init__(self, policies: list[Engine], rollouts: list[Engine]) -> None:
        self.policies = policies
        self.rollouts = rollouts

    async def get_ready(self, url: str | None = None) -> None:
        """Do what NeMo-RL does once before the first refit.

        Args:
            url: Address that the rollout ranks dial instead of that of policy rank 0.
        """
        engines = [*self.policies, *self.rollouts]
        # Ray carries the metadata as pickles.
        metadata = pickle.loads(pickle.dumps([each.prepare() for each in engines]))
        sizes = {
            "train_world_size": len(self.policies),
            "rollout_world_size": len(self.rollouts),
        }
        for rank, engine in enumerate(self.policies):
            engine.init_policy_process_group(worker_rank=rank, metadata=metadata, **sizes)
        if url is not None:
            metadata[0]["source"] = dataclasses.replace(metadata[0]["source"], url=url)
        for rank, engine in enumerate(self.rollouts):
            connect = engine.init_rollout_process_group
            await asyncio.to_thread(connect, rollout_rank=rank, metadata=metadata, **sizes)

    async def refit(self, weights: Tensors) -> list[Tensors]:
        """Send weights from each policy rank, and return what each rollout rank got."""
        sending = [each.send_weights(iter(weights.items())) for each in self.policies]
        results = await asyncio.gather(*sending, *map(take, self.rollouts))
        return list(results[len(self.policies) :])

    async def outcomes(self, *calls: Any) -> list[Any]:
        """Await calls at the same time, and return their results or errors."""
        return await asyncio.gather(*calls, return_exceptions=True)


@asynccontextmanager
async def refits(
    policies: int = 1,
    rollouts: int = 2,
    *,
    theirs: Sequence[dict[str, Any]] = ({},),
    ready: bool = True,
    **options: Any,
) -> AsyncIterator[Refits]:
    """Make workers that are ready for a refit.

    Args:
        policies: Number of policy ranks.
        rollouts: Number of rollout ranks.
        theirs: Options of the rollout ranks, beside ``options``.
        ready: Do what NeMo-RL does before the first refit.
        options: Options of all engines.
    """
    options = {"address": "tcp://127.0.0.1:0", "timeout": 20.0, "bucket_size": BUCKET} | options
    made = Refits(
        [Engine(**options) for _ in range(policies)],
        [Engine(**{**options, **theirs[rank % len(theirs)]}) for rank in range(rollouts)],
    )
    if ready:
        await made.get_ready()
    try:
        yield made
    finally:
        made.policies.clear()
        made.rollouts.clear()


# -- a worker in a process of its own --------------------------------------------------------------


def run_worker(role: str, pipe: Connection) -> None:
    """Answer calls until this process is killed.

    Args:
        role: ``"policy"`` or ``"rollout"``.
        pipe: Takes ("prepare",), ("init", arguments) and ("stop in the middle",).
    """
    engine = Engine(BUCKET, address="tcp://127.0.0.1:0", timeout=20.0)
    init = getattr(engine, f"init_{role}_process_group")
    while True:
        what, *rest = pipe.recv()
        if what == "prepare":
            pipe.send(engine.prepare())
        elif what == "init":
            pipe.send(init(**rest[0]))
        elif role == "policy":
            asyncio.run(engine.send_weights(_until_killed(pipe)))
        else:
            asyncio.run(_take_until_killed(engine, pipe))


def _until_killed(pipe: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    yield from make_weights(1).items()
    pipe.send("in the middle")
    threading.Event().wait()


async def _take_until_killed(engine: Engine, pipe: Connection) -> None:
    async for _ in engine.receive_weight_batches():
        pipe.send("in the middle")
        threading.Event().wait()
