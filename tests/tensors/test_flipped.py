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
from tests.tensors._models import Everything, Tied, add_one, all_bits, send


def flip(model: nn.Module, source: nn.Module) -> FlatBuffer:
    return send(source, model, copy=False)


def _independent(clone: nn.Module, model: nn.Module) -> None:
    assert all_bits(clone) == all_bits(model)
    before = all_bits(model)
    assert not any(in_flat_memory(tensor) for tensor in clone.parameters())
    add_one(clone)
    assert all_bits(model) == before


def test_deepcopy() -> None:
    model = Everything(1.0)
    flip(model, Everything(2.0))
    _independent(copy.deepcopy(model), model)


def saved_and_loaded(thing: Any, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def test_torch_save_and_load() -> None:
    model, clone = Everything(1.0), Everything(0.0)
    flip(model, Everything(2.0))
    clone.load_state_dict(saved_and_loaded(model.state_dict(), weights_only=True))
    clone.hidden = model.hidden.clone()
    _independent(clone, model)
    tied = Tied()
    flip(tied, Tied())
    clone = saved_and_loaded(tied, weights_only=False)
    assert clone.head.weight is clone.embed.weight
    _independent(clone, tied)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_module_sees_new_weights_without_compiling_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if importlib.util.find_spec("tqdm"):  # the compiler shows its progress with it, in a thread
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch.compiler.reset()
    model, source, graphs = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3), []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled, inputs = torch.compile(model, backend=count), torch.ones(1, 3)
    receiver = Target(compiled)
    with torch.no_grad():
        compiled(inputs)
        for _ in range(3):
            add_one(source)
            send(nn.Sequential(source), receiver, copy=False)
            assert torch.equal(compiled(inputs), source(inputs).relu())
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_compute_with_the_new_weights(kind: type[nn.LSTM], device: str) -> None:
    source, model = kind(3, 4, num_layers=2), kind(3, 4, num_layers=2, device=device)
    flip(model, source)
    inputs = torch.randn(5, 2, 3)
    assert torch.equal(model(inputs)[0], source(inputs)[0])


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval(),
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    ],
)
def test_modules_that_look_at_their_weights_compute_with_the_new_ones(build: Any) -> None:
    source, model, inputs = build(), build(), torch.randn(2, 5, 8)
    flip(model, source)
    with torch.no_grad():
        assert torch.equal(model(inputs), source(inputs))


def test_a_flipped_module_is_trained_and_sent() -> None:
    model, target = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flip(model, nn.Linear(2, 1))
    before = all_bits(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert all_bits(model) != before
    assert in_flat_memory(model.weight)
    flip(target, model)
    assert all_bits(target) == all_bits(model)
    assert target.weight.data_ptr() != model.weight.data_ptr()


def test_functional_call() -> None:
    source, model = nn.Linear(2, 2), nn.Linear(2, 2)
    flip(model, source)
    inputs = torch.ones(1, 2)
    state = {"weight": torch.zeros(2, 2), "bias": torch.ones(2)}
    assert torch.func.functional_call(model, state, (inputs,)).tolist() == [[1, 1]]
    assert torch.equal(model(inputs), source(inputs))
