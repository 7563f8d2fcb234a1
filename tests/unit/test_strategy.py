"""WeightStrategy: the names and semantics of the classic API, without its faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.strategy import WeightStrategy, get_strategy
from tests.tensors._models import Everything, Stateful, Tied, all_bits

FORMS = ["tensordict", "state_dict"]


def test_extract_is_live_and_has_the_names_of_its_form() -> None:
    model = Everything(1.0, extra=3)
    weights = WeightStrategy().extract_weights(model)
    assert isinstance(weights, TensorDict)
    assert weights["body", "0", "weight"] is model.body[0].weight
    plain = WeightStrategy("state_dict").extract_weights(model)
    assert type(plain) is dict
    assert list(plain) == list(model.state_dict())


@pytest.mark.parametrize("form", FORMS)
def test_extract_passes_weights_through(form: Any) -> None:
    strategy = WeightStrategy(form)
    assert strategy.extract_weights(None) is None
    td, flat = TensorDict({"a": {"b": torch.ones(1)}}), {"a.b": torch.ones(1)}
    from_td, from_dict = strategy.extract_weights(td), strategy.extract_weights(flat)
    assert (from_td is td, from_dict is flat) == (form == "tensordict", form == "state_dict")
    assert from_dict["a.b"] is flat["a.b"]
    assert from_td[("a", "b") if form == "tensordict" else "a.b"] is td["a", "b"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", [3, "policy", torch.ones(1), [1]])
def test_extract_of_anything_else_is_refused(form: Any, source: Any) -> None:
    with pytest.raises(ConfigError, match=r"supported: torch\.nn\.Module, TensorDict"):
        WeightStrategy(form).extract_weights(source)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_round_trip(form: Any, inplace: bool) -> None:
    strategy = WeightStrategy(form)
    source, target = Everything(1.0, {"n": 3, "t": (1, 2)}), Everything(2.0, "old")
    if form == "state_dict":
        source.hidden = target.hidden.clone()
    kept = target.body[0].weight
    strategy.apply_weights(target, strategy.extract_weights(source), inplace=inplace)
    assert all_bits(target) == all_bits(source)
    assert target.extra == target.child.extra == {"n": 3, "t": (1, 2)}
    assert (target.body[0].weight is kept) is inplace
    assert target.body[0].weight.requires_grad
    assert not target.frozen.requires_grad


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("meta", [False, True])
def test_memory_is_never_shared_with_the_weights(form: Any, inplace: bool, meta: bool) -> None:
    strategy = WeightStrategy(form)
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3, device="meta" if meta else None)
    strategy.apply_weights(target, strategy.extract_weights(source), inplace=inplace)
    before = all_bits(target)
    assert before == all_bits(source)
    with torch.no_grad():
        for tensor in [*source.parameters(), *source.buffers()]:
            tensor.add_(1)
    assert all_bits(target) == before


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_stay_tied(form: Any, inplace: bool, device: str) -> None:
    strategy = WeightStrategy(form)
    source, target = Tied(), Tied(device)
    strategy.apply_weights(target, strategy.extract_weights(source), inplace=inplace)
    assert target.head.weight is target.embed.weight
    assert all_bits(target) == all_bits(source)


@pytest.mark.parametrize("inplace", [True, False])
def test_weights_may_lie_in_memory_of_the_destination(inplace: bool) -> None:
    strategy = WeightStrategy()
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.zeros(2)})
    strategy.apply_weights(model, {"a": model["b"], "b": model["a"]}, inplace=inplace)
    for _ in range(2):
        assert [*model["a"].tolist(), *model["b"].tolist()] == [0, 0, 1, 1]
        strategy.apply_weights(model, strategy.extract_weights(model))


def test_state_dict_into_tensordict_and_back() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    td = TensorDict.from_module(other).detach().clone()
    strategy = WeightStrategy()
    strategy.apply_weights(td, model.state_dict())
    strategy.apply_weights(other, td)
    assert all_bits(other) == all_bits(model)
    state = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    strategy.apply_weights(state, model.state_dict())
    assert torch.equal(state["weight"], model.weight)


def test_tensordict_out_of_place_gets_new_tensors() -> None:
    td = TensorDict({"a": torch.zeros(2)})
    held = td["a"]
    weights = {"a": torch.ones(2)}
    WeightStrategy().apply_weights(td, weights, inplace=False)
    assert held.tolist() == [0, 0]
    assert td["a"].tolist() == [1, 1]
    assert td["a"].data_ptr() != weights["a"].data_ptr()


def test_extra_state_as_other_libraries_store_it() -> None:
    """A TensorDict under the root key stands for a flat dict of tensors."""
    weights = TensorDict({"__extra_state__": {"a": {"b": torch.ones(2)}}})
    target = Stateful()
    for _ in range(2):
        WeightStrategy().apply_weights(target, weights)
        assert list(target.extra) == ["a.b"]
        assert target.extra["a.b"].tolist() == [1, 1]
    assert "__extra_state__" in weights.keys()


def test_root_extra_state_has_its_own_key() -> None:
    weights = WeightStrategy().extract_weights(nn.ModuleDict({"x": Stateful({"a": 1})}))
    assert weights["x", "_extra_state"] == {"a": 1}
    weights = WeightStrategy().extract_weights(Stateful({"a": torch.ones(1)}))
    assert weights["__extra_state__"]["a"].tolist() == [1]


def test_apply_none_does_nothing() -> None:
    model = nn.Linear(1, 1)
    before = all_bits(model)
    WeightStrategy().apply_weights(model, None)
    assert all_bits(model) == before


@pytest.mark.parametrize(
    ("target", "weights", "inplace", "text"),
    [
        (nn.Linear(1, 1), [torch.ones(1)], True, "Unsupported weights type: .*Must be dict or Te"),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, False, "Cannot update state_dict out of pla"),
        (None, {"a": torch.ones(1)}, True, "non-dict, non-td, non-Module destination"),
    ],
)
def test_refusals(target: Any, weights: Any, inplace: bool, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        WeightStrategy().apply_weights(target, weights, inplace=inplace)


@pytest.mark.parametrize("inplace", [True, False])
def test_what_does_not_fit_changes_nothing(inplace: bool) -> None:
    model = nn.Linear(2, 2)
    before = all_bits(model)
    for weights in (
        {"weight": torch.ones(2, 2)},
        {"weight": torch.ones(2, 2), "bias": torch.ones(2), "more": torch.ones(1)},
        {"weight": torch.ones(2, 2), "bias": torch.ones(1)},
        {"weight": torch.ones(2, 2), "bias": torch.ones(2).double()},
    ):
        with pytest.raises(ManifestMismatch):
            WeightStrategy().apply_weights(model, weights, inplace=inplace)
        assert all_bits(model) == before
    loose = {"weight": torch.ones(2, 2).double(), "more": torch.ones(1)}
    WeightStrategy().apply_weights(model, loose, inplace=inplace, strict=False)
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    assert model.weight.dtype is torch.float32


def test_get_strategy() -> None:
    strategy = WeightStrategy("state_dict")
    assert get_strategy(strategy) is strategy
    assert [get_strategy(form).extract_as for form in FORMS] == FORMS
    for make, text in ((get_strategy, "Unknown strategy: x"), (WeightStrategy, "extract_as must")):
        with pytest.raises(ConfigError, match=text):
            make("x")
