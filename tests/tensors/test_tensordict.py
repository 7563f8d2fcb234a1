"""What counts as a TensorDict, without tensordict and with it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    tensorclass,
)

from aiosync.tensors import _tensordict as asked

QUESTIONS = [
    asked.is_tensordict,
    asked.is_plain_tensordict,
    asked.is_tensordict_params,
    asked.is_tensor_collection,
    asked.is_non_tensor,
    asked.is_non_tensor_stack,
    asked.makes_anew,
]


@tensorclass
class _Pair:
    first: torch.Tensor


def _values() -> dict[str, tuple[Any, set[Any]]]:
    plain = TensorDict({"a": torch.zeros(2)}, batch_size=[])
    collection = {asked.is_tensor_collection}
    anything = collection | {asked.is_tensordict}
    wrapped = collection | {asked.is_non_tensor}
    return {
        "plain": (plain, anything | {asked.is_plain_tensordict}),
        "params": (TensorDictParams(plain.clone()), anything | {asked.is_tensordict_params}),
        "tensorclass": (_Pair(torch.zeros(2), batch_size=[]), collection),
        "value": (NonTensorData("text"), wrapped),
        "values": (
            NonTensorStack(NonTensorData("a"), NonTensorData("b")),
            anything | wrapped | {asked.is_non_tensor_stack},
        ),
        "lazy": (LazyStackedTensorDict(plain, plain), anything | {asked.makes_anew}),
        "dict": ({"a": torch.zeros(2)}, set()),
        "tensor": (torch.zeros(2), set()),
        "module": (torch.nn.Linear(1, 1), set()),
        "nothing": (None, set()),
    }


@pytest.mark.parametrize("name", list(_values()))
def test_what_is_what(name: str) -> None:
    value, expected = _values()[name]
    assert {question for question in QUESTIONS if question(value)} == expected


@pytest.mark.parametrize("question", QUESTIONS)
def test_before_the_library_is_imported_nothing_is(
    question: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "_library", None)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "tensordict")
        assert not question(torch.zeros(1))
        assert asked._library is None
        assert "tensordict" not in sys.modules
    assert not question(torch.zeros(1))
    assert asked._library is sys.modules["tensordict"]
