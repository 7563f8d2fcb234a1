"""Values in a TensorDict: one for all of its elements travels, a stack of values is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from aiosync import WeightStrategy
from aiosync.errors import ConfigError
from aiosync.tensors import collect
from tests.tensors._models import send


def _noted(fill: float, note: Any) -> TensorDict:
    inner = TensorDict({"b": torch.full((2,), fill)}, [2])
    inner.set_non_tensor("note", note)
    return TensorDict({"a": torch.full((2, 3), fill), "in": inner}, batch_size=[2])


@pytest.mark.parametrize("copy", [False, True], ids=["flip", "copy"])
@pytest.mark.parametrize("note", ["x", {"n": [1, (2, None)]}, {"t": torch.ones(1)}])
def test_a_value_for_all_elements_travels(note: Any, copy: bool) -> None:
    source, target = _noted(1.0, note), _noted(0.0, "old")
    send(source, target, copy=copy)
    assert repr(target.to_dict()) == repr(source.to_dict())
    weights = WeightStrategy().extract_weights(source)
    again = _noted(0.0, "old")
    WeightStrategy().apply_weights(again, weights)
    assert repr(again.to_dict()) == repr(source.to_dict())


@pytest.mark.parametrize(
    "stack",
    [
        NonTensorStack("x", "y"),
        NonTensorStack("x", "x"),
        NonTensorStack(NonTensorData("a", batch_size=[2]), NonTensorStack("b", "c")),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_stack_of_values_is_refused_by_name(stack: Any, inside: bool) -> None:
    source = TensorDict({"a": torch.ones(2), "note": stack}, batch_size=[2])
    with pytest.raises(ConfigError, match=r"note' cannot travel: it is a .*NonTensorStack"):
        collect({"in": source} if inside else source)


def test_a_lazy_stack_of_values_is_refused_by_name() -> None:
    parts = (TensorDict({"a": torch.ones(2), "note": NonTensorData(note)}) for note in "xy")
    with pytest.raises(ConfigError, match="'note' cannot travel"):
        collect(LazyStackedTensorDict(*parts))
