"""Snapshots: what is copied, and that a changed source is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from aiosync.errors import ConfigError
from aiosync.tensors import CopyPool, FlatBuffer, Flattener
from tests.tensors._models import Everything, Fragile, Stateful, Tied, bits, filled, packed


def contents(flattener: Flattener, source: Any) -> dict[str, bytes]:
    prepared = flattener.prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    flattener.copy_into(prepared, flat)
    views = flat.views(prepared.layout)
    return {
        leaf.name: bits(view)
        for leaf, view in zip(prepared.layout.manifest.leaves, views, strict=True)
    }


def expected(model: nn.Module) -> dict[str, bytes]:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: bits(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.tensor([3.0]).expand(5, 2),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(10.0)[3:],
        torch.randn(3, requires_grad=True) * 2,
        torch.arange(3.0).as_subclass(Fragile),
    ],
    ids=["t", "step", "expand", "conj", "neg", "channels_last", "offset", "grad", "subclass"],
)
def test_tensors_of_any_kind(tensor: torch.Tensor) -> None:
    got = contents(Flattener(), {"before": torch.ones(3), "x": tensor, "z": torch.ones(2)})
    assert got["x"] == bits(tensor.resolve_conj().resolve_neg())
    assert got["z"] == bits(torch.ones(2))


UNSENDABLE: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1)]),
    "torch.jagged": lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "torch.sparse_csr": lambda: torch.ones(2, 4).to_sparse_csr(),
    "torch._mkldnn": lambda: torch.ones(2, 4).to_mkldnn(),
    "FakeTensor": lambda: FakeTensorMode().from_tensor(torch.ones(2, 4)),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Sparse .* tensor support:UserWarning")
@pytest.mark.parametrize("first", ["dict", "module", "td"])
@pytest.mark.parametrize("kind", UNSENDABLE)
def test_what_cannot_be_sent_is_refused_after_a_plan_too(kind: str, first: str) -> None:
    flattener, bad = Flattener(), UNSENDABLE[kind]()
    good: dict[str, Any] = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}
    plans = {"dict": good, "module": nn.Linear(4, 2), "td": TensorDict(good)}
    flattener.prepare(plans[first])
    why = "nested" if kind == "torch.jagged" else kind
    with pytest.raises(ConfigError, match=f"'weight' .*{why}"):
        flattener.prepare({**good, "weight": bad})
    assert contents(flattener, good)["weight"] == bits(good["weight"])


@pytest.mark.parametrize("threads", [None, 1, 2, 3])
def test_large_and_small_tensors_mixed(threads: int | None) -> None:
    sizes = [10, 300_000, 7, 1, 5_000_000, 262_144, 262_143, 0, 9]
    source = {str(i): filled(torch.uint8, (n,), seed=i) for i, n in enumerate(sizes)}
    flattener = Flattener()
    prepared = flattener.prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    flat.array[:] = 0xAA
    if threads is None:
        flattener.copy_into(prepared, flat)
    else:
        with CopyPool(threads) as pool:
            flattener.copy_into(prepared, flat, pool=pool)
    for view, tensor in zip(flat.views(prepared.layout), source.values(), strict=True):
        assert torch.equal(view, tensor)
    assert not any(flat.array[start:end].any() for start, end in prepared.layout.padding())


def test_a_known_source_keeps_its_plan_and_sends_new_values() -> None:
    model, flattener = Everything(1.0), Flattener()
    first = flattener.prepare(model)
    assert contents(flattener, model) == expected(model)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    assert flattener.prepare(model).layout is first.layout
    assert contents(flattener, model) == expected(model)


def test_plain_source_is_prepared_without_new_objects() -> None:
    model, flattener = nn.Linear(2, 2), Flattener()
    assert flattener.prepare(model) is flattener.prepare(model)
    with torch.inference_mode():
        assert flattener.prepare(model) is flattener.prepare(model)


def _replace_parameter(model: Everything) -> None:
    model.body[0].weight = nn.Parameter(torch.full((4, 3), 9.0))


def _replace_data(model: Everything) -> None:
    model.body[0].weight.data = torch.full((4, 3), 9.0)


def _other_shape(model: Everything) -> None:
    model.body[0].weight.data = torch.full((3, 4), 9.0)


def _same_memory_other_shape(model: Everything) -> None:
    model.body[0].weight.data = model.body[0].weight.data.view(2, 6)


def _cast(model: Everything) -> None:
    model.to(torch.float64)


def _half(model: Everything) -> None:
    model.body[2].to(torch.bfloat16)


def _replace_submodule(model: Everything) -> None:
    model.body[0] = nn.Linear(3, 4)


def _add_submodule(model: Everything) -> None:
    model.extra_layer = nn.Linear(2, 2)


def _remove_submodule(model: Everything) -> None:
    del model.body[2]


def _rename(model: Everything) -> None:
    model.renamed = model.frozen
    del model.frozen


def _tie(model: Everything) -> None:
    model.frozen = model.body[0].bias = nn.Parameter(torch.ones(4))


def _replace_buffer(model: Everything) -> None:
    model.kept = torch.full((2,), 9.0)


def _buffer_to_none(model: Everything) -> None:
    model.kept = None


def _parameter_from_none(model: Everything) -> None:
    model.none = nn.Parameter(torch.ones(1))


def _freeze(model: Everything) -> None:
    model.requires_grad_(False)


def _to_empty(model: Everything) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(5)


CHANGES: list[Callable[[Everything], None]] = [
    _replace_parameter,
    _replace_data,
    _other_shape,
    _same_memory_other_shape,
    _cast,
    _half,
    _replace_submodule,
    _add_submodule,
    _remove_submodule,
    _rename,
    _tie,
    _replace_buffer,
    _buffer_to_none,
    _parameter_from_none,
    _freeze,
    _to_empty,
]


@pytest.mark.parametrize("extra", [None, "steps", "tensor"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_the_module_are_seen(change: Callable[[Everything], None], extra: Any) -> None:
    state = {None: None, "steps": 3, "tensor": {"mean": torch.ones(2)}}[extra]
    model, flattener = Everything(1.0, state), Flattener()
    contents(flattener, model)
    change(model)
    for _ in range(2):  # the second time with the new plan
        got = contents(flattener, model)
        if extra == "tensor":
            assert got.pop("_extra_state.mean") == bits(torch.ones(2))
        assert got == expected(model)


def test_persistence_is_part_of_the_plan() -> None:
    model, flattener = Everything(1.0), Flattener("state_dict")
    assert "hidden" not in contents(flattener, model)
    model.register_buffer("hidden", model.hidden, persistent=True)
    assert "hidden" in contents(flattener, model)


def test_a_hook_that_appears_later_is_honoured() -> None:
    model, flattener = nn.Linear(2, 2), Flattener("state_dict")
    assert list(contents(flattener, model)) == ["weight", "bias"]

    def drop(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        del state["bias"]

    handle = model._register_state_dict_hook(drop)
    assert list(contents(flattener, model)) == ["weight"]
    handle.remove()
    assert list(contents(flattener, model)) == ["weight", "bias"]


def test_ties_that_dissolve_are_seen() -> None:
    model, flattener = Tied(), Flattener()
    assert list(contents(flattener, model)) == ["embed.weight"]
    model.head.weight = nn.Parameter(torch.zeros(5, 3))
    assert list(contents(flattener, model)) == ["embed.weight", "head.weight"]
    model.head.weight.data = model.embed.weight.data  # tied by memory, not by object
    flattener.release()
    assert list(contents(flattener, model)) == ["embed.weight"]
    model.head.weight.data = torch.zeros(5, 3)
    assert list(contents(flattener, model)) == ["embed.weight", "head.weight"]
    tensors = {"a": torch.ones(3)}
    tensors["b"] = tensors["a"]
    assert list(contents(flattener, tensors)) == ["a"]
    tensors["b"] = torch.zeros(3)
    assert contents(flattener, tensors) == {k: bits(v) for k, v in tensors.items()}


def test_mappings_and_tensordicts_are_read_anew() -> None:
    flattener = Flattener()
    first = flattener.prepare({"a": torch.ones(2), "b": {"c": torch.ones(1)}})
    for source in (
        {"a": torch.zeros(2), "b": {"c": torch.zeros(1)}},
        TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(1)}}),
        {"a": torch.zeros(2), "b.c": torch.zeros(1)},
    ):
        assert flattener.prepare(source).layout is first.layout
        assert contents(flattener, source)["a"] == bits(torch.zeros(2))
    changed = flattener.prepare({"a": torch.zeros(3), "b": {"c": torch.zeros(1)}})
    assert changed.layout is not first.layout


@pytest.mark.parametrize("of_module", [False, True], ids=["mapping", "module"])
@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view])
@pytest.mark.parametrize("size", [4, 200_000])
def test_a_conjugate_or_negative_view_of_known_memory_is_seen(
    size: int, view: Callable[[torch.Tensor], torch.Tensor], of_module: bool
) -> None:
    tensor = torch.randn(size, dtype=torch.complex64)
    module, flattener = nn.Module(), Flattener()
    module.w = nn.Parameter(tensor)

    def got(data: torch.Tensor) -> bytes:
        module.w.data = data
        return contents(flattener, module if of_module else {"w": data})["w"]

    for _ in range(3):
        assert got(tensor) == bits(tensor)
    for _ in range(3):
        assert got(view(tensor)) == bits(view(tensor).resolve_conj().resolve_neg())
    assert got(tensor) == bits(tensor)


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view, torch.Tensor.t])
def test_two_views_of_the_same_memory_that_were_prepared_before_either_was_copied(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor, flattener = torch.randn(3, 3, dtype=torch.complex64), Flattener()
    sources = [tensor, view(tensor)]
    prepared = [flattener.prepare({"w": source}) for source in sources]
    for source, each in zip(sources, prepared, strict=True):
        flat = FlatBuffer(each.layout.nbytes)
        flattener.copy_into(each, flat)
        assert torch.equal(flat.views(each.layout)[0], source)


def test_values_are_taken_when_prepared() -> None:
    model, flattener = Stateful({"steps": [1]}), Flattener()
    first = flattener.prepare(model)
    model.extra["steps"].append(2)
    second = flattener.prepare(model)
    assert first.values == {"_extra_state": {"steps": [1]}}
    assert second.values == {"_extra_state": {"steps": [1, 2]}}
    assert first.layout is second.layout


def test_a_bad_extra_state_that_appears_later_is_refused() -> None:
    model, flattener = Stateful(1), Flattener()
    flattener.prepare(model)
    model.extra = object()
    with pytest.raises(ConfigError, match="_extra_state"):
        flattener.prepare(model)


def test_a_model_that_moves_to_meta_is_refused() -> None:
    model, flattener = nn.Linear(2, 2), Flattener()
    flattener.prepare(model)
    model.to("meta")
    with pytest.raises(ConfigError, match="'weight' is on the meta device"):
        flattener.prepare(model)


def test_the_source_is_not_kept_alive_by_the_source_reference() -> None:
    flattener = Flattener()
    for fill in (1.0, 2.0, 3.0):
        model = Everything(fill)
        assert contents(flattener, model) == expected(model)
        del model


def test_snapshot_is_independent_of_the_source() -> None:
    model = nn.Linear(2, 2)
    layout, flat, _ = packed(model)
    before = bytes(flat.memoryview())
    with torch.no_grad():
        model.weight.add_(1)
    assert bytes(flat.memoryview()) == before
    assert layout.nbytes == len(before)


def test_optimizer_of_a_flipped_source_keeps_working() -> None:
    from aiosync.tensors import Target

    source, flattener = nn.Linear(2, 1), Flattener()
    layout, flat, _ = packed(nn.Linear(2, 1))
    optimizer = torch.optim.Adam(source.parameters(), lr=0.1)
    source(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    grad, state = source.weight.grad, optimizer.state[source.weight]
    Target(source).apply_(layout, flat, {}, copy=False)
    assert source.weight.grad is grad
    assert optimizer.state[source.weight] is state
    before = contents(flattener, source)
    optimizer.zero_grad()
    source(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    after = contents(flattener, source)
    assert before["weight"] != after["weight"] == bits(source.weight)


def test_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="extract_as must be"):
        Flattener("pickle")  # type: ignore[arg-type]
