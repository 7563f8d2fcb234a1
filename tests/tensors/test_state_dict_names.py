"""Modules whose ``state_dict()`` has other names than their attributes, or more than these."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.schemes.no_sync import NoWeightSyncScheme
from aiosync.strategy import WeightStrategy
from aiosync.tensors import Flattener, Target, collect, gather_weights
from tests.tensors._models import Stateful, all_bits, packed


class Renaming(nn.Module):
    """A state_dict hook gives one parameter another name, and adds what is asked for."""

    def __init__(self, added: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.randn(2))
        self.added = added
        self.calls = 0
        self._register_state_dict_hook(Renaming._rename)

    def _rename(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        self.calls += 1
        state[prefix + "kernel"] = state.pop(prefix + "weight")
        if self.added is not None:
            state[prefix + "added"] = self.added


class Overriding(nn.Module):
    """Gives its inner module's state_dict for its own, and not the tensors themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def state_dict(self) -> Any:
        return {f"net/{name}": tensor for name, tensor in self.inner.state_dict().items()}


def _wrapped() -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.BatchNorm1d(2))


def _tied() -> nn.Module:
    model = nn.ModuleList([Renaming(), Renaming()])
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("copy", [False, True], ids=["flip", "copy"])
@pytest.mark.parametrize("build", [Renaming, Overriding, _wrapped, _tied])
@pytest.mark.parametrize("extract_as", ["state_dict", "tensordict"])
def test_the_names_of_the_own_state_dict_are_accepted(
    build: Any, copy: bool, strict: bool, extract_as: str
) -> None:
    source, target = build(), build()
    receiver = Target(target, strict=strict)
    for _ in range(2):
        with torch.no_grad():
            for tensor in source.parameters():
                tensor.normal_()
            for tensor in source.buffers():
                tensor.add_(1)
        layout, flat, values = packed(source, extract_as)
        receiver.check(layout, values)
        receiver.apply_(layout, flat, values, copy=copy)
        assert all_bits(target) == all_bits(source)


def test_the_state_dict_is_only_asked_for_names_that_are_unknown() -> None:
    source, target = Renaming(), Renaming()
    receiver = Target(target)
    layout, flat, values = packed(source)
    receiver.apply_(layout, flat, values, copy=True)
    assert target.calls == 0
    layout, flat, values = packed(source, "state_dict")
    for _ in range(3):
        receiver.apply_(layout, flat, values, copy=True)
    assert target.calls == 1


def test_a_tensor_that_a_hook_adds_is_refused() -> None:
    source, target = Renaming(torch.ones(1)), Renaming(torch.ones(1))
    before = all_bits(target)
    layout, flat, values = packed(source, "state_dict")
    with pytest.raises(ManifestMismatch) as caught:
        Target(target).apply_(layout, flat, values, copy=True)
    assert caught.value.unexpected == ("added",)
    assert not caught.value.missing
    assert all_bits(target) == before
    Target(target, strict=False).apply_(layout, flat, values, copy=True)
    assert all_bits(target) == all_bits(source)


def test_a_value_that_a_hook_adds_has_to_be_the_same_here() -> None:
    source, target = Renaming([1, 2]), Renaming([1, 2])
    receiver = Target(target)
    layout, flat, values = packed(source, "state_dict")
    receiver.apply_(layout, flat, values, copy=True)
    assert all_bits(target) == all_bits(source)
    source.added = [1, 3]  # nothing could put that into the target
    layout, flat, values = packed(source, "state_dict")
    for act in (receiver.check, lambda *args: receiver.apply_(layout, flat, values, copy=True)):
        with pytest.raises(ManifestMismatch) as caught:
            act(layout, values)
        assert caught.value.unexpected == ("added",)


def test_a_state_dict_that_cannot_travel_has_no_names() -> None:
    source, target = Renaming(), Renaming(object())
    layout, flat, values = packed(source, "state_dict")
    with pytest.raises(ManifestMismatch) as caught:
        Target(target).apply_(layout, flat, values, copy=True)
    assert caught.value.missing == ("weight",)
    assert caught.value.unexpected == ("kernel",)


class Saving(nn.Module):
    """Keeps a tensor that only its state_dict shows."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.full((2,), fill))
        self.scale = torch.full((3,), fill)
        self.note: Any = ["note", fill]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale if keep_vars else self.scale.detach()
        destination[prefix + "note"] = self.note

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.note = state_dict.pop(prefix + "note")
        self.scale = state_dict.pop(prefix + "scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Harmless(nn.Module):
    """Saves its own tensors in forms of its own, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6, 2))
        self.fused = nn.Parameter(torch.randn(4))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.child = Stateful({"a": torch.ones(1)})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "hidden"] = self.hidden.clone()
        destination[prefix + "v"] = destination.pop(prefix + "qkv")[4:]
        destination[prefix + "bias"] = None
        destination[prefix + "one"] = destination.pop(prefix + "fused")[:2] * 2


def _quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})


def test_what_only_a_state_dict_has_is_refused_by_name() -> None:
    model = nn.Sequential(Saving())
    name, kind = "'0.scale'", "Saving"
    ways = [collect, Flattener().prepare, WeightStrategy().extract_weights, gather_weights]
    for way in ways:
        with pytest.raises(ConfigError, match=rf"{name} \(of {kind}\); use strategy=.state_dict"):
            way(model)
    assert collect(model, extract_as="state_dict").leaves


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_module_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'0\._packed_params\._packed_params'.*either: .*quantised"
    ):
        collect(_quantised())


@pytest.mark.parametrize(
    "build",
    [
        Harmless,
        Renaming,
        Overriding,
        _wrapped,
        _tied,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
        lambda: nn.LSTM(2, 2),
        lambda: nn.DataParallel(nn.Linear(2, 2)),
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        lambda: torch.ao.quantization.FakeQuantize(),
        lambda: TensorDictParams(TensorDict({"a": torch.ones(2)})),
        lambda: TensorDictModule(nn.Linear(2, 2), in_keys=["a"], out_keys=["b"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_modules_are_not_refused(build: Any) -> None:
    model = nn.Sequential(build())
    assert collect(model).leaves


def test_a_value_that_only_a_state_dict_has_is_no_weight() -> None:
    class Noting(Saving):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            del destination[prefix + "scale"]

    source, target = Noting(1.0), Noting(2.0)
    layout, flat, values = packed(source, "tensordict")
    Target(target).apply_(layout, flat, values, copy=False)
    assert torch.equal(target.weight, source.weight)
    assert target.note == ["note", 2.0]


def test_a_scheme_that_sends_nothing_refuses_only_who_needs_the_weights() -> None:
    scheme = NoWeightSyncScheme()
    scheme.carry(Saving())
    copied = pickle.loads(pickle.dumps(scheme))
    copied._unpack(Saving())
    with pytest.raises(
        ConfigError, match="on the meta device, and these weights are neither .*'scale'"
    ):
        copied._unpack(Saving().to("meta"))


def test_the_check_is_made_once() -> None:
    model, calls = Harmless(), []
    kept = Harmless._save_to_state_dict

    class Counting(Harmless):
        def _save_to_state_dict(self, *args: Any) -> None:
            calls.append(args)
            kept(self, *args)

    model = Counting()
    flattener = Flattener()
    for _ in range(3):
        flattener.prepare(model)
    assert len(calls) == 1


@pytest.mark.parametrize("copy", [False, True], ids=["flip", "copy"])
def test_a_module_loads_what_it_saves(copy: bool) -> None:
    shared = Saving(1.0)
    source, target = nn.ModuleList([shared, shared]), nn.ModuleList([Saving()])
    target.append(target[0])
    receiver = Target(target)
    for number in (1.0, 2.0):
        source[0].scale.fill_(number)
        source[0].note = ("note", number)
        layout, flat, values = packed(source, "state_dict")
        receiver.check(layout, values)
        receiver.apply_(layout, flat, values, copy=copy)
        assert all_bits(target) == all_bits(source)
        assert torch.equal(target[0].scale, source[0].scale)
        assert target[0].note == source[0].note
        assert not receiver.is_quick(layout, values)
    flat.array[:] = 0
    assert target[0].scale.tolist() == [2.0] * 3


def test_what_a_module_does_not_load_is_no_success() -> None:
    class Refusing(Saving):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            if state_dict[prefix + "note"][1] == 1.0:  # keeps the old ones
                state_dict = dict(state_dict)
                nn.Module._load_from_state_dict(self, state_dict, prefix, *args)
            else:
                super()._load_from_state_dict(state_dict, prefix, *args)

    source, target = Saving(1.0), Refusing(5.0)
    before, scale = all_bits(target), target.scale
    layout, flat, values = packed(source, "state_dict")
    with pytest.raises(RuntimeError, match="a Refusing refused its state: 'scale' is not loaded"):
        Target(target).apply_(layout, flat, values, copy=False)
    assert all_bits(target) == before
    assert torch.equal(target.scale, scale)
    assert target.note == ["note", 5.0]


def test_one_module_cannot_load_two_tensors() -> None:
    source, target = nn.ModuleList([Saving(1.0), Saving(2.0)]), nn.ModuleList([Saving()])
    target.append(target[0])
    layout, _, values = packed(source, "state_dict")
    with pytest.raises(ManifestMismatch, match=r"1\.scale: is 0\.scale here, but was sent on its"):
        Target(target).check(layout, values)


def test_what_a_module_saves_has_to_fit() -> None:
    source, target = Saving(1.0), Saving()
    source.scale = torch.ones(2)
    layout, flat, values = packed(source, "state_dict")
    with pytest.raises(ManifestMismatch) as caught:
        Target(target).apply_(layout, flat, values, copy=True)
    assert caught.value.mismatched == {"scale": "expected shape (3,), got (2,)"}
    state = {name: each for name, each in target.state_dict().items() if name != "scale"}
    with pytest.raises(ManifestMismatch) as caught:
        WeightStrategy().apply_weights(target, state)
    assert caught.value.missing == ("scale",)
    assert target.scale.tolist() == [0.0] * 3
