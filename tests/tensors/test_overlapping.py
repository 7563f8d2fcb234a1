"""Targets whose tensors share memory that the sender's do not: never one of them in all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from aiosync import WeightStrategy
from aiosync.errors import ManifestMismatch
from aiosync.tensors import FlatBuffer, Flattener, Target
from tests.tensors._models import all_bits, packed


class Pair(nn.Module):
    """Two tensors, of which the second is a view of the first where ``share`` makes it one."""

    def __init__(self, share: Callable[[torch.Tensor], torch.Tensor] | None, kind: str) -> None:
        super().__init__()
        whole = torch.arange(8.0).reshape(4, 2)
        part = torch.zeros(4, 2)[:2] if share is None else share(whole)
        if kind == "buffer":
            self.register_buffer("whole", whole)
            self.register_buffer("part", part)
        else:
            self.whole, self.part = nn.Parameter(whole), nn.Parameter(part)
        self.step = nn.Parameter(torch.zeros(1))


SHARES = [
    lambda whole: whole.detach()[:2],
    lambda whole: whole.detach()[1:3],
    lambda whole: whole.detach().t()[:, :2].t(),  # other strides
]


def apply(source: nn.Module, target: nn.Module, kept: Target | None = None) -> None:
    layout, flat, values = packed(source)
    (kept or Target(target)).apply_(layout, flat, values, copy=True)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("share", SHARES)
def test_other_values_are_refused_and_nothing_changes(share, kind: str) -> None:
    target = Pair(share, kind)
    with torch.no_grad():
        target.step.fill_(5.0)
    before = all_bits(target)
    kept = Target(target)
    for _ in range(2):
        with pytest.raises(ManifestMismatch, match="shares memory with another tensor"):
            apply(Pair(None, kind), target, kept)
        assert all_bits(target) == before


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("share", SHARES)
def test_the_same_values_are_taken_and_views_stay_views(share, kind: str) -> None:
    source, target = Pair(share, kind), Pair(share, kind)
    kept = Target(target)
    for value in (1.0, 2.0):
        with torch.no_grad():
            source.whole.mul_(-value)
        apply(source, target, kept)
        assert all_bits(target) == all_bits(source)
    with torch.no_grad():
        target.whole.fill_(9.0)
    assert target.part.eq(9.0).all()


def test_other_values_in_the_same_memory() -> None:
    target = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    target["b"].weight.data = target["a"].weight.data
    source = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    before = all_bits(target)
    with pytest.raises(ManifestMismatch, match=r"a\.weight"):
        apply(source, target)
    with pytest.raises(ManifestMismatch, match=r"a\.weight"):
        WeightStrategy().apply_weights(target, source.state_dict())
    assert all_bits(target) == before
    source["b"].weight.data = source["a"].weight.data
    apply(source, target)
    assert all_bits(target) == all_bits(source)


@pytest.mark.parametrize("later", [False, True])
def test_memory_that_is_shared_after_the_first_update(later: bool) -> None:
    source = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    target = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    kept = Target(target)
    for _ in range(2 if later else 1):
        apply(source, target, kept)
    target["b"].weight.data = target["a"].weight.data
    before = all_bits(target)
    with pytest.raises(ManifestMismatch, match=r"a\.weight"):
        apply(source, target, kept)
    assert all_bits(target) == before
    target["b"].weight.data = torch.zeros(2, 2)
    apply(source, target, kept)
    assert all_bits(target) == all_bits(source)


def test_slices_of_one_buffer_that_do_not_overlap_cost_nothing() -> None:
    target = nn.ParameterDict()
    memory = torch.zeros(8)
    target["a"], target["b"] = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    flattener = Flattener()
    prepared = flattener.prepare(nn.ParameterDict({"a": torch.ones(4), "b": torch.ones(4)}))
    flat = FlatBuffer(prepared.layout.nbytes)
    flattener.copy_into(prepared, flat)
    kept = Target(target)
    kept.apply_(prepared.layout, flat, {}, copy=True)
    assert kept._plan is not None
    assert not kept._plan.overlapping
    assert memory.eq(1.0).all()
