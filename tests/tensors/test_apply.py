"""Applying weights: what gets which value, what is refused, and what stays the same object."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors import (
    CopyPool,
    FlatBuffer,
    Flattener,
    Layout,
    Target,
    collect,
    torch_dtype,
)
from aiosync.tensors.buffer import in_flat_memory
from aiosync.wire import DTYPE_NBYTES
from tests.tensors._models import (
    Everything,
    Fragile,
    FragileParameter,
    Stateful,
    Tied,
    all_bits,
    bits,
    filled,
    packed,
    send,
)


@pytest.fixture(params=[False, True], ids=["flip", "copy"])
def copy(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


def test_everything_arrives(copy: bool) -> None:
    source, target = Everything(1.0, {"steps": 3}), Everything(2.0, {"steps": 0})
    source.body[1].num_batches_tracked.fill_(41)
    objects = [*target.parameters(), *target.buffers()]
    send(source, target, copy=copy)
    assert all_bits(target) == all_bits(source)
    assert target.extra == target.child.extra == {"steps": 3}
    kept = [*target.parameters(), *target.buffers()]
    assert all(a is b for a, b in zip(objects, kept, strict=True))
    assert target.none is None
    assert target.nothing is None
    assert not target.frozen.requires_grad
    assert target.body[0].weight.requires_grad


@pytest.mark.parametrize("name", sorted(DTYPE_NBYTES))
def test_every_dtype_arrives(name: str, copy: bool) -> None:
    dtype = torch_dtype(name)

    def build(seed: int) -> nn.Module:
        module = nn.Module()
        for index, shape in enumerate([(), (0,), (3, 5)]):
            tensor = filled(dtype, shape, seed + index)
            module.register_parameter(f"p{index}", nn.Parameter(tensor, requires_grad=False))
            module.register_buffer(f"b{index}", tensor.clone())
        return module

    source, target = build(0), build(100)
    send(source, target, copy=copy)
    assert all_bits(target) == all_bits(source)


def test_parameters_flip_and_buffers_are_copied() -> None:
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    flat = send(source, target, copy=False)
    assert in_flat_memory(target.weight)
    assert not in_flat_memory(target.running_mean)
    target(torch.randn(4, 3))  # writes to its buffers
    assert bits(target.running_mean) != bits(source.running_mean)
    flat.array[:] = 0
    assert target.weight.abs().sum() == 0
    assert target.running_var.abs().sum() > 0


def test_copy_keeps_the_memory_of_the_target() -> None:
    source, target = nn.Linear(300, 300), nn.Linear(300, 300)
    address, version = target.weight.data_ptr(), target.weight._version
    flat = send(source, target, copy=True)
    assert target.weight.data_ptr() == address
    assert target.weight._version > version  # autograd notices the write
    flat.array[:] = 0
    assert bits(target.weight) == bits(source.weight)


@pytest.mark.parametrize("pool", [None, CopyPool(1)])
def test_large_tensors_are_copied(pool: CopyPool | None) -> None:
    source, target = nn.Linear(1000, 1000), nn.Linear(1000, 1000)
    layout, flat, values = packed(source)
    Target(target).apply_(layout, flat, values, copy=True, pool=pool)
    assert all_bits(target) == all_bits(source)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(600, 300).t(),
        torch.randn(300, 1).expand(300, 600),
        torch.randn(300, 1200)[:, ::2],
        torch.randn(300, 600, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(300, 600)),
        torch.randn(300, 600).as_subclass(Fragile),
    ],
    ids=["t", "expand", "step", "conj", "neg", "subclass"],
)
def test_large_tensors_of_any_kind_are_copied_from(tensor: torch.Tensor) -> None:
    leaves = collect({"w": tensor})
    target = {"w": torch.zeros(300, 600, dtype=tensor.dtype)}
    Target(target).apply_tensors(Layout.plan(leaves), [tensor], {})
    assert torch.equal(target["w"], tensor)


def test_gradients_and_optimizer_state_are_untouched(copy: bool) -> None:
    source, target = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.Adam(target.parameters())
    target(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    grad, state = target.weight.grad, dict(optimizer.state[target.weight])
    send(source, target, copy=copy)
    assert target.weight.grad is grad
    assert all(optimizer.state[target.weight][key] is state[key] for key in state)
    send(source, target, copy=True)
    target(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_many_updates_between_two_buffers() -> None:
    source, target = Everything(0.0), Everything(9.0)
    flattener, receiver = Flattener(), Target(target)
    layout = flattener.prepare(source).layout
    buffers = [FlatBuffer(layout.nbytes), FlatBuffer(layout.nbytes)]
    for version in range(6):
        with torch.no_grad():
            for tensor in [*source.parameters(), *source.buffers()]:
                tensor.fill_(version)
        prepared = flattener.prepare(source)
        flat = buffers[version % 2]
        assert flat.exclusive()
        flattener.copy_into(prepared, flat)
        receiver.apply_(prepared.layout, flat, prepared.values, copy=False)
        assert all_bits(target) == all_bits(source)


# -- the target changes between two applies ---------------------------------------------------


def _move(model: Everything) -> None:
    model.double().float()


def _new_parameter(model: Everything) -> None:
    model.body[0].weight = nn.Parameter(torch.zeros(4, 3))


def _new_submodule(model: Everything) -> None:
    model.body[0] = nn.Linear(3, 4)


def _new_buffer(model: Everything) -> None:
    model.kept = torch.zeros(2)


def _not_contiguous(model: Everything) -> None:
    model.body[0].weight.data = torch.zeros(3, 4).t()


def _to_meta(model: Everything) -> None:
    model.to("meta")


def _inference(model: Everything) -> None:
    with torch.inference_mode():
        model.body[0].weight.data = torch.zeros(4, 3)
        model.kept = torch.zeros(2)


def _tie(model: Everything) -> None:
    model.body[0].bias = model.body[1].bias


def _share(model: Everything) -> None:
    model.share_memory()


@pytest.mark.parametrize(
    "change",
    [
        _move,
        _new_parameter,
        _new_submodule,
        _new_buffer,
        _not_contiguous,
        _to_meta,
        _inference,
        _tie,
        _share,
    ],
    ids=lambda change: change.__name__,
)
def test_target_is_resolved_at_every_apply(
    change: Callable[[Everything], None], copy: bool
) -> None:
    source, target = Everything(1.0), Everything(2.0)
    receiver = Target(target)
    layout, flat, values = packed(source)
    receiver.apply_(layout, flat, values, copy=copy)
    change(target)
    for _ in range(2):
        layout, flat, values = packed(source)
        receiver.apply_(layout, flat, values, copy=copy)
        assert all_bits(target) == all_bits(source)
        with torch.no_grad():
            for tensor in [*source.parameters(), *source.buffers()]:
                tensor.add_(1)


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view])
@pytest.mark.parametrize("size", [4, 200_000])
def test_a_target_that_became_a_conjugate_or_negative_view(
    size: int, view: Callable[[torch.Tensor], torch.Tensor], copy: bool
) -> None:
    source, target, buffer = nn.Module(), nn.Module(), torch.zeros(size, dtype=torch.complex64)
    source.w = nn.Parameter(torch.randn(size, dtype=torch.complex64))
    target.w = nn.Parameter(torch.zeros(size, dtype=torch.complex64))
    source.register_buffer("b", torch.randn(size, dtype=torch.complex64))
    target.register_buffer("b", buffer)
    receiver = Target(target)
    layout, flat, values = packed(source)
    receiver.apply_(layout, flat, values, copy=copy)
    target.w.data = view(target.w.data.clone())
    target.b = view(buffer)
    for _ in range(2):
        with torch.no_grad():
            source.w.add_(1)
            source.b.add_(1)
        layout, flat, values = packed(source)
        receiver.apply_(layout, flat, values, copy=copy)
        assert torch.equal(target.w, source.w)
        assert torch.equal(target.b, source.b)
        assert torch.equal(view(buffer), source.b)  # written through, not replaced


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view])
def test_conjugate_and_negative_views_for_tied_tensors(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    target, tensor = nn.Module(), view(torch.randn(3, dtype=torch.complex64))
    target.a = target.b = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    leaves = collect({"a": tensor, "b": tensor.resolve_conj().resolve_neg()})
    tensors = [leaf.tensor for leaf in leaves.leaves]
    Target(target).apply_tensors(Layout.plan(leaves), tensors, {})
    assert torch.equal(target.b, tensor)


def test_a_cast_target_is_refused_unless_casts_are_allowed(copy: bool) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    layout, flat, values = packed(source)
    receiver = Target(target)
    receiver.apply_(layout, flat, values, copy=copy)
    target.double()
    before = all_bits(target)
    with pytest.raises(ManifestMismatch, match="weight: expected dtype float64, got float32"):
        receiver.check(layout, values)
    with pytest.raises(ManifestMismatch, match="float64"):
        receiver.apply_(layout, flat, values, copy=copy)
    assert all_bits(target) == before
    Target(target, strict=False).apply_(layout, flat, values, copy=copy)
    assert all_bits(target) == all_bits(source.double())


def with_computed(dtype: torch.dtype) -> nn.Module:
    module = nn.Module()
    module.register_buffer("computed", torch.full((3,), 0.3, dtype=dtype), persistent=False)
    return module


def test_a_buffer_that_is_not_persistent_is_rounded_but_never_gets_less_than_it_has(
    copy: bool,
) -> None:
    double, single = with_computed(torch.float64), with_computed(torch.float32)
    for less in (torch.float32, torch.bfloat16, torch.float16):
        target = with_computed(less)
        target.computed.zero_()
        send(double, target, copy=copy)
        assert torch.equal(target.computed, torch.full((3,), 0.3).to(less))
    send(with_computed(torch.float16), with_computed(torch.bfloat16), copy=copy)
    before = all_bits(double)
    with pytest.raises(ManifestMismatch, match="computed: expected dtype float64, got float32"):
        send(single, double, copy=copy)
    assert all_bits(double) == before
    with pytest.raises(ManifestMismatch, match="expected dtype float32, got int64"):
        send(with_computed(torch.int64), single, copy=copy)
    with pytest.raises(ManifestMismatch, match="expected shape"):
        send({"computed": torch.zeros(4)}, single, copy=copy)
    with pytest.raises(ManifestMismatch, match="expected dtype float32, got float64"):
        send({"a": torch.zeros(3, dtype=torch.float64)}, {"a": torch.zeros(3)}, copy=copy)


def test_the_hint_names_wire_dtype_only_where_a_dtype_differs() -> None:
    with pytest.raises(ManifestMismatch, match="wire_dtype= of the sender"):
        send({"a": torch.zeros(3, dtype=torch.float64)}, {"a": torch.zeros(3)}, copy=True)
    with pytest.raises(ManifestMismatch, match="With strict=False") as caught:
        send({"a": torch.zeros(4)}, {"a": torch.zeros(3)}, copy=True)
    assert "wire_dtype" not in str(caught.value)


def test_a_view_of_flat_memory_is_never_written_to() -> None:
    first, second, target = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    layout, flat, values = packed(first)
    before = bytes(flat.memoryview())
    receiver = Target(target)
    receiver.apply_(layout, flat, values, copy=False)
    _, other, _ = packed(second)
    receiver.apply_(layout, other, values, copy=True)
    assert all_bits(target) == all_bits(second)
    assert bytes(flat.memoryview()) == before
    assert flat.exclusive()
    assert other.exclusive()


def test_memory_shared_between_processes_is_left_when_flipping() -> None:
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    with torch.no_grad():
        source.running_mean.fill_(7)
    target.share_memory()
    elsewhere = [target.weight.data, target.running_mean.data]
    before = [bits(tensor) for tensor in elsewhere]
    receiver = Target(target)
    for _ in range(2):
        layout, flat, values = packed(source)
        receiver.apply_(layout, flat, values, copy=False)
        assert all_bits(target) == all_bits(source)
    assert [bits(tensor) for tensor in elsewhere] == before
    assert not target.running_mean.is_shared()


# -- meta -------------------------------------------------------------------------------------


@pytest.mark.parametrize("partly", [False, True])
def test_meta_targets_get_memory(partly: bool, copy: bool) -> None:
    source, target = Everything(3.0), Everything(1.0)
    (target.body[0] if partly else target).to("meta")
    bias = target.body[0].bias
    receiver = Target(target)
    for _ in range(3):
        flat = FlatBuffer(packed(source)[1].nbytes)
        layout, flat, values = packed(source)
        receiver.apply_(layout, flat, values, copy=copy)
        assert all_bits(target) == all_bits(source)
        with torch.no_grad():
            source.body[0].bias.add_(1)
            source.kept.add_(1)
    assert target.body[0].bias is not bias
    assert in_flat_memory(target.body[0].bias) is not copy
    assert not in_flat_memory(target.kept)
    assert target.body[0].bias.requires_grad
    assert not target.frozen.requires_grad
    assert list(dict(target.named_parameters())) == list(dict(source.named_parameters()))


def test_tied_meta_parameters_stay_tied(copy: bool) -> None:
    target = Tied("meta")
    send(Tied(), target, copy=copy)
    assert target.head.weight is target.embed.weight
    assert not target.head.weight.is_meta


def test_meta_lstm_runs_after_apply(copy: bool) -> None:
    source, target = nn.LSTM(3, 4, num_layers=2), nn.LSTM(3, 4, num_layers=2, device="meta")
    send(source, target, copy=copy)
    inputs = torch.randn(5, 1, 3)
    assert torch.equal(source(inputs)[0], target(inputs)[0])


def test_meta_tensordict_params_inside_a_module(copy: bool) -> None:
    def build(device: str) -> nn.Module:
        params = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(3)}}).to(device)
        return nn.ModuleDict({"x": TensorDictParams(params)})

    source, target = build("cpu"), build("meta")
    send(source, target, copy=copy)
    assert all_bits(target) == all_bits(source)
    assert target["x"]["n", "b"].tolist() == [1, 1, 1]


# -- ties -------------------------------------------------------------------------------------


def test_tied_stay_tied(copy: bool) -> None:
    source, target = Tied(), Tied()
    send(source, target, copy=copy)
    assert target.head.weight is target.embed.weight
    assert bits(target.head.weight) == bits(source.head.weight)


def test_sent_tied_but_not_tied_here(copy: bool) -> None:
    source, target = Tied(), Tied()
    target.head.weight = nn.Parameter(torch.zeros(5, 3))
    receiver = Target(target)
    for _ in range(2):
        layout, flat, values = packed(source)
        receiver.apply_(layout, flat, values, copy=copy)
        assert bits(target.head.weight) == bits(target.embed.weight) == bits(source.embed.weight)
    assert target.head.weight.data_ptr() != target.embed.weight.data_ptr()


def test_moving_to_meta_unties_and_what_was_sent_ties_again(copy: bool) -> None:
    source, target = Tied(), Tied().to("meta")
    assert target.head.weight is not target.embed.weight
    send(source, target, copy=copy)
    assert target.head.weight is target.embed.weight
    assert bits(target.head.weight) == bits(source.head.weight)


def test_sent_separately_to_meta_stays_separate(copy: bool) -> None:
    source, target = Tied(), Tied("meta")
    source.head.weight = nn.Parameter(torch.zeros(5, 3))
    target.head.weight = nn.Parameter(torch.zeros(5, 3, device="meta"))
    send(source, target, copy=copy)
    assert target.head.weight.data_ptr() != target.embed.weight.data_ptr()


def test_tied_here_but_sent_separately(copy: bool) -> None:
    value = torch.full((5, 3), float("nan"))
    layout, flat, values = packed({"embed.weight": value, "head.weight": value.clone()})
    target = Tied()
    Target(target).apply_(layout, flat, values, copy=copy)
    assert bits(target.embed.weight) == bits(value)
    before = all_bits(target)
    layout, flat, values = packed({"embed.weight": value, "head.weight": torch.zeros(5, 3)})
    Target(target).check(layout, values)
    with pytest.raises(ManifestMismatch, match=r"head\.weight: tied to embed\.weight here"):
        Target(target).apply_(layout, flat, values, copy=copy)
    assert all_bits(target) == before


def test_one_name_of_tied_parameters_is_enough(copy: bool) -> None:
    target = Tied()
    send({"head.weight": torch.ones(5, 3)}, target, copy=copy)
    assert target.embed.weight.sum() == 15


def test_tied_by_memory_stays_so(copy: bool) -> None:
    target = Tied()
    target.head.weight = nn.Parameter(target.embed.weight.data)
    receiver = Target(target)
    for _ in range(2):
        layout, flat, values = packed(Tied())
        receiver.apply_(layout, flat, values, copy=copy)
        assert target.head.weight.data_ptr() == target.embed.weight.data_ptr()


def test_parameters_that_are_views_of_one_block_keep_their_memory(copy: bool) -> None:
    block = torch.zeros(8)
    target = nn.ParameterDict({"a": nn.Parameter(block[:4]), "b": nn.Parameter(block[4:])})
    send({"a": torch.ones(4), "b": torch.full((4,), 2.0)}, target, copy=copy)
    assert block.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]


# -- unusual tensors --------------------------------------------------------------------------


def test_memory_formats_are_kept(copy: bool) -> None:
    source = nn.Conv2d(3, 4, 2)
    target = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    strides = target.weight.stride()
    send(source, target, copy=copy)
    assert target.weight.stride() == strides
    assert all_bits(target) == all_bits(source)


def test_subclasses_are_copied(copy: bool) -> None:
    target = nn.Module()
    target.weight = torch.Tensor._make_subclass(FragileParameter, torch.zeros(3), True)
    target.register_buffer("b", torch.zeros(2).as_subclass(Fragile))
    parameter = target.weight
    send({"weight": torch.ones(3), "b": torch.ones(2)}, target, copy=copy)
    assert target.weight is parameter
    assert target.weight.tolist() == [1, 1, 1]
    assert target.b.tolist() == [1, 1]
    assert not in_flat_memory(target.weight)


def test_sparse_target_is_copied(copy: bool) -> None:
    target = nn.Module()
    target.weight = nn.Parameter(torch.zeros(3, 3).to_sparse(), requires_grad=False)
    parameter = target.weight
    receiver = Target(target)
    for factor in (1, 2):
        layout, flat, values = packed({"weight": torch.eye(3) * factor})
        receiver.apply_(layout, flat, values, copy=copy)
        assert target.weight is parameter
        assert torch.equal(parameter.to_dense(), torch.eye(3) * factor)


def test_mkldnn_target_is_copied(copy: bool) -> None:
    target = nn.Module()
    target.register_buffer("a", torch.zeros(2, 3).to_mkldnn())
    receiver = Target(target, strict=False)
    for value, dtype in ((1.0, torch.float32), (2.0, torch.float32), (3.0, torch.float64)):
        layout, flat, values = packed({"a": torch.full((2, 3), value, dtype=dtype)})
        receiver.apply_(layout, flat, values, copy=copy)
        assert target.a.is_mkldnn
        assert torch.equal(target.a.to_dense(), torch.full((2, 3), value))


UNWRITABLE = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "torch.sparse_csr": lambda: torch.ones(2, 3).to_sparse_csr(),
    "torch.sparse_bsc": lambda: torch.ones(2, 3).to_sparse_bsc((1, 1)),
    "FakeTensor": lambda: FakeTensorMode().from_tensor(torch.ones(2, 3)),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Sparse .* tensor support:UserWarning")
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_targets_that_cannot_be_written_are_refused(kind: str, copy: bool) -> None:
    target = {"a": UNWRITABLE[kind](), "b": torch.zeros(1)}
    why = "nested" if kind == "jagged" else kind
    with pytest.raises(ManifestMismatch, match=f"a: the target .*{why}"):
        send({"a": torch.ones(2, 3), "b": torch.ones(1)}, target, copy=copy)
    assert target["b"].item() == 0


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Sparse .* tensor support:UserWarning")
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_tensors_that_get_no_weights_may_be_of_any_kind(kind: str, copy: bool) -> None:
    target = nn.Module()
    target.register_buffer("a", UNWRITABLE[kind]())
    target.register_buffer("b", torch.zeros(1))
    receiver = Target(target, strict=False)
    for value in (1.0, 2.0):  # torch would have ended the process here
        layout, flat, values = packed({"b": torch.tensor([value])})
        receiver.apply_(layout, flat, values, copy=copy)
        assert target.b.item() == value


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
def test_quantised_target_is_refused(copy: bool) -> None:
    target = {"a": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)}
    with pytest.raises(ManifestMismatch, match="a: expected dtype qint8, got float32"):
        send({"a": torch.ones(3)}, target, copy=copy, strict=False)


def test_empty_parameters_that_were_tied(copy: bool) -> None:
    empty = nn.Parameter(torch.empty(0))
    source = nn.ParameterDict({"a": empty, "b": empty})
    target = nn.ParameterDict({"a": torch.empty(0), "b": torch.empty(0)})
    send(source, target, copy=copy)
    assert target["a"] is not target["b"]


def test_expanded_target_is_refused(copy: bool) -> None:
    target = {"a": torch.zeros(1).expand(3)}
    with pytest.raises(ManifestMismatch, match="a: the target is an expanded tensor"):
        send({"a": torch.ones(3)}, target, copy=copy)


def test_lazy_target_is_refused(copy: bool) -> None:
    with pytest.raises(ConfigError, match=r"not initialised yet: 0\.weight, 0\.bias"):
        send(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.LazyLinear(2)), copy=copy)


@pytest.mark.parametrize("target", [None, 3, [torch.ones(1)], torch.ones(1)])
def test_other_targets_are_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"supported: torch\.nn\.Module, TensorDict and dict"):
        send(nn.Linear(1, 1), target, copy=True)


def test_inside_inference_mode(copy: bool) -> None:
    source, target = Everything(3.0), Everything(1.0)
    target.body[0].to("meta")
    with torch.inference_mode():
        send(source, target, copy=copy)
    assert all_bits(target) == all_bits(source)
    target.body(torch.ones(2, 3)).sum().backward()
    assert not any(tensor.is_inference() for tensor in target.parameters())


# -- containers and formats -------------------------------------------------------------------


def test_containers_and_tensordict_modules(copy: bool) -> None:
    def build(fill: float) -> nn.Module:
        model = nn.Module()
        model.plist = nn.ParameterList([torch.full((1,), fill), torch.full((2,), fill)])
        model.pdict = nn.ParameterDict({"x": torch.full((1,), fill)})
        model.tdm = TensorDictModule(nn.Linear(1, 1), in_keys=["i"], out_keys=["o"])
        model.tdp = TensorDictParams(TensorDict({"a": {"b": torch.full((2,), fill)}}))
        return model

    source, target = build(1.0), build(2.0)
    send(source, target, copy=copy)
    assert all_bits(target) == all_bits(source)
    data = TensorDict({"i": torch.ones(1, 1)})
    assert torch.equal(source.tdm(data)["o"], target.tdm(data.exclude("o"))["o"])


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
        layout, flat, values = packed(FORMATS[of](source))
        receiver.apply_(layout, flat, values, copy=copy)
        _, after, _ = packed(target)
        assert {
            leaf.name: bits(view)
            for leaf, view in zip(layout.manifest.leaves, flat.views(layout), strict=True)
        } == {
            leaf.name: bits(view)
            for leaf, view in zip(
                packed(target)[0].manifest.leaves, after.views(packed(target)[0]), strict=True
            )
        }
        with torch.no_grad():
            source[0].weight.add_(1)


def test_plain_tensors_of_a_tensordict_are_copied_and_not_shared() -> None:
    target = TensorDict({"a": torch.zeros(2)})
    held = target["a"]
    flat = send({"a": torch.ones(2)}, target, copy=False)
    assert target["a"] is held
    assert held.tolist() == [1, 1]
    assert flat.exclusive()


def test_shared_tensordict_stays_shared(copy: bool) -> None:
    target = TensorDict({"a": torch.zeros(2)}).share_memory_()
    address = target["a"].data_ptr()
    send({"a": torch.ones(2)}, target, copy=copy)
    assert target["a"].data_ptr() == address
    assert target["a"].tolist() == [1, 1]


def test_meta_entries_of_containers(copy: bool) -> None:
    for target in (
        {"x": {"a": torch.zeros(2, device="meta")}},
        TensorDict({"x": {"a": torch.zeros(2, device="meta")}}),
        TensorDict({"x": {"a": torch.zeros(2, device="meta")}}).lock_(),
        TensorDict({"x": {"a": torch.zeros(2)}}).to("meta"),
        TensorDict({"x": {"a": torch.zeros(2)}}).to("meta").lock_(),
    ):
        flat = send({"x.a": torch.ones(2)}, target, copy=copy)
        assert target["x"]["a"].tolist() == [1, 1]
        assert flat.exclusive()


def test_values_of_containers(copy: bool) -> None:
    source = {"w": torch.ones(1), "sub": {"step": 4}, "_extra_state": {"a": (1, 2)}}
    target: dict[str, Any] = {"w": torch.zeros(1), "sub.step": 0, "_extra_state": None}
    send(source, target, copy=copy)
    assert target["sub.step"] == 4
    assert target["_extra_state"] == {"a": (1, 2)}
    td = TensorDict({"w": torch.zeros(1), "sub": {}})
    td.set_non_tensor(("sub", "step"), 0)
    td.set_non_tensor("__extra_state__", None)
    td.lock_()
    send(source, td, copy=copy)
    assert td["sub", "step"] == 4
    assert td.get("__extra_state__").data == {"a": (1, 2)}
    assert td.is_locked


def test_compiled_target(copy: bool) -> None:
    source, target = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")
    send(source, target, copy=copy)
    assert bits(target._orig_mod.weight) == bits(source.weight)


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
    if isinstance(state, torch.Tensor):
        assert torch.equal(got, state)
    elif isinstance(state, TensorDict):
        assert (got == state).all()
        assert got.batch_size == state.batch_size
    elif isinstance(state, dict) and "mean" in state:
        assert torch.equal(got["mean"], state["mean"])
        assert torch.equal(got["deep"][0]["std"], state["deep"][0]["std"])
    else:
        assert got == state
        assert type(got) is type(state)
    assert flat.exclusive()


def test_extra_state_sees_the_new_weights(copy: bool) -> None:
    class Cache(nn.Linear):
        cached = 0.0

        def get_extra_state(self) -> None:
            return None

        def set_extra_state(self, state: None) -> None:
            self.cached = float(self.weight.detach().sum())

    source, target = Cache(2, 2), Cache(2, 2)
    send(source, target, copy=copy)
    assert target.cached == float(source.weight.detach().sum())


def test_extra_state_may_be_a_buffer(copy: bool) -> None:
    class Same(nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            self.register_buffer("running", torch.full((2,), fill))

        def get_extra_state(self) -> torch.Tensor:
            return self.running

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.running = state

    target = Same(0.0)
    flat = send(Same(1.0), target, copy=copy)
    assert target.running.tolist() == [1, 1]
    assert flat.exclusive()


def test_extra_state_may_be_missing_but_not_unexpected(copy: bool) -> None:
    model = nn.Module()
    target = Stateful("kept")
    send(model, target, copy=copy)
    assert target.extra == "kept"
    with pytest.raises(ManifestMismatch, match="unexpected: _extra_state"):
        send(Stateful(1), model, copy=copy)


# -- refusals ---------------------------------------------------------------------------------


def test_a_mismatch_names_everything(copy: bool) -> None:
    source = {
        "0.weight": torch.ones(2),
        "0.bias": torch.ones(3, dtype=torch.float64),
        "9.x": torch.ones(1),
        "9.y": torch.ones(1),
        "9.z": 1,
    }
    target = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = all_bits(target)
    with pytest.raises(ManifestMismatch) as caught:
        send(source, target, copy=copy)
    error = caught.value
    assert sorted(error.missing) == ["1.bias", "1.weight"]
    assert sorted(error.unexpected) == ["9.x", "9.y", "9.z"]
    assert error.mismatched == {
        "0.weight": "expected shape (3, 2), got (2,)",
        "0.bias": "expected dtype float32, got float64",
    }
    assert all_bits(target) == before


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (2, 1), (3, 2), (6,)])
@pytest.mark.parametrize("strict", [False, True])
def test_shapes_are_never_broadcast(shape: tuple[int, ...], strict: bool, copy: bool) -> None:
    with pytest.raises(ManifestMismatch, match=r"a: expected shape \(2, 3\)"):
        send({"a": torch.ones(shape)}, {"a": torch.zeros(2, 3)}, copy=copy, strict=strict)


def test_a_subset_is_allowed_when_declared(copy: bool) -> None:
    target = nn.Linear(2, 2)
    bias = bits(target.bias)
    send({"weight": torch.ones(2, 2), "other": torch.ones(1)}, target, copy=copy, strict=False)
    assert target.weight.sum() == 4
    assert bits(target.bias) == bias


def test_no_name_in_common_is_refused_even_then(copy: bool) -> None:
    with pytest.raises(ManifestMismatch, match="no name in common"):
        send({"x": torch.ones(1)}, nn.Linear(2, 2), copy=copy, strict=False)


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
    with pytest.raises(ManifestMismatch, match="expected dtype"):
        send(source, target, copy=copy)
    if fits:
        send(source, target, copy=copy, strict=False)
        assert bits(target["a"]) == bits(torch.ones(3).to(to))
    else:
        with pytest.raises(ManifestMismatch, match="expected dtype"):
            send(source, target, copy=copy, strict=False)


def test_non_persistent_buffers_may_be_missing(copy: bool) -> None:
    source, target = Everything(1.0), Everything(2.0)
    layout, flat, values = packed(source, "state_dict")
    Target(target).apply_(layout, flat, values, copy=copy)
    assert target.hidden.tolist() == [[2, 2], [2, 2]]
    assert target.kept.tolist() == [1, 1]


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
