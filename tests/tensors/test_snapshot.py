"""Snapshots: the copied values, changes of the source that are noticed, and casts."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import closing, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictParams
from torch import nn

import aiosync
from aiosync.errors import ConfigError
from aiosync.tensors import (
    CopyPool,
    FlatBuffer,
    Flattener,
    Layout,
    Prepared,
    collect,
)
from tests.tensors._models import (
    Everything,
    Labelled,
    Stateful,
    Tied,
    add_one,
    bits,
    send,
)


def copied(prepared: Prepared, **kwargs: Any) -> dict[str, torch.Tensor]:
    layout, flat = prepared.layout, FlatBuffer(prepared.layout.nbytes)
    flat.array[:] = 0xAA
    prepared.copy_into(flat, **kwargs)
    assert not any(flat.array[start:end].any() for start, end in layout.padding())
    return dict(
        zip((leaf.name for leaf in layout.manifest.leaves), flat.views(layout), strict=True)
    )


def contents(flattener: Flattener, source: Any) -> dict[str, bytes]:
    return {name: bits(view) for name, view in copied(flattener.prepare(source)).items()}


def expected(source: Any) -> dict[str, bytes]:
    return {leaf.name: bits(leaf.tensor) for leaf in collect(source).leaves}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.tensor([3.0]).expand(5, 2),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(10.0)[3:],
        torch.randn(3, requires_grad=True) * 2,
        torch.arange(3.0).as_subclass(Labelled),
    ],
    ids=["t", "step", "expand", "conj", "neg", "channels_last", "offset", "grad", "subclass"],
)
def test_tensors_of_any_kind(tensor: torch.Tensor) -> None:
    got = contents(Flattener(), {"before": torch.ones(3), "x": tensor, "z": torch.ones(2)})
    assert got["x"] == bits(tensor.resolve_conj().resolve_neg())
    assert got["z"] == bits(torch.ones(2))


def freed() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.untyped_storage().resize_(0)
    return tensor


UNSENDABLE: dict[str, Callable[[], torch.Tensor]] = {
    "freed": freed,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1)]),
    "torch.jagged": lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "torch.sparse_csr": lambda: torch.ones(2, 4).to_sparse_csr(),
    "torch._mkldnn": lambda: torch.ones(2, 4).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Sparse .* tensor support:UserWarning")
@pytest.mark.parametrize("first", ["dict", "module", "td"])
@pytest.mark.parametrize("kind", UNSENDABLE)
def test_what_cannot_be_sent_is_refused_after_a_plan_too(kind: str, first: str) -> None:
    flattener, bad = Flattener(), UNSENDABLE[kind]()
    good: dict[str, Any] = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}
    plans = {"dict": good, "module": nn.Linear(4, 2), "td": TensorDict(good)}
    flattener.prepare(plans[first])
    why = "nested" if kind == "torch.jagged" else kind
    with pytest.raises(ConfigError, match=f"'weight' .*{why}"):
        flattener.prepare({**good, "weight": bad})
    assert contents(flattener, good)["weight"] == bits(good["weight"])


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["same dtype", "cast"])
def test_weights_freed_after_a_plan_are_refused(cast: torch.dtype | None) -> None:
    model = nn.Linear(4, 2)
    flattener = Flattener(dtype=cast)
    for _ in range(2):
        contents(flattener, model)
    model.weight.data = torch.ones(2, 4)
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="'weight' .*freed"):
        contents(flattener, model)
    model.weight.data = torch.ones(2, 4)
    contents(flattener, model)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel])
def test_a_steady_model_takes_few_calls(wrap: Any) -> None:
    flattener, model = Flattener(), wrap(nn.Linear(4, 2))
    flat, calls = FlatBuffer(flattener.prepare(model).layout.nbytes), []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "aiosync" in frame.f_globals["__name__"]:
            calls.append(frame.f_code.co_name)

    for _ in range(3):
        calls.clear()
        sys.setprofile(count)
        try:
            flattener.prepare(model).copy_into(flat)
        finally:
            sys.setprofile(None)
    assert 0 < len(calls) <= 6, calls


def _replace_data(model: Everything) -> None:
    model.body[0].weight.data = torch.full((4, 3), 9.0)


def _other_shape(model: Everything) -> None:
    model.body[0].weight.data = torch.full((3, 4), 9.0)


def _same_memory_other_shape(model: Everything) -> None:
    model.body[0].weight.data = model.body[0].weight.data.view(2, 6)


def _rename(model: Everything) -> None:
    model.renamed = model.frozen
    del model.frozen


def _move_to_the_next_module(model: Everything) -> None:
    model.next.register_parameter("w", model.before.w)
    del model.before.w


def _tie(model: Everything) -> None:
    model.frozen = model.body[0].bias = nn.Parameter(torch.ones(4))


CHANGES: dict[str, Callable[[Everything], object]] = {
    "replace data": _replace_data,
    "other shape": _other_shape,
    "same memory, other shape": _same_memory_other_shape,
    "rename": _rename,
    "move to the next module": _move_to_the_next_module,
    "tie": _tie,
    "equal parameter": lambda model: model.register_parameter(
        "frozen", nn.Parameter(model.frozen.clone(), requires_grad=False)
    ),
    "parameter of another shape": lambda model: model.body[0].register_parameter(
        "bias", nn.Parameter(torch.ones(5))
    ),
    "parameter from None": lambda model: model.register_parameter(
        "none", nn.Parameter(torch.ones(1))
    ),
    "parameter to None": lambda model: model.body[0].register_parameter("bias", None),
    "equal buffer": lambda model: model.register_buffer("kept", model.kept.clone()),
    "equal number": lambda model: model.body[1].register_buffer(
        "num_batches_tracked", torch.tensor(0)
    ),
    "buffer to None": lambda model: model.register_buffer("kept", None),
    "new buffer": lambda model: model.body[1].register_buffer("more", torch.zeros(0)),
    "cast": lambda model: model.to(torch.float64),
    "half": lambda model: model.body[2].to(torch.bfloat16),
    "equal child": lambda model: model.body.register_module("0", deepcopy(model.body[0])),
    "more children": lambda model: model.add_module("more", nn.Linear(2, 2)),
    "fewer children": lambda model: model.body.pop(2),
    "freeze": lambda model: model.requires_grad_(False),
    "to_empty": lambda model: model.to_empty(device="cpu").apply(_fill),
}


def _fill(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data.fill_(5)


@pytest.mark.parametrize("kind", ["plain", "value", "tensor", "large"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_module_are_seen(change: str, kind: str) -> None:
    model, flattener = Everything(1.0), Flattener()
    model.extra = {"value": {"steps": 3}, "tensor": {"mean": torch.ones(2)}}.get(kind)
    model.before, model.next = nn.ParameterDict({"w": torch.ones(2)}), nn.ParameterDict()
    if kind == "large":
        model.large = nn.Parameter(torch.ones(2**17))
    contents(flattener, model)
    CHANGES[change](model)
    # The second snapshot uses the new plan.
    for _ in range(2):
        prepared = flattener.prepare(model)
        add_one(model)
        found = {name: bits(view) for name, view in copied(prepared).items()}
        assert found == expected(model)
        assert prepared.layout.digest == Layout.plan(collect(model).leaves).digest


@pytest.mark.parametrize(
    "source",
    [
        {"a": torch.ones(3, 2), "b": torch.ones(4)},
        {"a": torch.arange(6.0).view(3, 2).t(), "b": torch.ones(4)},
        {"a": torch.ones(2, 3).double(), "b": torch.ones(4)},
        {"a": torch.ones(2, 3), "b": nn.Parameter(torch.ones(4))},
        {"a": torch.ones(2, 3)},
        {"b": torch.ones(2, 3), "a": torch.ones(4)},
        {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(4)},
        {"a": {"b": torch.ones(2, 3)}, "c": torch.ones(4)},
        {"a": {"b": torch.ones(2, 3), "c": torch.ones(4)}},
        {"a": {}, "c": torch.ones(2, 3), "d": torch.ones(4)},
        {"a": torch.ones(2, 3), "b": torch.ones(4), "n": 3},
        TensorDict({"a": {"b": torch.ones(2, 3)}, "c": {"d": torch.ones(4)}}),
        TensorDictParams(TensorDict({"a": torch.ones(2, 3), "b": torch.ones(4)})),
        {},
    ],
)
def test_another_container_after_a_known_one(source: Any) -> None:
    flattener, known = Flattener(), {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    for each in (known, source, known, source):
        assert contents(flattener, each) == expected(each)


def _with_states() -> nn.Module:
    """Return a module of which each part has an extra state of tensors only."""
    part = Stateful({"mean": torch.full((2,), 7.0)})
    part.weight = nn.Parameter(torch.ones(2))
    return nn.Sequential(part, nn.Sequential(deepcopy(part)))


STATES: dict[str, Callable[[], Any]] = {
    "state_dict": lambda: _with_states().state_dict(),
    "gathered": lambda: aiosync.gather_weights(_with_states()),
    "nested": lambda: {"a": {"_extra_state": {"b": torch.ones(2)}, "c": torch.zeros(2)}},
    "root": lambda: {"__extra_state__": {"b": torch.ones(2)}, "c": torch.zeros(2)},
    "td": lambda: TensorDict(
        {"__extra_state__": TensorDict({"b": torch.ones(2)}), "c": torch.zeros(2)}
    ),
    "bare": lambda: {"_extra_state": torch.ones(2), "c": torch.zeros(2)},
}


@pytest.mark.parametrize("form", STATES)
def test_an_extra_state_of_tensors_stays_one_value(form: str) -> None:
    flattener = Flattener()
    for _ in range(3):
        source = STATES[form]()
        wanted, prepared = collect(source), flattener.prepare(source)
        assert prepared.values == wanted.values
        assert bool(prepared.values) is (form != "bare")
        names = [(leaf.name, leaf.kind) for leaf in prepared.layout.manifest.leaves]
        assert names == [(leaf.name, leaf.kind) for leaf in wanted.leaves]
        found = {name: bits(view) for name, view in copied(prepared).items()}
        assert found == expected(source)


def test_only_the_last_source_is_kept() -> None:
    flattener, sent = Flattener(), list[weakref.ref[torch.Tensor]]()
    for _ in range(3):
        source = {"a": torch.ones(2)}
        flattener.prepare(source)
        sent.append(weakref.ref(source["a"]))
    assert [each() is None for each in sent] == [True, True, False]


def test_ties_that_dissolve_are_seen() -> None:
    model, flattener = Tied(), Flattener()
    assert contents(flattener, model).keys() == {"embed.weight"}
    model.head.weight = nn.Parameter(torch.zeros(5, 3))
    assert contents(flattener, model) == expected(model)
    # These parameters are tied by their memory, and are two objects.
    model.head.weight.data = model.embed.weight.data
    flattener = Flattener()
    assert contents(flattener, model).keys() == {"embed.weight"}
    model.head.weight.data = torch.zeros(5, 3)
    assert contents(flattener, model) == expected(model)
    tensor = torch.ones(3)
    for tensors in ({"a": tensor, "b": tensor}, {"a": tensor, "b": torch.zeros(3)}):
        assert contents(flattener, tensors) == expected(tensors)


def test_values_are_taken_when_prepared() -> None:
    model, flattener = Stateful({"steps": [1]}), Flattener()
    first = flattener.prepare(model)
    model.extra["steps"].append(2)
    second = flattener.prepare(model)
    assert first.values == {"_extra_state": {"steps": [1]}}
    assert second.values == {"_extra_state": {"steps": [1, 2]}}
    assert first.layout is second.layout
    model.extra = object()
    with pytest.raises(ConfigError, match="_extra_state"):
        flattener.prepare(model)


# -- cast on the way -------------------------------------------------------------------------------


BF16 = torch.bfloat16


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
    check(copied(Flattener(dtype=wire).prepare(weights)), weights, wire)


@pytest.mark.parametrize("threads", [None, 1, 2, 3])
def test_large_and_small_tensors_mixed(threads: int | None) -> None:
    sizes = [10, 32_703, 32_704, 32_705, 3_000_001, 1, 0, 5_000_000]
    weights = {str(i): torch.randn(size) for i, size in enumerate(sizes)}
    weights["int"] = torch.arange(400_000)
    weights["odd"] = torch.randn(500, 200).t()
    weights["grad"] = torch.randn(40_000, requires_grad=True) * 2
    prepared = Flattener(dtype=BF16).prepare(weights)
    with closing(CopyPool(threads)) if threads else nullcontext() as pool:
        check(copied(prepared, pool=pool), weights, BF16)


@pytest.mark.parametrize("kind", [dict, lambda items: TensorDict(items, batch_size=[])])
def test_patterns(kind: Any) -> None:
    weights = {name: torch.randn(2, 3) for name in ("norm.weight", "a.weight", "b.bias")}
    weights["a.count"] = torch.arange(3)
    rule = {"norm.*": torch.float32, "*.weight": BF16, "a.*": torch.float64}
    found = copied(Flattener(dtype=rule).prepare(kind(weights)))
    assert {name: view.dtype for name, view in found.items()} == {
        "norm.weight": torch.float32,
        "a.weight": BF16,
        "b.bias": torch.float32,
        "a.count": torch.int64,
    }


@pytest.mark.parametrize("rule", [BF16, {"head.*": BF16}, {"embed.*": BF16}])
def test_tied_parameters_are_one_leaf_and_a_pattern_fits_any_name(rule: Any) -> None:
    [leaf] = Flattener(dtype=rule).prepare(Tied()).layout.manifest.leaves
    assert (leaf.name, leaf.aliases, leaf.dtype) == ("embed.weight", ("head.weight",), "bfloat16")


class Statistics(nn.Module):
    """A module with the state of a running mean, which a lower precision would falsify."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.tensor(123456789, dtype=dtype))
        self.register_buffer("steps", torch.tensor(123456789))
        self.register_buffer("mean", torch.tensor(1.00390625))


def _renaming(model: nn.Module) -> nn.Module:
    """Add a hook to a model, so that its names come from ``state_dict()``.

    A state_dict does not say which of its tensors are buffers.
    """
    model.register_state_dict_post_hook(lambda *_: None)
    return model


FORMS: list[Callable[[nn.Module], Any]] = [
    nn.Sequential,
    lambda model: _renaming(nn.Sequential(model)),
    lambda model: aiosync.gather_weights(nn.Sequential(model)),
]


@pytest.mark.parametrize("form", FORMS, ids=["plain", "hooks", "gathered"])
@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_a_single_dtype_does_not_round_statistics(
    form: Any, extract_as: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiosync")
    source, flattener = form(Statistics()), Flattener(extract_as, dtype=BF16)
    for _ in range(2):
        found = copied(flattener.prepare(source))
        assert [found[f"0.{name}"].item() for name in ("count", "steps")] == [123456789] * 2
        assert {name: view.dtype for name, view in found.items()} == {
            "0.scale": BF16,
            "0.count": torch.float64,
            "0.steps": torch.int64,
            "0.mean": BF16,
        }
    [record] = caplog.records
    assert "float64 buffers are sent as they are: 0.count;" in record.getMessage()
    # The log record advises rules like these.
    for rule in ({"*": BF16}, {"*.count": BF16}):
        assert copied(Flattener(extract_as, dtype=rule).prepare(source))["0.count"].dtype is BF16
    assert len(caplog.records) == 1


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]], ids=["plain", "gathered"])
def test_a_single_dtype_does_not_round_buffers_that_are_not_persistent(form: Any) -> None:
    model, mean = nn.Module(), torch.ones(2)
    model.register_buffer("inv_freq", torch.ones(2), persistent=False)
    # One tensor under two names is persistent if it is so under one of them.
    model.register_buffer("shared", mean, persistent=False)
    model.register_buffer("mean", mean)
    leaves = Flattener(dtype=BF16).prepare(form(model)).layout.manifest.leaves
    assert [(leaf.name, leaf.kind, leaf.dtype) for leaf in leaves] == [
        ("0.inv_freq", "transient", "float32"),
        ("0.shared", "buffer", "bfloat16"),
    ]


def test_a_gathered_buffer_that_is_not_persistent_may_be_missing() -> None:
    source = nn.Linear(2, 2)
    worker = deepcopy(source)
    source.register_buffer("inv_freq", torch.ones(2), persistent=False)
    send(aiosync.gather_weights(source), worker, copy=True)


def test_a_buffer_that_is_marked_as_not_persistent_later_is_not_rounded() -> None:
    flattener, mean = Flattener(dtype=BF16), torch.ones(2)
    for is_kept, dtype in ((True, BF16), (False, torch.float32), (True, BF16)):
        source = {"w": torch.ones(2), "mean": nn.Buffer(mean, persistent=is_kept)}
        assert copied(flattener.prepare(source))["mean"].dtype is dtype


@pytest.mark.parametrize("nested", [False, True])
def test_a_tensor_that_is_marked_as_a_buffer_later_is_not_rounded(nested: bool) -> None:
    flattener, mean = Flattener(dtype=BF16), torch.full((2,), 1.00390625, dtype=torch.float64)
    for tensor, dtype in ((mean, BF16), (nn.Buffer(mean), torch.float64), (mean, BF16)):
        source: dict[str, Any] = {"w": torch.ones(2), "mean": tensor}
        found = copied(flattener.prepare({**source, "in": source} if nested else source))
        assert all(view.dtype is dtype for name, view in found.items() if name.endswith("mean"))


def test_parameters_in_float64_are_no_statistics() -> None:
    source = Statistics()
    source.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    source.tied = nn.Parameter(source.count, requires_grad=False)
    found = copied(Flattener(dtype=BF16).prepare(source))
    assert found["scale"].dtype is found["tied"].dtype is BF16


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    flattener = Flattener(dtype={"a": BF16, "b.*": BF16})
    with pytest.raises(ConfigError, match=r"match no weight: b\.\*; .* is named 'a'"):
        flattener.prepare({"a": torch.ones(1)})
    assert flattener.prepare({}).layout.nbytes == 0
    assert flattener.prepare({"a": torch.ones(1), "b.c": torch.ones(1)}).layout.dtypes[1] is BF16
    # An update of some names need not have one for each pattern again.
    assert flattener.prepare({"b.c": torch.ones(1)}).layout.dtypes[0] is BF16
