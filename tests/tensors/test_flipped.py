"""A module whose parameters are views of a flat buffer is still an ordinary module."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from aiosync.tensors import FlatBuffer, Target
from aiosync.tensors.buffer import in_flat_memory
from tests.tensors._models import Everything, Tied, all_bits, packed, send


def flip(model: nn.Module, source: nn.Module) -> FlatBuffer:
    return send(source, model, copy=False)


def _independent(clone: nn.Module, model: nn.Module) -> None:
    assert all_bits(clone) == all_bits(model)
    before = all_bits(model)
    assert not any(in_flat_memory(tensor) for tensor in clone.parameters())
    with torch.no_grad():
        for tensor in [*clone.parameters(), *clone.buffers()]:
            tensor.add_(1)
    assert all_bits(model) == before


def test_deepcopy() -> None:
    model = Everything(1.0)
    flip(model, Everything(2.0))
    _independent(copy.deepcopy(model), model)


def test_torch_save_and_load_of_a_state_dict() -> None:
    model, clone = Everything(1.0), Everything(0.0)
    flip(model, Everything(2.0))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    clone.load_state_dict(torch.load(file, weights_only=True))
    clone.hidden = model.hidden.clone()
    _independent(clone, model)


def test_torch_save_and_load_of_a_module() -> None:
    model = Tied()
    flip(model, Tied())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    clone = torch.load(file, weights_only=False)
    assert clone.head.weight is clone.embed.weight
    _independent(clone, model)


def test_pickle_is_small() -> None:
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(30))
    plain = len(pickle.dumps(model))
    flip(model, nn.ModuleList(nn.Linear(32, 32) for _ in range(30)))
    data = pickle.dumps(model)
    assert len(data) < 1.1 * plain  # a view of one big storage would save the whole of it each
    _independent(pickle.loads(data), model)


def test_load_state_dict_writes_to_the_module() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    flip(model, nn.Linear(2, 2))
    model.load_state_dict(other.state_dict())
    assert all_bits(model) == all_bits(other)


def test_cast_and_back() -> None:
    source, model = nn.Linear(2, 2), nn.Linear(2, 2)
    flat = flip(model, source)
    model.to(torch.float64)
    assert flat.exclusive()
    assert model.weight.dtype is torch.float64
    assert all_bits(model) == all_bits(source.double())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_module_sees_new_weights_without_compiling_again(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("tqdm"):  # the compiler shows its progress with it, in a thread
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    model, source = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Sequential(nn.Linear(3, 3))
    calls = []

    def count(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(model, backend=count)
    inputs = torch.ones(1, 3)
    receiver = Target(compiled)
    with torch.no_grad():
        compiled(inputs)
        held = []
        for _ in range(3):
            source[0].weight.add_(1)
            layout, flat, values = packed(source)
            held.append(flat)
            receiver.apply_(layout, flat, values, copy=False)
            assert torch.equal(compiled(inputs), source(inputs).relu())
    assert len(calls) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_compute_with_the_new_weights(kind: type[nn.LSTM]) -> None:
    source, model = kind(3, 4, num_layers=2), kind(3, 4, num_layers=2)
    flip(model, source)
    inputs = torch.randn(5, 2, 3)
    assert torch.equal(model(inputs)[0], source(inputs)[0])
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))


def test_attention_computes_with_the_new_weights() -> None:
    source = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    flip(model, source)
    inputs = torch.randn(2, 5, 8)
    with torch.no_grad():
        assert torch.equal(model(inputs), source(inputs))


def test_parametrized_module() -> None:
    def build() -> nn.Module:
        return torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    source, model = build(), build()
    flip(model, source)
    inputs = torch.randn(2, 3)
    assert torch.equal(model(inputs), source(inputs))


def test_training_a_flipped_module() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flip(model, nn.Linear(2, 1))
    before = all_bits(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert all_bits(model) != before
    assert in_flat_memory(model.weight)


def test_a_flipped_module_is_a_source() -> None:
    first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    flip(second, first)
    flip(third, second)
    assert all_bits(third) == all_bits(first)
    assert third.weight.data_ptr() != second.weight.data_ptr()


def test_functional_call() -> None:
    source, model = nn.Linear(2, 2), nn.Linear(2, 2)
    flip(model, source)
    inputs = torch.ones(1, 2)
    state = {"weight": torch.zeros(2, 2), "bias": torch.ones(2)}
    assert torch.func.functional_call(model, state, (inputs,)).tolist() == [[1, 1]]
    assert torch.equal(model(inputs), source(inputs))
