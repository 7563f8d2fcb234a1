"""Containers that make their tensors anew whenever they are asked, as targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from aiosync.errors import ManifestMismatch
from aiosync.tensors import Layout, Target, collect
from tests.tensors._models import packed, send


@tensorclass
class _Pair:
    a: torch.Tensor
    n: Any


def _weights(fill: float) -> dict[str, Any]:
    return {"a": torch.full((2, 3), fill), "n": {"x": torch.full((2,), fill)}}


def _member() -> TensorDict:
    return TensorDict({"a": torch.zeros(3), "n": {"x": torch.zeros(())}})


def _stacked() -> tuple[Any, Callable[[], Any]]:
    members = [_member(), _member()]
    return LazyStackedTensorDict(*members), lambda: torch.stack(members)


def _locked() -> tuple[Any, Callable[[], Any]]:
    target, look = _stacked()
    return target.lock_(), look


def _class() -> tuple[Any, Callable[[], Any]]:
    target, look = _stacked()
    return _Pair.from_tensordict(target), look


def _part() -> tuple[Any, Callable[[], Any]]:
    whole = TensorDict({"a": torch.zeros(4, 3), "n": {"x": torch.zeros(4)}}, batch_size=[4])
    index = torch.tensor([0, 2])
    return whole._get_sub_tensordict(index), lambda: whole[index]


FORMS = [_stacked, _locked, _class, _part]


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside"])
@pytest.mark.parametrize("copy", [False, True], ids=["flip", "copy"])
@pytest.mark.parametrize("form", FORMS)
def test_what_the_container_stands_for_is_written(form: Any, copy: bool, inside: bool) -> None:
    made, look = form()
    receiver = Target({"outer": made} if inside else made)
    for fill in (1.0, 2.0):
        source = {"outer": _weights(fill)} if inside else _weights(fill)
        layout, flat, values = packed(source)
        receiver.apply_(layout, flat, values, copy=copy)
        assert (look()["a"] == fill).all()
        assert (look()["n", "x"] == fill).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_from_anywhere(form: Any, inplace: bool) -> None:
    target, look = form()
    leaves = collect(_weights(1.0))
    tensors = [leaf.tensor for leaf in leaves.leaves]
    Target(target).apply_tensors(Layout.plan(leaves), tensors, {}, inplace=inplace)
    assert (look()["a"] == 1).all()
    assert (look()["n", "x"] == 1).all()


@pytest.mark.parametrize("form", FORMS)
def test_casts(form: Any) -> None:
    target, look = form()
    send({"a": torch.ones(2, 3).double()}, target, copy=True, strict=False)
    assert look()["a"].dtype is torch.float32
    assert (look()["a"] == 1).all()
    assert (look()["n", "x"] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_changes_nothing(form: Any) -> None:
    target, look = form()
    with pytest.raises(ManifestMismatch, match=r"n\.x: expected shape \(2,\), got \(3,\)"):
        send({"a": torch.ones(2, 3), "n": {"x": torch.ones(3)}}, target, copy=True)
    assert (look()["a"] == 0).all()


def test_what_was_written_is_taken_back() -> None:
    class Refusing(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise RuntimeError("this value is refused")

    made, look = _part()
    target = Refusing(made=made, note="old")
    with pytest.raises(RuntimeError, match="refused"):
        send({"made": _weights(1.0), "note": "new"}, target, copy=True)
    assert (look()["a"] == 0).all()
    assert (look()["n", "x"] == 0).all()


def test_sources_in_the_memory_that_is_written() -> None:
    memory = torch.arange(3.0).reshape(3, 1)
    target = LazyStackedTensorDict(*(TensorDict({"a": memory[row]}) for row in (1, 2)))
    leaves = collect({"a": memory[:2]})
    Target(target).apply_tensors(Layout.plan(leaves), [memory[:2]], {})
    assert memory.tolist() == [[0], [0], [1]]
