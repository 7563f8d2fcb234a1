"""Applying weights: the values that arrive, refusals, and objects that stay the same."""

from __future__ import annotations

import importlib.util
import io
import pickle
import subprocess
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictParams, tensorclass
from tensordict.nn import TensorDictModule
from torch import nn
from torch.optim.swa_utils import AveragedModel

from aiosync import WeightStrategy
from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors import (
    FlatBuffer,
    Layout,
    Target,
    collect,
    lacks_memory,
    torch_dtype,
)
from aiosync.tensors.buffer import in_flat_memory
from aiosync.wire import DTYPE_NBYTES
from tests.support.pages import ROOT
from tests.tensors._models import (
    Everything,
    Labelled,
    Refuses,
    Stateful,
    Tied,
    add_one,
    all_bits,
    bits,
    filled,
    packed,
    send,
)

# The module is in a package with a private name, and torch exports the wrappers nowhere else.
_wrappers = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
checkpoint_wrapper, offload_wrapper = _wrappers.checkpoint_wrapper, _wrappers.offload_wrapper

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
        # Autograd notices that the memory was written.
        loss.backward()


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
    Target(target).apply_tensors(Layout.plan(collect({"w": tensor}).leaves), [tensor], {})
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


@pytest.mark.parametrize("build", [dict, TensorDict, lambda inner: {"in": {"it": inner}}])
def test_a_container_that_is_shared_later_stays_shared(build: Any) -> None:
    """A module's parameters leave shared memory with the next update."""
    weight = nn.Parameter(torch.zeros(2))
    receiver = Target(build({"w": weight}))
    flat = send(build({"w": torch.ones(2)}), receiver, copy=False)
    assert in_flat_memory(weight)
    weight.share_memory_()
    address = weight.data_ptr()
    for value in (2.0, 3.0):
        send(build({"w": torch.full((2,), value)}), receiver, copy=False)
        assert weight.is_shared()
        assert (weight.data_ptr(), weight.tolist()) == (address, [value] * 2)
    assert flat.memoryview().cast("f")[0] == 1.0


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


# -- ties -------------------------------------------------------------------------------------


def _with_head(weight: Callable[[Tied], torch.Tensor]) -> Tied:
    target = Tied()
    target.head.weight = nn.Parameter(weight(target))
    return target


@pytest.mark.parametrize(
    ("build", "one", "shared"),
    [
        (Tied, True, True),
        (lambda: Tied("meta"), True, True),
        # Moving this model to meta unties its parameters.
        (lambda: Tied().to("meta"), True, True),
        (lambda: _with_head(lambda _: torch.zeros(5, 3)), False, False),
        (lambda: _with_head(lambda tied: tied.embed.weight.data), False, True),
    ],
    ids=["tied", "meta", "to meta", "not tied here", "by memory"],
)
def test_ties_stay_what_they_are_here(
    build: Callable[[], Tied], one: bool, shared: bool, copy: bool
) -> None:
    source, target = Tied(), build()
    receiver = Target(target)
    for _ in range(2):
        send(source, receiver, copy=copy)
        head, embed = target.head.weight, target.embed.weight
        assert all_bits(target) == all_bits(source)
        assert (head is embed, head.data_ptr() == embed.data_ptr()) == (one, shared)
        add_one(source)


@pytest.mark.parametrize("then", ["nothing", "another dtype", "shared memory"])
def test_ties_by_memory_outlive_the_received_memory(then: str) -> None:
    source, target = Tied(), _with_head(lambda tied: tied.embed.weight.data)
    receiver = Target(target, strict=False)
    head, embed = target.head.weight, target.embed.weight
    buffers = [send(source, receiver, copy=False)]
    if then == "shared memory":
        embed.data = embed.data.bfloat16().share_memory_()
        head.data = embed.data
        buffers.append(send(source, receiver, copy=False))
    elif then == "another dtype":
        buffers.append(send(source.bfloat16(), receiver, copy=False))
    assert head.data_ptr() == embed.data_ptr()
    for flat in buffers:
        receiver.detach_(flat)
        flat.array[:] = 0xFF
    assert head.data_ptr() == embed.data_ptr()
    assert torch.equal(embed, source.embed.weight.to(embed.dtype))


def test_tied_here_but_sent_separately(copy: bool) -> None:
    target, value = Tied(), torch.full((5, 3), float("nan"))
    send({"embed.weight": value, "head.weight": value.clone()}, target, copy=copy)
    before = all_bits(target)
    assert before["embed.weight"] == bits(value)
    with pytest.raises(ManifestMismatch, match=r"head\.weight: tied to embed\.weight here"):
        send({"embed.weight": value, "head.weight": torch.zeros(5, 3)}, target, copy=copy)
    assert all_bits(target) == before


# -- wrappers ---------------------------------------------------------------------------------


class Net(nn.Sequential):
    """A model with everything that has a name: parameters, tied ones, buffers, extra state."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2), Tied(), Stateful({"a": [1]}))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": nn.DataParallel,
    "averaged": AveragedModel,
    "checkpointed": checkpoint_wrapper,
    "offloaded": offload_wrapper,
    "several": lambda model: AveragedModel(checkpoint_wrapper(nn.DataParallel(model))),
    "child": lambda model: nn.Sequential(nn.DataParallel(checkpoint_wrapper(model))),
    "compiled child": lambda model: nn.Sequential(torch.compile(model)),
    "averaged child": lambda model: nn.Sequential(AveragedModel(model)),
}


def _inner_bits(model: nn.Module) -> list[bytes]:
    """Return the parameters and buffers of a wrapped model, without those of its wrappers."""
    return [value for name, value in all_bits(model).items() if "n_averaged" not in name]


def _wrapped(name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WRAPPERS[name](Net())


PAIRS = [(of, to) for of in WRAPPERS for to in WRAPPERS if ("child" in of) == ("child" in to)]


@pytest.mark.parametrize(("of", "to"), PAIRS)
def test_wrappers_are_looked_through(of: str, to: str, copy: bool) -> None:
    source, target = _wrapped(of), _wrapped(to)
    receiver = Target(target)
    for extract_as in ("tensordict", "state_dict"):
        add_one(source)
        receiver.apply_(*packed(source, extract_as), copy=copy)
        assert _inner_bits(target) == _inner_bits(source)


FORMS_AND_STRICT: list[tuple[Callable[[Any], Any], bool]] = [
    (nn.Module.state_dict, True),
    (nn.Module.state_dict, False),
    (WeightStrategy().extract_weights, True),
    # This form has no extra state.
    (TensorDict.from_module, False),
]


@pytest.mark.parametrize(("form", "strict"), FORMS_AND_STRICT)
@pytest.mark.parametrize("of", WRAPPERS)
def test_names_of_a_wrapped_model_fit_such_a_model(
    of: str, form: Any, strict: bool, copy: bool
) -> None:
    source, target = _wrapped(of), _wrapped(of)
    add_one(source)
    send(form(source), target, copy=copy, strict=strict)
    assert _inner_bits(target) == _inner_bits(source)


@pytest.mark.parametrize("of", ["compiled", "parallel", "checkpointed", "offloaded"])
def test_names_that_all_have_a_prefix_fit_a_model_without_it(of: str, copy: bool) -> None:
    source, target = _wrapped(of), Net()
    add_one(source)
    send(source.state_dict(), target, copy=copy)
    assert all_bits(target) == dict(zip(all_bits(target), _inner_bits(source), strict=True))
    send(nn.DataParallel(source).state_dict(), target, copy=copy)


def test_a_prefix_goes_only_if_all_names_have_it_and_none_fits(copy: bool) -> None:
    linear = nn.Linear(2, 2)
    before = all_bits(linear)
    for weights in (
        # The count of this model has no prefix.
        AveragedModel(nn.Linear(2, 2)).state_dict(),
        {"module.weight": torch.ones(2, 2), "bias": torch.ones(2)},
        {"module.weight": torch.ones(2, 2)},
        {"pre_orig_mod.weight": torch.ones(2, 2), "pre_orig_mod.bias": torch.ones(2)},
    ):
        with pytest.raises(ManifestMismatch, match="missing: .*bias|weight"):
            send(weights, linear, copy=copy)
    assert all_bits(linear) == before
    policy = TensorDictModule(nn.Linear(2, 2), in_keys=["a"], out_keys=["b"])
    send(TensorDictModule(linear, in_keys=["a"], out_keys=["b"]), policy, copy=copy)
    assert all_bits(policy.module) == before
    with pytest.raises(ManifestMismatch, match="missing: module.weight"):
        send(linear, policy, copy=copy)


def test_a_child_named_as_a_wrapper_names_its_own_is_no_other_tensor(copy: bool) -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.module = nn.Linear(2, 2)
        model.add_module("_orig_mod", nn.Linear(2, 2))
        return model

    source, target = nn.DataParallel(build()), nn.DataParallel(build())
    for form in (source, source.module, source.state_dict()):
        add_one(source)
        send(form, target, copy=copy)
        assert all_bits(target) == all_bits(source)
    twice = {"weight": torch.ones(2, 2), "module.weight": torch.zeros(2, 2)}
    # A state with both names comes of two parts that somebody put together.
    with pytest.raises(ManifestMismatch, match="tied"):
        send(twice, nn.DataParallel(nn.Linear(2, 2)), copy=copy, strict=False)


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


CACHING: dict[str, Callable[[nn.Module], Any]] = {
    "tensordict": lambda model: TensorDict.from_module(model).lock_(),
    "dict": lambda model: {"actor": TensorDict.from_module(model).lock_()},
    "unlocked": lambda model: TensorDict({"actor": TensorDict.from_module(model).lock_()}),
    "params": lambda model: TensorDictParams(TensorDict.from_module(model).lock_()),
    "module": lambda model: nn.ModuleDict({"actor": TensorDict.from_module(model, as_module=True)}),
}


def _numbers(td: Any) -> set[float]:
    """Return the numbers in a TensorDict's ``detach()``, which a locked one makes only once."""
    return {
        number
        for _, leaf in td.lock_().detach().items(include_nested=True, leaves_only=True)
        for number in leaf.flatten().tolist()
    }


@pytest.mark.parametrize("form", CACHING)
def test_a_locked_tensordict_detaches_each_version(form: str, copy: bool) -> None:
    def build(value: float) -> Any:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        for tensor in model.state_dict().values():
            tensor.fill_(value)
        return CACHING[form](model)

    target, flats = build(0), list[FlatBuffer]()
    receiver = Target(target)
    for value in (1, 2, 3, 4):
        flats.append(send(build(value), receiver, copy=copy))
        part = target["actor"] if form in ("dict", "unlocked", "module") else target
        assert _numbers(part) == {value}
        assert all(flat.exclusive() for flat in flats[:-1])
        if value == 2 and isinstance(target, nn.ModuleDict):
            # This puts another TensorDict into the TensorDictParams.
            target.cpu()
            assert _numbers(target["actor"]) == {value}
    receiver.detach_(flats[-1])
    with torch.no_grad():
        for leaf in collect(target).leaves:
            leaf.tensor.fill_(5)
    assert _numbers(part) == {5}


def test_a_locked_tensordict_in_place_of_another_detaches_each_version(copy: bool) -> None:
    """It has the same parameters; the caches of the old one no longer matter."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for target in (
        {"actor": TensorDict.from_module(model).lock_()},
        TensorDict({"actor": TensorDict.from_module(model).lock_()}),
        {"actor": TensorDict.from_module(model).to_dict(retain_none=False)},
    ):
        receiver = Target(target)
        for value in (1.0, 2.0, 3.0, 4.0):
            if value == 3.0:
                target["actor"] = TensorDict.from_module(model).lock_()
                _numbers(target["actor"])
            weights = (
                TensorDict.from_module(model)
                .detach()
                .clone()
                .apply(lambda each, value=value: torch.full_like(each, value))
            )
            flat = send({"actor": weights}, receiver, copy=copy)
            if value > 2:
                assert _numbers(target["actor"]) == {value}
        receiver.detach_(flat)


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


def _in_unlocked(td: TensorDict) -> TensorDict:
    root = TensorDict({"actor": td.lock_()})
    root.set_non_tensor("count", 0)
    return root


LOCKED: dict[str, Callable[[TensorDict], Any]] = {
    "dict": lambda td: {"count": 0, "actor": td.lock_()},
    "unlocked": _in_unlocked,
    "deep": lambda td: {"count": 0, "actor": TensorDict({"net": td}).lock_()},
    "deep in unlocked": lambda td: _in_unlocked(TensorDict({"net": td})),
    "params": lambda td: {"count": 0, "actor": TensorDict({"p": TensorDictParams(td)}).lock_()},
}


@pytest.mark.parametrize("of", ["cpu", "meta", "a TensorDict on meta"])
@pytest.mark.parametrize("nest", LOCKED)
def test_locked_tensordicts_in_other_containers(nest: str, of: str, copy: bool) -> None:
    def build(step: int, of: str = "cpu") -> TensorDict:
        weight = torch.full((2,), float(step), device=of.split()[-1])
        td = TensorDict({"w": weight}, device="meta" if " " in of else None)
        td.set_non_tensor("step", step)
        return td

    td, source = build(0, of), LOCKED[nest](build(4))
    target, sent = LOCKED[nest](td), collect(source)
    receiver = Target(target)
    for _ in range(2):
        send(source, receiver, copy=copy)
        found = collect(target)
        assert (found.values, sorted(found.values.values())) == (sent.values, [0, 4])
        assert [leaf.tensor.tolist() for leaf in found.leaves] == [[4, 4]]
        assert td.is_locked


def test_values_are_put_back_if_a_later_one_is_refused(copy: bool) -> None:
    class Refusing(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if (key, value) == ("last", 1):
                raise ValueError("this value is refused")
            super().__setitem__(key, value)

    inner = TensorDict({"w": torch.zeros(2)})
    inner.set_non_tensor("step", 0)
    target = Refusing({"count": 0, "actor": inner.lock_(), "last": 0})
    actor = TensorDict({"w": torch.ones(2)})
    actor.set_non_tensor("step", 4)
    with pytest.raises(ValueError, match="this value is refused"):
        send({"count": 1, "actor": actor, "last": 1}, target, copy=copy)
    assert (target["count"], inner["step"], target["last"]) == (0, 0, 0)
    assert (inner["w"].tolist(), inner.is_locked) == ([0, 0], True)


def test_values_go_to_the_containers_that_are_there_now(copy: bool) -> None:
    source: dict[str, Any] = {"sub": {"w": torch.ones(2), "step": 1}}
    target: dict[str, Any] = {"sub": {"w": torch.zeros(2), "step": 0}}
    receiver = Target(target)
    send(source, receiver, copy=copy)
    old, target["sub"] = target["sub"], dict(target["sub"])
    source["sub"]["step"] = 2
    send(source, receiver, copy=copy)
    assert (old["step"], target["sub"]["step"]) == (1, 2)
    # Both names are the same without the wrapper's part.
    target["sub"]["_orig_mod.step"] = target["sub"].pop("step")
    source["sub"]["step"] = 3
    send(source, receiver, copy=copy)
    assert target["sub"].keys() == {"w", "_orig_mod.step"}
    assert target["sub"]["_orig_mod.step"] == 3


def _noted(fill: float, note: Any) -> TensorDict:
    inner = TensorDict({"b": torch.full((2,), fill)}, [2])
    inner.set_non_tensor("note", note)
    return TensorDict({"a": torch.full((2, 3), fill), "in": inner}, batch_size=[2])


@pytest.mark.parametrize("note", ["x", {"n": [1, (2, None)]}, {"t": torch.ones(1)}])
def test_a_value_for_all_elements_travels(note: Any, copy: bool) -> None:
    source, target = _noted(1.0, note), _noted(0.0, "old")
    send(source, target, copy=copy)
    assert repr(target.to_dict()) == repr(source.to_dict())


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


SPECIAL_STATES = [
    OrderedDict(b=1, a=OrderedDict({2: torch.ones(1)})),
    Counter("abca"),
    defaultdict(int, a=1),
    defaultdict(list, {3: [torch.Size([2, 3])]}),
    {"shapes": (torch.Size([]), [defaultdict(None)])},
]


@pytest.mark.parametrize("state", SPECIAL_STATES, ids=repr)
@pytest.mark.parametrize("form", [lambda model: model, lambda model: model.state_dict()])
def test_extra_state_keeps_types_that_are_nearly_plain(state: Any, form: Any, copy: bool) -> None:
    source, target = nn.Sequential(Stateful(state)), nn.Sequential(Stateful("old"))
    send(form(source), target, copy=copy)
    assert repr(target[0].extra) == repr(state)


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
    """A missing extra state is refused, or warned of once.

    Otherwise a part of the model would stay old, though the trainer is told that all of it is new.
    """
    model, target = nn.Module(), Stateful("kept")
    with pytest.raises(ManifestMismatch, match="missing: _extra_state"):
        send(model, target, copy=copy)
    send(model, target, copy=copy, strict=False)
    lenient = Target(target, strict="warn")
    with pytest.warns(UserWarning, match="Stateful, which keeps what it has: _extra_state"):
        send(model, lenient, copy=copy)
    lenient.target = target = Stateful("kept")
    # A second warning would be an error.
    send(model, lenient, copy=copy)
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


@pytest.mark.parametrize("strict", [True, False])
def test_either_side_may_lack_a_buffer_that_is_not_persistent(strict: bool, copy: bool) -> None:
    source, target = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    nn.init.constant_(source.weight, 3.0)
    source.register_buffer("mask", torch.ones(2), persistent=False)
    target.register_buffer("cache", torch.zeros(3), persistent=False)
    form: Any
    for form in (lambda model: model, lambda model: nn.Sequential(model)):
        send(form(source), form(target), copy=copy, strict=strict)
        assert (target.weight == 3).all() and "mask" not in dict(target.named_buffers())
    target.running_mean = None
    if strict:
        with pytest.raises(ManifestMismatch, match=r"unexpected: running_mean\)"):
            send(source, target, copy=copy)


def _with_buffer(dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    model.register_buffer("count", torch.tensor(16777217).to(dtype))
    return model


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("of", "to", "fits"),
    [
        (torch.float64, torch.float32, True),
        (torch.float64, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.complex128, torch.complex64, True),
        # A float64 buffer that arrives in bfloat16 was rounded on its way.
        (torch.bfloat16, torch.float64, False),
        (torch.float64, torch.int64, False),
        (torch.int64, torch.int32, False),
    ],
)
def test_a_module_rounds_its_own_buffers(
    of: torch.dtype, to: torch.dtype, fits: bool, strict: bool, copy: bool
) -> None:
    source, target = _with_buffer(of), _with_buffer(to)
    target.count.zero_()
    if not fits and (strict or not (of.is_floating_point and to.is_floating_point)):
        with pytest.raises(ManifestMismatch, match="count: expected dtype"):
            send(source, target, copy=copy, strict=strict)
        return
    send(source, target, copy=copy, strict=strict)
    assert target.count.dtype is to
    assert torch.equal(target.count, source.count.to(to))


def test_a_value_takes_the_memory_of_a_tensor_once(copy: bool) -> None:
    layout, flat, _ = packed({"w": torch.ones(1)})
    values = {"_extra_state": [{"__aiosync__": "tensor", "name": "w"}] * 1000}
    target: dict[str, Any] = {"w": torch.zeros(1), "_extra_state": None}
    Target(target).apply_(layout, flat, values, copy=copy)
    found = target["_extra_state"]
    assert [each.item() for each in found] == [1.0] * 1000
    # The memory is neither that of the target nor that of the update.
    assert len({each.data_ptr() for each in found}) == 1
    found[0].zero_()
    assert target["w"].item() == flat.views(layout)[0].item() == 1.0


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
        {"__aiosync__": "OrderedDict", "items": 3},
        {"__aiosync__": "Size", "items": ["x"]},
        {"__aiosync__": "defaultdict", "items": [1]},
        {"__aiosync__": "dict", "items": [[[1], 2]]},
        {"__aiosync__": "Counter", "items": [[1]]},
        {"__aiosync__": "tensordict", "batch_size": ["x"], "items": {}},
        {
            "__aiosync__": "tensordict",
            "batch_size": [7],
            "items": {"a": {"__aiosync__": "tensor", "name": "w"}},
        },
    ],
)
def test_values_packed_by_nobody_are_refused(value: Any, copy: bool) -> None:
    layout, flat, _ = packed({"w": torch.ones(1)})
    target = {"w": torch.zeros(1), "_extra_state": "old"}
    with pytest.raises(ConfigError, match="packed"):
        Target(target).apply_(layout, flat, {"_extra_state": value}, copy=copy)
    assert target["w"].tolist() == [0]
    assert target["_extra_state"] == "old"


# -- objects that cannot be a target ---------------------------------------------------------------


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2, 3)


def _freed() -> torch.Tensor:
    tensor = torch.ones(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


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
    "freed": _freed,
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
    # A tensor that gets no weights may be of any kind. Torch would have crashed here.
    for value in (1.0, 2.0):
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
    # This view has other strides.
    lambda whole: whole.t()[:, :2].t(),
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


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("buffers", ["all", "persistent"])
def test_tensors_without_weights_may_overlap(strict: bool, buffers: Any, copy: bool) -> None:
    target, block = nn.Linear(2, 2), torch.zeros(4)
    target.register_buffer("cache", block, persistent=False)
    target.register_buffer("part", block[:2], persistent=False)
    receiver, source = Target(target, strict=strict, buffers=buffers), nn.Linear(2, 2)
    for _ in range(2):
        add_one(source)
        send(source, receiver, copy=copy)
        assert bits(target.weight) == bits(source.weight)
        block += 1
        assert target.part.tolist() == target.cache[:2].tolist() == block[:2].tolist()


def test_every_tensor_inside_a_large_one_is_named(copy: bool) -> None:
    block = torch.arange(8.0)
    target = nn.ParameterDict({"whole": nn.Parameter(block)})
    # The first two begin at one address; the last one is far from its neighbour.
    parts = {"a": block[:2], "b": block[:1], "c": block[3:4], "d": block[6:]}
    target.update({name: nn.Parameter(part) for name, part in parts.items()})
    before, weights = all_bits(target), {"whole": torch.ones(8)}
    weights |= {name: torch.ones_like(part) for name, part in parts.items()}
    with pytest.raises(ManifestMismatch) as caught:
        send(weights, target, copy=copy)
    assert set(caught.value.mismatched) == set(parts)
    # A tensor that gets weights is refused also if the other one gets none.
    for sent, named in (({"whole"}, {"whole"}), ({"c"}, {"c"}), ({"a", "d"}, {"a", "d"})):
        with pytest.raises(ManifestMismatch, match="in common") as caught:
            send({name: weights[name] for name in sent}, target, copy=copy, strict=False)
        assert set(caught.value.mismatched) == named
    assert all_bits(target) == before


def test_memory_that_came_to_be_shared() -> None:
    source, target = (nn.ModuleDict({n: nn.Linear(2, 2) for n in "ab"}) for _ in range(2))
    receiver = Target(target)
    send(source, receiver, copy=True)
    target["b"].weight.data = target["a"].weight.data
    with pytest.raises(ManifestMismatch, match=r"[ab]\.weight"):
        send(source, receiver, copy=True)
    target["b"].weight.data = torch.zeros(2, 2)
    send(source, receiver, copy=True)
    assert all_bits(target) == all_bits(source)


def test_slices_of_one_block_that_do_not_overlap(copy: bool) -> None:
    block = torch.zeros(8)
    target = nn.ParameterDict({"a": nn.Parameter(block[:4]), "b": nn.Parameter(block[4:])})
    send({"a": torch.ones(4), "b": torch.full((4,), 2.0)}, target, copy=copy)
    assert [*target["a"].tolist(), *target["b"].tolist()] == [1, 1, 1, 1, 2, 2, 2, 2]


# -- failures in the middle -------------------------------------------------------------------


def test_extra_state_that_is_refused(copy: bool) -> None:
    target = Refuses(1.0, refuse=True)
    receiver = Target(target)
    old = send(Refuses(1.0, refuse=True), receiver, copy=False)
    before = all_bits(target)
    layout, flat, values = packed(Refuses(2.0, refuse=False))
    with pytest.raises(RuntimeError, match="this state is refused"):
        receiver.apply_(layout, flat, values, copy=copy)
    assert all_bits(target) == before
    # The module itself changed its extra state before it refused the new one.
    assert target.extra == -1.0
    assert (old.exclusive(), flat.exclusive()) == (False, True)
    target.refuse = False
    receiver.apply_(layout, flat, values, copy=copy)
    assert (target.extra, target.first.weight.sum()) == (2.0, 18)


READ_ONLY = """
import mmap, tempfile, torch
from torch import nn
from aiosync.tensors import FlatBuffer, Target
from tests.tensors._models import all_bits, packed

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.refuses = nn.Linear(64, 64), nn.Linear(64, 64), False
        nn.init.constant_(self.a.bias, torch.nan)

    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        if self.refuses:
            raise ValueError("this state is refused")

layout, flat, values = packed(Model())
with tempfile.TemporaryFile() as file:
    file.write(flat.memoryview())
    file.flush()
    block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
model = Model()
receiver = Target(model, strict=False)
receiver.apply_(layout, FlatBuffer(block), values, copy=False)
before, model.refuses = all_bits(model), True
layout, flat, _ = packed({"b.weight": torch.ones(64, 64)})
for copy in (False, True):
    try:
        receiver.apply_(layout, flat, {"_extra_state": 2}, copy=copy)
    except ValueError as exc:
        print(exc, all_bits(model) == before)
"""


def test_a_refused_part_leaves_weights_in_read_only_memory_alone() -> None:
    command = [sys.executable, "-c", READ_ONLY]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["this state is refused True"] * 2


def test_writes_to_the_memory_of_an_earlier_part_are_undone(copy: bool) -> None:
    class WritesThere(Refuses):
        def set_extra_state(self, state: float) -> None:
            nn.init.constant_(self.first.bias, state)
            super().set_extra_state(state)

    target = WritesThere(1.0, refuse=True)
    receiver = Target(target, strict=False)
    send({"first.bias": torch.full((3,), 5.0)}, receiver, copy=False)
    before = all_bits(target)
    layout, flat, _ = packed({"first.weight": torch.ones(3, 3)})
    with pytest.raises(RuntimeError, match="this state is refused"):
        receiver.apply_(layout, flat, {"_extra_state": 2.0}, copy=copy)
    assert all_bits(target) == before


EXPANDED = [
    torch.zeros(1).expand(4),
    torch.zeros(3, 1).expand(3, 4),
    torch.zeros(()).expand(2, 2),
    torch.zeros(0, 1).expand(0, 4),
]


@pytest.mark.parametrize("mask", EXPANDED, ids=lambda mask: str(tuple(mask.shape)))
def test_expanded_tensors_are_put_back_too(mask: torch.Tensor, copy: bool) -> None:
    class WritesThere(Refuses):
        def set_extra_state(self, state: float) -> None:
            if self.mask.numel():
                self.mask[(0,) * mask.dim()] = state
            super().set_extra_state(state)

    target = WritesThere(1.0, refuse=True)
    target.register_buffer("mask", mask, persistent=False)
    before = all_bits(target)
    with pytest.raises(RuntimeError, match="this state is refused"):
        send(Refuses(2.0, refuse=False), target, copy=copy)
    assert all_bits(target) == before


def test_a_part_whose_memory_was_freed_may_get_no_weights(copy: bool) -> None:
    target, source = Refuses(1.0, refuse=False), Refuses(2.0, refuse=False)
    target.offloaded = nn.Linear(64, 64)
    for tensor in target.offloaded.parameters():
        tensor.untyped_storage().resize_(0)
    receiver = Target(target, strict=False)
    send(source, receiver, copy=copy)
    assert (target.extra, target.first.weight.sum()) == (2.0, 18)
    target.refuse, source.extra = True, 3.0
    before = all_bits(target.first)
    add_one(source)
    with pytest.raises(RuntimeError, match="this state is refused"):
        send(source, receiver, copy=copy)
    assert all_bits(target.first) == before
    assert target.scale.tolist() == [2.0] * 3


def test_all_else_is_put_back_if_something_cannot_be(
    copy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class OnlyReal(Refuses):
        def __setattr__(self, name: str, value: Any) -> None:
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ValueError("no tensors on the meta device")
            super().__setattr__(name, value)

    target, source = OnlyReal(1.0, refuse=True), Refuses(2.0, refuse=False)
    target.register_parameter("late", nn.Parameter(torch.empty(2, device="meta")))
    source.late = nn.Parameter(torch.ones(2))
    before = all_bits(target.first)
    with pytest.raises(RuntimeError, match="this state is refused"):
        send(source, target, copy=copy)
    assert all_bits(target.first) == before
    assert target.scale.tolist() == [1.0] * 3
    [record] = caplog.records
    assert record.exc_info is not None
    assert "no tensors on the meta device" in str(record.exc_info[1])


# -- a module whose parameters are views of a flat buffer is still an ordinary one -----------------


def torch_saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: nn.Module) -> Any:
    data = pickle.dumps(model)
    # If parameters were views of one big storage, each of them would save all of it.
    assert len(data) < 30_000
    return pickle.loads(data)


@pytest.mark.parametrize("clone", [deepcopy, torch_saved, pickled])
def test_a_clone_is_independent(clone: Any) -> None:
    model = Everything(1.0)
    model.tied = Tied()
    model.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(16))
    send(deepcopy(model), model, copy=False)
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
    # The compiler may show its progress with tqdm, which would start a thread.
    if importlib.util.find_spec("tqdm"):
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


# -- a TensorDictParams whose TensorDict and whose tables as a module differ -----------------------


class Model(nn.Module):
    """A model whose forward returns the numbers in the tensors that it computes with."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        tied = nn.Parameter(torch.full((2,), value))
        tensors = {
            "inner": {"weight": nn.Parameter(torch.full((3,), value)), "tied": tied},
            "tied": tied,
            "frozen": nn.Parameter(torch.full((2,), value), requires_grad=False),
            "buffer": torch.full((2,), value),
            "steps": torch.full((1,), int(value)),
        }
        self.params = TensorDictParams(TensorDict(tensors), no_convert=True)
        self.plain = nn.Linear(1, 1)
        nn.init.constant_(self.plain.weight, value)
        nn.init.constant_(self.plain.bias, value)

    def forward(self) -> list[float]:
        leaves = self.params.items(include_nested=True, leaves_only=True)
        return [number for _, leaf in leaves for number in leaf.tolist()]


def _meta_as_torchrl(model: nn.Module) -> None:
    def meta(tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.detach().to("meta")
        is_param = isinstance(tensor, nn.Parameter)
        return nn.Parameter(data, requires_grad=False) if is_param else data

    weights = TensorDict.from_module(model, as_module=True)
    weights.apply(meta, device="meta", filter_empty=False).to_module(model)


def _meta_all_parameters(model: nn.Module) -> None:
    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(tensor.detach().to("meta"), requires_grad=False)

    TensorDict.from_module(model).apply(meta, device="meta").to_module(model)


def _others(model: nn.Module) -> None:
    def other(tensor: torch.Tensor) -> torch.Tensor:
        new = torch.full_like(tensor, 77, requires_grad=False)
        return nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new

    TensorDict.from_module(model).apply(other).to_module(model)


WAYS = [_meta_as_torchrl, _meta_all_parameters, _others]


def _params(model: Model) -> dict[str, torch.Tensor]:
    """Return the parameters in the tables of the module, not those of its TensorDict."""
    return dict(model.params.named_parameters(remove_duplicate=False))


def _check_tables(model: Model) -> None:
    params, buffers = _params(model), dict(model.params.named_buffers())
    assert buffers.keys() == {"buffer", "steps"}
    for name, tensor in (params | buffers).items():
        assert model.params.get(tuple(name.split("."))) is tensor, name
        assert isinstance(tensor, nn.Parameter) is (name in params)


@pytest.mark.parametrize("split", WAYS)
def test_both_tables_get_the_weights(split: Any, copy: bool) -> None:
    model = Model(9.0)
    names = list(model.state_dict())
    split(model)
    assert lacks_memory(model) is (split is not _others)
    receiver = Target(model)
    buffers = []
    for value in (1.0, 2.0, 3.0, 4.0):
        buffers.append(send(Model(value), receiver, copy=copy))
        assert set(model()) == {value}
        _check_tables(model)
        assert not lacks_memory(model)
        assert list(model.state_dict()) == names
    # _others() makes separate tensors of tied ones.
    if split is not _others:
        assert _params(model)["tied"] is _params(model)["inner.tied"]
    for flat in buffers:
        receiver.detach_(flat)
        flat.array[:] = 0xFF
    assert set(model()) == {4}


def test_a_locked_tensordictparams_gets_memory(copy: bool) -> None:
    model = Model(9.0)
    _meta_as_torchrl(model)
    model.params.lock_()
    send(Model(1.0), model, copy=copy)
    assert set(model()) == {1}
    _check_tables(model)
    assert model.params.is_locked


def test_a_source_sends_what_its_forward_computes_with() -> None:
    source, target = Model(1.0), Model(2.0)
    _others(source)
    send(source, target, copy=False)
    assert set(target()) == {77}


def test_failing_puts_both_tables_back() -> None:
    source, target = Model(1.0), Model(9.0)
    source.last, target.last = Refuses(2.0, refuse=False), Refuses(1.0, refuse=True)
    _meta_as_torchrl(target)
    own = _params(target)
    with pytest.raises(RuntimeError, match="refused"):
        send(source, target, copy=False)
    assert lacks_memory(target)
    assert all(_params(target)[name] is tensor for name, tensor in own.items())
    target.last.refuse = False
    send(source, target, copy=False)
    assert set(target()) == {1}
