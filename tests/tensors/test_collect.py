"""What of a model is found, under which names, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from aiosync.errors import ConfigError
from aiosync.tensors import collect
from tests.tensors._models import Everything, Stateful, Tied


def names(source: Any, extract_as: Any = "tensordict") -> list[str]:
    return [leaf.name for leaf in collect(source, extract_as=extract_as).leaves]


def test_everything_of_a_module_is_found_once() -> None:
    model = Everything(1.0, extra={"steps": 3})
    leaves = collect(model)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    assert sorted(leaf.name for leaf in leaves.leaves) == sorted(expected)
    assert all(leaf.tensor is expected[leaf.name] for leaf in leaves.leaves)
    assert "body.1.num_batches_tracked" in expected
    assert leaves.values == {"_extra_state": {"steps": 3}, "child._extra_state": {"steps": 3}}


def test_kinds() -> None:
    kinds = {leaf.name: leaf.kind for leaf in collect(nn.BatchNorm1d(2)).leaves}
    assert kinds == {
        "weight": "param",
        "bias": "param",
        "running_mean": "buffer",
        "running_var": "buffer",
        "num_batches_tracked": "buffer",
    }


def test_state_dict_form_is_what_state_dict_has() -> None:
    model = Everything(1.0, extra=7)
    leaves = collect(model, extract_as="state_dict")
    found = [leaf.name for leaf in leaves.leaves]
    assert sorted([*found, *leaves.values]) == sorted(model.state_dict())
    assert "hidden" not in found


def test_state_dict_hooks_are_honoured() -> None:
    model = nn.Linear(2, 2)

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state["renamed"] = state.pop("bias")

    model._register_state_dict_hook(rename)
    assert names(model, "state_dict") == ["weight", "renamed"]
    assert names(model) == ["weight", "bias"]


def test_tied_by_object_has_aliases() -> None:
    (leaf,) = collect(Tied()).leaves
    assert (leaf.name, leaf.aliases) == ("embed.weight", ("head.weight",))


def test_tied_by_storage_has_aliases() -> None:
    for source in (Tied().state_dict(), TensorDict.from_module(Tied())):
        (leaf,) = collect(source).leaves
        assert {leaf.name, *leaf.aliases} == {"embed.weight", "head.weight"}


def test_a_shared_submodule_is_tied() -> None:
    layer = nn.Linear(2, 2)
    leaves = collect(nn.ModuleDict({"a": layer, "b": layer})).leaves
    assert [(leaf.name, leaf.aliases) for leaf in leaves] == [
        ("a.weight", ("b.weight",)),
        ("a.bias", ("b.bias",)),
    ]


def test_different_views_of_one_storage_are_not_tied() -> None:
    base = torch.arange(8.0, dtype=torch.float32)
    source = {
        "whole": base,
        "half": base[:4],
        "matrix": base.view(2, 4),
        "ints": base.view(torch.int32),
        "square": base[:4].view(2, 2),
        "turned": base[:4].view(2, 2).t(),
        "empty": base[:0],
        "empty_too": base[:0],
    }
    assert all(not leaf.aliases for leaf in collect(source).leaves)


def test_a_conjugate_is_not_its_original() -> None:
    base = torch.randn(3, dtype=torch.complex64)
    assert all(not leaf.aliases for leaf in collect({"a": base, "b": base.conj()}).leaves)


@pytest.mark.parametrize(
    "source",
    [
        {"a.b": torch.ones(2), "a.c": torch.zeros(3)},
        {"a": {"b": torch.ones(2), "c": torch.zeros(3)}},
        OrderedDict(a=OrderedDict(b=torch.ones(2), c=torch.zeros(3))),
        TensorDict({"a": {"b": torch.ones(2), "c": torch.zeros(3)}}),
        TensorDict({"a.b": torch.ones(2), "a.c": torch.zeros(3)}),
        {"a": TensorDict({"b": torch.ones(2), "c": torch.zeros(3)})},
        TensorDictParams(TensorDict({"a": {"b": torch.ones(2), "c": torch.zeros(3)}})),
        nn.ModuleDict(
            {"a": TensorDictParams(TensorDict({"b": torch.ones(2), "c": torch.ones(3)}))}
        ),
    ],
)
def test_nested_and_dotted_names_are_the_same(source: Any) -> None:
    assert names(source) == ["a.b", "a.c"]


def test_containers_and_tensordict_modules() -> None:
    model = nn.Module()
    model.plist = nn.ParameterList([torch.ones(1), torch.ones(2)])
    model.pdict = nn.ParameterDict({"x": torch.ones(1)})
    model.tdm = TensorDictModule(nn.Linear(1, 1), in_keys=["i"], out_keys=["o"])
    assert names(model) == [
        "plist.0",
        "plist.1",
        "pdict.x",
        "tdm.module.weight",
        "tdm.module.bias",
    ]


def test_non_tensor_values_of_containers() -> None:
    td = TensorDict({"w": torch.ones(1)})
    td.set_non_tensor("note", {"a": [1, "x", None]})
    assert collect(td).values == {"note": {"a": [1, "x", None]}}
    assert collect({"w": torch.ones(1), "sub": {"step": 4}}).values == {"sub.step": 4}


def test_wrappers_that_only_add_a_prefix_are_looked_through() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert names(compiled) == names(nn.DataParallel(model)) == ["weight", "bias"]
    assert names(nn.Sequential(compiled)) == ["0.weight", "0.bias"]
    assert names(compiled.state_dict()) == ["weight", "bias"]


def test_extra_state_of_tensors() -> None:
    model = Stateful({"mean": torch.ones(2), "steps": (1, [torch.zeros(1)])})
    leaves = collect(model)
    assert [leaf.name for leaf in leaves.leaves] == [
        "_extra_state.mean",
        "_extra_state.steps.1.0",
    ]
    bare = collect(nn.Sequential(Stateful(torch.ones(2))))
    assert [leaf.name for leaf in bare.leaves] == ["0._extra_state"]
    assert bare.values == {}


def test_root_extra_state_of_a_tensordict() -> None:
    td = TensorDict({"w": torch.ones(1)})
    td.set_non_tensor("__extra_state__", {"steps": 1})
    assert collect(td).values == {"_extra_state": {"steps": 1}}
    td = TensorDict({"w": torch.ones(1), "__extra_state__": {"a": {"b": torch.ones(1)}}})
    leaves = collect(td)
    assert [leaf.name for leaf in leaves.leaves] == ["w", "_extra_state.a.b"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (object(), "builtins.object"),
        ({"x": {1, 2}}, "builtins.set"),
        (2**64, "64 bits"),
        ({"x": lambda: None}, "function"),
        ({(1, 2): 3}, "key"),
    ],
)
def test_extra_state_that_cannot_travel_is_named(bad: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"child\._extra_state.*{why}"):
        collect(nn.ModuleDict({"child": Stateful(bad)}))


def test_lazy_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'0\.weight' is not initialised.*'0\.bias'"):
        collect(nn.Sequential(nn.LazyLinear(2)))


def test_what_cannot_be_sent_is_named_all_at_once() -> None:
    source = {
        "meta": torch.empty(2, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "fine": torch.ones(1),
    }
    with pytest.raises(ConfigError) as caught:
        collect(source)
    text = str(caught.value)
    assert "'meta' is on the meta device" in text
    assert "'sparse' has the layout torch.sparse_coo" in text
    assert "fine" not in text


def test_a_fake_tensor_is_refused() -> None:
    with FakeTensorMode():
        model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="'weight' is a FakeTensor: it has no values"):
        collect(model)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a\.b' occurs twice"):
        collect({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})


def test_keys_that_are_no_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match="key 3"):
        collect({3: torch.ones(1)})  # type: ignore[dict-item]


@pytest.mark.parametrize("source", [None, 3, [torch.ones(1)], torch.ones(1), "policy"])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"supported: torch\.nn\.Module, TensorDict"):
        collect(source)


def test_a_module_inside_itself_is_refused() -> None:
    model = nn.Module()
    model.child = nn.Module()
    model.child.parent = model
    with pytest.raises(ConfigError, match="contains itself"):
        collect(model)


def test_nothing_to_send() -> None:
    assert collect(nn.ReLU()).leaves == ()
    assert collect({}).leaves == ()
