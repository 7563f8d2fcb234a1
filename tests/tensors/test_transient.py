"""Buffers that are not persistent: updates overwrite them, leave them alone, or are refused."""

from __future__ import annotations

import contextlib
import copy as copying
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aiosync.errors import ManifestMismatch
from aiosync.tensors import Target
from tests.tensors._models import packed, send


class Recurrent(nn.Module):
    """A model with weights, and with a hidden state and a cached table that are not persistent."""

    def __init__(self, value: float = 0.0, rows: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), value))
        self.register_buffer("mean", torch.full((2,), value))
        self.register_buffer("hidden", torch.full((rows, 2), value), persistent=False)
        self.register_buffer("table", torch.full((3,), value), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x + self.scale + self.hidden[: len(x)] + 1
        return self.hidden


@pytest.fixture(params=[False, True], ids=["flip", "copy"])
def copy(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strict", [True, False])
def test_persistent_leaves_the_state_of_the_process_alone(
    mode: Any, strict: bool, copy: bool
) -> None:
    target = Recurrent()
    receiver = Target(target, strict=strict, buffers="persistent")
    for value in (1.0, 2.0, 3.0):
        with mode():
            target(torch.ones(2, 2))
            target.table.fill_(-value)
        before = target.hidden.clone()
        send(Recurrent(value), receiver, copy=copy)
        assert torch.equal(target.hidden, before)
        assert (target.table == -value).all()
        assert (target.mean == value).all() and (target.scale == value).all()


def test_persistent_fills_what_has_no_memory(copy: bool) -> None:
    target = Recurrent().to("meta")
    receiver = Target(target, buffers="persistent")
    for value in (1.0, 2.0):
        send(Recurrent(value), receiver, copy=copy)
        assert (target.hidden == 1).all() and (target.table == 1).all()
        assert (target.mean == value).all()
    with pytest.raises(ManifestMismatch, match="hidden: expected shape"):
        send(Recurrent(1.0, rows=3), Recurrent().to("meta"), copy=copy)


@pytest.mark.parametrize("mode", MODES)
def test_another_shape_is_kept_and_named_once(mode: Any, copy: bool) -> None:
    target = Recurrent(rows=2)
    receiver = Target(target)
    # A buffer that had another size from the start does not count as changed.
    send(Recurrent(1.0), receiver, copy=copy)
    assert (target.hidden == 0).all() and (target.table == 1).all()
    with mode():
        target(torch.ones(1, 2))
    with pytest.warns(UserWarning, match=r'Recurrent that .*: hidden; .*buffers="persistent"'):
        send(Recurrent(2.0), receiver, copy=copy)
    assert target.hidden.shape == (1, 2) and (target.table == 2).all()
    with mode():
        target(torch.ones(1, 2))
    # A second warning would be an error.
    send(Recurrent(3.0), receiver, copy=copy)
    assert (target.scale == 3).all()


def _write(model: Recurrent) -> None:
    model.table[0] = 7


def _rebind(model: Recurrent) -> None:
    model.table = torch.full((3,), 7.0)


def _same(model: Recurrent) -> None:
    model.table = model.table.clone()


CHANGES: dict[str, tuple[Callable[[Recurrent], object], bool]] = {
    "write": (_write, True),
    "rebind": (_rebind, True),
    "equal values": (_same, False),
    "move": (lambda model: model.double().bfloat16().float(), False),
    "parameter": (lambda model: model.scale.data.fill_(7), False),
    "persistent buffer": (lambda model: model.mean.fill_(7), False),
    "read": (lambda model: (model.table * 2, copying.deepcopy(model), model.table[1:]), False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_process_changed_is_overwritten_and_named(change: str, copy: bool) -> None:
    do, is_named = CHANGES[change]
    target = Recurrent()
    receiver = Target(target)
    # A change before the first update is not named.
    do(target)
    for value in (1.0, 2.0):
        send(Recurrent(value), receiver, copy=copy)
    do(target)
    warned = pytest.warns(UserWarning, match=r"writes to: table;")
    with warned if is_named else contextlib.nullcontext():
        send(Recurrent(3.0), receiver, copy=copy)
    assert (target.table == 3).all() and (target.hidden == 3).all()
    do(target)
    send(Recurrent(4.0), receiver, copy=copy)


def test_a_warning_that_is_an_error_refuses_before_anything_changed(copy: bool) -> None:
    target = Recurrent()
    receiver = Target(target)
    send(Recurrent(1.0), receiver, copy=copy)
    _write(target)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="table"):
        warnings.simplefilter("error")
        send(Recurrent(2.0), receiver, copy=copy)
    assert (target.scale == 1).all() and target.table[0] == 7
    send(Recurrent(2.0), receiver, copy=copy)
    assert (target.table == 2).all()


def test_a_refused_update_is_no_change_by_the_process(copy: bool) -> None:
    target = Recurrent()
    receiver = Target(target)
    send(Recurrent(1.0), receiver, copy=copy)
    with pytest.raises(ManifestMismatch):
        send({"scale": torch.ones(3)}, receiver, copy=copy)
    layout, flat, values = packed(Recurrent(2.0))
    receiver.apply_(layout, flat, values, copy=copy)
    assert (target.table == 2).all()


def test_a_state_dict_leaves_them_alone(copy: bool) -> None:
    target = Recurrent()
    receiver = Target(target)
    for value in (1.0, 2.0):
        receiver.apply_(*packed(Recurrent(value), "state_dict"), copy=copy)
        _write(target)
        assert (target.hidden == 0).all() and (target.mean == value).all()
