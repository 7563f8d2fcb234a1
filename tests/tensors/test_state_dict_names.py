"""Modules whose ``state_dict()`` has other names than their attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from aiosync.errors import ManifestMismatch
from aiosync.tensors import Target
from tests.tensors._models import all_bits, packed


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
