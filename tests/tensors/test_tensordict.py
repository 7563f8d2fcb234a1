"""What counts as a TensorDict, without tensordict and with it; stacks of values in them."""

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

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Target, collect
from aiosync.tensors import _tensordict as asked
from tests.tensors._models import packed, send

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


@tensorclass
class _Noted:
    first: torch.Tensor
    note: str


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


def _noted(fill: float, *notes: Any) -> Any:
    """A TensorDict with a stack of values at two levels, beside one value for all."""
    inner = TensorDict({"b": torch.full((2,), fill), "note": NonTensorStack(*notes)}, [2])
    one = NonTensorData(f"one {fill}", batch_size=[2])
    items = {"a": torch.full((2, 3), fill), "note": NonTensorStack(*notes), "one": one, "in": inner}
    return TensorDict(items, batch_size=[2])


def _lazy(fill: float, *notes: Any) -> Any:
    return LazyStackedTensorDict(
        *(TensorDict({"a": torch.full((2,), fill), "note": NonTensorData(note)}) for note in notes)
    )


def _stacked(fill: float, *notes: Any) -> Any:
    return torch.stack([*_lazy(fill, *notes).tensordicts])


def _read(td: Any) -> str:
    """What is read of each element, and of all."""
    return repr(([part.to_dict() for part in td.unbind(0)], td.to_dict()))


@pytest.mark.parametrize("copy", [False, True], ids=["flip", "copy"])
@pytest.mark.parametrize("build", [_noted, _lazy, _stacked])
def test_a_stack_of_values_travels(build: Any, copy: bool) -> None:
    target = build(0.0, "old", "older")
    for fill, notes in ((1.0, ("x", "y")), (2.0, ("x", "x")), (3.0, ({"n": [1]}, None))):
        source = build(fill, *notes)
        send(source, target, copy=copy)
        assert _read(target) == _read(source)


@pytest.mark.parametrize(
    "stack",
    [
        NonTensorStack(NonTensorStack("a", "b", "c"), NonTensorStack("d", "e", "f")),
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"), stack_dim=1),
        NonTensorStack(NonTensorData("a", batch_size=[2]), NonTensorStack("b", "c")),
        NonTensorStack(["a", "b"], ["c"]),
    ],
)
@pytest.mark.parametrize("old", [NonTensorStack("x", "y"), NonTensorData("x", batch_size=[2])])
def test_stacks_of_any_form(stack: Any, old: Any) -> None:
    source = TensorDict({"a": torch.ones(2), "note": stack}, batch_size=[2])
    target = TensorDict({"a": torch.zeros(2), "note": old}, batch_size=[2])
    send(source, target, copy=True)
    assert repr(target.to_dict()) == repr(source.to_dict())
    assert target.get("note").batch_size == stack.batch_size


def test_tensors_in_a_stack_of_values() -> None:
    source, target = _noted(1.0, {"t": torch.ones(1)}, 2), _noted(0.0, 1, 2)
    send(source, target, copy=False)
    assert _read(target) == _read(source)
    assert "note.0.t" in [leaf.name for leaf in collect(source).leaves]


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
@pytest.mark.parametrize("build", [_noted, _lazy, _stacked])
def test_apply_weights_with_a_stack_of_values(build: Any, form: Any) -> None:
    source, target = build(1.0, "x", "y"), build(0.0, "old", "older")
    strategy = WeightStrategy(form)
    strategy.apply_weights(target, strategy.extract_weights(source))
    assert _read(target) == _read(source)


def test_a_dict_gets_a_list() -> None:
    target = {"a": torch.zeros(2), "note": None}
    send(TensorDict({"a": torch.ones(2), "note": NonTensorStack("x", "y")}, [2]), target, copy=True)
    assert target["note"] == ["x", "y"]


def test_a_stack_of_values_that_only_one_side_has_is_refused() -> None:
    noted, plain = _noted(1.0, "x", "y"), _noted(0.0, "x", "y")
    del plain["note"], plain["in", "note"]
    with pytest.raises(ManifestMismatch) as caught:
        send(noted, plain.clone(), copy=True)
    assert sorted(caught.value.unexpected) == ["in.note", "note"]
    with pytest.raises(ManifestMismatch) as caught:
        send(plain, noted, copy=True)
    assert sorted(caught.value.missing) == ["in.note", "note"]


def test_what_cannot_travel_in_a_stack_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'note\.1' cannot travel: it is a builtins\.object"):
        collect(_noted(1.0, "x", object()))


@pytest.mark.parametrize("build", [_noted, _lazy, _stacked])
def test_a_stack_of_values_is_put_back(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = build(1.0, "x", "y"), build(0.0, "old", "older")
    for td in (source, target):
        td.set_non_tensor("z", "x")
    layout, flat, values = packed(source)
    assert list(values)[-1] == "z"
    before, kind = _read(target), type(target)
    seen = []

    def fail(td: Any, key: Any, value: Any) -> None:
        seen.append(td["note"])
        raise RuntimeError("no")

    monkeypatch.setattr(kind, "set_non_tensor", fail)
    with pytest.raises(RuntimeError, match="no"):
        Target(target).apply_(layout, flat, values | {"z": "new"}, copy=True)
    assert seen[0] == ["x", "y"]
    assert _read(target) == before


def test_a_stack_of_values_in_a_tensorclass() -> None:
    def build(*notes: str) -> Any:
        return torch.stack([_Noted(torch.zeros(1), note, batch_size=[]) for note in notes])

    source, target = build("x", "y"), build("old", "older")
    layout, flat, values = packed({"in": source})
    Target({"in": target}).apply_(layout, flat, values, copy=True)
    assert [part.note for part in target.unbind(0)] == ["x", "y"]
