"""Modules whose ``state_dict()`` has other names than their attributes, or more than these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import nn

import aiosync
from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors import Flattener, Target, collect
from tests.tensors._models import all_bits, packed


class Renaming(nn.Module):
    """A state_dict hook gives one parameter another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_state_dict_post_hook(Renaming.rename)

    def rename(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight")


class Saving(nn.Module):
    """Keeps a tensor that only its state_dict shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.scale = torch.ones(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale


def test_names_that_a_hook_makes_are_sent_and_not_known_by_targets() -> None:
    source, target = Renaming(), Renaming()
    layout, flat, values = packed(source, "state_dict")
    before = all_bits(target)
    with pytest.raises(ManifestMismatch) as caught:
        Target(target).apply_(layout, flat, values, copy=True)
    assert (caught.value.missing, caught.value.unexpected) == (("weight",), ("kernel",))
    assert all_bits(target) == before
    plain = {"kernel": torch.zeros(3)}
    Target(plain).apply_(layout, flat, values, copy=True)
    assert torch.equal(plain["kernel"], source.weight)
    Target(target).apply_(*packed(source, "tensordict"), copy=True)
    assert all_bits(target) == all_bits(source)


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


def test_it_can_be_sent_but_a_module_does_not_take_it() -> None:
    source, target = Saving(), Saving()
    layout, flat, values = packed(source, "state_dict")
    with pytest.raises(ManifestMismatch) as caught:
        Target(target).apply_(layout, flat, values, copy=True)
    assert caught.value.unexpected == ("scale",)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_module_is_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
    with pytest.raises(ConfigError, match=r"'0\._packed_params\._packed_params'"):
        collect(model)


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
