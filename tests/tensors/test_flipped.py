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

from aiosync.tensors import Target
from aiosync.tensors.buffer import in_flat_memory
from tests.tensors._models import Everything, Tied, add_one, all_bits, send


def torch_saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: nn.Module) -> Any:
    data = pickle.dumps(model)
    assert len(data) < 30_000  # a view of one big storage would save the whole of it each
    return pickle.loads(data)


@pytest.mark.parametrize("clone", [copy.deepcopy, torch_saved, pickled])
def test_a_clone_is_independent(clone: Any) -> None:
    model = Everything(1.0)
    model.tied = Tied()
    model.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(16))
    send(copy.deepcopy(model), model, copy=False)
    before, other = all_bits(model), clone(model)
    assert all_bits(other) == before
    assert other.tied.head.weight is other.tied.embed.weight
    assert not any(in_flat_memory(tensor) for tensor in other.parameters())
    add_one(other)
    assert all_bits(model) == before


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
