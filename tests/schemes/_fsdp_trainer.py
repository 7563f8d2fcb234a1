"""A trainer of two ranks whose model is sharded with ``fully_shard``; rank 0 sends to a worker."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import tempfile
from typing import Any

import pytest
import torch
import torch._dynamo  # DTensor needs it: loaded once here, and not in each process
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import aiosync
from aiosync.tensors import gather_weights
from tests.schemes._driver import PATIENCE, together


class Model(nn.Module):
    """Model of sizes that two ranks cannot share evenly; with tied weights, buffer, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 7)
        self.blocks = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7))
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.3))
        # Rank 1 has no element of it.
        self.gain = self.twin = nn.Parameter(torch.full((1,), 0.7))
        self.steps = 3

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


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def worker(scheme: Any) -> None:
    async def main() -> None:
        # Its values differ from those of make().
        model = Model().bfloat16()
        model.steps = 0
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        async with scheme:
            await scheme.connect(timeout=PATIENCE)
            assert await scheme.wait_for_version(2, timeout=PATIENCE) == 2
            assert model.head.weight is model.embed.weight
            assert model.steps == 3
            expected = make().bfloat16().state_dict()
            assert_equal(tensors(model.state_dict()), tensors(expected))
            print("the worker has the values of the whole model", flush=True)

    aiosync.run(main)


def trainer(number: int, scheme: Any) -> None:
    model, expected = sharded(), tensors(make().state_dict())

    async def main() -> None:
        if number == 0:
            scheme.init_on_sender(model_id="policy", num_workers=1)
            await scheme.connect(weights=Model(), timeout=PATIENCE)
            with pytest.raises(aiosync.ConfigError, match=r"blocks\.0\.weight"):
                # Rank 0 calls this alone, so the call must not wait for the other rank.
                await scheme.send(model, timeout=5)
        weights = await asyncio.to_thread(gather_weights, model, keep=number == 0, timeout=PATIENCE)
        if number == 0:
            assert weights["head.weight"] is weights["embed.weight"]
            assert {type(each) for each in weights.values()} == {torch.Tensor, int}
            assert (await scheme.send(weights)).version == 2
        else:
            assert weights == {}
        await scheme.aclose()

    aiosync.run(main)
    check_forms(number, model, expected)


def check_forms(number: int, model: Model, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert_equal(tensors(gather_weights(state, device="cpu", timeout=PATIENCE)), expected)
    with torch.no_grad():
        model(torch.zeros(2, dtype=torch.int64))
    if not any(isinstance(p, DTensor) for p in model.head.parameters()):
        print("the root was not sharded after a forward", flush=True)
    # This changes the shards that the optimizer has; the root still shows its older copy.
    with torch.no_grad():
        for each in model.blocks[0].parameters():
            each.to_local().fill_(7.0)
    changed = gather_weights(model, extract_as="state_dict", timeout=PATIENCE)
    assert changed["blocks.0.weight"].eq(7).all()
    assert torch.equal(changed["head.weight"], expected["head.weight"])
    assert changed["_extra_state"] == 3
    # gather_weights() has resharded the root.
    assert isinstance(model.head.weight, DTensor)
    different = dict(model.blocks[1].named_parameters())
    if number:
        del different["bias"]
    with pytest.raises(aiosync.ConfigError, match="different weights"):
        gather_weights(different, timeout=PATIENCE)
    # A rank that ties weights takes part in fewer collectives.
    weight = model.head.weight
    tied = {"one": weight, "other": weight if number else weight.detach()}
    with pytest.raises(aiosync.ConfigError, match="different weights"):
        gather_weights(tied, timeout=PATIENCE)
    check_ties(model, changed)
    check_memory(model)
    print(f"rank {number} has seen every form", flush=True)


def check_ties(model: Model, gathered: dict[str, Any]) -> None:
    for one, other in (("head.weight", "embed.weight"), ("gain", "twin")):
        assert gathered[one] is gathered[other], one

    def double(_: nn.Module, state: dict[str, Any], *rest: object) -> None:
        state["twin"] = state["twin"] * 2

    model.register_state_dict_post_hook(double)
    doubled = gather_weights(model, extract_as="state_dict", timeout=math.inf)
    assert doubled["twin"].item() == 2 * doubled["gain"].item() != 0
    assert doubled["head.weight"] is doubled["embed.weight"]


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def check_memory(model: Model) -> None:
    for owner, name in ((DTensor, "full_tensor"), (torch.Tensor, "cpu")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, no_memory)
            with pytest.raises(aiosync.ConfigError, match=r"device='cpu'.*keep=False"):
                gather_weights(model, timeout=PATIENCE)


def alone(number: int, mode: str) -> None:
    """Gather in rank 0 while rank 1 does not gather, or has ended."""
    model = sharded()
    if number == 0:
        with pytest.raises((aiosync.SyncTimeout, aiosync.TransportBroken)) as caught:
            gather_weights(model, timeout=PATIENCE if mode == "gone" else 1.0)
        print(f"alone: {caught.typename}: {caught.value}", flush=True)


def rank(number: int, store: str, mode: str, scheme: Any, ended: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    if mode == "send":
        trainer(number, scheme)
        dist.barrier()
        dist.destroy_process_group()
        return
    alone(number, mode)
    if mode == "absent":
        ended.wait(PATIENCE)
    # A broken group cannot be destroyed in good order, so the process ends without that.
    os._exit(0)


def main() -> None:
    ctx = multiprocessing.get_context("fork")
    for mode in ("send", "absent", "gone"):
        with tempfile.TemporaryDirectory() as folder:
            scheme = aiosync.SharedMemWeightSyncScheme(wire_dtype=torch.bfloat16)
            rest = (os.path.join(folder, "store"), mode, scheme, ctx.Barrier(2))
            crew = [ctx.Process(target=rank, args=(number, *rest)) for number in range(2)]
            if mode == "send":
                crew.append(ctx.Process(target=worker, args=(scheme,)))
            together(crew)


if __name__ == "__main__":
    main()
