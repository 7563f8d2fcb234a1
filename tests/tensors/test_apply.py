"""Applying weights: what gets which value, what is refused, and what stays the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from aiosync import WeightStrategy
from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors import (
    Layout,
    Target,
    collect,
    torch_dtype,
)
from aiosync.tensors.buffer import in_flat_memory
from aiosync.wire import DTYPE_NBYTES
from tests.tensors._models import (
    Everything,
    Labelled,
    Stateful,
    Tied,
    add_one,
    all_bits,
    bits,
    filled,
    packed,
    send,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(params=[False, True], ids=["flip", "copy"])
def copy(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_everything_arrives(copy: bool) -> None:
    source, target = Everything(1.0, {"steps": 3}), Everything(2.0, {"steps": 0})
    source.body[1].num_batches_tracked.fill_(41)
    objects = [*target.parameters(), *target.buffers()]
    send(source, target, copy=copy)
    assert all_bits(target) == all_bits(source)
    assert target.extra == target.child.extra == {"steps": 3}
    kept = [*target.parameters(), *target.buffers()]
    assert all(a is b for a, b in zip(objects, kept, strict=True))
    assert target.none is target.nothing is None
    assert [each.requires_grad for each in (target.frozen, target.body[0].weight)] == [False, True]


@pytest.mark.parametrize("name", sorted(DTYPE_NBYTES))
def test_every_dtype_arrives(name: str, copy: bool) -> None:
    def build(seed: int) -> nn.Module:
        module = nn.Module()
        for index, shape in enumerate([(), (0,), (3, 5)]):
            tensor = filled(torch_dtype(name), shape, seed + index)
            module.register_parameter(f"p{index}", nn.Parameter(tensor, requires_grad=False))
            module.register_buffer(f"b{index}", tensor.clone())
        return module

    source, target = build(0), build(100)
    send(source, target, copy=copy)
    assert all_bits(target) == all_bits(source)


def test_parameters_flip_and_buffers_are_copied() -> None:
    target = nn.BatchNorm1d(3)
    flat = send(nn.BatchNorm1d(3), target, copy=False)
    assert (in_flat_memory(target.weight), in_flat_memory(target.running_mean)) == (True, False)
    flat.array[:] = 0
    assert (target.weight.tolist(), target.running_var.tolist()) == ([0, 0, 0], [1, 1, 1])


def test_copy_keeps_the_memory_of_the_target() -> None:
    source, target = nn.Linear(300, 300), nn.Linear(300, 300)
    address = target.weight.data_ptr()
    loss = target(torch.ones(1, 300, requires_grad=True)).sum()
    send(source, target, copy=True).array[:] = 0
    assert (target.weight.data_ptr(), all_bits(target)) == (address, all_bits(source))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # autograd notices the write


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(600, 300).t(),
        torch.randn(300, 1).expand(300, 600),
        torch.randn(300, 1200)[:, ::2],
        torch.randn(300, 600, dtype=torch.complex64).conj(),
        torch.randn(300, 600, dtype=torch.complex64).conj().imag,
        torch.randn(300, 600).as_subclass(Labelled),
    ],
    ids=["t", "expand", "step", "conj", "neg", "subclass"],
)
def test_large_tensors_of_any_kind_are_copied_from(tensor: torch.Tensor) -> None:
    target = {"w": torch.zeros(300, 600, dtype=tensor.dtype)}
    Target(target).apply_tensors(Layout.plan(collect({"w": tensor})), [tensor], {})
    assert torch.equal(target["w"], tensor)


# -- the target changes between two applies ---------------------------------------------------


def _not_contiguous(model: Everything) -> None:
    model.body[0].weight.data = torch.zeros(3, 4).t()


CHANGES: dict[str, Callable[[Everything], object]] = {
    "move": lambda model: model.double().float(),
    "new parameter": lambda model: model.body[0].register_parameter(
        "weight", nn.Parameter(torch.zeros(4, 3))
    ),
    "new submodule": lambda model: model.body.register_module("0", nn.Linear(3, 4)),
    "new buffer": lambda model: model.register_buffer("kept", torch.zeros(2)),
    "not contiguous": _not_contiguous,
    "to meta": lambda model: model.to("meta"),
    "tie": lambda model: model.body[0].register_parameter("bias", model.body[1].bias),
    "share": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_target_is_resolved_at_every_apply(change: str, copy: bool) -> None:
    source, target = Everything(1.0), Everything(2.0)
    receiver = Target(target)
    send(source, receiver, copy=copy)
    CHANGES[change](target)
    for _ in range(2):
        send(source, receiver, copy=copy)
        assert all_bits(target) == all_bits(source)
        add_one(source)


def test_a_view_of_flat_memory_is_never_written_to() -> None:
    second, target = nn.Linear(2, 2), nn.Linear(2, 2)
    receiver = Target(target)
    flat = send(nn.Linear(2, 2), receiver, copy=False)
    before = bytes(flat.memoryview())
    other = send(second, receiver, copy=True)
    assert all_bits(target) == all_bits(second)
    assert bytes(flat.memoryview()) == before
    assert flat.exclusive() and other.exclusive()


# -- meta -------------------------------------------------------------------------------------


@pytest.mark.parametrize("partly", [False, True])
def test_meta_targets_get_memory(partly: bool, copy: bool) -> None:
    source, target = Everything(3.0), Everything(1.0)
    (target.body[0] if partly else target).to("meta")
    receiver = Target(target)
    for _ in range(3):
        send(source, receiver, copy=copy)
        assert all_bits(target) == all_bits(source)
        add_one(source)
    bias = target.body[0].bias
    assert in_flat_memory(bias) is not copy
    assert not in_flat_memory(target.kept)
    assert (bias.requires_grad, target.frozen.requires_grad) == (True, False)
    assert list(dict(target.named_parameters())) == list(dict(source.named_parameters()))


@pytest.mark.parametrize("build", [Tied, lambda: Tied("meta"), lambda: Tied().to("meta")])
def test_tied_stay_tied(build: Callable[[], Tied], copy: bool) -> None:
    source, target = Tied(), build()  # to() unties them
    send(source, target, copy=copy)
    assert target.head.weight is target.embed.weight
    assert all_bits(target) == all_bits(source)


# -- ties -------------------------------------------------------------------------------------


def test_sent_tied_but_not_tied_here(copy: bool) -> None:
    source, target = Tied(), Tied()
    target.head.weight = nn.Parameter(torch.zeros(5, 3))
    receiver = Target(target)
    for _ in range(2):
        send(source, receiver, copy=copy)
        assert all_bits(target) == all_bits(source)
    assert target.head.weight.data_ptr() != target.embed.weight.data_ptr()


def test_tied_here_but_sent_separately(copy: bool) -> None:
    target, value = Tied(), torch.full((5, 3), float("nan"))
    send({"embed.weight": value, "head.weight": value.clone()}, target, copy=copy)
    before = all_bits(target)
    assert before["embed.weight"] == bits(value)
    with pytest.raises(ManifestMismatch, match=r"head\.weight: tied to embed\.weight here"):
        send({"embed.weight": value, "head.weight": torch.zeros(5, 3)}, target, copy=copy)
    assert all_bits(target) == before


def test_tied_by_memory_stays_so(copy: bool) -> None:
    target = Tied()
    target.head.weight = nn.Parameter(target.embed.weight.data)
    receiver = Target(target)
    for _ in range(2):
        send(Tied(), receiver, copy=copy)
        assert target.head.weight.data_ptr() == target.embed.weight.data_ptr()


def test_memory_formats_are_kept(copy: bool) -> None:
    source, target = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    strides = target.weight.stride()
    send(source, target, copy=copy)
    assert target.weight.stride() == strides
    assert all_bits(target) == all_bits(source)


# -- containers and formats -------------------------------------------------------------------


FORMATS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "state_dict": lambda model: {k: v.clone() for k, v in model.state_dict().items()},
    "nested": lambda model: TensorDict.from_module(model).detach().clone().to_dict(),
    "tensordict": lambda model: TensorDict.from_module(model).detach().clone(),
    "locked": lambda model: TensorDict.from_module(model).detach().clone().lock_(),
    "params": lambda model: TensorDictParams(TensorDict.from_module(model).detach().clone()),
}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("of", FORMATS)
def test_any_form_into_any_form(of: str, to: str, copy: bool) -> None:
    source = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    target = FORMATS[to](nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    receiver = Target(target)
    for _ in range(2):
        send(FORMATS[of](source), receiver, copy=copy)
        found = {leaf.name: bits(leaf.tensor) for leaf in collect(target).leaves}
        assert found == {leaf.name: bits(leaf.tensor) for leaf in collect(source).leaves}
        add_one(source)


def test_values_of_containers(copy: bool) -> None:
    source = {"w": torch.ones(1), "sub": {"step": 4}, "_extra_state": {"a": (1, 2)}}
    target: dict[str, Any] = {"w": torch.zeros(1), "sub.step": 0, "_extra_state": None}
    send(source, target, copy=copy)
    assert (target["sub.step"], target["_extra_state"]) == (4, {"a": (1, 2)})
    td = TensorDict({"w": torch.zeros(1), "sub": {}})
    td.set_non_tensor(("sub", "step"), 0)
    td.set_non_tensor("__extra_state__", None)
    send(source, td.lock_(), copy=copy)
    assert (td["sub", "step"], td.get("__extra_state__").data) == (4, {"a": (1, 2)})
    assert td.is_locked


def _noted(fill: float, note: Any) -> TensorDict:
    inner = TensorDict({"b": torch.full((2,), fill)}, [2])
    inner.set_non_tensor("note", note)
    return TensorDict({"a": torch.full((2, 3), fill), "in": inner}, batch_size=[2])


@pytest.mark.parametrize("note", ["x", {"n": [1, (2, None)]}, {"t": torch.ones(1)}])
def test_a_value_for_all_elements_travels(note: Any, copy: bool) -> None:
    source, target = _noted(1.0, note), _noted(0.0, "old")
    send(source, target, copy=copy)
    assert repr(target.to_dict()) == repr(source.to_dict())
    weights = WeightStrategy().extract_weights(source)
    again = _noted(0.0, "old")
    WeightStrategy().apply_weights(again, weights)
    assert repr(again.to_dict()) == repr(source.to_dict())


# -- extra state ------------------------------------------------------------------------------

STATES = [
    None,
    7,
    "text",
    {"a": [1, 2.5, None, b"x"], "t": (1, (2,))},
    {1: "int key", None: 2},
    {"__aiosync__": "a key of this name"},
    {"mean": torch.arange(3.0), "deep": [{"std": torch.ones(2, 2)}]},
    torch.arange(4),
    TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(2, 1)}}, batch_size=[2]),
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_extra_state_arrives_as_it_was(state: Any, copy: bool) -> None:
    source, target = nn.Sequential(Stateful(state)), nn.Sequential(Stateful("old"))
    flat = send(source, target, copy=copy)
    got = target[0].extra
    assert type(got) is type(state)
    assert repr(got) == repr(state)
    if isinstance(state, TensorDict):
        assert (got == state).all()
    assert flat.exclusive()


def test_extra_state_sees_the_new_weights(copy: bool) -> None:
    class Cache(nn.Linear):
        def get_extra_state(self) -> None:
            return None

        def set_extra_state(self, state: None) -> None:
            self.cached = bits(self.weight)

    source, target = Cache(2, 2), Cache(2, 2)
    send(source, target, copy=copy)
    assert target.cached == bits(source.weight)


def test_extra_state_has_to_be_there_or_is_warned_of_once(copy: bool) -> None:
    """Otherwise a part of a model stays old, and the trainer is told that all of it is new."""
    model, target = nn.Module(), Stateful("kept")
    with pytest.raises(ManifestMismatch, match="missing: _extra_state"):
        send(model, target, copy=copy)
    send(model, target, copy=copy, strict=False)
    lenient = Target(target, strict="warn")
    with pytest.warns(UserWarning, match="Stateful, which keeps what it has: _extra_state"):
        send(model, lenient, copy=copy)
    lenient.target = target = Stateful("kept")
    send(model, lenient, copy=copy)  # a second warning would be an error
    assert target.extra == "kept"
    with pytest.raises(ManifestMismatch, match="unexpected: _extra_state"):
        send(Stateful(1), model, copy=copy)


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (2, 1), (3, 2), (6,)])
@pytest.mark.parametrize("strict", [False, True])
def test_shapes_are_never_broadcast(shape: tuple[int, ...], strict: bool, copy: bool) -> None:
    with pytest.raises(ManifestMismatch, match=r"a: expected shape \(2, 3\)"):
        send({"a": torch.ones(shape)}, {"a": torch.zeros(2, 3)}, copy=copy, strict=strict)


@pytest.mark.parametrize(
    ("of", "to", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float64, True),
        (torch.float32, torch.float8_e4m3fn, True),
        (torch.complex64, torch.complex128, True),
        (torch.float32, torch.int64, False),
        (torch.int64, torch.float32, False),
        (torch.int32, torch.int64, False),
        (torch.float32, torch.complex64, False),
        (torch.bool, torch.uint8, False),
    ],
)
def test_casts(of: torch.dtype, to: torch.dtype, fits: bool, copy: bool) -> None:
    source, target = {"a": torch.ones(3, dtype=of)}, {"a": torch.zeros(3, dtype=to)}
    for strict in (True, False):
        if fits and not strict:
            send(source, target, copy=copy, strict=False)
            assert bits(target["a"]) == bits(torch.ones(3).to(to))
        else:
            with pytest.raises(ManifestMismatch, match="expected dtype"):
                send(source, target, copy=copy, strict=strict)


def test_a_value_that_refers_to_no_tensor_is_refused(copy: bool) -> None:
    layout, flat, _ = packed({"w": torch.ones(1)})
    values = {"_extra_state": {"__aiosync__": "tensor", "name": "gone"}}
    target = {"w": torch.zeros(1), "_extra_state": None}
    with pytest.raises(ManifestMismatch, match="missing: gone"):
        Target(target).apply_(layout, flat, values, copy=copy)


@pytest.mark.parametrize(
    "value",
    [
        {"__aiosync__": "other"},
        {"__aiosync__": "tuple"},
        {"__aiosync__": "dict", "items": [1]},
        {"__aiosync__": "dict", "items": {}},
        {"__aiosync__": "tensordict", "items": []},
    ],
)
def test_values_packed_by_nobody_are_refused(value: Any, copy: bool) -> None:
    layout, flat, _ = packed({"w": torch.ones(1)})
    target = {"w": torch.zeros(1), "_extra_state": "old"}
    with pytest.raises(ConfigError, match="packed"):
        Target(target).apply_(layout, flat, {"_extra_state": value}, copy=copy)
    assert target["w"].tolist() == [0]
    assert target["_extra_state"] == "old"
