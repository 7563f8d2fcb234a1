"""``TensorDictParams`` whose TensorDict and whose tables as a module hold different tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from aiosync.tensors import Target, lacks_memory
from tests.tensors._models import Refuses, send


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


WAYS = [_meta_as_torchrl, _meta_at_once, _meta_all_parameters, _others]


def _params(model: Model) -> dict[str, torch.Tensor]:
    """The parameters in the tables of the module, not those of its TensorDict."""
    return dict(model.params.named_parameters(remove_duplicate=False))


def _check_tables(model: Model) -> None:
    params, buffers = _params(model), dict(model.params.named_buffers())
    assert buffers.keys() == {"buffer", "steps"}
    for name, tensor in (params | buffers).items():
        assert model.params.get(tuple(name.split("."))) is tensor, name
        assert isinstance(tensor, nn.Parameter) is (name in params)


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
        buffers.append(send(Model(value), receiver, copy=copy))
        assert set(model()) == {value}
        _check_tables(model)
        assert not lacks_memory(model)
        assert list(model.state_dict()) == names
    if split is not _others:  # which are separate
        assert _params(model)["tied"] is _params(model)["inner.tied"]
    for flat in buffers:
        receiver.detach_(flat)
        flat.array[:] = 0xFF
    assert set(model()) == {4}


def test_a_source_sends_what_its_forward_computes_with() -> None:
    source, target = Model(1.0), Model(2.0)
    _others(source)
    send(source, target, copy=False)
    assert set(target()) == {77}


def test_failing_puts_both_tables_back() -> None:
    source, target = Model(1.0), Model(9.0)
    source.last, target.last = Refuses(2.0, refuse=False), Refuses(1.0, refuse=True)
    _meta_as_torchrl(target)
    own = _params(target)
    with pytest.raises(RuntimeError, match="refused"):
        send(source, target, copy=False)
    assert lacks_memory(target)
    assert all(_params(target)[name] is tensor for name, tensor in own.items())
    target.last.refuse = False
    send(source, target, copy=False)
    assert set(target()) == {1}
