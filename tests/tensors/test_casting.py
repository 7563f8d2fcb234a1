"""Snapshots that are cast on the way."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors import (
    CopyPool,
    FlatBuffer,
    Flattener,
)
from tests.tensors._models import Tied, bits

BF16 = torch.bfloat16


def contents(flattener: Flattener, source: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    prepared = flattener.prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    flat.array[:] = 0xAA
    prepared.copy_into(flat, **kwargs)
    assert not any(flat.array[start:end].any() for start, end in prepared.layout.padding())
    return {
        leaf.name: view
        for leaf, view in zip(
            prepared.layout.manifest.leaves, flat.views(prepared.layout), strict=True
        )
    }


def check(found: dict[str, torch.Tensor], source: dict[str, torch.Tensor], dtype: Any) -> None:
    assert found.keys() == source.keys()
    for name, tensor in source.items():
        expected = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        assert found[name].dtype is expected.dtype
        assert bits(found[name]) == bits(expected), name


@given(
    st.sampled_from([torch.float64, torch.float32, torch.float16, BF16]),
    st.sampled_from([torch.float64, torch.float32, torch.float16, BF16, torch.float8_e4m3fn]),
    st.sampled_from([(), (0,), (3,), (5, 7), (32_704,), (32_705,), (181, 181), (33_000, 2)]),
)
@settings(max_examples=60)
def test_every_value_is_what_torch_makes_of_it(
    source: torch.dtype, wire: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape, dtype=torch.float64) * 100).to(source)
    beside = {"i": torch.arange(5), "c": torch.randn(3, dtype=torch.complex64)}
    weights = {"a": tensor, **beside, "flag": torch.tensor(True)}
    check(contents(Flattener(dtype=wire), weights), weights, wire)


@pytest.mark.parametrize("threads", [None, 1, 2, 3])
def test_large_and_small_tensors_mixed(threads: int | None) -> None:
    sizes = [10, 32_703, 32_704, 32_705, 3_000_001, 1, 0, 5_000_000]
    weights = {str(i): torch.randn(size) for i, size in enumerate(sizes)}
    weights["int"] = torch.arange(400_000)
    weights["odd"] = torch.randn(500, 200).t()
    weights["grad"] = torch.randn(40_000, requires_grad=True) * 2
    flattener = Flattener(dtype=BF16)
    with closing(CopyPool(threads)) if threads else nullcontext() as pool:
        check(contents(flattener, weights, pool=pool), weights, BF16)


class Rotary(nn.Module):
    """Has a buffer that is computed, and not part of the state dict, as language models do."""

    def __init__(self, dtype: torch.dtype, computed: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).to(dtype))
        self.register_buffer("mean", torch.full((2,), 0.3).to(dtype))
        inv_freq = (1 / 10_000 ** (torch.arange(4) / 4)).to(computed)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original", inv_freq, persistent=False)


def sent(flattener: Flattener, source: Any) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in contents(flattener, source).items()}


def test_buffers_that_are_not_persistent_are_not_rounded() -> None:
    model = Rotary(torch.float32)
    found = contents(Flattener(dtype=BF16), model)
    assert torch.equal(found.pop("inv_freq"), model.inv_freq)
    check(found, {"weight": model.weight, "mean": model.mean}, BF16)
    for wire in (torch.float32, torch.float64):  # nothing is lost
        half = Rotary(BF16, BF16)
        assert set(sent(Flattener(dtype=wire), half).values()) == {wire}
    assert "inv_freq" not in sent(Flattener("state_dict", dtype=BF16), model)


@pytest.mark.parametrize("kind", [dict, lambda items: TensorDict(items, batch_size=[])])
def test_patterns(kind: Any) -> None:
    weights = {name: torch.randn(2, 3) for name in ("norm.weight", "a.weight", "b.bias")}
    weights["a.count"] = torch.arange(3)
    rule = {"norm.*": torch.float32, "*.weight": BF16, "a.*": torch.float64}
    assert sent(Flattener(dtype=rule), kind(weights)) == {
        "norm.weight": torch.float32,
        "a.weight": BF16,
        "b.bias": torch.float32,
        "a.count": torch.int64,
    }


@pytest.mark.parametrize("rule", [BF16, {"head.*": BF16}, {"embed.*": BF16}])
def test_tied_parameters_are_one_leaf_and_a_pattern_fits_any_name(rule: Any) -> None:
    [leaf] = Flattener(dtype=rule).prepare(Tied()).layout.manifest.leaves
    assert (leaf.name, leaf.aliases, leaf.dtype) == ("embed.weight", ("head.weight",), "bfloat16")


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    flattener = Flattener(dtype={"a": BF16, "b.*": BF16})
    with pytest.raises(ConfigError, match=r"match no weight: b\.\*; .* is named 'a'"):
        flattener.prepare({"a": torch.ones(1)})
    assert flattener.prepare({}).layout.nbytes == 0
    assert flattener.prepare({"a": torch.ones(1), "b.c": torch.ones(1)}).layout.dtypes[1] is BF16
