"""``TensorDictParams`` whose TensorDict and whose tables as a module hold different tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from aiosync.tensors import FlatBuffer, Target, lacks_memory
from aiosync.tensors import _changes as changes
from tests.tensors._models import packed


class Model(nn.Module):
    """Answers with the tensors that a forward computes with."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        tied = nn.Parameter(torch.full((2,), value))
        tensors = {
            "inner": {"weight": nn.Parameter(torch.full((3,), value)), "tied": tied},
            "tied": tied,
            "frozen": nn.Parameter(torch.full((2,), value), requires_grad=False),
            "buffer": torch.full((2,), value),
            "steps": torch.full((1,), int(value)),
        }
        self.params = TensorDictParams(TensorDict(tensors), no_convert=True)
        self.plain = nn.Linear(1, 1)
        nn.init.constant_(self.plain.weight, value)
        nn.init.constant_(self.plain.bias, value)

    def forward(self) -> list[float]:
        leaves = self.params.items(include_nested=True, leaves_only=True)
        return [number for _, leaf in leaves for number in leaf.tolist()]


def _meta_as_torchrl(model: nn.Module) -> None:
    def meta(tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.detach().to("meta")
        is_param = isinstance(tensor, nn.Parameter)
        return nn.Parameter(data, requires_grad=False) if is_param else data

    weights = TensorDict.from_module(model, as_module=True)
    weights.apply(meta, device="meta", filter_empty=False).to_module(model)


def _meta_at_once(model: nn.Module) -> None:
    TensorDict.from_module(model).select("params").to("meta").to_module(model)


def _meta_all_parameters(model: nn.Module) -> None:
    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(tensor.detach().to("meta"), requires_grad=False)

    TensorDict.from_module(model).apply(meta, device="meta").to_module(model)


def _others(model: nn.Module) -> None:
    def other(tensor: torch.Tensor) -> torch.Tensor:
        new = torch.full_like(tensor, 77, requires_grad=False)
        return nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new

    TensorDict.from_module(model).apply(other).to_module(model)


def _apply(source: nn.Module, receiver: Target, *, copy: bool = False) -> FlatBuffer:
    layout, flat, values = packed(source)
    receiver.apply_(layout, flat, values, copy=copy)
    return flat


WAYS = [_meta_as_torchrl, _meta_at_once, _meta_all_parameters, _others]


def _check_tables(params: TensorDictParams) -> None:
    tables = {**params._parameters, **params._buffers}
    assert {name.split(".")[-1] for name in params._buffers} == {"buffer", "steps"}
    for name, tensor in tables.items():
        assert params._param_td[tuple(name.split("."))] is tensor, name
        assert isinstance(tensor, nn.Parameter) is (name in params._parameters)


@pytest.mark.parametrize("copy", [False, True], ids=["flip", "copy"])
@pytest.mark.parametrize("split", WAYS)
def test_both_tables_get_the_weights(split: Any, copy: bool) -> None:
    model = Model(9.0)
    names = list(model.state_dict())
    split(model)
    assert lacks_memory(model) is (split is not _others)
    receiver = Target(model)
    buffers = []
    for value in (1.0, 2.0, 3.0, 4.0):
        source = Model(value)
        buffers.append(_apply(source, receiver, copy=copy))
        assert model() == source()
        _check_tables(model.params)
        assert not lacks_memory(model)
        assert list(model.state_dict()) == names
    if split is not _others:  # which are separate
        params = model.params._parameters
        assert params["tied"] is params["inner.tied"]
    for flat in buffers:
        receiver.detach_(flat)
    for flat in buffers:
        flat.array[:] = 0xFF
    assert model() == Model(4.0)()


def test_a_source_sends_what_its_forward_computes_with() -> None:
    source, target = Model(1.0), Model(2.0)
    _others(source)
    _apply(source, Target(target))
    assert set(target()) == {77}


def test_a_swap_after_the_first_update_is_seen() -> None:
    target = Model(9.0)
    receiver = Target(target)
    for value in (1.0, 2.0, 3.0):
        _apply(Model(value), receiver)
        assert set(target()) == {value}
        _check_tables(target.params)
        _meta_as_torchrl(target)


def test_failing_puts_both_tables_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Model(9.0)
    _meta_as_torchrl(target)
    own = dict(target.params._parameters)

    put, calls = changes.put, []

    def put_or_fail(*args: Any) -> None:
        put(*args)
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(changes, "put", put_or_fail)
        with pytest.raises(RuntimeError, match="no"):
            _apply(Model(1.0), Target(target))
    assert lacks_memory(target)
    assert all(target.params._parameters[name] is tensor for name, tensor in own.items())
    _apply(Model(1.0), Target(target))
    assert set(target()) == {1}


def test_tensors_of_a_call_are_not_kept() -> None:
    """``data.to_module()`` puts plain tensors in the parameters' places until the call ends."""
    target = Model(9.0)
    receiver = Target(target)
    _apply(Model(1.0), receiver)
    with TensorDict.from_module(target).data.clone().to_module(target):
        _apply(Model(2.0), receiver)
        assert isinstance(target.params._parameters["inner.weight"], nn.Parameter)
    assert target.params["inner", "weight"].tolist() == [2, 2, 2]


def test_what_gets_no_weights_stays_as_it_is() -> None:
    target = Model(9.0)
    _meta_as_torchrl(target)
    receiver = Target(target, strict=False)
    _apply(nn.ModuleDict({"plain": Model(1.0).plain}), receiver)
    assert target.plain.weight.item() == 1
    assert target.params["inner", "weight"].is_meta
    assert target.params._parameters["inner.weight"].tolist() == [9, 9, 9]


def test_dotted_keys() -> None:
    source, target = Model(1.0), Model(9.0)
    for model in (source, target):
        flat = model.params._param_td.flatten_keys(".")
        model.params = TensorDictParams(flat, no_convert=True)
    _meta_as_torchrl(target)
    _apply(source, Target(target))
    assert set(target()) == {1}
    assert target.params["inner.weight"] is target.params._parameters["inner.weight"]


def test_one_inside_another() -> None:
    source, target = Model(1.0), Model(9.0)
    for model in (source, target):
        model.outer = TensorDictParams(TensorDict({"inside": model.params}), no_convert=True)
    _meta_as_torchrl(target)
    receiver = Target(target)
    _apply(source, receiver)
    _apply(source, receiver)
    assert set(target()) == {1}
    assert target.outer["inside", "inner", "weight"].tolist() == [1, 1, 1]
