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
