"""The cheap comparison of a source with what it was, also without private parts of torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from aiosync.tensors import FlatBuffer, Flattener, Target, buffer
from aiosync.tensors._signature import Signature
from aiosync.tensors._tree import ModuleTree, find_nested, outline
from tests.tensors._models import Everything, packed


@pytest.mark.parametrize("guarded", [True, False])
def test_signature(guarded: bool) -> None:
    def look(tensors: list[torch.Tensor]) -> bool:
        signature = Signature([torch.zeros(2, 3), nn.Parameter(torch.zeros(4))])
        if not guarded:
            signature._guards = None
        return signature.same(tensors)

    parameter = nn.Parameter(torch.ones(4))
    assert look([torch.ones(2, 3), parameter])
    assert look([torch.ones(2, 3), nn.Parameter(torch.ones(4), requires_grad=False)])
    assert not look([torch.ones(3, 2), parameter])
    assert not look([torch.ones(3, 2).t(), parameter])
    assert not look([torch.ones(2, 3).double(), parameter])
    assert not look([torch.ones(2, 3, device="meta"), parameter])
    assert not look([torch.ones(2, 3), torch.ones(4)])
    assert not look([torch.ones(2, 3)])
    assert not look([torch.ones(2, 3), parameter, parameter])


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view])
def test_signature_of_a_view_that_stands_for_other_numbers(view: Any, guarded: bool) -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    signature, other = Signature([tensor]), Signature([view(tensor)])
    if not guarded:
        signature._guards = other._guards = None
    assert not signature.same([view(tensor)])
    assert signature.same([tensor])
    assert other.same([view(tensor)])
    assert not other.same([tensor])


def test_signature_of_nothing() -> None:
    assert Signature([]).same([])
    assert not Signature([]).same([torch.ones(1)])


def test_a_replaced_table_is_seen() -> None:
    model = nn.Linear(2, 2)
    tree = ModuleTree(model)
    assert tree.unchanged()
    model.__dict__["_parameters"] = dict(model._parameters)
    assert tree.unchanged()
    model.__dict__["_parameters"] = {"weight": nn.Parameter(torch.ones(2, 2)), "bias": None}
    assert not tree.unchanged()


def _layers() -> nn.Module:
    return nn.Sequential(*[nn.BatchNorm1d(1 if number % 2 else 3) for number in range(20)])


def _put(table: str, key: str, value: object) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        getattr(module, table)[key] = value

    return change


@pytest.mark.parametrize("numel", [1, 2, 2**17])
def test_a_tensor_replaced_by_an_equal_one_is_seen(numel: int) -> None:
    model = nn.ParameterDict({"a": torch.ones(numel), "b": torch.ones(numel)})
    tree = ModuleTree(model)
    assert tree.unchanged()
    model._parameters["b"] = nn.Parameter(torch.ones(numel))
    assert not tree.unchanged()


@pytest.mark.parametrize(
    "change",
    [
        _put("_buffers", "num_batches_tracked", torch.tensor(0)),  # the same number
        _put("_buffers", "running_mean", torch.zeros(3)),
        _put("_buffers", "running_mean", None),
        _put("_buffers", "more", torch.zeros(0)),
        _put("_parameters", "weight", nn.Parameter(torch.ones(5))),  # does not even broadcast
        _put("_parameters", "bias", None),
        _put("_modules", "child", nn.Linear(1, 1)),
        lambda module: module._parameters.pop("bias"),
        lambda module: module._buffers.clear(),
        lambda module: module.__dict__.update(_parameters={}),
    ],
)
@pytest.mark.parametrize("position", [0, 7, 19])
def test_any_change_of_one_of_many_modules_is_seen(
    change: Callable[[nn.Module], None], position: int
) -> None:
    model = _layers()
    tree = ModuleTree(model)
    assert tree.unchanged()
    change(model[position])  # type: ignore[index]
    assert not tree.unchanged()


def test_a_child_replaced_by_one_that_says_it_is_equal_is_seen() -> None:
    class Equal(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = nn.Module.__hash__

    model = nn.Sequential(Equal(1, 1), nn.Linear(1, 1))
    tree = ModuleTree(model)
    assert tree.unchanged()
    model[0] = Equal(1, 1)
    assert not tree.unchanged()


def test_a_child_replaced_by_another_kind_that_says_it_is_equal_is_seen() -> None:
    class Equal(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = nn.Module.__hash__

    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(3)])
    tree = ModuleTree(model)
    model[1] = Equal(1, 1)
    assert not tree.unchanged()


@pytest.mark.parametrize("numel", [2, 2**17])
def test_a_parameter_that_moves_to_the_next_module_is_seen(numel: int) -> None:
    model = nn.ModuleList(nn.Module() for _ in range(9))
    first = nn.Parameter(torch.zeros(numel))
    model[3].register_parameter("w", first)
    model[4].register_parameter("w", None)
    del model[4].w
    tree = ModuleTree(model)
    assert tree.unchanged()
    del model[3].w
    model[4].register_parameter("w", first)
    assert not tree.unchanged()


@pytest.mark.parametrize("numel", [2, 2**17])
def test_a_parameter_that_becomes_a_buffer_is_seen(numel: int) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(numel))
    tree = ModuleTree(model)
    model._buffers["w"] = model._parameters.pop("w")
    assert not tree.unchanged()


def test_exchanged_persistence_is_seen() -> None:
    model = nn.Module()
    model.register_buffer("x", torch.zeros(2))
    model.register_buffer("y", torch.zeros(2), persistent=False)
    tree = ModuleTree(model)
    assert tree.unchanged(persistence=True)
    model._non_persistent_buffers_set = {"x"}
    assert not tree.unchanged(persistence=True)


def test_a_module_without_tensors_that_is_replaced_is_seen() -> None:
    """It may save and load something of its own."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Identity())
    model[0].__dict__["_parameters"] = OrderedDict(model[0]._parameters)
    tree = ModuleTree(model)
    assert tree.unchanged()
    model[1] = nn.Identity()
    assert not tree.unchanged()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_what_is_in_a_wrapper_may_be_replaced(wrap: Callable[[nn.Module], Any]) -> None:
    name = "module" if wrap is nn.DataParallel else "_orig_mod"
    source, target = wrap(nn.Linear(2, 2)), wrap(nn.Linear(2, 2))
    flattener, applying = Flattener(), Target(target)

    def sync() -> None:
        prepared = flattener.prepare(source)
        flat = FlatBuffer(prepared.layout.nbytes)
        flattener.copy_into(prepared, flat)
        applying.apply_(prepared.layout, flat, prepared.values, copy=False)

    def same() -> bool:
        return torch.equal(getattr(source, name).weight, getattr(target, name).weight)

    for _ in range(2):
        sync()
        assert same()
    setattr(source, name, nn.Linear(2, 2))
    sync()
    assert same()
    setattr(target, name, nn.Linear(2, 2))
    sync()
    assert same()


def test_large_tensors_are_not_compared_by_their_elements() -> None:
    """A trainer that makes its parameters anew at each step would pay for that each time."""
    model = nn.ParameterDict({"a": torch.ones(2**20), "b": torch.ones(2)})
    tree = ModuleTree(model)
    model._parameters["a"] = nn.Parameter(torch.ones(2**20))
    with _Kernels() as kernels:
        assert not tree.unchanged()
    assert not kernels.called


class _Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def test_swapped_names_are_seen() -> None:
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.zeros(2)})
    tree = ModuleTree(model)
    model._parameters["a"], model._parameters["b"] = model["b"], model["a"]
    assert not tree.unchanged()


def test_persistence_is_seen_when_asked_for() -> None:
    model = Everything(1.0)
    tree = ModuleTree(model)
    model._non_persistent_buffers_set.clear()
    assert tree.unchanged()
    assert not tree.unchanged(persistence=True)


def test_a_module_that_makes_its_tables_up_is_walked_again() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = {"x": nn.Parameter(torch.ones(1))}

        @property
        def _parameters(self) -> Any:
            return self.__dict__.get("inner", {})

        @_parameters.setter
        def _parameters(self, value: Any) -> None:
            pass

    model = Computed()
    tree = ModuleTree(model)
    assert [place.name for place in tree.found.places] == ["x"]
    assert tree.unchanged()
    model.inner["y"] = nn.Parameter(torch.ones(1))
    assert not tree.unchanged()


@pytest.mark.parametrize(
    "source",
    [
        {"a": torch.ones(1), "b": {"c": torch.ones(2), "d": {}}, "e": torch.ones(3)},
        TensorDict({"a": torch.ones(1), "b": {"c": torch.ones(2)}, "e": torch.ones(3)}),
        TensorDictParams(TensorDict({"a": torch.ones(1), "b": {"c": torch.ones(2)}})),
        {},
    ],
)
def test_outline_is_the_short_form_of_a_walk(source: Any) -> None:
    found, short = find_nested(source), outline(source)
    assert short is not None
    assert all(a is b for a, b in zip(found.tensors, short[1], strict=True))


def test_outlines_differ_where_names_differ() -> None:
    one, two = torch.ones(1), torch.ones(2)
    sources: list[Any] = [
        {"a": one, "b": two},
        {"b": one, "a": two},
        {"a": {"b": one}, "c": two},
        {"a": {"b": one, "c": two}},
        {"a": {"b": one}, "c": {"d": two}},
        {"a": one, "c": {"d": two}},
        {"a": {}, "c": one, "d": two},
        {"a": {"c": one}, "d": two},
    ]
    keys = [short[0] for source in sources if (short := outline(source)) is not None]
    assert len(keys) == len(sources)
    assert all(a != b for index, a in enumerate(keys) for b in keys[:index])


def test_outline_leaves_values_to_the_walk() -> None:
    assert outline({"a": torch.ones(1), "b": 3}) is None
    td = TensorDict({"a": torch.ones(1)})
    td.set_non_tensor("b", "x")
    assert outline(td) is None


def test_without_the_counter_a_used_buffer_is_never_exclusive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer, "_use_count", None)
    layout, _, _ = packed({"a": torch.ones(1)})
    flat = FlatBuffer(layout.nbytes)
    assert flat.exclusive()
    flat.views(layout)
    assert not flat.exclusive()
