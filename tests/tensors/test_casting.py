"""Snapshots that are cast on the way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from aiosync.errors import ConfigError
from aiosync.tensors import (
    CastingFlattener,
    CastPrepared,
    CopyPool,
    FlatBuffer,
    Flattener,
    check_wire_dtype,
)
from aiosync.tensors._casting import copy_plain
from tests.tensors._models import Everything, Tied, all_bits, bits

BF16 = torch.bfloat16


def contents(flattener: CastingFlattener, source: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    prepared = flattener.prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    flat.array[:] = 0xAA
    flattener.copy_into(prepared, flat, **kwargs)
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
    check(contents(CastingFlattener("tensordict", wire), weights), weights, wire)


@pytest.mark.parametrize("threads", [None, 1, 2, 3])
def test_large_and_small_tensors_mixed(threads: int | None) -> None:
    sizes = [10, 32_703, 32_704, 32_705, 3_000_001, 1, 0, 5_000_000]
    weights = {str(i): torch.randn(size) for i, size in enumerate(sizes)}
    weights["int"] = torch.arange(400_000)
    weights["odd"] = torch.randn(500, 200).t()
    weights["grad"] = torch.randn(40_000, requires_grad=True) * 2
    flattener = CastingFlattener("tensordict", BF16)
    if threads is None:
        check(contents(flattener, weights), weights, BF16)
        return
    with CopyPool(threads) as pool:
        check(contents(flattener, weights, pool=pool), weights, BF16)
    assert not [each for each in threading.enumerate() if each.name.startswith("aiosync-c")]


def test_special_values() -> None:
    values = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, 1e-40])
    tensor = values.repeat(6_000)  # also in the vectorised loop
    found = contents(CastingFlattener("tensordict", BF16), {"a": tensor})["a"]
    assert bits(found) == bits(tensor.to(BF16))


def test_the_model_is_only_read_and_only_weights_are_cast() -> None:
    model = Everything(1.5, {"scale": torch.full((2,), 0.1), "text": "x"})
    model.child.extra = torch.full((3,), 0.1)
    before = all_bits(model)
    found = contents(CastingFlattener("tensordict", BF16), model)
    assert all_bits(model) == before
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert found["body.0.weight"].dtype is BF16
    assert found["body.1.running_mean"].dtype is BF16
    assert found["body.1.num_batches_tracked"].dtype is torch.int64
    assert found["_extra_state.scale"].dtype is torch.float32
    assert found["child._extra_state"].dtype is torch.float32
    inside = contents(CastingFlattener("tensordict", BF16), {"v": [torch.ones(2)], "w": {"0": 1.0}})
    assert inside["v.0"].dtype is torch.float32


class Rotary(nn.Module):
    """Has a buffer that is computed, and not part of the state dict, as language models do."""

    def __init__(self, dtype: torch.dtype, computed: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).to(dtype))
        self.register_buffer("mean", torch.full((2,), 0.3).to(dtype))
        inv_freq = (1 / 10_000 ** (torch.arange(4) / 4)).to(computed)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original", inv_freq, persistent=False)


def sent(flattener: CastingFlattener, source: Any) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in contents(flattener, source).items()}


def test_buffers_that_are_not_persistent_are_not_rounded() -> None:
    model = Rotary(torch.float32)
    flattener = CastingFlattener("tensordict", BF16)
    found = contents(flattener, model)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "weight": BF16,
        "mean": BF16,
        "inv_freq": torch.float32,
    }
    assert torch.equal(found["inv_freq"], model.inv_freq)
    for wire in (torch.float32, torch.float64):  # nothing is lost
        half = Rotary(BF16, BF16)
        assert set(sent(CastingFlattener("tensordict", wire), half).values()) == {wire}
    assert "inv_freq" not in sent(CastingFlattener("state_dict", BF16), model)


def test_patterns_and_weights_that_are_no_module_cast_what_they_name() -> None:
    model = Rotary(torch.float32)
    every = dict(model.named_buffers(remove_duplicate=False))
    for source in (every, TensorDict(every, batch_size=[])):
        assert set(sent(CastingFlattener("tensordict", BF16), source).values()) == {BF16}
    assert set(sent(CastingFlattener("tensordict", {"*": BF16}), model).values()) == {BF16}


def test_a_buffer_that_becomes_persistent_and_one_that_is_tied_to_a_weight() -> None:
    model, flattener = Rotary(torch.float32), CastingFlattener("tensordict", BF16)
    kept = flattener.prepare(model).layout
    assert flattener.prepare(model).layout is kept
    model._non_persistent_buffers_set.discard("original")
    assert sent(flattener, model)["inv_freq"] is BF16  # one tensor
    model._non_persistent_buffers_set.add("original")
    assert sent(flattener, model)["inv_freq"] is torch.float32
    model.inv_freq = model.inv_freq.clone()
    model._non_persistent_buffers_set.discard("original")
    found = sent(flattener, model)
    assert (found["inv_freq"], found["original"]) == (torch.float32, BF16)


def test_tied_parameters_are_one_leaf() -> None:
    prepared = CastingFlattener("tensordict", BF16).prepare(Tied())
    [leaf] = prepared.layout.manifest.leaves
    assert (leaf.name, leaf.aliases, leaf.dtype) == ("embed.weight", ("head.weight",), "bfloat16")


def test_a_known_source_keeps_its_layout_and_sends_new_values() -> None:
    model, flattener = nn.Linear(300, 200), CastingFlattener("tensordict", BF16)
    first = flattener.prepare(model)
    for value in (1.1, 2.2):
        with torch.no_grad():
            model.weight.fill_(value)
        prepared = flattener.prepare(model)
        assert prepared.layout is first.layout
        assert prepared.tensors is first.tensors
        check(contents(flattener, model), dict(model.named_parameters()), BF16)
    model.weight = nn.Parameter(torch.full((200, 300), 3.3))
    assert flattener.prepare(model).layout is first.layout
    check(contents(flattener, model), dict(model.named_parameters()), BF16)
    model.bias = nn.Parameter(torch.ones(201))
    assert flattener.prepare(model).layout is not first.layout
    check(contents(flattener, model), dict(model.named_parameters()), BF16)


def test_an_older_plan_can_still_be_carried_out() -> None:
    flattener = CastingFlattener("tensordict", BF16)
    one, two = {"a": torch.randn(40_000)}, {"b": torch.randn(3), "c": torch.randn(50_000)}
    older = flattener.prepare(one)
    flattener.prepare(two)
    flat = FlatBuffer(older.layout.nbytes)
    flattener.copy_into(older, flat)
    assert torch.equal(flat.views(older.layout)[0], one["a"].to(BF16))


def test_what_needs_no_cast_is_a_plain_snapshot() -> None:
    weights = {"a": torch.ones(3, dtype=BF16), "n": torch.arange(4)}
    flattener = CastingFlattener("tensordict", BF16)
    prepared = flattener.prepare(weights)
    assert not isinstance(prepared, CastPrepared)
    assert prepared.layout.digest == Flattener().prepare(weights).layout.digest
    check(contents(flattener, weights), weights, BF16)


@pytest.mark.parametrize("kind", [dict, lambda items: TensorDict(items, batch_size=[])])
def test_patterns(kind: Any) -> None:
    weights = {name: torch.randn(2, 3) for name in ("norm.weight", "a.weight", "b.bias")}
    weights["a.count"] = torch.arange(3)
    rule = {"norm.*": torch.float32, "*.weight": BF16, "a.*": torch.float64}
    found = contents(CastingFlattener("tensordict", rule), kind(weights))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "norm.weight": torch.float32,
        "a.weight": BF16,
        "b.bias": torch.float32,
        "a.count": torch.int64,
    }


def test_a_pattern_fits_a_tied_parameter_by_any_of_its_names() -> None:
    found = contents(CastingFlattener("tensordict", {"head.*": BF16}), Tied())
    assert found["embed.weight"].dtype is BF16


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    flattener = CastingFlattener("tensordict", {"a": BF16, "b.*": BF16})
    with pytest.raises(ConfigError, match=r"match no weight: b\.\*; .* is named 'a'"):
        flattener.prepare({"a": torch.ones(1)})
    assert flattener.prepare({}).layout.nbytes == 0
    assert flattener.prepare({"a": torch.ones(1), "b.c": torch.ones(1)}).layout.dtypes[1] is BF16


@pytest.mark.parametrize(
    "value", [torch.int8, torch.complex64, "bfloat16", {"a": "x"}, {3: BF16}, {"": BF16}, 3]
)
def test_illegal_dtypes(value: Any) -> None:
    with pytest.raises(ConfigError, match="wire_dtype"):
        check_wire_dtype(value)


def test_a_mapping_is_copied() -> None:
    rule = {"a": BF16}
    checked = check_wire_dtype(rule)
    rule["b"] = torch.float16
    assert checked == {"a": BF16}
    assert check_wire_dtype(None) is None


def test_copies_of_any_layout() -> None:
    source = torch.randn(300, 400)
    for target in (torch.empty(300, 400, dtype=BF16), torch.empty(400, 300, dtype=BF16).t()):
        copy_plain(target, source)
        assert torch.equal(target, source.to(BF16))


def test_an_error_in_a_thread_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if memory ended in the middle of a large cast."""
    real = torch._foreach_copy_
    failed = threading.Event()

    def fail(targets: Any, sources: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise MemoryError("not here")
        assert failed.wait(40)
        real(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", fail)
    weights = {"a": torch.ones(30_000_000)}
    with CopyPool(2) as pool, pytest.raises(MemoryError, match="not here"):
        contents(CastingFlattener("tensordict", BF16), weights, pool=pool)
