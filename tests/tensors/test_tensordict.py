"""What counts as a TensorDict, without tensordict and with it; stacks of values in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.strategy import WeightStrategy
from aiosync.tensors import collect
from tests.tensors._models import send


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
@pytest.mark.parametrize("build", [_noted, _stacked])
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
@pytest.mark.parametrize("build", [_noted, _stacked])
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
