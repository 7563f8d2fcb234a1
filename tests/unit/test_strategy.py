"""WeightStrategy: the names and semantics of the classic API, without its faults."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.strategy import WeightStrategy
from tests.tensors._models import Everything, all_bits


def test_extract_is_live_and_has_the_names_of_its_form() -> None:
    model = Everything(1.0, extra=3)
    weights = WeightStrategy().extract_weights(model)
    assert isinstance(weights, TensorDict)
    assert weights["body", "0", "weight"] is model.body[0].weight
    plain = WeightStrategy("state_dict").extract_weights(model)
    assert type(plain) is dict
    assert list(plain) == list(model.state_dict())


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
            # A note may follow this text.
            "got .3, 2..*was changed.(\\n|$)",
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
    # ManifestMismatch is a KeyError, as in TorchRL, and a ValueError, too.
    with pytest.raises(KeyError, match=says) as caught:
        WeightStrategy().apply_weights(target, weights)
    assert isinstance(caught.value, ManifestMismatch)
    assert says_not not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert all_bits(target) == before
