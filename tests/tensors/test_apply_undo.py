"""When applying fails in the middle, every tensor is bit for bit what it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from aiosync.errors import ManifestMismatch
from aiosync.tensors import FlatBuffer, Target
from tests.tensors._models import (
    Everything,
    Fragile,
    FragileParameter,
    Quantized,
    Refuses,
    all_bits,
    packed,
    send,
)


@pytest.fixture(params=[False, True], ids=["flip", "copy"])
def copy(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def failing() -> Iterator[type[Fragile]]:
    yield FragileParameter
    FragileParameter.fail = False


def objects(module: nn.Module) -> list[Any]:
    return [(id(t), t.data_ptr()) for t in [*module.parameters(), *module.buffers()]]


@pytest.mark.parametrize("flipped_before", [False, True])
def test_extra_state_that_is_refused(copy: bool, flipped_before: bool) -> None:
    target = Refuses(1.0, refuse=True)
    receiver = Target(target)
    old: FlatBuffer | None = None
    if flipped_before:
        layout, old, values = packed(Refuses(1.0, refuse=True))
        receiver.apply_(layout, old, values, copy=False)
    before, places = all_bits(target), objects(target)
    layout, flat, values = packed(Refuses(2.0, refuse=False))
    with pytest.raises(RuntimeError, match="this state is refused"):
        receiver.apply_(layout, flat, values, copy=copy)
    assert all_bits(target) == before
    assert target.extra == 1.0
    if not (copy and flipped_before):
        assert objects(target) == places
    assert flat.exclusive()
    target.refuse = False
    receiver.apply_(layout, flat, values, copy=copy)
    assert target.extra == 2.0
    assert target.first.weight.sum() == 18


def test_an_earlier_extra_state_is_taken_back(copy: bool) -> None:
    def build(fill: float, refuse: bool) -> nn.Module:
        return nn.ModuleDict({"a": Refuses(fill, refuse=False), "b": Refuses(fill, refuse=refuse)})

    target = build(1.0, True)
    before = all_bits(target)
    with pytest.raises(RuntimeError, match="refused"):
        send(build(2.0, False), target, copy=copy)
    assert all_bits(target) == before
    assert target["a"].extra == 1.0


def test_meta_parameters_are_meta_again(copy: bool) -> None:
    target = Refuses(1.0, refuse=True)
    target.first.to("meta")
    weight = target.first.weight
    with pytest.raises(RuntimeError, match="refused"):
        send(Refuses(2.0, refuse=False), target, copy=copy)
    assert target.first.weight is weight
    assert weight.is_meta
    assert target.scale.tolist() == [1, 1, 1]


def test_a_copy_that_fails_in_the_middle(copy: bool, failing: type[Fragile]) -> None:
    def build(fill: float) -> nn.Module:
        model = nn.Module()
        model.register_buffer("a", torch.full((3,), fill).as_subclass(Fragile))
        model.b = nn.Parameter(torch.full((3,), fill))
        model.c = nn.Linear(2, 2)
        model.d = torch.Tensor._make_subclass(failing, torch.full((3,), fill), True)
        model.e = nn.Parameter(torch.full((300, 300), fill))
        return model

    target = build(1.0)
    before, places = all_bits(target), objects(target)
    layout, flat, values = packed({k: v.clone() for k, v in build(2.0).state_dict().items()})
    failing.fail = True
    with pytest.raises(ManifestMismatch, match=r"d: .*FragileParameter.*cannot be w") as caught:
        Target(target).apply_(layout, flat, values, copy=copy)
    assert type(caught.value.__cause__) is RuntimeError
    assert all_bits(target) == before
    assert objects(target) == places
    assert flat.exclusive()
    failing.fail = False
    Target(target).apply_(layout, flat, values, copy=copy)
    assert all_bits(target) != before


def quantized(fill: float) -> nn.Module:
    """Its plain tensors come before and after the one that cannot be written."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    model[1].weight = nn.Parameter(Quantized(torch.full((2, 2), fill)), requires_grad=False)
    return model


def contents(model: nn.Module) -> list[Any]:
    return [getattr(tensor, "qdata", tensor).tolist() for tensor in model.parameters()]


@pytest.mark.parametrize("strict", [False, True])
def test_a_quantized_tensor_is_named_and_what_to_do(copy: bool, strict: bool) -> None:
    target = quantized(1.0)
    before, places = contents(target), list(map(id, target.parameters()))
    sent = {name: torch.full(tensor.shape, 2.0) for name, tensor in target.named_parameters()}
    receiver = Target(target, strict=strict)
    for _ in range(2):
        with pytest.raises(ManifestMismatch, match=r"load= instead of model=") as caught:
            layout, flat, values = packed(sent)
            receiver.apply_(layout, flat, values, copy=copy)
        [(name, why)] = caught.value.mismatched.items()
        assert name == "1.weight"
        assert "tests.tensors._models.Quantized" in why
        assert "AttributeError: " in why
        assert type(caught.value.__cause__) is AttributeError
        assert not hasattr(caught.value, "__notes__")
        assert contents(target) == before
        assert list(map(id, target.parameters())) == places
        assert flat.exclusive()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_quantized_tensor_is_not_replaced_either(inplace: bool) -> None:
    target = quantized(1.0)
    before = contents(target)
    layout, flat, values = packed(
        {k: torch.full(v.shape, 2.0) for k, v in target.named_parameters()}
    )
    with pytest.raises(ManifestMismatch, match=r"1\.weight: the target is a .*Quantized"):
        Target(target).apply_tensors(layout, flat.views(layout), values, inplace=inplace)
    assert contents(target) == before


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_ends_is_no_fault_of_a_subclass(
    copy: bool, failing: type[Fragile], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = nn.Module()
    target.a = torch.Tensor._make_subclass(failing, torch.zeros(3), True)

    def fail(*args: Any) -> None:
        raise error("none left")

    monkeypatch.setattr("aiosync.tensors._changes.back_up", fail)
    with pytest.raises(error, match="none left"):
        send({"a": torch.ones(3)}, target, copy=copy)


def test_values_of_a_dict_are_taken_back(copy: bool) -> None:
    layout, flat, _ = packed({"w": torch.ones(2)})
    target = {"w": torch.zeros(2), "x": 1, "y": 2}
    values = {"x": 10, "y": {"__aiosync__": "unknown"}}
    with pytest.raises(ValueError, match="unknown marker"):
        Target(target).apply_(layout, flat, values, copy=copy)
    assert target["x"] == 1
    assert target["w"].tolist() == [0, 0]


def test_an_undo_that_fails_is_told_and_the_tensors_are_restored(copy: bool) -> None:
    class Stubborn(Refuses):
        def set_extra_state(self, state: float) -> None:
            raise RuntimeError(f"refused {state}")

    target = Stubborn(1.0, refuse=True)
    before = all_bits(target)
    with pytest.raises(RuntimeError, match="refused 2") as caught:
        send(Refuses(2.0, refuse=False), target, copy=copy)
    assert "refused 1" in caught.value.__notes__[0]
    assert all_bits(target) == before


def test_the_next_update_is_applied_after_a_failure(copy: bool) -> None:
    source, target = Everything(2.0), Everything(1.0)
    receiver = Target(target)
    wrong = packed(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="missing"):
        receiver.apply_(*wrong, copy=copy)
    layout, flat, values = packed(source)
    receiver.apply_(layout, flat, values, copy=copy)
    assert all_bits(target) == all_bits(source)
