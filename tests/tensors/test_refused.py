"""What cannot be a target, and failures in the middle: by name, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch import nn

from aiosync import WeightStrategy
from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors import Target
from tests.tensors._models import Labelled, Refuses, all_bits, packed, send


@pytest.fixture(params=[False, True], ids=["flip", "copy"])
def copy(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2, 3)


COMPLEX = torch.ones(2, 3, dtype=torch.complex64)
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "coo": lambda: torch.ones(2, 3).to_sparse(),
    "csr": lambda: torch.ones(2, 3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(2, 3).to_mkldnn(),
    "conjugate": lambda: COMPLEX.conj(),
    "negative": lambda: COMPLEX.conj().imag,
    "inference": _inference,
    "expanded": lambda: torch.ones(2, 1).expand(2, 3),
    "subclass": lambda: torch.ones(2, 3).as_subclass(Labelled),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors(kind: str, copy: bool) -> None:
    source = {"a": COMPLEX if kind == "conjugate" else torch.ones(2, 3), "b": torch.ones(1)}
    target = nn.Module()
    target.register_buffer("a", KINDS[kind]())
    target.register_buffer("b", torch.zeros(1))
    with pytest.raises(ManifestMismatch) as caught:
        send(source, target, copy=copy)
    assert list(caught.value.mismatched) == ["a"]
    with pytest.raises(ManifestMismatch):
        WeightStrategy().apply_weights(target, source, inplace=False)
    assert target.b.item() == 0
    receiver = Target(target, strict=False)
    for value in (1.0, 2.0):  # what gets no weights may be anything; torch would have crashed here
        send({"b": torch.tensor([value])}, receiver, copy=copy)
        assert target.b.item() == value


@tensorclass
class Point:
    a: torch.Tensor


CONTAINERS: dict[str, Callable[[], Any]] = {
    "lazy stack": lambda: LazyStackedTensorDict(
        TensorDict({"a": torch.zeros(3)}), TensorDict({"a": torch.zeros(3)})
    ),
    "tensorclass": lambda: Point(torch.zeros(2, 3), batch_size=[]),
}


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers(kind: str, inside: bool, copy: bool) -> None:
    made = CONTAINERS[kind]()
    source: Any = {"a": torch.ones(2, 3)}
    with pytest.raises(ConfigError, match=r"x\.a" if inside else "a:"):
        send({"x": source} if inside else source, {"x": made} if inside else made, copy=copy)
    assert not made.get("a").any()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (None, "NoneType"),
        (3, "int"),
        ([torch.ones(1)], "list"),
        (torch.ones(1), "Tensor"),
        (nn.Sequential(nn.LazyLinear(2)), r"0\.weight, 0\.bias"),
    ],
)
def test_anything_else(target: Any, text: str, copy: bool) -> None:
    with pytest.raises(ConfigError, match=text):
        send(nn.Sequential(nn.Linear(2, 2)), target, copy=copy)


SHARES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda whole: whole,
    lambda whole: whole[:2],
    lambda whole: whole[1:3],
    lambda whole: whole.t()[:, :2].t(),  # other strides
]


class Pair(nn.Module):
    def __init__(self, share: Callable[[torch.Tensor], torch.Tensor], kind: str) -> None:
        super().__init__()
        whole = torch.arange(8.0).reshape(4, 2)
        if kind == "buffer":
            self.register_buffer("whole", whole)
            self.register_buffer("part", share(whole))
        else:
            self.whole, self.part = nn.Parameter(whole), nn.Parameter(share(whole))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("share", SHARES)
def test_overlapping_tensors(share: Any, kind: str, copy: bool) -> None:
    target = Pair(share, kind)
    before = all_bits(target)
    source = Pair(lambda whole: share(whole).clone() + 1, kind)
    receiver = Target(target)
    for _ in range(2):
        with pytest.raises(ManifestMismatch) as caught:
            send(source, receiver, copy=copy)
        assert set(caught.value.mismatched) <= {"whole", "part"}
        assert all_bits(target) == before


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_memory_that_came_to_be_shared(updates: int) -> None:
    source, target = (nn.ModuleDict({n: nn.Linear(2, 2) for n in "ab"}) for _ in range(2))
    receiver = Target(target)
    for _ in range(updates):
        send(source, receiver, copy=True)
    target["b"].weight.data = target["a"].weight.data
    before = all_bits(target)
    with pytest.raises(ManifestMismatch, match=r"[ab]\.weight"):
        send(source, receiver, copy=True)
    assert all_bits(target) == before
    target["b"].weight.data = torch.zeros(2, 2)
    send(source, receiver, copy=True)
    assert all_bits(target) == all_bits(source)


def test_slices_of_one_block_that_do_not_overlap(copy: bool) -> None:
    block = torch.zeros(8)
    target = nn.ParameterDict({"a": nn.Parameter(block[:4]), "b": nn.Parameter(block[4:])})
    send({"a": torch.ones(4), "b": torch.full((4,), 2.0)}, target, copy=copy)
    assert [*target["a"].tolist(), *target["b"].tolist()] == [1, 1, 1, 1, 2, 2, 2, 2]


# -- failures in the middle -------------------------------------------------------------------


@pytest.mark.parametrize("flipped_before", [False, True])
def test_extra_state_that_is_refused(copy: bool, flipped_before: bool) -> None:
    target = Refuses(1.0, refuse=True)
    receiver = Target(target)
    if flipped_before:
        old = send(Refuses(1.0, refuse=True), receiver, copy=False)
        assert not old.exclusive()

    def objects() -> list[Any]:
        return [(id(t), t.data_ptr()) for t in [*target.parameters(), *target.buffers()]]

    before, places = all_bits(target), objects()
    layout, flat, values = packed(Refuses(2.0, refuse=False))
    with pytest.raises(RuntimeError, match="this state is refused"):
        receiver.apply_(layout, flat, values, copy=copy)
    assert all_bits(target) == before
    assert target.extra == -1.0  # what it has made of it
    assert (copy and flipped_before) or objects() == places
    assert flat.exclusive()
    target.refuse = False
    receiver.apply_(layout, flat, values, copy=copy)
    assert (target.extra, target.first.weight.sum()) == (2.0, 18)
