"""A checkpoint's names on the way, an engine's fused ones in the worker, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.tensors import WeightMap
from tests.schemes import _harness as harness

SCHEMES = [*harness.SCHEMES, aiosync.TCPWeightSyncScheme]
HIDDEN, Q, KV, MIDDLE = 16, 16, 8, 24


def linear(rows: int, columns: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False, dtype=dtype)


class Layer(nn.Module):
    """One layer with a checkpoint's names, or with an engine's."""

    def __init__(self, fused: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        if fused:
            self.self_attn.qkv_proj = linear(Q + 2 * KV, HIDDEN, dtype)
            self.mlp.gate_up_proj = linear(2 * MIDDLE, HIDDEN, dtype)
        else:
            for name, rows in {"q": Q, "k": KV, "v": KV}.items():
                self.self_attn.add_module(f"{name}_proj", linear(rows, HIDDEN, dtype))
            self.mlp.gate_proj = linear(MIDDLE, HIDDEN, dtype)
            self.mlp.up_proj = linear(MIDDLE, HIDDEN, dtype)
        self.self_attn.o_proj = linear(HIDDEN, Q, dtype)
        self.mlp.down_proj = linear(HIDDEN, MIDDLE, dtype)


class Model(nn.Module):
    """Enough of a Llama to have its names; embedding and head are tied."""

    def __init__(self, *, fused: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(10, HIDDEN, dtype=dtype)
        self.model.layers = nn.ModuleList(Layer(fused, dtype) for _ in range(2))
        self.lm_head = linear(10, HIDDEN, dtype)
        self.lm_head.weight = self.model.embed_tokens.weight


ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
FUSE = WeightMap(
    merge={
        f"{ATTENTION}.qkv_proj.weight": [f"{ATTENTION}.{each}_proj.weight" for each in "qkv"],
        f"{MLP}.gate_up_proj.weight": [f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"],
    }
)
UNFUSE = WeightMap(
    split={
        f"{ATTENTION}.qkv_proj.weight": {
            f"{ATTENTION}.q_proj.weight": Q,
            f"{ATTENTION}.k_proj.weight": KV,
            f"{ATTENTION}.v_proj.weight": KV,
        },
        f"{MLP}.gate_up_proj.weight": {
            f"{MLP}.gate_proj.weight": MIDDLE,
            f"{MLP}.up_proj.weight": -1,
        },
    }
)


def joined(scheme: Any, source: Any, target: Any, transform: Any) -> Any:
    """A connected sender, and a receiver that transforms, in this process."""
    init = {"transform": transform}
    return harness.here(scheme, target, sender={"model": source}, receiver=init)


def same(one: nn.Module, other: nn.Module) -> bool:
    weights, expected = one.state_dict(), other.state_dict()
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[name], expected[name].to(weights[name].dtype)) for name in weights
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("make", SCHEMES)
async def test_fused_on_the_way_there_and_split_on_the_way_back(make: Any) -> None:
    source = Model()
    engine, copied = Model(fused=True, dtype=torch.bfloat16), Model(dtype=torch.bfloat16)
    async with (
        joined(make(wire_dtype=torch.bfloat16), source, engine, FUSE) as (there, engines),
        joined(make(), engine, copied, UNFUSE) as (back, copies),
    ):
        for value in (0.1, 0.2):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.uniform_(value, 1)
            assert (await there.send()).acked == {0}
            with engines.reading():
                qkv = engine.model.layers[1].self_attn.qkv_proj.weight
                attention = source.model.layers[1].self_attn
                parts = [getattr(attention, f"{each}_proj").weight for each in "qkv"]
                assert torch.equal(qkv, torch.cat(parts).bfloat16())
                assert engine.lm_head.weight is engine.model.embed_tokens.weight
            assert (await back.send()).acked == {0}
            with copies.reading():
                assert same(copied, source)


@pytest.mark.asyncio
@pytest.mark.parametrize("make", SCHEMES)
async def test_a_map_that_does_not_fit_is_refused_with_its_own_words(make: Any) -> None:
    source, engine = Model(), Model(fused=True)
    async with joined(make(), source, engine, FUSE) as (sender, receiver):
        weights = source.state_dict()
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        del weights["model.layers.1.self_attn.k_proj.weight"]
        with pytest.raises(aiosync.PartialSyncError, match="Have the trainer send them") as caught:
            await sender.send(weights)
        assert caught.value.failed[0].remote_type == "ManifestMismatch"
        with receiver.reading():
            found = engine.state_dict()
            assert all(torch.equal(value, found[name]) for name, value in before.items())
        await sender.send()
