"""Kept tensors of a version, which keep their values even if the model's tensors do not flip."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from aiosync.tensors import Target
from tests.tensors._models import Everything, Refuses, add_one, all_bits, send


class Table(nn.Module):
    """A model whose forward returns a view of one of its buffers."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        value = float(number)
        self.weight = nn.Parameter(torch.full((4,), value))
        self.register_buffer("rows", torch.full((4, 3), value))
        self.register_buffer("steps", torch.tensor(number))
        self.register_buffer("hidden", torch.full((2, 2), value), persistent=False)
        # This buffer is so large that it is not copied together with others.
        self.register_buffer("large", torch.full((40_000,), value))

    def forward(self) -> torch.Tensor:
        return self.rows[1:].t()


def _saved(model: Table) -> list[torch.Tensor]:
    """Return the tensors that a graph keeps for its backward."""
    saved, x = list[torch.Tensor](), torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        (x * model.rows[1]).sum()
    return saved


def _assigned(model: Table) -> list[torch.Tensor]:
    twin = Table()
    twin.load_state_dict(model.state_dict(), assign=True)
    return [*twin.parameters(), twin.rows, twin.steps]


KEPT: dict[str, Callable[[Table], Any]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "assigned": _assigned,
    "tensordict": lambda model: list(TensorDict.from_module(model).detach().values()),
    "data": lambda model: [tensor.data for tensor in (*model.buffers(), *model.parameters())],
    "output": lambda model: [model()],
    "saved": _saved,
    "array": lambda model: [model.rows.numpy(), model.weight.detach().numpy()],
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_is_kept_of_a_version_keeps_its_values(kept: str) -> None:
    target = Table()
    receiver, found = Target(target), list[tuple[int, Any]]()
    for value in range(1, 9):
        send(Table(value), receiver, copy=False)
        assert set(all_bits(target).values()) == set(all_bits(Table(value)).values())
        found += [(value, each) for each in KEPT[kept](target)] if value != 4 else []
        for old, each in found:
            assert (each == old).all()


def test_buffers_that_nothing_views_stay_where_they_are() -> None:
    target = Table()
    receiver = Target(target)
    addresses = [buffer.data_ptr() for buffer in target.buffers()]
    objects, twin = list(target.buffers()), TensorDict.from_module(target)
    for value in (1, 2, 3):
        send(Table(value), receiver, copy=False)
        target().sum()
        assert [buffer.data_ptr() for buffer in target.buffers()] == addresses
    del twin
    kept = target.rows[0]
    send(Table(4), receiver, copy=False)
    now = [buffer.data_ptr() for buffer in target.buffers()]
    assert [one == other for one, other in zip(now, addresses, strict=True)] == [
        False,
        True,
        True,
        True,
    ]
    # Nothing views the new memory, so it is written in place.
    for value in (5, 6):
        send(Table(value), receiver, copy=False)
        assert [buffer.data_ptr() for buffer in target.buffers()] == now
    assert (kept == 3).all()
    assert all(one is other for one, other in zip(objects, target.buffers(), strict=True))


def test_what_holds_the_same_objects_follows() -> None:
    target = Table()
    receiver = Target(target)
    state, td = target.state_dict(keep_vars=True), TensorDict.from_module(target)
    detached = target.rows.detach()
    for value in (1, 2):
        send(Table(value), receiver, copy=False)
        for each in (state["rows"], td["rows"], state["weight"], td["weight"]):
            assert (each == value).all()
    assert (detached == 0).all()


def test_with_copy_addresses_stay_and_views_follow() -> None:
    target = Table()
    receiver, kept = Target(target), target.state_dict()
    addresses = [tensor.data_ptr() for tensor in (*target.parameters(), *target.buffers())]
    send(Table(3), receiver, copy=True)
    now = [tensor.data_ptr() for tensor in (*target.parameters(), *target.buffers())]
    assert now == addresses
    assert all((tensor == 3).all() for tensor in kept.values())


@pytest.mark.parametrize("views", [False, True])
def test_buffers_in_one_storage(views: bool) -> None:
    """Tied buffers stay tied, and slices of a block are updated; a kept block stays as it was."""

    def build(number: int) -> nn.Module:
        model = nn.Module()
        block = torch.full((8,), float(number))
        model.register_buffer("tied", block[4:].data)
        model.register_buffer("also", model.tied.data)
        model.register_buffer("odd", block[1:4:2].data)
        if views:
            model.block = block
        return model

    target = build(0)
    receiver = Target(target)
    address = target.tied.data_ptr()
    for value in (1, 2, 3):
        send(build(value), receiver, copy=False)
        assert all((buffer == value).all() for buffer in target.buffers())
        assert target.tied.data_ptr() == target.also.data_ptr()
        assert target.odd.stride() == (2,)
        assert (target.tied.data_ptr() == address) is not views
    assert not views or (target.block == 0).all()


def test_a_refusal_puts_the_old_memory_back() -> None:
    target = Refuses(1.0, refuse=True)
    receiver = Target(target)
    send(Refuses(1.0, refuse=False), receiver, copy=False)
    kept, address = target.state_dict(), target.scale.data_ptr()
    before = all_bits(target)
    with pytest.raises(RuntimeError, match="refused"):
        send(Refuses(2.0, refuse=False), receiver, copy=False)
    assert (all_bits(target), target.scale.data_ptr()) == (before, address)
    target.refuse = False
    send(Refuses(2.0, refuse=False), receiver, copy=False)
    assert (target.scale == 2).all() and (kept["scale"] == 1).all()


@pytest.mark.parametrize("kind", ["dict", "tensordict"])
def test_containers_are_written_to_as_others_view_their_tensors(kind: str) -> None:
    """A worker with ``weights=model.state_dict()`` updates that model."""
    model = nn.BatchNorm1d(2)
    state = model.state_dict()
    target: Any = state if kind == "dict" else TensorDict(state)
    source = nn.BatchNorm1d(2)
    add_one(source)
    send(source, target, copy=False)
    assert all_bits(model) == all_bits(source)


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiosync")
    target = Table()
    receiver, kept = Target(target), list[Any]()
    for value in range(4):
        send(Table(value), receiver, copy=False)
        kept.append(target.state_dict())
    [record] = caplog.records
    assert record.getMessage().startswith("rows, steps, large: got new memory")


def test_a_graph_of_an_old_version_is_refused() -> None:
    target, x = nn.BatchNorm1d(2).eval(), torch.ones(3, 2, requires_grad=True)
    receiver = Target(target)
    loss, kept = (x * target.running_var).sum(), target.state_dict()
    send(nn.BatchNorm1d(2), receiver, copy=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del kept


def test_memory_is_on_the_cpu_whatever_the_default_device() -> None:
    target = Everything(0.0, {"steps": 0})
    receiver, kept = Target(target), list[Any]()
    for value in (1.0, 2.0, 3.0):
        source = Everything(value, {"steps": torch.tensor(int(value)), "none": torch.zeros(0)})
        kept.append(target.state_dict())
        with torch.device("meta"):
            send(source, receiver, copy=False)
        assert all_bits(target) == all_bits(source)
        assert target.extra["steps"].item() == value
    assert [state["kept"][0].item() for state in kept] == [0, 1, 2]
