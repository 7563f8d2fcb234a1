"""Collecting weights: the tensors of a model and their names, gathering them, and refusals."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictParams, tensorclass
from tensordict.nn import TensorDictModule
from torch import nn

import aiosync
from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors import Flattener, Target, collect, gather_weights
from tests.tensors._models import Everything, Labelled, Stateful, Tied, all_bits, packed


def names(source: Any, extract_as: Any = "tensordict") -> list[str]:
    return [leaf.name for leaf in collect(source, extract_as=extract_as).leaves]


def test_state_dict_form_is_what_state_dict_has() -> None:
    model = Everything(1.0, extra=7)
    leaves = collect(model, extract_as="state_dict")
    assert {*leaves.values, *(leaf.name for leaf in leaves.leaves)} == model.state_dict().keys()


@pytest.mark.parametrize(
    "source", [Tied(), Tied().state_dict(), TensorDict.from_module(Tied())], ids=type
)
def test_tied_tensors_have_aliases(source: Any) -> None:
    (leaf,) = collect(source).leaves
    assert sorted([leaf.name, *leaf.aliases]) == ["embed.weight", "head.weight"]


def test_different_views_of_one_storage_are_not_tied() -> None:
    base = torch.arange(8.0, dtype=torch.float32)
    wavy = torch.randn(3, dtype=torch.complex64)
    source = {
        "whole": base,
        "half": base[:4],
        "matrix": base.view(2, 4),
        "ints": base.view(torch.int32),
        "square": base[:4].view(2, 2),
        "turned": base[:4].view(2, 2).t(),
        "empty": base[:0],
        "empty_too": base[:0],
        "complex": wavy,
        "conjugate": wavy.conj(),
    }
    assert all(not leaf.aliases for leaf in collect(source).leaves)


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


@pytest.mark.parametrize(
    "stack",
    [
        NonTensorStack("x", "y"),
        NonTensorStack("x", "x"),
        NonTensorStack(NonTensorData("a", batch_size=[2]), NonTensorStack("b", "c")),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_stack_of_values_is_refused_by_name(stack: Any, inside: bool) -> None:
    source = TensorDict({"a": torch.ones(2), "note": stack}, batch_size=[2])
    with pytest.raises(ConfigError, match=r"note' cannot travel: it is a .*NonTensorStack"):
        collect({"in": source} if inside else source)


def test_wrappers_that_only_add_a_prefix_are_looked_through() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert names(compiled) == names(nn.DataParallel(model)) == ["weight", "bias"]
    assert names(nn.Sequential(compiled)) == ["0.weight", "0.bias"]
    assert names(compiled.state_dict()) == ["weight", "bias"]


class Holder(nn.Module):
    """A user's module whose children have the names that wrappers of torch give to theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self.pre_orig_mod = nn.Linear(2, 2, bias=False)


def test_only_whole_components_of_known_wrappers_go() -> None:
    assert names(Holder()) == [
        "module.weight",
        "module.bias",
        "_orig_mod.weight",
        "_orig_mod.bias",
        "pre_orig_mod.weight",
    ]
    weights = {"pre_orig_mod.weight": torch.ones(1), "a._orig_mod": torch.zeros(1)}
    assert names(weights) == ["pre_orig_mod.weight", "a._orig_mod"]
    assert names(TensorDictModule(nn.Linear(1, 1), in_keys=["a"], out_keys=["b"])) == [
        "module.weight",
        "module.bias",
    ]


def test_root_extra_state_of_a_tensordict() -> None:
    td = TensorDict({"w": torch.ones(1), "__extra_state__": {"a": {"b": torch.ones(1)}}})
    assert names(td) == ["w", "_extra_state.a.b"]


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


class Stats(NamedTuple):
    mean: float
    count: int


class Words(dict[str, int]):
    """A user's class, which another process does not know by its name alone."""


@tensorclass
class Moments:
    average: torch.Tensor


SUBCLASSES: list[Any] = [
    Stats(1.5, 3),
    Words(a=1),
    defaultdict(lambda: 0),
    type("Numbers", (list,), {})([1]),
    type("Ordered", (OrderedDict,), {})(a=1),
    MappingProxyType({"a": 1}),
    IntEnum("Level", "low")(1),
    nn.Parameter(torch.ones(1)),
    torch.ones(1).as_subclass(Labelled),
    TensorDictParams(TensorDict({"a": torch.ones(1)})),
    Moments(average=torch.ones(1)),
]


@pytest.mark.parametrize("bad", SUBCLASSES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("inside", [False, True])
def test_extra_state_of_a_subclass_is_named_and_never_turned_into_its_base(
    bad: Any, inside: bool
) -> None:
    kind = rf"it is a [\w.]*\b{type(bad).__name__};"
    with pytest.raises(ConfigError, match=rf"child\._extra_state.*{kind}.*no subclass"):
        collect(nn.ModuleDict({"child": Stateful({"x": [bad]} if inside else bad)}))


def test_what_cannot_be_sent_is_named_all_at_once() -> None:
    meta, sparse = torch.empty(2, device="meta"), torch.eye(2).to_sparse()
    text = "sent: 'meta' is a Tensor on the meta .*'sparse' is a .* cpu device .torch.sparse_coo"
    with pytest.raises(ConfigError, match=text):
        collect({"fine": torch.ones(1), "meta": meta, "sparse": sparse})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            nn.Sequential(nn.LazyLinear(2)),
            r"'0\.weight' is a Uninit.*'0\.bias' is a Uninit.*run a lazy module once",
        ),
        ({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, r"'a\.b' occurs twice"),
        ({3: torch.ones(1)}, "key 3"),
        *(
            (each, r"supported: torch\.nn\.Module, TensorDict")
            for each in (None, 3, [torch.ones(1)], torch.ones(1), "policy")
        ),
    ],
)
def test_other_sources_are_refused(source: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        collect(source)


# -- modules whose state_dict has other names than their attributes -------------------------------


class Renaming(nn.Module):
    """A module in which a state_dict hook gives one parameter another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_state_dict_post_hook(Renaming.rename)

    def rename(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight")


class Saving(nn.Module):
    """A module with a tensor that only its state_dict shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.scale = torch.ones(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale


def test_names_that_a_hook_makes_are_sent_and_not_known_by_targets() -> None:
    target = Renaming()
    before = all_bits(target)
    with pytest.raises(ManifestMismatch) as caught:
        Target(target).apply_(*packed(Renaming(), "state_dict"), copy=True)
    assert (caught.value.missing, caught.value.unexpected) == (("weight",), ("kernel",))
    assert all_bits(target) == before


@pytest.mark.parametrize(
    "way",
    [
        collect,
        Flattener().prepare,
        aiosync.WeightStrategy().extract_weights,
        aiosync.gather_weights,
    ],
)
def test_what_only_a_state_dict_has_is_refused_by_name(way: Any) -> None:
    with pytest.raises(ConfigError, match=r"'0\.scale'; give .*load="):
        way(nn.Sequential(Saving()))


@pytest.mark.parametrize(
    "build",
    [
        Renaming,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
        lambda: nn.LSTM(2, 2),
        lambda: nn.DataParallel(nn.Linear(2, 2)),
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        torch.ao.quantization.FakeQuantize,
        lambda: TensorDictParams(TensorDict({"a": torch.ones(2)})),
        lambda: TensorDictModule(nn.Linear(2, 2), in_keys=["a"], out_keys=["b"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_modules_are_not_refused(build: Any) -> None:
    assert collect(nn.Sequential(build())).leaves


# -- gathering weights that are not distributed ---------------------------------------------------


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_a_module_gives_its_live_tensors(extract_as: Any) -> None:
    model = Everything(1.0, {"text": "x"})
    found = gather_weights(model, extract_as=extract_as)
    names = {leaf.name for leaf in collect(model, extract_as=extract_as).leaves}
    assert {name for name, value in found.items() if isinstance(value, torch.Tensor)} == names
    assert found["body.0.weight"].data_ptr() == model.body[0].weight.data_ptr()
    assert found["_extra_state"] == found["child._extra_state"] == {"text": "x"}


@pytest.mark.parametrize("source", [3, None, [torch.ones(1)]])
def test_what_cannot_be_gathered(source: Any) -> None:
    with pytest.raises(ConfigError, match="has no weights"):
        gather_weights(source)
    with pytest.raises(ConfigError, match="extract_as"):
        gather_weights(nn.Linear(1, 1), extract_as="other")  # type: ignore[arg-type]  # is refused


@pytest.mark.parametrize("timeout", [math.nan, 0, -1.0, "5", True])
def test_what_is_no_time_to_wait_for_ranks(timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout must be positive seconds or None"):
        gather_weights(nn.Linear(1, 1), timeout=timeout)


@pytest.mark.slow
def test_nothing_of_torch_distributed_is_loaded_for_it(fresh: Any) -> None:
    done = fresh.script(
        "import sys, torch; from aiosync.tensors import *; "
        "gather_weights(torch.nn.Linear(2, 2)); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
