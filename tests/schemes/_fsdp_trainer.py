"""Trainers of two ranks whose model is sharded with ``fully_shard``; rank 0 sends to a worker."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
import torch._dynamo  # DTensor needs it: once here, and not in each of the processes
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import aiosync
from aiosync.tensors import gather_weights

PATIENCE = 40


class Model(nn.Module):
    """Sizes that two ranks cannot share evenly, tied weights, a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 7)
        self.blocks = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7))
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.3))
        self.steps = 0

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(words)))

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def sharded() -> Model:
    model = make()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def train(model: Model) -> None:
    """Some steps; the same data on all ranks, so that their mean is that of one."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randint(0, 9, (8,))).pow(2).mean().backward()
        optimizer.step()
        model.steps += 1


def worker(scheme: Any, conn: Any) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        model = make().bfloat16()
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        async with scheme:
            await scheme.connect(timeout=PATIENCE)
            version = await scheme.wait_for_version(2, timeout=PATIENCE)
            assert model.head.weight is model.embed.weight
            state = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
            conn.send((version, model.steps, {k: v.float().numpy() for k, v in state.items()}))

    aiosync.run(main)


async def trainer(number: int, scheme: Any, conn: Any) -> None:
    model, whole = sharded(), make()
    train(model)
    train(whole)
    expected = {k: v for k, v in whole.state_dict().items() if isinstance(v, torch.Tensor)}
    if number == 0:
        scheme.init_on_sender(model_id="policy", num_workers=1)
        await scheme.connect(weights=make(), timeout=PATIENCE)
        started = time.monotonic()
        try:
            await scheme.send(model)  # alone: it must not wait for the other rank
        except aiosync.ConfigError as exc:
            assert "gather_weights" in str(exc), exc
            assert "blocks.0.weight" in str(exc), exc
        else:
            raise AssertionError("sharded weights were sent")
        assert time.monotonic() - started < 5
    weights = await asyncio.to_thread(gather_weights, model, keep=number == 0, timeout=PATIENCE)
    if number == 0:
        assert weights["head.weight"] is weights["embed.weight"]
        assert {type(each) for each in weights.values()} == {torch.Tensor, int}
        report = await scheme.send(weights)
        assert report.version == 2
        assert await asyncio.to_thread(conn.poll, PATIENCE)
        version, steps, state = conn.recv()
        assert (version, steps) == (2, 3)
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert torch.equal(torch.from_numpy(value), expected[name].bfloat16().float()), name
        print("the worker has the values of the whole model", flush=True)
        await scheme.aclose()
    else:
        assert weights == {}
    check_forms(number, model, expected)


def check_forms(number: int, model: Model, expected: dict[str, torch.Tensor]) -> None:
    def check(found: dict[str, Any]) -> None:
        assert {k for k, v in found.items() if isinstance(v, torch.Tensor)} == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    check(gather_weights(model.state_dict(), device="cpu", timeout=PATIENCE))
    check(gather_weights({"model": model.state_dict()}["model"], timeout=None))
    with torch.no_grad():
        model(torch.zeros(2, dtype=torch.int64))
    if not any(isinstance(p, DTensor) for p in model.head.parameters()):
        print("the root was not sharded after a forward", flush=True)
    with torch.no_grad():  # what the optimizer has; the root still shows its older copy
        for each in model.blocks[0].parameters():
            assert isinstance(each, DTensor)
            each.to_local().fill_(float(7))
    with torch.inference_mode():
        gather_weights(model, timeout=PATIENCE)
    changed = gather_weights(model, extract_as="state_dict", timeout=PATIENCE)
    assert changed["blocks.0.weight"].eq(7).all()
    assert torch.equal(changed["head.weight"], expected["head.weight"])
    assert changed["_extra_state"] == 3
    assert isinstance(model.head.weight, DTensor)  # resharded
    different: dict[str, Any] = {"a": model.blocks[1].weight}
    if number:
        different["b"] = model.blocks[1].bias
    try:
        gather_weights(different, timeout=PATIENCE)
    except aiosync.ConfigError as exc:
        assert "different weights" in str(exc), exc
    else:
        raise AssertionError("other weights were gathered")
    check(
        gather_weights(
            model.state_dict()
            | {
                "blocks.0.weight": expected["blocks.0.weight"],
                "blocks.0.bias": expected["blocks.0.bias"],
            }
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says so
        old = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    try:
        gather_weights(old)
    except aiosync.ConfigError as exc:
        assert "fully_shard" in str(exc), exc
    else:
        raise AssertionError("flat parameters were gathered")
    print(f"rank {number} has seen every form", flush=True)


def alone(number: int, conn: Any, *, gone: bool) -> None:
    """Rank 0 gathers, rank 1 does not, or ends."""
    model = sharded()
    if number == 1:
        if gone:
            os._exit(0)
        assert conn.poll(PATIENCE)
        return
    started = time.monotonic()
    try:
        gather_weights(model, timeout=PATIENCE if gone else 1.0)
    except (aiosync.SyncTimeout, aiosync.TransportBroken) as exc:
        took = time.monotonic() - started
        assert took < 15, took
        print(f"alone: {type(exc).__name__}: {exc}", flush=True)
    conn.send("go")


def rank(number: int, store: str, mode: str, scheme: Any, conn: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    if mode == "send":
        aiosync.run(trainer(number, scheme, conn))
    else:
        alone(number, conn, gone=mode == "gone")
        sys.stdout.flush()
        os._exit(0)  # a group that is of no use cannot be destroyed in good order
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    ctx = multiprocessing.get_context("fork")
    for mode in ("send", "absent", "gone"):
        mine, theirs = ctx.Pipe()
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            scheme = aiosync.SharedMemWeightSyncScheme(wire_dtype=torch.bfloat16)
            ends = (mine, theirs)
            crew = [
                ctx.Process(target=rank, args=(number, store, mode, scheme, ends[number]))
                for number in range(2)
            ]
            if mode == "send":
                crew.append(ctx.Process(target=worker, args=(scheme, theirs)))
            for process in crew:
                process.start()
            try:
                for process in crew:
                    process.join(PATIENCE)
                    assert process.exitcode == 0, (mode, process)
            finally:
                for process in crew:
                    process.kill()
                    process.join()


if __name__ == "__main__":
    main()
