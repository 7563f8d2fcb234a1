"""WeightStrategy: the names and semantics of the classic API, without its faults."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.strategy import WeightStrategy, get_strategy
from tests.tensors._models import Everything, Stateful, all_bits

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


@pytest.mark.parametrize(
    ("weights", "says", "says_not"),
    [
        ({"bias": torch.ones(2)}, "missing: weight.*With strict=False", "tensor"),
        (
            {"weight": torch.ones(2, 2).double(), "bias": torch.ones(2)},
            "With strict=False",
            "shape",
        ),
        (
            {"weight": torch.ones(3, 2), "bias": torch.ones(2)},
            "got .3, 2..*was changed.(\\n|$)",  # a note follows
            "strict",
        ),
        (
            {"weight": [[1.0] * 2] * 2, "bias": [0.0, 0.0]},
            "weight: expected a tensor, got a list",
            "miss",
        ),
    ],
)
def test_a_misfit_says_what_it_is_and_what_helps(weights: Any, says: str, says_not: str) -> None:
    target = nn.Linear(2, 2)
    before = all_bits(target)
    with pytest.raises(KeyError, match=says) as caught:  # as in TorchRL; and a ValueError
        WeightStrategy().apply_weights(target, weights)
    assert isinstance(caught.value, ManifestMismatch)
    assert says_not not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert all_bits(target) == before


def test_get_strategy() -> None:
    strategy = WeightStrategy("state_dict")
    assert get_strategy(strategy) is strategy
    assert [get_strategy(form).extract_as for form in FORMS] == FORMS
    for make, text in ((get_strategy, "Unknown strategy: x"), (WeightStrategy, "extract_as must")):
        with pytest.raises(ConfigError, match=text):
            make("x")
